"""640,000 tasks on 5,000 nodes that end at once, told to one Steward; and what an agent costs.

The nodes are simulated: a few processes send what 5,000 agents would, each over
a connection of its own with a MUNGE credential of its own, as fast as it is
taken. Batches and credentials are made beforehand, by real munged. The cluster's
``scontrol`` and ``squeue`` are scripts: all nodes are here, and no job is queued. The
journal is on tmpfs, or in the directory that BENCH_DIR names (on tmpfs fsync is free).

The agent is the real one: what 1,440 runs a day cost that find nothing to do,
and what one costs that stays.
"""

import http.client
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from controllers import Munged
from spool_daemon import Daemon, children_of, settings_in

from scale import scaled
from servers.server import free_port
from steward.agent import agent
from steward.capture.settings import NodesSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.journal import JournalReader
from steward.core.munge import Munge
from steward.slurm.settings import ClusterSettings

NODES, TASKS = scaled(5000, 8), 128
SENDERS: Final = 4
STRAY: Final = scaled(20, 2)
IDLE_RUNS, LOOKS = scaled(40, 2), scaled(100, 10)
RUNS_A_DAY: Final = 1440
SLURM: Final = "24.11.5"
"""Version that the stand-ins for Slurm's commands print."""
_PATIENCE_S: Final = 300.0

Batch = tuple[str, str, bytes]


def batch_of(munge: Munge, number: int) -> Batch:
    """What the agent of one node sends: its head, its credential, its lines."""
    node, now = f"n{number}", int(time.time() * 1e6)
    common = f'"v":1,"k":"%s","t":{now},"j":7,"n":"{node}","s":"0","l":{now - 9_000_000}'
    start = common % "start" + f',"u":1000,"g":1000,"tasks":{TASKS},"cpus":{TASKS},"name":"a.out"'
    task = common % "task" + (
        ',"id":%d,"pid":%d,"st":0,"ut":8123456,"sy":123456,"rss":123456789,'
        '"minf":12345,"majf":1,"in":4096,"out":8192,"vsw":123,"isw":45'
    )
    end = common % "end" + f',"tasks":{TASKS},"rss":123456789,"peak":9876543210'
    first = number * TASKS
    lines = [start, *(task % (first + n, 4000 + n) for n in range(TASKS)), end]
    body = "".join(f"{{{line}}}\n" for line in lines).encode()
    head = json.dumps(
        {"v": 1, "node": node, "cluster": "c1", "boot": "b", "place": "0", "sequence": 1}
    )
    claim = agent.claim_of(node, "c1", 1, agent.digest_of(head.encode(), body))
    return head, munge.encode(claim).decode(), body


def send(port: int, batches: Sequence[Batch]) -> None:
    """Send batches, each as another node; again where it is asked to come again."""
    for head, credential, body in batches:
        headers = {"Steward-Batch": head, "Steward-Credential": credential}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", agent.PATH, body, headers)
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"not taken: {answer.status} {said!r}")


def settings_of(where: Path, munged: Munged, port: int) -> Settings:
    """A Steward whose cluster has so many nodes, all of them here."""
    commands = where / "bin"
    commands.mkdir()
    nodes = "".join(
        f"NodeName=n{n} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=n{n} Port=6818 State=IDLE\n"
        for n in range(NODES)
    )
    (commands / "nodes").write_text(nodes)
    answers = {
        "squeue": f'case "$*" in *--version*) echo slurm-wlm {SLURM};; esac',
        "scontrol": f'case "$*" in *config*) echo "StateSaveLocation = /"; '
        f'echo "SlurmdUser = root(0)";; *node*) cat {commands}/nodes;; esac',
    }
    for command, answer in answers.items():
        script = commands / command
        script.write_text(f"#!/bin/sh\n{answer}\n")
        script.chmod(0o755)
    of = ClusterSettings(
        spool=str(where / "spool"), slurm_bin=str(commands), munge_socket=munged.socket
    )
    return settings_in(
        where,
        cluster={"c1": of},
        archive=ArchiveSettings(catalog=False),
        nodes=NodesSettings(listen=f"127.0.0.1:{port}"),
    )


def peaks(daemon: Daemon) -> dict[str, float]:
    """Largest resident size that each process ever had, in MB."""
    found = {}
    for pid in children_of(daemon.pid):
        text = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        found[fields["Name"]] = int(fields["VmHWM"].split()[0]) / 1000
    return found


