"""``steward accounting gaps`` lists every gap, and nothing else."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from harness import accounting
from harness.accounting import START
from harness.events import NOVEMBER
from harness.site import ADA, Site
from steward.accounting.errors import AccountingUsage
from steward.accounting.gaps import GAP_LABELS, GapsAnswer, Kind
from steward.capture.nodes.node_reports import NodeReport, NodeReportsWriter
from steward.cli.commands import print_reply
from steward.cli.output import Style
from steward.core.actions import ActionError, decode_request
from steward.core.errors import PermissionRefused
from steward.core.events import JOB_MISSED, MissedJobs
from steward.daemon.registry import ACTIONS
from steward.slurm.settings import ClusterSettings


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = accounting.make_site(tmp_path)
    yield site
    site.close()


def found(answer: GapsAnswer) -> list[tuple[str, str, str]]:
    return [(one.kind, one.job, one.step) for one in answer.findings]


def test_every_kind_has_a_label() -> None:
    assert set(GAP_LABELS) == set(get_args(Kind))


def test_whole_books_have_no_gaps(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(site, cgroup_user_us=1_500_000)
    answer = site.ask("accounting.gaps")
    assert answer.findings == ()
    assert answer.until == NOVEMBER
    assert answer.since == NOVEMBER - timedelta(days=7)


def test_a_person_is_told_the_period_and_that_there_is_nothing(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr("steward.cli.output.is_terminal", lambda: True)
    request = {"since": "2026-02-01T00:00", "until": "2026-02-02T00:00", "zone": "UTC"}
    print_reply(site.ask("accounting.gaps", **request), Style(), "findings")
    printed = capsys.readouterr()
    assert printed.err == "From 2026-02-01T00:00:00 to 2026-02-02T00:00:00.\n"
    assert printed.out == "No gaps in this period.\n"


def test_a_step_without_an_end_is_missing_it(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(site, ended=False)
    (one,) = site.ask("accounting.gaps").findings
    assert (one.kind, one.job, one.step, one.node) == ("step-no-end", "7", "0", "n1")


def test_what_may_still_come_is_no_gap(site: Site) -> None:
    late = NOVEMBER - timedelta(seconds=100)
    accounting.add_run(
        site, 8, start=late - timedelta(seconds=10), end=late, submit=late - timedelta(seconds=20)
    )
    accounting.add_launch(site, 8, at=late - timedelta(seconds=5), ended=False)
    accounting.add_run(
        site, 9, start=late - timedelta(seconds=10), end=late, submit=late - timedelta(seconds=20)
    )
    accounting.add_script(site, 10, late)
    assert found(site.ask("accounting.gaps")) == []


def test_a_step_that_still_runs_is_no_gap(site: Site) -> None:
    accounting.add_run(site, state="RUNNING", end=None)
    accounting.add_launch(site, ended=False)
    assert found(site.ask("accounting.gaps")) == []


def test_a_run_without_steps_is_told_of(site: Site) -> None:
    accounting.add_run(site)
    assert found(site.ask("accounting.gaps")) == [("run-no-steps", "7", "")]


def test_a_run_that_slurm_forgot_is_told_of(site: Site) -> None:
    accounting.add_run(site, state="UNKNOWN", start=None, end=None, nodelist="")
    assert found(site.ask("accounting.gaps")) == [("run-lost", "7", "")]


def test_a_run_that_never_began_has_no_steps_to_miss(site: Site) -> None:
    accounting.add_run(site, state="CANCELLED", start=None, nodelist="")
    assert found(site.ask("accounting.gaps")) == []


def test_where_no_node_reports_nothing_is_missed_of_them(tmp_path: Path) -> None:
    site = accounting.make_site(tmp_path, listen="")
    accounting.add_run(site)
    assert found(site.ask("accounting.gaps")) == []
    site.close()


def test_cpu_time_of_nobody_is_told_of(site: Site) -> None:
    accounting.add_launch(site, 99, cpu_s=(2.0, 3.0))
    (one,) = site.ask("accounting.gaps").findings
    assert (one.kind, one.job, one.cpu_s, one.user) == ("step-unattributed", "99", 5.0, "4001")


def test_cpu_time_of_orphans_is_told_of(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(
        site, cpu_s=(10.0,), cgroup_user_us=70_000_000, cgroup_system_us=1_000_000
    )
    (one,) = site.ask("accounting.gaps").findings
    assert (one.kind, one.step, one.cpu_s) == ("orphan-cpu", "0", 61.0)


def test_lost_tasks_are_told_of(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(site, cpu_s=(1.0, 1.0), lost=3)
    (one,) = site.ask("accounting.gaps").findings
    assert one.kind == "step-doubtful"
    assert "could not record all of its usage" in one.missing


def test_scripts_whose_job_was_never_shown_are_told_of(site: Site) -> None:
    accounting.add_script(site, 10, START)
    assert found(site.ask("accounting.gaps")) == [("job-unconfirmed", "10", "")]


def test_jobs_that_capture_missed_are_told_of(site: Site) -> None:
    accounting.tell(site, JOB_MISSED, "7:1", MissedJobs(job_ids=(7, 8)), START)
    assert found(site.ask("accounting.gaps")) == [
        ("script-missed", "7", ""),
        ("script-missed", "8", ""),
    ]


def test_what_nodes_say_that_they_lost_is_told_of(site: Site) -> None:
    accounting.add_gap(site, "lost", 17)
    accounting.add_gap(site, "reboot", at=START + timedelta(minutes=1))
    first, second = site.ask("accounting.gaps").findings
    assert (first.kind, first.node, first.lines) == ("node-gap", "n1", 17)
    assert "rebooted" in second.missing


def test_nodes_that_fell_silent_are_told_of(site: Site) -> None:
    clusters = {**site.settings.cluster, "beta": ClusterSettings(slurm=False)}
    site.settings = msgspec.structs.replace(site.settings, cluster=clusters)
    hearing = NodeReportsWriter(str(site.state))
    for node, ago_s in (("n1", 30), ("n2", 1000), ("n3", 90_000)):
        hearing.record(
            NodeReport(cluster="alpha", node=node, heard_at=NOVEMBER - timedelta(seconds=ago_s))
        )
    hearing.write()
    hearing.close()
    silent = [one.node for one in site.ask("accounting.gaps").findings]
    assert silent == ["n3", "n2"]
    assert [one.node for one in site.ask("accounting.gaps", silent_s=3600).findings] == ["n3"]
    century_s = 100 * 366 * 86400
    assert site.ask("accounting.gaps", silent_s=century_s).findings == ()
    with pytest.raises(ActionError, match=f"<= {century_s}"):
        decode_request(ACTIONS["accounting.gaps"], {"silent_s": century_s + 1})
    assert site.ask("accounting.gaps", clusters=["beta"]).findings == ()


def test_a_time_is_looked_at(site: Site) -> None:
    accounting.add_gap(site)
    accounting.add_run(site)
    assert (
        len(
            site.ask("accounting.gaps", since="2026-11-21T09:59", until="2026-11-21T10:15").findings
        )
        == 2
    )
    assert site.ask("accounting.gaps", since="2026-11-21T10:15").findings == ()
    assert site.ask("accounting.gaps", until="2026-11-21T09:00").findings == ()
    with pytest.raises(AccountingUsage, match="invalid time"):
        site.ask("accounting.gaps", since="soon")


def test_no_more_than_asked_for(site: Site) -> None:
    for minute in range(5):
        accounting.add_gap(site, at=START + timedelta(minutes=minute))
    answer = site.ask("accounting.gaps", limit=3)
    assert len(answer.findings) == 3
    assert answer.more
    assert not site.ask("accounting.gaps", limit=5).more


def test_it_is_for_operators(site: Site) -> None:
    with pytest.raises(PermissionRefused):
        site.ask("accounting.gaps", ADA)


def test_before_all_records_nothing_is_missing(site: Site) -> None:
    assert site.ask("accounting.gaps", until="0001-01-01", zone="UTC").findings == ()
