"""Tells a myBRC server elsewhere what is in the outbox, until it has taken it.

While the server is away all of it waits. What it refuses, or fails over, one thing
alone, is tried again ever more seldom, for a week, and holds up nothing else; where it
fails over everything it counts as away.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger import OutboxItem
from steward.bank.mybrc import amounts
from steward.bank.mybrc.errors import RemoteFailed, RemoteRejected, RemoteUnavailable
from steward.bank.mybrc.matching import SOURCE
from steward.bank.mybrc.noticing import Noticing
from steward.bank.mybrc.outgoing import KIND, Message, Told
from steward.config import Settings
from steward.waiting import Backoff, Stop

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger

log = logging.getLogger(__name__)

_BATCH: Final = 100
_TRIED: Final = 1000
_IDLE_S: Final = 1.0
_FIRST_S: Final = 0.5
_MOST_S: Final = 60.0
_REFUSED_S: Final = 60.0
_REFUSED_MOST_S: Final = 3600.0
_MOST_TRIES: Final = 175
"""So often one thing is tried that is not taken: for a week."""
_LONGEST_WORD: Final = 50
_TAKEN: Final = (200, 201)
_ITS_OWN_FAULT: Final = (400, 404, 409, 413, 422)
_MOST_SAID: Final = 300
_FAILED: Final = 500
_FAILED_S: Final = 10.0
_MOST_FAILED: Final = 20
"""So many failures one after the other are the server's, not those of what it is told."""


