"""The doctor: what each check says of what is as it should be, and of what is not."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cli_site import fill_spool, steward
from machine_site import LINE, Stage

from steward.access import Access, Asker
from steward.actions import Action, Registry
from steward.bank.asking_upkeep import CheckAnswer, CheckRequest
from steward.config import (
    AccessSettings,
    ArchiveSettings,
    BankSettings,
    ClusterSettings,
    FilesSinkSettings,
    GateSettings,
    NodesSettings,
    Settings,
)
from steward.config_automation import SensorSettings
from steward.doctor import controllers, host, plugins, slurmconf, spool
from steward.doctor.actions import run
from steward.doctor.apart import run_apart
from steward.doctor.findings import Finding, ok, worst
from steward.doctor.ground import Ground, ground_of
from steward.doctor.room import DoctorRequest, DoctorRoom
from steward.errors import Refused, StewardError

LEDGER = DoctorRequest(only=("ledger",))
ROOT = Asker(uid=0, user="root", how="local")
HERE = os.uname().nodename.partition(".")[0]


class Site:
    """A configuration whose Slurm is played by stand-ins."""

    def __init__(self, root: Path) -> None:
        (root / "slurm").mkdir()
        (root / "spool").mkdir()
        self.root = root
        self.stage = Stage(root / "slurm")
        self.shown = {
            "BOOT_TIME": "2026-11-22T02:09:42",
            "ClusterName": "c1",
            "JobAcctGatherType": "jobacct_gather/cgroup",
            "JobCompType": "(null)",
            "JobSubmitPlugins": "(null)",
            "MaxJobCount": "10000",
            "MinJobAge": "300 sec",
            "PlugStackConfig": f"{root}/slurm/plugstack.conf",
            "ProctrackType": "proctrack/cgroup",
            "SLURM_CONF": f"{root}/slurm/slurm.conf",
            "SLURM_VERSION": "24.11.5",
            "SlurmctldHost[0]": f"{HERE}(127.0.0.1)",
            "SlurmUser": "root(0)",
            "StateSaveLocation": str(root / "spool"),
            "TaskEpilog": "(null)",
        }
        self.settings = Settings(
            state_dir=str(root / "state"),
            socket=str(root / "state" / "sock"),
            cluster={"c1": ClusterSettings(slurm_bin=str(root / "slurm"), command_timeout_s=10.0)},
            archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(root / "archive"))}),
        )
        self.stage.answer("scontrol ping", f"Slurmctld(primary) at {HERE} is UP\n")
        self.stage.nodes(LINE.format(name="n1"))

    def change(self, **of_slurm: str) -> None:
        self.shown |= of_slurm

    def set(self, **of_settings: object) -> None:
        self.settings = msgspec.structs.replace(self.settings, **of_settings)

    def ground(self, skew_s: float = 0.0) -> Ground:
        """What the checks look at; slurmctld's clock is so far from ours."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + skew_s))
        lines = [f"Configuration data as of {now}"]
        lines += [f"{name:<23} = {value}" for name, value in self.shown.items()]
        self.stage.answer("scontrol show config", "\n".join(lines) + "\n")
        return ground_of(self.settings, Registry, ROOT)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def only(found: Iterator[Finding]) -> Finding:
    (one,) = found
    return one


# Processes


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def hang() -> tuple[Finding, ...]:
    time.sleep(600)
    raise AssertionError


def crash() -> tuple[Finding, ...]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse() -> tuple[Finding, ...]:
    raise StewardError("the ledger is away")


def fail() -> tuple[Finding, ...]:
    raise ZeroDivisionError("by zero")


def test_a_check_that_hangs_crashes_or_fails_stops_no_other() -> None:
    fine = (ok("a", "one"), ok("b", "x" * 1_000_000))
    before = children()
    found = run_apart([hang, crash, lambda: fine, refuse, fail, lambda: ()], 3.0)
    assert found[2] == fine
    assert found[5] == ()
    words = ["took longer than 3 s", "ended without a word", "the ledger is away", "by zero"]
    for said, word in zip([found[0], found[1], found[3], found[4]], words, strict=True):
        (one,) = said
        assert one.status == "wrong"
        assert word in one.what
    assert children() == before


