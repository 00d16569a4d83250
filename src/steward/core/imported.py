"""Imported jobs: pack the events of an import into one, and unpack them again.

An import of old accounting appends one jobs.imported event for about 1,000 runs and steps, each
run followed by its steps: :func:`pack_events` makes it of job.end and step.accounted events,
:func:`unpack_event` restores these. Steps too many or too long for one event follow in events of
their own, which repeat the run and are marked as continued. Packed by columns and compressed, a
job with two steps takes about 0.16 kB of the journal, where events for each take 7 kB.
"""

import hashlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any, Final, TypeVar

import msgspec

from steward.core.events import (
    JOB_END,
    JOBS_IMPORTED,
    STEP_ACCOUNTED,
    Event,
    EventError,
    ImportedJobs,
    JobFacts,
)
from steward.core.records import JobRecord, UsageLine
from steward.core.timestamps import to_micros
from steward.core.usage import AccountedStep

_LEVEL: Final = 1
"""Zstandard's fastest level; the highest saves a tenth and takes a hundred times as long."""
MAX_UNPACKED_BYTES: Final = 128 << 20
"""Largest size of the unpacked columns, in bytes; those of 40,000 steps have 12 MB."""
_MOST_ROWS: Final = 100_000
"""Largest number of runs and steps in an event."""
_ROW_SIZE: Final = 2000
"""Size of an unpacked run or step besides its columns, in bytes."""

_Columns = dict[str, list[Any]]
"""Values by field: one value if all are equal, no column if all are the default."""


class _Block(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of runs and steps; ``owners`` has the index of each step's run."""

    runs: _Columns
    steps: _Columns
    owners: list[int]


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Block).decode
_Record = TypeVar("_Record", JobRecord, UsageLine)


def make_imported_run(
    record: JobRecord, cluster: str, source: str, seen_at: datetime, position: int = 0
) -> Event:
    """Make the job.end event of an imported run.

    Args:
        record: Record of the run, which has a submit time and an end.
        cluster: Cluster name.
        source: Name of the source.
        seen_at: Time of the import.
        position: Position of the jobs.imported event; 0 before it is appended.
    """
    assert record.submit is not None, "an imported run has a submit time"
    assert record.end is not None, "an imported run has ended"
    return Event(
        kind=JOB_END,
        cluster=cluster,
        key=f"accounted:{record.job_id}:{to_micros(record.submit) // 1_000_000}:{record.restarts}",
        at=record.end,
        seen_at=seen_at,
        source=source,
        body=JobFacts(record=record),
        id=position,
    )


def make_imported_step(run: Event, line: UsageLine) -> Event:
    """Make the step.accounted event of a step of an imported run.

    Args:
        run: Event of the run.
        line: Accounting line of the step.
    """
    record: JobRecord = run.body.record
    assert record.submit is not None, "an imported run has a submit time"
    submit_s = to_micros(record.submit) // 1_000_000
    return Event(
        kind=STEP_ACCOUNTED,
        cluster=run.cluster,
        key=f"accounted:{record.job_id}.{line.step}:{submit_s}",
        at=run.at,
        seen_at=run.seen_at,
        source=run.source,
        body=AccountedStep(job_id=record.job_id, submit=record.submit, line=line),
        id=run.id,
    )


def pack_events(events: Sequence[Event], *, is_continued: bool = False) -> Event:
    """Pack the events of imported runs, each followed by those of its steps.

    The same runs and steps give an event with the same key.

    Args:
        events: The events.
        is_continued: Whether they are one run, packed before, and further steps of it.

    Raises:
        EventError: They are too large for one event.
    """
    import zstandard

    records: list[JobRecord] = []
    lines: list[UsageLine] = []
    owners: list[int] = []
    for event in events:
        if event.kind == JOB_END:
            records.append(event.body.record)
        else:
            lines.append(event.body.line)
            owners.append(len(records) - 1)
    block = _Block(
        runs=_split_columns(records, JobRecord),
        steps=_split_columns(lines, UsageLine),
        owners=owners,
    )
    data = _encode(block)
    first = events[0]
    if len(data) > MAX_UNPACKED_BYTES or len(events) > _MOST_ROWS:
        raise EventError(
            f"cannot pack {len(events)} runs and steps from job {records[0].job_id} on: "
            f"{len(data)} bytes; one event takes {_MOST_ROWS} in {MAX_UNPACKED_BYTES} bytes",
            first,
        )
    return Event(
        kind=JOBS_IMPORTED,
        cluster=first.cluster,
        key=f"imported:{hashlib.blake2b(data, digest_size=16).hexdigest()}",
        at=max(event.at for event in events),
        seen_at=first.seen_at,
        source=first.source,
        body=ImportedJobs(
            runs=len(records),
            steps=len(lines),
            data=zstandard.ZstdCompressor(level=_LEVEL).compress(data),
            is_continued=is_continued,
        ),
    )


