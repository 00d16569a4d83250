"""Imports of accounting data: row by row, each row once, resumed after an interruption."""

import io
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steward.accounting.errors import AccountingError
from steward.accounting.imports import (
    ImportEventMaker,
    ImportPosition,
    ImportResult,
    import_days,
    import_sacct_file,
    is_sacct_file,
    load_position,
    save_position,
)
from steward.core.consumers import Append
from steward.core.events import JOB_END, STEP_ACCOUNTED, Event
from steward.core.imported import unpack_event
from steward.core.records import JobRecord
from steward.core.usage import AccountedStep
from steward.slurm import SlurmError
from steward.slurm.commands import CommandRunner
from steward.slurm.sacct import (
    SacctHistory,
    SacctRow,
    parse_clock_us,
    parse_job_row,
    parse_size,
    parse_step_row,
    read_sacct_file,
)
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import NameResolver

DAY = datetime(2026, 11, 20, tzinfo=UTC)
TIMES = "2026-11-20T10:00:00|2026-11-20T10:00:01|2026-11-20T10:05:00"
HEAD = "JobID|JobIDRaw|UID|State|ExitCode|Submit|Start|End|JobName|NCPUS|MaxRSS|UserCPU|Timelimit"


def row(job: int, *, step: str = "", **columns: str) -> dict[str, str]:
    name = f"{job}.{step}" if step else str(job)
    at = columns.pop("at", "2026-11-20T10:00:00")
    return {
        "jobid": name,
        "jobidraw": name,
        "uid": "" if step else "0",
        "state": "COMPLETED",
        "exitcode": "0:0",
        "submit": at,
        "start": at,
        "end": at.replace("10:00:00", "11:00:00"),
        "jobname": "x",
        **columns,
    }


class Asked:
    """Scripted source that records the queries."""

    passed_over = 0

    def __init__(self, rows: Sequence[SacctRow]) -> None:
        self._rows = rows
        self.asked: list[datetime] = []
        self.fails_at: datetime | None = None

    def rows(self, since: datetime, until: datetime) -> Iterable[SacctRow]:
        self.asked.append(since)
        if self.fails_at is not None and since >= self.fails_at:
            raise SlurmError("slurmdbd is gone", ("sacct",))
        for one in self._rows:
            at = datetime.fromisoformat(one["submit"]).replace(tzinfo=UTC)
            if since <= at < until:
                yield one


def redact(record: JobRecord) -> JobRecord:
    return record


class Packed(list[Event]):
    """Events that an import appends, as they are."""

    def count_texts(self) -> list[int]:
        """Return the length of the submit lines in each event."""
        return [sum(map(get_submit_length, unpack_event(event))) for event in self]


def get_submit_length(part: Event) -> int:
    """Return the length of the submit line of a run or step."""
    body = part.body
    record = body.line if isinstance(body, AccountedStep) else body.record
    return len(record.submit_line)


def test_long_texts_are_divided_into_several_events(tmp_path: Path) -> None:
    mega = 1 << 20
    rows = [row(n, submitline=str(n) * mega) for n in range(1, 8)]
    rows[3:3] = [row(3, step=str(n), submitline=str(n) * mega) for n in range(9)]
    packed = Packed()
    take(Asked(rows), tmp_path / "places", 1, packed)
    # The first event ends within job 3, the next repeat that job, and only that.
    assert [event.body.runs for event in packed] == [3, 1, 1, 4]
    assert [event.body.steps for event in packed] == [3, 3, 3, 0]
    assert [event.body.is_continued for event in packed] == [False, True, True, False]
    assert max(packed.count_texts()) <= 8 * mega
    parts = [part for event in packed for part in unpack_event(event)]
    steps = [part.body.line.step for part in parts if part.kind == STEP_ACCOUNTED]
    assert steps == list(map(str, range(9)))
    again = Packed()
    take(Asked(rows[1:]), tmp_path / "places", 1, again)
    assert [event.key for event in again[1:]] == [event.key for event in packed[1:]]


def test_many_steps_of_a_run_are_divided(tmp_path: Path) -> None:
    packed = Packed()
    take(
        Asked([row(1), *(row(1, step=str(n)) for n in range(30_000))]),
        *(tmp_path / "places", 1, packed),
    )
    assert [event.body.runs for event in packed] == [1] * 3
    assert sum(event.body.steps for event in packed) == 30_000


class Taken(list[Event]):
    """Events that an import appends, unpacked."""

    def extend(self, events: Iterable[Event]) -> None:
        super().extend(part for event in events for part in unpack_event(event))


