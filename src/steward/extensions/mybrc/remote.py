"""Client of a myBRC server elsewhere, and the sender that empties the outbox to it.

:class:`MybrcClient` makes the HTTP requests: new job, update, ``can_submit_job``.
:class:`OutboxSender` reads messages from the ledger's outbox (``outbox`` writes them), sends each
until the server accepts it, and keeps only the latest for each job; the daemon's worker calls
``send_once``. The functions below build the request body from a job's charges.

While the server is away, all messages wait. One that the server rejects, or fails on, is retried
with growing delays for a week and holds up no other; if the server fails on everything, it counts
as away.
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
from steward.bank.remote import REPORTED_SOURCE
from steward.core.config import Settings
from steward.core.section import TlsSettings
from steward.core.tls import TlsUnavailable, make_client_context
from steward.core.waits import Backoff, Stop
from steward.extensions.mybrc import wire
from steward.extensions.mybrc.outbox import (
    MYBRC_KIND,
    CorrectionScan,
    JobOwners,
    RemoteJob,
    RemoteMessage,
)
from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 30.0
"""Time-out of one request, in seconds."""
_BATCH: Final = 100
"""Most messages sent in one turn."""
_MAX_RETRIED: Final = 1000
"""Most unsent messages considered for dropping outdated ones."""
_IDLE_S: Final = 1.0
"""Wait after a turn with nothing left to send, in seconds."""
_BACKOFF_FIRST_S: Final = 0.5
"""First delay while the server is away, in seconds."""
_BACKOFF_MAX_S: Final = 60.0
"""Longest delay while the server is away, in seconds."""
_REJECTED_RETRY_S: Final = 60.0
"""First delay of a rejected message, in seconds; doubles with each try."""
_RETRY_MAX_S: Final = 3600.0
"""Longest delay of a message, in seconds."""
_MAX_TRIES: Final = 175
"""Most tries of one rejected message: about a week."""
_MAX_WORD_LENGTH: Final = 50
"""Longest state, partition or QOS that the API accepts, in characters."""
_ACCEPTED_STATUSES: Final = (200, 201)
_REJECTED_STATUSES: Final = (400, 409, 413, 422)
"""Excludes 404: POST and PUT accept new jobs, so a 404 means a wrong path in the URL."""
_MAX_ERROR_TEXT: Final = 300
"""Most characters of an error reply to log."""
_NOT_FOUND_STATUS: Final = 404
_SERVER_ERROR_STATUS: Final = 500
_FAILED_RETRY_S: Final = 10.0
"""First delay of a message on which the server failed, in seconds."""
_MAX_FAILURES_IN_A_ROW: Final = 20
"""Consecutive failures after which the server, not the message, is at fault."""


class _AcceptedJob(msgspec.Struct, frozen=True):
    """Reply of a server that accepted a job; other fields are ignored."""

    jobslurmid: str | int


class AffordReply(msgspec.Struct, frozen=True):
    """Server's answer to ``can_submit_job``.

    Attributes:
        success: Whether the job can be submitted.
        message: The reason, as text.
    """

    success: bool
    message: str = ""


class MybrcClient:
    """HTTP client of the myBRC server elsewhere.

    Args:
        settings: The configuration; only [bank.remote] is used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.bank.remote
        self._client: Any = None

    def create(self, body: dict[str, Any]) -> None:
        """Send a new job (POST).

        Raises:
            RemoteUnavailable: The server cannot be reached now.
            RemoteFailed: The server fails on this job.
            RemoteRejected: The server rejects the job.
        """
        self._send("POST", "/jobs/", body)

    def update(self, jobslurmid: str, body: dict[str, Any]) -> None:
        """Send a job, new or known (PUT).

        Raises:
            RemoteUnavailable: The server cannot be reached now.
            RemoteFailed: The server fails on this job.
            RemoteRejected: The server rejects the job.
        """
        self._send("PUT", f"/jobs/{jobslurmid}/", body)

    def check_access(self) -> None:
        """Check that the server answers and that the token may send jobs.

        Raises:
            RemoteUnavailable: It does not answer, the token may not, or [bank.remote] is wrong.
            RemoteFailed: The server fails on a list of jobs.
            RemoteRejected: The server returns no list of jobs.
        """
        self._send("GET", "/jobs/")
        # A job without a name is invalid: a token that may write gets a rejection for that alone.
        with contextlib.suppress(RemoteRejected, RemoteFailed):
            self._send("POST", "/jobs/", {"jobslurmid": ""})

    def query_can_submit(self, cost: int, uid: int, account: str) -> AffordReply:
        """Ask whether a job of a cost can be submitted.

        Args:
            cost: Cost in micro-SU; the server gets hundredths of an SU.
            uid: User of the job.
            account: Account that would pay.

        Raises:
            RemoteUnavailable: The server does not answer now, or [bank.remote] is wrong.
            RemoteFailed: The server fails on this question.
            RemoteRejected: The server knows no such user or account.
        """
        quoted_account = quote(account, safe="")
        path = f"/can_submit_job/{wire.format_su(cost)}/{uid}/{quoted_account}/"
        reply = self._send("GET", path)
        try:
            return msgspec.json.decode(reply, type=AffordReply)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RemoteUnavailable(
                f"GET {self._settings.url}{path}: {error}. Is the path in [bank.remote] url right?",
                path,
            ) from error

    def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send one request; map errors and statuses to Steward's exceptions."""
        import httpx

        url = self._settings.url.rstrip("/") + path
        try:
            headers = {"Authorization": self._read_token(), "Content-Type": "application/json"}
            content = None if body is None else msgspec.json.encode(body)
            reply = self._get_client().request(method, url, content=content, headers=headers)
        except httpx.ReadTimeout as error:
            self.close()
            raise RemoteFailed(f"{method} {url}: no reply within {_TIMEOUT_S:g} s", path) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, TlsUnavailable) as error:
            # ValueError: an invalid token.
            self.close()
            raise RemoteUnavailable(f"{self._settings.url}: {error}", path) from error
        if reply.status_code in _ACCEPTED_STATUSES:
            if body is not None and not _confirms_job(reply.content, body["jobslurmid"]):
                raise RemoteUnavailable(
                    f"{method} {url}: {reply.status_code}, but the reply is about another job. "
                    "Is the path in [bank.remote] url right?",
                    path,
                )
            return bytes(reply.content)
        if reply.status_code == _NOT_FOUND_STATUS:
            raise RemoteUnavailable(
                f"{method} {url}: 404. Is the path in [bank.remote] url right?", path
            )
        failure = f"{method} {url}: {reply.status_code} {reply.text[:_MAX_ERROR_TEXT]}"
        if reply.status_code in _REJECTED_STATUSES:
            if not _is_json(reply.content):
                # A proxy may block one job for its content: that holds up nothing else.
                raise RemoteFailed(f"{failure}. Is the path in [bank.remote] url right?", path)
            raise RemoteRejected(failure, path)
        if reply.status_code == _SERVER_ERROR_STATUS:
            raise RemoteFailed(failure, path)
        raise RemoteUnavailable(failure, path)

    def _get_client(self) -> Any:
        """Return the HTTP client, creating it where there is none."""
        if self._client is None:
            import httpx

            # Ignore the environment: a proxy of somebody's shell is not the site's.
            verify = make_client_context(self._settings.tls or TlsSettings())
            self._client = httpx.Client(timeout=_TIMEOUT_S, verify=verify, trust_env=False)
        return self._client

    def _read_token(self) -> str:
        """Read the token file into the Authorization header's value."""
        # Read each time, so that a new token needs no restart.
        with open(self._settings.token_file, encoding="ascii") as file:
            token = file.read().strip()
        return token if token.lower().startswith("token ") else f"Token {token}"


