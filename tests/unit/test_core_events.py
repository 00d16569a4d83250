import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON, script_event
from steward.core.events import (
    BODIES,
    JOB_SEEN,
    Event,
    EventError,
    JobFacts,
    decode_event,
    encode_event,
)
from steward.core.records import JobRecord


@given(st.text(), st.text(), st.integers(0, 2**63 - 1))
def test_events_survive_the_journal(name: str, work_dir: str, uid: int) -> None:
    record = JobRecord(job_id=1, name=name, work_dir=work_dir, uid=uid, submit=NOON)
    event = Event(
        kind=JOB_SEEN,
        cluster="c",
        key="k",
        at=NOON,
        seen_at=NOON,
        source="test",
        body=JobFacts(record=record),
        id=7,
    )
    assert decode_event(7, JOB_SEEN, "c", "k", encode_event(event)) == event


def test_fields_of_a_later_version_are_passed_over() -> None:
    data = msgspec.json.decode(encode_event(script_event(1)))
    data["body"]["from_the_future"] = 1
    data["later"] = 2
    event = decode_event(1, "job.script", "c1", "k", msgspec.json.encode(data))
    assert event.body.job_id == 1


@pytest.mark.parametrize(("kind", "data"), [("job.nonsense", b"{}"), ("job.script", b"[")])
def test_what_cannot_be_read_says_which(kind: str, data: bytes) -> None:
    with pytest.raises(EventError, match="event 3"):
        decode_event(3, kind, "c", "k", data)


def test_every_field_but_the_first_ones_has_a_default() -> None:
    """Newer fields have defaults, so that journals without them stay readable."""
    needed = {
        kind: sorted(field.name for field in msgspec.structs.fields(body) if field.required)
        for kind, body in BODIES.items()
    }
    assert needed == {
        "accounting.expire": ["before"],
        "archive.purge": ["script_keys"],
        "archive.resend": ["scripts", "sink"],
        "bank.threshold": ["account", "allocation", "balance", "kind", "total", "value"],
        "controller.state": ["up"],
        "hold.confirmed": ["account", "amount", "hold"],
        "hold.placed": ["account", "amount", "hold"],
        "hold.released": ["account", "amount", "hold"],
        "hold.settled": ["account", "amount", "hold"],
        "job.end": ["record"],
        "job.identity": ["first_submit", "job_id", "record", "script_key"],
        "job.missed": ["job_ids"],
        "job.script": ["job_id", "spool_mtime_ns"],
        "job.seen": ["record"],
        "job.state": ["record"],
        "jobs.imported": ["data", "runs", "steps"],
        "node.epilog": ["job_id", "node", "uid"],
        "node.gap": ["node", "why"],
        "node.prolog": ["job_id", "node", "uid"],
        "node.state": ["node", "state"],
        "partition.state": ["partition", "state"],
        "plugin.message": ["data", "plugin_type", "sender", "to"],
        "queue.polled": ["began"],
        "reservation.state": ["reservation", "state"],
        "rule.execution": ["action", "event", "execution", "rule", "status"],
        "run.end": ["first_submit", "job_id", "record", "restarts"],
        "run.start": ["first_submit", "job_id", "record", "restarts"],
        "run.suspend": ["first_submit", "job_id", "record", "restarts"],
        "step.accounted": ["job_id", "line", "submit"],
        "step.end": ["job_id", "launched_us", "node", "step"],
        "step.launch": ["first_submit", "job_id", "restarts"],
        "step.start": ["job_id", "launched_us", "node", "step", "uid"],
        "step.usage": ["first_submit", "job_id", "restarts"],
        "task.exit": ["job_id", "launched_us", "node", "step", "tasks"],
    }
