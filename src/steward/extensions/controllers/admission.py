"""Admission of forwarded events: which host may report for a cluster, and which events it may send.

Authentication comes first: :class:`ControllerPeers` holds the configured controllers of each
cluster and returns, for a hello, a :class:`MungeAuthenticator` (MUNGE credentials on every
message) or a :class:`TlsAuthenticator` (a TLS certificate has authenticated the host).
:func:`peer_uids` resolves ``munge_users``. ``receiver`` uses all of it, ``forwarder`` the
authenticators.

Then :class:`EventAdmission`, used by ``receiver``, checks kind, key, source, times and SHA-256 of
each received event, writes script and environment bytes to a local store, and returns journal rows.
A controller's input counts as hostile: it may report for its own cluster only, and only what a
source on its host can observe. Each event is decoded and encoded again, so that nothing reaches the
journal that this version does not understand.
"""

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
from steward.capture.nodes.aggregation import NODES_SOURCE, find_flaw
from steward.capture.sensor.store import SENSOR_SOURCE as SENSOR
from steward.capture.spool_entries import SCRIPT_TOO_LARGE
from steward.core.config import Settings
from steward.core.errors import PermissionRefused, StewardError
from steward.core.events import (
    CONTROLLER_STATE,
    JOB_END,
    JOB_MISSED,
    JOB_SCRIPT,
    JOB_SEEN,
    JOB_STATE,
    MAX_MISSED_JOB_IDS,
    NODE_STATE,
    PARTITION_STATE,
    QUEUE_POLLED,
    RESERVATION_STATE,
    Event,
    EventError,
    IncomingFile,
    JobFacts,
    JobScript,
    MissedJobs,
    NodeState,
    QueuePolled,
    ReservationState,
    decode_event,
    make_script_key,
)
from steward.core.journal.store import EncodedEvent as JournalRow
from steward.core.journal.store import encode_rows
from steward.core.listeners import is_any_host, is_ipv6, normalize_host
from steward.core.munge import SCHEME, Munge, is_credential
from steward.core.script_stores import IncomingStore, make_incoming_filename
from steward.extensions.controllers.wire import ForwardedEvent
from steward.jobs.job_ids import MAX_JOB_ID, MAX_RAW_ID
from steward.slurm.settings import ClusterSettings


