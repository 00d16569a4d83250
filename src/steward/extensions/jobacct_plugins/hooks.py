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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from steward.core.errors import Unavailable
from steward.core.events import (
    CONTROLLER_STATE,
    PLUGIN_MESSAGE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_LAUNCH,
    STEP_USAGE,
    ControllerState,
    Event,
)
from steward.core.timestamps import moment
from steward.core.usage import PluginMessage, RunFact, StepUsage, TaskUsage
from steward.extensions.jobacct_plugins.api import Job, JobAcctPlugin, Message, Rusage, Step
from steward.extensions.jobacct_plugins.messages import Sending
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


_JOB_HOOKS: Final = {
    RUN_START: "slurmctld_jobacct_job_start",
    RUN_END: "slurmctld_jobacct_job_complete",
    RUN_SUSPEND: "slurmctld_jobacct_job_suspend",
}
_LAUNCHED: Final = "slurmd_jobacct_jobstep_launched"
_SMGR: Final = "slurmd_jobacct_smgr"
_TASK: Final = "slurmd_jobacct_task_exit"
_TERMINATED: Final = "slurmd_jobacct_jobstep_terminated"
_OF_START: Final = (
    *("uid", "gid", "tasks", "cpus", "memory_bytes", "name"),
    *("array_job_id", "array_task"),
)
_SIGNAL: Final = 0x7F
"""The bits of a wait status that hold a signal."""
_MESSAGE: Final = "slurm_jobacct_process_message"

Call = tuple[str, str, str, tuple[Any, ...]]
"""A hook, what makes it differ from the event's other calls, its node, its arguments."""


InitCalls = Sequence[tuple[str, tuple[str, ...]]]
"""The hooks of a start, and their arguments."""


def init_calls(location: str, parameters: str) -> InitCalls:
    """The hooks of a start of Steward or slurmctld, in order, with their arguments."""
    return (
        ("slurmctld_jobacct_init", (location, parameters)),
        ("slurmd_jobacct_init", (parameters,)),
    )


