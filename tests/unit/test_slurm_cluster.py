"""The cluster on stand-ins for Slurm's commands; integration tests query real ones."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.slurm import LINE, Scripted, Stage, record
from steward.slurm import NodeListError, Slurm, SlurmError, UnknownJob, UnknownNode
from steward.slurm.cluster import parse_config

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
VERSIONS = ["22.05", "24.11", "25.11", "26.05"]
CONFIG = """Configuration data as of 2026-11-21T11:36:16
AccountingStorageType   = {storage}
BOOT_TIME               = 2026-11-21T11:35:53
StateSaveLocation       = /var/spool/slurmctld
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_names_of_one_job_are_one_query(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Scripted()
    slurm.jobs[5] = record(5, array_job_id=5, array_task="2")
    monkeypatch.setattr(Slurm, "job", lambda _, job_id: slurm.job(job_id))
    stage.answer("scontrol -a -o show job 5", "JobId=5 Requeue=1\n")
    found = stage.machine.job_details(["5_1", "5_2", "5", "6_1", "6"])
    assert {name: len(details) for name, details in found.items()} == {
        "5_1": 0,
        "5_2": 1,
        "5": 1,
        "6_1": 0,
        "6": 0,
    }
    assert slurm.asked == [5, 6]
    assert stage.asked().count("scontrol -a -o show job 5") == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_configuration_of_four_versions(version: str) -> None:
    shown = parse_config((FIXTURES / f"scontrol-config-{version}.txt").read_bytes())
    assert shown["slurm_version"].startswith(version)
    assert shown["version"] == shown["slurm_version"]
    assert (shown["cluster_name"] != "not-ours", shown["min_job_age"] in (30, 300)) == (True, True)
    assert (shown["max_job_count"], shown["max_job_cnt"]) == (10000, 10000)
    assert (shown["slurm_user"], shown["slurm_user_name"]) == ("root(0)", "root")
    assert shown["slurm_user_id"] == 0
    assert shown["slurmctld_host"] in (["vm(127.0.0.1)"], ["localhost(127.0.0.1)"])
    assert shown["control_machine"] in ("vm", "localhost")
    assert shown["control_addr"] == "127.0.0.1"
    assert isinstance(shown["boot_time"], int)
    assert shown["kill_wait"] == 30
    assert shown["x11_parameters"] is None
    assert shown["vsize_factor"] == shown["v_size_factor"] == 0
    assert shown["plugindir"] == shown["plugin_dir"]
    assert not [name for name in shown if "pass" in name]


def test_nodes_and_their_names(stage: Stage) -> None:
    stage.nodes(*(LINE.format(name=f"n{number}") for number in range(1, 13)))
    assert len(stage.machine.nodes()) == 12
    assert stage.machine.node_names("n[10-12],n1 n2, n1") == ["n1", "n2", "n10", "n11", "n12"]
    assert stage.machine.node_names("all") == [f"n{number}" for number in range(1, 13)]
    with pytest.raises(UnknownNode) as unknown:
        stage.machine.nodes("n[1-2],n99,gpu7")
    assert unknown.value.nodes == ("gpu7", "n99")
    for wrong in ("", " , ", "n[1-", "@all", "n[1"):
        with pytest.raises(NodeListError):
            stage.machine.node_names(wrong)


def test_one_node_is_asked_singly(stage: Stage) -> None:
    stage.answer("scontrol -a -o show node n1", LINE.format(name="n1") + "\n")
    stage.answer("scontrol -a -o show node n2", "Node n2 not found\n", code=1)
    assert list(stage.machine.nodes("n1")) == ["n1"]
    with pytest.raises(UnknownNode):
        stage.machine.nodes("n2")
    with pytest.raises(SlurmError) as error:
        stage.machine.nodes("n3")
    assert not isinstance(error.value, UnknownNode)


def test_a_node_that_only_a_comment_speaks_of_is_none(stage: Stage) -> None:
    forged = LINE.format(name="n9")
    twice = LINE.format(name="n2").replace("State=DOWN+DRAIN+NOT_RESPONDING", "State=IDLE")
    stage.nodes(
        LINE.format(name="n1") + f" Comment=x\n{forged}\n{twice}",
        LINE.format(name="n2"),
        LINE.format(name="n3"),
    )
    stage.answer("scontrol -a -o show partition", "PartitionName=p State=UP Nodes=n[1-3]\n")
    stage.answer("scontrol -a -o show node n9", "Node n9 not found\n", code=1)
    stage.answer("scontrol -a -o show node n2", LINE.format(name="n2") + "\n")
    nodes = stage.machine.nodes()
    assert list(nodes) == ["n1", "n2", "n3"]
    assert nodes["n2"].state == "DOWN+DRAIN+NOT_RESPONDING"


def test_a_node_in_no_partition_behind_a_comment_is_one(stage: Stage) -> None:
    stage.nodes(LINE.format(name="n1") + " Comment=x", LINE.format(name="n2"))
    stage.answer("scontrol -a -o show partition", "PartitionName=p State=UP Nodes=n1\n")
    stage.answer("scontrol -a -o show node n2", LINE.format(name="n2") + "\n")
    assert list(stage.machine.nodes()) == ["n1", "n2"]


def test_nodes_that_are_hidden_while_they_are_off(stage: Stage) -> None:
    stage.answer("squeue --version", "slurm-wlm 22.05.8\n")
    future = LINE.format(name="f1").replace("State=DOWN+DRAIN+NOT_RESPONDING", "State=FUTURE")
    stage.answer("scontrol -a -F -o show node", "\n".join((LINE.format(name="n1"), future)) + "\n")
    stage.answer(
        "scontrol -a -o show partition",
        "PartitionName=a State=UP Nodes=n1,f1\nPartitionName=b State=UP Nodes=cloud[1-2]\n"
        "PartitionName=c State=UP Nodes=(null)\n",
    )
    states = {name: node.state for name, node in stage.machine.nodes().items()}
    off = "UNKNOWN+CLOUD+POWERED_DOWN"
    assert states == {"n1": "DOWN+DRAIN+NOT_RESPONDING", "cloud1": off, "cloud2": off}
    for name in ("cloud2", "n9"):
        stage.answer(f"scontrol -a -o show node {name}", f"Node {name} not found\n", code=1)
    assert stage.machine.nodes("cloud2")["cloud2"].state == off
    with pytest.raises(UnknownNode):
        stage.machine.nodes("n9")


def test_polls_read_the_nodes_of_partitions_with_the_partitions(stage: Stage) -> None:
    stage.answer("squeue --version", "slurm-wlm 22.05.8\n")
    stage.answer("scontrol -a -F -o show node", LINE.format(name="n1") + "\n")
    shown = "scontrol -a -o show partition"
    stage.answer(shown, "PartitionName=a State=UP Nodes=n1\n")
    stage.machine.partitions()
    assert list(stage.machine.node_states()) == ["n1"]
    assert list(stage.machine.node_states()) == ["n1"]
    assert stage.asked().count(shown) == 1
    stage.answer(shown, "PartitionName=a State=UP Nodes=n1,cloud1\n")
    stage.machine.partitions()
    assert list(stage.machine.node_states()) == ["n1", "cloud1"]
    assert stage.asked().count(shown) == 2


def test_a_doubtful_reason_is_asked_for_in_another_form(stage: Stage) -> None:
    stage.nodes(
        LINE.format(name="n1") + " Reason=a [x@2026-01-01T00:00:00] Comment=b "
        "[root@2026-11-22T06:18:05]",
        LINE.format(name="n2") + " Reason=fine [root@2026-11-22T06:18:05]",
    )
    stage.answer("scontrol -a -o show partition", "PartitionName=p State=UP Nodes=n[1-2]\n")
    (stage.root / "sinfo -a -h -n n1").write_text(
        'text="a [x@2026-01-01T00:00:00] Comment=b\nn2"\n'
        'echo "$SINFO_FORMAT" | sed "s/%N/n1/;s/%U/root(0)/;s/%H/2026-11-22T06:18:05/" '
        "| awk -v text=\"$text\" '{sub(/%E/, text); print}'\n"
    )
    nodes = stage.machine.nodes()
    n1 = nodes["n1"]
    assert n1.reason == "a [x@2026-01-01T00:00:00] Comment=b n2"
    assert (n1.reason_user, n1.reason_uid) == ("root", 0)
    assert n1.reason_at == datetime(2026, 11, 22, 6, 18, 5, tzinfo=UTC)
    assert n1.details["reason"] == n1.reason
    assert nodes["n2"].reason == "fine"


def test_when_slurmctld_started(stage: Stage) -> None:
    stage.answer("scontrol show config", CONFIG.format(storage="(null)"))
    assert stage.machine.read_start_time() == datetime(2026, 11, 21, 11, 35, 53, tzinfo=UTC)
    stage.answer("scontrol show config", "Configuration data as of never\n")
    with pytest.raises(SlurmError, match="BOOT_TIME"):
        stage.machine.read_start_time()


def test_which_daemons_answer(stage: Stage) -> None:
    stage.answer("scontrol show config", CONFIG.format(storage="accounting_storage/slurmdbd"))
    stage.answer(
        "scontrol ping",
        "Slurmctld(primary) at a is UP\nSlurmctld(backup) at b.site is DOWN\n",
    )
    stage.answer("sacctmgr -n -P show cluster format=Cluster", "c1\n")
    said = [(ping.daemon, ping.role, ping.host, ping.up) for ping in stage.machine.pings()]
    assert said == [
        ("slurmctld", "primary", "a", True),
        ("slurmctld", "backup", "b.site", False),
        ("slurmdbd", "primary", "", True),
    ]
    (stage.root / "sacctmgr -n -P show cluster format=Cluster").write_text(
        "echo 'sacctmgr: error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    stage.answer("scontrol ping", "Slurmctld(primary) at a is DOWN\n", code=1)
    assert [(ping.daemon, ping.up) for ping in stage.machine.pings()] == [
        ("slurmctld", False),
        ("slurmdbd", False),
    ]
    stage.answer("scontrol ping", "", code=1)
    with pytest.raises(SlurmError):
        stage.machine.pings()


def test_what_is_no_jobs_name(stage: Stage) -> None:
    for wrong in ("", "1.0", "-1", "1_", "1;2", "x", "12_[1-3]"):
        with pytest.raises(UnknownJob):
            stage.machine.job_details([wrong])
        with pytest.raises(UnknownJob):
            stage.machine.steps([wrong])
    assert stage.asked() == []
