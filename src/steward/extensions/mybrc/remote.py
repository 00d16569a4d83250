"""Tells a myBRC server elsewhere what is in the outbox, until it has taken it.

While the server is away all of it waits. What it refuses, or fails over, one thing
alone, is tried again ever more seldom, for a week, and holds up nothing else; where it
fails over everything it counts as away.
"""

import contextlib
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger import ChargeRow, OutboxItem
from steward.bank.remote import TOLD
from steward.core.config import Settings
from steward.core.waits import Backoff, Stop
from steward.extensions.mybrc import wire
from steward.extensions.mybrc.outbox import KIND, Message, Noticing, Owners, Told
from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


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
_ITS_OWN_FAULT: Final = (400, 409, 413, 422)
"""Not 404: POST and PUT take new jobs, so it means that the URL has another path."""
_MOST_SAID: Final = 300
_NO_SUCH_PATH: Final = 404
_FAILED: Final = 500
_FAILED_S: Final = 10.0
_MOST_FAILED: Final = 20
"""So many failures one after the other are the server's, not those of what it is told."""


class _Taken(msgspec.Struct, frozen=True):
    """What a server answers that has taken a job, as far as it is looked at."""

    jobslurmid: str | int


class Verdict(msgspec.Struct, frozen=True):
    """What the server says of a job that may be submitted.

    Attributes:
        success: Whether it can be.
        message: Why, in words.
    """

    success: bool
    message: str = ""


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

    def look(self) -> None:
        """See whether the server is there, and whether the token may tell it of jobs.

        Raises:
            RemoteUnavailable: It is not, or may not, or [bank.remote] is wrong.
            RemoteFailed: The server fails over a list of jobs.
            RemoteRejected: The server gives no list of jobs.
        """
        self._send("GET", "/jobs/")
        # A job without a name is none: what may be written is refused for that alone.
        with contextlib.suppress(RemoteRejected, RemoteFailed):
            self._send("POST", "/jobs/", {"jobslurmid": ""})

    def afford(self, cost: int, uid: int, account: str) -> Verdict:
        """Ask whether a job of a cost can be submitted.

        Args:
            cost: Micro-SU, of which hundredths of an SU are told.
            uid: Whose it would be.
            account: Who would pay.

        Raises:
            RemoteUnavailable: The server does not answer now, or [bank.remote] is wrong.
            RemoteFailed: The server fails over it.
            RemoteRejected: The server knows no such user or account.
        """
        name = quote(account, safe="")
        path = f"/can_submit_job/{wire.show(cost)}/{uid}/{name}/"
        answer = self._send("GET", path)
        try:
            return msgspec.json.decode(answer, type=Verdict)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RemoteUnavailable(
                f"GET {self._settings.url}{path}: {error}. Is the path in [bank.remote] url right?",
                path,
            ) from error

    def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        import httpx

        url = self._settings.url.rstrip("/") + path
        try:
            headers = {"Authorization": self._token(), "Content-Type": "application/json"}
            content = None if body is None else msgspec.json.encode(body)
            answer = self._connected().request(method, url, content=content, headers=headers)
        except httpx.ReadTimeout as error:
            self.close()
            raise RemoteFailed(f"{method} {url}: no answer in time", path) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # ValueError: certificates or a token that are none.
            self.close()
            raise RemoteUnavailable(f"{self._settings.url}: {error}", path) from error
        if answer.status_code in _TAKEN:
            if body is not None and not _names(answer.content, body["jobslurmid"]):
                raise RemoteUnavailable(
                    f"{method} {url}: {answer.status_code}, but the answer is not that job. "
                    "Is the path in [bank.remote] url right?",
                    path,
                )
            return bytes(answer.content)
        if answer.status_code == _NO_SUCH_PATH:
            raise RemoteUnavailable(
                f"{method} {url}: 404. Is the path in [bank.remote] url right?", path
            )
        said = f"{method} {url}: {answer.status_code} {answer.text[:_MOST_SAID]}"
        if answer.status_code in _ITS_OWN_FAULT:
            if not _is_json(answer.content):
                # A proxy may refuse one job for its words: it holds up nothing else.
                raise RemoteFailed(f"{said}. Is the path in [bank.remote] url right?", path)
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


def _names(answer: bytes, job_id: str) -> bool:
    """Whether an answer is a job of that id; a portal's page is none, whatever its code."""
    try:
        return str(msgspec.json.decode(answer, type=_Taken).jobslurmid) == job_id
    except (msgspec.DecodeError, RecursionError):
        return False


