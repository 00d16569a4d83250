"""Which node sent a batch, and what says so: a node may report on itself alone.

With TLS the name is in the certificate. With MUNGE the credential must be root's,
or SlurmdUser's, and must have been made on the node that the batch is said to be
of: where that is is asked of Slurm. But every node has the cluster's key, and can
make credentials that name another; so the connection must come from there, too.
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
from steward.capture.nodes.http import RequestError
from steward.core.config import Settings
from steward.core.errors import Refused
from steward.core.listeners import is_ipv6, plain
from steward.core.munge import Munge
from steward.slurm import SlurmError, SlurmUnavailable
from steward.slurm.cluster import NodePlace, node_addresses, slurmd_uid
from steward.slurm.settings import ClusterSettings

log = logging.getLogger(__name__)

_KEEP_S: Final = 600.0
_LEAST_S: Final = 30.0
_TIMES: Final = 20.0
"""The cluster is not asked again before this many times what asking cost."""
_ID: Final = re.compile(r"[0-9A-Za-z-]{0,64}")
_CREDENTIAL: Final = re.compile(rb"[!-~]{1,8192}")
_ROOT: Final = 0

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a batch beside its lines.

    Attributes:
        v: Version of it all.
        node: NodeName.
        cluster: Name of its cluster; "" where Steward serves one alone.
        boot: The boot's id.
        place: Another one says that the node's spool was lost.
        sequence: Number of the batch among those of this place.
        dropped: Lines that the node gave up since the last batch.
        dropped_ever: Since this place began.
        nonce: Makes each request another one.
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


_head_decoder = msgspec.json.Decoder(Head)


def read_head(text: bytes) -> Head:
    """What the header ``Steward-Batch`` says.

    Raises:
        RequestError: It is none.
    """
    try:
        head = _head_decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"Steward-Batch cannot be read: {error}") from error
    if head.v != 1:
        raise RequestError(400, f"the agent speaks version {head.v}: install the one of Steward's")
    if NODE_NAME.fullmatch(head.node) is None:
        raise RequestError(400, "the batch is of no node")
    if not all(map(_ID.fullmatch, (head.boot, head.place))) or len(head.nonce) > 64:
        raise RequestError(400, "the batch has an id that is none")
    return head


class Sender:
    """One who has shown which node it is; of its batch only the digest is left to compare.

    Args:
        cluster: The node's.
        head: What it says of its batch.
        claim: What its credential is made over; None where TLS says who it is.
        munge: Signs answers; None likewise.
    """

    def __init__(self, cluster: str, head: Head, claim: bytes | None, munge: Munge | None) -> None:
        self.cluster = cluster
        self.head = head
        self._claim = claim
        self._munge = munge

    def check(self, digest: str) -> None:
        """See that it was this batch that the credential was made for.

        Raises:
            Refused: It was another.
        """
        head = self.head
        said = claim_of(head.node, head.cluster, head.sequence, digest)
        if self._claim is not None and self._claim != said:
            raise Refused("the MUNGE credential is for another batch")

    def signed(self, digest: str, answer: bytes) -> str:
        """The credential of an answer; "" where TLS says whose it is.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        if self._munge is None:
            return ""
        return self._munge.encode(answer_claim_of(digest, answer)).decode("ascii")


