"""``steward reload``: the daemon applies a valid configuration, or keeps the present one."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.commands import steward
from steward.core.errors import UsageError
from steward.core.rpc import RpcUnavailable, send_request
from steward.core.waits import Stop
from steward.daemon.reload import ReloadListener, ReloadReply, request_reload

CONFIG = """\
state_dir = "{root}/state"
run_dir = "{root}"
log_level = "{level}"
[cluster.c1]
slurm = false
spool = "{root}/spool"
[archive.sink.files]
path = "{root}/archive"
"""


class Daemon:
    """Daemon that runs with a configuration file."""

    def __init__(self, root: Path) -> None:
        (root / "spool").mkdir()
        self.root = root
        self.path = root / "steward.toml"
        self.socket = str(root / "steward.sock")
        self.write(CONFIG.format(root=root, level="info"))
        self.log = open(root / "log", "wb")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steward", "serve", "--config", str(self.path)],
            stderr=self.log,
            env={**os.environ, "NOTIFY_SOCKET": str(root / "notify")},
        )

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()

    def reload(self) -> tuple[int, str]:
        """Run ``steward reload``; return its exit code and output."""
        done = steward("reload", "--socket", self.socket)
        return done.returncode, (done.stdout + done.stderr).decode()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Daemon]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        site = Daemon(tmp_path)
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
            yield site
        finally:
            site.end()


def test_a_configuration_is_applied_or_the_present_one_kept(site: Daemon) -> None:
    parts = (site.root / "state/daemon.json").read_bytes()
    site.write(site.path.read_text() + "nonsense = 1\n")
    code, said = site.reload()
    assert code == 1
    assert f"{site.path}:9: " in said
    assert "nonsense" in said
    assert "keeps its present configuration" in said
    site.write("[cluster.c1\n")
    code, said = site.reload()
    assert (code, f"{site.path}:1" in said) == (1, True), said
    site.write(CONFIG.format(root=f"{site.root}/elsewhere", level="info"))
    code, said = site.reload()
    assert (code, "state_dir has changed" in said) == (1, True), said
    assert (site.root / "state/daemon.json").read_bytes() == parts, "no part was restarted"
    site.write(CONFIG.format(root=site.root, level="debug"))
    assert site.reload() == (0, "The daemon reloaded its configuration.\n")
    assert (site.root / "state/daemon.json").read_bytes() != parts
    assert steward("archive", "list", "--socket", site.socket).returncode == 0


def test_root_and_the_daemons_user_alone_may_ask(site: Daemon) -> None:
    assert stat.S_IMODE(os.stat(f"{site.socket}.reload").st_mode) == 0o600


def test_the_listener_follows_the_socket_and_goes_with_the_daemon(site: Daemon) -> None:
    moved = site.path.read_text().replace(f'"{site.root}"', f'"{site.root}/moved"')
    site.write(moved)
    assert site.reload()[0] == 0
    assert not os.path.exists(f"{site.socket}.reload")
    site.socket = str(site.root / "moved" / "steward.sock")
    assert site.reload()[0] == 0
    site.end()
    assert not os.path.exists(f"{site.socket}.reload")
    code, said = site.reload()
    assert (code, "cannot reach a daemon at" in said) == (1, True), said


def test_a_daemon_that_hangs_is_waited_for_no_longer(tmp_path: Path) -> None:
    listener = ReloadListener()
    path = str(tmp_path / "steward.sock")
    listener.open(path)
    try:
        with pytest.raises(RpcUnavailable, match="did not answer within"):
            request_reload(path, 0.2)
        assert Stop().wait(30, *listener.fds)
        assert listener.accept()
        listener.answer(ReloadReply())  # the reader has gone
    finally:
        listener.close()


def test_another_action_reloads_nothing(tmp_path: Path) -> None:
    listener = ReloadListener()
    path = str(tmp_path / "steward.sock")
    listener.open(path)
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(
                send_request, f"{path}.reload", "daemon.stop", {}, ReloadReply, timeout_s=30
            )
            until = time.monotonic() + 30
            while not answer.done() and time.monotonic() < until:
                Stop().wait(0.1, *listener.fds)
                assert not listener.accept()
                listener.answer(ReloadReply())
            with pytest.raises(UsageError, match=r"has no action 'daemon\.stop'"):
                answer.result(30)
    finally:
        listener.close()


def test_a_directory_that_it_makes_lets_everybody_to_the_daemons_socket(tmp_path: Path) -> None:
    listener = ReloadListener()
    umask = os.umask(0o077)
    try:
        listener.open(str(tmp_path / "run" / "steward.sock"))
    finally:
        os.umask(umask)
        listener.close()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
