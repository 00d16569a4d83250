from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.events import NOON, at
from harness.jobs import Books, record, script
from steward.core.access import VisibleJobs
from steward.core.errors import UsageError
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.jobs import Job, JobFilter, JobNameError, Jobs, ListPosition
from steward.jobs.filters import normalize_patterns

DAY_S = 86_400


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


@pytest.fixture
def jobs(books: Books) -> Iterator[Jobs]:
    """Open jobs.db read-only, with seven jobs of two users on two clusters."""
    books.take(
        script(1, 10.2),
        record(1, 10, uid=11, user="ada", account="physics", name="relax-01", partition="main"),
        record(2, 20, uid=11, user="ada", account="physics", name="relax-02", partition="main,gpu"),
        record(3, 30, uid=12, user="bob", account="physics", name="fold", partition="gpu"),
        record(3, 30, "FAILED", seen=40, end=39, uid=12, source="jobcomp"),
        record(4, 40, uid=12, user="bob", account="chem", name="Relax", batch=False),
        record(5, 50, uid=13, user="", account="chem", name="[x]"),
        script(6, 60.5, claimed_name="relax-claimed"),
        record(1, 70, uid=21, user="eve", account="physics", name="far", cluster="c2"),
    )
    found = Jobs(books.path)
    yield found
    found.close()


def listed(jobs: Jobs, wanted: JobFilter) -> list[int]:
    return [job.job_id if job.cluster == "c1" else -job.job_id for job in jobs.list(wanted)]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (JobFilter(), [-1, 6, 5, 4, 3, 2, 1]),
        (JobFilter(clusters=("c2",)), [-1]),
        (JobFilter(clusters=("c1", "c2"), accounts=("physics",)), [-1, 3, 2, 1]),
        (JobFilter(users=("ada",)), [2, 1]),
        (JobFilter(users=("ada", "13")), [5, 2, 1]),
        (JobFilter(users=("nobody",)), []),
        (JobFilter(partitions=("gpu",)), [3, 2]),
        (JobFilter(partitions=("gp",)), []),
        (JobFilter(names=("relax*",)), [6, 2, 1]),
        (JobFilter(names=("[!rf]elax", "fold")), [4, 3]),
        (JobFilter(names=("[[]x]",)), [5]),
        (JobFilter(states=("failed",)), [3]),
        (JobFilter(jobs=("3", "5_1", "4")), [4, 3]),
        (JobFilter(since=at(20), until=at(40)), [3, 2]),
        (JobFilter(with_script=True), [6, 1]),
        (JobFilter(with_script=False, users=("ada",)), [2]),
        (JobFilter(scopes={}), []),
        (JobFilter(scopes={"c1": VisibleJobs(everything=True)}), [6, 5, 4, 3, 2, 1]),
        (JobFilter(scopes={"c1": VisibleJobs(uid=11)}), [2, 1]),
        (JobFilter(scopes={"c1": VisibleJobs(uid=11, user="other")}), []),
        (JobFilter(scopes={"c1": VisibleJobs(uid=13, accounts=frozenset({"chem"}))}), [5, 4]),
        (
            JobFilter(scopes={"c1": VisibleJobs(uid=11), "c2": VisibleJobs(everything=True)}),
            [-1, 2, 1],
        ),
        (JobFilter(scopes={"c1": VisibleJobs()}), []),
        (JobFilter(scopes={"c1": VisibleJobs(uid=11)}, users=("bob",)), []),
    ],
)
def test_a_filter_lists_what_it_says(jobs: Jobs, wanted: JobFilter, ids: list[int]) -> None:
    assert listed(jobs, wanted) == ids


def test_a_name_that_is_none_is_an_error(jobs: Jobs) -> None:
    with pytest.raises(JobNameError):
        jobs.list(JobFilter(jobs=("1 OR 1",)))


