"""What a rule's action is done with: by one thread at a time, which may wait long."""

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
from steward.automation.operation import operation
from steward.automation.rules.limits import (
    Taken,
    nodes_taken,
    over_cap,
    partition_taken,
    takes_nodes,
)
from steward.automation.rules.model import Care, Rule
from steward.automation.rules.store import HELD_BACK, Execution, Store
from steward.automation.runner import Ran, Runner
from steward.automation.settings import RulesSettings
from steward.core.access import Access, this_user
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import StewardError, Unavailable
from steward.core.events import RULE_EXECUTION, Event, RuleExecution, utc_now
from steward.core.sqlite import transaction
from steward.jobs.outbox import Outbox

_CLOCKS_S: Final = 1.0
_MOST_ROWS: Final = 1000

Traces = Literal["ended", "not-begun", "done", "not-done", "running", "unseen"]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm shows of nodes.

    Attributes:
        wanted: Those that an action would take away.
        available: Those that take jobs: their state lets them, no reservation has them, and
            every partition of theirs is up.
        names: All of them.
        members: The nodes of each partition that is up.
        seen: When the look began.
    """

    wanted: frozenset[str]
    available: frozenset[str]
    names: frozenset[str]
    members: dict[str, frozenset[str]] = msgspec.field(default_factory=dict)
    seen: datetime

    def has_back(self, taken: Taken) -> bool:
        """Whether a node that was taken is seen to be given back, or is gone."""
        if taken.node not in self.names:
            return True
        if taken.node not in self.available:
            return False
        return not taken.kept_by or taken.node in self.members.get(taken.kept_by, ())

    @property
    def total(self) -> int:
        """How many nodes there are."""
        return len(self.names)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an action that was started, and of whose end nobody told.

    Attributes:
        traces: ``ended`` (the audit log tells how), ``not-begun`` (nothing was changed),
            ``done`` and ``not-done`` (Slurm shows it), ``running`` (whoever runs it lives),
            or ``unseen``.
        row: What the audit log has of it.
    """

    traces: Traces
    row: AuditRow | None = None


class Hand(Protocol):
    """Does what rules want done; any of it may wait for Slurm or for others."""

    def look(self, one: Execution) -> Look:
        """What Slurm shows of the nodes that an action would take away."""
        ...

    def run(self, one: Execution, timeout_s: float | None) -> Ran:
        """Run an action."""
        ...

    def check(self, one: Execution) -> bool | None:
        """Whether what an action was to change is so; None where that cannot be seen."""
        ...

    def find(self, one: Execution) -> Found:
        """What became of an action of which only its start is known."""
        ...


MakeHand = Callable[[], Hand]