class MungeAuthenticator:
    """MUNGE authenticator: makes and checks the credentials of one stream.

    Args:
        munge: Client of the cluster's munged.
        uids: Users that the peer may run as.
        addresses: Host addresses that the peer's credentials may carry; any if None.
    """

    def __init__(
        self, munge: Munge, uids: frozenset[int], addresses: frozenset[str] | None = None
    ) -> None:
        self._munge = munge
        self._uids = uids
        self._addresses = addresses

    def sign(self, statement: bytes) -> str:
        """Return the credential of an outgoing message, for its header.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        return f"{SCHEME} {self._munge.encode(statement).decode('ascii')}"

    def check(self, statement: bytes, credential: str) -> None:
        """Check that a message is from the peer.

        Args:
            statement: Text that its credential must cover.
            credential: Credential in its header.

        Raises:
            PermissionRefused: The credential does not match.
            MungeUnavailable: munged does not answer.
        """
        scheme, _, text = credential.partition(" ")
        if scheme != SCHEME or not is_credential(text):
            raise PermissionRefused("no MUNGE credential")
        claim = self._munge.decode(text.encode("ascii"))
        if claim.payload != statement:
            raise PermissionRefused(
                "the MUNGE credential does not match the message: it signs another message, "
                "cluster or receiver address"
            )
        if claim.uid not in self._uids:
            raise PermissionRefused(
                f"the MUNGE credential is from uid {claim.uid}, which is not allowed: add its user "
                "to 'munge_users' of [access]"
            )
        if self._addresses is not None and claim.address not in self._addresses:
            raise PermissionRefused(
                f"the MUNGE credential was made on {claim.address}, which is not in 'controllers'"
            )


class TlsAuthenticator:
    """Authenticator without credentials, used where TLS has authenticated the peer already."""

    def sign(self, statement: bytes) -> str:  # noqa: ARG002 -- MungeAuthenticator's signature
        """Return an empty credential."""
        return ""

    def check(self, statement: bytes, credential: str) -> None:
        """Accept every message."""


class ControllerPeers:
    """Controllers that may report, by cluster (the clusters' ``controllers`` setting).

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        tls = settings.receive.tls
        self._by_certificate = tls is not None and bool(tls.client_ca_file)
        self._uids = peer_uids(settings.access.munge_users)
        self._clusters = {
            name: cluster for name, cluster in settings.cluster.items() if cluster.controllers
        }

    def list_clusters(self) -> Iterable[str]:
        """Return the clusters that have controllers configured."""
        return self._clusters

    def get_authenticator(
        self, cluster: str, certificate_names: frozenset[str], address: str
    ) -> MungeAuthenticator | TlsAuthenticator:
        """Return the authenticator for the messages of a controller of a cluster.

        Args:
            cluster: One of :meth:`list_clusters`, as the controller's hello names it.
            certificate_names: Names in the controller's certificate.
            address: Address that the connection comes from.

        Raises:
            PermissionRefused: The certificate is for another host, or MUNGE cannot tell the host.
        """
        cluster_settings = self._clusters[cluster]
        if self._by_certificate:
            if not is_any_host(certificate_names, cluster_settings.controllers):
                raise PermissionRefused(
                    f"the certificate names {', '.join(sorted(certificate_names)) or 'no host'}, "
                    f"not one of the 'controllers' of cluster {cluster!r}"
                )
            return TlsAuthenticator()
        if is_ipv6(address):
            raise PermissionRefused(
                f"cannot authenticate {address} with MUNGE, which supports IPv4 addresses only: "
                "let the controller show a certificate ([receive] tls with a 'client_ca_file')"
            )
        addresses = _resolve_controllers(cluster_settings)
        return MungeAuthenticator(Munge(cluster_settings.munge_socket), self._uids, addresses)


def _resolve_controllers(cluster: ClusterSettings) -> frozenset[str]:
    """Resolve a cluster's controllers to the addresses that their MUNGE credentials may carry."""
    addresses: set[str] = set()
    for host in cluster.controllers:
        try:
            # Addresses pass through getaddrinfo too, which then queries no server. Names are
            # resolved at each hello because they may have moved.
            addresses.update(
                normalize_host(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)
            )
        except OSError:
            # A host that does not resolve cannot report; the others can.
            continue
    return frozenset(addresses)


def peer_uids(users: Iterable[str]) -> frozenset[int]:
    """Return the uids accepted from a peer: root, this process's, and those of ``users``.

    Raises:
        PermissionRefused: A user does not exist on this host.
    """
    uids = {0, os.geteuid()}
    for user in users:
        try:
            uids.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise PermissionRefused(
                f"unknown user {user!r} in 'munge_users' of [access]: create the user on this "
                "host, or remove the name",
                user,
            ) from None
    return frozenset(uids)


FORWARDED_KINDS: Final = aggregation.NODE_KINDS | {
    *(JOB_SCRIPT, JOB_SEEN, JOB_STATE, JOB_END, CONTROLLER_STATE, QUEUE_POLLED),
    *(NODE_STATE, PARTITION_STATE, RESERVATION_STATE, JOB_MISSED),
}
"""Kinds of events that a controller forwards."""
CONTROLLER_SOURCES: Final = frozenset(
    {"spool", "recovered", "snapshot", "sacct", SENSOR, JOBCOMP_SOURCE, NODES_SOURCE}
)
"""Sources that run on a controller's host; ``jobs/`` ranks observations by them."""

_MAX_DATA_BYTES: Final = 1 << 20
"""Largest event without its bytes, in bytes."""
_MAX_REASON: Final = 500
"""Longest reason of a refused event, in characters: it may quote the event."""
_KEY_PATTERN: Final = re.compile(r"[!-~]{1,300}")
"""Printable ASCII, as sources make keys."""
_MAX_MTIME_NS: Final = 2**63 - 1
_YEARS: Final = range(1900, 3001)
"""Plausible years. Steward never handles times outside, and some time zones cannot show them."""
_TIME_FIELDS: Final = ("submit", "eligible", "start", "end", "suspended_at", "resized_at")


class EventNotAdmitted(StewardError):
    """Event that the receiver will never accept."""


class EventAdmission:
    """Admission checks for the events of one controller, which reports for one cluster.

    Args:
        cluster: The cluster's name.
        is_known: Tells whether the journal has, or had, an event with this cluster and key.
    """

    def __init__(self, cluster: str, is_known: Callable[[str, str], bool]) -> None:
        self._cluster = cluster
        self._is_known = is_known

    def admit_events(
        self, rows: Iterable[ForwardedEvent], get_store: Callable[[], IncomingStore]
    ) -> tuple[list[JournalRow], list[tuple[int, str]]]:
        """Check events and write their script and environment bytes, not yet durably.

        Args:
            rows: Events as received.
            get_store: Returns the store that takes the bytes.

        Returns:
            The admitted events, encoded for the journal, and index and reason of each refused one.

        Raises:
            StoreUnavailable: The store cannot be written now.
        """
        admitted: list[JournalRow] = []
        rejected: list[tuple[int, str]] = []
        for index, row in enumerate(rows):
            try:
                event = self._decode_event(row)
            except EventNotAdmitted as error:
                rejected.append((index, str(error)[:_MAX_REASON]))
                continue
            if event.kind == JOB_SCRIPT:
                # The journal may have trimmed a known event; its bytes would then stay in the store
                # forever.
                if self._is_known(self._cluster, event.key):
                    continue
                event = _store_script(event, row, get_store())
            admitted += encode_rows([event])
        return admitted, rejected

    def _decode_event(self, row: ForwardedEvent) -> Event:
        """Decode and check one received event; raise EventNotAdmitted if invalid."""
        if row.cluster != self._cluster:
            raise EventNotAdmitted(
                f"wrong cluster {row.cluster!r}: this host reports for {self._cluster!r}"
            )
        if row.kind not in FORWARDED_KINDS:
            raise EventNotAdmitted(f"kind {row.kind!r} is not accepted from controllers")
        if _KEY_PATTERN.fullmatch(row.key) is None:
            raise EventNotAdmitted(
                f"malformed event key {row.key[:80]!r}: a key has 1 to 300 characters of printable "
                "ASCII, without blanks"
            )
        if len(row.data) > _MAX_DATA_BYTES:
            raise EventNotAdmitted(
                f"too large: {len(row.data)} bytes, the maximum is {_MAX_DATA_BYTES}"
            )
        try:
            event = decode_event(0, row.kind, row.cluster, row.key, row.data)
            encode_rows([event])  # text with lone surrogates decodes but cannot be encoded
        except (EventError, ValueError, RecursionError) as error:
            raise EventNotAdmitted(
                f"cannot decode {row.kind} {row.key}: {error.__cause__ or error}. If this Steward "
                "is older than the controller's, upgrade it"
            ) from error
        if event.source not in CONTROLLER_SOURCES:
            raise EventNotAdmitted(f"source {event.source!r} is not accepted from controllers")
        _check_times(event)
        if isinstance(event.body, JobScript):
            _check_script(event.key, event.body, row)
        elif row.kind in aggregation.NODE_KINDS:
            _check_node(event)
        elif not row.key.startswith(f"{row.kind}:"):
            raise EventNotAdmitted(f"the key does not match an event of kind {row.kind}")
        elif isinstance(event.body, JobFacts):
            _check_facts(event.key, row.kind, event.body)
        elif isinstance(event.body, MissedJobs):
            _check_missed(event.body)
        return event


def _check_times(event: Event) -> None:
    """Check that every time of an event has a zone and a plausible year."""
    times: list[object] = [event.at, event.seen_at]
    if isinstance(event.body, JobFacts):
        times += [getattr(event.body.record, name) for name in _TIME_FIELDS]
    elif isinstance(event.body, QueuePolled):
        times.append(event.body.began)
    elif isinstance(event.body, NodeState):
        times.append(event.body.reason_at)
    elif isinstance(event.body, ReservationState):
        times += [event.body.start, event.body.end]
    if any(isinstance(time, datetime) and time.tzinfo is None for time in times):
        raise EventNotAdmitted("a time lacks its time zone")
    if any(isinstance(time, datetime) and time.year not in _YEARS for time in times):
        raise EventNotAdmitted(
            f"implausible time: its year is not between {_YEARS.start} and {_YEARS.stop - 1}"
        )


def _check_node(event: Event) -> None:
    """Check a node event by the same rules as the collection of node reports."""
    flaw = find_flaw(event)
    if flaw:
        raise EventNotAdmitted(flaw)


def _check_facts(key: str, kind: str, body: JobFacts) -> None:
    """Check that the key belongs to the job; another job's key would suppress that job's facts."""
    if not 0 < body.record.job_id <= MAX_RAW_ID:
        raise EventNotAdmitted(f"invalid job id {body.record.job_id}: must be 1 to {MAX_RAW_ID}")
    if not key.startswith(f"{kind}:{body.record.job_id}:"):
        raise EventNotAdmitted("the key does not match the job")


def _check_missed(body: MissedJobs) -> None:
    """Check the number and the ids of the jobs in a job.missed event."""
    if not 0 < len(body.job_ids) <= MAX_MISSED_JOB_IDS:
        raise EventNotAdmitted(
            f"invalid number of job ids, {len(body.job_ids)}: send 1 to {MAX_MISSED_JOB_IDS}"
        )
    if not all(0 < job_id <= MAX_JOB_ID for job_id in body.job_ids):
        raise EventNotAdmitted(f"invalid job id in 'job_ids': each must be 1 to {MAX_JOB_ID}")


def _check_script(key: str, body: JobScript, row: ForwardedEvent) -> None:
    """Check that the received bytes match the event's lengths and SHA-256 sums."""
    if not (0 < body.job_id <= MAX_JOB_ID and 0 <= body.spool_mtime_ns <= _MAX_MTIME_NS):
        raise EventNotAdmitted("invalid job id or time")
    if key != make_script_key(body.job_id, body.spool_mtime_ns):
        raise EventNotAdmitted("the key does not match the job and time")
    if body.script is None and SCRIPT_TOO_LARGE not in body.flags:
        raise EventNotAdmitted("no script")
    for file, data in ((body.script, row.script), (body.environment, row.environment)):
        if (file is None) != (data is None):
            raise EventNotAdmitted("the content of its script or environment is missing")
        if file is None or data is None:
            continue
        if file.length != len(data) or file.sha256 != hashlib.sha256(data).hexdigest():
            raise EventNotAdmitted(
                "the script or environment does not match the length and SHA-256 of the event"
            )


def _store_script(event: Event, row: ForwardedEvent, store: IncomingStore) -> Event:
    """Write an event's bytes to a local store; return the event with the new names."""
    body: JobScript = event.body

    def write(data: bytes, what: str) -> IncomingFile:
        name = make_incoming_filename(
            event.cluster, body.job_id, body.spool_mtime_ns, len(data), what
        )
        return store.write(name, data)

    # Write the environment first: a complete script then proves that both are there.
    environment = None if row.environment is None else write(row.environment, "env")
    script = None if row.script is None else write(row.script, "script")
    stored_body = msgspec.structs.replace(
        body, script=script, environment=environment, store=store.name
    )
    return msgspec.structs.replace(event, body=stored_body)
