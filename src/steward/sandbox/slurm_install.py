"""Installations of Slurm for a sandbox: the machine's, or a Debian root with another version.

`ensure_root` makes a root directory with debootstrap, once per version and in about a minute, in a
cache. It is made beside its place and renamed when complete; nothing in it runs outside a sandbox.
`get_loader_paths` tells how to start a root's commands without chroot. `find_slurm` returns the
`SlurmInstallation` of a version: the machine's (`find_installed`) or a root's.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from typing import Final

import msgspec

from steward.sandbox.spec import SandboxError, SlurmNotInstalled

DEBIAN_SUITES: Final = {"24.11": "trixie", "26.05": "forky"}
"""Debian suite that packages each version of Slurm."""

PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "libslurm-dev")
DEFAULT_MIRROR: Final = "http://deb.debian.org/debian"
_DEFAULT_CACHE: Final = "/var/cache/steward/roots"
_COMPLETE_MARKER: Final = ".steward-root"
"""File that marks a root as complete."""
_SCRIPTS: Final = "/usr/share/debootstrap/scripts"
_DEBOOTSTRAP_TIMEOUT_S: Final = 1800.0
_REPORT_INTERVAL_S: Final = 2.0


class LoaderPaths(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a program of a root without entering the root.

    Attributes:
        loader: The root's dynamic loader.
        library_dirs: The root's directories of shared libraries.
        plugins: The root's directory of Slurm plugins, valid inside the root too.
    """

    loader: str
    library_dirs: tuple[str, ...]
    plugins: str


def get_cache_directory() -> str:
    """Return the directory of cached roots; the variable STEWARD_ROOTS overrides it."""
    return os.path.realpath(os.environ.get("STEWARD_ROOTS") or _DEFAULT_CACHE)


def ensure_root(version: str, report: Callable[[str], None]) -> str:
    """Return the root directory with a version of Slurm; make it if it does not exist.

    Args:
        version: ``24.11``, or with patch level ``24.11.5``.
        report: Called with progress lines.

    Raises:
        SlurmNotInstalled: The version is not in ``SUITES``, or debootstrap is not installed.
        SandboxError: The root cannot be made.
    """
    series = ".".join(version.split(".")[:2])
    suite = DEBIAN_SUITES.get(series)
    if suite is None:
        versions = " and ".join(DEBIAN_SUITES)
        raise SlurmNotInstalled(
            f"Slurm {version} is not available: the versions are {versions}", version
        )
    if os.geteuid() != 0:
        raise SlurmNotInstalled(
            f"cannot install Slurm {version} without root: run this as root", version
        )
    root = f"{get_cache_directory()}/{series}"
    try:
        os.makedirs(get_cache_directory(), mode=0o755, exist_ok=True)
        with _lock_file(f"{root}.lock", report):
            if not os.path.exists(f"{root}/{_COMPLETE_MARKER}"):
                _make_root(root, series, suite, report)
    except OSError as error:
        raise SandboxError(f"{error.filename or root}: {error.strerror}", root) from error
    return root


def get_loader_paths(root: str) -> LoaderPaths:
    """Return how to start a root's programs from outside.

    Raises:
        SandboxError: The root is damaged.
    """
    loaders = sorted(glob(f"{root}/usr/lib*/ld-linux*.so.*"))
    plugin_dirs = sorted(glob(f"{root}/usr/lib/*/slurm-wlm"))
    if not loaders or not plugin_dirs:
        raise SandboxError(f"{root} is damaged: remove it, and start again", root)
    library_dirs = (os.path.dirname(plugin_dirs[0]), plugin_dirs[0], f"{root}/usr/lib")
    return LoaderPaths(loader=loaders[0], library_dirs=library_dirs, plugins=plugin_dirs[0])


@contextmanager
def _lock_file(path: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file during the block, waiting for another holder."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that creates the same root directory")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_root(root: str, series: str, suite: str, report: Callable[[str], None]) -> None:
    """Make a root directory in a temporary place, then rename it."""
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin") is None:
        raise SlurmNotInstalled(
            f"cannot install Slurm {series} without debootstrap: apt-get install debootstrap",
            series,
        )
    report(f"creating a root directory with Slurm {series} from Debian {suite}, once")
    for leftover in glob(f"{root}.new-*"):
        shutil.rmtree(leftover)  # left by a killed run; this process holds the lock
    staging = tempfile.mkdtemp(prefix=f"{series}.new-", dir=os.path.dirname(root))
    try:
        os.chmod(staging, 0o755)  # noqa: S103 - a root directory is everybody's to enter
        _disable_services(staging)
        _run_debootstrap(staging, suite, report)
        _finish_root(staging, root, series)
        if os.path.exists(root):
            shutil.rmtree(root)
        os.rename(staging, root)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    report(f"made {root}")


