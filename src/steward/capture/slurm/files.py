"""What lies in a job's directory of slurmctld's spool: a script with one NUL, an environment."""

import logging
import os

import msgspec

from steward.capture.scheduler import Contents
from steward.capture.taking import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    MOST_ENVIRONMENT_BYTES,
    SCRIPT_TOO_LARGE,
    read_whole,
)
from steward.environment import read_environment
from steward.redact import Redactor

log = logging.getLogger(__name__)

SCRIPT_WITHOUT_NUL = "script-no-nul"


class Grabbed(msgspec.Struct, frozen=True):
    """Open descriptors on a job's complete script and its environment (-1 where there is none)."""

    job_id: int
    mtime_ns: int
    script_fd: int
    environment_fd: int

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
        if self.environment_fd < 0:
            return Contents(script, None, (*flags, ENVIRONMENT_MISSING))
        environment_file = read_whole(self.environment_fd, MOST_ENVIRONMENT_BYTES)
        if environment_file is None:
            log.warning("job %d has an environment too large to be kept", self.job_id)
            return Contents(script, None, (*flags, ENVIRONMENT_TOO_LARGE))
        environment = read_environment(environment_file, redactor)
        return Contents(script, environment, flags + environment.flags)

    def close(self) -> None:
        """Let go of the bytes."""
        os.close(self.script_fd)
        if self.environment_fd >= 0:
            os.close(self.environment_fd)
