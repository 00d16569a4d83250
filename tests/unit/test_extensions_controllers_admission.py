"""Checks of forwarded events before any is stored."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON, NOON_NS
from harness.forwarders import row_of, script_row, store_in
from steward.capture.jobcomp import JobcompSource, ReadPositions
from steward.core.events import (
    ControllerState,
    Event,
    IncomingFile,
    JobFacts,
    MissedJobs,
    decode_event,
    make_missed_event,
)
from steward.core.records import JobRecord
from steward.core.script_stores import parse_incoming_filename
from steward.core.waits import Stop
from steward.extensions.controllers.admission import FORWARDED_KINDS, EventAdmission
from steward.extensions.controllers.wire import ForwardedEvent


def seen(**changes: Any) -> Event:
    fields: dict[str, Any] = {
        "kind": "job.seen",
        "cluster": "c1",
        "key": "job.seen:1:2:0:abc",
        "at": NOON,
        "seen_at": NOON,
        "source": "snapshot",
        "body": JobFacts(record=JobRecord(job_id=1, submit=NOON)),
        **changes,
    }
    return Event(**fields)


def missed(*job_ids: int) -> Event:
    event = make_missed_event("c1", "spool", (1,))
    return msgspec.structs.replace(event, body=MissedJobs(job_ids=job_ids))


def admit(
    directory: Path,
    *rows: ForwardedEvent,
    known: Callable[[str, str], bool] = lambda cluster, key: False,
) -> tuple[list[Event], list[tuple[int, str]]]:
    store = store_in(directory)
    admitted, refused = EventAdmission("c1", known).admit_events(rows, lambda: store)
    return [decode_event(0, *row) for row in admitted], refused


def test_a_script_is_kept_under_names_of_ours(tmp_path: Path) -> None:
    row = script_row(7, b"#!/bin/sh\n\0\xff", store="archive.elsewhere")
    (event,), refused = admit(tmp_path, row)
    assert refused == []
    assert event.body.store == "state"
    directory = tmp_path / "incoming"
    assert (directory / event.body.script.path).read_bytes() == b"#!/bin/sh\n\0\xff"
    assert (directory / event.body.environment.path).read_bytes() == b"\1\0\0\0A=1\0"
    assert sorted(path.name for path in directory.iterdir()) == [
        f"c1.7.{NOON_NS}.12.script",
        f"c1.7.{NOON_NS}.8.env",
    ]


def test_what_jobcomp_tells_there_is_taken(tmp_path: Path) -> None:
    told: list[Event] = []
    line = {"v": 1, "k": "job", "t": 1795296917, "job_id": 6, "submit_time": 1795296913}
    lines = [{**line, "job_state": 3}, {**line, "job_state": 0x2001, "lost": 2}, {"v": 1}]
    file = tmp_path / "jobcomp"
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    places = ReadPositions(str(tmp_path), "c1")
    source = JobcompSource("c1", str(file), places, told.extend)
    source.append_new_events(Stop())
    source.close()
    places.close()
    events, refused = admit(tmp_path / "there", *map(row_of, told))
    assert refused == []
    assert [event.kind for event in events] == ["job.end", "job.end", "node.gap", "node.gap"]
    assert {event.source for event in events} == {"jobcomp"}


def test_a_path_that_is_sent_is_never_used(tmp_path: Path) -> None:
    row = script_row(1)
    good = decode_event(0, row.kind, row.cluster, row.key, row.data).body.script
    evil = IncomingFile(path="../../evil", length=good.length, sha256=good.sha256)
    (event,), _ = admit(tmp_path, script_row(1, script=b"#!/bin/sh\n", environment=None))
    (again,), refused = admit(tmp_path, replaced(row, script=evil))
    assert refused == []
    assert again.body.script == event.body.script
    assert not (tmp_path.parent / "evil").exists()


def replaced(row: ForwardedEvent, **changes: Any) -> ForwardedEvent:
    """Return a row of ``script_row`` with these fields of its event's body replaced."""
    event = decode_event(0, row.kind, row.cluster, row.key, row.data)
    body = msgspec.structs.replace(event.body, **changes)
    other = row_of(msgspec.structs.replace(event, body=body))
    return msgspec.structs.replace(other, script=row.script, environment=row.environment)


