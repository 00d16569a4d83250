"""Checks of slurmctld and its settings: does it answer, on which hosts, by which clock."""

import re
import socket
import time
from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.findings import Finding, ok, several, skipped, warning, wrong
from steward.admin.doctor.ground import Asked, Ground, each_cluster
from steward.core.filesystems import network_kind
from steward.core.looks import COST_FACTOR
from steward.slurm import Machine, SlurmError, SlurmUnavailable

_OLDEST: Final = (22, 5)
_NEWEST: Final = (26, 5)
_SECONDS: Final = re.compile(r"(\d+)\s*sec")
_SKEW_S: Final = 2.0
_MUNGE_S: Final = 60.0
"""MUNGE takes a credential of 300 s; a clock that is off by a part of that will be by all of it."""
_SHORT_MEMORY_S: Final = 60
_NEARLY_ALL: Final = 0.9


def answers(ground: Ground, *, ping_s: float = 8.0) -> Iterator[Finding]:
    """Check that Slurm's commands exist and slurmctld answers them.

    Args:
        ground: Input of the check.
        ping_s: Longest wait for ``scontrol ping``, in seconds. Less than Slurm's shortest usual
            MessageTimeout of 10 s, after which Slurm reports a hanging daemon as DOWN.
    """
    if not ground.clusters:
        yield skipped("scontrol show config", "no cluster's Slurm is asked from here")
    for one in ground.clusters:
        yield _answer(one, ping_s)


def _answer(one: Asked, ping_s: float) -> Finding:
    looked_at = "squeue --version, scontrol show config"
    if one.version is None:
        return wrong(
            looked_at,
            one.no_version,
            f"[cluster.{one.name}] slurm_bin = the directory of Slurm's commands",
            of=one.name,
        )
    version = f"{one.version[0]}.{one.version[1]:02d}.{one.version[2]}"
    if one.no_answer:
        return _silent(one, f"{looked_at}, scontrol ping", ping_s)
    running = one.shown.get("SLURM_VERSION", version)
    if not _OLDEST <= one.version[:2] <= _NEWEST:
        return warning(
            looked_at,
            f"Slurm {version} is none that Steward is tested with (22.05 to 26.05)",
            of=one.name,
        )
    if running.split("-")[0] != version:
        return warning(
            looked_at,
            f"slurmctld is {running}, the commands here are {version}",
            "install the same Slurm on both",
            of=one.name,
        )
    return ok(looked_at, f"slurmctld {running} answers", of=one.name)


def _silent(one: Asked, looked_at: str, ping_s: float) -> Finding:
    """Tell a slurmctld that does not run from a busy one: that answers a ping."""
    try:
        pings = Machine(one.name, one.settings).controllers(timeout_s=ping_s)
    except SlurmUnavailable:
        return wrong(
            looked_at,
            f"slurmctld answers no ping within {ping_s:g} s: it hangs, or its host is away: "
            f"{one.no_answer}",
            "systemctl status slurmctld",
            of=one.name,
        )
    except SlurmError:
        pings = []
    if any(ping.up for ping in pings if ping.daemon == "slurmctld"):
        return wrong(
            looked_at,
            f"slurmctld is busy: it answers a ping, and nothing else: {one.no_answer}",
            "look at what slurmctld is busy with: sdiag",
            of=one.name,
        )
    is_down = any(ping.daemon == "slurmctld" for ping in pings)
    return wrong(
        looked_at,
        "slurmctld does not run: scontrol ping says DOWN"
        if is_down
        else f"slurmctld does not answer: {one.no_answer}",
        "systemctl start slurmctld" if is_down else "systemctl status slurmctld",
        of=one.name,
    )


def _hosts_of(ground: Ground, one: Asked) -> Iterator[Finding]:
    hosts = [
        re.split(r"[(:]", value)[0].strip()
        for name, value in one.shown.items()
        if name.startswith("SlurmctldHost[") and value
    ]
    looked_at = "SlurmctldHost, StateSaveLocation, scontrol ping"
    spool = one.shown.get("StateSaveLocation", "")
    kind = network_kind(spool) if spool else ""
    down = [
        ping.host or ping.role
        for ping in Machine(one.name, one.settings).pings()
        if ping.daemon == "slurmctld" and not ping.up
    ]
    if len(hosts) < 2:
        yield ok(looked_at, f"there is one controller, {', '.join(hosts) or 'here'}")
        return
    if down:
        yield warning(
            looked_at, f"slurmctld on {', '.join(down)} is away", "systemctl status slurmctld"
        )
    here = socket.gethostname().partition(".")[0]
    others = [host for host in hosts if host.partition(".")[0] != here]
    reported = set(one.settings.controllers) | {
        name.partition(".")[0] for name in one.settings.controllers
    }
    unseen = [host for host in others if host not in reported]
    if kind:
        yield ok(looked_at, f"{len(hosts)} controllers share {spool} on {kind}, which is scanned")
    elif unseen:
        yield wrong(
            looked_at,
            f"{spool} is a local disk as seen from here: what slurmctld on "
            f"{', '.join(unseen)} takes while it is in charge is not archived",
            f"run 'steward controller' on {', '.join(unseen)}, and set here "
            f"[cluster.{one.name}] controllers = {unseen}",
        )
    else:
        yield ok(looked_at, f"{', '.join(others)} may report for {one.name}")
    gate = ground.settings.gate
    if ground.settings.bank.enabled and not gate.listen:
        yield warning(
            "[gate] listen",
            "a slurmctld on another host cannot ask this gate: its policy holds for every job",
            "see docs/bank-operate.md: [gate] listen here, and ask on the other host",
        )