def take(books: Asked, places: Path, days: int, events: list[Event], observed: int = 0) -> Any:
    return import_days(
        books,
        "c1",
        DAY,
        DAY + timedelta(days=days),
        ImportEventMaker("c1", redact),
        NameResolver(),
        events.extend,
        str(places),
        lambda *_: None,
        count_observed=lambda _since, _until: observed,
    )


def test_a_day_without_rows_of_known_jobs_fails_the_import(tmp_path: Path) -> None:
    events = Taken()
    taken = take(Asked([row(1)]), tmp_path / "places", 3, events, observed=2)
    assert (taken.jobs, taken.unanswered, taken.exit_code) == (1, 4, 1)
    assert any("Problem getting jobs" in warning for warning in taken.list_warnings())
    taken = take(Asked([row(1)]), tmp_path / "places", 3, events)
    assert (taken.unanswered, taken.exit_code, list(taken.list_warnings())) == (0, 0, [])


def test_a_row_that_cannot_be_parsed_fails_the_import(tmp_path: Path) -> None:
    taken = take(Asked([row(1), row(2, jobid="x", jobidraw="")]), tmp_path / "places", 1, [])
    assert (taken.jobs, taken.passed_over, taken.exit_code) == (1, 1, 1)
    assert list(taken.list_warnings()) == ["cannot parse 1 row: no complete import"]


def test_a_day_is_a_question_and_rows_are_events(tmp_path: Path) -> None:
    books = Asked([row(1), row(1, step="batch"), row(1, step="0"), row(2, state="RUNNING")])
    events = Taken()
    taken = take(books, tmp_path / "places", 3, events)
    assert books.asked == [DAY, DAY + timedelta(days=1), DAY + timedelta(days=2)]
    assert (taken.jobs, taken.steps, taken.unfinished, taken.passed_over) == (1, 2, 1, 0)
    assert [event.kind for event in events] == [JOB_END, STEP_ACCOUNTED, STEP_ACCOUNTED]
    assert {event.source for event in events} == {"slurmdbd"}
    assert len({event.key for event in events}) == 3
    assert events[1].body.line.step == "batch"
    assert events[1].body.submit == events[0].body.record.submit
    again = Taken()
    take(Asked([row(1), row(1, step="batch"), row(1, step="0")]), tmp_path / "places", 3, again)
    assert [event.key for event in again] == [event.key for event in events]


def test_what_was_cut_short_goes_on(tmp_path: Path) -> None:
    rows = [row(n + 1, at=f"2026-11-2{n}T10:00:00") for n in range(4)]
    books = Asked(rows)
    books.fails_at = DAY + timedelta(days=2)
    events = Taken()
    with pytest.raises(SlurmError):
        take(books, tmp_path / "places", 4, events)
    books.fails_at = None
    books.asked.clear()
    taken = take(books, tmp_path / "places", 4, events)
    assert taken.went_on == "2026-11-21"
    assert books.asked[0] == DAY + timedelta(days=1)
    assert sorted({event.body.record.job_id for event in events}) == [1, 2, 3, 4]
    books.asked.clear()
    take(books, tmp_path / "places", 4, events)
    assert books.asked[0] == DAY


def test_an_interruption_forgets_no_result(tmp_path: Path) -> None:
    rows = [
        *(row(1), row(1, step="batch"), row(2, jobid="x", jobidraw="")),
        *(row(3, at="2026-11-23T10:00:00"), row(4, state="RUNNING", at="2026-11-23T10:00:00")),
    ]
    books = Asked(rows)
    events = Taken()
    for day in (2, 3):
        books.fails_at = DAY + timedelta(days=day)
        with pytest.raises(SlurmError):
            take(books, tmp_path / "places", 5, events, observed=2)
    books.fails_at = None
    resumed = take(books, tmp_path / "places", 5, events, observed=2)
    at_once = take(Asked(rows), tmp_path / "others", 5, Taken(), observed=2)
    assert (at_once.jobs, at_once.steps, at_once.unfinished) == (2, 1, 1)
    assert (at_once.passed_over, at_once.unanswered) == (1, 6)
    assert resumed == msgspec.structs.replace(at_once, went_on="2026-11-22")