def test_the_worst_is_told_and_what_was_not_looked_at_is_no_fault() -> None:
    assert worst(()) == worst(("skipped",)) == worst(("ok", "skipped")) == "ok"
    assert worst(("ok", "warning", "skipped")) == "warning"
    assert worst(("warning", "wrong", "ok")) == "wrong"


# This machine


@pytest.mark.parametrize(
    ("mode", "status"),
    [(0o640, "ok"), (0o600, "ok"), (0o644, "warning"), (0o646, "wrong"), (0o622, "wrong")],
)
def test_who_may_change_the_configuration(tmp_path: Path, mode: int, status: str) -> None:
    path = tmp_path / "steward.toml"
    path.touch()
    path.chmod(mode)
    found = host.file_of_settings(str(path))
    assert found.status == status
    assert all("chmod" in line for line in found.mend)


def test_a_configuration_that_is_not_there_is_made_by_init(tmp_path: Path) -> None:
    assert host.file_of_settings(str(tmp_path / "none")).mend == ("steward init",)


def test_a_state_directory_is_nobody_elses(site: Site) -> None:
    assert only(host.state(site.ground())).status == "wrong"  # none yet
    state = site.root / "state"
    state.mkdir(mode=0o700)
    (state / "journal.db").touch()
    assert only(host.state(site.ground())).status == "ok"
    state.chmod(0o755)
    found = only(host.state(site.ground()))
    assert (found.status, found.mend) == ("wrong", (f"chmod 0700 {state}",))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_the_daemon_cannot_use_is_named(site: Site) -> None:
    state = site.root / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, 12345)
    (state / "gate.db-wal").touch()
    found = only(host.state(site.ground()))
    assert found.status == "wrong"
    assert "gate.db-wal" in found.what
    assert found.mend == (f"chown -R 12345: {state}",)


def statvfs(blocks: int, free: int, files: int = 1000, files_free: int = 1000) -> os.statvfs_result:
    """4-KiB blocks."""
    return os.statvfs_result(
        (4096, 4096, blocks, free, free, files, files_free, files_free, 0, 255)
    )


@pytest.mark.parametrize(
    ("status", "of"),
    [
        (statvfs(1_000_000, 500_000), "ok"),
        (statvfs(1_000_000, 50_000), "warning"),
        (statvfs(1_000_000, 1_000), "wrong"),
        # A hundredth of a petabyte is enough.
        (statvfs(250_000_000_000, 2_500_000_000), "ok"),
        (statvfs(1_000_000, 500_000, files_free=50), "warning"),
        (statvfs(1_000_000, 500_000, files_free=1), "wrong"),
        (statvfs(1_000_000, 500_000, files=0, files_free=0), "ok"),
    ],
)
def test_how_much_room_is_enough(status: os.statvfs_result, of: str) -> None:
    assert host.room("state", "/x", status).status == of


