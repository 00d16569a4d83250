"""Queries of an idle daemon to slurmctld while nothing happens on its cluster."""

import re
import time

import msgspec
from job_submission import wait_until
from sensor_cluster import MakeWatching, cluster, make

from steward.bank.settings import BankSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import JOB_SEEN
from steward.sandbox import Sandbox

__all__ = ["cluster", "make"]

WINDOW_S = 40.0
INTERVAL_S = 5.0
IDLE_INTERVAL_S = 30.0
"""Interval of polls while slurmctld's state files do not change."""
RPC = re.compile(r"^\s*(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", re.MULTILINE)
MOST = {
    # One squeue every 30 seconds; every five for six seconds after a checkpoint.
    "REQUEST_JOB_INFO": 5,
    # One in each squeue and each scontrol for nodes, and a few by the minute.
    "REQUEST_PARTITION_INFO": 30,
    # One scontrol every five seconds; every second for six seconds after a checkpoint.
    "REQUEST_NODE_INFO": 20,
    # slurm.conf and partitions are queried by the minute; slurm.conf every two seconds for six
    # seconds after a checkpoint. Each such query pings slurmctld, too.
    "REQUEST_BUILD_INFO": 8,
    "REQUEST_PING": 10,
    "REQUEST_RESERVATION_INFO": 4,
}


def test_an_idle_cluster_is_asked_seldom(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=1.0, usage=False)
    watching.stop()
    box = msgspec.structs.replace(watching.settings.cluster["box"], snapshot_interval_s=INTERVAL_S)
    settings = msgspec.structs.replace(
        watching.settings, cluster={"box": box}, bank=BankSettings(enabled=True)
    )
    watching.config.write_text(render_config(LoadedConfig(settings)))
    watching.start()
    # The bank queries the cluster again and again for a minute after its start.
    time.sleep(70)
    cluster.run(["sdiag", "--reset"], user="root")
    time.sleep(WINDOW_S)
    told = cluster.run(["sdiag"], user="root").stdout
    counts = {name: int(count) for name, count in RPC.findall(told)}
    assert counts["REQUEST_NODE_INFO"] >= 5, "a silent node is found within seconds"
    assert {name: counts.get(name, 0) for name in MOST if counts.get(name, 0) > MOST[name]} == {}
    # A job without a script: only a poll of the queue shows it.
    with cluster.popen(["srun", "-n1", "sleep", "60"], user=next(iter(cluster.users))) as job:
        wait_until(lambda: bool(watching.events(JOB_SEEN)), INTERVAL_S * 4)
        job.kill()
    (first, *_) = watching.events(JOB_SEEN)
    late_s = (first.seen_at - first.body.record.submit).total_seconds()
    # The interval itself is tested on a clock of its own: a busy machine is late by seconds.
    assert late_s < IDLE_INTERVAL_S, "the new job ends the rest"
