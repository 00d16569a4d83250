"""Real ``steward serve`` inside a sandbox, for the integration tests."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from file_tree import contents_below, files_below
from forked_commands import run_steward
from job_submission import PATIENCE, wait_until

from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox
from steward.sandbox.cluster import SandboxProcess
from steward.slurm.settings import ClusterSettings

STEWARD = str(Path(sys.executable).parent / "steward")

_READY = 'msg="ready:'


class Daemon:
    """Daemon on a sandbox, and the commands of its users.

    Args:
        cluster: Cluster of the daemon.
        home: Directory of its state, archive, socket, configuration and log.
        sink: Settings of its one files sink, without the path.
        slurm: Settings that differ from the sandbox's cluster settings.
        user: User of the daemon; root, or SlurmUser, if empty.
    """

    command = "serve"

    def __init__(
        self,
        cluster: Sandbox,
        home: Path,
        *,
        sink: FilesSinkSettings | None = None,
        slurm: dict[str, Any] | None = None,
        user: str = "",
    ) -> None:
        self.cluster = cluster
        self.home = home
        self.archive = home / "archive"
        self.state = home / "state"
        self.log_path = home / "log"
        self.config = home / "steward.toml"
        self._user = user
        self._process: SandboxProcess | None = None
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o755)
        slurm_settings: ClusterSettings = msgspec.structs.replace(
            cluster.make_cluster_settings(), **{"snapshot_interval_s": 0.5, **(slurm or {})}
        )
        self.settings = Settings(
            state_dir=str(self.state),
            run_dir=str(home / "run"),
            cluster={"box": slurm_settings},
            archive=ArchiveSettings(
                sink={
                    "files": msgspec.structs.replace(
                        sink or FilesSinkSettings(), path=str(self.archive)
                    )
                }
            ),
        )
        self.config.write_text(render_config(LoadedConfig(self.settings)))

    def start(self) -> None:
        """Start the daemon, and wait until it listens; the log has one such line for each start."""
        before = self.log().count(_READY)
        with open(self.log_path, "ab") as log:
            self._process = self.cluster.popen(
                [STEWARD, self.command, "--config", str(self.config)],
                user=self._user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self.log().count(_READY) > before or self._process_ended(), 30)
        assert not self._process_ended(), self.log()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the daemon; return its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE * 20)
        self._process = None
        return int(code)

    @property
    def pid(self) -> int:
        """Return the supervisor's process id outside the sandbox; 0 if it has ended."""
        assert self._process is not None
        return self._process.inner_pid

    def close(self) -> None:
        """Stop the daemon, if it runs."""
        if self._process is not None:
            self.stop(signal.SIGKILL)

    def _process_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def ask(
        self, *words: str, user: str = "", check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a steward command as a user."""
        where = {"STEWARD_SOCKET": self.settings.socket}
        if not user:
            where = {"STEWARD_CONFIG": str(self.config)}
        env = {**where, "COLUMNS": "200"}
        return run_steward(self.cluster, [STEWARD, *words], user=user, check=check, env=env)

    def ask_json(self, *words: str, user: str = "") -> Any:
        return json.loads(self.ask(*words, "--json", user=user).stdout)

    def files(self, pattern: str) -> list[Path]:
        """Return the archived files, without files in transit."""
        found = files_below(self.archive, pattern)
        return sorted(p for p in found if ".incoming" not in p.parts and p.is_file())

    def script_of(self, job_id: int) -> Path | None:
        """Return the verified script of a job, once it is archived."""
        for path in self.files(f"{job_id}-*.sh"):
            if "unverified" not in path.parts:
                return path
        return None

    def wait_for_script(self, job_id: int) -> Path:
        """Return the verified script of a job, once its environment is archived too."""

        def is_filed() -> bool:
            path = self.script_of(job_id)
            return path is not None and path.with_suffix(".env").exists()

        wait_until(is_filed, 60)
        path = self.script_of(job_id)
        assert path is not None
        return path

    def owner_access(self, path: Path, user: str) -> bool:
        """Return whether the file permissions let a user read a file."""
        result = self.cluster.run(["cat", str(path)], user=user, check=False, text=False)
        return result.returncode == 0 and result.stdout == path.read_bytes()

    def bytes_anywhere(self, needle: bytes) -> list[str]:
        """Return every file below the daemon's home that contains these bytes."""
        return [str(path) for path, data in contents_below(self.home).items() if needle in data]
