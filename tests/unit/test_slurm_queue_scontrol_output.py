from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON
from steward.core.records import JobRecord
from steward.slurm.errors import SlurmError
from steward.slurm.queue import QueueFormat, complete_from_json, complete_from_text, parse_queue
from steward.slurm.users import NameResolver

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
OFFERED = {"22.05": (), "24.11": (), "26.05": ("sluid", "exclusive")}
EXTRAS = (
    *("submit_line", "tres_requested", "stdin", "stdout", "stderr", "extra", "failed_node"),
    *("requested_cpus", "requested_nodes", "suspended_at", "suspended_s", "resized_at"),
)


def squeued(version: str, name: str) -> JobRecord:
    out = (FIXTURES / f"squeue-{version}.out").read_bytes()
    records, _, _ = parse_queue(
        QueueFormat(OFFERED[version], "abcdefghijkl"), out, NameResolver(), {}
    )
    return next(record for record in records if record.name.startswith(name))


def facts(record: JobRecord) -> dict[str, object]:
    """Return the fields that scontrol's additions must not change."""
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in EXTRAS}


@pytest.mark.parametrize("version", OFFERED)
def test_text_adds_files_with_their_patterns_filled_in(version: str) -> None:
    record = squeued(version, "caf")
    out = (FIXTURES / f"scontrol-files-{version}.txt").read_bytes()
    (told,) = complete_from_text([record], out)
    assert facts(told) == facts(record)
    assert (told.stdout, told.stdin) == ("/tmp/o u\nt", "/dev/null")
    assert told.tres_requested == "cpu=1,mem=100M,node=1,billing=1"


@pytest.mark.parametrize("version", ["24.11", "26.05"])
def test_json_adds_the_same(version: str) -> None:
    record = squeued(version, "caf")
    out = (FIXTURES / f"scontrol-files-{version}.json").read_bytes()
    (told,) = complete_from_json([record], out)
    assert facts(told) == facts(record)
    assert (told.stdout, told.stdin) == ("/tmp/o u\nt", "/dev/null")
    assert told.tres_requested == "cpu=1,mem=100M,node=1,billing=1"


@pytest.mark.parametrize("form", ["txt", "json"])
def test_the_submit_line_of_26_05(form: str) -> None:
    record = squeued("26.05", "evil")
    out = (FIXTURES / f"scontrol-evil-26.05.{form}").read_bytes()
    complete = complete_from_text if form == "txt" else complete_from_json
    (told,) = complete([record], out)
    assert told.submit_line.startswith("sbatch --parsable -D /tmp --uid 65534 -J evil\nJobId=1 ")
    assert told.submit_line.endswith("-o /dev/null --wrap sleep 100")
    assert told.uid == 65534
    assert facts(told) == facts(record)


@pytest.mark.parametrize("version", OFFERED)
def test_hostile_names_change_nothing(version: str) -> None:
    record = squeued(version, "evil")
    out = (FIXTURES / f"scontrol-evil-{version}.txt").read_bytes()
    (told,) = complete_from_text([record], out)
    assert facts(told) == facts(record)
    assert told.stdout == "/dev/null"


def test_json_of_another_user_or_job_is_not_taken() -> None:
    record = squeued("26.05", "evil")
    out = (FIXTURES / "scontrol-evil-26.05.json").read_bytes()
    other = JobRecord(job_id=record.job_id, uid=1)
    assert complete_from_json([other], out) == [other]
    gone = JobRecord(job_id=1, uid=65534)
    assert complete_from_json([gone], out) == [gone]


SUSPENDED = (
    "JobId=3 JobName=x UserId=a(1) Account={account} Reason=None Requeue=1 "
    "AccrueTime=Unknown {resized}StartTime=x EndTime=y SuspendTime={at} "
    "SecsPreSuspend={before} LastSchedEval=N/A Partition=main "
    "Command=(null) WorkDir=/w StdErr=/e StdIn=/i StdOut=/o "
)


def test_when_a_job_was_suspended() -> None:
    record = JobRecord(job_id=3, name="x", work_dir="/w", state="RUNNING", start=NOON)
    said = SUSPENDED.format(
        account="a", at="2026-03-01T12:01:00", before=20, resized="ResizeTime=2026-03-01T12:00:30 "
    )
    (told,) = complete_from_text([record], said.encode())
    assert (told.suspended_at, told.suspended_s) == (NOON + timedelta(minutes=1), 40)
    assert told.resized_at == NOON + timedelta(seconds=30)
    said = SUSPENDED.format(account="a", at="None", before=0, resized="")
    (told,) = complete_from_text([record], said.encode())
    assert (told.suspended_at, told.suspended_s) == (None, None)


def test_nobody_writes_himself_a_suspension() -> None:
    record = JobRecord(job_id=3, name="x", work_dir="/w", state="RUNNING", start=NOON)
    forged = "b SuspendTime=2026-03-01T12:30:00 SecsPreSuspend=1 LastSchedEval=N/A"
    forged += " AccrueTime=x ResizeTime=2026-03-01T12:30:00 StartTime=x"
    said = SUSPENDED.format(account=forged, at="None", before=0, resized="")
    (told,) = complete_from_text([record], said.encode())
    assert (told.suspended_at, told.suspended_s, told.resized_at) == (None, None, None)


def test_the_suspension_in_json() -> None:
    record = JobRecord(job_id=3, uid=1, state="SUSPENDED", start=NOON)
    at = int(NOON.timestamp()) + 60
    number = '{{"set": true, "infinite": false, "number": {}}}'
    job = f'"job_id": 3, "user_id": 1, "tres_req_str": "", "pre_sus_time": {number.format(20)}'
    said = f'{{"jobs": [{{{job}, "suspend_time": {number.format(at)}}}]}}'
    (told,) = complete_from_json([record], said.encode())
    assert (told.suspended_at, told.suspended_s) == (NOON + timedelta(minutes=1), 40)
    (told,) = complete_from_json([record], f'{{"jobs": [{{{job}}}]}}'.encode())
    assert (told.suspended_at, told.suspended_s) == (None, None)


def test_json_that_is_none() -> None:
    with pytest.raises(SlurmError, match="cannot parse the JSON"):
        complete_from_json([], b"error: no serializer")


@given(st.binary(max_size=600), st.text(max_size=40))
def test_any_text_leaves_identity_alone(out: bytes, name: str) -> None:
    record = JobRecord(job_id=3, uid=1000, name=name, work_dir="/w")
    prefix = f"JobId=3 JobName={name} UserId=".encode("utf-8", "replace")
    for text in (out, prefix + out, prefix + b" Command=(null) " + out + b" WorkDir=/w" + out):
        (told,) = complete_from_text([record], text)
        assert facts(told) == facts(record)


def test_json_that_does_not_show_what_was_requested_is_not_taken() -> None:
    record = JobRecord(job_id=3, uid=1)
    with pytest.raises(SlurmError, match="tres_req_str"):
        complete_from_json([record], b'{"jobs": [{"job_id": 3, "user_id": 1}]}')
