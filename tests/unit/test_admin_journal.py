"""Actions on the journal: the contents of a list of events."""

import re
from pathlib import Path

import pytest

from harness.events import make_event
from harness.journal import JournaledSite
from harness.site import ROOT
from steward.admin.journal import DeadRequest, ListRequest
from steward.cli.commands import print_reply
from steward.cli.output import Style
from steward.core.actions import ActionError
from steward.core.errors import UsageError
from steward.core.events import JOB_SEEN, JobFacts
from steward.core.records import JobRecord
from steward.daemon.contexts import make_registry
from steward.reports.events import MAX_EVENTS


@pytest.fixture
def site(tmp_path: Path) -> JournaledSite:
    """Make a journal of 3,000 events; every thousandth is of cluster c2."""
    site = JournaledSite(tmp_path)
    site.feed(
        *(
            make_event(
                JOB_SEEN,
                f"seen:{number}",
                JobFacts(record=JobRecord(job_id=number)),
                cluster="c2" if number % 1000 == 0 else "c1",
            )
            for number in range(1, 3001)
        )
    )
    return site


@pytest.mark.parametrize(
    ("after", "limit", "keys"),
    [
        (1, 2, ["seen:1000", "seen:2000"]),
        (1000, 50, ["seen:2000", "seen:3000"]),
        (3000, 50, []),
        (0, 2, ["seen:2000", "seen:3000"]),
        (0, 50, ["seen:1000", "seen:2000", "seen:3000"]),
    ],
)
def test_a_list_of_one_cluster_is_filled_past_the_others_events(
    site: JournaledSite, after: int, limit: int, keys: list[str]
) -> None:
    registry = make_registry(site.settings)
    request = ListRequest(after=after, limit=limit, clusters=("c2",))
    answer = registry.call("journal.list", ROOT, request)
    assert [event.key for event in answer.events] == keys


def test_an_empty_list_says_why(site: JournaledSite, capsys: pytest.CaptureFixture[str]) -> None:
    registry = make_registry(site.settings)
    full, empty = (
        registry.call("journal.list", ROOT, ListRequest(kinds=kinds))
        for kinds in ((), ("archive.purge",))
    )
    reason = "No event in the journal matches. The journal keeps only recent events."
    print_reply(full, Style(), "events")
    assert reason not in capsys.readouterr().out
    print_reply(empty, Style(), "events")
    assert capsys.readouterr().out == f"{reason}\n"


def test_a_list_that_would_be_cut_is_refused(site: JournaledSite) -> None:
    registry = make_registry(site.settings)
    assert registry.decode("journal.list", {"limit": MAX_EVENTS}).limit == MAX_EVENTS
    with pytest.raises(ActionError, match=rf"<= {MAX_EVENTS} - at `\$\.limit`"):
        registry.decode("journal.list", {"limit": MAX_EVENTS + 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("job", "did you mean 'jobs'?"),
        ("archive.filed", "did you mean 'archive.files'?"),
        ("filse", "did you mean 'archive.files'?"),
        ("x", "the consumers are archive.files, jobs"),
    ],
)
def test_a_misspelled_consumer_is_told_the_nearest(tmp_path: Path, name: str, hint: str) -> None:
    site = JournaledSite(tmp_path)
    for consumer in ("jobs", "archive.files"):
        site.writer.record_position(consumer, 0, "running", "")
    registry = make_registry(site.settings)
    assert registry.call("journal.dead", ROOT, DeadRequest(consumer="files")).letters == ()
    with pytest.raises(UsageError, match=re.escape(f"unknown consumer {name!r}: {hint}")):
        registry.call("journal.dead", ROOT, DeadRequest(consumer=name))
