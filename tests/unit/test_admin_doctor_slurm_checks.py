"""Health checks of Slurm: slurmctld, its clock and spool, and loaded plugins of Steward."""

import os
import tempfile
import time

import msgspec
import pytest

from harness.doctor import HERE, DoctorSite, only, site
from harness.events import NOON_NS, script_event
from harness.site import ROOT
from harness.slurm import LINE
from steward.admin.doctor import slurm_checks
from steward.admin.doctor.context import make_check_context
from steward.bank.settings import BankSettings, GateSettings
from steward.capture.settings import NodesSettings, SensorSettings
from steward.core.actions import Registry
from steward.core.journal import Journal
from steward.core.journal.store import encode_rows
from steward.slurm.settings import ClusterSettings

__all__ = ["site"]


# slurmctld, and its spool


def test_a_slurmctld_that_answers(site: DoctorSite) -> None:
    assert only(slurm_checks.check_slurmctld(site.ground())).status == "ok"
    site.shown |= {"SLURM_VERSION": "24.11.4"}
    found = only(slurm_checks.check_slurmctld(site.ground()))
    assert found.status == "warning"
    assert "slurmctld has version 24.11.4, but the commands here have 24.11.5" in found.finding


def test_a_slurmctld_that_is_away_is_told_once(site: DoctorSite) -> None:
    site.stage.answer("scontrol show config", "", 1)
    (site.directory / "slurm" / "scontrol show config").write_text(
        "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    site.stage.answer("scontrol ping", "Slurmctld(primary) at box is DOWN\n", 1)
    ground = make_check_context(site.settings, Registry, ROOT)
    found = only(slurm_checks.check_slurmctld(ground))
    assert found.status == "wrong"
    assert "slurmctld is not running" in found.finding
    for check in (
        slurm_checks.check_controllers,
        slurm_checks.check_clocks,
        slurm_checks.check_jobcomp_plugin,
        slurm_checks.check_usage_sources,
    ):
        found = only(check(ground))
        assert (found.status, found.object) == ("skipped", "c1")


def test_a_busy_slurmctld_and_one_that_hangs(site: DoctorSite) -> None:
    (site.directory / "slurm" / "scontrol show config").write_text("exec sleep 60\n")
    ground = make_check_context(site.settings, Registry, ROOT, timeout_s=1.0)
    found = only(slurm_checks.check_slurmctld(ground))
    assert found.status == "wrong"
    assert "slurmctld is busy" in found.finding
    assert "sdiag" in found.fix[0]
    (site.directory / "slurm" / "scontrol ping").write_text("exec sleep 60\n")
    hung = only(slurm_checks.check_slurmctld(ground, ping_timeout_s=0.5))
    assert "a ping within 0.5 s: it hangs, or its host is down" in hung.finding


def test_commands_that_are_not_there(site: DoctorSite) -> None:
    site.reopen(cluster={"c1": ClusterSettings(slurm_bin="/nowhere")})
    found = only(slurm_checks.check_slurmctld(make_check_context(site.settings, Registry, ROOT)))
    assert found.status == "wrong"
    assert "slurm_bin" in found.fix[0]


@pytest.mark.parametrize(
    ("skew_s", "status"),
    [(0.0, "ok"), (10.0, "warning"), (-10.0, "warning"), (200.0, "wrong"), (-200.0, "wrong")],
)
def test_clocks_that_disagree(site: DoctorSite, skew_s: float, status: str) -> None:
    found = only(slurm_checks.check_clocks(site.ground(skew_s)))
    assert found.status == status, found.finding


def test_a_node_whose_slurmd_started_in_the_future(site: DoctorSite) -> None:
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 900))
    site.stage.nodes(
        LINE.format(name="n1"),
        LINE.format(name="n2").replace("SlurmdStartTime=None", f"SlurmdStartTime={later}"),
    )
    found = only(slurm_checks.check_clocks(site.ground()))
    assert found.status == "warning"
    assert "the clock of node n2 is ahead" in found.finding


def test_two_controllers_of_which_one_is_not_seen(site: DoctorSite) -> None:
    assert only(slurm_checks.check_controllers(site.ground())).status == "ok"
    site.shown["SlurmctldHost[1]"] = "ctl2(10.0.0.2)"
    found = only(slurm_checks.check_controllers(site.ground()))
    assert found.status == "wrong"
    assert "ctl2" in found.finding
    assert "steward controller" in found.fix[0]
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], controllers=("ctl2.site.org",))
    site.reopen(cluster={"c1": cluster})
    assert only(slurm_checks.check_controllers(site.ground())).status == "ok"
    down = f"Slurmctld(primary) at {HERE} is UP\nSlurmctld(backup) at ctl2 is DOWN\n"
    site.stage.answer("scontrol ping", down)
    first, second = slurm_checks.check_controllers(site.ground())
    assert (first.status, second.status) == ("warning", "ok")
    assert "ctl2 is down" in first.finding


