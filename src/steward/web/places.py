"""Places for what may be under way at once: whoever finds none waits a little, and is told so."""

import asyncio
import contextlib
from typing import Final, Literal
from weakref import WeakValueDictionary

from steward.core.errors import Unavailable

_PLACE_S: Final = 15.0
"""How long anything waits for its turn."""
_TOO_MUCH: Final = "too much is asked at once: try again in a moment"


class Crowded(Unavailable):
    """Too much is under way."""


class Places(asyncio.Semaphore):
    """So many places, and so many who wait for one: others need not, they are told at once.

    Whoever waits has one of the requests that are served at once; one address or bearer that
    asks for more than it gets would have all of them.
    """

    _MOST_WAITING: Final = 64

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._waiting = 0

    async def acquire(self) -> Literal[True]:
        """Wait for a place.

        Raises:
            Crowded: Too many wait already.
        """
        if self.locked() and self._waiting >= self._MOST_WAITING:
            raise Crowded(_TOO_MUCH)
        self._waiting += 1
        try:
            return await super().acquire()
        finally:
            self._waiting -= 1


class PlacesOfEach:
    """So many places for each, which are there while somebody has or wants one.

    Args:
        most: How many of one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: WeakValueDictionary[str, Places] = WeakValueDictionary()

    def of(self, who: str) -> Places:
        """Somebody's."""
        return self._of.setdefault(who, Places(self._most))


async def take(until: contextlib.AsyncExitStack, place: asyncio.Semaphore) -> None:
    """Wait for a place, and have it until something has ended.

    Raises:
        Crowded: None came free in time, or too many wait.
    """
    try:
        async with asyncio.timeout(_PLACE_S):
            await place.acquire()
    except TimeoutError:
        raise Crowded(_TOO_MUCH) from None
    until.callback(place.release)
