"""Which host may report for which cluster, and what says that it is that host."""

import hashlib
import os
import pwd
import re
import socket
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

import msgspec

from steward.capture.jobcomp import JOBCOMP_SOURCE
from steward.capture.nodes import aggregation
from steward.capture.nodes.aggregation import NODES_SOURCE, flaw_of
from steward.capture.schedulers import SCRIPT_TOO_LARGE
from steward.capture.sensor.store import SOURCE as SENSOR
from steward.core.config import Settings
from steward.core.errors import Refused, StewardError
from steward.core.events import (
    CONTROLLER_STATE,
    JOB_END,
    JOB_MISSED,
    JOB_SCRIPT,
    JOB_SEEN,
    JOB_STATE,
    MOST_MISSED,
    NODE_STATE,
    PARTITION_STATE,
    QUEUE_LOOKED,
    RESERVATION_STATE,
    Event,
    EventError,
    JobFacts,
    JobScript,
    JobsMissed,
    Kept,
    NodeState,
    QueueLooked,
    ReservationState,
    decode,
    script_key,
)
from steward.core.incoming import Store, kept_filename
from steward.core.journal.store import Row as JournalRow
from steward.core.journal.store import rows_of
from steward.core.listeners import is_ipv6, plain
from steward.core.munge import Munge
from steward.extensions.controllers.wire import (
    FROM_CONTROLLER,
    FROM_RECEIVER,
    Frame,
    Row,
    statement,
)
from steward.jobs.job_ids import MAX_JOB_ID, MAX_RAW_ID
from steward.slurm.settings import ClusterSettings


class Witness:
    """Makes and checks the credentials of one connection by one cluster's MUNGE.

    Args:
        munge: The cluster's munged.
        sends: Direction of what we say: ``FROM_CONTROLLER`` or ``FROM_RECEIVER``.
        uids: Who may be at the other end.
        addresses: Hosts that the other end may be; any if None.
    """

    def __init__(
        self,
        munge: Munge,
        sends: str,
        uids: frozenset[int],
        addresses: frozenset[str] | None = None,
    ) -> None:
        self._munge = munge
        self._sends = sends
        self._hears = FROM_CONTROLLER if sends == FROM_RECEIVER else FROM_RECEIVER
        self._uids = uids
        self._addresses = addresses

    def sign(self, nonces: bytes, number: int, body: bytes) -> bytes:
        """The credential of a message of ours.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        return self._munge.encode(statement(self._sends, nonces, number, body))

    def check(self, nonces: bytes, number: int, frame: Frame) -> None:
        """See that a message is the other end's, and has this place in this connection.

        Raises:
            Refused: It is not.
            MungeUnavailable: munged does not answer.
        """
        claim = self._munge.decode(frame.credential)
        if claim.payload != statement(self._hears, nonces, number, frame.body):
            raise Refused("the MUNGE credential is for other bytes, or for another place")
        if claim.uid not in self._uids:
            raise Refused(f"the MUNGE credential is uid {claim.uid}'s, who is not in munge_users")
        if self._addresses is not None and claim.address not in self._addresses:
            raise Refused(
                f"the MUNGE credential was made on {claim.address}, which is none of 'controllers'"
            )


class Unwitnessed:
    """In a Witness's place where TLS has told who is there."""

    def sign(self, nonces: bytes, number: int, body: bytes) -> bytes:  # noqa: ARG002 -- a Witness's signature
        """No credential."""
        return b""

    def check(self, nonces: bytes, number: int, frame: Frame) -> None:
        """All is well."""


