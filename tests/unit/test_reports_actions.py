"""Reports: usage, capacity, wait times, and visibility of jobs."""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import history
from harness.events import at
from harness.history import GIB
from harness.site import ADA, BELA, COORDINATOR, ROOT, Site
from steward.core.errors import PermissionRefused, UsageError
from steward.reports.requests import ClusterRow

HOUR = 3600
DAY = {"since": at(0).isoformat(), "until": at(4 * HOUR).isoformat()}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = history.make_site(tmp_path)
    yield found
    found.close()


def ask(site: Site, name: str, asker: Any = ROOT, /, **request: Any) -> Any:
    return site.ask(f"reports.{name}", asker, **{**DAY, "clusters": ["c1"], **request})


def test_jobs_are_cut_at_the_ends_of_the_time(site: Site) -> None:
    history.add_run(site, 1, -HOUR, HOUR, cpus=4, nodes=2, tres_allocated="cpu=4,mem=8G,gres/gpu=2")
    history.add_run(site, 2, 3 * HOUR, None, cpus=2, uid=4002, user="bela")
    history.add_run(site, 3, 9 * HOUR, 10 * HOUR)
    history.add_run(
        site, 4, HOUR, 2 * HOUR, account="chemistry", uid=4002, user="bela", suspended_s=600
    )
    rows = ask(site, "accounts").rows
    assert [
        (row.account, row.user, row.jobs, row.cpu_s, row.gpu_s, row.node_s) for row in rows
    ] == [
        ("chemistry", "", 1, 3000, 0, 3000),
        ("chemistry", "bela", 1, 3000, 0, 3000),
        ("physics", "", 2, 6 * HOUR, 2 * HOUR, 3 * HOUR),
        ("physics", "ada", 1, 4 * HOUR, 2 * HOUR, 2 * HOUR),
        ("physics", "bela", 1, 2 * HOUR, 0, HOUR),
    ]
    people = ask(site, "users").rows
    assert [(row.user, row.accounts, row.jobs, row.completed) for row in people] == [
        ("ada", ("physics",), 1, 1),
        ("bela", ("chemistry", "physics"), 2, 1),
    ]
    assert [row.user for row in ask(site, "users", top=1).rows] == ["ada"]
    assert [row.user for row in ask(site, "users", accounts=["CHEMISTRY"]).rows] == ["bela"]
    assert [row.user for row in ask(site, "users", users=["4001"]).rows] == ["ada"]


def test_each_day_for_itself_is_the_whole_in_sum(site: Site) -> None:
    site.now = at(40 * 86_400)
    for number in range(40):
        history.add_run(
            site, number + 1, number * 50_000, number * 50_000 + 90_000, cpus=number + 1
        )
    request = {"since": at(0).isoformat(), "until": at(20 * 86_400).isoformat()}
    (whole,) = ask(site, "users", **request).rows
    for by in ("day", "week", "month"):
        answer = ask(site, "users", **request, by=by)
        assert sum(row.cpu_s for row in answer.rows) == whole.cpu_s
        assert sum(row.completed for row in answer.rows) == whole.completed
        assert {row.period for row in answer.rows} == set(range(len(answer.periods)))


def test_pieces_of_a_resized_job_are_one_run(site: Site) -> None:
    history.add_run(site, 1, 0, 100, eligible=-40, cpus=8, piece_us=1, state="RESIZING")
    history.add_run(site, 1, 100, 300, eligible=-40, submit=-40, cpus=2)
    (row,) = ask(site, "users").rows
    assert (row.jobs, row.cpu_s, row.completed) == (1, 8 * 100 + 2 * 200, 1)
    (waits,) = ask(site, "waits").rows
    assert (waits.started, waits.median_s) == (1, 40)
    (wasted,) = ask(site, "waste").rows
    assert wasted.jobs == 1
    (whole,) = ask(site, "cluster").rows
    assert (whole.jobs, whole.allocated_cpu_s) == (1, 8 * 100 + 2 * 200)


