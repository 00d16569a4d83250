"""Sender authentication: verifies which node sent a batch; a node may report only on itself.

With TLS client certificates the certificate names the node. With MUNGE the credential must be
root's or SlurmdUser's and must have been made on the node that the batch names; Slurm says at which
address that is. Every node has the cluster's MUNGE key and can forge credentials that name another
node, so the connection must come from that address too, except from networks in [nodes]
behind_nat.
MUNGE knows IPv4 addresses only, so agents that connect over IPv6 need certificates.

``parse_batch_header`` parses the batch's :class:`BatchHeader`. :class:`SenderAuthenticator` is the
entry point: its ``authenticate`` returns an :class:`AuthenticatedSender`, or raises.
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from steward.agent.agent import NODE_NAME, answer_claim_of, claim_of
from steward.capture.nodes.listener import RequestError
from steward.core.config import Settings
from steward.core.errors import PermissionRefused
from steward.core.listeners import is_ipv6, is_within, normalize_host
from steward.core.munge import Munge
from steward.slurm import SlurmError, SlurmUnavailable
from steward.slurm.cluster import NodePlace, node_addresses, slurmd_uid
from steward.slurm.settings import ClusterSettings

log = logging.getLogger(__name__)

_ADDRESS_CACHE_S: Final = 600.0
"""Time for which addresses are cached, in seconds."""
_MIN_QUERY_INTERVAL_S: Final = 30.0
"""Minimum interval of queries of Slurm, in seconds."""
_QUERY_COST_FACTOR: Final = 20.0
"""Slurm is not queried again before this multiple of the last query's duration."""
_ID: Final = re.compile(r"[0-9A-Za-z-]{0,64}")
"""Valid ids of boots and spools."""
_CREDENTIAL: Final = re.compile(rb"[!-~]{1,8192}")
"""Valid MUNGE credentials."""
_ROOT: Final = 0
"""Uid of root."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header ``Steward-Batch``: metadata of a batch.

    Attributes:
        v: Version of the protocol.
        node: NodeName.
        cluster: Name of its cluster; "" if Steward serves only one.
        boot: Boot id.
        place: Id of the agent's spool; a new id means that the old spool was lost.
        sequence: Number of the batch within this spool.
        dropped: Lines that the node discarded since the last batch.
        dropped_ever: Lines discarded since this spool was created.
        nonce: Random text that makes each request unique.
    """

    v: int
    node: str
    cluster: str = ""
    boot: str = ""
    place: str = ""
    sequence: _Count = 0
    dropped: _Count = 0
    dropped_ever: _Count = 0
    nonce: str = ""


_head_decoder = msgspec.json.Decoder(BatchHeader)


def parse_batch_header(text: bytes) -> BatchHeader:
    """Parse the header ``Steward-Batch``.

    Raises:
        RequestError: It is invalid.
    """
    try:
        head = _head_decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"cannot decode the header Steward-Batch: {error}") from error
    if head.v != 1:
        raise RequestError(
            400, f"the agent uses protocol version {head.v}: install the agent of Steward's version"
        )
    if NODE_NAME.fullmatch(head.node) is None:
        raise RequestError(400, "the batch names no node")
    if not all(map(_ID.fullmatch, (head.boot, head.place))) or len(head.nonce) > 64:
        raise RequestError(400, "the batch has an invalid boot id, place id or nonce")
    return head


class AuthenticatedSender:
    """Authenticated sender of a batch, whose body is still to be compared with the credential.

    Args:
        cluster: Cluster of the node.
        head: Header of the batch.
        claim: Payload of the MUNGE credential; None with TLS.
        munge: Signs replies; None with TLS.
    """

    def __init__(
        self, cluster: str, head: BatchHeader, claim: bytes | None, munge: Munge | None
    ) -> None:
        self.cluster = cluster
        self.head = head
        self._claim = claim
        self._munge = munge

    def check_digest(self, digest: str) -> None:
        """Check that the credential was made for this batch.

        Raises:
            PermissionRefused: It was made for another.
        """
        head = self.head
        expected = claim_of(head.node, head.cluster, head.sequence, digest)
        if self._claim is not None and self._claim != expected:
            raise PermissionRefused("the MUNGE credential is for another batch")

    def sign_reply(self, digest: str, reply: bytes) -> str:
        """Sign a reply with MUNGE; return "" with TLS.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        if self._munge is None:
            return ""
        return self._munge.encode(answer_claim_of(digest, reply)).decode("ascii")


class SenderAuthenticator:
    """Authenticator of batches: knows the nodes of all clusters that may report.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        tls = settings.nodes.tls
        self._by_certificate = tls is not None and bool(tls.client_ca_file)
        self._behind_nat = settings.nodes.behind_nat
        self._clusters = {
            name: _ClusterNodes(name, cluster_settings)
            for name, cluster_settings in settings.cluster.items()
            if cluster_settings.scheduler == "slurm"
        }

    def authenticate(
        self, head: BatchHeader, credential: bytes, certificate_names: frozenset[str], address: str
    ) -> AuthenticatedSender:
        """Authenticate the sender of a batch.

        Args:
            head: Header of the batch.
            credential: MUNGE credential.
            certificate_names: Names in the client certificate.
            address: Peer address of the connection.

        Raises:
            PermissionRefused: The sender is not the node it claims to be.
            Unavailable: That cannot be verified now.
        """
        cluster = self._find_cluster(head.cluster)
        if self._by_certificate:
            valid_names = {f"{head.node}.{cluster.name}"}
            if len(self._clusters) == 1:
                valid_names.add(head.node)
            if frozenset(map(normalize_host, certificate_names)).isdisjoint(
                map(normalize_host, valid_names)
            ):
                raise PermissionRefused(
                    f"the certificate is for {', '.join(sorted(certificate_names)) or 'no host'}, "
                    f"not for {' or '.join(sorted(valid_names))}"
                )
            return AuthenticatedSender(cluster.name, head, None, None)
        if is_ipv6(address):
            raise PermissionRefused(
                f"the connection comes from {address}, but MUNGE credentials name IPv4 addresses "
                "only: over IPv6, nodes need a certificate ([nodes] tls with 'client_ca_file')"
            )
        if _CREDENTIAL.fullmatch(credential) is None:
            raise PermissionRefused("missing MUNGE credential: is munged running on the node?")
        claim = cluster.munge.decode(credential)
        cluster.check_credential(head.node, claim.uid, claim.address)
        if not is_within(address, self._behind_nat):
            cluster.check_peer(head.node, _strip_ipv6_prefix(address))
        return AuthenticatedSender(cluster.name, head, claim.payload, cluster.munge)

    def _find_cluster(self, name: str) -> "_ClusterNodes":
        """Return the cluster of a batch; the only one if the batch names none."""
        if not name and len(self._clusters) == 1:
            return next(iter(self._clusters.values()))
        cluster = self._clusters.get(name)
        if cluster is None:
            raise PermissionRefused(f"unknown cluster {name!r}: correct the agent's --cluster")
        return cluster


