import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.slurm import squeue_row
from steward.core.records import JobRecord
from steward.slurm.queue import QueueFormat, parse_queue
from steward.slurm.users import NameResolver

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
WORD = "abcdefghijkl"  # the secret word of the recorded outputs
OFFERED = {"22.05": (), "24.11": (), "26.05": ("sluid", "exclusive")}
"""Optional fields of squeue that the recorded version offers."""

version = pytest.mark.parametrize("version", OFFERED)

no_nul = st.binary(max_size=200).map(lambda raw: raw.replace(b"\0", b""))


def recorded(version: str) -> dict[str, JobRecord]:
    """Return the jobs of the recorded output, by name (of array tasks: name and index)."""
    out = (FIXTURES / f"squeue-{version}.out").read_bytes()
    records, rows, strange = parse_queue(
        QueueFormat(OFFERED[version], WORD), out, NameResolver(), {}
    )
    assert strange == 0
    assert set(rows) == {record.job_id for record in records}
    named = {}
    for record in records:
        suffix = record.array_task or (str(record.het_offset) if record.het_job_id else "")
        named[record.name + suffix] = record
    return named


@version
def test_a_finished_job(version: str) -> None:
    job = recorded(version)["ok"]
    assert (job.uid, job.gid, job.state, job.batch) == (0, 0, "COMPLETED", True)
    assert (job.user, job.group) == ("root", "root")
    assert (job.exit_code, job.exit_signal) == (0, 0)
    assert (job.nodes, job.cpus, job.tasks, job.nodelist) == (1, 1, 1, "n1")
    assert (job.partition, job.work_dir, job.submit_host) == ("main", "/tmp", "localhost")
    assert (job.account, job.qos, job.reason, job.comment, job.command) == ("", "", "", "", "")
    assert job.time_limit_s == 3600
    assert job.tres_allocated == "cpu=1,node=1,billing=1"
    assert job.submit
    assert job.start
    assert job.end
    assert job.submit.tzinfo is UTC
    assert job.submit <= job.start <= job.end
    assert (job.array_job_id, job.array_task, job.het_job_id) == (0, "", 0)


@version
def test_exit_codes_and_signals(version: str) -> None:
    jobs = recorded(version)
    assert (jobs["three"].exit_code, jobs["three"].exit_signal) == (3, 0)
    assert (jobs["killed"].exit_code, jobs["killed"].exit_signal) == (0, 9)
    assert jobs["three"].reason == "NonZeroExitCode"


@version
def test_an_array(version: str) -> None:
    jobs = recorded(version)
    left, first = jobs["array3-9%2"], jobs["array1"]
    assert left.job_id == left.array_job_id == first.array_job_id != first.job_id
    assert left.state == "PENDING"
    assert (left.start, left.end, left.eligible, left.exit_code) == (None, None, None, None)
    assert left.tres_requested == "cpu=1,mem=100M,node=1,billing=1"
    assert left.tres_allocated == ""
    assert first.array_task == "1"
    assert first.state == "RUNNING"
    assert first.end is None, "the end of a running job is a guess"


@version
def test_a_heterogeneous_job(version: str) -> None:
    jobs = recorded(version)
    leader, other = jobs["het0"], jobs["het1"]
    assert leader.job_id == leader.het_job_id == other.het_job_id == other.job_id - 1
    assert (leader.het_offset, other.het_offset, other.tasks) == (0, 1, 2)


@version
def test_text_with_newlines_and_separators_stays_in_its_field(version: str) -> None:
    job = recorded(version)["evil\nJobId=1 UserId=root(0)\x1f\x1e"]
    assert job.uid == 65534
    assert job.comment == "c o=m\nJobId=1 JobName=x UserId=root(0) GroupId=root(0)"
    assert job.job_id > 1
    held = recorded(version)["caf\\xe9 \\xff"]
    assert held.stdout == "/tmp/o u\nt"
    assert held.time_limit_s is None


@version
def test_a_dependency_and_limits_in_days(version: str) -> None:
    job = recorded(version)["dependent"]
    assert job.dependency.startswith("afterok:")
    assert (job.state, job.reason, job.time_limit_s) == ("PENDING", "Dependency", 216_000)
    assert job.stderr == "/tmp/e %j"


