"""A bound on the time that a rule's own patterns and templates may take.

What they are applied to is hostile: a node's reason, a job's name. A pattern that
takes ages on the wrong text must not hold up the events of other rules.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from steward.automation.errors import AutomationError


class TookTooLong(AutomationError):
    """Something was ended because it took longer than it may."""


class _Alarm(BaseException):
    """Raised in the midst of it; not an Exception, so that templates do not catch it."""


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """End what is in the block after so many seconds.

    Alarms reach the main thread alone, so in others there is no bound; rules are decided in
    the main thread of their process.

    Args:
        limit_s: The most seconds.
        what: What is being done, for the message.

    Raises:
        TookTooLong: It was ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if not is_over:
            raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            yield
        finally:
            # One that rings from here on finds it over.
            is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Alarm:
        raise TookTooLong(f"{what} took longer than {limit_s:g} s", what) from None
    finally:
        signal.signal(signal.SIGALRM, before)
