"""Queries of an idle daemon to slurmctld while nothing happens on its cluster."""

import re
import time

import msgspec
from sensor_cluster import MakeWatching, cluster, make

from steward.bank.settings import BankSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox

__all__ = ["cluster", "make"]

WINDOW_S = 40.0
RPC = re.compile(r"^\s*(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", re.MULTILINE)
MOST = {
    # One squeue every five seconds, and one more at either end.
    "REQUEST_JOB_INFO": 10,
    # One scontrol every five seconds; every second for six seconds after a checkpoint.
    "REQUEST_NODE_INFO": 20,
    # slurm.conf and partitions are queried by the minute, slurmctld pinged every 15 seconds.
    "REQUEST_BUILD_INFO": 10,
    "REQUEST_PING": 14,
    "REQUEST_RESERVATION_INFO": 4,
}


def test_an_idle_cluster_is_asked_seldom(cluster: Sandbox, make: MakeWatching) -> None:
    watching = make(interval_s=1.0, usage=False)
    watching.stop()
    box = msgspec.structs.replace(watching.settings.cluster["box"], snapshot_interval_s=5.0)
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
    assert counts["REQUEST_JOB_INFO"] >= 5, "an unasked job is found within the interval"
    assert counts["REQUEST_NODE_INFO"] >= 5, "a silent node is found within seconds"
    assert {name: counts.get(name, 0) for name in MOST if counts.get(name, 0) > MOST[name]} == {}