def _memory(_ground: Ground, one: Asked) -> Iterator[Finding]:
    looked_at = "MinJobAge, MaxJobCount"
    age = int(found[1]) if (found := _SECONDS.match(one.shown.get("MinJobAge", ""))) else 0
    most = int(one.shown.get("MaxJobCount", "0") or 0)
    least = max(_SHORT_MEMORY_S, int(4 * one.settings.snapshot_interval_s))
    if age and age < least:
        told = "" if one.settings.jobcomp_lines else ", and nothing else tells of their ends"
        lost = wrong if age < 2 * one.settings.snapshot_interval_s and told else warning
        yield lost(
            looked_at,
            f"slurmctld forgets jobs {age} s after their end{told}: records of jobs that end "
            "while Steward is down are lost",
            "slurm.conf: MinJobAge=300",
        )
        return
    jobs = len(one.slurm.queue().rows)
    if most and jobs > _NEARLY_ALL * most:
        yield warning(
            looked_at,
            f"slurmctld holds {jobs} of at most {most} jobs: soon it takes no more",
            f"slurm.conf: MaxJobCount={2 * most}",
        )
    else:
        stay = f"for {age} s" if age else "for good"
        yield ok(
            looked_at,
            f"jobs stay {stay} after their end; it holds {several(jobs, 'job')} of {most}",
        )


def _cost(_ground: Ground, one: Asked) -> Iterator[Finding]:
    looked_at = "one squeue, as a look at the queue takes it"
    queue = one.slurm.queue()
    interval_s = one.settings.snapshot_interval_s
    apart_s = COST_FACTOR * queue.cost_s
    text = f"a look at {several(len(queue.rows), 'job')} takes {queue.cost_s:.2f} s"
    if apart_s > max(interval_s, _SHORT_MEMORY_S):
        yield warning(
            looked_at,
            f"{text}: looks are {apart_s:.0f} s apart, so as not to burden slurmctld",
            "look at what slurmctld is busy with: sdiag",
        )
    else:
        yield ok(looked_at, f"{text}, one is taken every {max(apart_s, interval_s):.1f} s")


def _clocks(_ground: Ground, one: Asked) -> Iterator[Finding]:
    looked_at = "slurmctld's clock, and when nodes say that their slurmd started"
    began = time.time()
    shown = one.slurm.clock().timestamp()
    ended = time.time()
    # Slurm cuts the fraction off.
    skew_s = max(began - (shown + 1.0), shown - ended, 0.0)
    if skew_s > _SKEW_S:
        grave = wrong if skew_s > _MUNGE_S else warning
        yield grave(
            looked_at,
            f"slurmctld's clock and this host's are {skew_s:.0f} s apart",
            "chronyc tracking",
            "systemctl restart chronyd",
        )
        return
    ahead = [
        node.name
        for node in Machine(one.name, one.settings).node_states().values()
        for at in (node.slurmd_started_at, node.boot_at)
        if at is not None and at.timestamp() > ended + _SKEW_S
    ]
    if ahead:
        names = sorted(set(ahead))
        yield warning(
            looked_at,
            f"the clock of {names[0]} is ahead: its slurmd started in the future"
            + (f" (and {len(names) - 1} more)" if len(names) > 1 else ""),
            f"ssh {names[0]} chronyc tracking",
        )
    else:
        yield ok(looked_at, "slurmctld's clock is this host's, and no node's is ahead")


hosts = each_cluster("SlurmctldHost, StateSaveLocation, scontrol ping", _hosts_of)
memory = each_cluster("MinJobAge, MaxJobCount", _memory)
cost = each_cluster("one squeue", _cost)
clocks = each_cluster("slurmctld's clock", _clocks)