NUMBERS = tuple(str(number) for number in range(3, 5000))
MANY = {
    "ids": (JobFilter(jobs=NUMBERS), [6, 5, 4, 3]),
    "tasks": (JobFilter(jobs=("3", *(f"9_{number}" for number in range(1000)))), [3]),
    "components": (JobFilter(jobs=("3", *(f"9+{number}" for number in range(1000)))), [3]),
    "SLUIDs": (JobFilter(jobs=("3", *(f"s{number:013d}" for number in range(1000)))), [3]),
    "users": (JobFilter(users=("ada", *(f"x{number}" for number in range(5000)))), [2, 1]),
    "uids": (JobFilter(users=("13", *map(str, range(1000, 5000)))), [5]),
    "clusters": (JobFilter(clusters=("c2", *NUMBERS)), [-1]),
    "accounts": (JobFilter(accounts=("chem", *NUMBERS)), [5, 4]),
    "names": (JobFilter(names=("fo*", *NUMBERS[:999])), [3]),
    "partitions": (JobFilter(partitions=("gpu", *NUMBERS[:999])), [3, 2]),
    "coordinated": (
        JobFilter(scopes={"c1": VisibleJobs(uid=13, accounts=frozenset(("chem", *NUMBERS)))}),
        [5, 4],
    ),
    "clusters seen": (
        JobFilter(scopes={f"c{number}": VisibleJobs(everything=True) for number in range(2, 2000)}),
        [-1],
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_a_filter_of_very_many_is_answered(jobs: Jobs, what: str) -> None:
    wanted, ids = MANY[what]
    assert listed(jobs, wanted) == ids


@pytest.mark.parametrize(
    "wanted",
    [
        JobFilter(names=NUMBERS[:1001]),
        JobFilter(partitions=NUMBERS[:1001]),
        JobFilter(jobs=tuple(f"9_{number}" for number in range(1001))),
    ],
)
def test_more_patterns_than_can_be_tried_are_refused(jobs: Jobs, wanted: JobFilter) -> None:
    with pytest.raises(UsageError, match="1000"):
        jobs.list(wanted)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("x" * 1025,), "1025 characters is too long: give at most 1024"),
        (("*a" * 33,), "33 wildcards: give at most 32"),
        (("[a]" * 33,), "33 wildcards"),
        (tuple(f"{number:0500}" for number in range(41)), "20500 characters together"),
    ],
)
def test_patterns_that_would_cost_too_much_are_refused(
    jobs: Jobs, names: tuple[str, ...], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        jobs.list(JobFilter(names=names))


def test_any_number_of_stars_are_one() -> None:
    assert normalize_patterns(["*" * 5000 + "a", "*a", "b**?***", "c"]) == ("*a", "b*?*", "c")


def test_pages_follow_each_other_without_gap_or_repeat(books: Books) -> None:
    books.take(*[record(number, number // 4) for number in range(1, 40)])
    jobs = Jobs(books.path)
    seen: list[int] = []
    before: ListPosition | None = None
    while page := jobs.list(JobFilter(), limit=7, before=before):
        seen += [job.job_id for job in page]
        before = page[-1].position
    assert sorted(seen) == list(range(1, 40))
    assert [number // 4 for number in seen] == sorted((n // 4 for n in seen), reverse=True)


def test_arrays_and_het_jobs_are_found_by_every_name(books: Books) -> None:
    array: dict[str, Any] = {"array_job_id": 10, "name": "a"}
    kept, leader = script(10, 0.3), script(20, 1.3)
    books.take(
        kept,
        leader,
        record(10, 0, array_task="2-9%3", **array),
        record(11, 0, array_task="1", **array),
        record(20, 1, het_job_id=20, het_offset=0),
        record(21, 1, het_job_id=20, het_offset=1, batch=False),
    )
    jobs = Jobs(books.path)

    def labels(name: str) -> list[str]:
        return [job.label for job in jobs.find(name)]

    assert labels("10") == ["10_[2-9%3]"]
    assert labels("10_1") == labels("11") == ["10_1"]
    assert labels("10_5") == ["10_[2-9%3]"]
    assert labels("10_12") == []
    assert labels("20+1") == labels("21") == ["20+1"]
    (task,), (component,) = jobs.find("10_1"), jobs.find("20+1")
    assert (task.script_key, component.script_key) == (kept.key, leader.key)
    ran = jobs.find_script(task)
    assert ran is not None
    assert (ran.key, ran.body.job_id) == (kept.key, 10)
    assert jobs.list_scripts(task) == []
    assert [part.label for part in jobs.list_parts(jobs.find("10")[0])] == ["10_1"]
    assert {job.label for job in jobs.list(JobFilter(jobs=("10",)))} == {"10_[2-9%3]", "10_1"}
    assert {job.label for job in jobs.list(JobFilter(jobs=("10_1", "20+1")))} == {"10_1", "20+1"}


def test_a_task_is_not_shown_the_script_of_somebody_elses_array(books: Books) -> None:
    books.take(
        script(10, 0.3),
        record(10, 0, uid=11, array_job_id=10, array_task="1-2"),
        record(77, 900, uid=12, array_job_id=10, array_task="1"),
    )
    assert Jobs(books.path).find("77")[0].script_key == ""


def test_an_array_whose_own_record_never_came_is_found_by_its_tasks(books: Books) -> None:
    books.take(record(11, 0, array_job_id=10, array_task="1"))
    assert [job.label for job in Jobs(books.path).find("10")] == ["10_1"]


def test_a_reused_id_is_found_newest_first(books: Books) -> None:
    books.take(*[record(5, 1000 * number, uid=number) for number in (3, 1, 2)])
    assert [job.record.uid for job in Jobs(books.path).find("5")] == [3, 2, 1]


def test_an_unconfirmed_job_shows_what_is_claimed_and_no_more(jobs: Jobs) -> None:
    (job,) = jobs.find("6")
    assert not job.verified
    assert job.record == JobRecord(job_id=6, name="relax-claimed")
    assert job.first_submit == at(60)


def test_by_script_answers_for_what_it_knows(jobs: Jobs) -> None:
    keys = [script(1, 10.2).key, script(6, 60.5).key, "script:99:1"]
    found = jobs.find_by_scripts(keys)
    assert {key: job.job_id for key, job in found.items()} == {keys[0]: 1, keys[1]: 6}
    assert jobs.find_by_scripts(keys, "c2") == {}


def test_a_snapshot_sees_one_moment(books: Books, jobs: Jobs) -> None:
    with jobs.snapshot():
        before = listed(jobs, JobFilter())
        books.take(record(90, 90))
        assert listed(jobs, JobFilter()) == before
        with jobs.snapshot():
            assert jobs.find("90") == []
    assert listed(jobs, JobFilter())[0] in (90, -1)
    assert jobs.find("90") != []


def test_a_reader_cannot_write_and_an_absent_database_is_said_to_be_so(
    books: Books, jobs: Jobs, tmp_path: Path
) -> None:
    with pytest.raises(SqliteUnavailable, match="does not exist: start the daemon"):
        Jobs(f"{tmp_path}/none/jobs.db")
    assert jobs.cursor() == books.consumer.cursor() == 9


QUESTIONS = {
    "a day": JobFilter(since=NOON, until=at(DAY_S)),
    "a user's": JobFilter(users=("ada",), since=NOON),
    "an owner's": JobFilter(scopes={"c1": VisibleJobs(uid=11)}, since=NOON),
    "an account's": JobFilter(accounts=("physics",)),
    "an array's": JobFilter(jobs=("10",)),
    "some jobs'": JobFilter(jobs=("10", "11", "12")),
    "two users'": JobFilter(users=("ada", "bob", "13"), since=NOON),
    "a task": JobFilter(jobs=("10_1",)),
    "a SLUID": JobFilter(jobs=("s0ZXM7YY8HFA00",)),
    "a coordinator's": JobFilter(
        scopes={"c1": VisibleJobs(uid=11, accounts=frozenset({"physics"}))}, since=NOON
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_reads_the_whole_table(jobs: Jobs, question: str) -> None:
    plan = jobs.explain(QUESTIONS[question])
    assert "SCAN job" not in plan
    assert "SEARCH job USING INDEX" in plan
    if question == "a day":
        assert plan == "SEARCH job USING INDEX job_by_submit (first_submit>? AND first_submit<?)"


def test_an_ordered_page_needs_no_sorting(jobs: Jobs) -> None:
    for question in ("a day", "a user's", "an owner's", "an account's"):
        assert "TEMP B-TREE" not in jobs.explain(QUESTIONS[question])


def test_a_jobs_place_in_the_list_is_lasting(jobs: Jobs) -> None:
    first: Job = jobs.list(JobFilter(), limit=1)[0]
    assert first.position == (first.first_submit, first.job_id, first.number)


def test_jobs_of_one_second_stand_by_their_ids(books: Books) -> None:
    books.take(*(record(job_id, 10, uid=11) for job_id in (20, 3, 100, 11)))
    jobs = Jobs(books.path)
    assert listed(jobs, JobFilter()) == [100, 20, 11, 3]
    (first,) = jobs.list(JobFilter(), limit=1)
    assert [job.job_id for job in jobs.list(JobFilter(), before=first.position)] == [20, 11, 3]
    jobs.close()


def test_what_is_not_over_is_told_to_those_who_watch_for_its_end(jobs: Jobs) -> None:
    assert {record.job_id for record in jobs.list_unfinished_records("c1")} == {1, 2, 4, 5}
    assert [record.name for record in jobs.list_unfinished_records("c2")] == ["far"]
    assert jobs.list_unfinished_records("c3") == []
