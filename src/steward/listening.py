"""Where others come to: addresses as a configuration holds them, and sockets that listen there."""

import re
import socket
from typing import Final

from steward.errors import Unavailable

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})"
)
_MOST_PORT: Final = 65535


class ListenUnavailable(Unavailable):
    """The address cannot be listened at."""


def host_and_port(text: str) -> tuple[str, int] | None:
    """``host:port`` or ``[address]:port``, taken apart; None if it is neither."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _MOST_PORT:
        return None
    return match["v6"] or match["host"], int(match["port"])


def listener_at(where: str, backlog: int) -> socket.socket:
    """A socket that listens, and does not block.

    Args:
        where: Address and port.
        backlog: How many connections the kernel holds until they are taken.

    Raises:
        ListenUnavailable: The address cannot be listened at.
    """
    host, port = host_and_port(where) or ("", 0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Those that come inherit it: else an answer in two writes, its head and its body, waits
        # 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenUnavailable(f"cannot listen at {where}: {error.strerror}", where) from error
    return listener