def test_sluids_are_shown_by_26_05_only() -> None:
    for version in OFFERED:
        jobs = recorded(version).values()
        assert all(job.sluid == job.original_sluid for job in jobs)
        assert all(bool(job.sluid) == ("sluid" in OFFERED[version]) for job in jobs)


def test_a_later_run_does_not_tell_the_lasting_sluid() -> None:
    form = QueueFormat({"sluid"})
    out = squeue_row(form, SLUID="s7HNM7ZA3CGB00", RestartCnt="2")
    (record,), _, _ = parse_queue(form, out, NameResolver(), {})
    assert (record.sluid, record.original_sluid, record.restarts) == ("s7HNM7ZA3CGB00", "", 2)


def test_every_look_has_a_secret_of_its_own() -> None:
    assert QueueFormat().format_text != QueueFormat().format_text


def test_rows_that_did_not_change_are_not_parsed_again() -> None:
    form = QueueFormat()
    one, two = squeue_row(form, JobID="1"), squeue_row(form, JobID="2", State="PENDING")
    first, rows, _ = parse_queue(form, one + two, NameResolver(), {})
    assert [record.job_id for record in first] == [1, 2]
    started = squeue_row(form, JobID="2", State="RUNNING")
    again, rows, _ = parse_queue(form, one + started, NameResolver(), rows)
    assert [(record.job_id, record.state) for record in again] == [(2, "RUNNING")]
    assert set(rows) == {1, 2}


def test_texts_of_users_do_not_stay_in_memory_for_ever() -> None:
    form = QueueFormat()
    names = ("Account", "AllocNodes", "Feature", "Reason", "WorkDir")
    row = squeue_row(form, **{name: f"text of {name}" for name in names})
    (record,), _, _ = parse_queue(form, row, NameResolver(), {})
    fields = ("account", "submit_host", "constraints", "reason", "work_dir")
    for name, text in zip(names, (getattr(record, field) for field in fields), strict=True):
        assert text == f"text of {name}"
        assert sys.intern(f"text of {name}") is not text


def test_records_share_short_texts() -> None:
    form = QueueFormat()
    out = b"".join(squeue_row(form, JobID=str(n), Account="physics-1") for n in (1, 2))
    (first, second), _, _ = parse_queue(form, out, NameResolver(), {})
    assert first.account is second.account


@given(no_nul, no_nul, no_nul, no_nul)
def test_no_text_of_one_job_can_become_anything_of_another(
    name: bytes, comment: bytes, account: bytes, work_dir: bytes
) -> None:
    form = QueueFormat()
    hostile = squeue_row(
        form,
        JobID="7",
        UserID="1001",
        Name=name,
        Comment=comment,
        Account=account,
        WorkDir=work_dir,
    )
    out = squeue_row(form, JobID="6", UserID="1000") + hostile + squeue_row(form, JobID="8")
    records, rows, strange = parse_queue(form, out, NameResolver(), {})
    assert strange == 0
    assert [(record.job_id, record.uid) for record in records] == [(6, 1000), (7, 1001), (8, 0)]
    assert list(rows) == [6, 7, 8]
    msgspec.json.encode(records)


@given(no_nul, no_nul)
def test_who_knows_the_format_but_not_the_secret_forges_nothing(
    before: bytes, after: bytes
) -> None:
    form = QueueFormat()
    guessed = QueueFormat()
    forged = before + squeue_row(guessed, JobID="1", UserID="0") + after
    out = squeue_row(form, JobID="7", UserID="1001", Name=forged)
    records, _, strange = parse_queue(form, out, NameResolver(), {})
    assert (strange, [(record.job_id, record.uid) for record in records]) == (0, [(7, 1001)])


@given(st.binary(max_size=400))
def test_output_that_is_none_of_ours_is_counted_and_never_raises(out: bytes) -> None:
    form = QueueFormat()
    records, rows, strange = parse_queue(form, out, NameResolver(), {})
    assert (records, rows) == ((), {})
    assert strange == (1 if out else 0)


