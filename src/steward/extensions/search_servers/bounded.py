"""Replies of bounded size, whatever a server sends, or whoever answers in its place.

Both clients read a reply whole, however large it is and however small it came
packed; a pool of connections that reads no more stands in for theirs.
"""

from typing import Any, Final

import msgspec

LARGEST_REPLY: Final = 64 << 20
"""Bytes: a document with the largest script, each of its bytes written as an escape, is smaller."""


class Answer(msgspec.Struct, frozen=True):
    """What the clients use of a reply.

    Attributes:
        status: The HTTP status.
        headers: Its headers.
        data: Its body, decompressed.
    """

    status: int
    headers: Any
    data: bytes


class BoundedPool:
    """A pool of urllib3 as the clients use it.

    Args:
        pool: The pool that connects.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def urlopen(self, *args: Any, **named: Any) -> Answer:
        """Ask, and read the reply.

        Raises:
            urllib3.exceptions.HTTPError: There was none, or it is too large.
        """
        from urllib3.exceptions import HTTPError

        response = self._pool.urlopen(*args, **{**named, "preload_content": False})
        data = response.read(LARGEST_REPLY + 1, decode_content=True)
        if len(data) > LARGEST_REPLY:
            response.close()
            raise HTTPError(f"its reply has more than {LARGEST_REPLY >> 20} MiB")
        response.release_conn()
        return Answer(response.status, response.headers, data)

    def close(self) -> None:
        """Let go of connections."""
        self._pool.close()
