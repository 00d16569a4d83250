"""Site of the demo: a sandbox cluster with Steward's daemon in it, and its users' jobs.

`SandboxPaths` knows the paths and runs commands inside the sandbox; `DemoSite` adds the daemon, the
bank, node agents and web server (`parts.py`), submits jobs and waits for results. Order of calls:
`up`, `start_daemon`, `submit` or `submit_unrecorded`, one of the ``wait_for_...`` methods, `stop`,
`down`. Also used by tests.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from steward.accounting.job_page.requests import PageAnswer
from steward.admin.journal import StatusAnswer
from steward.archive.requests import JobLine
from steward.automation.rules.requests import RulesHistoryReply
from steward.automation.rules.store import Execution
from steward.client import Client
from steward.core.errors import NotFound, StewardError, Unavailable
from steward.demo.components import (
    ACCOUNT,
    CONTROLLER_ENV,
    PLUGIN_DIRS,
    PLUGSTACK,
    SLURM_CONF_LINES,
    WEB_USER,
    DemoAgents,
    DemoBank,
    DemoWebServer,
    find_login_link,
    format_configuration,
    format_rule_settings,
    has_all_reports,
)
from steward.demo.jobs import USER_NAMES, Submission, list_submissions
from steward.sandbox import Sandbox, SandboxProcess, SandboxSpec, SlurmNotInstalled

_COMMAND_TIMEOUT_S: Final = 30.0


class DemoError(StewardError):
    """The demo cannot continue."""


class SandboxPaths:
    """A sandbox with the paths of Steward's files, and methods to run commands in it.

    Args:
        sandbox: The sandbox.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @property
    def users(self) -> tuple[str, ...]:
        """Return the users who submit jobs: two, or only the calling user without root."""
        return tuple(user for user in self.sandbox.users if user != WEB_USER)

    @property
    def steward_user(self) -> str:
        """Return the user that the daemon runs as: SlurmUser; "" for the calling user."""
        # Without namespaces SlurmUser may be unable to enter Steward's directory.
        runs_as_slurm_user = os.geteuid() == 0 and self.sandbox.plan.contained
        return self.sandbox.plan.spec.slurm_user if runs_as_slurm_user else ""

    @property
    def config(self) -> str:
        """Return the path of the daemon's configuration file."""
        return f"{self.sandbox.directory}/steward.toml"

    @property
    def state_dir(self) -> str:
        """Return the directory of the daemon's journal and databases."""
        return f"{self.sandbox.directory}/steward/state"

    @property
    def archive_dir(self) -> str:
        """Return the root directory of the archive."""
        return f"{self.sandbox.directory}/steward/archive"

    @property
    def log_path(self) -> str:
        """Return the path of the daemon's log."""
        return f"{self.sandbox.directory}/steward/log"

    @property
    def web_log_path(self) -> str:
        """Return the path of the web server's log."""
        return f"{self.sandbox.directory}/web.log"

    @property
    def socket_path(self) -> str:
        """Return the path of the daemon's socket."""
        return f"{self.sandbox.directory}/steward/steward.sock"

    @property
    def rules(self) -> str:
        """Return the directory of rules."""
        return f"{self.sandbox.directory}/rules"

    @property
    def written_dirs(self) -> tuple[str, ...]:
        """Return every directory that the daemon writes to."""
        return (os.path.dirname(self.state_dir),)

    def get_home(self, user: str) -> str:
        """Return the directory of a user's scripts and job output."""
        has_home = user in self.users and len(self.users) > 1
        return self.sandbox.users[user].home if has_home else self.sandbox.directory

    def make_environment(self, user: str = "") -> dict[str, str]:
        """Return the environment by which ``run_steward`` finds the daemon's socket or file."""
        if user == "root" and user not in self.users:
            return {"PAGER": "cat"}
        if user:
            return {"STEWARD_SOCKET": self.socket_path, "PAGER": "cat"}
        return {"STEWARD_CONFIG": self.config, "PAGER": "cat"}

    def run_steward(
        self, arguments: Sequence[str], user: str = ""
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run ``run_steward`` inside and capture its output.

        Args:
            arguments: Its arguments.
            user: User who runs it; if empty, the daemon's.
        """
        return self.run(["steward", *arguments], user)

    def call_action(self, name: str, /, **fields: Any) -> Any:
        """Run an action through the daemon's socket, with the caller's full rights.

        For repeated queries: starting a command each time would take longer than the wait itself,
        and take CPU time from the jobs.

        Raises:
            StewardError: As :meth:`steward.client.Client.ask`.
        """
        return Client(socket=self.socket_path).ask(name, **fields)

    def run(self, argv: Sequence[str], user: str = "") -> "subprocess.CompletedProcess[bytes]":
        """Run any program inside; otherwise as :meth:`run_steward`."""
        return self.sandbox.run(
            argv,
            user=user or self.steward_user,
            cwd=self.get_home(user) if user else "/",
            env=self.make_environment(user),
            timeout_s=_COMMAND_TIMEOUT_S,
            check=False,
            text=False,
        )

    def run_visible(self, argv: Sequence[str], user: str = "") -> int:
        """Run any program inside with its output shown; return its exit code.

        Raises:
            DemoError: The program does not end.
        """
        process = self.sandbox.popen(
            argv,
            user=user or self.steward_user,
            cwd=self.get_home(user) if user else "/",
            env=self.make_environment(user),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(_COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{' '.join(argv)} does not end", argv) from None
        finally:
            process.kill()
            process.wait()


T = TypeVar("T")

_START_TIMEOUT_S: Final = 60.0
_JOBS_TIMEOUT_S: Final = 120.0
_STOP_TIMEOUT_S: Final = 20.0
_GATE_SOCKET: Final = "steward/gate.sock"
_LOGIN_VARIABLES: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "SLURM_CONF")
_SBATCH_OUTPUT = re.compile(r"Submitted batch job (\d+)")
_SRUN_OUTPUT = re.compile(r"job (\d+)")
_FINAL_STATES: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that Slurm accepted.

    Attributes:
        job: Its id.
        user: The user who submitted it.
        what: The submission.
    """

    job: int
    user: str
    what: Submission


class DemoSite(SandboxPaths):
    """A sandbox with the daemon, its parts, and the submitted jobs.

    Use it as a context manager, or end it with :meth:`down`. Create one with :meth:`up`.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        super().__init__(sandbox)
        self.keep = keep
        self.jobs: list[SubmittedJob] = []
        self.books = DemoAgents(sandbox, keep=keep)
        no_bank_reason = (
            "" if sandbox.plan.spec.plugin_dirs else "the bank is disabled in this demo"
        )
        self.bank = DemoBank(sandbox, self.books.skip_reason or no_bank_reason)
        self.pages = DemoWebServer(sandbox, keep=keep)
        self._daemon: SandboxProcess | None = None

    @classmethod
    def up(
        cls,
        directory: str = "",
        *,
        keep: bool = False,
        slurm_version: str = "",
        with_slurmdbd: bool = False,
        with_bank: bool = False,
    ) -> Self:
        """Bring up the cluster.

        Args:
            directory: Directory of everything; if empty, a new temporary one.
            keep: Whether everything lives on when the caller ends.
            slurm_version: Version of Slurm; if empty, the installed one.
            with_slurmdbd: Whether to run slurmdbd, if it is installed.
            with_bank: Whether to run the bank, if the submit plugin can be built.

        Raises:
            SandboxError: The cluster does not come up.
        """
        spec = SandboxSpec(
            directory=directory,
            slurm=slurm_version,
            extra=SLURM_CONF_LINES,
            plugstack=PLUGSTACK,
            accounting=with_slurmdbd,
            accounts=("physics", ACCOUNT, "biology"),
            plugin_dirs=PLUGIN_DIRS if with_bank else (),
            user_names=(*USER_NAMES, WEB_USER),
            controller_env=CONTROLLER_ENV if with_bank else {},
        )
        try:
            sandbox = Sandbox.up(spec, detached=keep)
        except SlurmNotInstalled:
            if not with_slurmdbd:
                raise
            return cls.up(directory, keep=keep, slurm_version=slurm_version, with_bank=with_bank)
        return cls(sandbox, keep=keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def start_daemon(self) -> None:
        """Start the daemon, and wait until it answers.

        Raises:
            DemoError: The daemon does not answer.
        """
        self._configure()
        argv = ["steward", "serve", "--config", self.config]
        if self.keep:
            # Programs started inside end with their caller, unless they start their own session.
            argv = ["setsid", "--fork", *argv]
        with open(self.log_path, "ab") as log:
            process = self.sandbox.popen(
                argv,
                user=self.steward_user,
                cwd=self.sandbox.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if self.keep:
            process.wait(_START_TIMEOUT_S)
        else:
            self._daemon = process
        self._wait(self._is_answering, _START_TIMEOUT_S, "the daemon does not answer")
        self.books.start()

    def start_web_server(self) -> None:
        """Start the web server, and wait until it answers.

        Raises:
            DemoError: The web server does not answer.
        """
        self.pages.start(self.socket_path, self.web_log_path)
        self._wait(self.pages.is_answering, _START_TIMEOUT_S, "the pages do not answer")

    def make_login_link(self, user: str = "") -> str:
        """Return a link that opens the web pages.

        Args:
            user: User of the link; if empty, the daemon's.
        """
        return find_login_link(self.run_steward(["login"], user).stdout)

    def _configure(self) -> None:
        """Write the daemon's configuration file."""
        steward_dir = os.path.dirname(self.state_dir)
        os.makedirs(steward_dir, mode=0o755, exist_ok=True)
        if self.steward_user:
            shutil.chown(steward_dir, self.steward_user, self.steward_user)
        os.makedirs(self.rules, mode=0o755, exist_ok=True)
        config_text = format_configuration(
            state_dir=self.state_dir,
            run_dir=steward_dir,
            cluster_name=self.sandbox.plan.spec.cluster,
            cluster_settings=self.sandbox.make_cluster_settings(),
            munge_socket=self.sandbox.plan.munge_socket,
            archive_dir=self.archive_dir,
            part_lines=[
                *self.books.settings,
                *self.bank.settings,
                *self.pages.settings,
                *format_rule_settings(self.rules),
            ],
        )
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(config_text)

    def _is_answering(self) -> bool:
        """Return True if the daemon answers; raise if it has ended."""
        if self._daemon is not None and self._daemon.poll() is not None:
            raise self._make_error(f"the daemon ended with exit code {self._daemon.returncode}")
        try:
            self.call_action("archive.list")
        except Unavailable:
            return False  # the daemon is not ready
        return True

    def submit(self, submission: Submission) -> SubmittedJob:
        """Submit a job and record it in ``jobs``; raises as :meth:`submit_unrecorded`."""
        self.jobs.append(self.submit_unrecorded(submission))
        return self.jobs[-1]

    def submit_unrecorded(self, submission: Submission) -> SubmittedJob:
        """Submit a job as one of the users, without recording it.

        Raises:
            SandboxError: Slurm rejects the job.
            DemoError: Slurm's output names no job.
        """
        user = self.users[min(submission.user_index, len(self.users) - 1)]
        if submission.script is not None:
            command = ["tee", "--", submission.filename]
            self.sandbox.run(
                command, user=user, cwd=self.get_home(user), input=submission.script, text=False
            )
        # Remove the caller's own variables from the environment of the jobs.
        foreign_names = [name for name in os.environ if name not in _LOGIN_VARIABLES]
        env_command = [
            "env",
            *(f"--unset={name}" for name in foreign_names if name not in submission.env),
        ]
        result = self.sandbox.run(
            [*env_command, *submission.argv], user=user, cwd=self.get_home(user), env=submission.env
        )
        match = _SBATCH_OUTPUT.search(result.stdout) or _SRUN_OUTPUT.search(result.stderr)
        job_id = int(match[1]) if match else self._find_newest_job(submission)
        return SubmittedJob(job=job_id, user=user, what=submission)

    def wait_for_reports(self, job: SubmittedJob) -> PageAnswer:
        """Wait for the nodes' reports about a job; return its page.

        Raises:
            DemoError: There were none before the time-out.
        """

        def ask() -> PageAnswer:
            page: PageAnswer = self.call_action("accounting.job", job=str(job.job))
            return page

        return self._wait_until(
            ask, has_all_reports, f"no node reported on the steps of job {job.job}"
        )

    def wait_for_charge(self, job: SubmittedJob) -> int:
        """Wait until a job is charged; return the amount in micro-SU.

        Raises:
            DemoError: It was not charged before the time-out.
        """
        return self._wait_until(
            lambda: int(self.call_action("bank.explain", job=str(job.job)).amount),
            lambda amount: amount > 0,
            f"job {job.job} was not charged",
        )

    def wait_for_rule(self, node: str) -> bool:
        """Wait for a rule's action; return True if it succeeded once and drained the node.

        Raises:
            DemoError: No rule acted before the time-out.
        """
        executions = self._wait_until(self._list_executions, bool, "no rule was executed")
        result = self.run_steward(["action", "run", "slurm.node.get", f"nodes={node}", "--json"])
        is_drained = "DRAIN" in msgspec.json.decode(result.stdout)["result"][node]["state"]
        return is_drained and [execution.status for execution in executions] == ["succeeded"]

    def _list_executions(self) -> list[Execution]:
        """List finished executions of rules."""
        reply: RulesHistoryReply = self.call_action("rules.history")
        return [execution for execution in reply.executions if execution.phase == "ended"]

    def wait_for_gate(self) -> None:
        """Wait until the gate answers.

        Raises:
            DemoError: It does not answer before the time-out.
        """
        self._wait_until(
            lambda: self.call_action("bank.holds"),
            lambda _: os.path.exists(f"{self.sandbox.directory}/{_GATE_SOCKET}"),
            "the gate does not answer",
        )

    def submit_all(self) -> None:
        """Submit all jobs of the demo."""
        for submission in list_submissions():
            self.submit(submission)

    def _find_newest_job(self, submission: Submission) -> int:
        """Return the id of a job that started at once, so that srun did not print it."""
        command = ["squeue", "-h", "-t", "all", "-n", submission.name, "-o", "%A"]
        ids = [int(word) for word in self.sandbox.run(command).stdout.split()]
        if not ids:
            raise self._make_error(f"Slurm shows no job {submission.name}")
        return max(ids)

    def get_job(self, name: str) -> SubmittedJob:
        """Return a submitted job by its name."""
        return next(job for job in self.jobs if job.what.name == name)

    def wait_for_jobs(self) -> tuple[JobLine, ...]:
        """Wait until every job is in the archive; return the lines of ``archive list``.

        Raises:
            DemoError: Some are missing at the time-out.
        """
        expected_count = sum(job.what.tasks or 1 for job in self.jobs)
        script_count = sum(job.what.tasks or 1 for job in self.jobs if job.what.script is not None)

        def are_there(lines: tuple[JobLine, ...]) -> bool:
            ended = [line for line in lines if line.state in _FINAL_STATES]
            archived = [line for line in ended if line.script_key]
            return (
                len(ended) == expected_count
                and len(archived) == script_count
                and self._has_caught_up()
            )

        return self._wait_until(
            lambda: self.call_action("archive.list").jobs,
            are_there,
            "not every job is in the archive",
        )

    def _has_caught_up(self) -> bool:
        """Return True if every consumer has applied every event."""
        status: StatusAnswer = self.call_action("journal.status")
        return all(consumer.lag == 0 for consumer in status.consumers)

    def stop_daemon(self) -> int | None:
        """Stop the daemon with SIGTERM; return its exit code, None after the time-out."""
        if self._daemon is None:
            return None
        self._daemon.send_signal(signal.SIGTERM)
        try:
            return self._daemon.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def down(self) -> None:
        """End and remove everything."""
        self.books.stop()
        self.pages.stop()
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        self.sandbox.down()

    def _wait_until(self, poll: Callable[[], T], is_done: Callable[[T], bool], failure: str) -> T:
        """Poll until an answer satisfies a condition; return the answer."""
        replies: list[T] = []

        def ready() -> bool:
            try:
                replies[:] = [poll()]
            except (NotFound, Unavailable):
                return False  # unknown or unavailable so far
            return is_done(replies[0])

        self._wait(ready, _JOBS_TIMEOUT_S, failure)
        return replies[0]

    def _wait(self, is_ready: Callable[[], bool], timeout_s: float, failure: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self._daemon is not None and self._daemon.poll() is not None:
                raise self._make_error(f"{failure}, and the daemon has ended")
            if time.monotonic() > deadline:
                raise self._make_error(f"{failure} after {timeout_s:.0f} s")
            time.sleep(0.1)

    def _make_error(self, problem: str) -> DemoError:
        """Make an error with the last lines of the daemon's log, which may soon be gone."""
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as file:
                last_lines = file.read().splitlines()[-3:]
        except OSError:
            last_lines = []
        return DemoError(
            "; the daemon said: ".join([problem, " | ".join(last_lines)][: 1 + bool(last_lines)])
        )
