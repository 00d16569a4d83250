"""Monthly statements by mail, and notices by mail and webhook."""

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.events import NOON
from harness.site import ADA, Site
from servers.http_server import Quiet, answering
from steward.accounting.settings import MailSettings
from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.ledger import Authorship
from steward.bank.money import MICRO
from steward.bank.notices import (
    NOTICE_KIND,
    Notice,
    NoticeNotSent,
    NoticeRefused,
    get_last_month,
    queue_statements,
    resolve_addresses,
    send_notice,
    write_threshold_notice,
)
from steward.bank.schedule import ScheduledWork
from steward.bank.settings import BankSettings, NotifySettings
from steward.core.config import Settings
from steward.core.events import BankThreshold
from steward.core.logs import configure_logging
from steward.core.notifications import MailNotSent

NOTICE = Notice(kind="bank.threshold", subject="[bank] x", text="hello\n", to=("olga",))


class Hook(Quiet, BaseHTTPRequestHandler):
    """A webhook that records requests, and replies as the test sets."""

    def do_POST(self) -> None:
        told = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.told.append(json.loads(told))
        self.send_response(server.answer)
        self.end_headers()


@pytest.fixture
def hook() -> Iterator[Any]:
    with answering(Hook) as serving:
        server: Any = serving
        server.told, server.answer = [], 204
        yield server


def settings_of(site: Site, directory: Path, *, fails: int = 0, **notify: Any) -> Settings:
    """Return the Site's settings with a mailer that stores the mails."""
    mailer = directory / "sendmail"
    mailer.write_text(f"#!/bin/sh\ncat >> {directory}/mails\nexit {int(fails)}\n")
    mailer.chmod(0o755)
    rules = NotifySettings(**{"domain": "example.org", **notify})
    return msgspec.structs.replace(
        site.settings,
        bank=BankSettings(enabled=True, notify=rules),
        mail=MailSettings(program=str(mailer), sender="bank@example.org"),
    )


DAY = timedelta(days=1)


def waiting(site: Site) -> list[Notice]:
    with site.ledger.reading() as t:
        items = t.outbox.list_due(NOTICE_KIND, site.now + timedelta(days=1))
    return [msgspec.json.decode(item.payload, type=Notice) for item in items]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return bank.make_shared_site(tmp_path)


def test_a_month_is_told_once_to_owners(site: Site, tmp_path: Path) -> None:
    settings = settings_of(site, tmp_path, statements=True)
    bank.charge(site, 1, hours=2)
    bank.charge(site, 2, hours=3, user="gus")
    with site.ledger.transaction() as t:
        by = Authorship(who="root", why="grant 7", at=NOON)
        t.transfers.deposit("physics", 5 * MICRO, by)
    assert queue_statements(site.ledger, settings, NOON) == 0
    later = (NOON.replace(day=1) + timedelta(days=40)).replace(day=2)
    assert queue_statements(site.ledger, settings, later) == 1
    assert queue_statements(site.ledger, settings, later + timedelta(days=3)) == 0
    (notice,) = waiting(site)
    assert notice.to == ("olga",)
    assert f"{NOON:%Y-%m}" in notice.subject
    assert "Charges of ada" in notice.text
    assert "-3.00 SU" in notice.text
    assert "(grant 7, root)" in notice.text
    assert notice.body["closing"] - notice.body["opening"] == 1000 * MICRO


def test_none_is_told_unless_it_is_wanted(site: Site, tmp_path: Path) -> None:
    settings = settings_of(site, tmp_path)
    for month in range(3):
        assert queue_statements(site.ledger, settings, NOON + timedelta(days=40 * month)) == 0
    assert not waiting(site)


def test_months_are_the_clusters(site: Site) -> None:
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], timezone="Asia/Tokyo")
    settings = msgspec.structs.replace(site.settings, cluster={"c1": cluster})
    begin, end = get_last_month(settings, datetime(2026, 12, 31, 20, tzinfo=UTC))
    assert (begin.isoformat(), end.isoformat()) == (
        "2026-12-01T00:00:00+09:00",
        "2027-01-01T00:00:00+09:00",
    )
    begin, _ = get_last_month(site.settings, datetime(2027, 1, 15, tzinfo=UTC))
    assert begin == datetime(2026, 12, 1, tzinfo=UTC)