def _confirms_job(reply: bytes, job_id: str) -> bool:
    """Return True if an answer is that job's JSON; a captive portal's page never is."""
    try:
        return str(msgspec.json.decode(reply, type=_AcceptedJob).jobslurmid) == job_id
    except (msgspec.DecodeError, RecursionError):
        return False


def _is_json(reply: bytes) -> bool:
    """Return True if an answer is JSON, as a myBRC server's own refusals are."""
    try:
        msgspec.json.decode(reply)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class OutboxSender:
    """Sender that empties the outbox to the server.

    Args:
        settings: The whole configuration.
        ledger: Ledger that holds the outbox.
        now: Returns the current time.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", now: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._now = now
        self._client = MybrcClient(settings)
        self._owners = JobOwners(settings.state_dir)
        self._correction_scan = CorrectionScan(settings, ledger, self._owners)
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._last_error = ""
        self._failures_in_a_row = 0

    def close(self) -> None:
        """Close connections and jobs.db."""
        self._client.close()
        self._owners.close()

    def send_once(self, stop: Stop, heartbeat: Callable[[], None]) -> float:
        """Send the messages that are due.

        Returns:
            Seconds to wait before the next call.
        """
        try:
            self._correction_scan.scan()
            with self._ledger.reading() as t:
                items = t.outbox.list_due(MYBRC_KIND, self._now(), _BATCH)
                unsent = t.outbox.list_undelivered((MYBRC_KIND,), _MAX_RETRIED) if items else []
            for item in self._drop_outdated(
                items, [item_tried for item_tried in unsent if item_tried.tries]
            ):
                if stop.is_set():
                    return 0.0
                heartbeat()
                self._send_item(item)
        except (RemoteUnavailable, LedgerUnavailable) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("cannot notify the myBRC server, retrying later: %s", error)
            return self._backoff.next_s()
        if items:
            self._backoff.reset()
            self._last_error = ""
        return 0.0 if len(items) == _BATCH else _IDLE_S

    def _drop_outdated(self, items: list[OutboxItem], tried: list[OutboxItem]) -> list[OutboxItem]:
        """Drop messages whose job has a later message, which carries the cost anyway.

        Args:
            items: Messages that are due.
            tried: Messages that were tried before, due or not, or dead letters.
        """
        subjects = {
            item.id: _message_subject(decode_outbox_item(item)) for item in (*items, *tried)
        }
        last_numbers: dict[tuple[object, ...], int] = {}
        for number in sorted(subjects):
            last_numbers[subjects[number]] = number
        current = [item for item in items if last_numbers[subjects[item.id]] == item.id]
        outdated = [
            number for number, subject in subjects.items() if last_numbers[subject] != number
        ]
        if outdated:
            with self._ledger.transaction() as t:
                for number in outdated:
                    t.outbox.mark_delivered(number)
        return current

    def _send_item(self, item: OutboxItem) -> None:
        """Send one message; remove it from the outbox, or postpone it."""
        message = decode_outbox_item(item)
        job = message.told
        held_amount: int | None = None
        try:
            if message.op == "hold":
                self._client.create(build_job_body(job, message.amount, job.state or "PENDING"))
                held_amount = message.amount
            else:
                rows = self._read_charges(job)
                job = self._resolve_uid(job, rows)
                body = build_job_body(_with_dates(job, rows), _sum_charges(job, rows), job.state)
                self._client.update(str(job.job_id), body)
        except RemoteFailed as error:
            self._postpone(item, str(error), _FAILED_RETRY_S)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                raise RemoteUnavailable(str(error), job.job_id) from error
            return
        except RemoteRejected as error:
            self._failures_in_a_row = 0
            if message.op == "change":
                self._postpone(item, str(error), _REJECTED_RETRY_S)
                return
            # The server knows the job already, or its first charge will report it.
            log.warning(
                "job %d: the myBRC server does not count its hold: %s",
                *(job.job_id, error),
            )
        self._failures_in_a_row = 0
        with self._ledger.transaction() as t:
            t.outbox.mark_delivered(item.id)
            if held_amount is not None:
                t.remote_holds.put(job.cluster, job.job_id, job.account, job.uid, held_amount)
            elif message.op == "change":
                t.remote_holds.delete(job.cluster, job.job_id)

    def _resolve_uid(self, job: RemoteJob, rows: list[ChargeRow]) -> RemoteJob:
        """Return the job with its user's uid.

        Raises:
            RemoteRejected: The uid is unknown now; the user directory may be away.
        """
        if job.uid >= 0 or not rows:
            return job
        charge = rows[-1].charge
        uid = self._owners.find_uid(charge)
        if uid is None:
            raise RemoteRejected(
                f"user {charge.user!r} has no uid now: check 'getent passwd'", job.job_id
            )
        return msgspec.structs.replace(job, uid=uid)

    def _postpone(self, item: OutboxItem, reason: str, first_s: float) -> None:
        """Postpone a message; after the last try, make it a dead letter."""
        if item.tries + 1 >= _MAX_TRIES:
            log.error(
                "cannot send job %d to the myBRC server after %d attempts: %s; see 'steward "
                "bank notices'",
                *(decode_outbox_item(item).told.job_id, item.tries + 1, reason),
            )
            with self._ledger.transaction() as t:
                t.outbox.make_dead_letter(item.id, reason)
            return
        wait_s = min(first_s * 2 ** min(item.tries, 10), _RETRY_MAX_S)
        log.warning("cannot send a job to the myBRC server, retrying in %d s: %s", wait_s, reason)
        with self._ledger.transaction() as t:
            t.outbox.record_failure(item.id, self._now() + timedelta(seconds=wait_s), reason)

    def _read_charges(self, job: RemoteJob) -> list[ChargeRow]:
        with self._ledger.reading() as t:
            return billable_charges(t, job)


def billable_charges(t: "Transaction", job: RemoteJob) -> list[ChargeRow]:
    """Return a job's charges, except those entered by clients of the API."""
    rows = t.charges.list_of_job(job.cluster, job.job_id, job.first_submit)
    return [row for row in rows if row.charge.source != REPORTED_SOURCE]


