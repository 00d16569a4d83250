"""How long it takes until the event of a node's failure is in the journal, and what that costs.

A real Slurm whose slurmd is killed: from the moment at which slurmctld's log says that the
node is down, to the moment at which the event was made. Beside it changes by hand, and
the sensor's look at clusters of many nodes, as scontrol writes them.
"""

import statistics
import tempfile
import time
from pathlib import Path

from job_submission import wait_until
from sensor_daemon import Watching

from scale import scaled
from steward.capture.sensor.changes import ObjectFacts, compare_snapshots
from steward.capture.sensor.sensor import extract_node_facts
from steward.core.events import NODE_STATE, utc_now
from steward.sandbox import Sandbox, SandboxSpec
from steward.slurm.cluster_records import NodeReader
from steward.slurm.users import NameResolver

INTERVALS_S = (0.5, 1.0)[: scaled(2)]
KILLS = scaled(8)
CHANGES = scaled(20, 2)
LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=16 CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.{n} "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:4 NodeAddr={name} "
    "NodeHostName={name} Version=24.11.5 OS=Linux 6.1.0 RealMemory=256000 AllocMem=0 FreeMem={n} "
    "Sockets=2 Boards=1 State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A "
    "MCS_label=N/A Partitions=main,debug BootTime=2026-03-01T12:00:00 "
    "SlurmdStartTime=2026-03-01T12:00:10 LastBusyTime=2026-03-01T12:00:10 ResumeAfterTime=None "
    "CfgTRES=cpu=64,mem=256000M,billing=64 AllocTRES= CurrentWatts=0 AveWatts=0"
)


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory(prefix="steward-bench-") as path:
        Path(path).chmod(0o755)
        spec = SandboxSpec(directory=f"{path}/sandbox", nodes=4, extra=("SlurmdTimeout=4",))
        with Sandbox.up(spec) as cluster:
            for interval_s in INTERVALS_S:
                home = Path(path) / f"home{interval_s}"
                live(Watching(cluster, home, interval_s=interval_s), interval_s)
    for nodes in (scaled(1000), scaled(10_000)):
        look(nodes)


def live(watching: Watching, interval_s: float) -> None:
    """Measure on a real Slurm."""
    watching.install()
    watching.start()
    try:
        watching.settle()
        said(f"killed slurmd, interval_s = {interval_s}", kills(watching))
        said(f"drained by hand, interval_s = {interval_s}", drains(watching))
    finally:
        watching.close()


def kills(watching: Watching) -> list[float]:
    """Seconds from slurmctld's word that a killed slurmd's node is down to the event."""
    return [watching.down_delay_s(f"node{number % 4 + 1}") for number in range(KILLS)]


def drains(watching: Watching) -> list[float]:
    """Seconds from the end of ``scontrol update`` to the event."""
    return [drained(watching, number) for number in range(CHANGES)]


def drained(watching: Watching, number: int) -> float:
    """The same for one change."""
    known = len(watching.events(NODE_STATE))
    words = ["state=drain", f"reason=bench {number}"] if number % 2 == 0 else ["state=undrain"]
    watching.cluster.run(["scontrol", "update", "nodename=node1", *words])
    changed = utc_now()
    wait_until(lambda: len(watching.events(NODE_STATE)) > known)
    event = watching.events(NODE_STATE)[known]
    return max(0.0, (event.seen_at - changed).total_seconds())


def look(count: int) -> None:
    """Print what reading and comparing a picture of many nodes costs us."""
    reader = NodeReader(NameResolver())

    def picture(out: bytes) -> dict[str, dict[str, ObjectFacts]]:
        return {
            NODE_STATE: {
                one.node.name: extract_node_facts(one.node) for one in reader.parse_nodes(out)
            }
        }

    def text(busy: int) -> bytes:
        """What scontrol writes where ``busy`` nodes have had news of their load."""
        lines = (LINE.format(name=f"n{n:05}", n=n + (n < busy), state="IDLE") for n in range(count))
        return "\n".join(lines).encode() + b"\n"

    began = time.perf_counter()
    before = picture(text(0))
    print(f"{count} nodes: the first look takes {time.perf_counter() - began:.3f} s of our time")
    for busy in (0, count // 100):
        out = text(busy)
        began = time.perf_counter()
        compare_snapshots(before, picture(out), source="interval", at=utc_now())
        took_s = time.perf_counter() - began
        print(f"{count} nodes, {busy} with another load: {took_s:.3f} s of our time a look")


def said(what: str, found: list[float]) -> None:
    """Print how long it took."""
    print(
        f"{what}: median {statistics.median(found):.2f} s, worst {max(found):.2f} s of {len(found)}"
    )


if __name__ == "__main__":
    main()