class Remote:
    """The server elsewhere.

    Args:
        settings: [bank.remote] is what is used of it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.bank.remote
        self._client: Any = None

    def create(self, body: dict[str, Any]) -> None:
        """Tell of a new job.

        Raises:
            RemoteUnavailable: It cannot be told now.
            RemoteFailed: The server fails over it.
            RemoteRejected: The server does not take it.
        """
        self._send("POST", "/jobs/", body)

    def update(self, jobslurmid: str, body: dict[str, Any]) -> None:
        """Tell of a job, new or not.

        Raises:
            RemoteUnavailable: It cannot be told now.
            RemoteFailed: The server fails over it.
            RemoteRejected: The server does not take it.
        """
        self._send("PUT", f"/jobs/{jobslurmid}/", body)

    def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        import httpx

        url = self._settings.url.rstrip("/") + path
        try:
            headers = {"Authorization": self._token(), "Content-Type": "application/json"}
            answer = self._connected().request(
                method, url, content=msgspec.json.encode(body), headers=headers
            )
        except httpx.ReadTimeout as error:
            self.close()
            raise RemoteFailed(f"{method} {url}: no answer in time", path) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # ValueError: certificates or a token that are none.
            self.close()
            raise RemoteUnavailable(f"{self._settings.url}: {error}", path) from error
        if answer.status_code in _TAKEN:
            return
        said = f"{method} {url}: {answer.status_code} {answer.text[:_MOST_SAID]}"
        if answer.status_code in _ITS_OWN_FAULT:
            raise RemoteRejected(said, path)
        if answer.status_code == _FAILED:
            raise RemoteFailed(said, path)
        raise RemoteUnavailable(said, path)

    def _connected(self) -> Any:
        if self._client is None:
            import ssl

            import httpx

            # Not from the environment: a proxy of somebody's shell is not the site's.
            verify = ssl.create_default_context(cafile=self._settings.ca_file or None)
            self._client = httpx.Client(
                timeout=self._settings.timeout_s, verify=verify, trust_env=False
            )
        return self._client

    def _token(self) -> str:
        # Read each time, so that a new one needs no restart.
        with open(self._settings.token_file, encoding="ascii") as file:
            token = file.read().strip()
        return token if token.lower().startswith("token ") else f"Token {token}"


class Passing:
    """Empties the outbox.

    Args:
        settings: The whole configuration.
        ledger: Where the outbox is.
        now: The time.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", now: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._now = now
        self._remote = Remote(settings)
        self._noticing = Noticing(settings, ledger)
        self._backoff = Backoff(_FIRST_S, _MOST_S)
        self._said = ""
        self._failed = 0

    def close(self) -> None:
        """Let go of connections."""
        self._remote.close()
        self._noticing.close()

    def send_once(self, stop: Stop, beat: Callable[[], None]) -> float:
        """Tell what is due.

        Returns:
            Seconds to wait until the next time.
        """
        try:
            self._noticing.turn()
            with self._ledger.reading() as t:
                items = t.outbox.due(KIND, self._now(), _BATCH)
                others = t.outbox.untold((KIND,), _TRIED) if items else []
            for item in self._latest(items, [one for one in others if one.tries]):
                if stop.is_set():
                    return 0.0
                beat()
                self._pass(item)
        except (RemoteUnavailable, LedgerUnavailable) as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("the myBRC server elsewhere is told later: %s", error)
            return self._backoff.next_s()
        if items:
            self._backoff.reset()
            self._said = ""
        return 0.0 if len(items) == _BATCH else _IDLE_S

    def _latest(self, items: list[OutboxItem], tried: list[OutboxItem]) -> list[OutboxItem]:
        """Without those of which a later one tells the same job's cost anyhow.

        Args:
            items: What is due.
            tried: What was tried before, due or not, or set aside.
        """
        jobs = {item.id: _job(_read(item)) for item in (*items, *tried)}
        last: dict[tuple[object, ...], int] = {}
        for number in sorted(jobs):
            last[jobs[number]] = number
        kept = [item for item in items if last[jobs[item.id]] == item.id]
        passed_over = [number for number, job in jobs.items() if last[job] != number]
        if passed_over:
            with self._ledger.transaction() as t:
                for number in passed_over:
                    t.outbox.done(number)
        return kept

    def _pass(self, item: OutboxItem) -> None:
        message = _read(item)
        told = message.told
        try:
            if message.op == "hold":
                self._remote.create(body_of(told, message.amount, told.state or "PENDING"))
            else:
                self._remote.update(str(told.job_id), body_of(told, self._cost(told), told.state))
        except RemoteFailed as error:
            self._later(item, str(error), _FAILED_S)
            self._failed += 1
            if self._failed >= _MOST_FAILED:
                raise RemoteUnavailable(str(error), told.job_id) from error
            return
        except RemoteRejected as error:
            self._failed = 0
            if message.op == "change":
                self._later(item, str(error), _REFUSED_S)
                return
            # A job that is known there already; or one that its first charge will tell.
            log.info("a hold is not taken elsewhere: %s", error)
        self._failed = 0
        with self._ledger.transaction() as t:
            t.outbox.done(item.id)

    def _later(self, item: OutboxItem, why: str, first_s: float) -> None:
        if item.tries + 1 >= _MOST_TRIES:
            log.error(
                "job %d is not taken elsewhere after %d tries: %s; 'steward bank notices' lists it",
                *(_read(item).told.job_id, item.tries + 1, why),
            )
            with self._ledger.transaction() as t:
                t.outbox.aside(item.id, why)
            return
        wait_s = min(first_s * 2 ** min(item.tries, 10), _REFUSED_MOST_S)
        log.warning("a job is not taken elsewhere, next try in %d s: %s", wait_s, why)
        with self._ledger.transaction() as t:
            t.outbox.later(item.id, self._now() + timedelta(seconds=wait_s), why)

    def _cost(self, told: Told) -> int:
        """What a job costs the account that it is told of: there it has no other."""
        with self._ledger.reading() as t:
            rows = t.charges.of_job(told.cluster, told.job_id, told.first_submit)
        return sum(
            max(0, row.charge.amount - row.refunded)
            for row in rows
            if row.charge.source != SOURCE and row.charge.account == told.account
        )


def body_of(told: Told, amount: int, state: str) -> dict[str, Any]:
    """A job as the API takes it.

    Args:
        told: The job.
        amount: What it costs, micro-SU.
        state: Its state.
    """
    fields = {
        "jobslurmid": str(told.job_id),
        "submitdate": told.first_submit,
        "startdate": told.start,
        "enddate": told.end,
        "userid": str(told.uid),
        "accountid": told.account,
        "amount": amounts.show(max(0, amount)),
        "jobstatus": state[:_LONGEST_WORD],
        "partition": told.partition if len(told.partition) <= _LONGEST_WORD else "",
        "qos": told.qos if len(told.qos) <= _LONGEST_WORD else "",
        "num_cpus": told.cpus or None,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _read(item: OutboxItem) -> Message:
    return msgspec.json.decode(item.payload, type=Message)


def _job(message: Message) -> tuple[object, ...]:
    told = message.told
    return message.op, told.cluster, told.job_id, told.first_submit, told.account
