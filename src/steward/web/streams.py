"""How many watch events as they happen: each keeps a connection, so that nobody may keep many."""

import functools
from collections import Counter
from typing import Final

from litestar.types import ASGIApp, Receive, Scope, Send

from steward.web.errors import TooMany

_AGAIN_S: Final = 10.0
_PLACE: Final = "steward.place"
"""Where a request's state holds how its place is left."""


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

    def take(self, scope: Scope, uid: int) -> None:
        """A place for one more, until the request has been answered; see :func:`watched`.

        Args:
            scope: Of the request.
            uid: Whose it is.

        Raises:
            TooMany: They have as many as they may, or there are too many altogether.
        """
        if self._open[uid] >= self._each:
            raise TooMany("you watch events too often at once: close one of them", _AGAIN_S)
        if self._open.total() >= self._most:
            raise TooMany("too many watch events at once: come again in a moment", _AGAIN_S)
        self._open[uid] += 1
        scope.setdefault("state", {})[_PLACE] = functools.partial(self._leave, uid)

    def _leave(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


STREAMS: Final = Streams(each=4, most=64)
"""Those of this process, of pages and API alike."""


def watched(app: ASGIApp) -> ASGIApp:
    """What takes places: each is left when its answer is over, however that ends.

    The answer's own generator would not do: whoever goes away before it has begun, or while
    it waits to be read, leaves it as it stands until it is collected.
    """

    # Of the module and not of the places: Litestar makes copies of what a handler is given.
    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            leave = scope.get("state", {}).pop(_PLACE, None)
            if leave is not None:
                leave()

    return answered
