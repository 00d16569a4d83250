"""Runs and steps become accounting lines, and events report each once."""

from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from harness.archive import purge
from harness.events import NOON, at, us
from harness.jobs import read_json, record, script
from harness.steps import STEP, Clocked, books, done, ended, exited, launched, lines, running
from steward.core.consumers import Rejected
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_ACCOUNTED,
    STEP_LAUNCH,
    STEP_USAGE,
    Event,
)
from steward.core.records import UsageLine
from steward.core.sqlite import open_database
from steward.core.usage import AccountedStep, AccountingExpiry, StepUsage
from steward.jobs import Jobs
from steward.jobs.compression import decompress_json
from steward.jobs.tables import MIGRATIONS

__all__ = ["books"]


def test_a_run_has_the_sum_of_its_steps_and_each_step_a_line(books: Clocked) -> None:
    books.take(running(), *STEP, launched(7, 2.5), exited(7, 2.5), ended(7, 2.5, 19), done())
    found = lines(books)
    assert list(found) == ["0:", "0:batch", "0:0"]
    run, batch, step = found.values()
    assert (run.state, run.start_us, run.end_us) == ("COMPLETED", us(2), us(20))
    assert (run.user_us, run.system_us, run.tasks) == (2_000_000, 1_000_000, 2)
    assert (step.name, step.state, step.start_us, step.end_us) == (
        "prog",
        "COMPLETED",
        us(3),
        us(10),
    )
    assert (step.max_rss_bytes, step.max_rss_task, step.peak_bytes) == (5000, 0, 7000)
    assert (step.tres_allocated, step.user, step.doubts) == ("cpu=2,mem=1G,node=1", "ada", "")
    assert (batch.name, batch.peak_bytes, batch.peak_allocated_bytes) == ("batch", 5000, 1 << 30)
    assert (run.max_rss_node, run.peak_bytes, run.peak_node) == ("n1", 7000, "n1")


def test_each_start_end_and_launch_is_said_once(books: Clocked) -> None:
    facts = [running(), *STEP, done()]
    for event in (*facts, *facts):
        books.take(event)
    once = {RUN_START: 1, STEP_LAUNCH: 1, STEP_USAGE: 1, RUN_END: 1}
    assert Counter(event.kind for event in books.said) == once
    (launch,) = books.told(STEP_LAUNCH)
    assert (launch.at, launch.body.start.name) == (at(3), "prog")
    assert (launch.body.tasks, launch.body.end, launch.body.ended_us) == ((), None, None)
    (usage,) = books.told(STEP_USAGE)
    body: StepUsage = usage.body
    assert (body.step, body.node, body.launched_us, body.ended_us) == ("0", "n1", us(3), us(10))
    assert (body.first_submit, body.restarts, len(body.tasks)) == (at(0), 0, 1)
    assert usage.at == at(10)
    assert (body.announced, body.correction) == (True, False)


def test_a_launch_that_is_over_when_it_is_first_known_has_no_event_of_its_begin(
    books: Clocked,
) -> None:
    books.take(running(), *STEP)
    assert books.told(STEP_LAUNCH) == []
    (usage,) = books.told(STEP_USAGE)
    assert not usage.body.announced


def test_a_launch_that_turns_out_to_be_another_runs_is_withdrawn_while_it_runs(
    books: Clocked,
) -> None:
    books.take(running())
    books.take(launched(7, 6, "0"))
    books.take(done(state="REQUEUED", end=5))
    books.take(running(submit=5, restarts=1, start=at(5)))
    first, gone, again = books.told(STEP_LAUNCH)
    assert (first.body.restarts, first.body.withdrawn) == (0, False)
    assert (gone.body.restarts, gone.body.withdrawn, gone.body.correction) == (0, True, True)
    assert (again.body.restarts, again.body.withdrawn, again.body.correction) == (1, False, False)
    assert len({event.key for event in books.said}) == len(books.said)
    books.take(ended(7, 6, 19, "0"))
    (usage,) = books.told(STEP_USAGE)
    assert (usage.body.restarts, usage.body.correction, usage.body.announced) == (1, False, True)