def _disable_services(staging: str) -> None:
    """Forbid packages to start services while they are installed in the root."""
    # invoke-rc.d(8): 101 forbids the start of a service while its package is installed.
    os.makedirs(f"{staging}/usr/sbin")
    path = f"{staging}/usr/sbin/policy-rc.d"
    with open(path, "w") as file:
        file.write("#!/bin/sh\nexit 101\n")
    os.chmod(path, 0o755)  # noqa: S103 - a script that packages of the root run


def _run_debootstrap(staging: str, suite: str, report: Callable[[str], None]) -> None:
    """Run debootstrap, reporting its progress."""
    mirror = os.environ.get("STEWARD_DEBIAN_MIRROR") or DEFAULT_MIRROR
    suite_script = f"{_SCRIPTS}/{suite}"
    argv = [
        # Its mounts and processes end with it, whatever ends it.
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
        *(suite, staging, mirror),
        # A suite newer than the installed debootstrap is made like sid.
        *(() if os.path.exists(suite_script) else (f"{_SCRIPTS}/sid",)),
    ]
    env = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    env |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    with subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            last_line = _report_progress(process, report)
            exit_code = process.wait(60)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if exit_code:
        raise SandboxError(f"debootstrap of {suite} from {mirror} failed: {last_line}", suite)


def _report_progress(process: "subprocess.Popen[str]", report: Callable[[str], None]) -> str:
    """Read debootstrap's output and report progress; return its last line."""
    started_s = reported_s = time.monotonic()
    last_line = ""
    for line in process.stdout or ():
        now = time.monotonic()
        if now - started_s > _DEBOOTSTRAP_TIMEOUT_S:
            raise SandboxError(
                f"debootstrap did not end within {_DEBOOTSTRAP_TIMEOUT_S:.0f} s", process
            )
        last_line = line.strip() or last_line
        if now - reported_s >= _REPORT_INTERVAL_S:
            reported_s = now
            report(f"  {now - started_s:3.0f} s  {last_line.removeprefix('I: ')}")
    return last_line


