"""Host with a plain Slurm, on which tests install packages; everything is removed afterwards.

In a sandbox's mount namespace the directories that an installation writes to become
overlays, in memory. ``/etc/slurm`` belongs to the sandbox. A stand-in for systemd reads units as
systemd does, as far as Steward needs it, and runs them from outside.
"""

import os
import shlex
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Final

from job_submission import PATIENCE, wait_until

from steward.sandbox import Sandbox
from steward.sandbox.cluster import SandboxProcess

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OURS: Final = "/usr/local/bin"
_UNITS: Final = ("/etc/systemd/system", "/lib/systemd/system")
_OVERLAID: Final = ("etc", "usr", "var", "opt", "srv", "run")
_FRESH: Final = (
    *(
        "/etc/steward",
        "/etc/slurm",
        "/var/lib/steward",
        "/var/spool/steward",
        "/var/spool/steward-shim",
        "/srv/steward",
    ),
    *("/usr/local/lib/steward", "/usr/libexec/steward", "/opt/steward", "/run/steward"),
)
_TIMER_S: Final = 3.0

# The three are what libraries look people up in: the sandbox has its own.
_SET_UP: Final = """
set -e
work={work}
mkdir -p $work
cp /etc/passwd /etc/group /etc/hosts $work.kept/
mount -t tmpfs -o mode=755 tmpfs $work
for name in {names}; do
    mkdir -p $work/$name.new $work/$name.work
    chmod --reference=/$name $work/$name.new
    at=lowerdir=/$name,upperdir=$work/$name.new,workdir=$work/$name.work
    mount -t overlay overlay -o $at /$name
done
cp $work.kept/* /etc/
rm -rf {fresh}
mkdir -p /etc/slurm /run/munge /etc/systemd/system {ours}
mount --bind {directory}/etc /etc/slurm
ln -sf {munge} /run/munge/munge.socket.2
echo '127.0.0.1 steward.example.org' >> /etc/hosts
"""

_SYSTEMCTL: Final = """#!/bin/sh
# Hands what it is told to whoever plays systemd, and says what became of it.
ask={asks}/$$
printf '%s\\n' "$@" > $ask.new
mv $ask.new $ask
while ! test -e $ask.done; do sleep 0.05; done
cat $ask.said
exit $(cat $ask.done)
"""