def test_a_row_that_is_cut_short_is_not_a_job() -> None:
    form = QueueFormat()
    out = squeue_row(form, JobID="1") + squeue_row(form, JobID="2")[:-40]
    records, rows, strange = parse_queue(form, out, NameResolver(), {})
    assert ([record.job_id for record in records], list(rows), strange) == ([1], [1], 1)


def test_times_of_the_scheduler_are_no_facts() -> None:
    form = QueueFormat()
    waiting = squeue_row(form, JobID="1", State="PENDING")
    running = squeue_row(form, JobID="2", State="RUNNING")
    over = squeue_row(form, JobID="3", State="TIMEOUT")
    records, _, _ = parse_queue(form, waiting + running + over, NameResolver(), {})
    start, end = (
        datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC),
        datetime(2026, 3, 1, 13, 0, 5, tzinfo=UTC),
    )
    assert [(job.start, job.end) for job in records] == [(None, None), (start, None), (start, end)]


@version
def test_of_one_job_there_is_more(version: str) -> None:
    form = QueueFormat(OFFERED[version], is_single_job=True)
    over = {"State": "FAILED", "DerivedEC": "7:0", "TimeUsed": "59:00", "PriorityLong": "12"}
    names = {"BatchHost": "n1", "Origin": "NA", "SiblingsActive": "c1,c2", "Container": "/b"}
    row = squeue_row(form, **over, **names, WCKey="k", Feature="gpu&big", system_comment="s\n")
    (job,), _, strange = parse_queue(form, row, NameResolver(), {})
    assert strange == 0
    assert (job.derived_exit_code, job.suspended_s, job.priority) == (7, 60, 12)
    assert (job.batch_host, job.federation_origin, job.federation_siblings) == ("n1", "", "c1,c2")
    assert (job.wckey, job.constraints, job.licenses) == ("k", "gpu&big", "")
    assert (job.container, job.system_comment) == ("/b", "s\n")
    row = squeue_row(form, State="RUNNING", TimeUsed="1:00", DerivedEC="7:0")
    (job,), _, _ = parse_queue(form, row, NameResolver(), {})
    assert (job.suspended_s, job.derived_exit_code, job.end) == (None, None, None)


@pytest.mark.parametrize(
    ("version", "oversubscribe", "exclusive", "said"),
    [
        ("24.11", "NO", "", "NO"),
        ("24.11", "OK", "", "OK"),
        ("26.05", "NO", "NO", "OK"),
        ("26.05", "NO", "NODE", "NO"),
        ("26.05", "NO", "USER", "USER"),
        ("26.05", "YES", "NO", "YES"),
    ],
)
def test_who_has_nodes_to_itself(
    version: str, oversubscribe: str, exclusive: str, said: str
) -> None:
    form = QueueFormat(OFFERED[version])
    row = squeue_row(form, OverSubscribe=oversubscribe, Exclusive=exclusive)
    ((record,), _, strange) = parse_queue(form, row, NameResolver(), {})
    assert strange == 0
    assert record.oversubscribe == said


def test_what_a_job_asks_for_per_job_node_socket_and_task() -> None:
    form = QueueFormat()
    asked = {"tres-per-job": "gres/gpu:2", "tres-per-node": "gres:gpu:1", "tres-per-task": "N/A"}
    more = {"tres-per-socket": "(null)", "cpus-per-tres": "gres:gpu:4", "mem-per-tres": "gpu:9"}
    ((record,), _, strange) = parse_queue(
        form, squeue_row(form, **asked, **more), NameResolver(), {}
    )
    assert strange == 0
    assert (record.tres_per_job, record.tres_per_node) == ("gres/gpu:2", "gres:gpu:1")
    assert (record.tres_per_socket, record.tres_per_task) == ("", "")
    assert (record.cpus_per_tres, record.mem_per_tres) == ("gres:gpu:4", "gpu:9")
    for name in ("tres-per-job", "mem-per-tres"):
        # A user may have written it: nothing in it makes another field.
        row = squeue_row(form, **{name: b"gpu\x1f0\n7\x1f"})
        ((record,), _, strange) = parse_queue(form, row, NameResolver(), {})
        assert (record.job_id, strange) == (1, 0)
