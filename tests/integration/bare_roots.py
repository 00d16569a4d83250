"""Bare Debian systems without a network, on which tests install packages."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from steward.sandbox.slurm_install import DEFAULT_MIRROR, get_cache_directory

# The packages' dependencies; rpm beside dpkg, for there is no EL to be had; the compiler for
# plugins; and Slurm with systemd, for the host that is booted.
INCLUDED = {
    "bullseye": ("python3.9",),
    "bookworm": (
        *("python3", "rpm", "gcc", "libc6-dev", "libslurm-dev", "slurm-client"),
        *("slurmctld", "slurmd", "munge", "lua-socket"),
        *("systemd", "systemd-container", "dbus", "iproute2"),
    ),
    "trixie": ("python3", "libstdc++6"),
}
_FIELD = re.compile(r"^(Package|Provides|Depends|Pre-Depends): (.*)$", re.MULTILINE)
_NAME = re.compile(r"(?:^|, )([a-z0-9.+-]+)")
_ENTER = """
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mkdir -p "$2/root/packages"
mount --bind "$3" "$2/root/packages"
mount -t proc proc "$2/root/proc"
mount --rbind /dev "$2/root/dev"
"$4" -c "$5"
root=$2/root
shift 5
exec chroot "$root" "$@"
"""
# Without a network a system has only its loopback interface (netdevice(7), SIOCSIFFLAGS).
_LOOPBACK = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 1))
"""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


class Bare:
    """Writable overlay of the shared system, which stays unchanged.

    Args:
        suite: Name of the Debian suite.
        directory: Directory of everything that is written in the overlay.
        packages: Directory that is mounted as ``/packages``.
    """

    def __init__(self, suite: str, directory: Path, packages: Path) -> None:
        self.mounts = (_base(suite), directory, packages)
        self._directory = directory
        for name in ("upper", "work", "root"):
            (directory / name).mkdir(parents=True)
        # It is thrown away: dpkg need not wait for a disk after each of some thousand files.
        hurry = self.path("/etc/dpkg/dpkg.cfg.d/hurry")
        hurry.parent.mkdir(parents=True)
        hurry.write_text("force-unsafe-io\n")

    def run(self, words: Sequence[str], *, code: int = 0) -> str:
        """Run a program as root of the system, without a network; return its output with errors."""
        done = subprocess.run(
            [
                *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"),
                *("sh", "-ec", _ENTER, "sh", *self.mounts),
                *(sys.executable, _LOOPBACK),
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
            env=ENVIRONMENT,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def sh(self, script: str, *, code: int = 0) -> str:
        """Run a script for sh in the system."""
        return self.run(["sh", "-euc", script], code=code)

    def path(self, name: str) -> Path:
        """Return the path, outside the system, of a file in it."""
        return self._directory / "upper" / name.lstrip("/")


def read_index(suite: str, names: Iterable[str]) -> str:
    """Return apt's index of a suite, reduced to some packages and all that they depend on."""
    (path,) = Path(_base(suite), "var/lib/apt/lists").glob("*_Packages")
    entries: dict[str, tuple[str, dict[str, str]]] = {}
    providers: dict[str, str] = {}
    for entry in path.read_text().split("\n\n"):
        fields = dict(_FIELD.findall(entry))
        if name := fields.get("Package"):
            entries[name] = entry, fields
            providers |= dict.fromkeys(_NAME.findall(fields.get("Provides", "")), name)
    kept: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        name = name if name in entries else providers.get(name, "")
        if name and name not in kept:
            kept.add(name)
            fields = entries[name][1]
            for key in ("Depends", "Pre-Depends"):
                left += _NAME.findall(fields.get(key, ""))
    return "".join(f"{entries[name][0].strip()}\n\n" for name in sorted(kept))


def _base(suite: str) -> Path:
    """Return the shared system; make it if it does not exist."""
    if os.geteuid() != 0 or shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("bare systems are made by debootstrap, as root")
    root = Path(get_cache_directory()) / f"bare-{suite}"
    root.parent.mkdir(parents=True, exist_ok=True)
    made = f"{suite} {' '.join(INCLUDED[suite])}\n"
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note = root / ".steward-bare"
        if not note.exists() or note.read_text() != made:
            work = Path(tempfile.mkdtemp(prefix=f"bare-{suite}.new-", dir=root.parent))
            work.chmod(0o755)
            try:
                # invoke-rc.d(8): 101 forbids the start of installed services.
                (work / "usr/sbin").mkdir(parents=True)
                policy = work / "usr/sbin/policy-rc.d"
                policy.write_text("#!/bin/sh\nexit 101\n")
                policy.chmod(0o755)
                _debootstrap(suite, work)
                (work / ".steward-bare").write_text(made)
                shutil.rmtree(root, ignore_errors=True)
                work.rename(root)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    return root


def _debootstrap(suite: str, work: Path) -> None:
    mirror = os.environ.get("STEWARD_DEBIAN_MIRROR") or DEFAULT_MIRROR
    # Its mounts and processes end with it, even if it is killed.
    alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    _call(*alone, "debootstrap", "--variant=minbase", suite, str(work), mirror)
    apt = ("apt-get", "-q", "-y", "-o", "APT::Keep-Downloaded-Packages=true", "install")
    _call(*alone, "chroot", str(work), *apt, "--no-install-recommends", *INCLUDED[suite])


def _call(*words: str) -> None:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=1800,
        env=ENVIRONMENT | {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
