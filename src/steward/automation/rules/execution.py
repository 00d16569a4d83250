"""Execution of rules' actions: start what is due, retry, recover after a crash, emit end events.

:class:`RunnerPerformer` runs actions and inspects Slurm (protocol :class:`ActionPerformer`).
:class:`ExecutionOutbox` stores ends of executions together with journal events about them.
:class:`ExecutionScheduler` starts, retries and ends executions; the consumer calls its ``turn``.

The consumer's thread alone records decisions and ends. What may wait for Slurm runs in threads, one
per execution, each with a performer to itself; their results go back to methods of the scheduler.
Executions of one rule run one after another, those of different rules in parallel, so that a slow
action delays only its own rule.

Path of an execution: ``_begin``; for actions that take nodes away ``look`` in a thread and the node
limit (``_looked``); ``_start`` records the start; ``run`` in a thread; ``_ran`` ends it or retries.
After a time-out ``check`` asks Slurm whether the change took effect. An execution that a former
process started goes through ``find`` (audit log and Slurm) to ``_found``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, Protocol, cast

import msgspec

from steward.automation.audit import AuditRow
from steward.automation.errors import RuleError
from steward.automation.operation import find_operation
from steward.automation.rules.limits import (
    TakenNode,
    can_take_nodes,
    check_node_limit,
    find_taken_nodes,
    find_taken_partition,
)
from steward.automation.rules.model import Rule, RuleLimits
from steward.automation.rules.store import STATUS_HELD_BACK, Execution, RulesStore
from steward.automation.runner import OperationOutcome, OperationRunner
from steward.automation.settings import RulesSettings
from steward.core.access import Access, get_process_user
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import StewardError, Unavailable
from steward.core.events import RULE_EXECUTION, Event, RuleExecution, utc_now
from steward.core.sqlite import transaction
from steward.jobs.outbox import Outbox

_CLOCK_SKEW_S: Final = 1.0
"""Tolerance for differences of clocks, in seconds."""
_MAX_AUDIT_ROWS: Final = 1000
"""Audit log entries searched for an execution's."""

RecoveryState = Literal["ended", "not-begun", "done", "not-done", "running", "unseen"]
"""How far an action got before a restart, see :class:`RecoveredOutcome`."""


# Running actions and inspecting Slurm