def unpack_event(event: Event) -> Iterator[Event]:
    """Yield the events in a jobs.imported event; any other event is yielded itself.

    Raises:
        EventError: The event cannot be unpacked.
    """
    if event.kind != JOBS_IMPORTED:
        yield event
        return
    try:
        records, steps_by_run = _unpack_records(event.body)
    except (ValueError, msgspec.MsgspecError) as error:
        message = f"cannot unpack event {event.id} ({event.kind}): {error}"
        raise EventError(message, event) from error
    for number, record in enumerate(records):
        run = make_imported_run(record, event.cluster, event.source, event.seen_at, event.id)
        yield run
        for line in steps_by_run.get(number, ()):
            yield make_imported_step(run, line)


def _unpack_records(body: ImportedJobs) -> tuple[list[JobRecord], dict[int, list[UsageLine]]]:
    """Return the runs, and their steps by the index of the run."""
    if min(body.runs, body.steps) < 0 or body.runs + body.steps > _MOST_ROWS:
        raise ValueError("its number of runs and steps is out of range")
    block = _decode(_decompress(body.data))
    records = _join_columns(block.runs, body.runs, JobRecord)
    lines = _join_columns(block.steps, body.steps, UsageLine)
    steps_by_run: dict[int, list[UsageLine]] = {}
    for owner, line in zip(block.owners, lines, strict=True):
        steps_by_run.setdefault(owner, []).append(line)
    if not all(record.submit and record.end for record in records):
        raise ValueError("a run has no submit time or no end")
    if not steps_by_run.keys() <= set(range(len(records))):
        raise ValueError("a step has no run")
    return records, steps_by_run


def measure_unpacked(body: ImportedJobs) -> int:
    """Return the approximate size of an event's runs and steps in memory, in bytes.

    It is 0 if :func:`unpack_event` would raise because of the size.
    """
    try:
        return _get_unpacked_size(body.data) + max(0, body.runs + body.steps) * _ROW_SIZE
    except ValueError:
        return 0


def _get_unpacked_size(data: bytes) -> int:
    """Return the size of compressed columns, unpacked; raise ValueError if it is out of range."""
    import zstandard

    try:
        size: int = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if not 0 <= size <= MAX_UNPACKED_BYTES:
        raise ValueError("its size is out of range")
    return size


def _decompress(data: bytes) -> bytes:
    """Decompress columns of limited size."""
    import zstandard

    _get_unpacked_size(data)
    try:
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _split_columns(records: Sequence[_Record], kind: type[_Record]) -> _Columns:
    """Return the columns of records."""
    columns: _Columns = {}
    values = zip(*map(msgspec.structs.astuple, records), strict=True)
    # Without records there are no columns.
    for field, column in zip(msgspec.structs.fields(kind), values, strict=False):
        if column.count(column[0]) < len(column):
            columns[field.name] = list(column)
        elif column[0] != field.default:
            columns[field.name] = [column[0]]
    return columns


def _join_columns(columns: _Columns, count: int, kind: type[_Record]) -> list[_Record]:
    """Return the records of columns."""
    if not count:
        return []
    values = [
        repeat(column[0], count) if len(column) == 1 else column for column in columns.values()
    ]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    if len(rows) != count:
        raise ValueError(f"it has {len(rows)} records instead of {count}")
    return msgspec.convert(rows, list[kind])  # type: ignore[valid-type]  # of a variable, checked by convert
