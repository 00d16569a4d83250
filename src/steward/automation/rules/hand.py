"""What a rule's action is done with: by one thread at a time, which may wait long."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol

import msgspec

from steward.automation.audit import AuditRow
from steward.automation.catalogue import operation
from steward.automation.errors import RuleError
from steward.automation.rules import caps
from steward.automation.rules.tables import Execution
from steward.automation.running import Ran, Runner
from steward.core.access import Access, this_user
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.events import utc_now

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

    def has_back(self, taken: caps.Taken) -> bool:
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
        listed = caps.nodes_taken(one.action, one.parameters)
        wanted = set(machine.node_names(listed)) if listed else set()
        partition = caps.partition_taken(one.action, one.parameters)
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
