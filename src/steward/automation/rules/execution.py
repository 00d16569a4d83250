"""Execution of rules' actions: start what is due, retry, recover after a crash, emit end events.

:class:`RunnerPerformer` runs actions and inspects Slurm (protocol :class:`ActionPerformer`).
:class:`ExecutionScheduler` starts, retries and ends executions; the consumer calls its ``advance``.

The consumer's thread alone records decisions and ends. What may wait for Slurm runs in threads, one
per execution, each with a performer to itself; their results go back to methods of the scheduler.
Executions of one rule run one after another, those of different rules in parallel, so that a slow
action delays only its own rule.

Path of an execution: ``_begin_execution``; for actions that take nodes away
``query_nodes`` in a thread and the node limit (``_start_if_allowed``); ``_start_action`` records
the start; ``run`` in a thread; ``_process_result`` ends it or retries. After a time-out ``check``
asks Slurm whether the change took effect. An execution that a former process started goes through
``find`` (audit log and Slurm) to ``_process_recovery``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
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
from steward.core.access import Access, act_as
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.errors import StewardError, Unavailable
from steward.core.events import RULE_EXECUTION, Event, RuleExecution, utc_now
from steward.core.principals import RULES

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
        to_take: Nodes that the action would take away.
        available: Nodes that accept jobs: their state allows it, no reservation has them, and all
            their partitions are up.
        names: All nodes.
        partition_nodes: Nodes of each partition that is up.
        queried_at: Time when the query began.
    """

    to_take: frozenset[str]
    available: frozenset[str]
    names: frozenset[str]
    partition_nodes: dict[str, frozenset[str]] = msgspec.field(default_factory=dict)
    queried_at: datetime

    def is_given_back(self, taken: TakenNode) -> bool:
        """Return whether a taken node accepts jobs again or no longer exists."""
        if taken.node not in self.names:
            return True
        if taken.node not in self.available:
            return False
        return not taken.return_partition or taken.node in self.partition_nodes.get(
            taken.return_partition, ()
        )

    @property
    def total(self) -> int:
        """Return the number of nodes."""
        return len(self.names)


class RecoveredOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an action that started and whose end was not recorded.

    Attributes:
        state: ``ended`` (the audit log tells how), ``not-begun`` (nothing was changed),
            ``done`` and ``not-done`` (Slurm shows it), ``running`` (its process is alive),
            or ``unseen`` (cannot be determined).
        row: Its entry in the audit log.
    """

    state: RecoveryState
    row: AuditRow | None = None


class ActionPerformer(Protocol):
    """Protocol for running actions and inspecting Slurm; every call may block for long."""

    def query_nodes(self, execution: Execution) -> NodeAvailability:
        """Query Slurm for the nodes that an action would take away."""
        ...

    def run(self, execution: Execution, timeout_s: float | None) -> OperationOutcome:
        """Run an action."""
        ...

    def check(self, execution: Execution) -> bool | None:
        """Return whether the change is in effect; None if that cannot be determined."""
        ...

    def find(self, execution: Execution) -> RecoveredOutcome:
        """Find out how far an action got of which only the start is known."""
        ...


MakePerformer = Callable[[], ActionPerformer]
"""Creates a :class:`ActionPerformer` for one thread."""


class RunnerPerformer:
    """Performer with its own :class:`OperationRunner`, which acts as a service principal.

    Args:
        settings: The whole configuration.
        access: Checks the permissions of a caller.
        registry: All actions; used by this object alone.
    """

    def __init__(self, settings: Settings, access: Access, registry: Registry) -> None:
        self._settings = settings
        self._runner = OperationRunner(settings, access, registry)
        self._asker = act_as(RULES)

    def query_nodes(self, execution: Execution) -> NodeAvailability:
        """Query Slurm for the nodes that an action would take away, see :class:`ActionPerformer`.

        Raises:
            StewardError: A node is unknown, or Slurm does not answer.
        """
        from steward.slurm import ClusterQueries
        from steward.slurm.node_states import is_available
        from steward.slurm.nodelists import expand_nodelist

        if execution.cluster not in self._settings.cluster:
            raise RuleError(
                f"cluster {execution.cluster!r} is not in the configuration",
                execution.cluster,
            )
        queried_at = utc_now()
        queries = ClusterQueries(execution.cluster, self._settings.cluster[execution.cluster])
        nodes = queries.nodes()
        nodelist = find_taken_nodes(execution.action, execution.parameters)
        to_take = set(queries.node_names(nodelist)) if nodelist else set()
        partition = find_taken_partition(execution.action, execution.parameters)
        to_take |= {name for name, node in nodes.items() if partition in node.partitions}
        up_partitions = {name for name, info in queries.partitions().items() if info.state == "UP"}
        reserved = [held.nodes for held in queries.reservations().values() if held.nodes]
        held = {name for nodelist in reserved for name in expand_nodelist(nodelist)}
        return NodeAvailability(
            to_take=frozenset(to_take),
            available=frozenset(
                name
                for name, node in nodes.items()
                if is_available(node.state)
                and name not in held
                and up_partitions.issuperset(node.partitions)
            ),
            names=frozenset(nodes),
            partition_nodes={
                partition_name: frozenset(
                    name for name, node in nodes.items() if partition_name in node.partitions
                )
                for partition_name in up_partitions
            },
            queried_at=queried_at,
        )

    def run(self, execution: Execution, timeout_s: float | None) -> OperationOutcome:
        """Run an action, see :class:`ActionPerformer`.

        Raises:
            StewardError: The action failed before it changed anything.
        """
        return self._runner.run(
            execution.action,
            execution.parameters,
            self._asker,
            cluster=self._get_cluster(execution),
            dry_run=execution.dry_run,
            speaker=_name_speaker(execution),
            timeout_s=timeout_s,
        )

    def check(self, execution: Execution) -> bool | None:
        """Return whether the change is in effect, see :class:`ActionPerformer`.

        Raises:
            StewardError: Slurm cannot be queried now.
        """
        return self._runner.check(
            execution.action,
            execution.parameters,
            self._asker,
            cluster=self._get_cluster(execution),
            speaker=_name_speaker(execution),
        )

    def find(self, execution: Execution) -> RecoveredOutcome:
        """Find out how far an action got, see :class:`ActionPerformer`.

        Every change has a row in the audit log before it is made, so an action without a row was
        not begun.

        Raises:
            StewardError: Slurm or the audit log cannot be queried now.
        """
        if execution.dry_run or find_operation(execution.action).only_reads:
            return RecoveredOutcome(state="not-begun")
        row = self._find_audit_row(execution)
        if row is None:
            return RecoveredOutcome(state="not-begun")
        if row.status == "running":
            return RecoveredOutcome(state="running", row=row)
        if row.status != "unfinished":
            return RecoveredOutcome(state="ended", row=row)
        is_done = self.check(execution)
        if is_done is None:
            return RecoveredOutcome(state="unseen", row=row)
        return RecoveredOutcome(state="done" if is_done else "not-done", row=row)

    def _find_audit_row(self, execution: Execution) -> AuditRow | None:
        """Find the audit log entry of an execution's last start, or None."""
        assert execution.started is not None, execution
        rows = self._runner.audit.list_entries(
            limit=_MAX_AUDIT_ROWS,
            since=execution.started - timedelta(seconds=_CLOCK_SKEW_S),
            ref=execution.action,
            cluster=self._get_cluster(execution),
            uid=self._asker.uid,
        )
        # A rule's executions run one after another, so the first entry since the start is this
        # one's.
        own_rows = [
            row
            for row in rows
            if row.speaker == _name_speaker(execution) and row.started >= execution.started
        ]
        return own_rows[-1] if own_rows else None

    def _get_cluster(self, execution: Execution) -> str:
        """Return the configured cluster of an execution; "" if its event's cluster is unknown."""
        return execution.cluster if execution.cluster in self._settings.cluster else ""