def test_a_password_that_everybody_may_read(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "steward.key"
    key.touch(mode=0o640)
    nodes = NodesSettings(listen="127.0.0.1:1", certificate_file=str(key), key_file=str(key))
    site.set(nodes=nodes)
    assert only(host.secrets(site.ground())).what == "1 file, closed to others"
    key.chmod(0o644)
    found = only(host.secrets(site.ground()))
    assert (found.status, found.mend) == ("wrong", (f"chmod o= {key}",))


def test_what_the_settings_name_and_is_not_there(site: Site) -> None:
    site.set(nodes=NodesSettings(listen="127.0.0.1:1", certificate_file="/nowhere/cert"))
    found = only(host.configuration(site.ground()))
    assert found.status == "warning"
    assert "/nowhere/cert" in found.what


# slurmctld


def test_a_slurmctld_that_answers(site: Site) -> None:
    assert only(controllers.answers(site.ground())).status == "ok"
    site.change(SLURM_VERSION="24.11.4")
    found = only(controllers.answers(site.ground()))
    assert found.status == "warning"
    assert "slurmctld is 24.11.4, the commands here are 24.11.5" in found.what


def test_a_slurmctld_that_is_away_is_told_once(site: Site) -> None:
    site.stage.answer("scontrol show config", "", 1)
    (site.root / "slurm" / "scontrol show config").write_text(
        "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    ground = ground_of(site.settings, Registry, ROOT)
    assert only(controllers.answers(ground)).status == "wrong"
    for check in (controllers.hosts, controllers.clocks, plugins.jobcomp, slurmconf.usage):
        found = only(check(ground))
        assert (found.status, found.of) == ("skipped", "c1")


def test_commands_that_are_not_there(site: Site) -> None:
    site.set(cluster={"c1": ClusterSettings(slurm_bin="/nowhere")})
    found = only(controllers.answers(ground_of(site.settings, Registry, ROOT)))
    assert found.status == "wrong"
    assert "slurm_bin" in found.mend[0]


@pytest.mark.parametrize(
    ("skew_s", "status"),
    [(0.0, "ok"), (10.0, "warning"), (-10.0, "warning"), (200.0, "wrong"), (-200.0, "wrong")],
)
def test_clocks_that_disagree(site: Site, skew_s: float, status: str) -> None:
    found = only(controllers.clocks(site.ground(skew_s)))
    assert found.status == status, found.what


def test_a_node_whose_slurmd_started_in_the_future(site: Site) -> None:
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 900))
    site.stage.nodes(
        LINE.format(name="n1"),
        LINE.format(name="n2").replace("SlurmdStartTime=None", f"SlurmdStartTime={later}"),
    )
    found = only(controllers.clocks(site.ground()))
    assert found.status == "warning"
    assert "the clock of n2 is ahead" in found.what


def test_two_controllers_of_which_one_is_not_seen(site: Site) -> None:
    assert only(controllers.hosts(site.ground())).status == "ok"
    site.shown["SlurmctldHost[1]"] = "ctl2(10.0.0.2)"
    found = only(controllers.hosts(site.ground()))
    assert found.status == "wrong"
    assert "ctl2" in found.what
    assert "steward controller" in found.mend[0]
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], controllers=("ctl2.site.org",))
    site.set(cluster={"c1": cluster})
    assert only(controllers.hosts(site.ground())).status == "ok"
    down = f"Slurmctld(primary) at {HERE} is UP\nSlurmctld(backup) at ctl2 is DOWN\n"
    site.stage.answer("scontrol ping", down)
    first, second = controllers.hosts(site.ground())
    assert (first.status, second.status) == ("warning", "ok")
    assert "ctl2 is away" in first.what


def test_a_slurmctld_that_forgets_too_soon(site: Site) -> None:
    for age, lines, status in (("5 sec", "", "wrong"), ("5 sec", "/x", "warning")):
        cluster = msgspec.structs.replace(site.settings.cluster["c1"], jobcomp_lines=lines)
        site.set(cluster={"c1": cluster})
        site.change(MinJobAge=age)
        found = only(controllers.memory(site.ground()))
        assert (found.status, found.mend) == (status, ("slurm.conf: MinJobAge=300",))


def test_usage_that_nobody_can_know(site: Site) -> None:
    assert only(slurmconf.usage(site.ground())).status == "ok"
    site.change(JobAcctGatherType="jobacct_gather/none", ProctrackType="proctrack/pgid")
    assert "neither Slurm nor Steward" in only(slurmconf.usage(site.ground())).what
    site.set(nodes=NodesSettings(listen="127.0.0.1:1"))
    site.change(TaskEpilog="/etc/slurm/epilog")
    found = list(slurmconf.usage(site.ground()))
    assert [one.status for one in found] == ["warning", "warning"]
    assert "proctrack/pgid" in found[0].what
    assert "/etc/slurm/epilog" in found[1].what


# What Slurm loads


def test_a_place_that_another_has_taken_is_named_with_what_is_lost(site: Site) -> None:
    site.change(JobCompType="jobcomp/elasticsearch")
    found = only(plugins.jobcomp(site.ground()))
    assert found.status == "warning"
    assert "taken by jobcomp/elasticsearch: lost are former sizes of resized jobs" in found.what