def test_a_notice_goes_to_all_it_is_for(site: Site, tmp_path: Path, hook: Any) -> None:
    url = f"http://127.0.0.1:{hook.server_port}/x"
    settings = settings_of(site, tmp_path, mail=("all@example.org",), webhook=url)
    send_notice(settings, NOTICE)
    mail = (tmp_path / "mails").read_text()
    assert "To: olga@example.org, all@example.org\n" in mail
    assert "Subject: [bank] x\n" in mail
    assert "hello" in mail
    assert hook.told[0]["kind"] == "bank.threshold"
    assert hook.told[0]["version"] == 1


@pytest.mark.parametrize(
    ("answer", "again"), [(503, True), (429, True), (302, True), (400, False), (404, False)]
)
def test_a_webhook_is_tried_again_where_that_can_help(
    site: Site, tmp_path: Path, hook: Any, answer: int, again: bool
) -> None:
    hook.answer = answer
    url = f"http://127.0.0.1:{hook.server_port}/"
    settings = settings_of(site, tmp_path, webhook=url)
    notice = msgspec.structs.replace(NOTICE, to=())
    with pytest.raises(NoticeNotSent) as failed:
        send_notice(settings, notice)
    assert isinstance(failed.value, NoticeRefused) != again


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "nonsense", "http://[::/"])
def test_a_webhook_that_is_not_there(site: Site, tmp_path: Path, url: str) -> None:
    with pytest.raises(NoticeNotSent):
        send_notice(
            settings_of(site, tmp_path, webhook=url), msgspec.structs.replace(NOTICE, to=())
        )


def turns(site: Site, settings: Settings, times: int, seconds: int = 0) -> None:
    """Run the bank's timed work, which sends one notice a turn."""
    upkeep = ScheduledWork(settings, site.ledger, GateClient(settings.state_dir))
    for _ in range(times):
        site.now += timedelta(seconds=seconds)
        with suppress(GateUnavailable):  # notices go out without it
            upkeep.run_due_work(site.now, lambda events: None)


def test_a_mail_comes_once_while_the_webhook_is_down(site: Site, tmp_path: Path, hook: Any) -> None:
    hook.answer = 503
    url = f"http://127.0.0.1:{hook.server_port}/T0/secret"
    settings = settings_of(site, tmp_path, webhook=url)
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(NOTICE))
    turns(site, settings, 20, seconds=600)
    assert (tmp_path / "mails").read_text().count("Subject:") == 1
    assert [one.by for one in waiting(site)] == ["webhook"]
    hook.answer = 204
    before = len(hook.told)
    turns(site, settings, 3, seconds=3600)
    assert (len(hook.told) - before, waiting(site)) == (1, [])
    assert (tmp_path / "mails").read_text().count("Subject:") == 1


def test_a_webhook_is_told_once_while_no_mail_is_taken(
    site: Site, tmp_path: Path, hook: Any
) -> None:
    settings = settings_of(
        site, tmp_path, fails=True, webhook=f"http://127.0.0.1:{hook.server_port}/"
    )
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(NOTICE))
    turns(site, settings, 6, seconds=600)
    assert len(hook.told) == 1
    assert [one.by for one in waiting(site)] == ["mail"]


def listed(site: Site) -> list[tuple[str, bool]]:
    return [(one.channel, one.is_dead_letter) for one in site.ask("bank.notices").notices]


def test_a_refused_mail_is_set_aside_after_some_tries_until_somebody_asks(
    site: Site, tmp_path: Path
) -> None:
    settings = settings_of(site, tmp_path, fails=True)
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(NOTICE))
    turns(site, settings, 30, seconds=3600)
    assert (tmp_path / "mails").read_text().count("Subject:") == 5
    assert listed(site) == [("mail", True)]
    (line,) = site.ask("bank.notices").notices
    assert (line.summary, line.attempts, line.next_at) == ("[bank] x", 5, None)
    assert "exited with code 1" in line.error
    settings = settings_of(site, tmp_path)
    turns(site, settings, 3, seconds=3600)
    assert listed(site) == [("mail", True)]
    assert site.ask("bank.notices_retry").retried == 1
    turns(site, settings, 1)
    assert listed(site) == []
    assert (tmp_path / "mails").read_text().count("Subject:") == 6


