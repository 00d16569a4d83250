"""Where Slurm's programs are: those that are installed, or those of a root directory."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from glob import glob
from typing import Final

import msgspec

from steward.sandbox import roots
from steward.sandbox.spec import SandboxError, SlurmMissing

DAEMONS: Final = ("slurmctld", "slurmd", "munged")
COMMANDS: Final = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol"),
    *("scrontab", "sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat"),
    *("strigger", "munge", "unmunge"),
)
_PLUGINS: Final = (
    *("/usr/lib/*/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/slurm"),
    *("/usr/local/lib/slurm", "/opt/slurm/lib/slurm"),
)
# Daemons lie in directories that an ordinary user's PATH does not hold.
_MORE_PLACES: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/opt/slurm/sbin", "/opt/slurm/bin")


class Slurm(msgspec.Struct, frozen=True, kw_only=True):
    """One Slurm that can be run.

    Attributes:
        version: ``22.05.8``.
        root: Root directory that it is started in; "" for the machine's own.
        daemons: Path of each of ``DAEMONS`` below the root, and of slurmdbd where it is.
        commands: Directory of the commands below the root.
    """

    version: str
    root: str
    daemons: dict[str, str]
    commands: str

    def argv(self, daemon: str, *arguments: str) -> tuple[str, ...]:
        """What to start for a daemon.

        Raises:
            SlurmMissing: It is not installed.
        """
        if daemon not in self.daemons:
            raise SlurmMissing(
                f"{daemon} is not installed (Debian: apt-get install {daemon})", daemon
            )
        prefix = ("/usr/sbin/chroot", self.root) if self.root else ()
        return (*prefix, self.daemons[daemon], *arguments)


def installed() -> Slurm | None:
    """The Slurm that is installed on this machine; None if any of it is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_MORE_PLACES])
    found = {name: shutil.which(name, path=path) for name in (*DAEMONS, "sbatch")}
    paths = {name: os.path.abspath(where) for name, where in found.items() if where}
    if len(paths) < len(found):
        return None
    commands = os.path.dirname(paths.pop("sbatch"))
    slurmdbd = shutil.which("slurmdbd", path=path)
    if slurmdbd:
        paths["slurmdbd"] = os.path.abspath(slurmdbd)
    return Slurm(version=_version((paths["slurmctld"],)), root="", daemons=paths, commands=commands)


def find(version: str, say: Callable[[str], None]) -> Slurm:
    """The Slurm of a version, made ready if that is needed.

    Args:
        version: ``24.11`` or ``24.11.5``; "" for the installed one.
        say: Is told, a line at a time, about work that takes long.

    Raises:
        SlurmMissing: It is not here and cannot be had.
    """
    here = installed()
    if not version:
        if here is None:
            raise SlurmMissing(
                "no complete Slurm is installed: install slurmctld, slurmd, the client commands "
                "and munge (Debian: apt-get install slurmctld slurmd slurm-client munge)"
            )
        return here
    if here is not None and f"{here.version}.".startswith(f"{version}."):
        return here
    root = roots.ensure(version, say)
    daemons = {name: f"/usr/sbin/{name}" for name in (*DAEMONS, "slurmdbd")}
    exact = _version(("/usr/sbin/chroot", root, daemons["slurmctld"]))
    return Slurm(version=exact, root=root, daemons=daemons, commands="/usr/bin")


def installed_plugins() -> str:
    """Return the plugin directory of the installed Slurm: beside its daemons, or a usual place.

    Raises:
        SlurmMissing: There is none.
    """
    slurm = installed()
    prefix = os.path.dirname(os.path.dirname(slurm.daemons["slurmctld"])) if slurm else ""
    beside = (f"{prefix}/lib/slurm", f"{prefix}/lib64/slurm") if prefix not in ("", "/usr") else ()
    for pattern in (*beside, *_PLUGINS):
        for path in sorted(glob(f"{pattern}/select_cons_tres.so")):
            return os.path.dirname(path)
    raise SlurmMissing(f"Slurm's plugins are in none of {', '.join(_PLUGINS)}", _PLUGINS)


def _version(argv: tuple[str, ...]) -> str:
    try:
        result = subprocess.run(
            [*argv, "-V"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{argv[-1]} does not run: {error}", argv) from error
    match = re.search(r"\d+\.\d+\.\d+", result.stdout)
    if match is None:
        said = (result.stdout + result.stderr).strip()
        raise SandboxError(f"{argv[-1]} -V did not name its version but said: {said!r}", argv)
    return match.group()
