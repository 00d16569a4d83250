"""Where the demo plays: a sandbox, the paths in it, and commands that its people run."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from steward.client import Client
from steward.core.errors import StewardError
from steward.demo.pages import USER as WEB_USER
from steward.sandbox import Sandbox

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
