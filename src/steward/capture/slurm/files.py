"""What lies in a job's directory of slurmctld's spool: a script with one NUL, an environment."""

import logging
import os
import stat

import msgspec

from steward.capture.scheduler import Contents, EnvironmentUnreadable
from steward.capture.taking import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    ENVIRONMENT_UNREADABLE,
    MOST_ENVIRONMENT_BYTES,
    OPEN,
    SCRIPT_TOO_LARGE,
    is_unlinked,
    is_written,
    read_whole,
)
from steward.core.redaction import Redactor
from steward.slurm.environment import read_environment

log = logging.getLogger(__name__)

SCRIPT_WITHOUT_NUL = "script-no-nul"


class _ForeignError(Exception):
    """A file that slurmctld did not make."""


class Grabbed(msgspec.Struct, frozen=True):
    """Open descriptors on a job's complete script and its environment (-1 where there is none).

    An environment that could not be opened has its path in ``unopened``.
    """

    job_id: int
    mtime_ns: int
    script_fd: int
    environment_fd: int
    unopened: str = ""

    @property
    def is_removed(self) -> bool:
        """Whether slurmctld has removed the script."""
        return is_unlinked(self.script_fd)

    def read(self, redactor: Redactor) -> Contents:
        """The script less its one trailing NUL, and the environment as it may be kept."""
        script = read_whole(self.script_fd)
        if script is None:
            log.warning("job %d has a script too large to be kept", self.job_id)
            return Contents(None, flags=(SCRIPT_TOO_LARGE,))
        flags: tuple[str, ...] = ()
        if script.endswith(b"\0"):
            script = script[:-1]
        else:
            flags = (SCRIPT_WITHOUT_NUL,)
        if self.environment_fd < 0 and not self.unopened:
            return Contents(script, None, (*flags, ENVIRONMENT_MISSING))
        alone = Contents(script, None, (*flags, ENVIRONMENT_UNREADABLE))
        try:
            environment_file = self._read_environment()
        except (FileNotFoundError, _ForeignError):
            return alone  # no later read can find it
        except OSError as error:
            raise EnvironmentUnreadable(error, alone) from error
        if environment_file is None:
            log.warning("job %d has an environment too large to be kept", self.job_id)
            return Contents(script, None, (*flags, ENVIRONMENT_TOO_LARGE))
        environment = read_environment(environment_file, redactor)
        return Contents(script, environment, flags + environment.flags)

    def _read_environment(self) -> bytes | None:
        """The environment's file; None if it is too large.

        Raises:
            OSError: It cannot be read now, or is gone.
            _ForeignError: It is no regular file.
        """
        fd = self.environment_fd if self.environment_fd >= 0 else os.open(self.unopened, OPEN)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _ForeignError
            return read_whole(fd, MOST_ENVIRONMENT_BYTES)
        finally:
            if fd != self.environment_fd:
                os.close(fd)

    def close(self) -> None:
        """Let go of the bytes."""
        os.close(self.script_fd)
        if self.environment_fd >= 0:
            os.close(self.environment_fd)


def spooled_script(root: str, job_id: int) -> tuple[int, bytes] | None:
    """Read the script that slurmctld still holds of a job, and its modification time (ns).

    Args:
        root: StateSaveLocation.
        job_id: Raw id; of an array the array's, of a het job its leader's.

    Returns:
        None where there is none, it is being written, or this process may not read it.
    """
    try:
        fd = os.open(f"{root}/hash.{job_id % 10}/job.{job_id}/script", OPEN)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or is_written(fd) is False:
            return None
        script = read_whole(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if script is None else (status.st_mtime_ns, script.removesuffix(b"\0"))