def test_a_slurmctld_that_forgets_too_soon(site: DoctorSite) -> None:
    for age, lines, status in (("5 sec", "", "wrong"), ("5 sec", "/x", "warning")):
        cluster = msgspec.structs.replace(site.settings.cluster["c1"], jobcomp_lines=lines)
        site.reopen(cluster={"c1": cluster})
        site.shown |= {"MinJobAge": age}
        found = only(slurm_checks.check_job_memory(site.ground()))
        assert (found.status, found.fix) == (status, ("slurm.conf: MinJobAge=300",))


def test_usage_that_nobody_can_know(site: DoctorSite) -> None:
    assert only(slurm_checks.check_usage_sources(site.ground())).status == "ok"
    site.shown |= {"JobAcctGatherType": "jobacct_gather/none", "ProctrackType": "proctrack/pgid"}
    assert (
        "neither Slurm nor Steward" in only(slurm_checks.check_usage_sources(site.ground())).finding
    )
    site.reopen(nodes=NodesSettings(listen="127.0.0.1:1"))
    site.shown |= {"TaskEpilog": "/etc/slurm/epilog"}
    found = list(slurm_checks.check_usage_sources(site.ground()))
    assert [one.status for one in found] == ["warning", "warning"]
    assert "proctrack/pgid" in found[0].finding
    assert "/etc/slurm/epilog" in found[1].finding
    site.shown |= {"TaskEpilog": "(null)", "ProctrackType": "proctrack/cgroup"}
    assert only(slurm_checks.check_usage_sources(site.ground())).status == "ok"


def test_a_task_epilog_matters_only_if_agents_tell_of_use(site: DoctorSite) -> None:
    site.shown |= {"TaskEpilog": "/etc/slurm/epilog"}
    assert only(slurm_checks.check_usage_sources(site.ground())).status == "ok"


def test_a_spool_that_is_not_there(site: DoctorSite) -> None:
    site.shown |= {"StateSaveLocation": f"{site.directory}/gone"}
    found = only(slurm_checks.check_spools(site.ground()))
    assert (found.status, found.object) == ("wrong", "c1")
    assert "StateSaveLocation" in found.fix[0]


def test_scripts_that_were_not_taken_are_counted(site: DoctorSite) -> None:
    site.state.mkdir()
    journal = Journal(site.settings.state_dir)
    script = site.directory / "spool" / "hash.7" / "job.17" / "script"
    for number in (17, 27):
        path = script.parents[1] / f"job.{number}" / "script"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"#!/bin/sh\n\0")
        os.utime(path, ns=(NOON_NS, NOON_NS))
    journal.append(encode_rows([script_event(17, mtime_ns=NOON_NS)]))
    found = only(slurm_checks.check_spools(site.ground()))
    assert (found.status, found.object) == ("wrong", "c1")
    assert found.finding == "1 script of 2 not captured, job 27 first"
    journal.append(encode_rows([script_event(27, mtime_ns=NOON_NS)]))
    found = only(slurm_checks.check_spools(site.ground()))
    assert found.finding == "2 scripts, all captured"
    journal.close()


def test_a_spool_that_others_may_not_look_into_is_skipped(site: DoctorSite) -> None:
    context = site.ground()
    operator = msgspec.structs.replace(context, uid=4000, steward_uid=os.geteuid())
    assert only(slurm_checks.check_spools(operator)).status == "skipped"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for others")
def test_root_looks_into_the_spool_of_stewards_user(site: DoctorSite) -> None:
    site.state.mkdir()
    Journal(site.settings.state_dir).close()
    with tempfile.TemporaryDirectory(dir="/tmp") as spool:
        os.chmod(spool, 0o755)
        site.shown |= {"StateSaveLocation": spool}
        context = msgspec.structs.replace(site.ground(), steward_uid=65534)
        found = only(slurm_checks.check_spools(context))
        assert (found.status, found.checked) == ("ok", spool)
        operator = msgspec.structs.replace(context, uid=4000)
        assert only(slurm_checks.check_spools(operator)).status == "skipped"


def test_a_slurmctld_that_forgets_no_job(site: DoctorSite) -> None:
    site.shown |= {"MinJobAge": "0 sec"}
    site.stage.answer("squeue -a -t all --local -h --noconvert", "")
    found = only(slurm_checks.check_job_memory(site.ground()))
    assert found.status == "ok"
    assert found.finding == "slurmctld keeps ended jobs forever; it has 0 jobs of 10000"


# Plugins that Slurm loads