def test_an_interruption_forgets_no_result_of_a_file(tmp_path: Path) -> None:
    path, places = tmp_path / "sacct.txt", str(tmp_path / "places")
    job = f"70000|COMPLETED|0:0|{TIMES}|n|4|||"
    lines = [HEAD, "broken|row", f"x||{job}", *(f"{n}|{n}|{job}" for n in range(1, 2500))]
    lines[1500:1500] = ["broken|row"]
    path.write_text("\n".join(lines))
    maker = ImportEventMaker("c1", redact)

    def take_file(append: Append) -> ImportResult:
        return import_sacct_file(
            *(str(path), "c1", maker, NameResolver(), append, places, lambda *_: None)
        )

    appended: list[Event] = []

    def fail_third(events: Sequence[Event]) -> None:
        if len(appended) == 2:
            raise SlurmError("the journal is gone")
        appended.extend(events)

    with pytest.raises(SlurmError):
        take_file(fail_third)
    resumed = take_file(appended.extend)
    assert (resumed.jobs, resumed.passed_over, bool(resumed.went_on)) == (2499, 3, True)
    assert sum(event.body.runs for event in appended) == 2499


def test_runs_of_a_requeued_job_are_counted(tmp_path: Path) -> None:
    rows = [
        row(7, state="REQUEUED", at="2026-11-20T10:00:00", end="2026-11-20T10:00:30"),
        row(7, step="batch", at="2026-11-20T10:00:00"),
        row(7, state="NODE_FAIL", at="2026-11-20T10:00:30", end="2026-11-20T10:20:00"),
        row(7, at="2026-11-20T10:20:01", end="2026-11-20T10:30:00"),
        row(7, at="2026-11-20T20:00:00", end="2026-11-20T20:30:00"),
    ]
    events = Taken()
    take(Asked(rows), tmp_path / "places", 1, events)
    runs = [event.body.record.restarts for event in events if event.kind == JOB_END]
    assert runs == [0, 1, 2, 0]  # the last is another job, whose id was used again