class _ClusterNodes:
    """Node addresses of one cluster, cached from Slurm and DNS."""

    def __init__(self, name: str, settings: ClusterSettings) -> None:
        self.name = name
        self.munge = Munge(settings.munge_socket)
        self._settings = settings
        self._queries_slurm = settings.asks_slurm and not settings.remote
        self._lock = threading.Lock()
        self._places: Mapping[str, NodePlace] = {}
        self._uids = frozenset({_ROOT})
        self._has_places = False
        self._refresh_at = 0.0
        self._retry_at = 0.0
        self._addresses: dict[str, tuple[float, frozenset[str]]] = {}

    def check_credential(self, node: str, uid: int, address: str) -> None:
        """Check that a credential was made on the node by root or SlurmdUser.

        Raises:
            PermissionRefused: It was made on another host or by another user.
            SlurmUnavailable: Slurm has not yet told the nodes' addresses.
        """
        place = self._get_place(node)
        if uid not in self._uids:
            raise PermissionRefused(
                f"the MUNGE credential is of uid {uid}, not of root or SlurmdUser"
            )
        self._check_address(node, place, address, f"the MUNGE credential was made on {address}")

    def check_peer(self, node: str, address: str) -> None:
        """Check that a connection comes from the node.

        Raises:
            PermissionRefused: It comes from another host.
            SlurmUnavailable: Slurm has not yet told the nodes' addresses.
        """
        origin = f"the connection comes from {address} (see [nodes] behind_nat)"
        self._check_address(node, self._get_place(node), address, origin)

    def _check_address(self, node: str, place: NodePlace, address: str, description: str) -> None:
        """Check that an address is one of the node's."""
        addresses = self._resolve(place.address)
        if address not in addresses:
            # Resolved last: where names do not resolve, a lookup takes long.
            addresses |= self._resolve(place.hostname)
        if address not in addresses:
            raise PermissionRefused(
                f"{description}, but node {node} is at "
                f"{', '.join(sorted(addresses)) or f'{place.address}, which does not resolve'}"
            )

    def _get_place(self, node: str) -> NodePlace:
        """Return a node's address and hostname according to Slurm."""
        if not self._queries_slurm:
            # A remote cluster's Slurm cannot be queried here; its nodes resolve by NodeName.
            return NodePlace(node, node)
        with self._lock:
            now = time.monotonic()
            if now >= self._refresh_at or (node not in self._places and now >= self._retry_at):
                self._query_slurm(now)
            if not self._has_places:
                raise SlurmUnavailable(
                    f"the node addresses of cluster {self.name} are not known yet: retry later"
                )
        if node not in self._places:
            raise PermissionRefused(f"cluster {self.name} has no node {node!r}")
        return self._places[node]

    def _query_slurm(self, now: float) -> None:
        """Query Slurm for node addresses and SlurmdUser."""
        try:
            self._places = node_addresses(self.name, self._settings)
            self._uids = frozenset({_ROOT, slurmd_uid(self.name, self._settings)})
            self._has_places = True
        except SlurmError as error:
            log.warning("cannot query the node addresses of cluster %s: %s", self.name, error)
        cost_s = time.monotonic() - now
        self._refresh_at = now + (_ADDRESS_CACHE_S if self._has_places else _MIN_QUERY_INTERVAL_S)
        self._retry_at = now + max(_MIN_QUERY_INTERVAL_S, _QUERY_COST_FACTOR * cost_s)

    def _resolve(self, host: str) -> frozenset[str]:
        """Resolve a host name, cached."""
        now = time.monotonic()
        expires_at, addresses = self._addresses.get(host, (0.0, frozenset()))
        if now < expires_at:
            return addresses
        try:
            entries = socket.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            entries = []
        # A name that does not resolve at the moment keeps its last addresses.
        addresses = frozenset(normalize_host(str(entry[4][0])) for entry in entries) or addresses
        self._addresses[host] = (now + _ADDRESS_CACHE_S, addresses)
        return addresses


def _strip_ipv6_prefix(address: str) -> str:
    """Strip the IPv6 prefix from an IPv4 address that arrived at a dual-stack socket."""
    return normalize_host(address.removeprefix("::ffff:") if "." in address else address)