class Peers:
    """The controllers that may report, by cluster.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._by_certificate = bool(settings.receive.client_ca_file)
        self._uids = uids_of(settings.receive.munge_users)
        self._clusters = {
            name: cluster for name, cluster in settings.cluster.items() if cluster.controllers
        }

    def clusters(self) -> Iterable[str]:
        """The clusters that anybody may report for."""
        return self._clusters

    def witness(self, cluster: str, names: frozenset[str], address: str) -> Witness | Unwitnessed:
        """What is to answer for the messages of one who wants to report for a cluster.

        Args:
            cluster: As the controller says it.
            names: The names that its certificate holds.
            address: Where its connection comes from.

        Raises:
            Refused: Nobody may report for this cluster, or not with this certificate.
        """
        of = self._clusters.get(cluster)
        if of is None:
            raise Refused("nobody may report for such a cluster: set its 'controllers'")
        if self._by_certificate:
            if frozenset(map(plain, names)).isdisjoint(map(plain, of.controllers)):
                raise Refused(
                    f"the certificate is for {', '.join(sorted(names)) or 'no host'}, "
                    f"which is none of the 'controllers' of cluster {cluster!r}"
                )
            return Unwitnessed()
        if is_ipv6(address):
            raise Refused(
                f"the connection comes from {address}, and a MUNGE credential names addresses of "
                "IPv4 alone: over IPv6 controllers show a certificate ('client_ca_file' of "
                "[receive])"
            )
        addresses = _addresses_of(of)
        return Witness(Munge(of.munge_socket), FROM_RECEIVER, self._uids, addresses)


def _addresses_of(cluster: ClusterSettings) -> frozenset[str]:
    """The addresses that a credential made on one of a cluster's controllers may carry."""
    found: set[str] = set()
    for host in cluster.controllers:
        try:
            # Also an address is looked up, which asks nobody. A name may have moved since the
            # last time.
            found.update(plain(str(entry[4][0])) for entry in socket.getaddrinfo(host, None))
        except OSError:
            # One that does not resolve is known by no address; the others may report.
            continue
    return frozenset(found)


def uids_of(users: Iterable[str]) -> frozenset[int]:
    """The uids that Steward may run as on the other side: root's, our own, and these users'.

    Raises:
        Refused: A user does not exist here.
    """
    uids = {0, os.geteuid()}
    for user in users:
        try:
            uids.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise Refused(f"munge_users: there is no user {user!r}", user) from None
    return frozenset(uids)


KINDS: Final = aggregation.KINDS | {
    *(JOB_SCRIPT, JOB_SEEN, JOB_STATE, JOB_END, CONTROLLER_STATE, QUEUE_LOOKED),
    *(NODE_STATE, PARTITION_STATE, RESERVATION_STATE, JOB_MISSED),
}
"""What is forwarded."""
SOURCES: Final = frozenset(
    {"spool", "recovered", "snapshot", "sacct", SENSOR, JOBCOMP_SOURCE, NODES_SOURCE}
)
"""Who on a controller's host sees such things; the jobs' records are sorted by these."""

_MOST_DATA: Final = 1 << 20
_KEY: Final = re.compile(r"[!-~]{1,300}")
_MOST_MTIME: Final = 2**63 - 1
_YEARS: Final = range(1900, 3001)
"""Nothing that Steward is told lies outside, and not every zone can show what does."""
_TIMES: Final = ("submit", "eligible", "start", "end", "suspended_at", "resized_at")


class NotAdmitted(StewardError):
    """An event that will never be taken."""


class Admitting:
    """Admits what reports for one cluster.

    Args:
        cluster: Its name.
        known: Whether the journal has, or has had, an event of this key of this cluster.
    """

    def __init__(self, cluster: str, known: Callable[[str, str], bool]) -> None:
        self._cluster = cluster
        self._known = known

    def admit(
        self, rows: Iterable[Row], store: Callable[[], Store]
    ) -> tuple[list[JournalRow], list[tuple[int, str]]]:
        """Check events and write the bytes that they speak of; they are not durable yet.

        Args:
            rows: What was sent.
            store: Gives the store that bytes go to.

        Returns:
            The events to be appended, encoded, and index and reason of each that is not admitted.

        Raises:
            StoreUnavailable: Bytes cannot be written now.
        """
        admitted: list[JournalRow] = []
        refused: list[tuple[int, str]] = []
        for index, row in enumerate(rows):
            try:
                event = self._event(row)
            except NotAdmitted as error:
                refused.append((index, str(error)))
                continue
            if event.kind == JOB_SCRIPT:
                # Bytes of what was trimmed already would lie in the store for ever.
                if self._known(self._cluster, event.key):
                    continue
                event = _kept(event, row, store())
            admitted += rows_of([event])
        return admitted, refused

    def _event(self, row: Row) -> Event:
        if row.cluster != self._cluster:
            raise NotAdmitted(f"it is of cluster {row.cluster!r}, this host reports for another")
        if row.kind not in KINDS:
            raise NotAdmitted(f"events of kind {row.kind!r} are not taken from a controller")
        if _KEY.fullmatch(row.key) is None:
            raise NotAdmitted("its key is not one that a source makes")
        if len(row.data) > _MOST_DATA:
            raise NotAdmitted(f"it has {len(row.data)} bytes, more than {_MOST_DATA}")
        try:
            event = decode(0, row.kind, row.cluster, row.key, row.data)
            rows_of([event])  # text that is none may be read, and yet not be written
        except (EventError, ValueError, RecursionError) as error:
            raise NotAdmitted(f"{error}: is this Steward older than the controller's?") from error
        if event.source not in SOURCES:
            raise NotAdmitted(f"its source {event.source!r} is none of a controller's")
        _check_times(event)
        if isinstance(event.body, JobScript):
            _check_script(event.key, event.body, row)
        elif row.kind in aggregation.KINDS:
            _check_node(event)
        elif not row.key.startswith(f"{row.kind}:"):
            raise NotAdmitted(f"its key is not that of a {row.kind}")
        elif isinstance(event.body, JobFacts):
            _check_facts(event.key, row.kind, event.body)
        elif isinstance(event.body, JobsMissed):
            _check_missed(event.body)
        return event


