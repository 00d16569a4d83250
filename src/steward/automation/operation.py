"""What can be done: each operation is described once, for command line, API, rules, pack and docs.

An operation's parameters are a Struct, whose fields say by ``Annotated`` and
``msgspec.Meta(description=…)`` what they are for. What it gives back is plain
JSON, of the shape that StackStorm's slurm pack gives where that has the same one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from steward.core.access import Access, Asker
from steward.core.config import Settings
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.slurm import Slurm
    from steward.slurm.changing import Changing
    from steward.slurm.machine import Machine
    from steward.slurm.machine_changing import MachineChanging
    from steward.slurm.triggers import Triggers

Right = Literal["everyone", "owner", "operator", "administrator"]
"""Who may: everyone who may see it, the job's owner, an operator, or an administrator; each
of them may what those before may."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation's parameters; a field that it does not have is an error."""


class Doing(Protocol):
    """What an operation works with: where, for whom, and how far it may go."""

    cluster: str
    cluster_settings: ClusterSettings
    settings: Settings
    asker: Asker
    speaker: str
    """Who stands behind a reason: ``alice``, ``rule node-down``."""
    dry_run: bool
    """Whether it only says what it would do: everything is looked at, nothing is changed."""
    force: bool
    """Whether reasons and drains of others are overridden."""
    access: Access
    """Who may see and do what."""
    timeout_s: float
    """How long it may take altogether, in seconds."""

    @property
    def left_s(self) -> float:
        """Seconds of them that are left."""
        ...

    @property
    def slurm(self) -> "Slurm":
        """The cluster's Slurm."""
        ...

    @property
    def machine(self) -> "Machine":
        """The cluster's nodes, partitions, reservations and jobs as Slurm shows them."""
        ...

    @property
    def changing(self) -> "MachineChanging":
        """What changes nodes, partitions and reservations."""
        ...

    @property
    def jobs(self) -> "Changing":
        """What changes jobs."""
        ...

    @property
    def triggers(self) -> "Triggers":
        """What sets and clears triggers."""
        ...

    def begin(self) -> None:
        """Say that all was looked at, and that the next thing done changes something.

        It is in the audit log from here on; whatever goes wrong before changes nothing. Called
        again it sees to it that there is time left.

        Raises:
            OutOfTime: The action has taken as long as it may.
            AuditUnavailable: Nothing can be written there: then nothing is changed.
        """
        ...

    def is_operator(self) -> bool:
        """Whether the asker may do what operators may."""
        ...

    def needs(self, right: Right, owner_uid: int | None = None) -> None:
        """Let the asker pass who has this right on the cluster.

        Raises:
            NotYours: The asker has not.
        """
        ...

    def grant(self, jobs: str, job_id: int, *, restarts: int, released: bool) -> None:
        """Have the bank's gate decide on a change of a job, as the asker's, before it is sent.

        Args:
            jobs: How Slurm's commands name the job.
            job_id: Its raw id.
            restarts: How often it was requeued before the run that the change is for.
            released: Whether the change lets it start.

        Raises:
            BankRefused: The gate rejects it; in the gate's words.
        """
        ...

    def ask(self, name: str, request: dict[str, Any]) -> Any:
        """Have another room's action done, such as ``bank.balance``, for the same asker."""
        ...


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be done.

    Attributes:
        ref: Its name, ``slurm.node.drain``.
        help: One line for people.
        parameters: The Struct that they are decoded into.
        gives: One line on its result.
        run: Does it; gives plain JSON.
        right: Who may.
        changes: Whether it changes anything: then it is audited, and takes ``dry_run``.
        remote: Whether it may be had through the API, from other hosts.
        pack: Whether it is one of StackStorm's slurm pack.
        on_cluster: Whether it is done on a cluster, whose Slurm is asked; not a mail.
        check: Says whether a change is there, for one that was begun and not ended:
            True, False, or None where that cannot be seen.
    """

    ref: str
    help: str
    gives: str
    parameters: type[Parameters]
    run: Callable[[Doing, Any], Any]
    right: Right = "everyone"
    changes: bool = False
    remote: bool = True
    pack: bool = False
    on_cluster: bool = True
    check: Callable[[Doing, Any], bool | None] | None = None