def storm(where: Path) -> None:
    """All nodes at once."""
    munged, port = Munged(where / "munged"), free_port()
    try:
        settings = settings_of(where, munged, port)
        munge = Munge(munged.socket)
        began = time.monotonic()
        batches = [batch_of(munge, number) for number in range(NODES)]
        made_s = time.monotonic() - began
        size = sum(len(body) for _, _, body in batches)
        with Daemon(settings, where) as daemon:
            daemon.wait(lambda: "listening for nodes" in daemon.log(), 60.0)
            before = peaks(daemon)
            shares = [batches[share::SENDERS] for share in range(SENDERS)]
            context = multiprocessing.get_context("fork")
            senders = [context.Process(target=send, args=(port, share)) for share in shares]
            began = time.monotonic()
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(_PATIENCE_S)
            took_s = time.monotonic() - began
            if any(sender.exitcode for sender in senders):
                raise SystemExit("not all batches were taken")
            after = peaks(daemon)
            events = counted(settings)
    finally:
        munged.close()
    print(f"{NODES * TASKS:,} tasks on {NODES:,} nodes, {size / 1e6:.0f} MB of lines")
    print(f"  batches and credentials made beforehand      {made_s:8.2f} s")
    print(f"  taken in, durable, and answered              {took_s:8.2f} s      wanted < 60")
    print(f"  nodes a second                               {NODES / took_s:8.0f}")
    for kind, count in sorted(events.items()):
        print(f"  events {kind:38}{count:8}")
    for name in sorted(after):
        if name in ("steward nodes", "steward journal"):
            was = before.get(name, 0.0)
            print(f"  peak memory of {name:30}{after[name]:8.1f} MB     before: {was:.1f}")


def counted(settings: Settings) -> dict[str, int]:
    """How many events of each kind of nodes there are."""
    reader = JournalReader(settings.state_dir)
    counts: dict[str, int] = {}
    position = 0
    while True:
        events, _ = reader.read(position, {"step.start", "task.exit", "step.end", "node.gap"}, 1000)
        if not events:
            break
        position = events[-1].id
        for event in events:
            counts[event.kind] = counts.get(event.kind, 0) + 1
    reader.close()
    return counts


def agent_words(spool: Path, socket: str, port: int) -> list[str]:
    """An agent of the node ``localhost``."""
    return [
        *(sys.executable, "-IS", str(agent.__file__), "--spool", str(spool)),
        *("--to", f"127.0.0.1:{port}", "--node", "localhost", "--munge-socket", socket),
    ]


def idle(where: Path) -> None:
    """What an agent costs that has nothing to do."""
    munged, port = Munged(where / "munged"), free_port()
    spool = where / "lines"
    spool.mkdir()
    words = agent_words(spool, munged.socket, port)
    of = ClusterSettings(slurm=False, spool=str(where / "spool"), munge_socket=munged.socket)
    settings = settings_in(
        where, cluster={"c1": of}, nodes=NodesSettings(listen=f"127.0.0.1:{port}")
    )
    try:
        with Daemon(settings, where) as daemon:
            daemon.wait(lambda: "listening for nodes" in daemon.log(), 60.0)
            subprocess.run([*words, "--limit", "30"], check=True)
            quiet = cost(words, IDLE_RUNS)
            told = cost_of_heartbeats(words, spool, STRAY)
            silent_again(spool)
            size = largest(words)
            stays = resident(words)
    finally:
        munged.close()
    day_s = quiet * RUNS_A_DAY + told * 96
    print("the agent, a day, with nothing to tell")
    print(f"  by a timer, once a minute                    {day_s:8.1f} s of CPU")
    print(f"    a run that asks nobody                     {quiet * 1e3:8.1f} ms")
    print(f"    one that says that the node is there       {told * 1e3:8.1f} ms, 96 times")
    print(f"  largest resident size of a run               {size:8.1f} MB")
    print(f"  one that stays                               {stays[0]:8.1f} s of CPU")
    print(f"    its resident size                          {stays[1]:8.1f} MB")


def cost(words: Sequence[str], runs: int) -> float:
    """Seconds of CPU of a run."""
    before = spent()
    for _ in range(runs):
        subprocess.run(words, check=True)
    return (spent() - before) / max(runs, 1)


def cost_of_heartbeats(words: Sequence[str], spool: Path, runs: int) -> float:
    """Seconds of CPU of a run that says that the node is there."""
    before = spent()
    for _ in range(runs):
        silent_again(spool)
        subprocess.run(words, check=True)
    return (spent() - before) / runs


def silent_again(spool: Path) -> None:
    """Have the node's next run say that it is there."""
    place = agent.Place(str(spool / "localhost.place"))
    place.heard = 0.0
    place.save()


def resident(words: Sequence[str]) -> tuple[float, float]:
    """Seconds of CPU a day of an agent that stays, and its size in MB."""
    process = subprocess.Popen([*words, "--resident", "--every", "0.02"])
    time.sleep(0.02 * LOOKS + 0.5)
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    seconds = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    size = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    # Its start is in it: the looks of a day are as many, and the start is paid once.
    return seconds / LOOKS * RUNS_A_DAY, int(size.split()[1]) / 1000


def spent() -> float:
    """Seconds of CPU of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def largest(words: Sequence[str]) -> float:
    """Largest resident size of a run, in MB: its parent must be smaller, or counts itself."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *words], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1000


def main() -> None:
    """Run both, and print what came out."""
    base = os.environ.get("BENCH_DIR") or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    for bench in (storm, idle) if len(sys.argv) < 2 else (globals()[sys.argv[1]],):
        where = Path(tempfile.mkdtemp(prefix="steward-nodes-", dir=base))
        try:
            bench(where)
        finally:
            shutil.rmtree(where)


if __name__ == "__main__":
    main()