class RunnersHand:
    """A hand of its own Runner.

    Args:
        settings: The whole configuration.
        access: Who may see and do what.
        registry: What other rooms can be asked for; of this hand alone.
    """

    def __init__(self, settings: Settings, access: Access, registry: Registry) -> None:
        self._settings = settings
        self._runner = Runner(settings, access, registry)
        self._asker = this_user()

    def look(self, one: Execution) -> Look:
        """See :class:`Hand`.

        Raises:
            StewardError: A node is unknown, or Slurm does not answer.
        """
        from steward.slurm import Machine
        from steward.slurm.node_states import is_available
        from steward.slurm.nodelists import expand

        if one.cluster not in self._settings.cluster:
            raise RuleError(
                f"there is no cluster {one.cluster!r} in the configuration", one.cluster
            )
        seen = utc_now()
        machine = Machine(one.cluster, self._settings.cluster[one.cluster])
        nodes = machine.nodes()
        listed = nodes_taken(one.action, one.parameters)
        wanted = set(machine.node_names(listed)) if listed else set()
        partition = partition_taken(one.action, one.parameters)
        wanted |= {name for name, node in nodes.items() if partition in node.partitions}
        up = {name for name, of in machine.partitions().items() if of.state == "UP"}
        reserved = [held.nodes for held in machine.reservations().values() if held.nodes]
        held = {name for listed in reserved for name in expand(listed)}
        return Look(
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

    def run(self, one: Execution, timeout_s: float | None) -> Ran:
        """See :class:`Hand`.

        Raises:
            StewardError: What stood against it; nothing was changed.
        """
        return self._runner.run(
            one.action,
            one.parameters,
            self._asker,
            cluster=self._cluster(one),
            dry_run=one.dry_run,
            speaker=_speaker(one),
            timeout_s=timeout_s,
        )

    def check(self, one: Execution) -> bool | None:
        """See :class:`Hand`.

        Raises:
            StewardError: It cannot be asked now.
        """
        return self._runner.check(
            one.action,
            one.parameters,
            self._asker,
            cluster=self._cluster(one),
            speaker=_speaker(one),
        )

    def find(self, one: Execution) -> Found:
        """See :class:`Hand`.

        The audit log has a row of every change before it is made, so that what has
        no row was not begun.

        Raises:
            StewardError: It cannot be asked now.
        """
        if one.dry_run or not operation(one.action).changes:
            return Found(traces="not-begun")
        row = self._row_of(one)
        if row is None:
            return Found(traces="not-begun")
        if row.status == "running":
            return Found(traces="running", row=row)
        if row.status != "unfinished":
            return Found(traces="ended", row=row)
        is_done = self.check(one)
        if is_done is None:
            return Found(traces="unseen", row=row)
        return Found(traces="done" if is_done else "not-done", row=row)

    def _row_of(self, one: Execution) -> AuditRow | None:
        assert one.started is not None, one
        rows = self._runner.audit.rows(
            limit=_MOST_ROWS,
            since=one.started - timedelta(seconds=_CLOCKS_S),
            ref=one.action,
            cluster=self._cluster(one),
            uid=self._asker.uid,
        )
        # A rule's executions come one after the other, so the first one since is this one's.
        mine = [row for row in rows if row.speaker == _speaker(one) and row.at >= one.started]
        return mine[-1] if mine else None

    def _cluster(self, one: Execution) -> str:
        return one.cluster if one.cluster in self._settings.cluster else ""


def _speaker(one: Execution) -> str:
    return f"rule {one.rule}"


def message_of(ran: Ran) -> str:
    """What is told of a run in one line."""
    if ran.message:
        return ran.message
    told: Any = ran.result
    return told if isinstance(told, str) else ""


SOURCE: Final = "rules"


class Telling:
    """Records ends together with the events that tell of them, and sends those.

    Args:
        store: The history.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._outbox = Outbox(store.connection, store.path)
        self._untold: list[Event] = []

    def put(self, ended: Iterable[Execution]) -> list[Event]:
        """Have executions told that ended, within a transaction; what is to be sent after it."""
        events = [_event_of(one) for one in ended]
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
        """Record how an execution ended, and have it told."""
        with transaction(self._store.connection, self._store.path):
            ended = self._store.end(one, status, now, message=message, result=result, audit=audit)
            self._outbox.put([_event_of(ended)])
        self._untold.append(_event_of(ended))

    def send(self, append: Append, upto: int | None = None, events: Sequence[Event] = ()) -> None:
        """Tell what there is, then move the cursor.

        Args:
            append: Appends to the journal.
            upto: Where the cursor is to be; None to leave it.
            events: What was put, once that is committed.

        Raises:
            Unavailable: The journal is away.
        """
        # What could not be sent stays in the outbox, which sends it with the next.
        untold, self._untold = [*self._untold, *events], []
        self._outbox.send(append, upto, untold)


def _event_of(one: Execution) -> Event:
    at = one.ended or one.made
    return Event(
        kind=RULE_EXECUTION,
        cluster=one.cluster,
        key=f"{RULE_EXECUTION}:{one.rule}:{one.event}",
        at=at,
        seen_at=at,
        source=SOURCE,
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


log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 8
"""How many executions, of as many rules, are under way at once."""
GRACE_S: Final = 30.0
"""Seconds beyond its time-out after which nobody waits for an action any longer."""

_POLL_S: Final = 0.05
_IDLE_S: Final = 5.0
_AWAY_S: Final = (2.0, 4.0, 8.0, 15.0, 30.0)
_CLOSE_S: Final = 2.5
_MOST_STARTS: Final = 50

_Kind = Literal["look", "run", "check", "find"]
Outcome = Look | Ran | Found | bool | None | BaseException


class _Task(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Something that a thread waits for.

    Attributes:
        one: The execution that it is for.
        kind: What is done.
        does: Does it, with a hand.
        then: Takes what comes back.
        until: When nobody waits for it any longer, on the monotonic clock.
    """

    one: Execution
    kind: _Kind
    does: Callable[[Hand], Any]
    then: Callable[[Execution, Any], None]
    until: float


class Executing:
    """Starts and ends executions.

    Args:
        store: The history.
        telling: Records ends.
        settings: The configuration's [rules].
        timeout_s: How long an action may take where its rule does not say, in seconds.
        make_hand: Makes what does the waiting, for one thread at a time.
        clock: Tells the present moment.
    """

    def __init__(
        self,
        store: Store,
        telling: Telling,
        settings: RulesSettings,
        timeout_s: float,
        make_hand: MakeHand,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._telling = telling
        self._settings = settings
        self._timeout_s = timeout_s
        self._make_hand = make_hand
        self._clock = clock
        self._rules: Mapping[str, Rule] = {}
        self._hands: deque[Hand] = deque()
        self._back: SimpleQueue[tuple[_Task, Outcome]] = SimpleQueue()
        self._tasks: dict[str, _Task] = {}
        self._away: dict[int, int] = {}
        # What a former process had started: what became of it is looked up first.
        self._lost = {one.id: (one, clock()) for one in store.open_("started")}

    def turn(self, rules: Mapping[str, Rule]) -> float:
        """Take in what has come back, and start what is due.

        Args:
            rules: Those that are switched on, by name.

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
        """Wait a little for what is under way; the rest is looked up at the next start."""
        until = time.monotonic() + _CLOSE_S
        while self._tasks and time.monotonic() < until:
            self._take_in(_POLL_S, starts=False)

    # -- what comes back

    def _take_in(self, wait_s: float = 0.0, *, starts: bool = True) -> None:
        for task, outcome in self._returned(wait_s):
            if self._tasks.get(task.one.rule) is not task:
                log.warning("execution %d came back after all: %r", task.one.id, outcome)
                continue
            del self._tasks[task.one.rule]
            if isinstance(outcome, Unavailable):
                self._wait_for(task, outcome)
            elif isinstance(outcome, BaseException):
                self._broken(task, outcome)
            elif starts or not isinstance(outcome, Look):
                task.then(task.one, outcome)

    def _returned(self, wait_s: float) -> Iterator[tuple[_Task, Outcome]]:
        try:
            if wait_s:
                yield self._back.get(timeout=wait_s)
            while True:
                yield self._back.get_nowait()
        except Empty:
            return

    def _give_up(self) -> None:
        now = time.monotonic()
        for task in [task for task in self._tasks.values() if task.until < now]:
            del self._tasks[task.one.rule]
            log.error("execution %d of rule %s hangs", task.one.id, task.one.rule)
            self._lost.pop(task.one.id, None)
            self._end(task.one, "timeout", "it did not come back at all")

    def _wait_for(self, task: _Task, error: Unavailable) -> None:
        """Ask again later, or try again what was not begun: something is away."""
        one = task.one
        self._took_nothing(task)
        times = self._away.get(one.id, 0)
        self._away[one.id] = times + 1
        due = self._clock() + timedelta(seconds=_AWAY_S[min(times, len(_AWAY_S) - 1)])
        if task.kind in ("check", "find"):
            self._lost[one.id] = (one, due)
        elif self._is_stale(one):
            self._end(one, "failed", str(error))
        else:
            self._store.again(one, due, str(error), counts=False)

    def _took_nothing(self, task: _Task) -> None:
        """What a run raises it raises before anything is changed."""
        if task.kind == "run":
            self._store.take_nothing(task.one)

    def _broken(self, task: _Task, error: BaseException) -> None:
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

    # -- what is due

    def _start_due(self) -> None:
        for _ in range(_MOST_STARTS):
            free = MOST_AT_ONCE - len(self._tasks)
            busy = {*self._tasks, *(one.rule for one, _ in self._lost.values())}
            due = self._store.due(self._clock(), busy)[: max(0, free)]
            if not due:
                return
            for one in due:
                self._begin(one)

    def _begin(self, one: Execution) -> None:
        rule = self._rules.get(one.rule)
        if rule is None:
            self._end(one, HELD_BACK, "the rule is not there any more, or was switched off")
        elif self._is_stale(one):
            why = f"it waited too long; {one.message}".rstrip("; ")
            self._end(one, "failed" if one.tries else HELD_BACK, why)
        elif not one.dry_run and takes_nodes(one.action):
            self._do("look", one, lambda hand: hand.look(one), self._looked)
        else:
            self._start(one, frozenset())

    def _looked(self, one: Execution, look: Look) -> None:
        """Start an execution that takes nodes away, if so many may be."""
        taken = self._store.taken(one.cluster)
        back = {node.node for node in taken} - {
            node.node for node in taken if not look.has_back(node)
        }
        if back:
            self._store.give_back(one.cluster, back, look.seen)
        rule = self._rules.get(one.rule)
        if rule is None:
            return
        why = over_cap(
            rule,
            set(look.wanted),
            self._store.taken(one.cluster),
            look.total,
            self._settings.most_nodes_percent,
        )
        if why:
            self._end(one, HELD_BACK, why)
        else:
            self._start(one, look.wanted)

    def _start(self, one: Execution, nodes: frozenset[str]) -> None:
        timeout_s = self._limit_s(one)
        started = self._store.start(one, self._clock(), nodes)
        self._do("run", started, lambda hand: hand.run(started, timeout_s), self._ran)

    def _ran(self, one: Execution, ran: Ran) -> None:
        if ran.status == "succeeded":
            status = "dry-run" if one.dry_run else "succeeded"
            self._end(one, status, message_of(ran), result=ran.result, audit=ran.id)
        elif ran.status == "timeout":
            self._do("check", one, lambda hand: hand.check(one), self._checked)
        else:
            self._failed(one, ran)

    def _failed(self, one: Execution, ran: Ran) -> None:
        if not self._retry(one, ran.message):
            self._end(one, "failed", ran.message, result=ran.result, audit=ran.id)

    def _checked(self, one: Execution, is_done: bool | None) -> None:
        """After a time-out: the change may be there all the same."""
        if is_done:
            self._end(one, "succeeded", "it timed out, and Slurm shows that it was done")
        elif is_done is None and self._care(one).on_unknown == "end":
            self._end(one, "timeout", "whether it was done is not known")
        elif not self._retry(one, "it timed out"):
            self._end(one, "timeout", "" if is_done is None else "Slurm shows that it was not done")

    def _retry(self, one: Execution, why: str) -> bool:
        care = self._care(one)
        if one.tries > care.retries or self._is_stale(one):
            return False
        wait = timedelta(seconds=care.backoff_s * 2 ** min(one.tries - 1, 12))
        self._store.again(one, self._clock() + wait, f"try {one.tries}: {why}")
        return True

    # -- what a crash left open

    def _find_lost(self) -> None:
        now = self._clock()
        for one, due in list(self._lost.values()):
            if due <= now and one.rule not in self._tasks and len(self._tasks) < MOST_AT_ONCE:
                self._find(one)

    def _find(self, one: Execution) -> None:
        self._do("find", one, lambda hand: hand.find(one), self._found)

    def _found(self, one: Execution, found: Found) -> None:
        assert one.started is not None, one
        over = one.started + timedelta(seconds=self._limit_s(one))
        row = found.row
        is_unsure = found.traces in ("not-done", "unseen", "running")
        if is_unsure and self._clock() < over:
            # What it had started may still be at it.
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

    def _ended_before(self, one: Execution, found: Found) -> None:
        row = found.row
        assert row is not None, one
        ran = Ran(
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
        does: Callable[[Hand], Any],
        then: Callable[[Execution, Any], None],
    ) -> None:
        until = time.monotonic() + self._limit_s(one) + GRACE_S
        task = _Task(one=one, kind=kind, does=does, then=then, until=until)
        self._tasks[one.rule] = task
        name = f"rule {one.rule}"
        threading.Thread(target=self._work, args=(task,), name=name, daemon=True).start()

    def _work(self, task: _Task) -> None:
        """In a thread of its own: wait for what is to be done."""
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
        self._away.pop(one.id, None)
        self._telling.end(one, status, self._clock(), message=message, result=result, audit=audit)

    def _care(self, one: Execution) -> Care:
        rule = self._rules.get(one.rule)
        return Care() if rule is None else rule.care

    def _limit_s(self, one: Execution) -> float:
        return self._care(one).timeout_s or self._timeout_s

    def _is_stale(self, one: Execution) -> bool:
        return (self._clock() - one.made).total_seconds() > self._care(one).max_age_s