class NodeAvailability(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of nodes, for the limit on nodes that rules may take away.

    Attributes:
        wanted: Nodes that the action would take away.
        available: Nodes that accept jobs: their state allows it, no reservation has them, and all
            their partitions are up.
        names: All nodes.
        members: Nodes of each partition that is up.
        seen: Time when the query began.
    """

    wanted: frozenset[str]
    available: frozenset[str]
    names: frozenset[str]
    members: dict[str, frozenset[str]] = msgspec.field(default_factory=dict)
    seen: datetime

    def has_back(self, taken: TakenNode) -> bool:
        """Return whether a taken node accepts jobs again or no longer exists."""
        if taken.node not in self.names:
            return True
        if taken.node not in self.available:
            return False
        return not taken.kept_by or taken.node in self.members.get(taken.kept_by, ())

    @property
    def total(self) -> int:
        """Return the number of nodes."""
        return len(self.names)


class RecoveredOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an action that started and whose end was not recorded.

    Attributes:
        traces: ``ended`` (the audit log tells how), ``not-begun`` (nothing was changed),
            ``done`` and ``not-done`` (Slurm shows it), ``running`` (its process is alive),
            or ``unseen`` (cannot be determined).
        row: Its entry in the audit log.
    """

    traces: RecoveryState
    row: AuditRow | None = None


class ActionPerformer(Protocol):
    """Protocol for running actions and inspecting Slurm; every call may block for long."""

    def look(self, one: Execution) -> NodeAvailability:
        """Query Slurm for the nodes that an action would take away."""
        ...

    def run(self, one: Execution, timeout_s: float | None) -> OperationOutcome:
        """Run an action."""
        ...

    def check(self, one: Execution) -> bool | None:
        """Return whether the change is in effect; None if that cannot be determined."""
        ...

    def find(self, one: Execution) -> RecoveredOutcome:
        """Find out how far an action got of which only the start is known."""
        ...


MakePerformer = Callable[[], ActionPerformer]
"""Creates a :class:`ActionPerformer` for one thread."""


class RunnerPerformer:
    """Performer with an :class:`OperationRunner` of its own, which acts as Steward's user.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
        registry: All actions; used by this object alone.
    """

    def __init__(self, settings: Settings, access: Access, registry: Registry) -> None:
        self._settings = settings
        self._runner = OperationRunner(settings, access, registry)
        self._asker = get_process_user()

    def look(self, one: Execution) -> NodeAvailability:
        """Query Slurm for the nodes that an action would take away, see :class:`ActionPerformer`.

        Raises:
            StewardError: A node is unknown, or Slurm does not answer.
        """
        from steward.slurm import ClusterQueries
        from steward.slurm.node_states import is_available
        from steward.slurm.nodelists import expand_nodelist

        if one.cluster not in self._settings.cluster:
            raise RuleError(
                f"there is no cluster {one.cluster!r} in the configuration", one.cluster
            )
        seen = utc_now()
        machine = ClusterQueries(one.cluster, self._settings.cluster[one.cluster])
        nodes = machine.nodes()
        listed = find_taken_nodes(one.action, one.parameters)
        wanted = set(machine.node_names(listed)) if listed else set()
        partition = find_taken_partition(one.action, one.parameters)
        wanted |= {name for name, node in nodes.items() if partition in node.partitions}
        up = {name for name, of in machine.partitions().items() if of.state == "UP"}
        reserved = [held.nodes for held in machine.reservations().values() if held.nodes]
        held = {name for listed in reserved for name in expand_nodelist(listed)}
        return NodeAvailability(
            wanted=frozenset(wanted),
            available=frozenset(
                name
                for name, node in nodes.items()
                if is_available(node.state) and name not in held and up.issuperset(node.partitions)
            ),
            names=frozenset(nodes),
            members={
                part: frozenset(name for name, node in nodes.items() if part in node.partitions)
                for part in up
            },
            seen=seen,
        )

    def run(self, one: Execution, timeout_s: float | None) -> OperationOutcome:
        """Run an action, see :class:`ActionPerformer`.

        Raises:
            StewardError: The action failed before it changed anything.
        """
        return self._runner.run(
            one.action,
            one.parameters,
            self._asker,
            cluster=self._cluster(one),
            dry_run=one.dry_run,
            speaker=_name_speaker(one),
            timeout_s=timeout_s,
        )

    def check(self, one: Execution) -> bool | None:
        """Return whether the change is in effect, see :class:`ActionPerformer`.

        Raises:
            StewardError: Slurm cannot be queried now.
        """
        return self._runner.check(
            one.action,
            one.parameters,
            self._asker,
            cluster=self._cluster(one),
            speaker=_name_speaker(one),
        )

    def find(self, one: Execution) -> RecoveredOutcome:
        """Find out how far an action got, see :class:`ActionPerformer`.

        Every change has a row in the audit log before it is made, so an action without a row was
        not begun.

        Raises:
            StewardError: Slurm or the audit log cannot be queried now.
        """
        if one.dry_run or not find_operation(one.action).changes:
            return RecoveredOutcome(traces="not-begun")
        row = self._row_of(one)
        if row is None:
            return RecoveredOutcome(traces="not-begun")
        if row.status == "running":
            return RecoveredOutcome(traces="running", row=row)
        if row.status != "unfinished":
            return RecoveredOutcome(traces="ended", row=row)
        is_done = self.check(one)
        if is_done is None:
            return RecoveredOutcome(traces="unseen", row=row)
        return RecoveredOutcome(traces="done" if is_done else "not-done", row=row)

    def _row_of(self, one: Execution) -> AuditRow | None:
        """Find the audit log entry of an execution's last start, or None."""
        assert one.started is not None, one
        rows = self._runner.audit.list_entries(
            limit=_MAX_AUDIT_ROWS,
            since=one.started - timedelta(seconds=_CLOCK_SKEW_S),
            ref=one.action,
            cluster=self._cluster(one),
            uid=self._asker.uid,
        )
        # A rule's executions run one after another, so the first entry since the start is this
        # one's.
        mine = [row for row in rows if row.speaker == _name_speaker(one) and row.at >= one.started]
        return mine[-1] if mine else None

    def _cluster(self, one: Execution) -> str:
        """Return the configured cluster of an execution; "" if its event's cluster is unknown."""
        return one.cluster if one.cluster in self._settings.cluster else ""


def _name_speaker(one: Execution) -> str:
    """Return the name that signs reasons set by a rule."""
    return f"rule {one.rule}"


def summarize_run(ran: OperationOutcome) -> str:
    """Summarize a run in one line: its error, or its result if that is text."""
    if ran.message:
        return ran.message
    told: Any = ran.result
    return told if isinstance(told, str) else ""


# End events

RULES_SOURCE: Final = "rules"
"""Source name of the events."""


class ExecutionOutbox:
    """Outbox of end events: stored together with the ends, then sent to the journal once each.

    Args:
        store: Database of the rules.
    """

    def __init__(self, store: RulesStore) -> None:
        self._store = store
        self._outbox = Outbox(store.connection, store.path)
        self._untold: list[Event] = []

    def put(self, ended: Iterable[Execution]) -> list[Event]:
        """Put events about ended executions into the outbox, within a transaction; return them."""
        events = [_make_event(one) for one in ended]
        if events:
            self._outbox.put(events)
        return events

    def end(
        self,
        one: Execution,
        status: str,
        now: datetime,
        *,
        message: str = "",
        result: Any = None,
        audit: int = 0,
    ) -> None:
        """Store how an execution ended, with its event."""
        with transaction(self._store.connection, self._store.path):
            ended = self._store.end(one, status, now, message=message, result=result, audit=audit)
            self._outbox.put([_make_event(ended)])
        self._untold.append(_make_event(ended))

    def send(self, append: Append, upto: int | None = None, events: Sequence[Event] = ()) -> None:
        """Send all pending events to the journal, then move the cursor.

        Args:
            append: Appends events to the journal.
            upto: New position of the cursor; None to leave it.
            events: Events returned by ``put``, after that transaction was committed.

        Raises:
            Unavailable: The journal is unavailable.
        """
        # Events that cannot be sent stay in the outbox, which sends them with the next ones.
        untold, self._untold = [*self._untold, *events], []
        self._outbox.send(append, upto, untold)


def _make_event(one: Execution) -> Event:
    """Build the rule.execution event of an ended execution."""
    at = one.ended or one.made
    return Event(
        kind=RULE_EXECUTION,
        cluster=one.cluster,
        key=f"{RULE_EXECUTION}:{one.rule}:{one.event}",
        at=at,
        seen_at=at,
        source=RULES_SOURCE,
        body=RuleExecution(
            execution=one.id,
            rule=one.rule,
            event=one.event,
            action=one.action,
            status=cast("Any", one.status),
            parameters=one.parameters,
            message=one.message,
        ),
    )


# Scheduler

log = logging.getLogger(__name__)

MAX_PARALLEL_EXECUTIONS: Final = 8
"""Maximum number of executions that run at the same time, each of another rule."""
GRACE_S: Final = 30.0
"""Seconds after an action's time limit until the scheduler gives up waiting for its thread."""

_POLL_S: Final = 0.05
"""Interval of checks while threads run, in seconds."""
_IDLE_S: Final = 5.0
"""Maximum interval of checks otherwise, in seconds."""
_RETRY_DELAYS_S: Final = (2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses before retries while Slurm or a database is unavailable, in seconds."""
_CLOSE_S: Final = 2.5
"""Maximum wait for running executions at a stop, in seconds."""
_MAX_START_ROUNDS: Final = 50
"""Maximum number of rounds of starts per turn."""

_Kind = Literal["look", "run", "check", "find"]
"""Types of work in a thread: inspect nodes, run, check the change, recover."""
Outcome = NodeAvailability | OperationOutcome | RecoveredOutcome | bool | None | BaseException
"""Result of a thread's work, or what it raised."""


class _Task(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Work for one execution that runs in a thread and may wait for Slurm.

    Attributes:
        one: Execution it is for.
        kind: Type of work.
        does: Function that does it.
        then: Receives the result.
        until: Deadline on the monotonic clock, after which nobody waits for it.
    """

    one: Execution
    kind: _Kind
    does: Callable[[ActionPerformer], Any]
    then: Callable[[Execution, Any], None]
    until: float


class ExecutionScheduler:
    """Scheduler of executions: starts, retries and ends them. Called by the consumer's thread only.

    Args:
        store: Database of the rules.
        telling: Stores ends of executions.
        settings: Settings of [rules].
        timeout_s: Default time limit of an action, in seconds.
        make_hand: Creates the object that runs actions, one per thread.
        clock: Returns the current time.
    """

    def __init__(
        self,
        store: RulesStore,
        telling: ExecutionOutbox,
        settings: RulesSettings,
        timeout_s: float,
        make_hand: MakePerformer,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._telling = telling
        self._settings = settings
        self._timeout_s = timeout_s
        self._make_hand = make_hand
        self._clock = clock
        self._rules: Mapping[str, Rule] = {}
        self._hands: deque[ActionPerformer] = deque()
        self._back: SimpleQueue[tuple[_Task, Outcome]] = SimpleQueue()
        self._tasks: dict[str, _Task] = {}
        self._away: dict[int, int] = {}
        # Executions that a former process started: first find out how far each got.
        self._lost = {one.id: (one, clock()) for one in store.open_("started")}

    def turn(self, rules: Mapping[str, Rule]) -> float:
        """Process results of threads and start due executions.

        Args:
            rules: Enabled rules, by name.

        Returns:
            Seconds until the next call at the latest.
        """
        self._rules = rules
        self._take_in()
        self._give_up()
        self._find_lost()
        self._start_due()
        if self._tasks:
            return _POLL_S
        dues = [due for _, due in self._lost.values()]
        next_due = self._store.next_due()
        if next_due is not None:
            dues.append(next_due)
        if not dues:
            return _IDLE_S
        return min(_IDLE_S, max(_POLL_S, (min(dues) - self._clock()).total_seconds()))

    def close(self) -> None:
        """Wait up to 2.5 seconds for running executions; the next start recovers the rest."""
        until = time.monotonic() + _CLOSE_S
        while self._tasks and time.monotonic() < until:
            self._take_in(_POLL_S, starts=False)

    # -- results of threads

    def _take_in(self, wait_s: float = 0.0, *, starts: bool = True) -> None:
        """Process the results that threads have queued."""
        for task, outcome in self._returned(wait_s):
            if self._tasks.get(task.one.rule) is not task:
                log.warning("execution %d came back after all: %r", task.one.id, outcome)
                continue
            del self._tasks[task.one.rule]
            if isinstance(outcome, Unavailable):
                self._wait_for(task, outcome)
            elif isinstance(outcome, BaseException):
                self._broken(task, outcome)
            elif starts or not isinstance(outcome, NodeAvailability):
                task.then(task.one, outcome)

    def _returned(self, wait_s: float) -> Iterator[tuple[_Task, Outcome]]:
        """Yield queued results; wait for the first one if asked to."""
        try:
            if wait_s:
                yield self._back.get(timeout=wait_s)
            while True:
                yield self._back.get_nowait()
        except Empty:
            return

    def _give_up(self) -> None:
        """End executions whose threads exceeded their deadline."""
        now = time.monotonic()
        for task in [task for task in self._tasks.values() if task.until < now]:
            del self._tasks[task.one.rule]
            log.error("execution %d of rule %s hangs", task.one.id, task.one.rule)
            self._lost.pop(task.one.id, None)
            self._end(task.one, "timeout", "it did not come back at all")

    def _wait_for(self, task: _Task, error: Unavailable) -> None:
        """Schedule a retry of a task that failed because Slurm or a database is unavailable."""
        one = task.one
        self._took_nothing(task)
        times = self._away.get(one.id, 0)
        self._away[one.id] = times + 1
        due = self._clock() + timedelta(
            seconds=_RETRY_DELAYS_S[min(times, len(_RETRY_DELAYS_S) - 1)]
        )
        if task.kind in ("check", "find"):
            self._lost[one.id] = (one, due)
        elif self._is_stale(one):
            self._end(one, "failed", str(error))
        else:
            self._store.again(one, due, str(error), counts=False)

    def _took_nothing(self, task: _Task) -> None:
        """Release nodes counted as taken by a run that raised: runs raise before any change."""
        if task.kind == "run":
            self._store.take_nothing(task.one)

    def _broken(self, task: _Task, error: BaseException) -> None:
        """End an execution whose thread raised an error that is not retried."""
        one = task.one
        self._lost.pop(one.id, None)
        if isinstance(error, StewardError):
            self._took_nothing(task)
        status = "unknown" if task.kind in ("check", "find") else "failed"
        if isinstance(error, StewardError):
            self._end(one, status, str(error))
            return
        log.error("execution %d of rule %s broke", one.id, one.rule, exc_info=error)
        self._end(one, status, "an internal error, see the log")

    # -- due executions

    def _start_due(self) -> None:
        """Start due executions while threads are free."""
        for _ in range(_MAX_START_ROUNDS):
            free = MAX_PARALLEL_EXECUTIONS - len(self._tasks)
            busy = {*self._tasks, *(one.rule for one, _ in self._lost.values())}
            due = self._store.due(self._clock(), busy)[: max(0, free)]
            if not due:
                return
            for one in due:
                self._begin(one)

    def _begin(self, one: Execution) -> None:
        """Start one execution, or end it if its rule is disabled or it waited too long."""
        rule = self._rules.get(one.rule)
        if rule is None:
            self._end(one, STATUS_HELD_BACK, "the rule is not there any more, or was switched off")
        elif self._is_stale(one):
            why = f"it waited too long; {one.message}".rstrip("; ")
            self._end(one, "failed" if one.tries else STATUS_HELD_BACK, why)
        elif not one.dry_run and can_take_nodes(one.action):
            self._do("look", one, lambda hand: hand.look(one), self._looked)
        else:
            self._start(one, frozenset())

    def _looked(self, one: Execution, look: NodeAvailability) -> None:
        """Start an execution that takes nodes away, if the node limit allows it."""
        taken = self._store.taken(one.cluster)
        back = {node.node for node in taken} - {
            node.node for node in taken if not look.has_back(node)
        }
        if back:
            self._store.give_back(one.cluster, back, look.seen)
        rule = self._rules.get(one.rule)
        if rule is None:
            return
        why = check_node_limit(
            rule,
            set(look.wanted),
            self._store.taken(one.cluster),
            look.total,
            self._settings.most_nodes_percent,
        )
        if why:
            self._end(one, STATUS_HELD_BACK, why)
        else:
            self._start(one, look.wanted)

    def _start(self, one: Execution, nodes: frozenset[str]) -> None:
        """Record the start of an execution and run its action in a thread."""
        timeout_s = self._limit_s(one)
        started = self._store.start(one, self._clock(), nodes)
        self._do("run", started, lambda hand: hand.run(started, timeout_s), self._ran)

    def _ran(self, one: Execution, ran: OperationOutcome) -> None:
        """Process the outcome of a run."""
        if ran.status == "succeeded":
            status = "dry-run" if one.dry_run else "succeeded"
            self._end(one, status, summarize_run(ran), result=ran.result, audit=ran.id)
        elif ran.status == "timeout":
            self._do("check", one, lambda hand: hand.check(one), self._checked)
        else:
            self._failed(one, ran)

    def _failed(self, one: Execution, ran: OperationOutcome) -> None:
        """Retry a failed execution, or end it."""
        if not self._retry(one, ran.message):
            self._end(one, "failed", ran.message, result=ran.result, audit=ran.id)

    def _checked(self, one: Execution, is_done: bool | None) -> None:
        """End or retry a run that timed out, by whether Slurm shows that its change took effect."""
        if is_done:
            self._end(one, "succeeded", "it timed out, and Slurm shows that it was done")
        elif is_done is None and self._care(one).on_unknown == "end":
            self._end(one, "timeout", "whether it was done is not known")
        elif not self._retry(one, "it timed out"):
            self._end(one, "timeout", "" if is_done is None else "Slurm shows that it was not done")

    def _retry(self, one: Execution, why: str) -> bool:
        """Schedule a retry if the rule permits one more; return whether it did."""
        care = self._care(one)
        if one.tries > care.retries or self._is_stale(one):
            return False
        wait = timedelta(seconds=care.backoff_s * 2 ** min(one.tries - 1, 12))
        self._store.again(one, self._clock() + wait, f"try {one.tries}: {why}")
        return True

    # -- recovery after a crash

    def _find_lost(self) -> None:
        """Recover executions of a former process as far as threads are free."""
        now = self._clock()
        for one, due in list(self._lost.values()):
            if (
                due <= now
                and one.rule not in self._tasks
                and len(self._tasks) < MAX_PARALLEL_EXECUTIONS
            ):
                self._find(one)

    def _find(self, one: Execution) -> None:
        """Find out in a thread how far an execution got before a restart."""
        self._do("find", one, lambda hand: hand.find(one), self._found)

    def _found(self, one: Execution, found: RecoveredOutcome) -> None:
        """Process what was found out about an execution of a former process."""
        assert one.started is not None, one
        over = one.started + timedelta(seconds=self._limit_s(one))
        row = found.row
        is_unsure = found.traces in ("not-done", "unseen", "running")
        if is_unsure and self._clock() < over:
            # Processes that it started may still be running.
            self._lost[one.id] = (one, over)
            return
        del self._lost[one.id]
        if found.traces == "ended" and row is not None:
            self._ended_before(one, found)
        elif found.traces == "not-begun":
            self._store.again(one, self._clock(), "a restart came before it began", counts=False)
        elif found.traces == "done":
            self._end(one, "succeeded", "a restart came between; Slurm shows that it was done")
        elif found.traces == "not-done":
            self._store.again(one, self._clock(), "a restart came between, before it was done")
        elif self._care(one).on_unknown == "repeat":
            self._store.again(one, self._clock(), "a restart came between; it is repeated")
        else:
            self._end(one, "unknown", "a restart came between: whether it was done is not known")

    def _ended_before(self, one: Execution, found: RecoveredOutcome) -> None:
        """Process the outcome that the audit log recorded."""
        row = found.row
        assert row is not None, one
        ran = OperationOutcome(
            id=row.id,
            ref=row.ref,
            status="failed" if row.status == "failed" else "succeeded",
            parameters=row.parameters,
            result=row.result,
            message=row.message,
            started=row.at,
            ended=row.ended or row.at,
        )
        if row.status == "timeout":
            ran = msgspec.structs.replace(ran, status="timeout")
        self._ran(one, ran)

    # -- threads

    def _do(
        self,
        kind: _Kind,
        one: Execution,
        does: Callable[[ActionPerformer], Any],
        then: Callable[[Execution, Any], None],
    ) -> None:
        """Start a thread for an execution."""
        until = time.monotonic() + self._limit_s(one) + GRACE_S
        task = _Task(one=one, kind=kind, does=does, then=then, until=until)
        self._tasks[one.rule] = task
        name = f"rule {one.rule}"
        threading.Thread(target=self._work, args=(task,), name=name, daemon=True).start()

    def _work(self, task: _Task) -> None:
        """Run a task in its own thread and queue the outcome."""
        outcome: Outcome
        try:
            try:
                hand = self._hands.pop()
            except IndexError:
                hand = self._make_hand()
            outcome = task.does(hand)
            self._hands.append(hand)
        except BaseException as error:
            outcome = error
        self._back.put((task, outcome))

    def _end(
        self, one: Execution, status: str, message: str, *, result: Any = None, audit: int = 0
    ) -> None:
        """Record the end of an execution."""
        self._away.pop(one.id, None)
        self._telling.end(one, status, self._clock(), message=message, result=result, audit=audit)

    def _care(self, one: Execution) -> RuleLimits:
        """Return the limits of an execution's rule; the defaults if it is disabled."""
        rule = self._rules.get(one.rule)
        return RuleLimits() if rule is None else rule.care

    def _limit_s(self, one: Execution) -> float:
        """Return the time limit of an execution's action, in seconds."""
        return self._care(one).timeout_s or self._timeout_s

    def _is_stale(self, one: Execution) -> bool:
        """Return whether an execution has waited longer than its rule's maximum age."""
        return (self._clock() - one.made).total_seconds() > self._care(one).max_age_s
