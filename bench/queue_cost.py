"""What a look at the queue costs with many jobs in it: seconds, and memory at its peak.

``python bench/queue_cost.py [--jobs 20000] [--slurm VERSION]`` brings up a
cluster of its own. The jobs are tasks of one held array: an update of all but
the last makes slurmctld split them into records of their own, in one request.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from bars import Bar, check, finish
from scale import scaled
from steward.capture.observations import QueueObserver
from steward.sandbox import Sandbox, SandboxSpec
from steward.slurm import Slurm
from steward.slurm.commands import CommandRunner
from steward.slurm.queue import QueueFormat
from steward.slurm.settings import ClusterSettings

RUNS = 5
_POLL = Bar("poll of 20,000 queued jobs, in times of one squeue", "x", 1.2, "squeue")
T = TypeVar("T")


class Costs(msgspec.Struct, kw_only=True):
    """What was measured; times are the best of ``RUNS``, in seconds, memory in MiB.

    Attributes:
        jobs: Records in the queue.
        squeue_s: One squeue, from start to end.
        squeue_mib: Its peak resident memory.
        first_s: A first look: squeue, and all rows made into records.
        again_s: A look at which nothing has changed.
        events_s: The events of a first look.
        steward_mib: Peak resident memory of the process that looked, events included.
        json_s: ``squeue --json``, once; 0 where this Slurm has none.
        json_mib: Its peak resident memory, if more than that of ``squeue``.
    """

    jobs: int
    squeue_s: float
    squeue_mib: float
    first_s: float
    again_s: float
    events_s: float
    steward_mib: float
    json_s: float
    json_mib: float


def measure(cluster: Sandbox, jobs: int) -> Costs:
    """Fill the queue of ``cluster`` and measure looks at it, from a process inside."""
    words = ["sbatch", "--parsable", "--hold", f"--array=0-{jobs - 1}", "--job-name=queue-cost"]
    array = cluster.run([*words, "--output=/tmp/%A-%a.out", "--wrap", "sleep 60"]).stdout.strip()
    # Another name: squeue would fold tasks of the array's own name into its row again.
    cluster.run(["scontrol", "update", f"jobid={array}_[0-{jobs - 2}]", "name=queue-costs"])
    settings = msgspec.json.encode(cluster.make_cluster_settings()).decode()
    result = cluster.run([sys.executable, __file__, "--inside", settings], timeout_s=600)
    return msgspec.json.decode(result.stdout, type=Costs)


def look(settings: ClusterSettings) -> Costs:
    """Look at the queue as Steward does, and measure."""
    slurm = Slurm("bench", settings)
    # A child's peak begins with what its parent has: while that is little yet.
    commands, form = CommandRunner("bench", settings), QueueFormat(slurm.list_fields("squeue"))
    variables = {"SQUEUE_FORMAT2": form.format_text}
    _timed(lambda: len(commands.run("squeue", "-a", "-t", "all", "-h", variables=variables)))
    squeue_mib = _children_mib()
    first_s, again_s, squeue_s = [], [], []
    for _ in range(RUNS):
        seconds, queue = _timed(slurm.queue)
        first_s.append(seconds)
        seconds, same = _timed(partial(slurm.queue, queue.rows))
        again_s.append(seconds)
        squeue_s += [queue.cost_s, same.cost_s]
    observed = QueueObserver("bench")
    events_s, _ = _timed(lambda: observed.observe(queue.records, queue.taken_at))
    steward_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    json_s = _json(settings)
    return Costs(
        jobs=len(queue.rows),
        squeue_s=min(squeue_s),
        squeue_mib=squeue_mib,
        first_s=min(first_s),
        again_s=min(again_s),
        events_s=events_s,
        steward_mib=steward_mib,
        json_s=json_s,
        json_mib=_children_mib(),
    )


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _children_mib() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def _json(settings: ClusterSettings) -> float:
    """Seconds that ``squeue --json`` takes; its output is thrown away."""
    environment = {**os.environ, "SLURM_CONF": settings.slurm_conf}
    program = os.path.join(settings.slurm_bin, "squeue")
    began = time.perf_counter()
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
    words = [program, "-a", "-t", "all", "--json"]
    pid = os.posix_spawnp(program, words, environment, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    return time.perf_counter() - began if status == 0 else 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=scaled(20_000, 20))
    parser.add_argument("--slurm", default="", help="version; the installed one by default")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        costs = look(msgspec.json.decode(options.inside, type=ClusterSettings))
        print(msgspec.json.encode(costs).decode())
        return
    room = max(30_000, options.jobs + 10_000)
    extra = (f"MaxJobCount={room}", f"MaxArraySize={room}")
    with Sandbox.up(SandboxSpec(slurm=options.slurm, nodes=1, extra=extra)) as cluster:
        costs = measure(cluster, options.jobs)
    print(f"{costs.jobs} jobs in the queue (best of {RUNS})")
    print(f"  squeue, text form      {costs.squeue_s:8.2f} s {costs.squeue_mib:8.0f} MiB")
    print(f"  squeue --json          {costs.json_s:8.2f} s {costs.json_mib:8.0f} MiB")
    print(f"  first look, parsed     {costs.first_s:8.2f} s {costs.steward_mib:8.0f} MiB")
    print(f"  look without changes   {costs.again_s:8.2f} s")
    print(f"  events of a first look {costs.events_s:8.2f} s")
    print(f"  so the next look waits {costs.squeue_s * 20:8.1f} s at the least")
    check(_POLL, costs.again_s / costs.squeue_s, 1.0)
    finish()


if __name__ == "__main__":
    main()
