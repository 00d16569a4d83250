"""What the SPANK plugin costs: microseconds a task, and jobs with it and without it.

With Prolog and Epilog told of, too, jobs are measured a third time.

``python bench/shim_bench.py [--jobs 1000] [--slurm VERSION]``. The first is
measured in the harness of the tests, compiled as for use. For the second two
clusters are up at once, and batches of jobs go to them in turn, so that what
disturbs the machine disturbs both.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from importlib import resources
from pathlib import Path

from scale import scaled
from steward.admin.plugins.build import LIBRARY, SOURCES, build_plugins
from steward.admin.plugins.installation import install_shim
from steward.sandbox import Sandbox, SandboxSpec

HARNESS = Path(__file__).parents[1] / "tests" / "native" / "spank_harness.c"
TASKS = scaled(20_000, 100)
ROUNDS = scaled(5)
BATCHES = scaled(10)


def cost_of_a_task() -> float:
    """Microseconds of slurmstepd's main thread for a task, all hooks together: the median."""
    with tempfile.TemporaryDirectory() as work:
        native = resources.files("steward.native")
        names = SOURCES[LIBRARY]
        sources = [str(HARNESS), *(str(native / name) for name in names)]
        words = ["cc", "-std=gnu11", "-O2", f"-I{native}", "-rdynamic", "-pthread"]
        words += ["-Wl,--wrap=open", "-Wl,--wrap=fopen"]
        subprocess.run([*words, "-o", f"{work}/spank_harness", *sources], check=True, timeout=100)
        os.mkdir(f"{work}/spool", 0o700)
        orders = f"item job 5\nitem tasks 1\ninit spool={work}/spool\nmeasure {TASKS}\nexit\n"
        found = [
            float(
                subprocess.run(
                    [f"{work}/spank_harness"],
                    input=orders,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(ROUNDS)
        ]
    return statistics.median(found)


def bring_up(slurm: str, *, with_shim: bool, prolog: bool = False) -> Sandbox:
    """A cluster of one node whose jobs need nothing but slurmd's own time."""
    stack = ("include {directory}/etc/plugstack.conf.d/*.conf",)
    spec = SandboxSpec(slurm=slurm, nodes=1, cpus=64, plugstack=stack)
    cluster = Sandbox.up(spec, report=print)
    if with_shim:
        here = cluster.directory
        built = build_plugins(f"{cluster.plan.root}/usr/include", f"{here}/lib")
        install_shim(
            built,
            libdir=f"{here}/lib",
            plugstack=f"{here}/etc/plugstack.conf",
            spool=f"{here}/shim",
            with_prolog=prolog,
        )
    # Of both, so that they are alike.
    cluster.restart_service("slurmd.node1")
    deadline = time.monotonic() + 60
    while cluster.run(["srun", "-Q", "true"], check=False).returncode:
        if time.monotonic() > deadline:
            raise SystemExit("the node does not run jobs")
    return cluster


def seconds_of(cluster: Sandbox, jobs: int) -> float:
    """How long an array of jobs takes that do nothing, from submit to the last one's end."""
    began = time.monotonic()
    words = ["sbatch", f"--array=1-{jobs}", "--output=/dev/null", "--wrap", "true"]
    cluster.run(words, timeout_s=600)
    while cluster.run(["squeue", "-h", "-o", "%i"]).stdout.strip():
        time.sleep(0.05)
    return time.monotonic() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=scaled(1000, 5))
    parser.add_argument("--slurm", default="")
    options = parser.parse_args()
    print(f"the SPANK plugin takes {cost_of_a_task():.1f} µs a task (median of {ROUNDS})")
    with (
        bring_up(options.slurm, with_shim=False) as plain,
        bring_up(options.slurm, with_shim=True) as shimmed,
        bring_up(options.slurm, with_shim=True, prolog=True) as full,
    ):
        clusters = {"without it": plain, "with it": shimmed, "with it and --prolog": full}
        times: dict[str, list[float]] = {name: [] for name in clusters}
        for _ in range(BATCHES):
            for name, cluster in clusters.items():
                times[name].append(seconds_of(cluster, options.jobs // BATCHES))
    base = times["without it"]
    print(f"{options.jobs // BATCHES * BATCHES} jobs in {BATCHES} batches on one node:")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
        print(f"  {sum(seconds):6.1f} s {name}: ratio {sum(seconds) / sum(base):.3f}, ", end="")
        print(f"median of batches {ratio:.3f}")


if __name__ == "__main__":
    main()
