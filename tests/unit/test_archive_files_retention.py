"""Limits by age and size purge the oldest scripts, no more than needed, and each once."""

import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import archive
from harness.site import Site
from steward.archive.files.index import MIGRATIONS, FilesRecords
from steward.archive.files.mover import ArchiveMover
from steward.archive.files.retention import RetentionWorker
from steward.archive.settings import LimitSettings
from steward.core.config import Settings
from steward.core.config.checks import find_problems
from steward.core.events import ARCHIVE_PURGE, Event
from steward.core.sqlite import open_database
from steward.core.waits import Stop

DAY_NS = 86400 * 10**9
NOW_NS = time.time_ns()


def keep(site: Site, job_id: int, data: bytes, *, days: float = 0.0, **job: Any) -> Event:
    mtime_ns = NOW_NS - int(days * DAY_NS) + job_id
    script = archive.script(site, job_id, data, environment=None, mtime_ns=mtime_ns)
    site.feed(script, archive.identity(script, **job))
    return script


def ask(site: Site, *, page_rows: int = 200, at_once: int = 500) -> list[Event]:
    """Return the purges that a restarted sink orders, until it orders no more."""
    asked: list[Event] = []
    with closing(FilesRecords(site.settings, "files", page_rows=page_rows)) as records:
        sink = site.settings.files_sink("files")
        asking = RetentionWorker(records, "files", sink, max_scripts=at_once)
        while True:
            before = len(asked)
            asking.order_purges(asked.extend)
            if len(asked) == before:
                return asked


def gone(site: Site, **pages: int) -> list[int]:
    """Return the job ids of scripts whose purge was ordered, in order."""
    events = ask(site, **pages)
    assert all(event.kind == ARCHIVE_PURGE and event.body.sink == "files" for event in events)
    return [int(key.split(":")[1]) for event in events for key in event.body.script_keys]


def limited(tmp_path: Path, **limit: Any) -> Site:
    return archive.make_site(tmp_path, limit={"one": LimitSettings(**limit)})


def test_days_of_some_users_and_accounts(tmp_path: Path) -> None:
    site = limited(tmp_path, users=("ada",), accounts=("physics",), days=30)
    keep(site, 1, b"old", days=31, account="physics")
    keep(site, 2, b"older", days=32, account="physics")
    keep(site, 3, b"young", days=29, account="physics")
    keep(site, 4, b"of another account", days=99, account="chemistry")
    keep(site, 5, b"of another user", days=99, account="physics", uid=4002, user="bela")
    assert sorted(gone(site)) == [1, 2]
    assert gone(site) == []


def test_days_of_everybody_are_those_of_what_has_no_owner_too(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False, limit={"all": LimitSettings(days=30)})
    script = archive.script(site, 1, mtime_ns=NOW_NS - 31 * DAY_NS)
    site.feed(script)
    assert gone(site) == [1]


def test_size_of_each_user(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=250)
    for number in range(1, 6):
        keep(site, number, b"%d" % number * 100, days=10 - number)
    keep(site, 6, b"b" * 250, uid=4002, user="bela")
    assert gone(site) == [1, 2, 3]
    # Ordered purges count as done, also after a restart; new scripts are considered.
    assert gone(site) == []
    keep(site, 7, b"7" * 51)
    assert gone(site) == [4]


def test_what_goes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "steward.archive.files.retention")
    site = limited(tmp_path, max_bytes=250)
    for number in range(1, 6):
        keep(site, number, b"%d" % number * 100, days=10 - number)
    assert gone(site) == [1, 2, 3]
    [said] = [record.getMessage() for record in caplog.records]
    head = "archive.files removes 3 scripts (300 bytes with their environments): "
    assert f"{head}more than 250" in said


def test_size_of_each_named_account(tmp_path: Path) -> None:
    site = limited(tmp_path, accounts=("physics",), max_bytes=150)
    keep(site, 1, b"1" * 100, account="physics", days=3)
    keep(site, 2, b"2" * 100, account="physics", uid=4002, user="bela", days=2)
    keep(site, 3, b"3" * 100, account="physics", days=1)
    keep(site, 4, b"4" * 999, account="chemistry")
    assert gone(site) == [1, 2]


def test_identical_scripts_count_once_and_free_nothing_while_one_stays(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=150)
    keep(site, 1, b"s" * 100, days=5)
    keep(site, 2, b"2" * 100, days=4)
    keep(site, 3, b"s" * 100, days=3)
    # 200 bytes: the first would free none while the third stays.
    assert gone(site) == [2]
    keep(site, 4, b"4" * 100, days=1)
    assert gone(site) == [1, 3]


