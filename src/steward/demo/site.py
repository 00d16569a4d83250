"""The place of the demo: a sandbox with Steward's daemon in it, and its users' jobs."""

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
from steward.automation.rules.requests import HistoryAnswer
from steward.automation.rules.store import Execution
from steward.client import Client
from steward.core.errors import Missing, StewardError, Unavailable
from steward.demo import parts
from steward.demo.jobs import PEOPLE, Submission, submissions
from steward.demo.parts import (
    CONTROLLER_ENV,
    PLUGIN_DIRS,
    PLUGSTACK,
    SLURM,
    Books,
    Pages,
    Till,
    configuration,
    is_told,
    link_in,
)
from steward.demo.parts import USER as WEB_USER
from steward.sandbox import Inside, Sandbox, SandboxSpec, SlurmMissing

_COMMAND_S: Final = 30.0


class DemoError(StewardError):
    """The demo cannot go on."""


class Ground:
    """A sandbox with Steward's files in it.

    Args:
        sandbox: It.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @property
    def users(self) -> tuple[str, ...]:
        """Who submits jobs: two, or the calling user alone where there can be no others."""
        return tuple(user for user in self.sandbox.users if user != WEB_USER)

    @property
    def steward_user(self) -> str:
        """Who the daemon runs as: SlurmUser, or the calling user where that is not root."""
        # Without namespaces SlurmUser may not get into the directory that Steward lies in.
        inside = os.geteuid() == 0 and self.sandbox.plan.contained
        return self.sandbox.plan.spec.slurm_user if inside else ""

    @property
    def config(self) -> str:
        """The daemon's configuration file."""
        return f"{self.sandbox.directory}/steward.toml"

    @property
    def state_dir(self) -> str:
        """Where the daemon keeps its journal and databases."""
        return f"{self.sandbox.directory}/steward/state"

    @property
    def archive(self) -> str:
        """The root of the archive."""
        return f"{self.sandbox.directory}/steward/archive"

    @property
    def log(self) -> str:
        """What the daemon says."""
        return f"{self.sandbox.directory}/steward/log"

    @property
    def web_log(self) -> str:
        """What the pages' process says."""
        return f"{self.sandbox.directory}/web.log"

    @property
    def socket(self) -> str:
        """Where the daemon is asked."""
        return f"{self.sandbox.directory}/steward/socket"

    @property
    def rules(self) -> str:
        """Where rules are."""
        return f"{self.sandbox.directory}/rules"

    @property
    def kept_directories(self) -> tuple[str, ...]:
        """Every directory that the daemon writes to."""
        return (os.path.dirname(self.state_dir),)

    def home(self, user: str) -> str:
        """Where a user's scripts are, and the jobs' output."""
        is_one_of_ours = user in self.users and len(self.users) > 1
        return self.sandbox.users[user].home if is_one_of_ours else self.sandbox.directory

    def environment(self, user: str = "") -> dict[str, str]:
        """What tells ``steward`` whom to ask; the operators read the files themselves."""
        if user == "root" and user not in self.users:
            return {"PAGER": "cat"}
        if user:
            return {"STEWARD_SOCKET": self.socket, "PAGER": "cat"}
        return {"STEWARD_CONFIG": self.config, "PAGER": "cat"}

    def steward(
        self, arguments: Sequence[str], user: str = ""
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run ``steward`` inside, and take what it prints.

        Args:
            arguments: Its arguments.
            user: Who runs it; whom the daemon runs as if empty.
        """
        return self.run(["steward", *arguments], user)

    def ask(self, name: str, /, **fields: Any) -> Any:
        """What the daemon tells whoever plays the demo, from whom it hides nothing.

        For what is looked at again and again: each command would take longer to start than
        what is waited for takes, and take the processor from it.

        Raises:
            StewardError: As :meth:`steward.client.Client.ask`.
        """
        return Client(socket=self.socket).ask(name, **fields)

    def run(self, argv: Sequence[str], user: str = "") -> "subprocess.CompletedProcess[bytes]":
        """Run any program inside; otherwise as :meth:`steward`."""
        return self.sandbox.run(
            argv,
            user=user or self.steward_user,
            cwd=self.home(user) if user else "/",
            env=self.environment(user),
            timeout_s=_COMMAND_S,
            check=False,
            text=False,
        )

    def show(self, argv: Sequence[str], user: str = "") -> int:
        """Run any program inside, before everybody's eyes; its exit code.

        Raises:
            DemoError: It does not end.
        """
        process = self.sandbox.popen(
            argv,
            user=user or self.steward_user,
            cwd=self.home(user) if user else "/",
            env=self.environment(user),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(_COMMAND_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{' '.join(argv)} does not end", argv) from None
        finally:
            process.kill()
            process.wait()


T = TypeVar("T")

_UP_S: Final = 60.0
_JOBS_S: Final = 120.0
_STOP_S: Final = 20.0
_GATE: Final = "steward/gate.sock"
_LOGIN: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "SLURM_CONF")
_SUBMITTED = re.compile(r"Submitted batch job (\d+)")
_SRUN = re.compile(r"job (\d+)")
_ENDED: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A job that Slurm has taken.

    Attributes:
        job: Its id.
        user: Who submitted it.
        what: What was submitted.
    """

    job: int
    user: str
    what: Submission


class Site(Ground):
    """A sandbox, the daemon in it, and who works there.

    Used as a context, or ended by :meth:`down`. Take one from :meth:`up`.
    """

    def __init__(self, sandbox: Sandbox, *, keep: bool) -> None:
        super().__init__(sandbox)
        self.keep = keep
        self.jobs: list[Submitted] = []
        self.books = Books(sandbox, keep=keep)
        unpaid = "" if sandbox.plan.spec.plugin_dirs else "this cluster is not to have a bank"
        self.bank = Till(sandbox, self.books.trouble or unpaid)
        self.pages = Pages(sandbox, keep=keep)
        self._daemon: Inside | None = None

    @classmethod
    def up(
        cls,
        directory: str = "",
        *,
        keep: bool = False,
        slurm: str = "",
        booked: bool = False,
        paid: bool = False,
    ) -> Self:
        """Bring the cluster up.

        Args:
            directory: Where everything goes; a new temporary one if empty.
            keep: Whether all of it is to live on when the caller ends.
            slurm: Version of Slurm; the installed one if empty.
            booked: Whether it is to have slurmdbd, where that is installed.
            paid: Whether it is to have the bank, where slurmctld's plugin can be built.

        Raises:
            SandboxError: It does not come up.
        """
        spec = SandboxSpec(
            directory=directory,
            slurm=slurm,
            extra=SLURM,
            plugstack=PLUGSTACK,
            accounting=booked,
            plugin_dirs=PLUGIN_DIRS if paid else (),
            user_names=(*PEOPLE, WEB_USER),
            controller_env=CONTROLLER_ENV if paid else {},
        )
        try:
            sandbox = Sandbox.up(spec, detached=keep)
        except SlurmMissing:
            if not booked:
                raise
            return cls.up(directory, keep=keep, slurm=slurm, paid=paid)
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

    def serve(self) -> None:
        """Start the daemon; it answers when this returns.

        Raises:
            DemoError: It does not.
        """
        self._configure()
        argv = ["steward", "serve", "--config", self.config]
        if self.keep:
            # What is started inside ends with its caller, unless it becomes its own master.
            argv = ["setsid", "--fork", *argv]
        with open(self.log, "ab") as log:
            process = self.sandbox.popen(
                argv,
                user=self.steward_user,
                cwd=self.sandbox.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if self.keep:
            process.wait(_UP_S)
        else:
            self._daemon = process
        self._wait(self._answers, _UP_S, "the daemon does not answer")
        self.books.start()

    def serve_pages(self) -> None:
        """Start what serves the pages; it answers when this returns.

        Raises:
            DemoError: It does not.
        """
        self.pages.start(self.socket, self.web_log)
        self._wait(self.pages.answers, _UP_S, "the pages do not answer")

    def link(self, user: str = "") -> str:
        """A link that opens the pages.

        Args:
            user: For whom; for whom the daemon runs as if empty.
        """
        return link_in(self.steward(["login"], user).stdout)

    def _configure(self) -> None:
        own = os.path.dirname(self.state_dir)
        os.makedirs(own, mode=0o755, exist_ok=True)
        if self.steward_user:
            shutil.chown(own, self.steward_user, self.steward_user)
        os.makedirs(self.rules, mode=0o755, exist_ok=True)
        text = configuration(
            state_dir=self.state_dir,
            socket=self.socket,
            cluster=self.sandbox.plan.spec.cluster,
            slurm=self.sandbox.cluster_settings(),
            munge_socket=self.sandbox.plan.munge_socket,
            archive=self.archive,
            parts=[
                *self.books.settings,
                *self.bank.settings,
                *self.pages.settings,
                *parts.settings(self.rules),
            ],
        )
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(text)

    def _answers(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise self._failed(f"the daemon ended with {self._daemon.returncode}")
        try:
            self.ask("archive.list")
        except Unavailable:
            return False  # it is not as far as that
        return True

    def submit(self, what: Submission) -> Submitted:
        """Have one of the users submit one of the cast's jobs; raises as :meth:`order`."""
        self.jobs.append(self.order(what))
        return self.jobs[-1]

    def order(self, what: Submission) -> Submitted:
        """Have one of the users submit a job.

        Raises:
            SandboxError: Slurm does not take it.
            DemoError: Slurm's answer names no job.
        """
        user = self.users[min(what.author, len(self.users) - 1)]
        if what.script is not None:
            command = ["tee", "--", what.filename]
            self.sandbox.run(command, user=user, cwd=self.home(user), input=what.script, text=False)
        # What the demo's caller has in the environment is no business of its users' jobs.
        foreign = [name for name in os.environ if name not in _LOGIN]
        clean = ["env", *(f"--unset={name}" for name in foreign if name not in what.env)]
        result = self.sandbox.run(
            [*clean, *what.argv], user=user, cwd=self.home(user), env=what.env
        )
        match = _SUBMITTED.search(result.stdout) or _SRUN.search(result.stderr)
        job = int(match[1]) if match else self._newest_job(what)
        return Submitted(job=job, user=user, what=what)

    def wait_for_books(self, one: Submitted) -> PageAnswer:
        """Wait until the nodes have told of a job; its page.

        Raises:
            DemoError: They have not, after the time-out.
        """

        def ask() -> PageAnswer:
            page: PageAnswer = self.ask("accounting.job", job=str(one.job))
            return page

        return self._until(ask, is_told, f"nothing is told of the steps of job {one.job}")

    def wait_for_charge(self, one: Submitted) -> int:
        """Wait until a job was charged; what, in micro-SU.

        Raises:
            DemoError: It was not, after the time-out.
        """
        return self._until(
            lambda: int(self.ask("bank.explain", job=str(one.job)).amount),
            lambda amount: amount > 0,
            f"job {one.job} was not charged",
        )

    def wait_for_rule(self, node: str) -> bool:
        """Wait until a rule's action ended, and its node is drained; whether it succeeded, once.

        Raises:
            DemoError: None did, after the time-out.
        """
        found = self._until(self._acted, bool, "no rule has acted")
        shown = self.steward(["action", "run", "slurm.node.get", f"nodes={node}", "--json"])
        drained = "DRAIN" in msgspec.json.decode(shown.stdout)["result"][node]["state"]
        return drained and [one.status for one in found] == ["succeeded"]

    def _acted(self) -> list[Execution]:
        """What rules have done, to its end."""
        answer: HistoryAnswer = self.ask("rules.history")
        return [one for one in answer.executions if one.phase == "ended"]

    def wait_for_gate(self) -> None:
        """Wait until the gate says what an account has.

        Raises:
            DemoError: It does not, after the time-out.
        """
        self._until(
            lambda: self.ask("bank.holds"),
            lambda _: os.path.exists(f"{self.sandbox.directory}/{_GATE}"),
            "the gate does not answer",
        )

    def submit_all(self) -> None:
        """Submit everything that there is to submit."""
        for what in submissions():
            self.submit(what)

    def _newest_job(self, what: Submission) -> int:
        """The id of a job that Slurm granted at once, so that srun did not say which."""
        command = ["squeue", "-h", "-t", "all", "-n", what.name, "-o", "%A"]
        ids = [int(word) for word in self.sandbox.run(command).stdout.split()]
        if not ids:
            raise self._failed(f"Slurm shows no job {what.name}")
        return max(ids)

    def job(self, name: str) -> Submitted:
        """A submitted job by its name."""
        return next(one for one in self.jobs if one.what.name == name)

    def wait_for_jobs(self) -> tuple[JobLine, ...]:
        """Wait until every job has ended and is in the archive; the lines of ``archive list``.

        Raises:
            DemoError: Some are not after the time-out.
        """
        wanted = sum(one.what.tasks or 1 for one in self.jobs)
        with_script = sum(one.what.tasks or 1 for one in self.jobs if one.what.script is not None)

        def are_there(lines: tuple[JobLine, ...]) -> bool:
            ended = [line for line in lines if line.state in _ENDED]
            kept = [line for line in ended if line.script_key]
            return len(ended) == wanted and len(kept) == with_script and self._is_indexed()

        return self._until(
            lambda: self.ask("archive.list").jobs, are_there, "not every job is in the archive"
        )

    def _is_indexed(self) -> bool:
        """Whether every consumer has passed every event."""
        answer: StatusAnswer = self.ask("journal.status")
        return all(consumer.behind == 0 for consumer in answer.consumers)

    def stop(self) -> int | None:
        """Have the daemon end by SIGTERM; its exit code, None if it did not end in time."""
        if self._daemon is None:
            return None
        self._daemon.send_signal(signal.SIGTERM)
        try:
            return self._daemon.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def down(self) -> None:
        """End everything, and remove it."""
        self.books.stop()
        self.pages.stop()
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        self.sandbox.down()

    def _until(self, ask: Callable[[], T], is_so: Callable[[T], bool], otherwise: str) -> T:
        """Wait for an answer that is as it is to be."""
        found: list[T] = []

        def ready() -> bool:
            try:
                found[:] = [ask()]
            except (Missing, Unavailable):
                return False  # nobody knows of it, or can say, yet
            return is_so(found[0])

        self._wait(ready, _JOBS_S, otherwise)
        return found[0]

    def _wait(self, ready: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._daemon is not None and self._daemon.poll() is not None:
                raise self._failed(f"{otherwise}, and the daemon has ended")
            if time.monotonic() > deadline:
                raise self._failed(f"{otherwise} after {timeout_s:.0f} s")
            time.sleep(0.1)

    def _failed(self, what: str) -> DemoError:
        """An error with the last that the daemon said, for it may soon be gone."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                said = file.read().splitlines()[-3:]
        except OSError:
            said = []
        return DemoError("; the daemon said: ".join([what, " | ".join(said)][: 1 + bool(said)]))
