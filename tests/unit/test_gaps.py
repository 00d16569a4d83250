"""steward accounting gaps: what is missing is told, and nothing else."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from harness.accounting import START, BooksSite
from harness.events import NOVEMBER
from harness.site import ADA
from steward.accounting.errors import AccountingUsage
from steward.accounting.gaps import GapsAnswer
from steward.capture.nodes.heard import Hearing, NodeHeard
from steward.core.errors import Refused
from steward.core.events import JOB_MISSED, JobsMissed


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BooksSite]:
    site = BooksSite(tmp_path)
    yield site
    site.close()


def found(answer: GapsAnswer) -> list[tuple[str, str, str]]:
    return [(one.kind, one.job, one.step) for one in answer.findings]


def test_whole_books_have_no_gaps(site: BooksSite) -> None:
    site.run()
    site.launch(cgroup_user_us=1_500_000)
    answer = site.ask("gaps")
    assert answer.findings == ()
    assert answer.until == NOVEMBER
    assert answer.since == NOVEMBER - timedelta(days=7)


def test_a_step_without_an_end_is_missing_it(site: BooksSite) -> None:
    site.run()
    site.launch(ended=False)
    (one,) = site.ask("gaps").findings
    assert (one.kind, one.job, one.step, one.node) == ("step-no-end", "7", "0", "n1")


def test_what_may_still_come_is_no_gap(site: BooksSite) -> None:
    late = NOVEMBER - timedelta(seconds=100)
    site.run(8, start=late - timedelta(seconds=10), end=late, submit=late - timedelta(seconds=20))
    site.launch(8, at=late - timedelta(seconds=5), ended=False)
    site.run(9, start=late - timedelta(seconds=10), end=late, submit=late - timedelta(seconds=20))
    site.script(10, late)
    assert found(site.ask("gaps")) == []


def test_a_step_that_still_runs_is_no_gap(site: BooksSite) -> None:
    site.run(state="RUNNING", end=None)
    site.launch(ended=False)
    assert found(site.ask("gaps")) == []


def test_a_run_without_steps_is_told_of(site: BooksSite) -> None:
    site.run()
    assert found(site.ask("gaps")) == [("run-no-steps", "7", "")]


def test_a_run_that_slurm_forgot_is_told_of(site: BooksSite) -> None:
    site.run(state="UNKNOWN", start=None, end=None, nodelist="")
    assert found(site.ask("gaps")) == [("run-lost", "7", "")]


def test_a_run_that_never_began_has_no_steps_to_miss(site: BooksSite) -> None:
    site.run(state="CANCELLED", start=None, nodelist="")
    assert found(site.ask("gaps")) == []


def test_where_no_node_reports_nothing_is_missed_of_them(tmp_path: Path) -> None:
    site = BooksSite(tmp_path, listen="")
    site.run()
    assert found(site.ask("gaps")) == []
    site.close()


def test_cpu_time_of_nobody_is_told_of(site: BooksSite) -> None:
    site.launch(99, cpu_s=(2.0, 3.0))
    (one,) = site.ask("gaps").findings
    assert (one.kind, one.job, one.cpu_s, one.user) == ("step-unattributed", "99", 5.0, "4001")


def test_cpu_time_of_orphans_is_told_of(site: BooksSite) -> None:
    site.run()
    site.launch(cpu_s=(10.0,), cgroup_user_us=70_000_000, cgroup_system_us=1_000_000)
    (one,) = site.ask("gaps").findings
    assert (one.kind, one.step, one.cpu_s) == ("orphan-cpu", "0", 61.0)


def test_lost_tasks_are_told_of(site: BooksSite) -> None:
    site.run()
    site.launch(cpu_s=(1.0, 1.0), lost=3)
    (one,) = site.ask("gaps").findings
    assert one.kind == "step-doubtful"
    assert "could not write down all of it" in one.words


def test_scripts_whose_job_was_never_shown_are_told_of(site: BooksSite) -> None:
    site.script(10, START)
    assert found(site.ask("gaps")) == [("job-unconfirmed", "10", "")]


def test_jobs_that_capture_missed_are_told_of(site: BooksSite) -> None:
    site.tell(JOB_MISSED, "7:1", JobsMissed(job_ids=(7, 8)), START)
    assert found(site.ask("gaps")) == [("script-missed", "7", ""), ("script-missed", "8", "")]


def test_what_nodes_say_that_they_lost_is_told_of(site: BooksSite) -> None:
    site.gap("lost", 17)
    site.gap("reboot", at=START + timedelta(minutes=1))
    first, second = site.ask("gaps").findings
    assert (first.kind, first.node, first.lines) == ("node-gap", "n1", 17)
    assert "rebooted" in second.words


def test_nodes_that_fell_silent_are_told_of(site: BooksSite, tmp_path: Path) -> None:
    hearing = Hearing(str(tmp_path))
    for node, ago_s in (("n1", 30), ("n2", 1000), ("n3", 90_000)):
        hearing.hear(
            NodeHeard(cluster="alpha", node=node, heard_at=NOVEMBER - timedelta(seconds=ago_s))
        )
    hearing.write()
    hearing.close()
    silent = [one.node for one in site.ask("gaps").findings]
    assert silent == ["n3", "n2"]
    assert [one.node for one in site.ask("gaps", silent_s=3600).findings] == ["n3"]
    assert site.ask("gaps", silent_s=4e16).findings == ()
    assert site.ask("gaps", clusters=["beta"]).findings == ()


def test_a_time_is_looked_at(site: BooksSite) -> None:
    site.gap()
    site.run()
    assert len(site.ask("gaps", since="2026-11-21T09:59", until="2026-11-21T10:15").findings) == 2
    assert site.ask("gaps", since="2026-11-21T10:15").findings == ()
    assert site.ask("gaps", until="2026-11-21T09:00").findings == ()
    with pytest.raises(AccountingUsage, match="is no time"):
        site.ask("gaps", since="soon")


def test_no_more_than_asked_for(site: BooksSite) -> None:
    for minute in range(5):
        site.gap(at=START + timedelta(minutes=minute))
    answer = site.ask("gaps", limit=3)
    assert len(answer.findings) == 3
    assert answer.more
    assert not site.ask("gaps", limit=5).more


def test_it_is_for_operators(site: BooksSite) -> None:
    with pytest.raises(Refused):
        site.ask("gaps", ADA)
