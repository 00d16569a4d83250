"""What one run of an operation works with: its cluster, its asker, and how far it may go."""

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.automation.errors import NotYours, OutOfTime
from steward.automation.operation import Right
from steward.core.access import Access, Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.slurm import Slurm
    from steward.slurm.changing import Changing
    from steward.slurm.machine import Machine
    from steward.slurm.machine_changing import MachineChanging
    from steward.slurm.triggers import Triggers

_SAY: Final[dict[Right, str]] = {
    "owner": "the job's owner and operators",
    "operator": "operators",
    "administrator": "administrators",
}


class Work:
    """One run of an operation, see :class:`steward.automation.operation.Doing`.

    Args:
        ref: The operation.
        settings: The whole configuration.
        access: Who may see and do what.
        registry: What other rooms can be asked for.
        asker: Who wants it.
        cluster: Where; "" for what is done on none.
        speaker: For whom a reason speaks.
        dry_run: Whether it only says what it would do.
        force: Whether others' reasons are overridden.
        timeout_s: How long it may take, in seconds.
        began: Called once, right before anything is changed.
    """

    def __init__(
        self,
        ref: str,
        settings: Settings,
        access: Access,
        registry: Registry,
        asker: Asker,
        cluster: str,
        *,
        speaker: str,
        dry_run: bool,
        force: bool,
        timeout_s: float,
        began: Callable[[], None],
    ) -> None:
        self.ref = ref
        self.cluster = cluster
        self.settings = settings
        self.access = access
        self.asker = asker
        self.speaker = speaker
        self.dry_run = dry_run
        self.force = force
        self.timeout_s = timeout_s
        self._registry = registry
        self._until = time.monotonic() + timeout_s
        self._began = began
        self._has_begun = False
        known = settings.cluster.get(cluster, ClusterSettings())
        # A command that hangs must not take longer than the whole action may.
        least_s = min(known.command_timeout_s, timeout_s)
        self.cluster_settings = msgspec.structs.replace(known, command_timeout_s=least_s)

    @cached_property
    def slurm(self) -> "Slurm":
        """The cluster's Slurm."""
        from steward.slurm import Slurm

        return Slurm(self.cluster, self.cluster_settings)

    @cached_property
    def machine(self) -> "Machine":
        """Its nodes, partitions, reservations and jobs as Slurm shows them."""
        from steward.slurm.machine import Machine

        return Machine(self.cluster, self.cluster_settings)

    @cached_property
    def changing(self) -> "MachineChanging":
        """What changes nodes, partitions and reservations."""
        from steward.slurm.machine_changing import MachineChanging

        return MachineChanging(self.cluster, self.cluster_settings)

    @cached_property
    def jobs(self) -> "Changing":
        """What changes jobs."""
        from steward.slurm.changing import Changing

        return Changing(self.cluster, self.cluster_settings)

    @cached_property
    def triggers(self) -> "Triggers":
        """What sets and clears triggers."""
        from steward.slurm.triggers import Triggers

        return Triggers(self.cluster, self.cluster_settings)

    @property
    def left_s(self) -> float:
        """Seconds that it may still take; 0 for none."""
        return max(0.0, self._until - time.monotonic())

    def begin(self) -> None:
        """Say that the next thing done changes something, see ``Doing.begin``.

        Raises:
            OutOfTime: There is no time left.
            AuditUnavailable: It cannot be written down first.
        """
        assert not self.dry_run, f"{self.ref} changes something in a dry run"
        if self.left_s <= 0:
            raise OutOfTime(f"{self.ref} took longer than {self.timeout_s:g} s", self.ref)
        if not self._has_begun:
            self._has_begun = True
            self._began()

    def needs(self, right: Right, owner_uid: int | None = None) -> None:
        """Let the asker pass who has this right on the cluster.

        Raises:
            NotYours: The asker has not.
        """
        if not self._has(right, owner_uid):
            where = f" of {self.cluster}" if self.cluster else ""
            raise NotYours(f"{self.ref} is for {_SAY[right]}{where}", self.asker.user)

    def is_operator(self) -> bool:
        """Whether the asker may do what operators may."""
        return self._has("operator")

    def grant(self, jobs: str, job_id: int, *, restarts: int, released: bool) -> None:
        """Have the gate decide on a change as the asker's, see ``Doing.grant``.

        slurmctld knows SlurmUser alone, as whom the change is sent. Where the gate is away, its
        outage policy applies.

        Raises:
            BankRefused: The gate rejects it, or is away while its policy is to deny.
        """
        if not self.settings.bank.enabled:
            return
        from steward.bank.errors import BankRefused, GateUnavailable
        from steward.bank.gate.link import GateLink
        from steward.bank.gate.shapes import VERSION, Submit
        from steward.bank.records import Description

        change = Description(uid=-1, job_id=job_id, released=released)
        ask = Submit(
            v=VERSION, op="modify", cluster=self.cluster, job=change, jobs=jobs, by=self.asker.uid
        )
        try:
            said = GateLink(self.settings.state_dir).grant(ask, self.asker.user, restarts)
        except GateUnavailable as error:
            if self.settings.gate.policy == "deny":
                raise BankRefused(f"job {jobs} is not changed: {error}", jobs) from error
            return
        if not said.ok:
            raise BankRefused(said.say, jobs)

    def ask(self, name: str, request: dict[str, Any]) -> Any:
        """Have another room's action done for the same asker: its answer.

        Raises:
            StewardError: Whatever that refuses or cannot do.
        """
        decoded = self._registry.decode(name, request)
        return self._registry.call(name, self.asker, decoded)

    def _has(self, right: Right, owner_uid: int | None = None) -> bool:
        # What is done on no cluster is for those who may do it on each.
        clusters = [self.cluster] if self.cluster else (list(self.settings.cluster) or [""])
        if right == "everyone":
            return True
        if right == "administrator":
            return all(self.access.is_administrator(self.asker, name) for name in clusters)
        if right == "owner" and owner_uid is not None and owner_uid == self.asker.uid:
            return bool(self.asker.user)
        return all(self.access.is_operator(self.asker, name) for name in clusters)
