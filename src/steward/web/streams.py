"""How many watch events as they happen: each keeps a connection, so that nobody may keep many."""

from collections import Counter
from typing import Final

from steward.web.errors import TooMany

_AGAIN_S: Final = 10.0


class Place:
    """One stream's place, from the moment in which it was asked for.

    Args:
        streams: Where it is.
        uid: Whose it is.
    """

    def __init__(self, streams: "Streams", uid: int) -> None:
        self._streams: Streams | None = streams
        self._uid = uid

    def __del__(self) -> None:
        # A stream whose client went away before it began is never run, nor ended.
        self.leave()

    def leave(self) -> None:
        """Give it back; once is enough."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.left(self._uid)


class Streams:
    """Counts those who watch, so that nobody keeps others out.

    Args:
        each: How many streams one user may have.
        most: How many there may be altogether.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each = each
        self._most = most
        self._open: Counter[int] = Counter()

    def take(self, uid: int) -> Place:
        """A place for one more.

        Args:
            uid: Whose it is.

        Raises:
            TooMany: They have as many as they may, or there are too many altogether.
        """
        if self._open[uid] >= self._each:
            raise TooMany("you watch events too often at once: close one of them", _AGAIN_S)
        if self._open.total() >= self._most:
            raise TooMany("too many watch events at once: come again in a moment", _AGAIN_S)
        self._open[uid] += 1
        return Place(self, uid)

    def left(self, uid: int) -> None:
        """One of theirs has ended."""
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


STREAMS: Final = Streams(each=4, most=64)
"""Those of this process, of pages and API alike."""