def test_a_mail_that_cannot_be_sent_now_is_tried_for_a_week(site: Site, tmp_path: Path) -> None:
    settings = settings_of(site, tmp_path, fails=os.EX_TEMPFAIL)
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(NOTICE))
    turns(site, settings, 6 * 24, seconds=3600)
    assert listed(site) == [("mail", False)]
    turns(site, settings, 2 * 24, seconds=3600)
    assert listed(site) == [("mail", True)]


def test_what_a_webhook_refuses_is_set_aside(site: Site, tmp_path: Path, hook: Any) -> None:
    hook.answer = 410
    settings = settings_of(site, tmp_path, webhook=f"http://127.0.0.1:{hook.server_port}/")
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(msgspec.structs.replace(NOTICE, to=())))
    turns(site, settings, 30, seconds=3600)
    assert (len(hook.told), listed(site)) == (5, [("webhook", True)])


def test_only_operators_look_after_notices(site: Site) -> None:
    for name in ("notices", "notices_retry"):
        with pytest.raises(BankRefused):
            site.ask(f"bank.{name}", ADA)
    with pytest.raises(BankUsage):
        site.ask("bank.notices_retry", numbers=[7])


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """Restore logging after the test."""
    root = logging.getLogger()
    before, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:], logging.raiseExceptions = before, raises
    root.setLevel(level)


@pytest.mark.parametrize("answer", [None, 503, 404])
def test_a_webhooks_url_is_not_said(
    site: Site,
    tmp_path: Path,
    hook: Any,
    answer: int | None,
    as_it_was: None,
) -> None:
    del as_it_was
    hook.answer = answer
    port = hook.server_port if answer else 1
    settings = settings_of(site, tmp_path, webhook=f"http://127.0.0.1:{port}/T0/secret")
    with site.ledger.transaction() as t:
        t.outbox.add(NOTICE_KIND, msgspec.json.encode(msgspec.structs.replace(NOTICE, to=())))
    configure_logging("debug", stream=(said := io.StringIO()))
    turns(site, settings, 2)
    assert "127.0.0.1" in said.getvalue()
    assert "secret" not in said.getvalue()
    with site.ledger.reading() as t:
        assert all("secret" not in i.error for i in t.outbox.list_due(NOTICE_KIND, site.now + DAY))


def test_a_mail_that_is_not_taken_is_tried_again(site: Site, tmp_path: Path) -> None:
    with pytest.raises(MailNotSent):
        send_notice(settings_of(site, tmp_path, fails=True), NOTICE)


def test_nobody_is_told_where_nobody_is_named(site: Site, tmp_path: Path) -> None:
    send_notice(settings_of(site, tmp_path), msgspec.structs.replace(NOTICE, to=()))
    assert not (tmp_path / "mails").exists()


def test_names_that_are_no_addresses_get_nothing(site: Site, tmp_path: Path) -> None:
    settings = settings_of(site, tmp_path, mail=("ops@example.org",))
    hostile = ("-oQ/tmp", "a\nBcc: x", "ada", "b@other.org", "ada")
    assert resolve_addresses(settings, hostile) == (
        "ada@example.org",
        "b@other.org",
        "ops@example.org",
    )


def test_a_threshold_says_what_is_left(site: Site, tmp_path: Path) -> None:
    settings = settings_of(site, tmp_path)
    used = BankThreshold(
        account="physics", allocation=7, kind="used", value=90, balance=MICRO, total=10 * MICRO
    )
    notice = write_threshold_notice(settings, used, ("olga",))
    assert "90 %" in notice.subject
    assert "1.00 SU" in notice.text
    assert notice.body["allocation"] == 7
    ends = msgspec.structs.replace(used, kind="ends", value=1, end=NOON)
    assert "ends in 1 day" in write_threshold_notice(settings, ends, ("olga",)).subject
    silent = settings_of(site, tmp_path, owners=False)
    assert write_threshold_notice(silent, used, ("olga",)).to == ()