def _check_times(event: Event) -> None:
    times: list[object] = [event.at, event.seen_at]
    if isinstance(event.body, JobFacts):
        times += [getattr(event.body.record, name) for name in _TIMES]
    elif isinstance(event.body, QueueLooked):
        times.append(event.body.began)
    elif isinstance(event.body, NodeState):
        times.append(event.body.reason_at)
    elif isinstance(event.body, ReservationState):
        times += [event.body.start, event.body.end]
    if any(isinstance(time, datetime) and time.tzinfo is None for time in times):
        raise NotAdmitted("it has a time without a zone")
    if any(isinstance(time, datetime) and time.year not in _YEARS for time in times):
        raise NotAdmitted("it has a time that no job can have")


def _check_node(event: Event) -> None:
    """See that it is what the receiver of a controller makes of what nodes report."""
    flaw = flaw_of(event)
    if flaw:
        raise NotAdmitted(flaw)


def _check_facts(key: str, kind: str, body: JobFacts) -> None:
    """See that the key is the job's: that of another would have its own facts passed over."""
    if not 0 < body.record.job_id <= MAX_RAW_ID:
        raise NotAdmitted("its job id is none")
    if not key.startswith(f"{kind}:{body.record.job_id}:"):
        raise NotAdmitted("its key is not that of its job")


def _check_missed(body: JobsMissed) -> None:
    if not 0 < len(body.job_ids) <= MOST_MISSED:
        raise NotAdmitted(f"it names {len(body.job_ids)} jobs: 1 to {MOST_MISSED} are taken")
    if not all(0 < job_id <= MAX_JOB_ID for job_id in body.job_ids):
        raise NotAdmitted("its job id is none")


def _check_script(key: str, body: JobScript, row: Row) -> None:
    """See that the bytes are those that the event speaks of."""
    if not (0 < body.job_id <= MAX_JOB_ID and 0 <= body.spool_mtime_ns <= _MOST_MTIME):
        raise NotAdmitted("its job id or its time is none")
    if key != script_key(body.job_id, body.spool_mtime_ns):
        raise NotAdmitted("its key is not that of its job and time")
    if body.script is None and SCRIPT_TOO_LARGE not in body.flags:
        raise NotAdmitted("it has no script")
    for kept, data in ((body.script, row.script), (body.environment, row.environment)):
        if (kept is None) != (data is None):
            raise NotAdmitted("it came without its bytes")
        if kept is None or data is None:
            continue
        if kept.length != len(data) or kept.sha256 != hashlib.sha256(data).hexdigest():
            raise NotAdmitted("its bytes are not those that were captured (SHA-256)")


def _kept(event: Event, row: Row, store: Store) -> Event:
    """The event with its bytes in a store of ours, under names that we make."""
    body: JobScript = event.body

    def write(data: bytes, what: str) -> Kept:
        name = kept_filename(event.cluster, body.job_id, body.spool_mtime_ns, len(data), what)
        return store.write(name, data)

    # The environment first: a complete script then tells that both are here.
    environment = None if row.environment is None else write(row.environment, "env")
    script = None if row.script is None else write(row.script, "script")
    here = msgspec.structs.replace(body, script=script, environment=environment, store=store.name)
    return msgspec.structs.replace(event, body=here)
