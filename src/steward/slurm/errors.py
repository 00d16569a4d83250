"""What can go wrong when Slurm is asked: each error carries the command and what Slurm said."""

from collections.abc import Sequence

from steward.errors import Refused, StewardError, Unavailable


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


class UnknownJob(SlurmError):
    """Slurm does not know a job of this id (any more)."""
