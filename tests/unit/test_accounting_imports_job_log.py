"""Import of another Steward's job log: it adds the same jobs and steps, and none of other users."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import accounting
from harness.accounting import START
from harness.site import Site
from steward.accounting.errors import AccountingError
from steward.accounting.imports import ImportEventMaker, ImportResult, import_job_log, is_sacct_file
from steward.core.events import RUN_END, STEP_USAGE
from steward.core.records import UsageLine
from steward.extensions.jobacct_plugins.log.records import encode_log_lines

CLUSTER = "alpha"


@pytest.fixture
def former(tmp_path: Path) -> str:
    """Write the job log of another Steward: a job with steps, a requeued one, and garbage."""
    site = accounting.make_site(tmp_path / "former")
    try:
        accounting.add_run(site, 7, state="FAILED", exit_code=3, reason="NonZeroExitCode")
        accounting.add_launch(site, 7, step="batch", cpu_s=(3.5,))
        accounting.add_launch(site, 7, step="0", cpu_s=(1.0, 2.0))
        ends: dict[str, Any] = {"submit": START - timedelta(minutes=1), "start": START}
        accounting.add_run(site, 8, 60, state="REQUEUED", **ends)
        again = START + timedelta(seconds=60)
        accounting.add_run(site, 8, state="COMPLETED", restarts=1, submit=again, start=again)
        site.feed()
        said = [event for event in site.journal if event.kind in (RUN_END, STEP_USAGE)]
    finally:
        site.close()
    path = tmp_path / "2026-11-21.jsonl"
    strange = [msgspec.structs.replace(event, cluster="beta") for event in said]
    path.write_bytes(
        b"".join([*map(encode_log_lines, said), b"garbage\n", *map(encode_log_lines, strange)])
    )
    return str(path)


def take(
    site: Site, path: str, times: tuple[datetime | None, datetime | None] = (None, None)
) -> ImportResult:
    maker = ImportEventMaker(CLUSTER, lambda record: record)
    return import_job_log(path, CLUSTER, maker, site.append, lambda *_: None, window=times)


def lines(site: Site) -> dict[tuple[str, int, str], UsageLine]:
    """Return sacct's lines by job, restarts and step."""
    site.feed()
    with site.context("accounting").jobs.snapshot():
        jobs = [site.context("accounting").jobs.find(str(job), CLUSTER)[0] for job in (7, 8)]
        found = [line for job in jobs for line in site.context("accounting").jobs.list_lines(job)]
    return {(line.label, line.restarts, line.step): line for line in found}


def test_a_log_makes_the_books_that_it_was_written_from(former: str, tmp_path: Path) -> None:
    assert not is_sacct_file(former)
    site = accounting.make_site(tmp_path / "later")
    try:
        taken = take(site, former)
        assert (taken.jobs, taken.steps, taken.passed_over) == (3, 2, 1)
        found = lines(site)
        assert set(found) == {
            ("7", 0, ""),
            ("7", 0, "batch"),
            ("7", 0, "0"),
            ("8", 0, ""),
            ("8", 1, ""),
        }
        run, step = found["7", 0, ""], found["7", 0, "0"]
        assert (run.state, run.exit_code, run.user, run.account) == ("FAILED", 3, "ada", "physics")
        assert (run.start_us, run.cpus) == (int(START.timestamp() * 1e6), 4)
        assert (step.user_us, step.tasks, step.max_rss_bytes) == (3_000_000, 2, 1024**3)
        assert [found["8", number, ""].state for number in (0, 1)] == ["REQUEUED", "COMPLETED"]
        take(site, former)
        assert lines(site) == found
    finally:
        site.close()


def test_only_a_time_of_it(former: str, tmp_path: Path) -> None:
    site = accounting.make_site(tmp_path / "later")
    try:
        taken = take(site, former, (START + timedelta(seconds=300), None))
        assert (taken.jobs, taken.steps) == (2, 2)
        assert take(site, former, (None, START)).jobs == 0
    finally:
        site.close()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="cannot read"):
        is_sacct_file(str(tmp_path / "nothing"))
