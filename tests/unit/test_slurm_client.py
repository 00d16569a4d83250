"""Slurm client on stand-ins for Slurm's commands.

The fixtures contain the output of real commands; integration tests run those.
"""

import socket
from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.events import NOON
from harness.slurm import squeue_row
from steward.core.access import ClusterRoles
from steward.core.records import JobRecord
from steward.slurm import MAX_COMPLETED, Slurm, SlurmError, SlurmUnavailable, StoredScript
from steward.slurm.queue import QueueFormat
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import NameResolver

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
ENDED = JobRecord(job_id=5, submit=NOON, end=NOON.replace(hour=13))
DASHES = "-" * 80

CONFIG = """Configuration data as of 2026-11-21T11:36:16
AccountingStorageType   = {storage}
AuthInfo                = socket=/run/munge.sock,ttl=60
ClusterName             = demo
MinJobAge               = 300 sec
PriorityFlags           = 
PrivateData             = {private}
SlurmUser               = slurm(64030)
StateSaveLocation       = /var/spool/slurmctld

Cgroup Support Configuration:
StateSaveLocation       = /forged
ConstrainCores          = yes

Slurmctld(primary) at localhost is UP
"""  # noqa: W291 # as Slurm prints it


class Standins:
    """Directory of stand-ins, each of which prints what a test writes for its arguments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for program in ("squeue", "scontrol", "sacct", "sacctmgr"):
            path = root / program
            path.write_text(
                f'#!/bin/sh\necho "{program} $*" >> {root}/log\n'
                f'for name in {root}/{program}.*; do case "$*" in *"$(head -n1 $name)"*) '
                "tail -n +2 $name; exit 0;; esac; done\n"
                'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1\n'
            )
            path.chmod(0o755)
        self.slurm = Slurm("c1", ClusterSettings(slurm_bin=str(root)))
        self.configure()

    def answer(self, program: str, arguments: str, out: str | bytes) -> None:
        data = out.encode() if isinstance(out, str) else out
        count = len(list(self.root.glob(f"{program}.*")))
        (self.root / f"{program}.{count}").write_bytes(arguments.encode() + b"\n" + data)

    def configure(self, storage: str = "(null)", private: str = "none") -> None:
        for old in self.root.glob("scontrol.*"):
            old.unlink()
        self.answer("scontrol", "show config", CONFIG.format(storage=storage, private=private))

    def log(self) -> list[str]:
        return (self.root / "log").read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Standins:
    return Standins(tmp_path)


@pytest.fixture
def site_with_slurmdbd(site: Standins) -> Standins:
    site.configure("accounting_storage/slurmdbd", "jobs,usage")
    site.answer("squeue", "--version", "slurm-wlm 26.05.5\n")
    offer(site, "sacct", "26.05")
    return site


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("slurm-wlm 22.05.8\n", (22, 5, 8)),
        ("slurm 25.11.8-0pre1\n", (25, 11, 8)),
        ("slurm 24.11\n", (24, 11, 0)),
    ],
)
def test_versions(site: Standins, said: str, version: tuple[int, int, int]) -> None:
    site.answer("squeue", "--version", said)
    assert site.slurm.version() == version
    assert site.slurm.version() == version
    assert len(site.log()) == 1, "asked once"


def exchange(site: Standins, version: str) -> None:
    """Replace squeue by another one, as an upgrade does."""
    for old in site.root.glob("squeue.*"):
        old.unlink()
    site.answer("squeue", "--version", f"slurm-wlm {version}.5\n")
    fresh = site.root / "squeue-fresh"
    fresh.write_bytes((site.root / "squeue").read_bytes())
    fresh.chmod(0o755)
    fresh.rename(site.root / "squeue")


def test_commands_that_are_exchanged_are_noticed_at_once(site: Standins) -> None:
    site.answer("squeue", "--version", "slurm-wlm 22.05.8\n")
    assert site.slurm.version() == (22, 5, 8)
    exchange(site, "26.05")
    assert site.slurm.version() == (26, 5, 5)


def test_the_queue_is_asked_in_the_form_of_the_commands_that_are_there(
    site: Standins, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(site, monkeypatch, "22.05")
    rows = site.slurm.queue({}).rows
    exchange(site, "26.05")
    offer(site, "squeue", "26.05")
    site.answer("squeue", "-a -t all", (FIXTURES / "squeue-26.05.out").read_bytes())
    queue = site.slurm.queue(rows)
    # 26.05 alone shows SLUIDs, and all is read anew, whatever was there before.
    assert queue.records
    assert all(record.sluid for record in queue.records)
    assert queue.passed_over == 0


def test_a_version_that_is_none(site: Standins) -> None:
    site.answer("squeue", "--version", "hello\n")
    with pytest.raises(SlurmError, match="no version"):
        site.slurm.version()


def test_configuration(site: Standins) -> None:
    config = site.slurm.config()
    assert config["StateSaveLocation"] == "/var/spool/slurmctld"
    assert config["AuthInfo"] == "socket=/run/munge.sock,ttl=60"
    assert (config["PriorityFlags"], config["AccountingStorageType"]) == ("", "")
    assert config["MinJobAge"] == "300 sec"


@pytest.mark.parametrize(
    ("hosts", "is_here"),
    [
        ((socket.gethostname(),), True),
        (("elsewhere(10.0.0.1)", f"{socket.gethostname()}(10.0.0.2)"), True),
        (("localhost",), True),
        (("elsewhere",), False),
        ((), False),
    ],
)
def test_state_files_are_those_of_a_slurmctld_of_this_host(
    site: Standins, hosts: tuple[str, ...], is_here: bool
) -> None:
    for old in site.root.glob("scontrol.*"):
        old.unlink()
    lines = "".join(f"SlurmctldHost[{place}] = {host}\n" for place, host in enumerate(hosts))
    config = CONFIG.format(storage="(null)", private="none").replace(
        "SlurmUser", f"{lines}SlurmUser"
    )
    site.answer("scontrol", "show config", config)
    assert site.slurm.find_state_directory() == ("/var/spool/slurmctld" if is_here else "")


def test_configuration_that_is_none(site: Standins) -> None:
    for old in site.root.glob("scontrol.*"):
        old.unlink()
    site.answer("scontrol", "show config", "Slurmctld(primary) at localhost is DOWN\n")
    with pytest.raises(SlurmError, match="StateSaveLocation"):
        site.slurm.config()


def test_standing_without_slurmdbd(site: Standins) -> None:
    assert site.slurm.read_roles() == ClusterRoles()
    site.configure(private="Jobs,usage")
    assert site.slurm.read_roles().private_data == {"jobs", "usage"}
    assert not site.slurm.has_accounting()
    assert site.slurm.query_accounting(1) == []
    assert site.slurm.read_stored_script(ENDED) == StoredScript()


@pytest.mark.parametrize("storage", ["(null)", "accounting_storage/slurmdbd"])
def test_slurmctld_says_once_in_a_while_whether_there_is_a_slurmdbd(
    site: Standins, storage: str
) -> None:
    site.configure(storage)
    site.answer("sacctmgr", "show account", "root|\n")
    for _ in range(3):
        has_slurmdbd = site.slurm.has_accounting()
        assert (site.slurm.history() is not None) is has_slurmdbd
    assert has_slurmdbd is (storage != "(null)")
    assert site.log().count("scontrol show config") == 1
    site.configure("(null)")
    site.slurm.read_roles()
    assert site.slurm.history() is None, "whoever reads slurm.conf anew says so at once"


def test_standing_with_slurmdbd(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    site.answer(
        "sacctmgr", "show user", "root|Administrator\nada|None\nbela|Operator\nodd|x|Operator\n|\n"
    )
    site.answer("sacctmgr", "show account", "physics|ada,bela\nroot|\nchem|ada\n")
    standing = site.slurm.read_roles()
    assert standing.private_data == {"jobs", "usage"}
    assert standing.admins == {"root", "bela", "odd|x"}
    assert standing.administrators == {"root"}
    assert standing.coordinators == {
        "physics": frozenset({"ada", "bela"}),
        "chem": frozenset({"ada"}),
    }


def test_associations_of_slurmdbd(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    rows = "root||\nroot||root\nphysics|root|\nphysics||ada\nodd|x|y|z\n|\n"
    site.answer("sacctmgr", "show associations", rows)
    site.answer("sacctmgr", "show account", "physics|bela\n")
    found = site.slurm.associations()
    assert found is not None
    assert found.rows == (
        ("root", "", ""),
        ("root", "", "root"),
        ("physics", "root", ""),
        ("physics", "", "ada"),
    )
    assert found.coordinators == {"physics": frozenset({"bela"})}


def test_there_are_no_associations_without_slurmdbd(site: Standins) -> None:
    assert site.slurm.associations() is None


def test_an_unknown_job_is_no_error(site: Standins) -> None:
    site.answer("squeue", "--version", "slurm-wlm 22.05.8\n")
    assert site.slurm.job(99) == []


def test_a_job_that_squeue_shows_in_another_format_is_an_error(site: Standins) -> None:
    site.answer("squeue", "--version", "slurm-wlm 22.05.8\n")
    site.answer("squeue", "-j 1", "1 main ok ada\n")
    with pytest.raises(SlurmError, match="cannot parse a row of squeue"):
        site.slurm.job(1)


def offer(site: Standins, program: str, version: str) -> None:
    """Let a command show the fields that it offers in a version."""
    option = "--helpFormat" if program == "squeue" else "--helpformat"
    path = FIXTURES / f"{program}-fields-{version}.txt"
    if path.exists():
        site.answer(program, option, path.read_bytes())


@pytest.mark.parametrize(
    ("version", "of_squeue", "of_sacct"),
    [
        ("22.05", set(), set()),
        ("24.11", set(), {"sluid", "restarts"}),
        ("26.05", {"sluid", "exclusive"}, {"sluid", "restarts", "originalsluid"}),
    ],
)
def test_fields_are_asked_for_where_slurm_offers_them(
    site_with_slurmdbd: Standins, version: str, of_squeue: set[str], of_sacct: set[str]
) -> None:
    site = site_with_slurmdbd
    for old in site.root.glob("sacct.*"):
        old.unlink()
    for program in ("squeue", "sacct"):
        offer(site, program, version)
    asked = {"sluid", "restarts", "originalsluid", "exclusive"}
    assert site.slurm.list_fields("squeue") & asked == of_squeue
    assert site.slurm.list_fields("sacct") & asked - {"exclusive"} == of_sacct
    site.answer("sacct", "-j 5", "")
    for _ in range(2):
        site.slurm.query_accounting(5)
    questions = [line for line in site.log() if line.startswith("sacct") and "-j 5" in line]
    assert len(questions) == 2
    fields = questions[0].rpartition(" ")[2].lower().split(",")
    assert set(fields) & asked == of_sacct
    assert sum("--help" in line for line in site.log()) == 2, "asked once each"


def recorded(site: Standins, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let squeue print the recorded output of a version."""
    monkeypatch.setattr(
        "steward.slurm.client.QueueFormat",
        lambda fields, is_single_job=False: QueueFormat(fields, "abcdefghijkl"),
    )
    site.answer("squeue", "--version", f"slurm-wlm {version}.5\n")
    offer(site, "squeue", version)
    site.answer("squeue", "-a -t all", (FIXTURES / f"squeue-{version}.out").read_bytes())