def test_jobcomp_as_it_should_be_and_not(site: Site) -> None:
    lines = site.root / "lines" / "jobcomp.jsonl"
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], jobcomp_lines=str(lines))
    site.set(cluster={"c1": cluster})
    found = only(plugins.jobcomp(site.ground()))
    assert found.status == "wrong"
    assert "slurm.conf: JobCompType=jobcomp/lua" in found.mend

    site.change(JobCompType="jobcomp/lua")
    assert "No such file" in only(plugins.jobcomp(site.ground())).what
    script = site.root / "slurm" / "jobcomp.lua"
    script.write_text(f'-- steward\nsteward_jobcomp_file = "{lines}"\n')
    lines.parent.mkdir()
    os.utime(script, (0, 0))
    assert only(plugins.jobcomp(site.ground())).status == "ok"

    script.write_text(f'-- steward\nsteward_jobcomp_file = "{lines}.other"\n')
    os.utime(script, (0, 0))
    found = only(plugins.jobcomp(site.ground()))
    assert found.status == "wrong"
    assert found.mend == (f'[cluster.c1] jobcomp_lines = "{lines}.other"',)


def test_a_bank_that_nobody_asks_and_one_that_is_not_asked_last(site: Site) -> None:
    assert only(plugins.submit(site.ground())).status == "skipped"
    site.set(bank=BankSettings(enabled=True), gate=GateSettings())
    site.change(JobSubmitPlugins="site")
    found = only(plugins.submit(site.ground()))
    assert found.status == "warning"
    assert "slurm.conf: JobSubmitPlugins=site,lua" in found.mend
    site.change(JobSubmitPlugins="lua,site")
    told = [one.what for one in plugins.submit(site.ground())]
    assert "JobSubmitPlugins has site behind lua: what they change is not priced" in told


def test_a_cluster_that_the_gate_knows_by_another_name(site: Site) -> None:
    site.set(bank=BankSettings(enabled=True), gate=GateSettings())
    site.change(JobSubmitPlugins="steward", ClusterName="tower")
    told = [one.what for one in plugins.submit(site.ground())]
    assert "the gate knows the cluster as c1: of tower it knows nothing" in told


def test_triggers_that_only_slurm_user_may_set(site: Site) -> None:
    assert only(plugins.triggers(site.ground())).status == "skipped"
    site.set(sensor=SensorSettings(enabled=True, helper=str(site.root / "helper")))
    (site.root / "state").mkdir()
    site.change(SlurmUser=f"nobody-here({os.geteuid() + 4321})")
    ground = msgspec.structs.replace(site.ground(), own_uid=os.geteuid() + 1)
    found = only(plugins.triggers(ground))
    assert found.status == "wrong"
    assert "only SlurmUser nobody-here may set triggers" in found.what


def test_a_node_that_is_here_and_has_no_plugin(site: Site) -> None:
    assert only(plugins.spank(site.ground())).status == "skipped"
    site.set(nodes=NodesSettings(listen="127.0.0.1:1"))
    assert only(plugins.spank(site.ground())).status == "skipped"  # no node
    site.stage.nodes(LINE.format(name="n1").replace("NodeHostName=h1", f"NodeHostName={HERE}"))
    found = only(plugins.spank(site.ground()))
    assert (found.status, found.mend[-1]) == ("warning", "steward plugins install")
    conf = site.root / "slurm" / "plugstack.conf.d" / "steward.conf"
    conf.parent.mkdir()
    conf.write_text("optional /nowhere/24.11.4/spank_steward.so\n")
    told = [one.what for one in plugins.spank(site.ground())]
    assert "there is no build for Slurm 24.11.5 in /nowhere: run steward plugins build" in told


# The spool, and the command


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """An archive that was filled once, with its configuration."""
    fill_spool(tmp_path / "spool")
    words = ("--once", "--no-slurm", "--spool", str(tmp_path / "spool"), "--cluster", "c1")
    done = steward("archive", "watch", *words, "--archive", str(tmp_path / "archive"))
    assert done.returncode == 0, done.stderr
    return tmp_path


def doctor(site: Path, *words: str) -> tuple[int, list[dict[str, object]]]:
    config = str(site / "archive/.steward/steward.toml")
    done = steward("doctor", "--json", "--config", config, *words)
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_script_that_was_not_taken_is_named(watched: Path) -> None:
    code, findings = doctor(watched, "--only", "spool")
    assert code == 0
    assert findings[0]["what"] == "4 scripts there for a while, all of them taken"
    path = watched / "spool/hash.5/job.205/script"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"#!/bin/sh\n\0")
    assert doctor(watched, "--only", "spool")[0] == 0  # it came just now
    os.utime(path, (time.time() - 600,) * 2)
    code, findings = doctor(watched, "--only", "spool")
    assert code == 1
    assert findings[0]["what"] == "1 script of 5 not taken, job 205 first"


