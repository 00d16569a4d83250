"""Permissions of sacct, the same for every source of records."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import NOVEMBER
from harness.sacct import ADA, JOBS, ROOT, asked, parquet_of, run, step
from steward.accounting.context import AccountingContext
from steward.accounting.sacct.options import parse_sacct_options
from steward.accounting.sacct.output import stream_lines
from steward.accounting.sacct.requests import SacctRequest, SacctText
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.config import AccessSettings, Settings
from steward.core.records import UsageLine
from steward.core.sqlite import open_database, transaction
from steward.extensions.jobacct_plugins.log.parquet import write_parquet
from steward.jobs import database_path
from steward.jobs.line_sources import MergedSource, sort_into_scratch
from steward.jobs.lines import put_lines
from steward.jobs.retention import expire_jobs
from steward.jobs.tables import MIGRATIONS
from steward.slurm.settings import ClusterSettings


@pytest.fixture
def room(tmp_path: Path) -> Callable[[ClusterRoles | None], AccountingContext]:
    connection = open_database(database_path(str(tmp_path)), MIGRATIONS)
    with transaction(connection):
        put_lines(connection, JOBS)
    connection.close()
    made = Settings(state_dir=str(tmp_path), cluster={"main": ClusterSettings(timezone="UTC")})

    def make(standing: ClusterRoles | None) -> AccountingContext:
        access = Access(AccessSettings(operators=("oper",)), 999, lambda _: standing)
        return AccountingContext(made, access=access, now=lambda: NOVEMBER)

    return make


def seen(room: AccountingContext, asker: Caller, **fields: Any) -> set[str]:
    request = SacctRequest(
        allocations=True, style="parsable2", format="user", starttime="2026-11-01", **fields
    )
    items = stream_lines(room, asker, request)
    return set("".join(item.text for item in items if isinstance(item, SacctText)).split())


@pytest.mark.parametrize(
    ("asker", "standing", "fields", "expected"),
    [
        (ADA, ClusterRoles(), {}, {"ada"}),
        (ADA, ClusterRoles(), {"all_users": True}, {"ada", "bob"}),
        (ADA, ClusterRoles(), {"users": ("bob",)}, {"bob"}),
        (ADA, ClusterRoles(private_data=frozenset({"jobs"})), {"all_users": True}, {"ada"}),
        (ADA, ClusterRoles(private_data=frozenset({"jobs"})), {"users": ("bob",)}, set()),
        (ADA, ClusterRoles(private_data=frozenset({"jobs"})), {"jobs": ("2",)}, set()),
        (ADA, None, {"all_users": True}, {"ada"}),
        (
            ADA,
            ClusterRoles(
                private_data=frozenset({"jobs"}), coordinators={"chem": frozenset({"ada"})}
            ),
            {"all_users": True, "accounts": ("chem",)},
            {"bob"},
        ),
        (Caller(uid=5, user="oper"), None, {"all_users": True}, {"ada", "bob"}),
        (ROOT, None, {}, {"ada", "bob"}),
        (Caller(uid=1002, user=""), None, {}, {"bob"}),
    ],
)
def test_who_may_see_what(
    room: Callable[[ClusterRoles | None], AccountingContext],
    asker: Caller,
    standing: ClusterRoles | None,
    fields: dict[str, Any],
    expected: set[str],
) -> None:
    assert seen(room(standing), asker, **fields) == expected


@st.composite
def some_lines(draw: st.DrawFn) -> list[UsageLine]:
    """Return lines of runs and steps at whole hours, each with its own key."""
    made: dict[tuple[Any, ...], UsageLine] = {}
    for _ in range(draw(st.integers(0, 12))):
        begin = NOVEMBER - timedelta(hours=draw(st.integers(1, 40)))
        submit_us = int(begin.timestamp()) * 1_000_000
        ended = draw(st.booleans())
        of = run(
            draw(st.integers(1, 5)),
            uid=draw(st.sampled_from([1001, 1002])),
            state=draw(st.sampled_from(["COMPLETED", "FAILED"])) if ended else "RUNNING",
        )
        of = msgspec.structs.replace(
            of,
            submit_us=submit_us,
            first_submit_us=submit_us,
            eligible_us=submit_us,
            start_us=submit_us,
            end_us=submit_us + draw(st.integers(1, 5)) * 3_600_000_000 if ended else 0,
        )
        for name in draw(st.sets(st.sampled_from(["", "batch", "0", "1"]))) | {""}:
            made.setdefault((of.job_id, submit_us, name), step(of, name) if name else of)
    # A step lies with the run that was made first under its key.
    return [line for key, line in made.items() if (*key[:2], "") in made]


@given(
    some_lines(),
    st.sampled_from(["", "-X", "-D", "-X -D"]),
    st.sampled_from(
        ["-S now-2day", "-S now-9hour", "-j 1,3", "-j 2.batch", "-s CD -S now-9hour -E now", "-s R"]
    ),
    st.sampled_from(["", "-u 1001"]),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=12)
def test_all_sources_say_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[UsageLine],
    shape: str,
    which: str,
    whose: str,
    cut: int,
) -> None:
    line = f"{shape} {which} {whose} -P -o jobid,submit,state"
    directory = tmp_path_factory.mktemp("same")
    expected = asked(sort_into_scratch(lines, "lines"), line)
    assert asked(parquet_of(lines, directory / "a.parquet"), line) == expected
    here = [of for of in lines if of.job_id >= cut]
    there = [of for of in lines if of.job_id <= cut]
    both = MergedSource(sort_into_scratch(here, "here"), parquet_of(there, directory / "b.parquet"))
    assert asked(both, line) == expected


def test_what_has_left_jobs_db_is_found_in_closed_days(
    room: Callable[[ClusterRoles | None], AccountingContext], tmp_path: Path
) -> None:
    books = room(None)
    old = run(900, begin="2026-10-01T08:00:00", end="2026-10-01T09:00:00", name="old")
    (tmp_path / "joblog").mkdir()
    write_parquet([old, step(old, "batch")], str(tmp_path / "joblog" / "2026-10-01.parquet"))

    def asked_of_books(*words: str) -> list[str]:
        request = parse_sacct_options([*words, "-P", "-o", "jobid"], {}, "UTC").request
        items = stream_lines(books, ROOT, request)
        return "".join(item.text for item in items if isinstance(item, SacctText)).split()

    # No expiry is known: no file is read.
    assert asked_of_books("-j", "900") == []
    connection = open_database(database_path(str(tmp_path)), MIGRATIONS)
    with transaction(connection):
        expire_jobs(connection, "main", datetime(2026, 11, 1, tzinfo=UTC))
    connection.close()
    assert asked_of_books("-j", "900") == ["900", "900.batch"]
    assert asked_of_books("-j", "900,1", "-X") == ["1", "900"]
    assert asked_of_books("-j", "1", "-X") == ["1"]
    assert asked_of_books("-X", "-S", "2026-10-01", "-E", "2026-10-02") == ["900"]
    assert "900" not in asked_of_books("-X", "-S", "2026-11-02")
