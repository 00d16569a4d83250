"""Slurm errors: exceptions for failed commands, with the command and Slurm's message.

:class:`SlurmError` is the base class. :class:`SlurmUnavailable` and its subclasses mean "try again
later": Slurm, its network or its file system is down. After the others, a repetition is not
expected to succeed.
"""

from collections.abc import Sequence

from steward.core.errors import NotFound, PermissionRefused, StewardError, Unavailable


class SlurmError(StewardError):
    """A Slurm command failed, or its output could not be parsed.

    Args:
        message: One line: what happened and what to do about it.
        command: The program and its arguments.
        output: Its stderr, or the part of stdout that could not be parsed.
    """

    def __init__(self, message: str, command: Sequence[str] = (), output: str = "") -> None:
        super().__init__(message, tuple(command))
        self.command = tuple(command)
        self.output = output


class SlurmUnavailable(SlurmError, Unavailable):
    """slurmctld or slurmdbd does not answer, or not in time. Retry later."""


class SlurmDown(SlurmUnavailable):
    """slurmctld or slurmdbd refuses connections. Retrying costs it nothing."""


class SlurmMissing(SlurmUnavailable):
    """The Slurm command does not exist, perhaps only while a mount or an upgrade is under way."""


class SlurmRefused(SlurmError, PermissionRefused):
    """Slurm denies permission."""


class ScrontabJob(SlurmError):
    """The job belongs to scrontab; Slurm lets nobody change such jobs, only cancel them."""


class UnknownJob(SlurmError, NotFound):
    """Slurm does not know this job id, or no longer knows it."""


class UnknownNode(SlurmError, NotFound):
    """Slurm lacks at least one of the named nodes.

    Args:
        nodes: The unknown names.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        names = ", ".join(nodes)
        super().__init__(
            f"Slurm has no node {names}"
            if len(nodes) == 1
            else f"Slurm has none of the nodes {names}",
            (),
            names,
        )
        self.nodes = tuple(nodes)


class UnknownPartition(SlurmError, NotFound):
    """No partition has this name."""


class UnknownReservation(SlurmError, NotFound):
    """No reservation has this name."""


class UnknownTrigger(SlurmError, NotFound):
    """No trigger has this id, or it belongs to another user."""


class UnknownEvent(SlurmError):
    """This Slurm version's strigger lacks the event."""


class EventNeverFires(SlurmError):
    """Slurm accepts triggers for this event but never starts their program."""


class WrongUpdate(SlurmError):
    """Invalid change: a key or value that Slurm would reject or misread."""
