"""Listening sockets: parse addresses, limit and identify peers, open TCP and Unix listeners.

``split_host_port``, ``is_within``, ``is_ipv6``, ``get_limit_key``, ``normalize_host`` and
``is_any_host`` handle addresses.
:class:`ConnectionLimit` limits the connections of each peer that wait for their client:
the server calls ``find_wait`` before it accepts a connection, ``add`` after that, and ``remove`` at
its end; its protocol counts the :class:`CountedConnection` while it waits. ``find_peer_uid`` asks
the kernel who a local TCP client is. ``open_tcp_listener`` and ``open_unix_listener`` open sockets;
``restrict_socket`` restricts a Unix socket to some users.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from steward.core.errors import Unavailable
from steward.core.rpc import make_socket_directory, shorten_socket_path

log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})"
)
_MOST_PORT: Final = 65535
# From uapi/linux/posix_acl_xattr.h.
_ACL: Final = "system.posix_acl_access"
_HEADER: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE: Final = 6
_NO_ID: Final = 0xFFFFFFFF
_OWNER_MODE: Final = 0o600
_OPEN_MODE: Final = 0o666
# From <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG: Final = 20
_REQUEST: Final = 1
_ANY_STATE: Final = 0xFFFFFFFF
_UID_AT: Final = 16 + 64
_GRACE_S: Final = 1.0
"""Time that a connection has before one of another host may replace it, in seconds."""


class ListenUnavailable(Unavailable):
    """The address cannot be listened at."""


class PeerClosed(Exception):
    """The peer of a connection has closed it already."""


def split_host_port(text: str) -> tuple[str, int] | None:
    """Split ``host:port`` or ``[address]:port``; return None if it is neither."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _MOST_PORT:
        return None
    return match["v6"] or match["host"], int(match["port"])


def is_within(address: str, networks: Sequence[str]) -> bool:
    """Return whether an address is in one of these networks; False for text that is none."""
    try:
        host = ipaddress.ip_address(address)
        if isinstance(host, ipaddress.IPv6Address):
            # A listener at [::] sees IPv4 peers as IPv4-mapped addresses.
            host = host.ipv4_mapped or host
        return any(host in ipaddress.ip_network(network, strict=False) for network in networks)
    except ValueError:
        return False


def is_ipv6(address: str) -> bool:
    """Return whether an address is IPv6; MUNGE reports IPv4 addresses only."""
    try:
        host = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is None


def get_limit_key(address: str) -> str:
    """Return the key of a host for limits: its address, or the /64 network of an IPv6 host."""
    try:
        host = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is None:
        return str(ipaddress.ip_network((host, 64), strict=False))
    return str(getattr(host, "ipv4_mapped", None) or host)


