"""scrontab jobs of users, which run each minute, also if Slurm lacks the command."""

import subprocess
from pathlib import Path
from typing import Final

from steward.sandbox import Sandbox

ENABLED: Final = "ScronParameters=enable"
"""Line of slurm.conf that enables scrontab jobs."""
NAME: Final = "cron"
"""Name of scrontab jobs."""

_SOURCE: Final = Path(__file__).parents[1] / "native" / "scrontab.c"


def each_minute(
    cluster: Sandbox, user: str, script: str, *, account: str, count: int = 1
) -> list[int]:
    """Have this many jobs run a command each minute, replacing earlier ones; return their ids."""
    directory = Path(cluster.directory)
    if not _has_command(cluster):
        words = [_program(directory), account, str(count), script]
        return [int(job) for job in cluster.run(words, user=user).stdout.split()]
    line = f"#SCRON -A {account} -t 5 -o /dev/null -J {NAME}\n* * * * * {script}\n"
    path = directory / "crontab"
    path.write_text(line * count)
    path.chmod(0o644)
    cluster.run(["scrontab", str(path)], user=user)
    return jobs(cluster)


def never_again(cluster: Sandbox, user: str) -> bool:
    """Remove a user's crontab; return whether slurmctld did it."""
    words = (
        ["scrontab", "-r"] if _has_command(cluster) else [_program(cluster.directory), "", "0", ""]
    )
    return cluster.run(words, user=user, check=False).returncode == 0


def jobs(cluster: Sandbox) -> list[int]:
    """Return the ids of such jobs that wait or run."""
    shown = cluster.run(["squeue", "-h", "-n", NAME, "-o", "%A"]).stdout
    return [int(job) for job in shown.split()]


def _has_command(cluster: Sandbox) -> bool:
    return (Path(cluster.directory) / "bin" / "scrontab").exists()


def _program(directory: str | Path) -> str:
    """Compile scrontab for the installed Slurm, once; return its path."""
    path = Path(directory) / "scrontab"
    if not path.exists():
        (library,) = Path("/usr/lib").glob("*/slurm-wlm")
        words = ["cc", "-D_GNU_SOURCE", "-o", str(path), str(_SOURCE)]
        subprocess.run([*words, f"-L{library}", f"-Wl,-rpath,{library}", "-lslurmfull"], check=True)
    return str(path)
