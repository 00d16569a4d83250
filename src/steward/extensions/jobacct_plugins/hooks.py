"""Hook calls of accounting plugins: maps events to hooks, and contains errors and hangs.

:class:`HookGuard` makes each call with a time limit and counts errors. A hook may raise anything,
ask the process to end, or never return. An alarm ends the last, as it interrupts Python code and
system calls; a hook that hangs beyond that (in a library's C code) is ended together with the
process by the supervisor, which misses the heartbeat.

:class:`HookCaller` turns an event into calls, with :class:`JobRun`, :class:`Step` or
:class:`Message` as arguments. Raw node reports reach no hook, because a node may report anything:
slurmd's hooks are called for ``step.launch`` and ``step.usage``, which the consumer ``jobs`` emits
for a launch that is known to belong to a run.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

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
    ControllerState,
    Event,
)
from steward.core.timestamps import from_micros
from steward.core.usage import PluginMessage, RunEvent, StepUsage, TaskUsage
from steward.extensions.jobacct_plugins.api import JobAcctPlugin, JobRun, Message, Rusage, Step
from steward.extensions.jobacct_plugins.messages import MessageSender
from steward.extensions.jobacct_plugins.state import HookFailure
from steward.jobs.imported_runs import read_run_events

log = logging.getLogger(__name__)

TIMEOUT_KIND: Final = "time-out"
"""Kind of error of a hook that took too long."""
_REPEAT_ALARM_S: Final = 1.0
"""Interval of repeated alarms, in seconds."""
_MAX_TEXT: Final = 500
"""Most characters of an error text to keep."""


class HookTimeout(BaseException):
    """Time-out of a hook; not an Exception, so that hooks do not catch it by mistake."""


class HookGuard:
    """Guard that calls one plugin's hooks with a time limit and counts their errors.

    Args:
        plugin_type: The plugin's type, for the log.
        plugin: The plugin.
        limit_s: Time limit of a hook, in seconds.
        beat: Heartbeat, called before each hook.
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
        self._is_timing = False
        self._can_limit = threading.current_thread() is threading.main_thread()
        self._failures: dict[tuple[str, str], HookFailure] = {}
        self._logged: set[tuple[str, str]] = set()
        if self._can_limit:
            signal.signal(signal.SIGALRM, self._on_alarm)

    def call_hook(self, hook: str, *args: Any, limit_s: float = 0.0) -> bool:
        """Call a hook; return True if it returned normally.

        Args:
            hook: Its name.
            args: Its arguments.
            limit_s: Time limit in seconds; the usual one if 0.

        Raises:
            Unavailable: A resource it needs is away: it must be called again later.
        """
        self._beat()
        try:
            with self._limit_time(limit_s or self._limit_s):
                getattr(self._plugin, hook)(*args)
        except Unavailable:
            raise
        except HookTimeout:
            self.record_failure(
                hook, TIMEOUT_KIND, f"took longer than {limit_s or self._limit_s:g} s"
            )
        except BaseException as error:
            # Catch SystemExit and KeyboardInterrupt, too: a hook may not end the process.
            self.record_failure(hook, type(error).__name__, str(error), error)
        else:
            return True
        return False

    def record_failure(
        self, hook: str, error_type: str, text: str, error: BaseException | None = None
    ) -> None:
        """Count an error; the first of its kind is logged."""
        now = int(time.time())
        key = (hook, error_type)
        previous = self._failures.get(key)
        self._failures[key] = HookFailure(
            hook,
            error_type,
            previous.count + 1 if previous else 1,
            previous.first_s if previous else now,
            now,
            text[:_MAX_TEXT],
        )
        if key not in self._logged:
            self._logged.add(key)
            log.error(
                "%s: %s failed (%s: %s); further failures are not logged, see the counts in "
                "'steward accounting plugins'",
                self._type,
                hook,
                error_type,
                text[:_MAX_TEXT],
                exc_info=error,
            )

    def take_failures(self) -> list[HookFailure]:
        """Return and clear the errors since the last call."""
        failures, self._failures = list(self._failures.values()), {}
        return failures

    @contextmanager
    def pause_limit(self) -> Iterator[None]:
        """Stop the hook's clock during Steward's own work within a hook."""
        if not self._is_timing:
            yield
            return
        self._is_timing = False
        remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            self._beat()
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, max(remaining_s, 0.001), _REPEAT_ALARM_S)
            self._is_timing = True

    @contextmanager
    def _limit_time(self, limit_s: float) -> Iterator[None]:
        """Run the body with an alarm after ``limit_s`` seconds."""
        if not self._can_limit:
            yield
            return
        self._is_timing = True
        # Repeat the alarm: a hook may have caught the first one.
        signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_ALARM_S)
        try:
            yield
        finally:
            self._is_timing = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_alarm(self, *_: object) -> None:
        if self._is_timing:
            raise HookTimeout