def test_one_that_is_too_large_goes_alone(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=1000)
    for number in range(1, 101):
        keep(site, number, b"same script", days=200 - number)
    keep(site, 101, b"x" * 5000, days=0.5)
    assert gone(site) == [101]
    assert gone(site) == []
    keep(site, 102, b"y" * 990, days=0.1)
    assert sorted(gone(site)) == list(range(1, 101))


def test_what_frees_nothing_stays_for_what_does(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=1000)
    for number in range(1, 101):
        keep(site, number, b"same script" * 10, days=200 - number)
    keep(site, 101, b"y" * 950, days=50)
    keep(site, 102, b"same script" * 10, days=0.5)
    assert gone(site) == [101]


def test_in_an_account_whoever_has_the_most_gives(tmp_path: Path) -> None:
    site = limited(tmp_path, accounts=("physics",), max_bytes=1000)
    for number in range(1, 51):
        keep(site, number, b"ada %6d" % number, days=200 - number, account="physics")
    bela = {"uid": 4002, "user": "bela", "account": "physics"}
    keep(site, 101, b"x" * 5000, days=0.5, **bela)
    assert gone(site) == [101]
    keep(site, 102, b"1" * 300, days=0.4, **bela)
    keep(site, 103, b"2" * 300, days=0.3, **bela)
    # Ada's 500 and Bela's 600 are 100 too many.
    assert gone(site) == [102]
    keep(site, 104, b"3" * 300, days=0.2, **bela)
    # Bela has 600, and then less than Ada.
    assert gone(site) == [103]


def test_an_empty_file_is_not_ordered_in_vain(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=10)
    keep(site, 1, b"", days=9)
    keep(site, 2, b"2" * 8, days=8)
    keep(site, 3, b"3" * 8, days=7)
    assert gone(site) == [2]


def test_without_sharing_each_counts(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, layout="sliced", limit={"one": LimitSettings(max_bytes=250)})
    for number in range(1, 5):
        keep(site, number, b"s" * 100, days=9 - number)
    assert gone(site) == [1, 2]


def test_it_is_done_when_the_events_are_applied(tmp_path: Path) -> None:
    site = limited(tmp_path, users=("ada",), max_bytes=150)
    for number in (1, 2, 3):
        keep(site, number, b"%d" % number * 100, days=9 - number)
    site.feed(*ask(site))
    assert [path.rpartition("/")[2] for path in archive.files(site)] == ["3-run.sh"]
    assert archive.rows(site, "SELECT * FROM ordered") == []
    assert gone(site) == []


def test_what_was_set_aside_is_ordered_again_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = limited(tmp_path, max_bytes=1)
    keep(site, 1, b"much", days=1)
    first = ask(site)
    assert ask(site) == []
    now_s = time.time() + 3601
    monkeypatch.setattr("steward.archive.files.retention.time.time", lambda: now_s)
    again = ask(site)
    assert [event.body for event in again] == [event.body for event in first]
    assert again[0].key != first[0].key


def test_what_was_moved_on_counts_and_goes_there(tmp_path: Path) -> None:
    there = tmp_path / "there"
    site = archive.make_site(
        tmp_path,
        move_to=str(there),
        move_after_s=0.0,
        limit={"one": LimitSettings(max_bytes=150)},
    )
    mover = ArchiveMover(site.settings, "files")
    for number in (1, 2):
        keep(site, number, b"%d" % number * 100, days=9 - number)
        mover.run_once(Stop())
    events = ask(site)
    assert [event.body.script_keys[0].split(":")[1] for event in events] == ["1"]
    site.feed(*events)
    assert ask(site) == []
    mover.run_once(Stop())
    assert [path.name for path in there.rglob("*.sh")] == ["2-run.sh"]
    assert archive.rows(site, "SELECT bytes FROM holder") == [(100,)]


def test_without_limits_there_is_no_index_to_keep(tmp_path: Path) -> None:
    def indexed(site: Site) -> bool:
        sql = "SELECT 1 FROM sqlite_master WHERE name = 'script_holder'"
        return bool(archive.rows(site, sql))

    assert not indexed(archive.make_site(tmp_path))
    assert indexed(limited(tmp_path, days=1))
    assert not indexed(archive.make_site(tmp_path))


