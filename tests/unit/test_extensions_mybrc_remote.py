"""Failures of a myBRC server: one bad job blocks no other, and retries back off."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from servers.http_server import Quiet, answering
from servers.mybrc import mybrc_settings, with_money
from steward.bank.ledger import open_ledger
from steward.bank.settings import BankSettings, RemoteBankSettings
from steward.core.waits import Stop
from steward.extensions.mybrc.outbox import MYBRC_KIND, RemoteJob, queue_change, queue_hold
from steward.extensions.mybrc.remote import OutboxSender

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger

NOW = datetime.now(UTC)


class Elsewhere(Quiet, BaseHTTPRequestHandler):
    """Server that fails on some jobs, and counts its requests."""

    poison: ClassVar[set[str]] = set()
    refused: ClassVar[set[str]] = set()
    asked: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        """Store a job, or fail on it."""
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = self.path.split("/")[-2]
        self.asked.append(job)
        wrong = 500 if job in self.poison else 400 if job in self.refused else 200
        place = self.path.split("/")[1]
        self.send_response({"other": 404, "proxy": 400}.get(place, wrong))
        is_page = place in ("portal", "proxy")
        answer = b"<html>Welcome</html>" if is_page else json.dumps(told).encode()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_PUT  # noqa: N815 - http.server's name


@pytest.fixture
def url() -> Iterator[str]:
    Elsewhere.poison.clear()
    Elsewhere.refused.clear()
    Elsewhere.asked.clear()
    with answering(Elsewhere) as server:
        yield f"http://127.0.0.1:{server.server_port}"


class Outbox:
    """Outbox and its sender, with a clock of the test."""

    def __init__(self, directory: Path, url: str) -> None:
        token = directory / "token"
        token.write_text("Token x\n")
        remote = RemoteBankSettings(url=url, token_file=str(token))
        settings = mybrc_settings(directory, 1, bank=BankSettings(enabled=True, remote=remote))
        with_money(settings, "physics")
        self.now = NOW
        self.ledger: Ledger = open_ledger(settings, lambda: self.now)
        self._passing = OutboxSender(settings, self.ledger, lambda: self.now)

    def say(self, *jobs: int) -> None:
        """Queue reports about jobs."""
        with self.ledger.transaction() as t:
            for job in jobs:
                queue_change(
                    t,
                    RemoteJob(cluster="c", job_id=job, first_submit=NOW, account="physics", uid=1),
                )

    def send(self, after_s: float = 0.0) -> float:
        """Send due messages; return the seconds to wait."""
        self.now += timedelta(seconds=after_s)
        return self._passing.send_once(Stop(), lambda: None)

    def waiting(self) -> int:
        """Return the number of unsent messages."""
        with self.ledger.reading() as t:
            return t.outbox.count_pending(MYBRC_KIND)

    def close(self) -> None:
        self._passing.close()
        self.ledger.close()


@pytest.fixture
def site(tmp_path: Path, url: str) -> Iterator[Outbox]:
    made = Outbox(tmp_path, url)
    yield made
    made.close()


def test_a_job_that_it_fails_over_holds_up_no_other(site: Outbox) -> None:
    Elsewhere.poison.add("1")
    site.say(1, 2, 3)
    site.send()
    assert (Elsewhere.asked, site.waiting()) == (["1", "2", "3"], 1)
    site.say(4)
    site.send()
    assert (Elsewhere.asked[3:], site.waiting()) == (["4"], 1)
    for wait_s in (10, 20, 40):
        site.send(wait_s - 1)
        assert Elsewhere.asked.count("1") == {10: 1, 20: 2, 40: 3}[wait_s]
        site.send(1)
        assert Elsewhere.asked.count("1") == {10: 2, 20: 3, 40: 4}[wait_s]
    Elsewhere.poison.clear()
    site.send(3600)
    assert site.waiting() == 0


def test_a_server_that_fails_over_everything_is_left_alone_for_a_while(site: Outbox) -> None:
    Elsewhere.poison.update(map(str, range(1, 100)))
    site.say(*range(1, 51))
    site.send()
    assert len(Elsewhere.asked) == 20
    site.send()
    assert len(Elsewhere.asked) == 21
    Elsewhere.poison.clear()
    site.send()
    assert site.waiting() == 21
    site.send(3600)
    assert site.waiting() == 0


def test_what_is_refused_for_a_week_is_set_aside_until_somebody_asks(site: Outbox) -> None:
    Elsewhere.refused.add("1")
    site.say(1)
    for _ in range(6 * 24):
        site.send(3600)
    assert site.waiting() == 1
    for _ in range(2 * 24):
        site.send(3600)
    assert (site.waiting(), Elsewhere.asked.count("1")) == (0, 175)
    with site.ledger.reading() as t:
        (item,) = t.outbox.list_undelivered((MYBRC_KIND,))
    assert (item.aside, "400" in item.error) == (True, True)
    Elsewhere.refused.clear()
    with site.ledger.transaction() as t:
        assert t.outbox.retry((MYBRC_KIND,), ()) == 1
    site.send(1)
    with site.ledger.reading() as t:
        assert t.outbox.list_undelivered((MYBRC_KIND,)) == []


def test_what_was_refused_is_not_told_behind_what_came_later(site: Outbox) -> None:
    Elsewhere.refused.update(("1", "2"))
    site.say(1, 2)
    site.send()
    site.say(2)
    site.send()
    assert (Elsewhere.asked, site.waiting()) == (["1", "2", "2"], 2)
    Elsewhere.refused.clear()
    site.say(1)
    site.send()
    assert (Elsewhere.asked[3:], site.waiting()) == (["1"], 1)
    site.send(3600)
    assert (Elsewhere.asked[4:], site.waiting()) == (["2"], 0)


@pytest.mark.parametrize("path", ["other", "portal", "proxy"])
def test_a_wrong_path_drops_nothing_and_is_told(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    made = Outbox(tmp_path, f"{url}/{path}")
    job = RemoteJob(cluster="c", job_id=1, first_submit=NOW, account="physics", uid=1, start=NOW)
    with made.ledger.transaction() as t:
        queue_hold(t, job, 5)
    made.say(2)
    for _ in range(3):
        made.send(3600)
    assert made.waiting() == 2
    assert "[bank.remote] url" in caplog.text
    made.close()
