"""A controller with 20,000 captured scripts reports them to a Steward, over HTTP with MUNGE.

The controller captures the jobs of a storm while nobody receives them, and is killed. The Steward
starts, then the controller; the time runs from the first batch until the Steward's journal has the
last script. munged is real, and all runs on this host, so the network's time is not included. The
files are on tmpfs, or in the directory that BENCH_DIR names (on tmpfs fsync is free).
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from controllers import Controller, Munged, controller_settings, said, serve_settings
from spool_daemon import Daemon, children_of, journalled, play

from scale import scaled
from servers.server import free_port
from steward.core.config import Settings
from steward.slurm.settings import ClusterSettings

_JOBS: Final = scaled(20_000, 20)
_PATIENCE_S: Final = 300.0
_FORWARDER, _RECEIVER = "steward forward", "steward receive"
"""Processes of the controller and of the Steward; the kernel keeps fifteen bytes of a name."""


def main() -> None:
    """Measure, and print the figures."""
    base = os.environ.get("BENCH_DIR") or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    where = Path(tempfile.mkdtemp(prefix="steward-controllers-", dir=base))
    munged, port = Munged(where / "munged"), free_port()
    try:
        cluster = ClusterSettings(munge_socket=munged.socket, controllers=("127.0.0.1",))
        receiver = serve_settings(where / "serve", port, {"c1": cluster})
        sender = controller_settings(where / "controller", port, where / "spool", munged.socket)
        _measure(receiver, sender, where)
    finally:
        munged.close()
        shutil.rmtree(where)


def _measure(receiver: Settings, sender: Settings, where: Path) -> None:
    with Controller(sender, where / "controller") as controller:
        play(str(where / "spool"), range(1, _JOBS + 1)).wait(_PATIENCE_S)
        controller.wait(lambda: len(journalled(sender)) == _JOBS, _PATIENCE_S)
    with Daemon(receiver, where / "serve") as steward:
        said(steward, "listening for controllers")
        with Controller(sender, where / "controller") as controller:
            steward.wait(lambda: bool(journalled(receiver)), _PATIENCE_S)
            began, first = time.monotonic(), len(journalled(receiver))
            steward.wait(lambda: len(journalled(receiver)) == _JOBS, _PATIENCE_S)
            took_s = time.monotonic() - began
            print(f"{_JOBS} scripts: {(_JOBS - first) / took_s:.0f} a second")
            for daemon, name in ((controller, _FORWARDER), (steward, _RECEIVER)):
                cpu_s, peak_mb = _read_cost(daemon, name)
                print(f"{name}: {cpu_s / _JOBS * 1e6:.0f} us of CPU a script, {peak_mb:.1f} MB")


def _read_cost(daemon: Daemon, name: str) -> tuple[float, float]:
    """Return CPU time in seconds and peak memory in MB of one of a daemon's processes."""
    for pid in children_of(daemon.pid):
        process = Path(f"/proc/{pid}")
        if (process / "comm").read_text().strip() == name:
            ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            status = (process / "status").read_text()
            peak_kib = int(status.partition("VmHWM:")[2].split()[0])
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak_kib / 1000
    raise SystemExit(f"{daemon.log_path} has no process {name!r}")


if __name__ == "__main__":
    main()