def _name_speaker(execution: Execution) -> str:
    """Return the name that signs reasons set by a rule."""
    return f"rule {execution.rule}"


def summarize_run(outcome: OperationOutcome) -> str:
    """Summarize a run in one line: its error, or its result if that is text."""
    if outcome.message:
        return outcome.message
    result: Any = outcome.result
    return result if isinstance(result, str) else ""


# End events

RULES_SOURCE: Final = "rules"
"""Source name of the events."""


OpenTransaction = Callable[[], AbstractContextManager[list[Event]]]
"""Opens a transaction of the rules database that stores events to append to the journal."""


def make_end_event(execution: Execution) -> Event:
    """Build the rule.execution event of an ended execution."""
    at = execution.ended or execution.triggered
    return Event(
        kind=RULE_EXECUTION,
        cluster=execution.cluster,
        key=f"{RULE_EXECUTION}:{execution.rule}:{execution.event}",
        at=at,
        seen_at=at,
        source=RULES_SOURCE,
        body=RuleExecution(
            execution=execution.id,
            rule=execution.rule,
            event=execution.event,
            action=execution.action,
            status=cast("Any", execution.status),
            parameters=execution.parameters,
            message=execution.message,
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
        execution: Execution it is for.
        kind: Type of work.
        work: Function that does it.
        callback: Receives the result.
        deadline: Deadline on the monotonic clock, after which nobody waits for it.
    """

    execution: Execution
    kind: _Kind
    work: Callable[[ActionPerformer], Any]
    callback: Callable[[Execution, Any], None]
    deadline: float


class ExecutionScheduler:
    """Scheduler of executions: starts, retries and ends them. Called by the consumer's thread only.

    Args:
        store: Database of the rules.
        open_transaction: Opens the transaction of an execution's end and its event.
        settings: Settings of [rules].
        timeout_s: Default time limit of an action, in seconds.
        make_performer: Creates the object that runs actions, one per thread.
        clock: Returns the current time.
    """

    def __init__(
        self,
        store: RulesStore,
        open_transaction: OpenTransaction,
        settings: RulesSettings,
        timeout_s: float,
        make_performer: MakePerformer,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._open_transaction = open_transaction
        self._settings = settings
        self._timeout_s = timeout_s
        self._make_performer = make_performer
        self._clock = clock
        self._rules: Mapping[str, Rule] = {}
        self._performers: deque[ActionPerformer] = deque()
        self._outcomes: SimpleQueue[tuple[_Task, Outcome]] = SimpleQueue()
        self._tasks: dict[str, _Task] = {}
        self._unavailable_counts: dict[int, int] = {}
        # Executions that a former process started: first find out how far each got.
        self._unrecovered = {
            execution.id: (execution, clock()) for execution in store.list_by_phase("started")
        }

    def advance(self, rules: Mapping[str, Rule]) -> float:
        """Process results of threads and start due executions.

        Args:
            rules: Enabled rules, by name.

        Returns:
            Seconds until the next call at the latest.
        """
        self._rules = rules
        self._process_outcomes()
        self._end_overdue()
        self._start_recoveries()
        self._start_due()
        if self._tasks:
            return _POLL_S
        due_times = [due for _, due in self._unrecovered.values()]
        next_due = self._store.get_next_due()
        if next_due is not None:
            due_times.append(next_due)
        if not due_times:
            return _IDLE_S
        return min(_IDLE_S, max(_POLL_S, (min(due_times) - self._clock()).total_seconds()))

    def close(self) -> None:
        """Wait up to 2.5 seconds for running executions; the next start recovers the rest."""
        deadline = time.monotonic() + _CLOSE_S
        while self._tasks and time.monotonic() < deadline:
            self._process_outcomes(_POLL_S, may_start=False)

    # -- results of threads

    def _process_outcomes(self, wait_s: float = 0.0, *, may_start: bool = True) -> None:
        """Process the results that threads have queued."""
        for task, outcome in self._get_outcomes(wait_s):
            if self._tasks.get(task.execution.rule) is not task:
                log.warning("execution %d ended after its time-out: %r", task.execution.id, outcome)
                continue
            del self._tasks[task.execution.rule]
            if isinstance(outcome, Unavailable):
                self._retry_unavailable(task, outcome)
            elif isinstance(outcome, BaseException):
                self._end_with_error(task, outcome)
            elif may_start or not isinstance(outcome, NodeAvailability):
                task.callback(task.execution, outcome)

    def _get_outcomes(self, wait_s: float) -> Iterator[tuple[_Task, Outcome]]:
        """Yield queued results; wait for the first one if asked to."""
        try:
            if wait_s:
                yield self._outcomes.get(timeout=wait_s)
            while True:
                yield self._outcomes.get_nowait()
        except Empty:
            return

    def _end_overdue(self) -> None:
        """End executions whose threads exceeded their deadline."""
        now = time.monotonic()
        for task in [task for task in self._tasks.values() if task.deadline < now]:
            del self._tasks[task.execution.rule]
            log.error(
                "execution %d of rule %s did not end before its time-out",
                task.execution.id,
                task.execution.rule,
            )
            self._unrecovered.pop(task.execution.id, None)
            self._end_execution(task.execution, "timeout", "the run did not end in time")

    def _retry_unavailable(self, task: _Task, error: Unavailable) -> None:
        """Schedule a retry of a task that failed because Slurm or a database is unavailable."""
        execution = task.execution
        self._clear_taken_nodes(task)
        attempts = self._unavailable_counts.get(execution.id, 0)
        self._unavailable_counts[execution.id] = attempts + 1
        due = self._clock() + timedelta(
            seconds=_RETRY_DELAYS_S[min(attempts, len(_RETRY_DELAYS_S) - 1)]
        )
        if task.kind in ("check", "find"):
            self._unrecovered[execution.id] = (execution, due)
        elif self._is_stale(execution):
            self._end_execution(execution, "failed", str(error))
        else:
            self._store.schedule_retry(execution, due, str(error), counts=False)

    def _clear_taken_nodes(self, task: _Task) -> None:
        """Release nodes counted as taken by a run that raised: runs raise before any change."""
        if task.kind == "run":
            self._store.clear_taken_nodes(task.execution)

    def _end_with_error(self, task: _Task, error: BaseException) -> None:
        """End an execution whose thread raised an error that is not retried."""
        execution = task.execution
        self._unrecovered.pop(execution.id, None)
        if isinstance(error, StewardError):
            self._clear_taken_nodes(task)
        status = "unknown" if task.kind in ("check", "find") else "failed"
        if isinstance(error, StewardError):
            self._end_execution(execution, status, str(error))
            return
        log.error("execution %d of rule %s failed", execution.id, execution.rule, exc_info=error)
        self._end_execution(execution, status, "internal error: see the log")

    # -- due executions

    def _start_due(self) -> None:
        """Start due executions while threads are free."""
        for _ in range(_MAX_START_ROUNDS):
            free_threads = MAX_PARALLEL_EXECUTIONS - len(self._tasks)
            busy_rules = {
                *self._tasks,
                *(execution.rule for execution, _ in self._unrecovered.values()),
            }
            due = self._store.list_due(self._clock(), busy_rules)[: max(0, free_threads)]
            if not due:
                return
            for execution in due:
                self._begin_execution(execution)

    def _begin_execution(self, execution: Execution) -> None:
        """Start one execution, or end it if its rule is disabled or it waited too long."""
        rule = self._rules.get(execution.rule)
        if rule is None:
            self._end_execution(execution, STATUS_HELD_BACK, "the rule was removed or disabled")
        elif self._is_stale(execution):
            reason = f"the execution waited too long; {execution.message}".rstrip("; ")
            self._end_execution(
                execution, "failed" if execution.attempts else STATUS_HELD_BACK, reason
            )
        elif not execution.dry_run and can_take_nodes(execution.action):
            self._start_thread(
                "look",
                execution,
                lambda performer: performer.query_nodes(execution),
                self._start_if_allowed,
            )
        else:
            self._start_action(execution, frozenset())

    def _start_if_allowed(self, execution: Execution, availability: NodeAvailability) -> None:
        """Start an execution that takes nodes away, if the node limit allows it."""
        taken = self._store.list_taken_nodes(execution.cluster)
        given_back = {node.node for node in taken} - {
            node.node for node in taken if not availability.is_given_back(node)
        }
        if given_back:
            self._store.release_nodes(execution.cluster, given_back, availability.queried_at)
        rule = self._rules.get(execution.rule)
        if rule is None:
            return
        reason = check_node_limit(
            rule,
            set(availability.to_take),
            self._store.list_taken_nodes(execution.cluster),
            availability.total,
            self._settings.most_nodes_percent,
        )
        if reason:
            self._end_execution(execution, STATUS_HELD_BACK, reason)
        else:
            self._start_action(execution, availability.to_take)

    def _start_action(self, execution: Execution, nodes: frozenset[str]) -> None:
        """Record the start of an execution and run its action in a thread."""
        timeout_s = self._get_timeout_s(execution)
        started = self._store.record_start(execution, self._clock(), nodes)
        self._start_thread(
            "run",
            started,
            lambda performer: performer.run(started, timeout_s),
            self._process_result,
        )

    def _process_result(self, execution: Execution, outcome: OperationOutcome) -> None:
        """Process the outcome of a run."""
        if outcome.status == "succeeded":
            status = "dry-run" if execution.dry_run else "succeeded"
            self._end_execution(
                execution, status, summarize_run(outcome), result=outcome.result, audit=outcome.id
            )
        elif outcome.status == "timeout":
            self._start_thread(
                "check",
                execution,
                lambda performer: performer.check(execution),
                self._process_check,
            )
        else:
            self._retry_or_fail(execution, outcome)

    def _retry_or_fail(self, execution: Execution, outcome: OperationOutcome) -> None:
        """Retry a failed execution, or end it."""
        if not self._schedule_retry(execution, outcome.message):
            self._end_execution(
                execution, "failed", outcome.message, result=outcome.result, audit=outcome.id
            )

    def _process_check(self, execution: Execution, is_done: bool | None) -> None:
        """End or retry a run that timed out, by whether Slurm shows that its change took effect."""
        if is_done:
            self._end_execution(
                execution, "succeeded", "the run timed out, but Slurm shows the change"
            )
        elif is_done is None and self._get_limits(execution).on_unknown == "end":
            self._end_execution(execution, "timeout", "the result is unknown")
        elif not self._schedule_retry(execution, "it timed out"):
            self._end_execution(
                execution, "timeout", "" if is_done is None else "Slurm does not show the change"
            )

    def _schedule_retry(self, execution: Execution, reason: str) -> bool:
        """Schedule a retry if the rule permits one more; return whether it did."""
        limits = self._get_limits(execution)
        if execution.attempts > limits.retries or self._is_stale(execution):
            return False
        delay = timedelta(seconds=limits.backoff_s * 2 ** min(execution.attempts - 1, 12))
        self._store.schedule_retry(
            execution, self._clock() + delay, f"try {execution.attempts}: {reason}"
        )
        return True

    # -- recovery after a crash

    def _start_recoveries(self) -> None:
        """Recover executions of a former process as far as threads are free."""
        now = self._clock()
        for execution, due in list(self._unrecovered.values()):
            if (
                due <= now
                and execution.rule not in self._tasks
                and len(self._tasks) < MAX_PARALLEL_EXECUTIONS
            ):
                self._recover(execution)

    def _recover(self, execution: Execution) -> None:
        """Find out in a thread how far an execution got before a restart."""
        self._start_thread(
            "find", execution, lambda performer: performer.find(execution), self._process_recovery
        )

    def _process_recovery(self, execution: Execution, recovered: RecoveredOutcome) -> None:
        """Process what was found out about an execution of a former process."""
        assert execution.started is not None, execution
        timeout_at = execution.started + timedelta(seconds=self._get_timeout_s(execution))
        row = recovered.row
        is_uncertain = recovered.state in ("not-done", "unseen", "running")
        if is_uncertain and self._clock() < timeout_at:
            # Processes that it started may still be running.
            self._unrecovered[execution.id] = (execution, timeout_at)
            return
        del self._unrecovered[execution.id]
        if recovered.state == "ended" and row is not None:
            self._process_audit_row(execution, recovered)
        elif recovered.state == "not-begun":
            self._store.schedule_retry(
                execution, self._clock(), "Steward restarted before the run began", counts=False
            )
        elif recovered.state == "done":
            self._end_execution(
                execution, "succeeded", "Steward restarted during the run; Slurm shows the change"
            )
        elif recovered.state == "not-done":
            self._store.schedule_retry(
                execution, self._clock(), "Steward restarted before the change"
            )
        elif self._get_limits(execution).on_unknown == "repeat":
            self._store.schedule_retry(
                execution, self._clock(), "Steward restarted during the run: it repeats the action"
            )
        else:
            self._end_execution(
                execution, "unknown", "Steward restarted during the run: the result is unknown"
            )

    def _process_audit_row(self, execution: Execution, recovered: RecoveredOutcome) -> None:
        """Process the outcome that the audit log recorded."""
        row = recovered.row
        assert row is not None, execution
        outcome = OperationOutcome(
            id=row.id,
            action=row.action,
            status="failed" if row.status == "failed" else "succeeded",
            parameters=row.parameters,
            result=row.result,
            message=row.message,
            started=row.started,
            ended=row.ended or row.started,
        )
        if row.status == "timeout":
            outcome = msgspec.structs.replace(outcome, status="timeout")
        self._process_result(execution, outcome)

    # -- threads

    def _start_thread(
        self,
        kind: _Kind,
        execution: Execution,
        work: Callable[[ActionPerformer], Any],
        callback: Callable[[Execution, Any], None],
    ) -> None:
        """Start a thread for an execution."""
        deadline = time.monotonic() + self._get_timeout_s(execution) + GRACE_S
        task = _Task(
            execution=execution, kind=kind, work=work, callback=callback, deadline=deadline
        )
        self._tasks[execution.rule] = task
        name = f"rule {execution.rule}"
        threading.Thread(target=self._run_task, args=(task,), name=name, daemon=True).start()

    def _run_task(self, task: _Task) -> None:
        """Run a task in its own thread and queue the outcome."""
        outcome: Outcome
        try:
            try:
                performer = self._performers.pop()
            except IndexError:
                performer = self._make_performer()
            outcome = task.work(performer)
            self._performers.append(performer)
        except BaseException as error:
            outcome = error
        self._outcomes.put((task, outcome))

    def _end_execution(
        self, execution: Execution, status: str, message: str, *, result: Any = None, audit: int = 0
    ) -> None:
        """Record the end of an execution."""
        self._unavailable_counts.pop(execution.id, None)
        with self._open_transaction() as new_events:
            ended = self._store.record_end(
                execution, status, self._clock(), message=message, result=result, audit=audit
            )
            new_events.append(make_end_event(ended))

    def _get_limits(self, execution: Execution) -> RuleLimits:
        """Return the limits of an execution's rule; the defaults if it is disabled."""
        rule = self._rules.get(execution.rule)
        return RuleLimits() if rule is None else rule.limits

    def _get_timeout_s(self, execution: Execution) -> float:
        """Return the time limit of an execution's action, in seconds."""
        return self._get_limits(execution).timeout_s or self._timeout_s

    def _is_stale(self, execution: Execution) -> bool:
        """Return whether an execution has waited longer than its rule's maximum age."""
        return (self._clock() - execution.triggered).total_seconds() > self._get_limits(
            execution
        ).max_age_s