def test_many_are_ordered_in_turns_and_the_oldest_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "steward.archive.files.retention")
    site = limited(tmp_path, max_bytes=10)
    for number in range(1, 9):
        keep(site, number, b"%d" % number * 10, days=20 - number, account=f"a{number % 3}")
    assert gone(site, page_rows=2, at_once=3) == [1, 2, 3, 4, 5, 6, 7]
    assert [record.getMessage().split()[:3] for record in caplog.records] == [
        ["archive.files", "removes", str(scripts)] for scripts in (3, 3, 1)
    ]


def test_a_database_without_sums_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "archive-files.db"
    old = open_database(str(path), MIGRATIONS[:2])
    for number, (uid, state) in enumerate([(4001, 2), (4001, 3), (4002, 2), (None, 1)]):
        old.execute(
            "INSERT INTO script (key, cluster, job_id, mtime_ns, state, directory, script_name, "
            "script_length, env_name, env_length, uid, user, since_ns, came_from) "
            "VALUES (?, 'alpha', 1, 1, ?, 1, 's', 10, 'e', 5, ?, 'ada', 1, '')",
            (f"script:{number}:1", state, uid),
        )
    old.close()
    records = FilesRecords(Settings(state_dir=str(tmp_path)), "files")
    assert records.query("SELECT uid, bytes FROM holder ORDER BY uid") == [(4001, 30), (4002, 15)]
    assert records.query("SELECT count(*) FROM script WHERE holder IS NULL") == [(1,)]
    records.close()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (LimitSettings(), "sets no limit"),
        (LimitSettings(days=-1), "must be 0 or more"),
        (LimitSettings(max_bytes=-1), "must be 0 or more"),
        (LimitSettings(days=1, users=("",)), "contains an empty name"),
        (LimitSettings(max_bytes=1, accounts=("",)), "contains an empty name"),
        (LimitSettings(max_bytes=1), ""),
    ],
)
def test_a_limit_that_is_none_is_an_error(tmp_path: Path, limit: LimitSettings, said: str) -> None:
    site = archive.make_site(tmp_path, limit={"one": limit})
    found = [problem.what for problem in find_problems(site.settings)]
    assert len(found) == bool(said)
    assert all("archive.sink.files.limit.one" in what and said in what for what in found)


@given(
    jobs=st.lists(
        st.tuples(st.sampled_from([b"s" * 40, b"t" * 60, b"u" * 10]), st.integers(0, 9)),
        max_size=9,
    ),
    most=st.integers(1, 120),
)
@settings(max_examples=40, deadline=None)
def test_never_more_than_needed_goes(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[bytes, int]], most: int
) -> None:
    site = limited(tmp_path_factory.mktemp("site"), max_bytes=most)
    for number, (data, days) in enumerate(jobs, start=1):
        keep(site, number, data, days=days)
    # As old as its last script, in the order in which the sink looks at them.
    in_turn = sorted(range(1, len(jobs) + 1), key=lambda number: (-jobs[number - 1][1], number))
    newest_first = dict.fromkeys(jobs[number - 1][0] for number in reversed(in_turn))
    left = [data for data in newest_first if len(data) <= most]
    while sum(map(len, left)) > most:
        left.pop()
    wanted = [number for number in sorted(in_turn) if jobs[number - 1][0] not in left]
    assert sorted(gone(site)) == wanted
    assert gone(site) == []


def test_what_a_new_job_still_uses_counts_after_an_order(tmp_path: Path) -> None:
    site = limited(tmp_path, max_bytes=150)
    keep(site, 1, b"s" * 100, days=5)
    keep(site, 2, b"2" * 100, days=4)
    assert gone(site) == [1]
    # The order is not carried out yet, and the bytes stay with the third job.
    keep(site, 3, b"s" * 100, days=1)
    assert gone(site) == [2]


def test_a_script_that_is_too_large_frees_no_room_for_others(tmp_path: Path) -> None:
    limit = {"one": LimitSettings(max_bytes=100)}
    site = archive.make_site(tmp_path, layout="sliced", limit=limit)
    keep(site, 1, b"1" * 500, days=9)
    keep(site, 2, b"2" * 60, days=8)
    keep(site, 3, b"3" * 60, days=7)
    with closing(FilesRecords(site.settings, "files")) as records:
        worker = RetentionWorker(records, "files", site.settings.files_sink("files"))
        orders: list[Event] = []
        worker.order_purges(orders.extend)
    site.feed(*orders)
    assert [path.rpartition("/")[2] for path in archive.files(site)] == ["3.sh"]
