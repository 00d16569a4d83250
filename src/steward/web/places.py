"""Places for what may be under way at once: whoever finds none waits a little, and is told so."""

import asyncio
import contextlib
from typing import Final
from weakref import WeakValueDictionary

from steward.errors import Unavailable

_PLACE_S: Final = 15.0
"""How long anything waits for its turn."""


class Crowded(Unavailable):
    """Too much is under way."""


class PlacesOfEach:
    """So many places for each, which are there while somebody has or wants one.

    Args:
        most: How many of one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, who: str) -> asyncio.Semaphore:
        """Somebody's."""
        return self._of.setdefault(who, asyncio.Semaphore(self._most))


async def take(until: contextlib.AsyncExitStack, place: asyncio.Semaphore) -> None:
    """Wait for a place, and have it until something has ended.

    Raises:
        Crowded: None came free in time.
    """
    try:
        async with asyncio.timeout(_PLACE_S):
            await place.acquire()
    except TimeoutError:
        raise Crowded("too much is asked at once: try again in a moment") from None
    until.callback(place.release)