def job_cost_of(t: "Transaction", job: RemoteJob) -> int:
    """Sum the cost of a job for the account that the server knows it by, in micro-SU."""
    return _sum_charges(job, billable_charges(t, job))


def _sum_charges(job: RemoteJob, rows: list[ChargeRow]) -> int:
    """Sum a job's charges for its account, refunds deducted."""
    return sum(
        max(0, row.charge.amount - row.refunded)
        for row in rows
        if row.charge.account == job.account
    )


def _with_dates(job: RemoteJob, rows: list[ChargeRow]) -> RemoteJob:
    """Fill in a job's start and end from its charges where its last run has none.

    A server counts the amount of a PUT only with submit, start and end times. A run that was
    cancelled before it began starts and ends at the same time, as Slurm records it.
    """
    uses = [row.charge.use for row in rows if row.charge.use is not None]
    run_times = [(use.start, use.seconds) for use in uses if use.start is not None]
    starts = [start for start, _ in run_times]
    ends = [start + timedelta(seconds=seconds) for start, seconds in run_times]
    end = job.end or max([job.first_submit, *([job.start] if job.start else []), *ends])
    start = job.start or min([end, *starts])
    return msgspec.structs.replace(job, start=start, end=end)


def build_job_body(job: RemoteJob, amount: int, state: str) -> dict[str, Any]:
    """Build the JSON fields of a job for the API; empty fields are left out.

    Args:
        job: The job.
        amount: Its cost, micro-SU.
        state: Its state.
    """
    fields = {
        "jobslurmid": str(job.job_id),
        "submitdate": job.first_submit,
        "startdate": job.start,
        "enddate": job.end,
        "userid": str(job.uid),
        "accountid": job.account,
        "amount": wire.format_su(max(0, amount)),
        "jobstatus": state[:_MAX_WORD_LENGTH],
        "partition": job.partition if len(job.partition) <= _MAX_WORD_LENGTH else "",
        "qos": job.qos if len(job.qos) <= _MAX_WORD_LENGTH else "",
        "num_cpus": job.cpus or None,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def decode_outbox_item(item: OutboxItem) -> RemoteMessage:
    """Decode the message of an outbox item."""
    return msgspec.json.decode(item.payload, type=RemoteMessage)


def _message_subject(message: RemoteMessage) -> tuple[object, ...]:
    """Return the subject of a message; a later message with the same subject replaces it."""
    job = message.told
    return message.op, job.cluster, job.job_id, job.first_submit, job.account