def test_a_resized_run_in_two_accounts_is_one_run_of_its_user(site: Site) -> None:
    history.add_run(site, 1, 0, 100, piece_us=1, state="RESIZING", account="chemistry")
    history.add_run(site, 1, 100, 300, eligible=0)
    (row,) = ask(site, "users").rows
    assert (row.jobs, row.accounts) == (1, ("chemistry", "physics"))
    totals = [row.jobs for row in ask(site, "accounts").rows if not row.user]
    assert totals == [1, 1]


def test_how_long_jobs_waited(site: Site) -> None:
    for number in range(1, 11):
        history.add_run(site, number, 100, 200, eligible=100 - number, submit=-1000, cpus=number)
    history.add_run(site, 11, 100, 200, eligible=-900, partition="debug")
    history.add_run(site, 12, -5, 200, eligible=-900, partition="debug")
    rows = ask(site, "waits").rows
    told = [(row.partition, row.started, row.median_s, row.p90_s, row.longest_s) for row in rows]
    assert told == [("debug", 1, 1000, 1000, 1000), ("main", 10, 5, 9, 10)]
    sized = ask(site, "waits", group="size", sizes=[4], partitions=["main"]).rows
    assert [(row.least_cpus, row.most_cpus, row.started) for row in sized] == [(0, 3, 3), (4, 0, 7)]
    by_partition = {row.partition: row for row in ask(site, "partitions").rows}
    assert (by_partition["debug"].jobs, by_partition["debug"].started) == (2, 1)
    assert by_partition["main"].cpu_s == 5500


def test_a_suspended_job_is_the_same_time_in_every_report(site: Site) -> None:
    site.feed(history.node(-HOUR, "n1", "IDLE", source="start"))
    history.add_run(site, 1, HOUR, 5 * HOUR, cpus=2, suspended_s=1200)
    history.add_run(
        site, 2, -HOUR, HOUR, cpus=1, suspended_s=600, tres_allocated="cpu=1,gres/gpu=1"
    )
    for request in ({}, {"by": "day"}, {"until": at(86_000).isoformat(), "by": "day"}):
        cluster = ask(site, "cluster", **request).rows
        accounts = [row for row in ask(site, "accounts", **request).rows if row.uid is None]
        assert [row.allocated_cpu_s for row in cluster if row.jobs] == [
            row.cpu_s for row in accounts
        ]
        assert [row.allocated_gpu_s for row in cluster if row.jobs] == [
            row.gpu_s for row in accounts
        ]


def test_jobs_by_state_and_size(site: Site) -> None:
    history.add_run(site, 1, 0, 10, cpus=1)
    history.add_run(site, 2, 0, 10, cpus=60, state="FAILED")
    history.add_run(site, 3, 0, 10, cpus=2, state="FAILED")
    cancelled = {"start_us": 0, "cpus": 0, "requested_cpus": 70, "state": "CANCELLED"}
    history.add_run(site, 4, 0, 10, **cancelled)
    rows = ask(site, "jobs").rows
    assert [(row.least_cpus, row.most_cpus, row.state, row.jobs, row.cpu_s) for row in rows] == [
        (0, 49, "COMPLETED", 1, 10),
        (0, 49, "FAILED", 1, 20),
        (50, 249, "CANCELLED", 1, 0),
        (50, 249, "FAILED", 1, 600),
    ]