def _finish_root(staging: str, root: str, series: str) -> None:
    """Check the root's Slurm version, remove caches, and mark the root as complete."""
    result = subprocess.run(
        ["/usr/sbin/chroot", staging, "/usr/sbin/slurmctld", "-V"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if f" {series}." not in result.stdout:
        output = (result.stdout + result.stderr).strip()
        raise SlurmNotInstalled(f"Debian no longer has Slurm {series}, but {output}", series)
    for leftover in glob(f"{staging}/var/cache/apt/archives/*.deb") + glob(
        f"{staging}/var/lib/apt/lists/*_*"
    ):
        os.unlink(leftover)
    with open(f"{staging}/etc/hosts", "ab"):
        pass  # a sandbox's own file is mounted over it
    # slurm.conf names the plugins once, for daemons inside the root and commands outside: inside,
    # the root's own path must lead to the root.
    os.makedirs(os.path.dirname(staging + root), exist_ok=True)
    os.symlink("/", staging + root)
    with open(f"{staging}/{_COMPLETE_MARKER}", "w") as file:
        file.write(f"{series}\n")


DAEMONS: Final = ("slurmctld", "slurmd", "munged")
COMMANDS: Final = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol"),
    *("scrontab", "sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat"),
    *("strigger", "munge", "unmunge"),
)
_PLUGIN_DIRECTORIES: Final = (
    *("/usr/lib/*/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/slurm"),
    *("/usr/local/lib/slurm", "/opt/slurm/lib/slurm"),
)
# Daemons are in directories that an ordinary user's PATH lacks.
_DAEMON_DIRECTORIES: Final = (
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/opt/slurm/sbin",
    "/opt/slurm/bin",
)


class SlurmInstallation(msgspec.Struct, frozen=True, kw_only=True):
    """A Slurm installation that can be run.

    Attributes:
        version: Version, such as ``22.05.8``.
        root: Root directory in which to start it; "" for the machine's own.
        daemon_paths: Path of each of ``DAEMONS`` below the root, and of slurmdbd if installed.
        commands_dir: Directory of the commands below the root.
    """

    version: str
    root: str
    daemon_paths: dict[str, str]
    commands_dir: str

    def make_argv(self, daemon: str, *arguments: str) -> tuple[str, ...]:
        """Return the command line of a daemon.

        Raises:
            SlurmNotInstalled: The daemon is not installed.
        """
        if daemon not in self.daemon_paths:
            raise SlurmNotInstalled(
                f"{daemon} is not installed (Debian: apt-get install {daemon})", daemon
            )
        prefix = ("/usr/sbin/chroot", self.root) if self.root else ()
        return (*prefix, self.daemon_paths[daemon], *arguments)


def find_installed() -> SlurmInstallation | None:
    """Return the Slurm installed on this machine; None if it is incomplete."""
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_DAEMON_DIRECTORIES])
    program_by_name = {name: shutil.which(name, path=search_path) for name in (*DAEMONS, "sbatch")}
    daemon_paths = {
        name: os.path.abspath(program) for name, program in program_by_name.items() if program
    }
    if len(daemon_paths) < len(program_by_name):
        return None
    commands_dir = os.path.dirname(daemon_paths.pop("sbatch"))
    slurmdbd = shutil.which("slurmdbd", path=search_path)
    if slurmdbd:
        daemon_paths["slurmdbd"] = os.path.abspath(slurmdbd)
    return SlurmInstallation(
        version=_get_version((daemon_paths["slurmctld"],)),
        root="",
        daemon_paths=daemon_paths,
        commands_dir=commands_dir,
    )


def find_slurm(version: str, report: Callable[[str], None]) -> SlurmInstallation:
    """Return the Slurm of a version; make its root first if needed.

    Args:
        version: ``24.11`` or ``24.11.5``; "" for the installed one.
        report: Called with progress lines of long work.

    Raises:
        SlurmNotInstalled: The version is neither installed nor available.
    """
    installed = find_installed()
    if not version:
        if installed is None:
            raise SlurmNotInstalled(
                "no complete Slurm is installed: install slurmctld, slurmd, the client commands "
                "and munge (Debian: apt-get install slurmctld slurmd slurm-client munge)"
            )
        return installed
    if installed is not None and f"{installed.version}.".startswith(f"{version}."):
        return installed
    root = ensure_root(version, report)
    daemon_paths = {name: f"/usr/sbin/{name}" for name in (*DAEMONS, "slurmdbd")}
    exact_version = _get_version(("/usr/sbin/chroot", root, daemon_paths["slurmctld"]))
    return SlurmInstallation(
        version=exact_version, root=root, daemon_paths=daemon_paths, commands_dir="/usr/bin"
    )


def find_plugin_directory() -> str:
    """Return the plugin directory of the installed Slurm: beside its daemons, or a usual one.

    Raises:
        SlurmNotInstalled: There is no plugin directory.
    """
    slurm = find_installed()
    prefix = os.path.dirname(os.path.dirname(slurm.daemon_paths["slurmctld"])) if slurm else ""
    adjacent_dirs = (
        (f"{prefix}/lib/slurm", f"{prefix}/lib64/slurm") if prefix not in ("", "/usr") else ()
    )
    for pattern in (*adjacent_dirs, *_PLUGIN_DIRECTORIES):
        for path in sorted(glob(f"{pattern}/select_cons_tres.so")):
            return os.path.dirname(path)
    raise SlurmNotInstalled(
        f"no plugins of Slurm in {', '.join(_PLUGIN_DIRECTORIES)}", _PLUGIN_DIRECTORIES
    )


def _get_version(argv: tuple[str, ...]) -> str:
    """Return the version that a program prints with ``-V``."""
    try:
        result = subprocess.run(
            [*argv, "-V"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"cannot run {argv[-1]}: {error}", argv) from error
    match = re.search(r"\d+\.\d+\.\d+", result.stdout)
    if match is None:
        output = (result.stdout + result.stderr).strip()
        raise SandboxError(f"{argv[-1]} -V printed no version: {output!r}", argv)
    return match.group()
