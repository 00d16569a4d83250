"""Parser of the lines of jobcomp.lua, including hostile ones."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.capture.jobcomp import LineError, make_end_event, parse_line
from steward.core.events import JOB_END, decode_event, encode_event
from steward.slurm import decode_ended_state
from steward.slurm.users import NameResolver

PEOPLE = NameResolver()
# As Slurm 22.05 gave it: a job that failed, one that got another size, one that was requeued.
FAILED = {
    "v": 1,
    "k": "job",
    "t": 1795296917,
    "job_id": 6,
    "user_id": 0,
    "group_id": 0,
    "job_state": 0x8005,
    "resizing": 0,
    "restart_cnt": 0,
    "submit_time": 1795296913,
    "start_time": 1795296916,
    "end_time": 1795296917,
    "exit_code": 768,
    "derived_ec": 9,
    "array_job_id": 4,
    "array_task_id": 1,
    "het_job_id": 0,
    "het_job_offset": 0,
    "total_nodes": 2,
    "total_cpus": 4,
    "min_nodes": 1,
    "min_cpus": 2,
    "priority": 4294901759,
    "time_limit": 90,
    "nodes": "node[1-2]",
    "tres_fmt_alloc_str": "cpu=4,node=2,billing=4",
    "tres_fmt_req_str": "cpu=2,mem=4G,node=1,billing=2",
    "partition": "main",
    "name": 'a"\n',
    "work_dir": "/home/a",
    "std_in": "/dev/null",
    "std_out": "/home/a/slurm-%j.out",
}


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def read(**changes: Any) -> Any:
    return parse_line(json.dumps({**FAILED, **changes}).encode(), PEOPLE)


def test_a_run_that_failed() -> None:
    said = read()
    record = said.record
    assert (record.job_id, record.array_job_id, record.array_task) == (6, 4, "1")
    assert (record.state, record.exit_code, record.exit_signal) == ("FAILED", 3, 0)
    assert (record.derived_exit_code, record.derived_exit_signal) == (0, 9)
    assert record.submit == at(1795296913)
    assert (record.start, record.end, said.at) == (at(1795296916), at(1795296917), at(1795296917))
    assert (record.uid, record.user, record.restarts) == (0, "root", 0)
    assert (record.nodes, record.cpus, record.requested_nodes, record.requested_cpus) == (
        2,
        4,
        1,
        2,
    )
    assert (record.nodelist, record.time_limit_s) == ("node[1-2]", 5400)
    assert (record.stdin, record.stdout) == ("/dev/null", "")
    event = make_end_event("c1", said, record)
    assert (event.kind, event.source, event.at) == (JOB_END, "jobcomp", at(1795296917))
    assert event.key == "job.end:6:1795296913:0:FAILED:1795296917:jobcomp"
    assert decode_event(0, event.kind, "c1", event.key, encode_event(event)).body.record == record


def test_pieces_of_a_resized_job_have_their_own_end_and_keys() -> None:
    one = read(job_state=0x2001, resizing=1, t=1795296950, end_time=1826832920)
    other = read(job_state=0x2001, resizing=1, t=1795296950, end_time=1826832920, nodes="node1")
    assert (one.record.state, one.record.end) == ("RESIZING", at(1795296950))
    assert one.record.exit_code is None
    keys = {make_end_event("c1", said, said.record).key for said in (one, other, one)}
    assert len(keys) == 2


def test_states() -> None:
    assert [decode_ended_state(number) for number in (3, 4, 0x8005, 6, 0x8007, 8, 9, 10, 11)] == [
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
        *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    ]
    assert decode_ended_state(0x400) == decode_ended_state(0x400 | 0x800) == "REQUEUED"
    assert decode_ended_state(0x400 | 7) == "NODE_FAIL"
    assert decode_ended_state(0x2001) == "RESIZING"
    assert decode_ended_state(0x80000) == "REVOKED"
    assert decode_ended_state(77) == ""


def test_what_is_cut_is_not_taken_for_the_whole() -> None:
    record = read(cut=["nodes", "tres_fmt_req_str", "work_dir"], work_dir="/begins").record
    assert (record.nodelist, record.tres_requested, record.work_dir) == ("", "", "/begins")


def test_none_of_slurms_numbers_for_nothing_is_a_number() -> None:
    none = 4294967294
    record = read(time_limit=none + 1, array_job_id=0, array_task_id=none, exit_code=none).record
    assert (record.time_limit_s, record.array_task, record.exit_code) == (None, "", None)
    record = read(start_time=0, end_time=2**62, user_id=2**40).record
    assert (record.start, record.end, record.uid) == (None, None, None)


@pytest.mark.parametrize(
    "changes",
    [
        *({"v": 2}, {"k": "step"}, {"job_id": 0}, {"job_id": 2**33}, {"submit_time": 0}),
        *({"job_state": 99}, {"t": -1}, {"restart_cnt": -1}, {"job_id": "7"}, {"name": 5}),
    ],
    ids=str,
)
def test_lines_of_no_job(changes: dict[str, Any]) -> None:
    with pytest.raises(LineError):
        read(**changes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(FAILED)), JSON, max_size=6), st.binary(max_size=60))
def test_any_line_is_an_event_or_none(changes: dict[str, Any], raw: bytes) -> None:
    for line in (json.dumps({**FAILED, **changes}).encode(), raw, b"[" * 100_000):
        try:
            said = parse_line(line, PEOPLE)
        except LineError:
            continue
        event = make_end_event("c1", said, said.record)
        assert event.key.startswith(f"job.end:{said.record.job_id}:")
        assert event.key.isprintable()
        assert (
            decode_event(0, event.kind, "c1", event.key, encode_event(event)).body.record
            == said.record
        )
