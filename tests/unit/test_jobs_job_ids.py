import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.core.records import JobRecord
from steward.jobs.job_ids import MAX_JOB_ID, JobName, JobNameError, format_job_name, parse_job_name

IDS = st.integers(1, MAX_JOB_ID)
INDICES = st.integers(0, 4_000_001)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("123", JobName(job_id=123)),
        (" 123\n", JobName(job_id=123)),
        ("123_7", JobName(job_id=123, task=7)),
        ("123_0", JobName(job_id=123, task=0)),
        ("123+1", JobName(job_id=123, offset=1)),
        ("s0ZXM7YY8HFA00", JobName(sluid="s0ZXM7YY8HFA00")),
        ("S0zxm7yy8hfa00", JobName(sluid="s0ZXM7YY8HFA00")),
        ("1022[3]", JobName(job_id=1022, task=3)),
        ("1022[]", JobName(job_id=1022)),
        ("1023.vm", JobName(job_id=1023)),
        ("1022[3].pbs-1.example.org", JobName(job_id=1022, task=3)),
        ("1022[].vm", JobName(job_id=1022)),
    ],
)
def test_names_of_slurm_and_torque_are_understood(text: str, name: JobName) -> None:
    assert parse_job_name(text) == name


NO_NAMES = """
    0 -1 123_ 123_x 1_2+3 123.batch 123.extern 123.0 123_[1-3] % ٣ s0ZXM7YY8HFI00 s123
    123[1-3] 123[x] 123[1 123[1]2 123. 123.-a 123.a/b 123_7.vm 123+1.vm [7] 0[7] 0.vm
    4294967296 99999999999999999999 1_99999999999
"""


@pytest.mark.parametrize("text", [*NO_NAMES.split(), "", "1 2", "1\x00"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(JobNameError) as caught:
        parse_job_name(text)
    assert caught.value.offender == text
    assert "\n" not in str(caught.value)


@given(st.text())
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        name = parse_job_name(text)
    except JobNameError:
        return
    assert bool(name.job_id) != bool(name.sluid)


@given(IDS, INDICES)
def test_what_is_displayed_can_be_parsed(job_id: int, index: int) -> None:
    task = JobRecord(job_id=9, array_job_id=job_id, array_task=str(index))
    assert parse_job_name(format_job_name(task)) == JobName(job_id=job_id, task=index)
    component = JobRecord(job_id=9, het_job_id=job_id, het_offset=index)
    assert parse_job_name(format_job_name(component)) == JobName(job_id=job_id, offset=index)
    assert parse_job_name(format_job_name(JobRecord(job_id=job_id))) == JobName(job_id=job_id)


def test_an_array_that_is_not_split_shows_its_expression() -> None:
    assert format_job_name(JobRecord(job_id=5, array_job_id=5, array_task="1-9%2")) == "5_[1-9%2]"
