"""What can go wrong when Slurm is asked: each error carries the command and what Slurm said."""

from collections.abc import Sequence

from steward.core.errors import Refused, StewardError, Unavailable


class SlurmError(StewardError):
    """One of Slurm's commands failed, or said what we do not understand.

    Args:
        what: One line: what happened, and what to do about it.
        command: The program and its arguments.
        said: What it wrote on stderr, or of stdout what was not understood.
    """

    def __init__(self, what: str, command: Sequence[str] = (), said: str = "") -> None:
        super().__init__(what, tuple(command))
        self.command = tuple(command)
        self.said = said


class SlurmUnavailable(SlurmError, Unavailable):
    """slurmctld or slurmdbd does not answer, or not in time: ask again later."""


class SlurmDown(SlurmUnavailable):
    """Nobody listens where slurmctld or slurmdbd should: asking again costs it nothing."""


class SlurmMissing(SlurmUnavailable):
    """There is no such command (yet: a file system may come back, an upgrade may end)."""


class SlurmRefused(SlurmError, Refused):
    """Slurm does not let us do this."""


class ScrontabJob(SlurmError):
    """Slurm changes jobs of scrontab for nobody: they run, or are cancelled."""


class UnknownJob(SlurmError):
    """Slurm does not know a job of this id (any more)."""


class UnknownNode(SlurmError):
    """Slurm has no such nodes.

    Args:
        nodes: Their names.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        names = ", ".join(nodes)
        super().__init__(
            f"Slurm knows no node {names}"
            if len(nodes) == 1
            else f"Slurm knows none of the nodes {names}",
            (),
            names,
        )
        self.nodes = tuple(nodes)


class UnknownPartition(SlurmError):
    """Slurm has no such partition."""


class UnknownReservation(SlurmError):
    """Slurm has no such reservation."""


class UnknownTrigger(SlurmError):
    """Slurm has no trigger of this id (any more), or it is another user's."""


class UnknownEvent(SlurmError):
    """This Slurm's strigger has no such event."""


class EventNeverFires(SlurmError):
    """A trigger could be set for this event, but this Slurm never starts its program."""


class WrongUpdate(SlurmError):
    """What is to be changed cannot be: a name or a value that Slurm would not take as meant."""
