"""Slurm command runner: clean environment, time-out, and errors that name the cause.

:class:`CommandRunner` starts squeue, scontrol, sacct and the others for one cluster, without a
shell. Every other module of this package goes through it.

Dozens of environment variables (SQUEUE_FORMAT, SLURM_TIME_FORMAT, SACCT_FEDERATION …) change what
Slurm's commands print. So none is inherited but those in ``_INHERITED``; the zone is UTC and the
locale C.
"""

import logging
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Final

from steward.slurm.errors import (
    SlurmDown,
    SlurmError,
    SlurmMissing,
    SlurmRefused,
    SlurmUnavailable,
    UnknownJob,
)
from steward.slurm.settings import ClusterSettings

log = logging.getLogger(__name__)

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables that a site may need for the commands to run; none changes what they print.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "SLURM_CONF")

_MAX_MESSAGE_CHARS = 500

# Messages on stderr (slurm_errno.c and the commands' own) that determine the exception type.
_UNKNOWN_JOB = re.compile(r"Invalid job id specified")
_REFUSED = re.compile(
    r"Access/permission denied|Invalid user id|Only (?:root|slurm)|not authorized|"
    r"Access denied|You are not",
    re.IGNORECASE,
)
_DOWN = re.compile(r"connect failure|Connection refused", re.IGNORECASE)
_UNAVAILABLE = re.compile(
    r"Unable to contact|Unable to connect|Unable to establish|Connection refused|"
    r"Connection timed out|Socket timed out|Communication connection failure|"
    r"Zero Bytes were transmitted|temporarily unable|temporarily unavailable|"
    r"in standby mode|connect failure|failed to fetch config|"
    r"Could not establish a configuration source|Unable to process configuration file|"
    r"Munge (?:encode|decode) failed|Protocol authentication error|"
    r"Slurm database service|slurm_persist_conn_open|Problem talking to the database|"
    r"Unable to access the database|not running with a database|Incompatible versions",
    re.IGNORECASE,
)


COMMAND_TIMEOUT_S: Final = 30.0
"""Time-out of a Slurm command, in seconds: slurmctld itself gives up after MessageTimeout."""


