"""Outcome of an interrupted action, found in the audit log."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness.events import NOON
from harness.rules import failure
from harness.site import Site
from steward.accounting.settings import MailSettings
from steward.automation.audit import AuditLog, AuditStart
from steward.automation.errors import InvalidParameters
from steward.automation.rules.execution import RunnerPerformer, summarize_run
from steward.automation.rules.store import Execution
from steward.core.access import make_access
from steward.core.actions import Registry
from steward.core.events import utc_now

BEGIN = """
import sys, msgspec
from steward.automation.audit import AuditLog, AuditStart
audit = AuditLog(sys.argv[1])
audit.begin(msgspec.json.decode(sys.argv[2], type=AuditStart))
"""


class HandSite(Site):
    """Site that records its mails, with the performer that runs its actions."""

    def __init__(self, directory: Path) -> None:
        mailer = directory / "mailer"
        self.mails = directory / "mails"
        mailer.write_text(f'#!/bin/sh\n{{ echo "$@"; cat; }} >> {self.mails}\n')
        mailer.chmod(0o755)
        super().__init__(directory, mail=MailSettings(program=str(mailer)))
        self.hand = RunnerPerformer(self.settings, make_access(self.settings), Registry())

    def begin_elsewhere(self, one: Execution, **more: str) -> None:
        """Begin an action in a process that exits without a record of its end."""
        text = msgspec.json.encode(self.begun(one, **more)).decode()
        words = [sys.executable, "-c", BEGIN, self.settings.state_dir, text]
        subprocess.run(words, check=True, timeout=60)

    def begun(self, one: Execution, **more: str) -> AuditStart:
        assert one.started is not None
        return AuditStart(
            started=one.started + timedelta(milliseconds=5),
            action=one.action,
            cluster=one.cluster,
            uid=os.geteuid(),
            user="",
            how="local",
            speaker=more.get("speaker", f"rule {one.rule}"),
            force=False,
            parameters={},
        )


@pytest.fixture
def site(tmp_path: Path) -> HandSite:
    return HandSite(tmp_path)


def execution(action: str = "notify.email", **more: object) -> Execution:
    event = failure(1)
    given = {
        "parameters": {"to": ["root"], "subject": "it {{ is }} $(down)", "body": "`id`"},
        "started": utc_now(),
        **more,
    }
    return msgspec.convert(
        {
            "id": 1,
            "rule": "r",
            "cluster": "c1",
            "event": event.key,
            "trigger": "t",
            "subject": "s",
            "action": action,
            "at": NOON,
            "triggered": NOON,
            "due": NOON,
            **given,
        },
        Execution,
    )


def test_an_action_is_run_with_what_it_was_given_as_it_is(site: HandSite) -> None:
    one = execution()
    ran = site.hand.run(one, 10.0)
    assert (ran.status, ran.action) == ("succeeded", "notify.email")
    text = site.mails.read_text()
    assert "it {{ is }} $(down)" in text
    assert "`id`" in text
    assert summarize_run(ran) == ""
    assert site.hand.find(one).state == "ended"


def test_the_audit_log_names_the_service_principal_and_the_rule(site: HandSite) -> None:
    ran = site.hand.run(execution(), 10.0)
    audit = AuditLog(site.settings.state_dir, read_only=True)
    row = audit.find_entry(ran.id)
    audit.close()
    assert row is not None
    assert (row.how, row.speaker, row.uid) == ("service rules", "rule r", os.geteuid())


def test_a_dry_run_sends_nothing(site: HandSite) -> None:
    one = execution(dry_run=True)
    assert site.hand.run(one, 10.0).dry_run
    assert not site.mails.exists()
    assert site.hand.find(one).state == "not-begun"


def test_wrong_parameters_are_refused(site: HandSite) -> None:
    with pytest.raises(InvalidParameters):
        site.hand.run(execution(parameters={"subject": "x"}), 10.0)


def test_what_has_no_line_was_not_begun(site: HandSite) -> None:
    one = execution()
    assert site.hand.find(one).state == "not-begun"
    # Another rule's, and this rule's before, are not this one's.
    site.begin_elsewhere(one, speaker="rule other")
    earlier = msgspec.structs.replace(one, started=utc_now() - timedelta(hours=1))
    site.begin_elsewhere(earlier)
    assert site.hand.find(one).state == "not-begun"


def test_what_was_begun_and_has_no_end_is_unseen_where_slurm_cannot_tell(site: HandSite) -> None:
    one = execution()
    site.begin_elsewhere(one)
    assert site.hand.find(one).state == "unseen"


def test_what_somebody_still_runs_is_running(site: HandSite) -> None:
    one = execution()
    audit = AuditLog(site.settings.state_dir)
    number = audit.begin(site.begun(one))
    assert site.hand.find(one).state == "running"
    audit.end(number, "failed", "no mailer", at=utc_now())
    found = site.hand.find(one)
    assert found.state == "ended"
    assert found.row is not None
    assert (found.row.status, found.row.message) == ("failed", "no mailer")
    audit.close()


def test_what_changes_nothing_can_be_done_again(site: HandSite) -> None:
    one = execution("slurm.node.jobs", parameters={"nodes": "n1"})
    assert site.hand.find(one).state == "not-begun"