def test_what_was_over_within_a_second_is_counted_and_adds_nothing(site: Site) -> None:
    history.add_run(site, 1, 0, 10)
    history.add_run(site, 2, 20, 20, cpus=60, state="FAILED")
    # Two of them at midnight: it is of the time that begins there.
    history.add_run(site, 3, 2 * HOUR, 2 * HOUR, state="FAILED", uid=4002, user="bela")
    history.add_run(site, 4, 4 * HOUR, 4 * HOUR)
    assert [(row.state, row.jobs, row.cpu_s) for row in ask(site, "jobs", sizes=[]).rows] == [
        ("COMPLETED", 1, 10),
        ("FAILED", 2, 0),
    ]
    assert [
        (row.user, row.jobs, row.completed, row.failed, row.cpu_s)
        for row in ask(site, "users").rows
    ] == [("ada", 2, 1, 1, 10), ("bela", 1, 0, 1, 0)]
    assert [(row.user, row.jobs, row.cpu_s) for row in ask(site, "accounts").rows] == [
        ("", 3, 10),
        ("ada", 2, 10),
        ("bela", 1, 0),
    ]
    (used,) = ask(site, "partitions").rows
    assert (used.jobs, used.started, used.cpu_s) == (3, 3, 10)
    assert [row.jobs for row in ask(site, "cluster").rows] == [3]
    halves = [at(0), at(2 * HOUR), at(4 * HOUR)]
    told = [
        ask(site, "users", since=since.isoformat(), until=until.isoformat()).rows
        for since, until in pairwise(halves)
    ]
    assert [[(row.user, row.jobs, row.failed) for row in rows] for rows in told] == [
        [("ada", 2, 1)],
        [("bela", 1, 1)],
    ]


def test_a_run_that_ended_at_midnight_ended_on_the_day_in_which_it_ran(site: Site) -> None:
    history.add_run(site, 1, HOUR, 2 * HOUR, user_us=0, system_us=0)
    for since, until, ended in ((0, 2 * HOUR, 1), (2 * HOUR, 4 * HOUR, 0)):
        asked = {"since": at(since).isoformat(), "until": at(until).isoformat()}
        assert sum(row.completed for row in ask(site, "users", **asked).rows) == ended
        assert sum(row.jobs for row in ask(site, "waste", **asked).rows) == ended


def test_what_was_asked_for_and_not_used(site: Site) -> None:
    asked = {"cpus": 4, "tres_allocated": "cpu=4,mem=8G", "time_limit_s": 1000}
    history.add_run(
        site, 1, 0, 100, **asked, user_us=90_500_000, system_us=10_000_000, peak_bytes=2 * GIB
    )
    history.add_run(site, 2, 0, 100, **asked, user_us=500_000, system_us=0)
    history.add_run(site, 3, 0, 100, cpus=1)
    history.add_run(site, 4, 0, None, cpus=64)
    two = {"nodes": 2, "peak_bytes": GIB, "peak_allocated_bytes": 4 * GIB}
    history.add_run(
        site, 5, 0, 10, **asked, **two, uid=4002, user="bela", cgroup_user_us=40_000_000
    )
    ada, bela = ask(site, "waste").rows
    assert (ada.jobs, ada.measured, ada.cpu_s, ada.used_cpu_s) == (3, 2, 800, 101)
    assert (ada.limited, ada.limit_s, ada.elapsed_s) == (2, 2000, 200)
    memory = (ada.memory_measured, ada.memory_byte_s, ada.used_memory_byte_s)
    assert memory == (1, 800 * GIB, 200 * GIB)
    assert (bela.used_cpu_s, bela.used_memory_byte_s) == (40, 20 * GIB)


def test_who_is_told_of_whose_jobs(site: Site) -> None:
    history.add_run(site, 1, 0, 10)
    history.add_run(site, 2, 0, 10, uid=4002, user="bela", account="chemistry")

    def users(asker: Any) -> list[str]:
        return [row.user for row in ask(site, "users", asker).rows]

    assert users(ROOT) == ["ada", "bela"]
    assert users(ADA) == ["ada"]
    assert users(BELA) == ["bela"]
    assert users(COORDINATOR) == ["ada"]
    assert ask(site, "users").is_all
    assert not ask(site, "users", ADA).is_all
    # However public the jobs themselves are: sums over everybody are the operators'.
    assert [row.account for row in ask(site, "accounts", ADA).rows] == ["physics", "physics"]


def capacity(row: ClusterRow) -> tuple[int | None, ...]:
    return (
        *(row.allocated_cpu_s, row.down_cpu_s, row.planned_down_cpu_s),
        *(row.planned_cpu_s, row.idle_cpu_s, row.reported_cpu_s),
    )