def _is_json(answer: bytes) -> bool:
    """Whether an answer may be a myBRC server's own, which says in JSON why it refuses."""
    try:
        msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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
        self._owners = Owners(settings.state_dir)
        self._noticing = Noticing(settings, ledger, self._owners)
        self._backoff = Backoff(_FIRST_S, _MOST_S)
        self._said = ""
        self._failed = 0

    def close(self) -> None:
        """Let go of connections."""
        self._remote.close()
        self._owners.close()

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
        jobs = {item.id: _job(read(item)) for item in (*items, *tried)}
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
        message = read(item)
        told = message.told
        counted: int | None = None
        try:
            if message.op == "hold":
                self._remote.create(body_of(told, message.amount, told.state or "PENDING"))
                counted = message.amount
            else:
                rows = self._charges(told)
                told = self._owned(told, rows)
                body = body_of(_dated(told, rows), _cost(told, rows), told.state)
                self._remote.update(str(told.job_id), body)
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
            log.warning(
                "job %d: the myBRC server elsewhere does not count its hold: %s",
                *(told.job_id, error),
            )
        self._failed = 0
        with self._ledger.transaction() as t:
            t.outbox.done(item.id)
            if counted is not None:
                t.remote_holds.put(told.cluster, told.job_id, told.account, told.uid, counted)
            elif message.op == "change":
                t.remote_holds.drop(told.cluster, told.job_id)

    def _owned(self, told: Told, rows: list[ChargeRow]) -> Told:
        """The same with its user's uid.

        Raises:
            RemoteRejected: Nobody knows it now; a directory of users may be away.
        """
        if told.uid >= 0 or not rows:
            return told
        charge = rows[-1].charge
        uid = self._owners.uid(charge)
        if uid is None:
            raise RemoteRejected(f"the uid of {charge.user!r} is not known", told.job_id)
        return msgspec.structs.replace(told, uid=uid)

    def _later(self, item: OutboxItem, why: str, first_s: float) -> None:
        if item.tries + 1 >= _MOST_TRIES:
            log.error(
                "job %d is not taken elsewhere after %d tries: %s; 'steward bank notices' lists it",
                *(read(item).told.job_id, item.tries + 1, why),
            )
            with self._ledger.transaction() as t:
                t.outbox.aside(item.id, why)
            return
        wait_s = min(first_s * 2 ** min(item.tries, 10), _REFUSED_MOST_S)
        log.warning("a job is not taken elsewhere, next try in %d s: %s", wait_s, why)
        with self._ledger.transaction() as t:
            t.outbox.later(item.id, self._now() + timedelta(seconds=wait_s), why)

    def _charges(self, told: Told) -> list[ChargeRow]:
        with self._ledger.reading() as t:
            return charges_of(t, told)


def charges_of(t: "Transaction", told: Told) -> list[ChargeRow]:
    """A job's charges, but for those that clients of the API had entered."""
    rows = t.charges.of_job(told.cluster, told.job_id, told.first_submit)
    return [row for row in rows if row.charge.source != TOLD]


def cost_of(t: "Transaction", told: Told) -> int:
    """The cost of a job for the account that the server knows it by, micro-SU."""
    return _cost(told, charges_of(t, told))


def _cost(told: Told, rows: list[ChargeRow]) -> int:
    return sum(
        max(0, row.charge.amount - row.refunded)
        for row in rows
        if row.charge.account == told.account
    )


def _dated(told: Told, rows: list[ChargeRow]) -> Told:
    """A job with a start and an end, from its charges where its last run has none.

    A server counts the amount of a PUT only with submit, start and end times. A run that
    was cancelled before it began starts and ends at the same time, as Slurm records it.
    """
    uses = [row.charge.use for row in rows if row.charge.use is not None]
    begun = [(use.start, use.seconds) for use in uses if use.start is not None]
    starts = [start for start, _ in begun]
    ends = [start + timedelta(seconds=seconds) for start, seconds in begun]
    end = told.end or max([told.first_submit, *([told.start] if told.start else []), *ends])
    start = told.start or min([end, *starts])
    return msgspec.structs.replace(told, start=start, end=end)


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
        "amount": wire.show(max(0, amount)),
        "jobstatus": state[:_LONGEST_WORD],
        "partition": told.partition if len(told.partition) <= _LONGEST_WORD else "",
        "qos": told.qos if len(told.qos) <= _LONGEST_WORD else "",
        "num_cpus": told.cpus or None,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def read(item: OutboxItem) -> Message:
    """What of the outbox is to be told."""
    return msgspec.json.decode(item.payload, type=Message)


def _job(message: Message) -> tuple[object, ...]:
    told = message.told
    return message.op, told.cluster, told.job_id, told.first_submit, told.account
