"""Which host may report for which cluster, and what says that it is that host."""

import os
import pwd
import socket
from collections.abc import Iterable

from steward.core.config import Settings
from steward.core.errors import Refused
from steward.core.listening import is_ipv6, plain
from steward.core.munge.munged import Munge
from steward.extensions.controllers.wire import (
    FROM_CONTROLLER,
    FROM_RECEIVER,
    Frame,
    statement,
)
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