class CommandRunner:
    """Runner of Slurm's commands for one cluster.

    Args:
        cluster: Cluster name, for messages.
        settings: Uses slurm_conf, slurm_bin and slurm_prefix.
        timeout_s: Time-out of each command that has none of its own, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._timeout_s = timeout_s

    def build_environment(self) -> dict[str, str]:
        """Return the environment of a command: UTC times and the C locale."""
        inherited = {name: os.environ[name] for name in _INHERITED if os.environ.get(name)}
        inherited.setdefault("PATH", _PATH)
        if self._settings.slurm_conf:
            inherited["SLURM_CONF"] = self._settings.slurm_conf
        # 1024 bytes suffice for the task expression of all but heavily split arrays; without a
        # limit one expression can be as long as the rest of the queue.
        return {**inherited, "LC_ALL": "C", "TZ": "UTC", "SLURM_BITSTR_LEN": "1024"}

    def build_command(self, program: str, *arguments: str) -> list[str]:
        """Return the argument vector for ``program``, with the cluster's prefix and directory."""
        directory = self._settings.slurm_bin
        return [
            *self._settings.slurm_prefix,
            os.path.join(directory, program) if directory else program,
            *arguments,
        ]

    def compute_fingerprint(self, program: str) -> tuple[int, ...]:
        """Return a fingerprint of the program file, which changes on upgrade; () if unknown."""
        if self._settings.slurm_prefix:
            return ()  # the program is in another root, perhaps on another host
        import shutil

        program_path = shutil.which(
            self.build_command(program)[0], path=self.build_environment()["PATH"]
        )
        try:
            status = os.stat(program_path or "")
        except OSError:
            return ()
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def run(
        self,
        program: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str = "",
    ) -> bytes:
        """Run a command and return its standard output.

        Args:
            program: Program name, such as "squeue".
            arguments: Its arguments.
            variables: Extra environment variables. Unlike arguments, other users cannot read them
                in /proc.
            timeout_s: Time-out in seconds; None for the runner's.
            user: Run as this user if we are root; otherwise run as ourselves.

        Raises:
            SlurmMissing: The program does not exist.
            SlurmUnavailable: The daemon does not answer, or not in time.
            SlurmRefused: Slurm denies permission.
            UnknownJob: Slurm does not know the job.
            SlurmError: The command failed for another reason.
        """
        command = self.build_command(program, *arguments)
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        environment = {**self.build_environment(), **(variables or {})}
        exit_code, stdout, stderr = self._run(
            command, environment, limit_s, user=self._look_up_user(user)
        )
        message = _join_message(stderr)
        if exit_code != 0 or (not stdout and _UNAVAILABLE.search(message)):
            # scontrol reports an unknown node on stdout.
            raise self._make_error(
                command,
                exit_code,
                message or _join_message(stdout.decode("utf-8", "backslashreplace")),
            )
        return stdout

    def run_into(
        self, file: BinaryIO, program: str, *arguments: str, timeout_s: float | None = None
    ) -> None:
        """Run a command with its output written to a file, because it may exceed memory.

        Args:
            file: Receives standard output.
            program: Program name, such as "sacct".
            arguments: Its arguments.
            timeout_s: Time-out in seconds; None for the runner's.

        Raises:
            SlurmError: As :meth:`run` raises it.
        """
        command = self.build_command(program, *arguments)
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        exit_code, _, stderr = self._run(command, self.build_environment(), limit_s, file.fileno())
        message = _join_message(stderr)
        if exit_code != 0 or (not os.fstat(file.fileno()).st_size and _UNAVAILABLE.search(message)):
            raise self._make_error(command, exit_code, message)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        stdout: int | None = None,
        user: pwd.struct_passwd | None = None,
    ) -> tuple[int, bytes, str]:
        """Start a program and return exit code, stdout and stderr; kill its group on time-out."""
        import subprocess

        from steward.core.processes import kill_group

        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=os.getgrouplist(user.pw_name, user.pw_gid) if user else None,
            )
        except FileNotFoundError as error:
            raise self._make_missing_error(command, str(error)) from error
        except OSError as error:
            message = f"cluster {self._cluster}: cannot start {command[0]}: {error.strerror}"
            raise SlurmUnavailable(message, command, str(error)) from error
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            message = (
                f"cluster {self._cluster}: '{_shorten_command(command)}' took longer than "
                f"{timeout_s:g} s; "
                "slurmctld is down or busy: see 'scontrol ping'"
            )
            raise SlurmUnavailable(message, command, "") from error
        finally:
            if process.returncode is None:
                kill_group(process)
        return process.returncode, out or b"", err.decode("utf-8", "backslashreplace")

    def _look_up_user(self, user: str) -> pwd.struct_passwd | None:
        """Return the user to run a command as, or None to run it as ourselves."""
        # A prefix (chroot, sudo) needs our rights, or chooses the user.
        if not user or os.geteuid() != 0 or self._settings.slurm_prefix:
            return None
        try:
            entry = pwd.getpwnam(user)
        except (KeyError, ValueError):
            return None  # run as ourselves; Slurm's error then names the user it requires
        return None if entry.pw_uid == 0 else entry

    def _make_missing_error(self, command: Sequence[str], output: str) -> SlurmMissing:
        """Return the error for a program that does not exist."""
        return SlurmMissing(
            f"cluster {self._cluster}: command {command[0]} not found: set slurm_bin to the "
            "directory of Slurm's commands, or install them",
            command,
            output,
        )

    def _make_error(self, command: Sequence[str], exit_code: int, output: str) -> SlurmError:
        """Return the exception for a failed command, chosen by its message."""
        if exit_code in (126, 127) and self._settings.slurm_prefix:
            return self._make_missing_error(command, output)
        message = (
            f"cluster {self._cluster}: '{_shorten_command(command)}' failed: "
            f"{output or f'exit code {exit_code}'}"
        )
        if exit_code < 0:
            return SlurmUnavailable(f"{message} (signal {-exit_code})", command, output)
        for pattern, error_class in (
            (_UNKNOWN_JOB, UnknownJob),
            (_DOWN, SlurmDown),
            (_UNAVAILABLE, SlurmUnavailable),
            (_REFUSED, SlurmRefused),
        ):
            if pattern.search(output):
                return error_class(message, command, output)
        return SlurmError(message, command, output)


def _shorten_command(command: Sequence[str]) -> str:
    """Return a command line of at most 120 characters for messages."""
    text = " ".join(command)
    return text if len(text) <= 120 else text[:117] + "..."


def _join_message(output: str) -> str:
    """Return a message as one line of bounded length."""
    lines = (" ".join(line.split()) for line in output.splitlines())
    text = "; ".join(line for line in lines if line)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."