def test_a_step_of_a_job_that_has_its_nodes_says_that_it_began(books: Clocked) -> None:
    books.take(record(7, 0), launched(7, 3.25))
    assert books.said == []
    books.take(record(7, 0, "CONFIGURING", seen=3, nodelist="n1"))
    (start,) = books.told(RUN_START)
    assert (start.at, start.body.record.start) == (at(3.25), at(3.25))
    books.take(running(start=at(5.5), nodelist="n1"))
    (_, better) = books.told(RUN_START)
    assert better.body.correction
    assert (better.body.record.start, better.key == start.key) == (at(5.5), False)
    books.take(done(start=at(5.5), nodelist="n1"))
    assert len(books.told(RUN_START)) == 2


def test_what_sources_disagree_on_is_corrected(books: Clocked) -> None:
    books.take(running(), done(exit_code=1, state="FAILED"))
    books.take(done(exit_code=1, state="FAILED", suspended_s=0, whole=True))
    assert len(books.told(RUN_END)) == 1
    books.take(done(exit_code=2, state="FAILED", source="jobcomp"))
    ends = books.told(RUN_END)
    assert [(end.body.correction, end.body.record.exit_code) for end in ends] == [
        (False, 1),
        (True, 2),
    ]
    assert len({end.key for end in ends}) == 2


def test_a_job_that_was_cancelled_while_it_waited_never_began(books: Clocked) -> None:
    books.take(record(7, 0, start=at(500)))
    books.take(record(7, 0, "FAILED", end=9, start=at(9)))
    assert [event.kind for event in books.said] == [RUN_END]
    assert lines(books)["0:"].start_us == 0


def test_a_requeued_job_has_a_start_and_an_end_for_each_run(books: Clocked) -> None:
    books.take(running(), launched(7, 3), exited(7, 3), ended(7, 3, 9))
    again: dict[str, Any] = {"restarts": 1, "nodelist": "n2"}
    # Slurm shows the new count with the old submit time while the run completes.
    books.take(record(7, 0, "RUNNING", seen=29, start=at(2), **again))
    books.take(running(7, 30, **again), launched(7, 33, node="n2"))
    assert books.told(RUN_END) == []
    books.tick(200)
    (end,) = books.told(RUN_END)
    assert (end.body.record.state, end.at, end.body.correction) == ("REQUEUED", at(30), False)
    books.take(done(end=28, state="REQUEUED"))
    books.take(done(7, 30, 40, **again), exited(7, 33, node="n2"), ended(7, 33, 39, node="n2"))
    found = lines(books)
    assert list(found) == ["0:", "0:batch", "1:", "1:batch"]
    assert [line.is_latest for line in found.values()] == [0, 0, 1, 1]
    assert found["0:batch"].end_us == us(9)
    counts = Counter((event.kind, event.body.restarts) for event in books.said)
    assert counts[RUN_START, 0] == counts[RUN_START, 1] == 1
    assert [end.body.correction for end in books.told(RUN_END)] == [False, True, False]


def test_a_requeued_job_that_is_gone_is_over(books: Clocked) -> None:
    requeued = done(end=9, state="REQUEUED", source="jobcomp")
    books.take(running(), requeued)
    jobs = Jobs(books.path)
    assert [job.state for job in jobs.list_unfinished_records("c1")] == ["REQUEUED"]
    books.take(record(7, 0, "UNKNOWN", seen=15, start=at(2), nodelist="n[1-3]"))
    assert jobs.list_unfinished_records("c1") == []
    first, second = books.told(RUN_END)
    assert (first.body.record.state, second.body.record.state) == ("REQUEUED", "UNKNOWN")
    assert (second.body.correction, second.body.record.end) == (True, at(9))
    assert [line.job_id for line in jobs.list_runs_without_end()] == [7]
    # Another run of it says that it was not.
    books.take(running(7, 20, restarts=1, start=at(22)))
    assert books.told(RUN_END)[-1].body.record.state == "REQUEUED"
    assert [job.restarts for job in jobs.list_unfinished_records("c1")] == [1]
    assert jobs.list_runs_without_end() == []
    jobs.close()


