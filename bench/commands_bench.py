"""CPU time of short commands, which scripts start for every job: the whole process.

    python bench/commands_bench.py [--rounds 10]

Root runs ``--help``, ``job``, ``archive list`` and ``bank balance`` on a site with one job, whose
daemon's socket answers. Beside them run ``python -c pass`` and, where it is installed, Slurm's
``sacct --version``. The rounds are interleaved, and each figure is the least of its rounds, so that
other work on the host changes them little. A process leaves its bytecode for the next one.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bars import Bar, check, finish
from harness.bank import charge, config_of, feed, life, make_shared_site
from harness.socket import serving
from scale import scaled
from steward.core.config.reader import load_settings
from steward.daemon.contexts import make_registry

STEWARD: Final = (sys.executable, "-m", "steward")
_PYTHON: Final = "python -c pass"
_HELP: Final = Bar("steward --help: CPU time", "s", 0.09, _PYTHON)
_JOB: Final = Bar("steward job N: CPU time", "s", 0.12, _PYTHON)
_LIST: Final = Bar("steward archive list: CPU time", "s", 0.12, _PYTHON)
_BALANCE: Final = Bar("steward bank balance: CPU time", "s", 0.12, _PYTHON)
COMMANDS: Final[dict[str, tuple[tuple[str, ...], Bar | None]]] = {
    _PYTHON: ((sys.executable, "-c", "pass"), None),
    "sacct --version": (("sacct", "--version"), None),
    "steward --help": ((*STEWARD, "--help"), _HELP),
    "steward job 7": ((*STEWARD, "job", "7"), _JOB),
    "steward archive list": ((*STEWARD, "archive", "list"), _LIST),
    "steward bank balance": ((*STEWARD, "bank", "balance"), _BALANCE),
}
"""Commands, each with its bar."""
_LIMIT_S: Final = 60
"""Longest run of a command, in seconds."""


def cpu_s(command: tuple[str, ...], environment: dict[str, str]) -> float:
    """Run a command; return the CPU time of its process, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, stdout=subprocess.DEVNULL, check=True, timeout=_LIMIT_S, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(directory: Path, rounds: int) -> dict[str, float]:
    """Return the least CPU time of each command on a new site in a directory, in seconds."""
    config = config_of(directory)
    site = make_shared_site(directory)
    feed(site, life(7))
    charge(site, 7)
    site.ledger.close()
    settings = load_settings(str(config))
    directory.chmod(0o755)  # else the daemon logs that nobody else reaches its socket
    slurm_conf = directory / "slurm.conf"
    slurm_conf.write_text("ClusterName=c1\nSlurmctldHost=localhost\n")
    environment = os.environ | {
        "SLURM_CONF": str(slurm_conf),
        "STEWARD_CONFIG": str(config),
        "PYTHONPYCACHEPREFIX": str(directory / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    commands = {
        name: command for name, (command, _) in COMMANDS.items() if shutil.which(command[0])
    }
    with serving(settings.socket, asked=make_registry(settings)):
        for command in commands.values():
            cpu_s(command, environment)
        times = [
            {name: cpu_s(command, environment) for name, command in commands.items()}
            for _ in range(rounds)
        ]
    return {name: min(one[name] for one in times) for name in commands}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=scaled(10))
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="steward-bench-") as directory:
        figures = measure(Path(directory), rounds)
    print(f"{'CPU time of a process, s':26} {'least':>7}")
    for name, seconds in figures.items():
        print(f"{name:26} {seconds:7.3f}")
        if (bar := COMMANDS[name][1]) is not None:
            check(bar, seconds, figures[_PYTHON])
    finish()


if __name__ == "__main__":
    main()
