"""Calls a plugin's hooks so that what goes wrong in them harms the plugin alone.

A hook may raise anything, ask the process to end, or never return. The last is
ended by an alarm, which interrupts Python code and system calls; a hook that
hangs beyond that (in a library's C code) is ended by the supervisor, which
sees that the process does not beat, together with the process.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from steward.core.errors import Unavailable
from steward.extensions.jobacct_plugins.api import JobAcctPlugin
from steward.extensions.jobacct_plugins.state import Failure

log = logging.getLogger(__name__)

TIME_OUT: Final = "time-out"
_AGAIN_S: Final = 1.0
_LONGEST_TEXT: Final = 500


class HookTimeout(BaseException):
    """A hook took too long; not an Exception, so that hooks do not catch it by mistake."""


class Guard:
    """Calls the hooks of one plugin.

    Args:
        plugin_type: Which plugin, for the log.
        plugin: The plugin.
        limit_s: How long a hook may take, in seconds.
        beat: Called before each hook, to show that the process lives.
    """

    def __init__(
        self,
        plugin_type: str,
        plugin: JobAcctPlugin,
        limit_s: float,
        beat: Callable[[], None],
    ) -> None:
        self._type = plugin_type
        self._plugin = plugin
        self._limit_s = limit_s
        self._beat = beat
        self._is_limited = False
        self._can_limit = threading.current_thread() is threading.main_thread()
        self._counted: dict[tuple[str, str], Failure] = {}
        self._told: set[tuple[str, str]] = set()
        if self._can_limit:
            signal.signal(signal.SIGALRM, self._on_alarm)

    def call(self, hook: str, *args: Any, limit_s: float = 0.0) -> bool:
        """Call a hook; whether it came back as it should.

        Args:
            hook: Its name.
            args: What it is given.
            limit_s: How long it may take, in seconds; as usual if 0.

        Raises:
            Unavailable: What it needs is away: it is to be called again later.
        """
        self._beat()
        try:
            with self._limited(limit_s or self._limit_s):
                getattr(self._plugin, hook)(*args)
        except Unavailable:
            raise
        except HookTimeout:
            self.failed(hook, TIME_OUT, f"took longer than {limit_s or self._limit_s:g} s")
        except BaseException as error:
            # SystemExit and KeyboardInterrupt, too: a hook cannot end what it does not own.
            self.failed(hook, type(error).__name__, str(error), error)
        else:
            return True
        return False

    def failed(self, hook: str, kind: str, text: str, error: BaseException | None = None) -> None:
        """Count an error; the first of its kind is logged."""
        now = int(time.time())
        key = (hook, kind)
        known = self._counted.get(key)
        self._counted[key] = Failure(
            hook,
            kind,
            known.count + 1 if known else 1,
            known.first_s if known else now,
            now,
            text[:_LONGEST_TEXT],
        )
        if key not in self._told:
            self._told.add(key)
            log.error(
                "%s: %s failed (%s: %s); that is logged once, 'steward accounting plugins' "
                "counts it",
                self._type,
                hook,
                kind,
                text[:_LONGEST_TEXT],
                exc_info=error,
            )

    def counted(self) -> list[Failure]:
        """What went wrong since the last call."""
        counted, self._counted = list(self._counted.values()), {}
        return counted

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For the length of our own work within a hook, the hook's time stands still."""
        if not self._is_limited:
            yield
            return
        self._is_limited = False
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            self._beat()
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001), _AGAIN_S)
            self._is_limited = True

    @contextmanager
    def _limited(self, limit_s: float) -> Iterator[None]:
        if not self._can_limit:
            yield
            return
        self._is_limited = True
        # Again and again: a hook may have caught the first one.
        signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
        try:
            yield
        finally:
            self._is_limited = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_alarm(self, *_: object) -> None:
        if self._is_limited:
            raise HookTimeout
