"""The events of an import survive being packed, and a damaged pack is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import at
from harness.imports import imported, imported_job, imported_run, imported_step
from steward.core.events import Event, EventError, ImportedJobs, decode_event, encode_event
from steward.core.imported import pack_events, unpack_event

TEXTS = st.text(max_size=20)
MAYBE = st.none() | st.integers(0, 2**63 - 1)


@st.composite
def jobs(draw: st.DrawFn) -> list[Event]:
    job_id = draw(st.integers(1, 2**31))
    run = imported_run(
        job_id,
        restarts=draw(st.integers(0, 3)),
        name=draw(TEXTS),
        submit_line=draw(TEXTS),
        cancelled_by=draw(MAYBE),
        start=draw(
            st.none() | st.datetimes().map(lambda moment: moment.replace(tzinfo=at(0).tzinfo))
        ),
    )
    names = draw(st.lists(st.sampled_from(["batch", "extern", "0", "1"]), unique=True))
    return [
        run,
        *(imported_step(run, step, name=draw(TEXTS), max_rss_bytes=draw(MAYBE)) for step in names),
    ]


@given(st.lists(jobs(), min_size=1, max_size=5))
def test_packed_events_are_restored(packed: list[list[Event]]) -> None:
    events = [event for job in packed for event in job]
    block = imported(*events)
    stored = decode_event(9, block.kind, block.cluster, block.key, encode_event(block))
    assert [msgspec.structs.replace(part, id=0) for part in unpack_event(stored)] == events
    assert {part.id for part in unpack_event(stored)} == {9}


def test_the_same_rows_have_the_same_key_whenever_they_are_imported() -> None:
    block = imported(*imported_job(1), *imported_job(2))
    later = [msgspec.structs.replace(event, seen_at=at(900)) for event in imported_job(1)]
    assert imported(*later, *imported_job(2)).key == block.key
    assert imported(*imported_job(1)).key != block.key


def test_another_event_is_itself() -> None:
    run = imported_run(1)
    assert list(unpack_event(run)) == [run]


def test_a_thousand_rows_take_little_of_the_journal() -> None:
    events = [event for number in range(333) for event in imported_job(1000 + number)]
    assert len(encode_event(imported(*events))) < 333 * 60


@pytest.mark.parametrize("data", [b"", b"junk", b"\x28\xb5\x2f\xfd" + b"\0" * 20])
def test_a_damaged_pack_is_refused(data: bytes) -> None:
    block = imported(*imported_job(1))
    body = ImportedJobs(runs=1, steps=2, data=data)
    with pytest.raises(EventError, match="cannot unpack event"):
        list(unpack_event(msgspec.structs.replace(block, body=body)))


def pack(runs: object, steps: object, owners: list[int], counts: tuple[int, int]) -> Event:
    import zstandard

    data = msgspec.json.encode({"runs": runs, "steps": steps, "owners": owners})
    body = ImportedJobs(
        runs=counts[0], steps=counts[1], data=zstandard.ZstdCompressor().compress(data)
    )
    return msgspec.structs.replace(imported(*imported_job(1)), body=body)


@pytest.mark.parametrize(
    "block",
    [
        pack({"job_id": [1], "submit": [at(0)]}, {}, [], (1, 0)),
        pack({"job_id": [1], "submit": [at(0)], "end": [at(1)]}, {}, [], (2, 1)),
        pack({"job_id": ["x"], "submit": [at(0)], "end": [at(1)]}, {}, [], (1, 0)),
        pack(
            {"job_id": [1], "submit": [at(0)], "end": [at(1)]},
            {"cluster": ["c1"], "job_id": [1], "label": [""], "step": ["0"]},
            [1],
            (1, 1),
        ),
        pack({"job_id": [1, 2], "submit": [at(0), at(1), at(2)], "end": [at(1)]}, {}, [], (2, 0)),
        pack({"job_id": [1], "submit": [at(0)], "end": [at(1)]}, {}, [], (10**12, 0)),
        pack({"job_id": [1], "submit": [at(0)], "end": [at(1)]}, {}, [], (10**12, 1 - 10**12)),
        pack(
            {"job_id": [1], "submit": [at(0)], "end": [at(1)]},
            {"cluster": ["c1"], "job_id": [1], "label": [""], "step": ["0"]},
            [0],
            (1, 10**12),
        ),
    ],
)
def test_a_pack_that_does_not_add_up_is_refused(block: Event) -> None:
    with pytest.raises(EventError, match="cannot unpack event"):
        list(unpack_event(block))


def test_a_pack_that_would_fill_the_memory_is_refused() -> None:
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    body = ImportedJobs(runs=1, steps=0, data=compressor.compress(b"\0" * ((256 << 20) + 1)))
    with pytest.raises(EventError, match="out of range"):
        list(unpack_event(msgspec.structs.replace(imported(*imported_job(1)), body=body)))


def test_more_than_a_consumer_unpacks_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steward.core.imported.MAX_UNPACKED_BYTES", 2000)
    with pytest.raises(EventError, match=r"cannot pack 2 runs and steps from job 1 on"):
        pack_events([imported_run(number, submit_line=str(number) * 1500) for number in (1, 2)])