class CountedConnection:
    """A connection, counted in its limit while ``is_counted``.

    Args:
        connection: The accepted connection.
        peer: The client it counts for.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self.since = time.monotonic()
        self.is_counted = True
        self.is_dropped = False

    def count(self, is_counted: bool) -> None:
        """Count the connection, as of now, or stop counting it."""
        if is_counted and not self.is_counted:
            self.since = time.monotonic()
        self.is_counted = is_counted

    def drop(self) -> None:
        """Shut the connection down, but leave closing to its reader, which sees the end."""
        self.is_dropped = True
        with contextlib.suppress(OSError):
            # Not with SSLSocket.shutdown, which would end the encryption only.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class ConnectionLimit:
    """Limit on connections that wait for their client, by peer.

    A peer is a user of this host, a shared network, or an address. If there are too many
    connections, the oldest one of the peer that exceeds its limit most is shut down, so that
    connections that others leave open never keep a new client out.

    Args:
        per_peer: Limit for one peer; a shared network, or a user who connects from an address in
            one, may have half of all.
        total: Limit for all peers together.
        shared: Networks whose addresses many hosts or people share: proxies, NAT.
    """

    def __init__(self, per_peer: int, total: int, shared: Sequence[str] = ()) -> None:
        self._per_peer = per_peer
        self._total = total
        self._shared = tuple(shared)
        self._limits: dict[str, int] = {}
        self._connections: set[CountedConnection] = set()

    def add(self, connection: socket.socket, address: str) -> CountedConnection:
        """Count a new connection."""
        counted = CountedConnection(connection, self._identify_peer(connection, address))
        self._connections.add(counted)
        return counted

    def remove(self, connection: CountedConnection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)

    def find_wait(self) -> float | None:
        """Shut down a connection if there are too many; call it before accepting another one.

        A single host that exceeds its limit loses its oldest connection at once. In other cases
        many clients may just have come together, so the oldest gets a second.

        Returns:
            Seconds to wait before the next call; None if another connection may be accepted.
        """
        counted = [entry for entry in self._connections if entry.is_counted]
        by_peer = Counter(entry.peer for entry in counted)
        worst_peer = max(by_peer, key=lambda peer: by_peer[peer] / self._limits[peer], default="")
        is_over = bool(worst_peer) and by_peer[worst_peer] > self._limits[worst_peer]
        if not is_over and len(counted) < self._total:
            return None
        oldest = min(
            (entry for entry in counted if entry.peer == worst_peer), key=lambda entry: entry.since
        )
        is_host = is_over and self._limits[worst_peer] == self._per_peer
        remaining_s = 0.0 if is_host else oldest.since + _GRACE_S - time.monotonic()
        if remaining_s <= 0:
            oldest.drop()
            self.remove(oldest)
        return max(0.0, remaining_s)

    def _identify_peer(self, connection: socket.socket, address: str) -> str:
        """Return a connection's peer for the limits, and set the peer's limit."""
        network = next((item for item in self._shared if is_within(address, (item,))), "")
        try:
            uid = find_peer_uid(connection)
            peer = f"uid {uid}" if uid is not None else network or get_limit_key(address)
        except PeerClosed:
            peer, network = "closed", ""
        if len(self._limits) > self._total:
            # Drop the limits of peers whose connections are gone.
            self._limits = {entry.peer: self._limits[entry.peer] for entry in self._connections}
        self._limits[peer] = self._total // 2 if network else self._per_peer
        return peer


def find_peer_uid(connection: socket.socket) -> int | None:
    """Return the uid of a TCP connection's peer, if that is on this host.

    The kernel is asked about that one socket (sock_diag(7), Linux 3.3).

    Returns:
        The uid; None for a peer on another host, or if the kernel does not report it.

    Raises:
        PeerClosed: No process has the other end any more.
    """
    try:
        if connection.family == socket.AF_UNIX:
            return None
        peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
        hosts = [
            ipaddress.ip_address(str(endpoint[0]).partition("%")[0]) for endpoint in (peer, own)
        ]
        if not hosts[0].is_loopback and hosts[0] != hosts[1]:
            return None
        family = connection.family
        addresses = b"".join(host.packed.ljust(16, b"\0") for host in hosts)
        socket_id = struct.pack("!HH", peer[1], own[1]) + addresses + b"\0" * 4 + b"\xff" * 8
        query = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY_STATE) + socket_id
        head = struct.pack("=IHHII", 16 + len(query), _SOCK_DIAG, _REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(head + query)
            reply = kernel.recv(4096)
    except (OSError, ValueError):
        return None
    if len(reply) < _UID_AT + 8 or struct.unpack_from("=H", reply, 4)[0] != _SOCK_DIAG:
        return None
    uid, inode = struct.unpack_from("=II", reply, _UID_AT)
    if not inode:
        # Without an owner the socket would be reported as root's, uid 0.
        raise PeerClosed
    return int(uid)


def open_tcp_listener(address: str, backlog: int) -> socket.socket:
    """Open a non-blocking listening TCP socket.

    Args:
        address: Address and port.
        backlog: Most connections that the kernel queues.

    Raises:
        ListenUnavailable: The address cannot be listened at.
    """
    host, port = split_host_port(address) or ("", 0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: otherwise an answer in two writes, head and body, waits
        # 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenUnavailable(f"cannot listen at {address}: {error.strerror}", address) from error
    return listener


def open_unix_listener(path: str, backlog: int, uids: Iterable[int] = ()) -> socket.socket:
    """Open a non-blocking listening Unix socket; create its directory.

    The socket is bound under another name and renamed, so its path never exists without a listener.

    Args:
        path: Path of the socket; a former process's is replaced.
        backlog: Most connections that the kernel queues.
        uids: Users who may connect besides us and root: others could fill the backlog.

    Raises:
        OSError: The socket cannot be made.
    """
    make_socket_directory(os.path.dirname(path))
    temporary_path = f"{path}.{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary_path)
        with shorten_socket_path(temporary_path) as name:
            listener.bind(name)
        restrict_socket(temporary_path, uids)
        listener.listen(backlog)
        listener.setblocking(False)
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "it exists and is not a socket: remove it", path)
        os.replace(temporary_path, path)
    except OSError:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary_path)
        raise
    return listener


def restrict_socket(path: str, uids: Iterable[int]) -> bool:
    """Permit only these users, us and root to connect to a socket.

    Args:
        path: The socket, created just now.
        uids: Users to permit.

    Returns:
        Whether that worked; if not, anybody may connect, and the kernel identifies the user
        after that.

    Raises:
        OSError: It is not there any more.
    """
    os.chmod(path, _OWNER_MODE)
    others = sorted(set(uids) - {0, os.geteuid()})
    if not others or _chown_socket(path, others) or _set_socket_acl(path, others):
        return True
    log.warning(
        "%s is open to all users, because its file system has no ACLs: the daemon "
        "closes connections of users without permission",
        path,
    )
    os.chmod(path, _OPEN_MODE)
    return False


def _chown_socket(path: str, uids: list[int]) -> bool:
    """Make a single user the owner of the socket, as only root can."""
    if os.geteuid() != 0 or len(uids) > 1:
        return False
    try:
        os.chown(path, uids[0], -1)
    except OSError as error:
        log.debug("cannot change the owner of %s to uid %d: %s", path, uids[0], error)
        return False
    return True


def _set_socket_acl(path: str, uids: list[int]) -> bool:
    """Set an ACL that admits these users to the socket."""
    entries = [(_USER_OBJ, _READ_WRITE, _NO_ID)]
    entries += [(_USER, _READ_WRITE, uid) for uid in uids]
    entries += [(_GROUP_OBJ, 0, _NO_ID), (_MASK, _READ_WRITE, _NO_ID), (_OTHER, 0, _NO_ID)]
    value = _HEADER.pack(2) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    try:
        os.setxattr(path, _ACL, value)
    except OSError as error:
        log.debug("cannot set an ACL on %s: %s", path, error)
        return False
    return True


def normalize_host(host: str) -> str:
    """Normalize a host's name or address for comparison."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def is_any_host(names: Iterable[str], hosts: Iterable[str]) -> bool:
    """Return whether one of the names in a certificate is one of these hosts."""
    return not frozenset(map(normalize_host, names)).isdisjoint(map(normalize_host, hosts))