def test_what_capacity_did(site: Site) -> None:
    site.feed(
        *(
            history.node(-HOUR, f"n{number}", "IDLE", source="start", gpus=1)
            for number in range(1, 5)
        ),
        history.node(HOUR, "n1", "DOWN", old_state="IDLE", gpus=1),
        history.node(2 * HOUR, "n1", "IDLE", old_state="DOWN", gpus=1),
        history.node(HOUR, "n2", "MIXED+DRAIN", old_state="IDLE", gpus=1),
        history.node(3 * HOUR, "n2", "IDLE+DRAIN", old_state="MIXED+DRAIN", gpus=1),
        history.node(HOUR, "n3", "IDLE+CLOUD+POWERED_DOWN", old_state="IDLE", gpus=1),
    )
    history.add_run(
        site, 1, HOUR, 3 * HOUR, cpus=2, tres_allocated="cpu=2,gres/gpu=1", nodelist="n2"
    )
    (row,) = ask(site, "cluster").rows
    down, away, idle = 8 * HOUR, 12 * HOUR, 64 * HOUR - 4 * HOUR - 8 * HOUR - 12 * HOUR
    assert capacity(row) == (4 * HOUR, down, away, 0, idle, 64 * HOUR)
    assert (row.allocated_gpu_s, row.down_gpu_s, row.reported_gpu_s) == (
        *(2 * HOUR, 2 * HOUR, 16 * HOUR),
    )
    assert (row.cpus, row.gpus, row.nodes, row.jobs, row.known_s) == (16, 4, 4, 1, 4 * HOUR)


def test_cpus_are_planned_where_jobs_wait_for_them(site: Site) -> None:
    site.feed(history.node(-HOUR, "n1", "IDLE", source="start"))
    history.add_run(site, 1, 2 * HOUR, 3 * HOUR, eligible=HOUR, cpus=3, requested_cpus=3)
    # In the second hour four CPUs idle; a hundred that are waited for are not more.
    history.add_run(site, 2, 3 * HOUR, None, eligible=2 * HOUR, cpus=4, requested_cpus=100)
    rows = ask(site, "cluster").rows
    assert [capacity(row) for row in rows] == [
        (3 * HOUR + 4 * HOUR, 0, 0, 3 * HOUR + HOUR, 5 * HOUR, 16 * HOUR)
    ]


def test_tasks_that_wait_together_wait_each(site: Site) -> None:
    site.feed(history.node(-HOUR, "n1", "IDLE", source="start"))
    waiting = {"start_us": 0, "state": "PENDING", "array_job_id": 1, "array_task": "1-3%2"}
    history.add_run(site, 1, 0, None, eligible=3 * HOUR, **waiting)
    (row,) = ask(site, "cluster").rows
    assert row.planned_cpu_s == 3 * HOUR


def test_reservations_are_allocated_or_planned_to_be_down(site: Site) -> None:
    names = [f"n{number}" for number in range(1, 5)]
    site.feed(
        *(history.node(-HOUR, name, "IDLE", source="start") for name in names),
        history.node(0, "n2", "DOWN", old_state="IDLE"),
        *(
            history.reservation(
                when, name, "ACTIVE", start=at(0), end=at(HOUR), nodes=of, flags=flags
            )
            for when, name, of, flags in (
                (1, "kept", "n[1-2]", ()),
                (1, "care", "n3", ("MAINT",)),
                (1, "float", "n4", ("IGNORE_JOBS",)),
            )
        ),
        *(
            history.reservation(HOUR + 2, name, "REMOVED", start=at(0), end=at(HOUR))
            for name in ("kept", "care", "float")
        ),
    )
    # What runs in a reservation is within what that keeps.
    history.add_run(site, 1, 0, HOUR, cpus=4, reservation="kept")
    history.add_run(site, 2, 0, HOUR, cpus=1, reservation="float", nodelist="n4")
    (row,) = ask(site, "cluster", until=at(HOUR).isoformat()).rows
    assert capacity(row) == (5 * HOUR, 4 * HOUR, 4 * HOUR, 0, 3 * HOUR, 16 * HOUR)