def test_a_file_is_read_with_what_is_no_row_in_it(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    lines = [
        HEAD,
        f"9_2|11|70000|FAILED|3:0|{TIMES}|n|4|||1-00:00:00",
        f"9_2.0|11.0||FAILED|3:0|{TIMES}|s|4|512M|00:01.5|",
        "broken|row",
        "12|12|70000|CANCELLED by 5|0:0|2026-11-20T10:00:00|Unknown|2026-11-20T10:05:00|a|b|0|||",
        "13|13|70000|CANCELLED by 5|0:0|2026-11-20T10:00:00|Unknown|2026-11-20T10:05:00|a|0|||",
        "",
    ]
    path.write_text("\n".join(lines))
    events = Taken()
    maker = ImportEventMaker("c1", redact)
    places = str(tmp_path / "places")
    assert is_sacct_file(str(path))
    taken = import_sacct_file(
        str(path), "c1", maker, NameResolver(), events.extend, places, lambda *_: None, zone=UTC
    )
    assert (taken.jobs, taken.steps, taken.passed_over) == (2, 1, 2)
    first, line, last = events[0].body.record, events[1].body.line, events[2].body.record
    assert (first.job_id, first.array_job_id, first.array_task) == (11, 9, "2")
    assert (first.exit_code, first.cpus, first.time_limit_s) == (3, 4, 86400)
    assert (line.step, line.max_rss_bytes, line.user_us) == ("0", 512 << 20, 1_500_000)
    assert (last.state, last.cancelled_by, last.start) == ("CANCELLED", 5, None)


def test_a_file_that_is_none_of_sacct_is_refused() -> None:
    with pytest.raises(SlurmError, match="not the output of sacct"):
        list(read_sacct_file(io.BytesIO(b"JobID|State\n1|COMPLETED\n")))
    with pytest.raises(SlurmError, match="not the output of sacct"):
        list(read_sacct_file(io.BytesIO(b"\xff\x00" * 100)))


class Sacct(CommandRunner):
    """Scripted sacct that knows three columns and writes these rows."""

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        super().__init__("c1", ClusterSettings())
        self.rows = rows

    def run(self, program: str, *arguments: str, **_: Any) -> bytes:
        assert (program, arguments) == ("sacct", ("--helpformat",))
        return b"DBIndex JobIDRaw JobName"

    def run_into(self, file: BinaryIO, program: str, *arguments: str, **_: Any) -> None:
        separator = arguments[arguments.index("--delimiter") + 1]
        assert arguments[-2:] == ("-o", "JobIDRaw,JobName,DBIndex")
        file.write("".join(f"{separator.join(parts)}\n" for parts in self.rows).encode())


def test_a_period_without_jobs_is_told_from_a_failed_query() -> None:
    asked = []

    class Idle(Sacct):
        def run_into(self, file: BinaryIO, program: str, *arguments: str, **options: Any) -> None:
            times = [arguments[arguments.index(option) + 1] for option in ("-S", "-E")]
            asked.append(times)
            if times[0] <= "2026-11-14":
                super().run_into(file, program, *arguments, **options)

    day = DAY, DAY + timedelta(days=1)
    assert SacctHistory(Idle([("7", "x", "9")]), "c1").has_jobs_near(*day)
    assert asked[0] == ["2026-11-19T00:00:00", "2026-11-22T00:00:00"]
    assert len(asked) == 4
    asked.clear()
    assert not SacctHistory(Idle([]), "c1").has_jobs_near(*day)
    assert len(asked) == 11


@given(st.lists(st.text(max_size=20), max_size=20))
@settings(deadline=None)
def test_texts_may_hold_anything_but_the_separator_that_nobody_knows(texts: list[str]) -> None:
    rows = [(str(number), text, str(number + 7)) for number, text in enumerate(texts)]
    history = SacctHistory(Sacct(rows), "c1")
    found = list(history.rows(DAY, DAY + timedelta(days=1)))
    assert [(one["jobidraw"], one["jobname"], one["dbindex"]) for one in found] == rows
    assert history.passed_over == 0


@given(st.dictionaries(st.sampled_from([*row(1), "userCPU", "ntasks", "suspended"]), st.text()))
@settings(deadline=None)
def test_hostile_rows_are_records_or_nothing(columns: dict[str, str]) -> None:
    people = NameResolver()
    record = parse_job_row(columns, people)
    if record is not None:
        assert record.submit is not None
    parse_step_row(columns, JobRecord(job_id=1), "c1")


@pytest.mark.parametrize(
    ("text", "us"),
    [("00:00.017", 17_000), ("1-02:03:04", 93_784_000_000), ("02:03", 123_000_000), ("", None)],
)
def test_spans(text: str, us: int | None) -> None:
    assert parse_clock_us(text) == us


@pytest.mark.parametrize(
    ("columns", "user"),
    [
        ({"user": "grace"}, "grace"),
        ({"user": "nobody"}, ""),
        ({"user": "4000123"}, ""),
        ({"uid": "0", "user": "grace"}, "root"),
        ({}, ""),
    ],
)
def test_a_uid_that_does_not_resolve_has_the_name_that_sacct_shows(
    columns: dict[str, str], user: str
) -> None:
    record = parse_job_row({**row(7), "uid": "4000123", **columns}, NameResolver())
    assert record is not None
    assert record.user == user


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ("billing=4,cpu=4,mem=16384M,node=1", "billing=4,cpu=4,mem=16G,node=1"),
        ("mem=1536M,bb/cray=1048576M", "mem=1.50G,bb/cray=1T"),
        ("mem=1537M", "mem=1537M"),
        ("mem=16G,gres/gpu=2048,mem=0M,mem=xM", "mem=16G,gres/gpu=2048,mem=0M,mem=xM"),
        ("", ""),
        ("mem=" + "9" * 400 + "M", "mem=" + "9" * 400 + "M"),
    ],
)
def test_memory_is_in_the_unit_that_sacct_prints(plain: str, text: str) -> None:
    record = parse_job_row({**row(7), "alloctres": plain}, NameResolver())
    assert record is not None
    assert record.tres_allocated == text


def test_sizes() -> None:
    assert [parse_size(text) for text in ("3268608", "1632K", "0.5M", "", "x")] == [
        *(3268608, 1632 * 1024, 512 * 1024),
        *(None, None),
    ]


def test_places_are_kept_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "imports.json")
    assert load_position(path, "a").done == ""
    save_position(path, ImportPosition(name="a", done="1"))
    save_position(path, ImportPosition(name="b", done="2"))
    save_position(path, ImportPosition(name="a", done="3"))
    assert (load_position(path, "a").done, load_position(path, "b").done) == ("3", "2")
    assert (tmp_path / "imports.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led by others' links")
def test_root_saves_a_place_for_stewards_user_and_follows_no_link_of_theirs(tmp_path: Path) -> None:
    victim, state = tmp_path / "victim", tmp_path / "state"
    victim.write_text("precious")
    state.mkdir(0o700)
    os.chown(state, 4001, 4002)
    for name in ("imports.json.new", "imports.json"):
        (state / name).symlink_to(victim)
        os.chown(state / name, 4001, 4002, follow_symlinks=False)
    path = str(state / "imports.json")
    with pytest.raises(AccountingError, match=r"cannot (read|write) \S*imports\.json"):
        save_position(path, ImportPosition(name="a", done="1"))
    (state / "imports.json").unlink()
    save_position(path, ImportPosition(name="a", done="1"))
    assert victim.read_text() == "precious"
    assert load_position(path, "a").done == "1"
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (4001, 4002)