class PlainHost:
    """Shell, files and services of a Slurm host, as an administrator uses them.

    Args:
        cluster: The sandbox, which root brought up in separate namespaces.
    """

    def __init__(self, cluster: Sandbox) -> None:
        self.cluster = cluster
        self._asks = Path(cluster.directory) / "systemctl"
        self._asks.mkdir()
        self._running: dict[str, SandboxProcess] = {}
        self._ended = threading.Event()
        self._timers: dict[str, float] = {}
        work = f"{cluster.directory}/overlays"
        os.makedirs(f"{work}.kept")
        self._inside(
            _SET_UP.format(
                work=work,
                names=" ".join(_OVERLAID),
                fresh=" ".join(_FRESH),
                ours=OURS,
                directory=cluster.directory,
                munge=cluster.plan.munge_socket,
            )
        )
        self.write(f"{OURS}/systemctl", _SYSTEMCTL.format(asks=self._asks), 0o755)
        self._systemd = threading.Thread(target=self._play, daemon=True)
        self._systemd.start()

    def close(self) -> None:
        """End the started services."""
        self._ended.set()
        self._systemd.join(60)
        for name in list(self._running):
            self._stop(name)

    def type(
        self, lines: str, cwd: str = "/", user: str = ""
    ) -> "subprocess.CompletedProcess[Any]":
        """Type lines in a shell of root or another user; stop at the first failure."""
        return self.cluster.run(
            ["env", "-i", f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8", "sh", "-e", "-c", lines],
            check=False,
            timeout_s=300,
            user=user,
            cwd=cwd,
        )

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file."""
        quoted = shlex.quote(path)
        self.cluster.run(["sh", "-c", f"cat > {quoted}; chmod {mode:o} {quoted}"], input=text)

    def read(self, path: str) -> str:
        """Return a file's text; "" if it does not exist."""
        return str(self.cluster.run(["cat", path], check=False).stdout)

    def log(self, name: str) -> str:
        """Return the log of a service."""
        path = self._log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _inside(self, script: str) -> str:
        return str(self.cluster.run(["sh", "-c", script]).stdout)

    # What systemd does

    def _play(self) -> None:
        while not self._ended.wait(0.05):
            for ask in [path for path in self._asks.iterdir() if path.suffix == ""]:
                words = ask.read_text().splitlines()
                try:
                    said, code = self._systemctl(*words), 0
                except Exception as error:  # shown to the user who typed it
                    said, code = f"systemctl {shlex.join(words)}: {error!r}\n", 1
                ask.with_suffix(".said").write_text(said)
                done = ask.with_suffix(".now")
                done.write_text(str(code))
                done.rename(ask.with_suffix(".done"))
                ask.unlink()
            for name, due in self._timers.items():
                if time.monotonic() >= due:
                    self._timers[name] = time.monotonic() + _TIMER_S
                    self._start(name)

    def _systemctl(self, verb: str, *words: str) -> str:
        names = [word for word in words if not word.startswith("-")]
        for name in names:
            if name == "slurmctld":
                self.cluster.restart_controller()
            elif verb in ("restart", "stop") or (verb, words[0]) == ("disable", "--now"):
                self._stop(name)
                if verb == "restart":
                    self._start(name)
            elif verb == "start" or (verb == "enable" and "--now" in words):
                self._start(name)
        return ""

    def _start(self, name: str) -> None:
        if name.endswith(".timer"):
            service = name.removesuffix(".timer")
            assert self._unit(name), f"there is no unit {name}"
            self._timers[service] = 0.0
            return
        unit = self._unit(f"{name}.service")
        assert unit, f"there is no unit {name}.service"
        user = unit.get("User", "root")
        for key, parent, mode in (("Runtime", "/run", "0755"), ("State", "/var/lib", "0700")):
            if f"{key}Directory" in unit:
                path = f"{parent}/{unit[f'{key}Directory']}"
                self._inside(f"install -d -o {user} -g {user} -m {mode} {path}")
        command = [*self._environment(unit), "sh", "-c", f"exec {unit['ExecStart']}"]
        with open(self._log(name), "ab") as log:
            words = ["env", "-i", f"PATH={PATH}", "LANG=C.UTF-8", *command]
            process = self.cluster.popen(
                ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        if unit.get("Type") == "oneshot":
            process.wait(PATIENCE * 60)
            return
        self._running[name] = process
        if unit.get("Type") == "notify":
            before = self.log(name).count('msg="ready:')
            wait_until(
                lambda: self.log(name).count('msg="ready:') > before or process.poll() is not None,
                30,
            )
            assert process.poll() is None, self.log(name)[-2000:]

    def _stop(self, name: str) -> None:
        self._timers.pop(name.removesuffix(".timer"), None)
        process = self._running.pop(name, None)
        if process is not None:
            process.terminate()
            process.wait(PATIENCE * 30)

    def _unit(self, name: str) -> dict[str, str]:
        """Return a unit's settings, with those of its drop-ins; the last of a name counts."""
        found = next((text for at in _UNITS if (text := self.read(f"{at}/{name}"))), "")
        drops = self._inside(f"cat /etc/systemd/system/{name}.d/*.conf 2>/dev/null; true")
        lines = (line.partition("=") for line in f"{found}\n{drops}".splitlines())
        return {key: value for key, equals, value in lines if equals and not key.startswith("#")}

    def _environment(self, unit: dict[str, str]) -> list[str]:
        path = unit.get("EnvironmentFile", "").removeprefix("-")
        lines = self.read(path).splitlines() if path else []
        return [word for line in lines for word in shlex.split(line)]

    def _log(self, name: str) -> Path:
        return Path(self.cluster.directory) / "log" / f"{name}.service.log"