class Caller:
    """Calls one plugin's hooks for events.

    Args:
        plugin_type: Whose messages are its own.
        plugin: The plugin.
        guard: Calls it.
        sending: Sends its messages.
        overridden: The hooks that do something.
        starting: Calls of `slurmctld_jobacct_init` when slurmctld starts or reconfigures.
    """

    def __init__(
        self,
        plugin_type: str,
        plugin: JobAcctPlugin,
        guard: Guard,
        sending: Sending,
        overridden: Collection[str],
        starting: InitCalls,
    ) -> None:
        self._type = plugin_type
        self._plugin = plugin
        self._guard = guard
        self._sending = sending
        self._overridden = frozenset(overridden)
        self._starting = starting
        self._passed: set[tuple[int, str, str]] = set()
        self._by_kind: dict[str, Callable[[Event], Iterator[Call]]] = {
            **dict.fromkeys(_JOB_HOOKS, self._of_run),
            CONTROLLER_STATE: self._of_controller,
            STEP_LAUNCH: self._of_launch,
            STEP_USAGE: self._of_usage,
            PLUGIN_MESSAGE: self._of_message,
        }

    def call(self, event: Event) -> None:
        """Call the hooks that an event stands for.

        Raises:
            Unavailable: A hook says that what it needs is away. Called again, it is the first
                that is: an event of thousands of tasks does not begin anew.
        """
        for hook, which, node, args in self._by_kind[event.kind](event):
            passed = (event.id, hook, which)
            if hook not in self._overridden or passed in self._passed:
                continue
            sent = 0

            def channel(
                to: str, data: bytes, hook: str = hook, which: str = which, node: str = node
            ) -> None:
                nonlocal sent
                sent += 1
                with self._guard.paused():
                    self._sending.send(event, f"{hook}\n{which}\n{sent}", node, to, data)

            self._plugin.channel = channel
            try:
                self._guard.call(hook, *args)
            finally:
                self._plugin.channel = None
            self._passed.add(passed)
        self._passed.clear()

    def _of_run(self, event: Event) -> Iterator[Call]:
        fact: RunFact = event.body
        job = Job(
            event_id=_id(event),
            cluster=event.cluster,
            job_id=fact.job_id,
            first_submit=fact.first_submit,
            restarts=fact.restarts,
            at=event.at,
            record=fact.record,
            piece_end=fact.piece_end,
            correction=fact.correction,
        )
        yield _JOB_HOOKS[event.kind], "", "", (job,)

    def _of_usage(self, event: Event) -> Iterator[Call]:
        usage: StepUsage = event.body
        step = _step_of(event, usage)
        node = usage.node
        if usage.start is not None and not usage.announced:
            yield from _begin(step, usage)
        for task in usage.tasks:
            which = str(task.task)
            of_task = msgspec.structs.replace(_named(step, which, task.ended_us), task=task.task)
            yield _TASK, which, node, (of_task, task.pid, task.status, Rusage.of(task))
        over = msgspec.structs.replace(
            _named(step, "terminated", usage.ended_us),
            end=usage.end,
            smgr_status=_status_of(usage.tasks),
            withdrawn=usage.withdrawn,
        )
        yield _TERMINATED, "", node, (over,)

    def _of_launch(self, event: Event) -> Iterator[Call]:
        usage: StepUsage = event.body
        step = _step_of(event, usage)
        if usage.withdrawn:
            gone = msgspec.structs.replace(_named(step, "terminated", None), withdrawn=True)
            yield _TERMINATED, "", usage.node, (gone,)
        else:
            yield from _begin(step, usage)

    def _of_controller(self, event: Event) -> Iterator[Call]:
        state: ControllerState = event.body
        if state.daemon == "slurmctld" and state.up:
            for hook, args in self._starting:
                yield hook, "", "", args

    def _of_message(self, event: Event) -> Iterator[Call]:
        body: PluginMessage = event.body
        if body.plugin_type != self._type:
            return
        message = Message(
            event_id=_id(event),
            cluster=event.cluster,
            to=body.to,
            sender=body.sender,
            data=body.data,
            at=event.at,
        )
        yield _MESSAGE, "", "" if body.to == "controller" else body.to, (message,)


def _begin(step: Step, usage: StepUsage) -> Iterator[Call]:
    yield _LAUNCHED, "", usage.node, (_named(step, "launched", usage.launched_us),)
    # Nodes tell of the session manager by the launch: it starts the tasks.
    yield _SMGR, "", usage.node, (_named(step, "smgr", usage.launched_us),)


def _status_of(tasks: Iterable[TaskUsage]) -> int | None:
    """The status of a step's tasks together: as slurmstepd's, a signal goes before an exit code."""
    statuses = [task.status for task in tasks]
    by_signal = [status for status in statuses if status & _SIGNAL]
    return max(by_signal or statuses, default=None)


def _step_of(event: Event, usage: StepUsage) -> Step:
    step = Step(
        event_id=_id(event),
        cluster=event.cluster,
        job_id=usage.job_id,
        first_submit=usage.first_submit,
        restarts=usage.restarts,
        step=usage.step,
        node=usage.node,
        launched=moment(usage.launched_us),
        at=event.at,
        correction=usage.correction,
    )
    start = usage.start
    if start is None:
        return step
    told = {field: getattr(start, field) for field in _OF_START}
    return msgspec.structs.replace(step, **told)


def _id(event: Event) -> str:
    return f"{event.cluster}/{event.key}"


def _named(step: Step, which: str, at_us: int | None) -> Step:
    """The step for one of its event's calls, which is told from the others by its id."""
    at = step.at if at_us is None else moment(at_us)
    return msgspec.structs.replace(step, event_id=f"{step.event_id}#{which}", at=at)