def test_a_resized_job_has_a_line_for_each_size(books: Clocked) -> None:
    books.take(running(), launched(7, 2.5), launched(7, 4, "0"), exited(7, 4, step="0"))
    books.take(ended(7, 4, 8, "0"))
    piece: dict[str, Any] = {
        "nodelist": "n[1-3]",
        "start": at(2),
        "source": "jobcomp",
        "tres_allocated": "cpu=6",
    }
    books.take(record(7, 0, "RESIZING", seen=10, end=3000, **piece))
    books.take(record(7, 0, "RUNNING", seen=12, start=at(2), nodelist="n1"))
    books.take(launched(7, 12, "1"), exited(7, 12, step="1"), ended(7, 12, 14, "1"))
    books.take(exited(7, 2.5), ended(7, 2.5, 19), done(nodelist="n1"))
    found = lines(books)
    assert list(found) == [f"0/{us(10)}:", f"0/{us(10)}:batch", f"0/{us(10)}:0", "0:", "0:1"]
    former, current = found[f"0/{us(10)}:"], found["0:"]
    assert (former.state, former.start_us, former.end_us) == ("RESIZING", us(2), us(10))
    assert (former.nodelist, former.is_latest, former.user) == ("n[1-3]", 0, "ada")
    assert (current.start_us, current.end_us, current.nodelist) == (us(10), us(20), "n1")
    pieces = [(event.body.piece_end, event.body.record.start) for event in books.told(RUN_END)]
    assert pieces == [(at(10), at(2)), (None, at(2))]
    assert len(books.told(RUN_START)) == 1


def test_suspensions_are_said_one_by_one(books: Clocked) -> None:
    books.take(running())
    halted: dict[str, Any] = {"start": at(2), "whole": True}
    first = record(7, 0, "SUSPENDED", seen=6, suspended_at=at(5), **halted)
    resumed = record(7, 0, "RUNNING", seen=9, suspended_at=at(8), suspended_s=3, **halted)
    books.take(first, resumed)
    books.take(resumed, first)
    told = [(event.at, event.body.record.state) for event in books.told(RUN_SUSPEND)]
    assert told == [(at(5), "SUSPENDED"), (at(8), "RUNNING")]
    books.take(done())
    assert lines(books)["0:"].suspended_s == 3


@pytest.mark.parametrize("is_late", [False, True], ids=["told in time", "told afterwards"])
def test_a_step_is_not_longer_for_its_runs_suspension(books: Clocked, is_late: bool) -> None:
    halted: dict[str, Any] = {"start": at(2), "whole": True}
    resumed = record(7, 0, "RUNNING", seen=9, suspended_at=at(8), suspended_s=3, **halted)
    again = record(7, 0, "RUNNING", seen=16, suspended_at=at(15), suspended_s=5, **halted)
    books.take(running())
    for step, begin, end in (("batch", 2, 20), ("0", 3, 4), ("1", 4, 9), ("2", 9, 19)):
        books.take(
            launched(7, begin, step), exited(7, begin, step=step), ended(7, begin, end, step)
        )
    told = [resumed, again]
    steps = [*told, done(suspended_s=5)] if not is_late else [done(suspended_s=5), *told]
    for one in steps:
        books.take(one)
    found = lines(books)
    suspended = {step: found[f"0:{step}"].suspended_s for step in ("", "batch", "0", "1", "2")}
    assert suspended == {"": 5, "batch": 5, "0": 0, "1": 3, "2": 2}


def test_where_nobody_told_when_a_step_of_all_the_time_was_suspended(books: Clocked) -> None:
    books.take(running())
    for step, begin, end in (("batch", 2, 20), ("0", 3, 12)):
        books.take(
            launched(7, begin, step), exited(7, begin, step=step), ended(7, begin, end, step)
        )
    books.take(done(suspended_s=5))
    found = lines(books)
    assert [found[f"0:{step}"].suspended_s for step in ("", "batch", "0")] == [5, 5, 0]