_JOB_HOOKS: Final = {
    RUN_START: "slurmctld_jobacct_job_start",
    RUN_END: "slurmctld_jobacct_job_complete",
    RUN_SUSPEND: "slurmctld_jobacct_job_suspend",
}
_LAUNCHED_HOOK: Final = "slurmd_jobacct_jobstep_launched"
_SMGR_HOOK: Final = "slurmd_jobacct_smgr"
_TASK_HOOK: Final = "slurmd_jobacct_task_exit"
_TERMINATED_HOOK: Final = "slurmd_jobacct_jobstep_terminated"
_START_FIELDS: Final = (
    *("uid", "gid", "tasks", "cpus", "memory_bytes", "name"),
    *("array_job_id", "array_task"),
)
"""Fields of a step that its launch report fills."""
_SIGNAL_MASK: Final = 0x7F
"""Bits of a wait status that hold a signal."""
_MESSAGE_HOOK: Final = "slurm_jobacct_process_message"

HookCall = tuple[str, str, str, tuple[Any, ...]]
"""Hook, suffix that tells it from the event's other calls, node, arguments."""


InitCalls = Sequence[tuple[str, tuple[str, ...]]]
"""Hooks of a start, with their arguments."""


def build_init_calls(location: str, parameters: str) -> InitCalls:
    """Return the init hooks, in order: called when Steward or slurmctld starts."""
    return (
        ("slurmctld_jobacct_init", (location, parameters)),
        ("slurmd_jobacct_init", (parameters,)),
    )