def test_everything_is_looked_at_where_nothing_runs(watched: Path) -> None:
    code, findings = doctor(watched)
    assert code == 1
    by_check = {str(one["check"]): one for one in findings}
    assert by_check["file"]["status"] == "ok"
    assert by_check["daemon"]["status"] == "wrong"
    assert by_check["spool"]["status"] == "ok"
    assert by_check["journal"]["status"] == "ok"
    assert by_check["slurm"]["status"] == "skipped"
    assert all(one["mend"] for one in findings if one["status"] == "wrong")
    assert not [one for one in findings if "the check failed" in str(one["what"])]


def test_people_are_told_what_mends_it(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "daemon,library")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1
    assert lines[0].split() == ["Check", "Of", "Status", "What"]
    assert any(line.startswith("library") and " ok " in line for line in lines)
    assert "    systemctl start steward" in lines
    assert lines[-1] == "1 wrong, 0 warnings, 1 as they should be."


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text("[cluster.c1]\nspol = '/x'\n")
    done = steward("doctor", "--json", "--config", str(path))
    (finding,) = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    assert (finding["check"], finding["status"]) == ("file", "wrong")
    assert "did you mean 'spool'?" in finding["what"]


def test_checks_that_there_are_not(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "spol")
    assert done.returncode == 2
    assert b"there is no check 'spol': there are settings, secrets, library" in done.stderr
    listed = json.loads(steward("doctor", "--list", "--json").stdout)
    assert {"name": "library", "help": "SQLite is one that loses nothing"} in listed


def test_only_operators_are_told(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path), cluster={"c1": ClusterSettings(slurm=False, spool="/x")}
    )
    access = Access(AccessSettings(operators=("op",)), 0, lambda _: None)
    room = DoctorRoom(settings, access=access, fresh=Registry)
    request = DoctorRequest(only=("library",))
    with pytest.raises(Refused):
        run(room, Asker(uid=1000, user="ada"), request)
    answer = run(room, Asker(uid=1001, user="op"), request)
    assert [(one.check, one.status) for one in answer.findings] == [("library", "ok")]
    assert answer.status == "ok"


def test_what_has_a_database_open_is_used_by_no_check(tmp_path: Path) -> None:
    opened: list[int] = []

    def check(context: list[int], _asker: Asker, _request: CheckRequest) -> CheckAnswer:
        return CheckAnswer(findings=(), accounts=len(context), position=0)

    def room() -> list[int]:
        opened.append(os.getpid())
        return list(opened)

    def fresh() -> Registry:
        action = Action(
            name="bank.check", help="", request=CheckRequest, answer=CheckAnswer, run=check
        )
        return Registry((action,), {"bank": room})

    used = fresh()
    used.call("bank.check", ROOT, CheckRequest())
    settings = Settings(state_dir=str(tmp_path), bank=BankSettings(enabled=True))
    access = Access(AccessSettings(), 0, lambda _: None)
    for _ in range(2):
        answer = run(DoctorRoom(settings, access=access, fresh=fresh), ROOT, LEDGER)
        # The check's own process opened its room, behind the one that is open here.
        assert answer.findings[0].what == "the books of 2 accounts add up"
    assert opened == [os.getpid()]


def test_a_spool_that_is_not_there(site: Site) -> None:
    site.change(StateSaveLocation=f"{site.root}/gone")
    found = only(spool.spool(site.ground()))
    assert (found.status, found.of) == ("wrong", "c1")
    assert "StateSaveLocation" in found.mend[0]


def test_a_slurmctld_that_forgets_no_job(site: Site) -> None:
    site.change(MinJobAge="0 sec")
    site.stage.answer("squeue -a -t all --local -h --noconvert", "")
    found = only(controllers.memory(site.ground()))
    assert found.status == "ok"
    assert found.what == "jobs stay for good after their end; it holds 0 jobs of 10000"