GOOD = script_row(1)
REFUSED = [
    (script_row(1, cluster="c2"), "wrong cluster 'c2'"),
    (ForwardedEvent("job.identity", "c1", "k", b"{}"), "'job.identity' is not accepted"),
    (ForwardedEvent("archive.purge", "c1", "k", b"{}"), "'archive.purge' is not accepted"),
    (ForwardedEvent("job.script", "c1", "a b", GOOD.data), "malformed event key 'a b': a key has"),
    (ForwardedEvent("job.script", "c1", "k" * 301, GOOD.data), "malformed event key 'kkk"),
    (
        ForwardedEvent("job.script", "c1", GOOD.key, b" " * (1 << 20) + b"{}"),
        "the maximum is 1048576",
    ),
    (ForwardedEvent("job.script", "c1", GOOD.key, b"{"), f"cannot decode job.script {GOOD.key}: "),
    (
        ForwardedEvent("job.script", "c1", GOOD.key, b'{"at": "\xff"}'),
        "older than the controller's",
    ),
    (
        ForwardedEvent("job.script", "c1", GOOD.key, GOOD.data, None, GOOD.environment),
        "environment is missing",
    ),
    (
        ForwardedEvent("job.script", "c1", GOOD.key, GOOD.data, GOOD.script, None),
        "environment is missing",
    ),
    (
        ForwardedEvent("job.script", "c1", GOOD.key, GOOD.data, b"#!/bin/rc\n", GOOD.environment),
        "SHA-256",
    ),
    (ForwardedEvent("job.script", "c1", GOOD.key, GOOD.data, GOOD.script, b""), "SHA-256"),
    (
        ForwardedEvent("job.script", "c1", "script:2:3", GOOD.data, b"", b""),
        "does not match the job",
    ),
    (replaced(GOOD, script=None), "no script"),
    (replaced(GOOD, job_id=-1), "invalid job id"),
    (replaced(GOOD, spool_mtime_ns=-1), "invalid job id"),
    (row_of(missed()), "invalid number of job ids, 0"),
    (row_of(missed(*range(1, 1002))), "invalid number of job ids, 1001"),
    (row_of(missed(1, -1)), "invalid job id in 'job_ids': each must be 1 to"),
    (row_of(seen(key="script:1:2")), "does not match an event of kind job.seen"),
    (row_of(seen(source="import")), "'import'"),
    (row_of(seen(at=NOON.replace(tzinfo=None))), "lacks its time zone"),
    (
        row_of(seen(body=JobFacts(record=JobRecord(job_id=1, end=NOON.replace(tzinfo=None))))),
        "lacks its time zone",
    ),
    (row_of(seen(body=JobFacts(record=JobRecord(job_id=0)))), "job id"),
    (row_of(seen(body=JobFacts(record=JobRecord(job_id=2**53)))), "job id"),
    (row_of(seen(body=JobFacts(record=JobRecord(job_id=2)))), "does not match the job"),
    (row_of(seen(at=NOON.replace(year=9999))), "implausible time"),
    (
        row_of(seen(body=JobFacts(record=JobRecord(job_id=1, submit=NOON.replace(year=9999))))),
        "implausible time",
    ),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_one_event_is_refused_and_the_next_is_taken(
    tmp_path: Path, row: ForwardedEvent, reason: str
) -> None:
    events, refused = admit(tmp_path, row, script_row(2))
    assert [event.body.job_id for event in events] == [2]
    assert [index for index, _ in refused] == [0]
    assert reason in refused[0][1]
    names = {path.name for path in (tmp_path / "incoming").iterdir()}
    assert all(name.startswith("c1.2.") for name in names), "its bytes are not kept"


def test_a_script_that_was_too_large_is_told_of_without_bytes(tmp_path: Path) -> None:
    row = replaced(GOOD, script=None, environment=None, flags=("script-too-large",))
    row = msgspec.structs.replace(row, script=None, environment=None)
    (event,), refused = admit(tmp_path, row)
    assert refused == []
    assert (event.body.script, event.body.flags) == (None, ("script-too-large",))


def test_what_is_known_writes_no_bytes(tmp_path: Path) -> None:
    events, refused = admit(tmp_path, script_row(1), known=lambda cluster, key: True)
    assert (events, refused) == ([], [])
    assert not (tmp_path / "incoming").exists()


def test_jobs_that_capture_missed_there_are_told_of(tmp_path: Path) -> None:
    (event,), refused = admit(tmp_path, row_of(missed(7, 12)))
    assert refused == []
    assert event.body == MissedJobs(job_ids=(7, 12))


def test_other_kinds_pass_as_they_are(tmp_path: Path) -> None:
    state = seen(
        kind="controller.state", key="controller.state:up:1", body=ControllerState(up=True)
    )
    events, refused = admit(tmp_path, row_of(seen()), row_of(state))
    assert refused == []
    assert events == [seen(), state]


TEXT = st.text(max_size=20) | st.sampled_from(
    ["c1", "../c1", "script:1:1", GOOD.key, *FORWARDED_KINDS]
)


@given(
    kind=TEXT,
    cluster=TEXT,
    key=TEXT,
    data=st.binary(max_size=60) | st.just(GOOD.data),
    script=st.none() | st.binary(max_size=9) | st.just(GOOD.script),
    environment=st.none() | st.binary(max_size=9) | st.just(GOOD.environment),
)
def test_any_row_is_kept_in_the_store_or_refused(
    kind: str,
    cluster: str,
    key: str,
    data: bytes,
    script: bytes | None,
    environment: bytes | None,
) -> None:
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        admit(home, ForwardedEvent(kind, cluster, key, data, script, environment))
        for path in home.rglob("*"):
            if path.is_file():
                name = parse_incoming_filename(path.name)
                assert name is not None
                assert (path.parent, name.cluster) == (home / "incoming", "c1")
                assert path.read_bytes() in (script, environment)


@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_any_json_is_an_event_or_refused(body: Any) -> None:
    event = {"at": NOON, "seen_at": NOON, "source": "snapshot", "body": body}
    for kind in FORWARDED_KINDS:
        data = msgspec.json.encode(event)
        rows, refused = EventAdmission("c1", lambda cluster, key: False).admit_events(
            [ForwardedEvent(kind, "c1", f"{kind}:1", data)], lambda: pytest.fail("no bytes came")
        )
        assert len(rows) + len(refused) == 1