def test_a_queue_and_its_changes(site: Standins, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(site, monkeypatch, "24.11")
    first = site.slurm.queue()
    assert len(first.records) == len(first.rows) == 11
    assert first.taken_at.tzinfo is UTC
    again = site.slurm.queue(first.rows)
    assert (again.records, again.rows) == ((), first.rows)
    assert len(site.slurm.queue().records) == 11


def test_texts_of_the_whole_queue_are_bounded() -> None:
    form = QueueFormat()
    assert "Dependency:512\x1f" in form.format_text
    row = squeue_row(form, Dependency="afterok:1", Comment="c" * 2_000_000, Name="a ")
    people = NameResolver()
    record = form.parse_record(row[:-1], people)
    assert (record.dependency, record.name) == ("afterok:1", "a ")
    assert len(record.comment) == 8192
    form = QueueFormat(is_single_job=True)
    row = squeue_row(form, Dependency="afterok:1" * 1000)
    assert form.parse_record(row[:-1], people).dependency == "afterok:1" * 1000


def test_whole_records_by_json_and_where_there_is_none_by_text(
    site: Standins, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(site, monkeypatch, "26.05")
    held = next(job for job in site.slurm.queue().records if job.name.startswith("caf"))
    show = f"show job {held.job_id}"
    site.answer("scontrol", f"-o {show}", (FIXTURES / "scontrol-files-26.05.txt").read_bytes())
    site.answer("scontrol", f"{show} --json", b"scontrol: unrecognized option '--json'\n")
    lines = {job.name: job.submit_line for job in site.slurm.job(held.job_id)}
    assert lines[held.name].startswith("sbatch --parsable -D /tmp -H -t UNLIMITED ")
    site.slurm.job(held.job_id)
    assert sum("--json" in line for line in site.log()) == 1, "not tried again"


def test_a_torn_array_is_not_asked_for_whole(
    site: Standins, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(site, monkeypatch, "24.11")
    monkeypatch.setattr("steward.slurm.client.MAX_COMPLETED", 3)
    assert MAX_COMPLETED > 3
    assert len(site.slurm.job(1)) == 11
    assert not any("show job" in line for line in site.log())


ROW = (
    "12|10_2|1001|1001|{state}|1:0|2026-03-01T12:00:00|2026-03-01T12:00:00|2026-03-01T12:00:05|"
    "2026-03-01T12:01:00|60|1|2|cpu=2,mem=1G,node=1|cpu=2,node=1|n1|7:0|00:01:05|90|2|0|s1|s0\n"
)


def test_a_job_that_slurmdbd_knows(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    site.answer("sacct", "-o JobIDRaw,JobID", ROW.format(state="CANCELLED by 1001"))
    site.answer("sacct", "-o JobName", "a|b\nc\n")
    site.answer("sacct", "-o SubmitLine", "sbatch x|y\n")
    for field in ("Account", "Partition", "QOS", "WorkDir"):
        site.answer("sacct", f"-o {field}", f"{field.lower()}\n")
    (job,) = site.slurm.query_accounting(12)
    assert (job.job_id, job.array_job_id, job.array_task, job.uid) == (12, 10, "2", 1001)
    assert (job.state, job.exit_code, job.time_limit_s) == ("CANCELLED", 1, 3600)
    assert (job.cancelled_by, job.derived_exit_code, job.suspended_s) == (1001, 7, 65)
    assert (job.priority, job.requested_cpus) == (90, 2)
    assert (job.name, job.submit_line, job.work_dir) == ("a|b\nc", "sbatch x|y", "workdir")
    assert (job.sluid, job.original_sluid) == ("s1", "s0")
    questions = [line for line in site.log() if line.startswith("sacct ") and "--help" not in line]
    assert all("-M demo" in line for line in questions)


def test_runs_of_one_id_come_without_text(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    rows = ROW.format(state="REQUEUED") + ROW.format(state="COMPLETED")
    site.answer("sacct", "-o JobIDRaw,JobID", rows)
    jobs = site.slurm.query_accounting(12)
    assert [(job.state, job.name) for job in jobs] == [("REQUEUED", ""), ("COMPLETED", "")]


def test_a_row_of_sacct_that_is_none(site_with_slurmdbd: Standins) -> None:
    site_with_slurmdbd.answer("sacct", "-o JobIDRaw,JobID", "12|10_2|oops\n")
    with pytest.raises(SlurmError, match="cannot parse a row of sacct"):
        site_with_slurmdbd.slurm.query_accounting(12)


def test_stored_scripts_are_taken_to_the_byte(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    site.answer("sacct", "--batch-script", b"#!/bin/sh\necho caf\xe9\n\n")
    site.answer("sacct", "--env-vars", "NONE\n")
    stored = site.slurm.read_stored_script(ENDED)
    assert stored == StoredScript(script=b"#!/bin/sh\necho caf\xe9\n\n", environment=None)
    # Without times sacct shows the last job that had this id.
    assert "-j 5 -S 2026-03-01T12:00:00 -E 2026-03-01T13:00:01 --env-vars" in site.log()[-1]


def test_a_heading_of_older_versions_is_no_part_of_a_script(site_with_slurmdbd: Standins) -> None:
    site = site_with_slurmdbd
    site.answer("sacct", "--batch-script", f"Batch Script for 5\n{DASHES}\n#!/bin/sh\n\n\n")
    heading = f"Environment used for 5 (must be batch to display)\n{DASHES}\n"
    site.answer("sacct", "--env-vars", f"{heading}NONE\n\n")
    assert site.slurm.read_stored_script(ENDED) == StoredScript(script=b"#!/bin/sh\n\n")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"job_id": 7, "array_job_id": 2, "array_task": "1"}, "2_1"),
        ({"job_id": 2, "array_job_id": 2, "array_task": "3-9"}, "2"),
        ({"job_id": 3, "het_job_id": 2, "het_offset": 1}, "2+1"),
    ],
)
def test_of_an_array_or_a_het_job_one_script_is_asked_for(
    site_with_slurmdbd: Standins, changes: dict[str, Any], name: str
) -> None:
    site = site_with_slurmdbd
    site.answer("sacct", "--batch-script", "#!/bin/sh\n# 1\n")
    site.answer("sacct", "--env-vars", "A=b\n")
    record = msgspec.structs.replace(ENDED, **changes)
    assert site.slurm.read_stored_script(record) == StoredScript(
        script=b"#!/bin/sh\n# 1\n", environment=b"A=b\n"
    )
    assert f"-j {name} -S" in site.log()[-1]


def test_slurmctld_being_away(tmp_path: Path) -> None:
    slurm = Slurm("c1", ClusterSettings(slurm_bin=str(tmp_path)))
    with pytest.raises(SlurmUnavailable):
        slurm.queue()
