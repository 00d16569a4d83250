import contextlib
import os
import re
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pysqlite3 import dbapi2

from harness.events import at
from harness.jobs import Books, Life, lives, record, script
from steward.core.consumers import Rejected
from steward.core.events import JOB_END, JOB_SCRIPT, RUN_END, RUN_START, Event, JobFacts
from steward.core.records import JobRecord
from steward.core.sqlite import open_reader
from steward.jobs import Jobs
from steward.jobs.compression import decompress_json
from steward.slurm.job_states import FORGOTTEN


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def dump(path: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all tables; job numbers, which depend on the order of arrival, are replaced."""
    connection = open_reader(path)
    tables = {}
    for table in ("job", "run", "script"):
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        kept = [column for column in columns if column not in {"number", "job", "said", "told"}]
        owner = "number" if table == "job" else "job"
        query = f"SELECT {', '.join('t.' + name for name in kept)}, j.first_submit, j.uid "
        query += f"FROM {table} t LEFT JOIN job j ON j.number = t.{owner}"
        tables[table] = sorted(connection.execute(query).fetchall(), key=repr)
    connection.close()
    return tables


def apply_all(directory: str, events: list[Event], sizes: list[int]) -> Books:
    books = Books(Path(directory))
    begin = 0
    for number in range(len(events)):
        size = sizes[number % len(sizes)]
        if begin >= len(events):
            break
        books.take(*events[begin : begin + size])
        begin += size
    return books


def truth_holds(books: Books, all_lives: list[Life]) -> None:
    jobs = Jobs(books.path)
    for life in all_lives:
        if life.script is None:
            continue
        job = jobs.find_by_scripts([life.script.key])[life.script.key]
        assert job.verified == life.is_known
        assert job.job_id == life.job_id
        if life.is_known:
            assert job.record.uid == life.uid
            assert abs((job.first_submit - at(life.begin)).total_seconds()) <= 2
    jobs.close()


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.data())
def test_facts_in_any_order_give_the_same_books(
    tmp_path_factory: pytest.TempPathFactory, all_lives: list[Life], data: st.DataObject
) -> None:
    events = [event for life in all_lives for event in life.events]
    shuffled = data.draw(st.permutations(events))
    repeated = shuffled + data.draw(st.lists(st.sampled_from(events), max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        in_order = apply_all(f"{base}/a", events, [1])
        any_order = apply_all(f"{base}/b", repeated, sizes)
        at_once = apply_all(f"{base}/c", shuffled, [len(shuffled)])
        assert dump(in_order.path) == dump(any_order.path) == dump(at_once.path)
        for books in (in_order, any_order, at_once):
            truth_holds(books, all_lives)
            owners = books.owner_of()
            for life in all_lives:
                if life.script is not None and life.is_known:
                    assert owners[life.script.key] == life.uid
            books.consumer.close()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(lives())
def test_as_things_happen_no_script_is_ever_said_to_be_somebody_elses(
    tmp_path_factory: pytest.TempPathFactory,
    all_lives: list[Life],
) -> None:
    owners = {life.script.key: life.uid for life in all_lives if life.script is not None}
    events = [event for life in all_lives for event in life.events]
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        books = apply_all(base, sorted(events, key=lambda event: event.seen_at), [1])
        for event in books.identities():
            assert event.body.record.uid == owners[event.body.script_key]
        keys = [event.key for event in books.said]
        assert len(set(keys)) == len(keys)
        books.consumer.close()


def test_a_script_is_bound_when_its_record_comes_and_said_again_when_it_ends(books: Books) -> None:
    kept = script(7, 0.4, claimed_name="claimed")
    assert books.take(kept) == []
    (bound,) = books.take(record(7, 0, name="real", account="a"))
    assert (bound.why, bound.script_key, bound.job_id) == ("bound", kept.key, 7)
    assert (bound.first_submit, bound.record.name) == (at(0), "real")
    assert books.take(record(7, 0, "RUNNING", seen=5, start=at(4), name="real", account="a")) == []
    over = record(7, 0, "COMPLETED", seen=9, end=8, name="real", account="a", source="jobcomp")
    (ended,) = books.take(over)
    assert (ended.why, ended.record.end, ended.record.state) == ("ended", at(8), "COMPLETED")
    assert ended.record.start == at(4)
    assert books.take(over) == []


def test_whatever_comes_again_says_nothing_again(books: Books) -> None:
    events = [script(7, 0.4), record(7, 0), record(7, 0, "COMPLETED", seen=9, end=8)]
    books.take(*events)
    said = len(books.said)
    for event in events:
        books.take(event)
    assert len(books.said) == said == 2


def test_a_job_without_a_script_is_listed_and_nothing_is_said(books: Books) -> None:
    assert books.take(record(7, 0, batch=False), record(7, 0, "COMPLETED", seen=9, end=8)) == []
    (job,) = Jobs(books.path).find("7")
    assert job.ended
    assert job.script_key == ""


def test_a_uid_that_resolves_later_is_said_as_renamed_and_the_first_name_stays(
    books: Books,
) -> None:
    books.take(script(7, 0.4), record(7, 0, user=""))
    (renamed,) = books.take(record(7, 0, "RUNNING", seen=5, user="ada"))
    assert (renamed.why, renamed.record.user) == ("renamed", "ada")
    assert books.take(record(7, 0, "RUNNING", seen=50, user="eve")) == []
    assert Jobs(books.path).find("7")[0].record.user == "ada"


def test_a_changed_account_is_said_as_updated_and_so_is_its_way_back(books: Books) -> None:
    books.take(script(7, 0.4), record(7, 0, account="a"))
    (there,) = books.take(record(7, 0, "RUNNING", seen=5, account="b"))
    (back,) = books.take(record(7, 0, "RUNNING", seen=6, account="a"))
    assert (there.why, back.why) == ("updated", "updated")
    assert len({event.key for event in books.said}) == 3


def test_a_reused_id_makes_another_job_and_keeps_both_scripts(books: Books) -> None:
    first, second = script(7, 0.4), script(7, 500.2)
    books.take(first, record(7, 0, uid=11), record(7, 0, "COMPLETED", seen=9, end=8, uid=11))
    assert books.take(second) == []
    jobs = Jobs(books.path)
    assert [(job.verified, job.record.uid) for job in jobs.find("7")] == [(False, None), (True, 11)]
    (bound,) = books.take(record(7, 500, uid=12))
    assert (bound.script_key, bound.record.uid) == (second.key, 12)
    assert [job.script_key for job in jobs.find("7")] == [second.key, first.key]


def test_a_script_is_not_given_to_the_former_owner_of_the_id(books: Books) -> None:
    # alice's job had no script; bob's is seen in the spool before Slurm is asked about it.
    books.take(record(7, 0, "COMPLETED", seen=9, end=8, uid=11))
    books.take(script(7, 3600.5))
    assert [job.verified for job in Jobs(books.path).find("7")] == [False, True]
    (bound,) = books.take(record(7, 3600, uid=12))
    assert bound.record.uid == 12


def test_a_script_whose_time_was_changed_is_bound_once_slurm_still_shows_the_job(
    books: Books,
) -> None:
    # StateSaveLocation was moved to another disk by a copy that did not keep times.
    copied = script(7, 7200.5)
    books.take(record(7, 0, seen=1), copied)
    assert books.said == []
    (bound,) = books.take(record(7, 0, "RUNNING", seen=7300))
    assert (bound.script_key, bound.first_submit) == (copied.key, at(0))


def test_what_a_look_at_the_past_says_does_not_prove_that_the_job_is_still_there(
    books: Books,
) -> None:
    books.take(record(7, 0, "RUNNING", seen=9000, source="import", uid=11), script(7, 7200.5))
    assert books.said == []


def test_a_requeued_job_is_one_job_with_two_runs(books: Books) -> None:
    kept = script(7, 0.4)
    books.take(
        kept,
        record(7, 0, whole=True, submit_line="sbatch x"),
        record(7, 0, "FAILED", seen=50, end=45),
        record(7, 0, "FAILED", seen=71, end=70),
        record(7, 0, restarts=1, seen=71, state="COMPLETING"),
        record(7, 70, restarts=1, seen=75),
    )
    jobs = Jobs(books.path)
    (job,) = jobs.find("7")
    assert (job.first_submit, job.ended, job.record.restarts) == (at(0), False, 1)
    assert job.record.submit_line == "sbatch x"
    first, second = jobs.list_runs(job)
    assert (first.record.end, first.late_end, first.ended) == (at(45), at(70), True)
    assert (second.submit, second.late_end, second.ended) == (at(70), None, False)
    (ended,) = books.take(record(7, 70, "COMPLETED", seen=99, end=98, restarts=1))
    assert (ended.why, ended.script_key, ended.record.end) == ("ended", kept.key, at(98))


def test_a_first_look_at_a_later_run_means_the_newest_script(books: Books) -> None:
    old, kept = script(7, 0.4), script(7, 1000.4)
    books.take(old, kept)
    (bound,) = books.take(record(7, 4000, restarts=2, uid=11))
    assert (bound.script_key, bound.first_submit) == (kept.key, at(1000))


def test_a_lasting_id_joins_runs_and_keeps_jobs_apart(books: Books) -> None:
    books.take(
        record(7, 0, original_sluid="s0ZXM7YY8HFA00", sluid="s0ZXM7YY8HFA00"),
        record(7, 90, original_sluid="s0ZXM7YY8HFA00", sluid="s0ZXM7YY8HFB00", restarts=1),
        record(7, 200, original_sluid="s0ZXM7YY8HFC00", sluid="s0ZXM7YY8HFD00", restarts=1),
    )
    jobs = Jobs(books.path)
    assert [job.first_submit for job in jobs.find("7")] == [at(200), at(0)]
    assert [job.first_submit for job in jobs.find("s0ZXM7YY8HFB00")] == [at(0)]


def test_two_clusters_do_not_mix(books: Books) -> None:
    books.take(script(7, 0.4, cluster="c1"), script(7, 0.4, cluster="c2"))
    (bound,) = books.take(record(7, 0, cluster="c2", uid=12))
    jobs = Jobs(books.path)
    assert bound.record.uid == 12
    assert [job.verified for job in jobs.find("7", "c1") + jobs.find("7", "c2")] == [False, True]


def test_a_burst_of_first_scripts_is_written_as_any_other(tmp_path: Path) -> None:
    events = [script(number, number / 3, claimed_name=f"n{number}") for number in range(1, 9)]
    alone, twice = Books(tmp_path / "alone"), Books(tmp_path / "twice")
    alone.take(*events)
    twice.take(*events, *events)  # seen twice in a batch: not the short way
    assert dump(alone.path) == dump(twice.path)
    assert len(Jobs(alone.path).find("3")) == 1


def test_a_lasting_id_that_is_a_later_runs_own_says_nothing(books: Books) -> None:
    books.take(
        record(7, 0, original_sluid="s0ZXM7YY8HFA00", sluid="s0ZXM7YY8HFA00"),
        record(7, 90, original_sluid="s0ZXM7YY8HFB00", sluid="s0ZXM7YY8HFB00", restarts=1),
    )
    (job,) = Jobs(books.path).find("7")
    assert job.record.original_sluid == "s0ZXM7YY8HFA00"


def test_the_cursor_moves_with_the_effect_or_not_at_all(books: Books) -> None:
    def fail(_events: object) -> None:
        raise OSError("the journal is away")

    assert books.consumer.cursor() == 0
    unreadable = broken(submit=None)
    with pytest.raises(Rejected):
        books.consumer.apply([script(7, 0.4), unreadable], 2, fail)
    assert (books.consumer.cursor(), Jobs(books.path).find("7")) == (0, [])
    books.consumer.apply([script(7, 0.4), record(7, 0)], 2, fail)
    assert (books.consumer.cursor(), len(Jobs(books.path).find("7"))) == (2, 1)
    with pytest.raises(OSError, match="away"):
        books.consumer.tick(fail)
    said: list[Event] = []
    books.consumer.tick(said.extend)
    assert (books.consumer.cursor(), len(said)) == (2, 1)


def test_what_was_decided_once_is_said_so_however_much_more_is_known_after_a_kill(
    books: Books,
) -> None:
    def fail(_events: object) -> None:
        raise OSError("the journal is away")

    first = record(7, 0, "COMPLETED", seen=9, start=at(2), end=8, exit_code=0)
    books.consumer.apply([first], 1, fail)
    books.consumer.close()
    again = Books(books.directory)
    other = record(7, 0, "COMPLETED", seen=9, start=at(2), end=8, exit_code=3, source="jobcomp")
    again.take(first, other)
    said = [
        (event.kind, event.body.record.exit_code, event.body.correction) for event in again.said
    ]
    assert said == [(RUN_START, 0, False), (RUN_END, 0, False), (RUN_END, 3, True)]


def broken(**fields: Any) -> Event:
    body = JobFacts(record=JobRecord(**{"job_id": 7, "submit": at(0), **fields}))
    return Event(
        kind=JOB_END, cluster="c1", key="k", at=at(0), seen_at=at(0), source="test", body=body
    )


@pytest.mark.parametrize(
    "event",
    [
        broken(job_id=0),
        broken(job_id=2**53),
        broken(submit=None),
        broken(uid=-5),
        broken(restarts=-1),
        script(7, 0, claimed_name="x").__class__(
            kind=JOB_SCRIPT,
            cluster="c1",
            key="script:7:9",
            at=at(0),
            seen_at=at(0),
            source="spool",
            body=JobRecord(job_id=7),
        ),
    ],
)
def test_a_body_that_cannot_be_is_rejected_by_name_and_leaves_no_trace(
    books: Books, event: Event
) -> None:
    with pytest.raises(Rejected) as caught:
        books.take(script(8, 0.5), event)
    assert caught.value.event is event
    assert Jobs(books.path).find("8") == []


def test_an_event_that_never_said_when_it_was_submitted_is_placed_by_its_own_time(
    books: Books,
) -> None:
    imported = record(7, 0, seen=0.7, source="import", state="PENDING")
    body = JobFacts(record=JobRecord(job_id=7, uid=11, user="ada"))
    imported = type(imported)(
        **{name: getattr(imported, name) for name in imported.__struct_fields__} | {"body": body}
    )
    (bound,) = books.take(script(7, 0.7), imported)
    assert (bound.first_submit, bound.record.uid) == (at(0), 11)


def test_hostile_text_is_only_text(books: Books) -> None:
    name = "x'); DROP TABLE job; --\n\x00\x1b[31m" + "é" * 300
    books.take(script(7, 0.4, claimed_name=name))
    books.take(record(8, 0, name=name, account="*", partition="%"))
    jobs = Jobs(books.path)
    assert jobs.find("7")[0].record.name == name
    assert jobs.find("8")[0].record.name == name


def test_the_database_is_its_owners_alone(books: Books) -> None:
    assert os.stat(books.path).st_mode & 0o777 == 0o600


def test_a_run_that_slurmctld_forgot_stays_forgotten(books: Books) -> None:
    """slurmctld was killed and reports nothing more about the run: no later batch adds it again."""
    gone = record(7, 20, "UNKNOWN", restarts=1, seen=25, reason=FORGOTTEN)
    for event in (
        record(7, 0),
        record(7, 0, "REQUEUED", seen=21, end=20, start=at(20), source="jobcomp"),
        record(7, 20, restarts=1, seen=22, comment="of nobody", whole=True),
        msgspec.structs.replace(gone, kind=JOB_END),
        record(7, 0, "COMPLETED", seen=36, end=35, start=at(29), source="jobcomp"),
        record(7, 0, "COMPLETED", seen=37, end=35, start=at(29)),
    ):
        books.take(event)
    (job,) = Jobs(books.path).find("7")
    assert (job.ended, job.record.state, job.record.restarts) == (True, "COMPLETED", 0)
    # No purge would find it: its text is forgotten at once.
    with contextlib.closing(sqlite3.connect(books.path)) as database:
        rows = database.execute("SELECT facts FROM run").fetchall()
    stored = b"".join(decompress_json(facts) for (facts,) in rows)
    assert (b"ada" in stored, b"of nobody" in stored) == (True, False)


def test_a_replay_writes_no_row_of_a_job_or_run_that_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[Any] = []
    connect = dbapi2.connect

    def connect_and_keep(*arguments: Any, **options: Any) -> Any:
        connections.append(connect(*arguments, **options))
        return connections[-1]

    with monkeypatch.context() as patch:
        patch.setattr(dbapi2, "connect", connect_and_keep)
        books = Books(tmp_path)
    events = [
        *(script(job_id, 0.5) for job_id in (7, 8, 9)),
        *(record(job_id, 0, "RUNNING", start=at(2), seen=3) for job_id in (7, 8)),
        record(7, 0, "COMPLETED", start=at(2), end=20, seen=21),
    ]
    books.take(*events)
    written: Counter[str] = Counter()

    def count(statement: str) -> None:
        match = re.match(r"(?:INSERT INTO|UPDATE|DELETE FROM) (job|run|script)\b", statement)
        written.update([match[1]] if match else [])

    for connection in connections:
        connection.set_trace_callback(count)
    before = dump(books.path)
    books.take(*events)
    for event in events:
        books.take(event)
    assert written == {}
    assert dump(books.path) == before
    # A later poll that shows the same changes until when the run was shown, and nothing of the job.
    books.take(record(8, 0, "RUNNING", start=at(2), seen=60))
    assert written == {"run": 1}
    books.take(record(8, 0, "RUNNING", start=at(2), seen=90, name="renamed"))
    # The script's row has the identity that was published.
    assert written == {"run": 2, "job": 1, "script": 1}