def test_what_is_down_while_it_is_maintained_is_so_by_plan(site: Site) -> None:
    site.feed(
        *(history.node(-HOUR, f"n{number}", "IDLE", source="start") for number in range(1, 5)),
        history.node(0, "n1", "DOWN", old_state="IDLE"),
        history.node(0, "n2", "IDLE+MAINTENANCE", old_state="IDLE"),
        history.node(0, "n3", "DOWN", old_state="IDLE"),
        history.reservation(0, "care", "ACTIVE", start=at(0), nodes="n[1-2]", flags=("MAINT",)),
        history.reservation(
            *(0, "own", "ACTIVE"), start=at(0), nodes="n[3-4]", flags=("MAINT", "IGNORE_JOBS")
        ),
    )
    (row,) = ask(site, "cluster", until=at(HOUR).isoformat()).rows
    # Of the one that ignores jobs only what is down counts, as slurmdbd has it.
    assert capacity(row) == (0, 0, 12 * HOUR, 0, 4 * HOUR, 16 * HOUR)


def test_more_than_there_is_is_cut_off_hour_by_hour(site: Site) -> None:
    site.feed(history.node(-HOUR, "n1", "IDLE", source="start"))
    history.add_run(site, 1, 0, HOUR, cpus=40)
    (row,) = ask(site, "cluster").rows
    assert capacity(row) == (4 * HOUR, 0, 0, 0, 12 * HOUR, 16 * HOUR)


def test_before_the_history_begins_capacity_is_not_guessed(site: Site) -> None:
    site.feed(history.node(2 * HOUR + 60, "n1", "IDLE", source="start"))
    history.add_run(site, 1, 0, HOUR, cpus=40)
    before, after = ask(site, "cluster", by="day", since="2026-02-28", until="2026-03-02").rows
    assert (before.reported_cpu_s, before.known_s, before.nodes) == (None, 0, 0)
    assert (after.allocated_cpu_s, after.reported_cpu_s) == (40 * HOUR, 4 * after.known_s)
    assert after.known_s == 10 * HOUR - 60


def test_without_a_sensor_only_what_jobs_had_is_told(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, sensor=False)
    history.add_run(site, 1, 0, HOUR, cpus=2)
    answer = ask(site, "cluster")
    assert not answer.sensor
    assert capacity(answer.rows[0]) == (2 * HOUR, None, None, None, None, None)
    site.close()


def test_who_may_see_what_a_cluster_did(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, private=frozenset({"usage"}))
    assert len(ask(site, "cluster").rows) == 1
    with pytest.raises(PermissionRefused):
        ask(site, "cluster", ADA)
    with pytest.raises(PermissionRefused):
        ask(site, "cluster", ADA, clusters=[])
    site.close()


def test_anybody_may_where_it_is_not_private(site: Site) -> None:
    assert len(ask(site, "cluster", ADA, clusters=[]).rows) == 2
    with pytest.raises(UsageError):
        ask(site, "cluster", users=["ada"])
    with pytest.raises(UsageError, match="use one of c1, c2"):
        ask(site, "cluster", clusters=["c3"])


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
@pytest.mark.parametrize("by", ["", "day", "month"])
def test_two_thousand_years_are_no_more_work_than_what_is_known_of_them(
    site: Site, zone: str, by: str
) -> None:
    site.feed(history.node(0, "n1", "IDLE", source="start"))
    history.add_run(site, 1, 0, HOUR, cpus=2)
    for since in ("0001-01-01", "1066-10-14", "0001-01-01T00:00:00+14:00"):
        with contextlib.suppress(UsageError):
            (row,) = [
                row
                for row in ask(site, "cluster", since=since, zone=zone, by=by).rows
                if row.reported_cpu_s
            ]
            assert (row.allocated_cpu_s, row.reported_cpu_s) == (2 * HOUR, 16 * HOUR)