def test_a_place_that_another_has_taken_is_named_with_what_is_lost(site: DoctorSite) -> None:
    site.shown |= {"JobCompType": "jobcomp/elasticsearch"}
    found = only(slurm_checks.check_jobcomp_plugin(site.ground()))
    assert found.status == "warning"
    assert (
        "is jobcomp/elasticsearch, so Steward misses former sizes of resized jobs" in found.finding
    )


def test_jobcomp_as_it_should_be_and_not(site: DoctorSite) -> None:
    lines = site.directory / "lines" / "jobcomp.jsonl"
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], jobcomp_lines=str(lines))
    site.reopen(cluster={"c1": cluster})
    found = only(slurm_checks.check_jobcomp_plugin(site.ground()))
    assert found.status == "wrong"
    assert "slurm.conf: JobCompType=jobcomp/lua" in found.fix

    site.shown |= {"JobCompType": "jobcomp/lua"}
    assert "No such file" in only(slurm_checks.check_jobcomp_plugin(site.ground())).finding
    script = site.directory / "slurm" / "jobcomp.lua"
    script.write_text(f'-- steward\nsteward_jobcomp_file = "{lines}"\n')
    lines.parent.mkdir(0o755)
    os.utime(script, (0, 0))
    found = only(slurm_checks.check_jobcomp_plugin(site.ground()))
    assert (found.status, f"{lines.parent} is readable by everybody" in found.finding) == (
        "wrong",
        True,
    )
    lines.parent.chmod(0o750)
    assert only(slurm_checks.check_jobcomp_plugin(site.ground())).status == "ok"

    script.write_text(f'-- steward\nsteward_jobcomp_file = "{lines}.other"\n')
    os.utime(script, (0, 0))
    found = only(slurm_checks.check_jobcomp_plugin(site.ground()))
    assert found.status == "wrong"
    assert found.fix == (f'[cluster.c1] jobcomp_lines = "{lines}.other"',)


def test_a_bank_that_nobody_asks_and_one_that_is_not_asked_last(site: DoctorSite) -> None:
    assert only(slurm_checks.check_submit_plugin(site.ground())).status == "skipped"
    site.reopen(bank=BankSettings(enabled=True), gate=GateSettings())
    site.shown |= {"JobSubmitPlugins": "site"}
    found = only(slurm_checks.check_submit_plugin(site.ground()))
    assert found.status == "warning"
    assert "slurm.conf: JobSubmitPlugins=site,lua" in found.fix
    site.shown |= {"JobSubmitPlugins": "lua,site"}
    told = [one.finding for one in slurm_checks.check_submit_plugin(site.ground())]
    assert "JobSubmitPlugins has site after lua, whose changes the gate does not price" in told


def test_a_cluster_that_the_gate_knows_by_another_name(site: DoctorSite) -> None:
    site.reopen(bank=BankSettings(enabled=True), gate=GateSettings())
    site.shown |= {"JobSubmitPlugins": "steward", "ClusterName": "tower"}
    told = [one.finding for one in slurm_checks.check_submit_plugin(site.ground())]
    assert "the gate knows the cluster as c1, but slurmctld asks as tower" in told


def test_triggers_that_only_slurm_user_may_set(site: DoctorSite) -> None:
    assert only(slurm_checks.check_sensor_triggers(site.ground())).status == "skipped"
    site.reopen(sensor=SensorSettings(enabled=True, helper=str(site.directory / "helper")))
    (site.directory / "state").mkdir()
    site.shown |= {"SlurmUser": f"nobody-here({os.geteuid() + 4321})"}
    ground = msgspec.structs.replace(site.ground(), steward_uid=os.geteuid() + 1)
    found = only(slurm_checks.check_sensor_triggers(ground))
    assert found.status == "wrong"
    assert "only SlurmUser nobody-here may set triggers" in found.finding


def test_a_node_that_is_here_and_has_no_plugin(site: DoctorSite) -> None:
    assert only(slurm_checks.check_spank_plugin(site.ground())).status == "skipped"
    site.reopen(nodes=NodesSettings(listen="127.0.0.1:1"))
    assert only(slurm_checks.check_spank_plugin(site.ground())).status == "skipped"  # no node
    site.stage.nodes(LINE.format(name="n1").replace("NodeHostName=h1", f"NodeHostName={HERE}"))
    found = only(slurm_checks.check_spank_plugin(site.ground()))
    install = f"steward plugins install --plugstack {site.directory}/slurm/plugstack.conf"
    assert (found.status, found.fix[-1]) == ("warning", install)
    conf = site.directory / "slurm" / "plugstack.conf.d" / "steward.conf"
    conf.parent.mkdir()
    conf.write_text("optional /nowhere/24.11.4/spank_steward.so\n")
    told = [one.finding for one in slurm_checks.check_spank_plugin(site.ground())]
    assert "no build for Slurm 24.11.5 in /nowhere" in told