class Senders:
    """The nodes that may report, of all clusters.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._by_certificate = bool(settings.nodes.client_ca_file)
        self._behind_nat = settings.nodes.behind_nat
        self._clusters = {
            name: _Cluster(name, of)
            for name, of in settings.cluster.items()
            if of.scheduler == "slurm"
        }

    def sender(self, head: Head, credential: bytes, names: frozenset[str], address: str) -> Sender:
        """Whoever sends this, if it may.

        Args:
            head: What it says.
            credential: Its MUNGE credential.
            names: The names that its certificate holds.
            address: Where its connection comes from.

        Raises:
            Refused: It is not the node that it says.
            Unavailable: That cannot be told now.
        """
        cluster = self._cluster(head.cluster)
        if self._by_certificate:
            wanted = {f"{head.node}.{cluster.name}"}
            if len(self._clusters) == 1:
                wanted.add(head.node)
            if frozenset(map(plain, names)).isdisjoint(map(plain, wanted)):
                raise Refused(
                    f"the certificate is for {', '.join(sorted(names)) or 'no host'}, "
                    f"not for {' or '.join(sorted(wanted))}"
                )
            return Sender(cluster.name, head, None, None)
        if is_ipv6(address):
            raise Refused(
                f"the connection comes from {address}, and a MUNGE credential names addresses of "
                "IPv4 alone: over IPv6 nodes show a certificate ('client_ca_file' of [nodes])"
            )
        if _CREDENTIAL.fullmatch(credential) is None:
            raise Refused("there is no MUNGE credential")
        claim = cluster.munge.decode(credential)
        cluster.check(head.node, claim.uid, claim.address)
        if not self._behind_nat:
            cluster.check_peer(head.node, _of_version_4(address))
        return Sender(cluster.name, head, claim.payload, cluster.munge)

    def _cluster(self, name: str) -> "_Cluster":
        if not name and len(self._clusters) == 1:
            return next(iter(self._clusters.values()))
        found = self._clusters.get(name)
        if found is None:
            raise Refused(f"{name!r} is no cluster of Steward's: set --cluster")
        return found


class _Cluster:
    """Where one cluster's nodes are, as far as was asked."""

    def __init__(self, name: str, settings: ClusterSettings) -> None:
        self.name = name
        self.munge = Munge(settings.munge_socket)
        self._settings = settings
        self._asks = settings.asks_slurm and not settings.remote
        self._lock = threading.Lock()
        self._places: Mapping[str, NodePlace] = {}
        self._uids = frozenset({_ROOT})
        self._asked = False
        self._until = 0.0
        self._again = 0.0
        self._addresses: dict[str, tuple[float, frozenset[str]]] = {}

    def check(self, node: str, uid: int, address: str) -> None:
        """See that a credential can be a node's.

        Raises:
            Refused: It is another host's, or another user's.
            SlurmUnavailable: Slurm has never said where its nodes are.
        """
        place = self._place(node)
        if uid not in self._uids:
            raise Refused(f"the MUNGE credential is uid {uid}'s, not root's")
        self._see(node, place, address, f"the MUNGE credential was made on {address}")

    def check_peer(self, node: str, address: str) -> None:
        """See that a connection can be a node's.

        Raises:
            Refused: It is another host's.
            SlurmUnavailable: Slurm has never said where its nodes are.
        """
        what = f"the connection comes from {address} (see [nodes] behind_nat)"
        self._see(node, self._place(node), address, what)

    def _see(self, node: str, place: NodePlace, address: str, what: str) -> None:
        addresses = self._addresses_of(place.address)
        if address not in addresses:
            # Asked only now: where names do not resolve, looking one up takes long.
            addresses |= self._addresses_of(place.hostname)
        if address not in addresses:
            raise Refused(
                f"{what}, and node {node} is at "
                f"{', '.join(sorted(addresses)) or f'{place.address}, which does not resolve'}"
            )

    def _place(self, node: str) -> NodePlace:
        if not self._asks:
            # Nobody here can be asked about a cluster elsewhere: its nodes go by their names.
            return NodePlace(node, node)
        with self._lock:
            now = time.monotonic()
            if now >= self._until or (node not in self._places and now >= self._again):
                self._ask(now)
            if not self._asked:
                raise SlurmUnavailable(f"cluster {self.name}: where its nodes are is not known yet")
        if node not in self._places:
            raise Refused(f"cluster {self.name} has no node {node!r}")
        return self._places[node]

    def _ask(self, now: float) -> None:
        try:
            self._places = node_addresses(self.name, self._settings)
            self._uids = frozenset({_ROOT, slurmd_uid(self.name, self._settings)})
            self._asked = True
        except SlurmError as error:
            log.warning("where the nodes of cluster %s are cannot be asked: %s", self.name, error)
        cost_s = time.monotonic() - now
        self._until = now + (_KEEP_S if self._asked else _LEAST_S)
        self._again = now + max(_LEAST_S, _TIMES * cost_s)

    def _addresses_of(self, host: str) -> frozenset[str]:
        now = time.monotonic()
        until, found = self._addresses.get(host, (0.0, frozenset()))
        if now < until:
            return found
        try:
            entries = socket.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            entries = []
        # One that does not resolve for the moment stays where it was.
        found = frozenset(plain(str(entry[4][0])) for entry in entries) or found
        self._addresses[host] = (now + _KEEP_S, found)
        return found


def _of_version_4(address: str) -> str:
    """An address of IPv4 as such, also where it came to a socket of both versions."""
    return plain(address.removeprefix("::ffff:") if "." in address else address)