def test_a_purge_forgets_the_names_of_programs(books: Clocked) -> None:
    kept = script(7, 0.4)
    launch = launched(7, 3, "0", name="confidential-prog")
    books.take(kept, running(name="confidential-job"), launch)
    books.take(exited(7, 3, step="0"), ended(7, 3, 9, "0"), done(name="confidential-job"))
    assert lines(books)["0:0"].name == "confidential-prog"
    books.take(purge(kept))
    found = lines(books)
    assert (found["0:"].name, found["0:0"].name, found["0:0"].user_us) == ("", "", 1_000_000)
    books.take(launched(7, 4, "1", name="confidential-late"))
    assert lines(books)["0:1"].name == ""
    data = b"".join(map(decompress_json, read_json(books)))
    books.consumer.close()
    data += b"".join(path.read_bytes() for path in books.directory.iterdir())
    assert b"confidential" not in data


def test_another_books_tell_of_steps_that_we_do_not_know(books: Clocked) -> None:
    def accounted(step: str, user_us: int) -> Event:
        theirs = UsageLine(
            cluster="x",
            job_id=7,
            label="7",
            step=step,
            name="a",
            user_us=user_us,
            state="COMPLETED",
            start_us=us(4),
            end_us=us(5),
            source="slurmdbd",
        )
        body = AccountedStep(job_id=7, submit=at(0), line=theirs)
        return Event(
            kind=STEP_ACCOUNTED,
            cluster="c1",
            key=f"a:{step}",
            at=at(5),
            seen_at=at(90),
            source="slurmdbd",
            body=body,
        )

    books.take(accounted("0", 7), accounted("1", 8))
    books.take(running(), *STEP, done())
    found = lines(books)
    assert (found["0:0"].user_us, found["0:0"].source) == (1_000_000, "")
    assert (found["0:1"].user_us, found["0:1"].source, found["0:1"].cluster) == (
        8,
        "slurmdbd",
        "c1",
    )
    assert found["0:"].user_us == 1_000_008
    with pytest.raises(Rejected):
        books.take(accounted("", 1))


def test_old_books_are_forgotten_and_scripts_are_not(books: Clocked) -> None:
    kept = script(7, 0.4)
    books.take(kept, running(), *STEP, done(), running(8), done(8), running(9))
    jobs = Jobs(books.path)
    assert jobs.count_expirable_jobs(at(60)) == 2
    body = AccountingExpiry(before=at(60))
    books.take(
        Event(
            kind=ACCOUNTING_EXPIRE,
            cluster="c1",
            key="x",
            at=NOON,
            seen_at=NOON,
            source="t",
            body=body,
        )
    )
    assert jobs.count_expirable_jobs(at(60)) == 0
    assert jobs.find("8") == []
    (job,) = jobs.find("7")
    assert (job.record.state, jobs.find_script(job) is not None) == ("COMPLETED", True)
    assert (jobs.list_lines(job), jobs.list_launches(job)) == ([], [])
    # The id is used again; forgotten runs stay so, and nothing is reported twice.
    said = len(books.said)
    books.take(running(7, 5000))
    assert [event.kind for event in books.said[said:]] == [RUN_START]
    assert len(lines(books)) == 1
    assert jobs.list_lines(jobs.find("7")[1]) == []


def test_runs_of_a_time_before_there_were_lines_get_theirs_in_silence(books: Clocked) -> None:
    books.take(running(), done(), running(8))
    books.consumer.close()
    with closing(open_database(books.path, MIGRATIONS)) as db:
        db.execute("DELETE FROM line")
        db.execute("UPDATE run SET told = NULL")
    again = Clocked(books.directory)
    again.tick(50)
    assert set(lines(again)) == {"0:"}
    assert [(event.kind, event.body.job_id) for event in again.said] == [(RUN_START, 8)]
    assert again.told(RUN_END) == []
    again.take(done())
    assert len(again.said) == 1
