"""Health checks of consumers, sinks and rules."""

from pathlib import Path

import pytest

from harness.doctor import DoctorSite, only, site
from harness.events import script_event
from harness.jobs import open_jobs
from harness.site import ROOT
from steward.admin.doctor import data_checks
from steward.admin.doctor.context import CheckContext, make_check_context
from steward.automation.settings import RulesSettings
from steward.core.journal import Journal
from steward.core.journal.store import encode_rows
from steward.daemon.contexts import make_registry
from steward.extensions.controllers.settings import ForwardSettings

__all__ = ["site"]


@pytest.fixture
def journal(site: DoctorSite) -> Journal:
    """Make a journal of three scripts."""
    site.state.mkdir()
    journal = Journal(site.settings.state_dir)
    journal.append(encode_rows([script_event(number) for number in (1, 2, 3)]))
    return journal


def checked(site: DoctorSite) -> CheckContext:
    """Return a context whose checks call real actions."""
    settings = site.settings
    return make_check_context(settings, lambda: make_registry(settings), ROOT, asks_slurm=False)


def test_consumers_that_keep_up_are_one_finding(site: DoctorSite, journal: Journal) -> None:
    for name in ("jobs", "archive.a"):
        journal.record_position(name, 3, "running", "")
    found = only(data_checks.check_journal(checked(site)))
    assert (found.status, found.finding) == ("ok", "2 consumers, no dead letters")


def test_each_consumer_with_a_problem_is_a_finding(site: DoctorSite, journal: Journal) -> None:
    journal.record_position("jobs", 3, "running", "")
    journal.record_position("bank", 1, "waiting", "the ledger is away")
    found = only(data_checks.check_journal(checked(site)))
    assert (found.status, found.object) == ("wrong", "bank")
    assert found.finding == "unavailable, retrying: the ledger is away"

    journal.add_dead_letter("jobs", 2, "no such job")
    findings = {finding.object: finding for finding in data_checks.check_journal(checked(site))}
    assert set(findings) == {"bank", "jobs"}
    assert findings["jobs"].finding == "1 event in its dead letters"
    assert findings["jobs"].fix == ("steward journal dead jobs", "steward journal retry jobs")


def test_a_detached_consumer_is_told_with_what_it_missed(
    site: DoctorSite, journal: Journal
) -> None:
    journal.record_position("archive.a", 0, "waiting", "its disk is full")
    journal.detach("archive.a")
    found = only(data_checks.check_journal(checked(site)))
    assert (found.status, found.object, found.fix) == ("wrong", "archive.a", ())
    assert found.finding == "detached: it has missed 0 events"
    journal.record_position("jobs", 3, "running", "")
    journal.trim(journal.list_trimmable(10))
    found = only(data_checks.check_journal(checked(site)))
    assert "has missed 3 events" in found.finding
    assert len(found.fix) == 1


def test_a_sink_is_late_forgotten_or_out_of_reach(site: DoctorSite, journal: Journal) -> None:
    (name,) = site.settings.files_sinks()
    path = Path(site.settings.sink_path(name))
    path.mkdir(exist_ok=True)
    consumer = f"archive.{name}"
    journal.record_position(consumer, 1, "waiting", "the quota is used up")
    found = only(data_checks.check_sinks(checked(site)))
    assert (found.status, found.object, found.checked) == ("wrong", name, str(path))
    assert found.finding.startswith("lag of 2 scripts, the oldest ")
    assert found.finding.endswith("the quota is used up")

    journal.record_position(consumer, 3, "running", "")
    found = only(data_checks.check_sinks(checked(site)))
    assert (found.status, found.finding) == ("ok", "available, lag of 0 scripts")

    path.rmdir()
    found = only(data_checks.check_sinks(checked(site)))
    assert found.status == "wrong"
    assert found.finding == "unavailable: No such file or directory"

    path.mkdir()
    journal.record_position("archive.old", 1, "running", "")
    by_name = {finding.object: finding for finding in data_checks.check_sinks(checked(site))}
    assert by_name[name].status == "ok"
    assert by_name["old"].status == "warning"
    assert by_name["old"].fix == ("steward journal forget archive.old",)


def test_a_controller_that_forwards_has_neither_sinks_nor_gaps(site: DoctorSite) -> None:
    site.reopen(forward=ForwardSettings(to="https://books.example.org:6830"))
    for check in (data_checks.check_sinks, data_checks.check_gaps):
        found = only(check(checked(site)))
        assert found.status == "skipped"
        assert "https://books.example.org:6830 has the " in found.finding


def test_a_day_without_gaps_is_ok(site: DoctorSite, journal: Journal) -> None:
    journal.close()
    site.add(open_jobs(site))
    found = only(data_checks.check_gaps(checked(site)))
    assert (found.status, found.finding) == ("ok", "no gaps in the last day")


def test_rules_that_cannot_be_read_are_findings(site: DoctorSite) -> None:
    rules = site.directory / "rules.d"
    rules.mkdir()
    site.reopen(rules=RulesSettings(directories=(str(rules), "shipped")))
    assert only(data_checks.check_rule_files(checked(site))).status == "skipped"
    site.reopen(rules=RulesSettings(mode="on", directories=(str(rules), "shipped")))
    assert only(data_checks.check_rule_files(checked(site))).status == "ok"
    (rules / "broken.yaml").write_text("name: [\n")
    found = only(data_checks.check_rule_files(checked(site)))
    assert (found.status, found.object, found.checked) == (
        *("wrong", "broken.yaml"),
        str(rules / "broken.yaml"),
    )
