"""Consumer ``accounting.plugins.NAME``: calls one third-party plugin for events, in a process.

:class:`PluginConsumer` starts the plugin in ``tick`` (its init hooks), calls its hooks for events
in ``apply`` through ``hooks.HookCaller``, and keeps its cursor in ``state.PluginState``.

Each plugin has a process of its own. Hooks are called at least once: a process that ends in the
middle of a batch gets the batch again, event by event, and skips an event that has ended it three
times. The daemon and other plugins are unaffected.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer
from steward.core.errors import Unavailable
from steward.core.events import (
    CONTROLLER_STATE,
    JOBS_IMPORTED,
    PLUGIN_MESSAGE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_LAUNCH,
    STEP_USAGE,
    Event,
)
from steward.core.waits import Stop
from steward.extensions.jobacct_plugins.api import JobAcctPlugin, PluginError
from steward.extensions.jobacct_plugins.hooks import HookCaller, HookGuard, build_init_calls
from steward.extensions.jobacct_plugins.messages import MessageSender
from steward.extensions.jobacct_plugins.registry import load_plugin_class
from steward.extensions.jobacct_plugins.state import PluginState, plugin_state_path
from steward.jobs.line_sources import locate_job_log

log = logging.getLogger(__name__)

_MAX_TRIES: Final = 3
"""Tries of an event that ends the process, before it is skipped."""
_FINI_S: Final = 3.0
"""Time limit of the fini hook, in seconds."""
_BATCH_EVENTS: Final = 200
"""Most events of one batch."""
_HOOK_KINDS: Final = {
    "slurmctld_jobacct_init": {CONTROLLER_STATE},
    "slurmd_jobacct_init": {CONTROLLER_STATE},
    "slurmctld_jobacct_job_start": {RUN_START, JOBS_IMPORTED},
    "slurmctld_jobacct_job_complete": {RUN_END, JOBS_IMPORTED},
    "slurmctld_jobacct_job_suspend": {RUN_SUSPEND},
    "slurm_jobacct_process_message": {PLUGIN_MESSAGE},
    "slurmd_jobacct_jobstep_launched": {STEP_LAUNCH, STEP_USAGE},
    "slurmd_jobacct_smgr": {STEP_LAUNCH, STEP_USAGE},
    "slurmd_jobacct_task_exit": {STEP_USAGE},
    "slurmd_jobacct_jobstep_terminated": {STEP_LAUNCH, STEP_USAGE},
}
"""Kinds of events that each hook is called for."""


class PluginUnavailable(Unavailable):
    """Plugin that cannot be started now."""


class PluginHost(msgspec.Struct, frozen=True, kw_only=True):
    """Facilities of the process that runs a plugin.

    Attributes:
        append: Appends events to the journal once, or raises Unavailable.
        stop: Ends every wait.
        beat: Heartbeat of the process.
    """

    append: Append
    stop: Stop
    beat: Callable[[], None]


class PluginConsumer(DatabaseConsumer):
    """Consumer that feeds one plugin; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        plugin_type: ``jobacct/NAME``.
        host: Facilities of the process.

    Raises:
        SqliteError, SqliteUnavailable: Its database is unusable.
    """

    def __init__(self, settings: Settings, plugin_type: str, host: PluginHost) -> None:
        self.name = consumer_name(plugin_type)
        self.kinds = frozenset().union(*_HOOK_KINDS.values())
        self._type = plugin_type
        self._settings = settings.accounting
        self._state_dir = settings.state_dir
        self._location = locate_job_log(settings)
        self._host = host
        self._state = PluginState(plugin_state_path(settings.state_dir, plugin_type))
        super().__init__(self._state.database)
        # After a crash, take events singly for as many as the fatal batch may have had.
        self._single_batches = _BATCH_EVENTS if self._state.was_interrupted() else 0
        self.batch_events = 1 if self._single_batches else _BATCH_EVENTS
        self._caller: HookCaller | None = None
        self._guard: HookGuard | None = None
        self._done_ids: set[int] = set()

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's shape
        """Start the plugin, if it has not started yet.

        Raises:
            PluginUnavailable: It cannot be started now.
        """
        if self._caller is None:
            try:
                self._start(load_plugin_class(self._type)())
            except PluginError as error:
                raise self._record_refusal(str(error)) from error
            except BaseException as error:
                # A constructor may raise anything; the error must affect this plugin alone.
                message = f"cannot start {self._type}: {type(error).__name__}: {error}"
                raise self._record_refusal(message) from error
            self._state.record_refusal("")
        return 3600.0

    def _record_refusal(self, reason: str) -> PluginUnavailable:
        """Record why the plugin does not run, for ``steward accounting plugins``."""
        self._state.record_refusal(reason)
        return PluginUnavailable(reason, self._type)

    def _start(self, plugin: JobAcctPlugin) -> None:
        """Run the plugin's init hooks and build its caller; raise PluginError if one fails."""
        guard = HookGuard(self._type, plugin, self._settings.hook_timeout_s, self._host.beat)
        init_calls = build_init_calls(self._location, self._settings.parameters)
        for hook, args in init_calls:
            if not guard.call_hook(hook, *args):
                (failure, *_) = guard.take_failures()
                raise PluginError(
                    f"cannot start {self._type}: {hook}: {failure.kind}: {failure.text}"
                )
        overridden = {hook for hook in _HOOK_KINDS if _has_override(plugin, hook)}
        self.kinds = frozenset().union(*(_HOOK_KINDS[hook] for hook in overridden))
        host = self._host
        sender = MessageSender(
            self._type, self._settings.parameters, host.append, host.stop, host.beat
        )
        self._guard = guard
        self._caller = HookCaller(
            *(self._type, plugin, guard, sender, overridden, init_calls), self._state_dir
        )
        log.info("%s runs: %s", self._type, plugin.plugin_name)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - likewise
        """Call the hooks for events, then move the cursor to ``upto``.

        Raises:
            Unavailable: A hook reports that a resource it needs is away.
            SqliteUnavailable: The state directory cannot be written now.
        """
        caller, guard = self._caller, self._guard
        assert caller is not None, "the first tick comes before the first event"
        assert guard is not None, "no guard for the plugin"
        tries = self._state.begin_batch()
        if tries > _MAX_TRIES and len(events) == 1:
            message = f"crashed {_MAX_TRIES} times on {events[0].kind} {events[0].key}"
            guard.record_failure("*", "crash", message)
            events = ()
        try:
            for event in events:
                if event.id not in self._done_ids:
                    caller.call_hooks(event)
                    self._done_ids.add(event.id)
        except Unavailable:
            # Events already handled are not repeated while this process lives.
            self._state.postpone_batch()
            raise
        self._state.finish_batch(upto, guard.take_failures())
        self._done_ids.clear()
        self._single_batches = max(0, self._single_batches - 1)
        self.batch_events = 1 if self._single_batches else _BATCH_EVENTS

    def close(self) -> None:
        """Call the plugin's fini hook and close the database."""
        if self._guard is not None:
            try:
                self._guard.call_hook("slurmctld_jobacct_fini", limit_s=_FINI_S)
            except Unavailable as error:
                log.warning("%s: %s", self._type, error)
        super().close()


def consumer_name(plugin_type: str) -> str:
    """Return the name of a plugin's consumer, which is also its process's name."""
    return f"accounting.plugins.{plugin_type.partition('/')[2]}"


def _has_override(plugin: JobAcctPlugin, hook: str) -> bool:
    """Return True if the plugin overrides a hook."""
    return getattr(type(plugin), hook) is not getattr(JobAcctPlugin, hook)