class HookCaller:
    """Caller of one plugin's hooks for events.

    Args:
        plugin_type: Type of the plugin, which selects its messages.
        plugin: The plugin.
        guard: Makes the calls.
        sender: Sends its messages.
        overridden: The hooks that the plugin overrides.
        init_calls: Calls of `slurmctld_jobacct_init` when slurmctld starts or reconfigures.
        state_dir: Directory of jobs.db.
    """

    def __init__(
        self,
        plugin_type: str,
        plugin: JobAcctPlugin,
        guard: HookGuard,
        sender: MessageSender,
        overridden: Collection[str],
        init_calls: InitCalls,
        state_dir: str,
    ) -> None:
        self._type = plugin_type
        self._state_dir = state_dir
        self._plugin = plugin
        self._guard = guard
        self._sender = sender
        self._overridden = frozenset(overridden)
        self._init_calls = init_calls
        self._completed: set[tuple[int, str, str]] = set()
        self._builders: dict[str, Callable[[Event], Iterator[HookCall]]] = {
            **dict.fromkeys(_JOB_HOOKS, self._build_run_calls),
            JOBS_IMPORTED: self._build_imported_calls,
            CONTROLLER_STATE: self._build_init_calls,
            STEP_LAUNCH: self._build_launch_calls,
            STEP_USAGE: self._build_usage_calls,
            PLUGIN_MESSAGE: self._build_message_calls,
        }

    def call_hooks(self, event: Event) -> None:
        """Call the hooks that an event stands for.

        Raises:
            Unavailable: A hook reports that a resource it needs is away. Called again, the event
                continues with that hook: one of thousands of tasks does not start over.
        """
        for hook, suffix, node, args in self._builders[event.kind](event):
            call_key = (event.id, hook, suffix)
            if hook not in self._overridden or call_key in self._completed:
                continue
            sent_count = 0

            def channel(
                to: str, data: bytes, hook: str = hook, suffix: str = suffix, node: str = node
            ) -> None:
                nonlocal sent_count
                sent_count += 1
                with self._guard.pause_limit():
                    self._sender.send_message(
                        event, f"{hook}\n{suffix}\n{sent_count}", node, to, data
                    )

            self._plugin.channel = channel
            try:
                self._guard.call_hook(hook, *args)
            finally:
                self._plugin.channel = None
            self._completed.add(call_key)
        self._completed.clear()

    def _build_run_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the call for a job's start, end or suspension."""
        run_event: RunEvent = event.body
        job = JobRun(
            event_id=_event_id(event),
            cluster=event.cluster,
            job_id=run_event.job_id,
            first_submit=run_event.first_submit,
            restarts=run_event.restarts,
            at=event.at,
            record=run_event.record,
            piece_end=run_event.piece_end,
            correction=run_event.correction,
        )
        yield _JOB_HOOKS[event.kind], "", "", (job,)

    def _build_imported_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the calls for the start and the end of each imported run."""
        for run in read_run_events(event, self._state_dir):
            for hook, _, node, args in self._build_run_calls(run):
                yield hook, run.key, node, args

    def _build_usage_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the calls for a step's usage: its start, each task's exit, its end."""
        usage: StepUsage = event.body
        step = _build_step(event, usage)
        node = usage.node
        if usage.start is not None and not usage.announced:
            yield from _launch_calls(step, usage)
        for task in usage.tasks:
            suffix = str(task.task)
            task_step = msgspec.structs.replace(
                _with_call_id(step, suffix, task.ended_us), task=task.task
            )
            yield _TASK_HOOK, suffix, node, (task_step, task.pid, task.status, Rusage.of(task))
        ended_step = msgspec.structs.replace(
            _with_call_id(step, "terminated", usage.ended_us),
            end=usage.end,
            smgr_status=_combine_statuses(usage.tasks),
            withdrawn=usage.withdrawn,
        )
        yield _TERMINATED_HOOK, "", node, (ended_step,)

    def _build_launch_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the calls for a step's launch, or for its withdrawal."""
        usage: StepUsage = event.body
        step = _build_step(event, usage)
        if usage.withdrawn:
            withdrawn_step = msgspec.structs.replace(
                _with_call_id(step, "terminated", None), withdrawn=True
            )
            yield _TERMINATED_HOOK, "", usage.node, (withdrawn_step,)
        else:
            yield from _launch_calls(step, usage)

    def _build_init_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the init calls when slurmctld has started."""
        state: ControllerState = event.body
        if state.daemon == "slurmctld" and state.up:
            for hook, args in self._init_calls:
                yield hook, "", "", args

    def _build_message_calls(self, event: Event) -> Iterator[HookCall]:
        """Yield the call for a message of this plugin."""
        body: PluginMessage = event.body
        if body.plugin_type != self._type:
            return
        message = Message(
            event_id=_event_id(event),
            cluster=event.cluster,
            to=body.to,
            sender=body.sender,
            data=body.data,
            at=event.at,
        )
        yield _MESSAGE_HOOK, "", "" if body.to == "controller" else body.to, (message,)


def _launch_calls(step: Step, usage: StepUsage) -> Iterator[HookCall]:
    """Yield the two calls of a step's start."""
    yield _LAUNCHED_HOOK, "", usage.node, (_with_call_id(step, "launched", usage.launched_us),)
    # A node's launch report also implies the session manager: it starts the tasks.
    yield _SMGR_HOOK, "", usage.node, (_with_call_id(step, "smgr", usage.launched_us),)


def _combine_statuses(tasks: Iterable[TaskUsage]) -> int | None:
    """Combine the statuses of a step's tasks as slurmstepd does: a signal precedes an exit code."""
    statuses = [task.status for task in tasks]
    by_signal = [status for status in statuses if status & _SIGNAL_MASK]
    return max(by_signal or statuses, default=None)


def _build_step(event: Event, usage: StepUsage) -> Step:
    """Build a hook's step from an event."""
    step = Step(
        event_id=_event_id(event),
        cluster=event.cluster,
        job_id=usage.job_id,
        first_submit=usage.first_submit,
        restarts=usage.restarts,
        step=usage.step,
        node=usage.node,
        launched=from_micros(usage.launched_us),
        at=event.at,
        correction=usage.correction,
    )
    start = usage.start
    if start is None:
        return step
    start_fields = {field: getattr(start, field) for field in _START_FIELDS}
    return msgspec.structs.replace(step, **start_fields)


def _event_id(event: Event) -> str:
    return f"{event.cluster}/{event.key}"


def _with_call_id(step: Step, suffix: str, at_us: int | None) -> Step:
    """Return the step for one of its event's calls, with an id that tells it from the others."""
    at = step.at if at_us is None else from_micros(at_us)
    return msgspec.structs.replace(step, event_id=f"{step.event_id}#{suffix}", at=at)
