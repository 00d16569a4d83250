"""Who a request is from by MUNGE's word: the daemon asks munged, and gives a ticket for it.

Until it has answered a request is a stranger's, and its address says little: all who work
on a login node have one. So no address is shut out for what one of its users does; it has
its own few places, and where much that comes from it is worth nothing, it waits for one.
"""

import asyncio
import contextlib
from typing import Any, Final

from litestar import Request

from steward.admin.credentials.errors import NotKnown
from steward.admin.credentials.shapes import VouchAnswer, VouchRequest
from steward.core.munge.requests import digest, is_credential
from steward.web.desk import VOUCH, Desk
from steward.web.errors import TooMany
from steward.web.limiting import Rate
from steward.web.places import Places, PlacesOfEach, take
from steward.web.settings import WebSettings

_OF_ONE: Final = 2
"""Credentials of one address that are looked at at once; of all it is twice that."""
_SMALL: Final = 16 << 10
"""A body that every connection of a stranger's may have in memory, in bytes."""
_LARGE: Final = 16
"""Larger ones of strangers that are read at once …"""
_LARGE_OF_ONE: Final = 4
"""… and of one address."""

Ask = Request[Any, Any, Any]


def peer(request: Ask) -> str:
    """The address that a request's connection comes from."""
    return request.client.host if request.client else ""


class Vouching:
    """Finds out whom MUNGE names.

    Args:
        web: [web].
        desk: Where the daemon is asked.
        rate: How often one may ask.
    """

    def __init__(self, web: WebSettings, desk: Desk, rate: Rate) -> None:
        self._desk = desk
        self._rate = rate
        # Apart from it, so that who sends nonsense keeps no neighbour's page from loading.
        self._strays = Rate(web.requests_per_minute)
        self._of_one = PlacesOfEach(_OF_ONE)
        self._noisy = Places(1)
        self._large = asyncio.Semaphore(_LARGE)
        self._large_of_one = PlacesOfEach(_LARGE_OF_ONE)

    async def ticket(self, request: Ask, credential: str) -> str:
        """The ticket, for this request, of whoever MUNGE says that it is from.

        Raises:
            NotKnown: It says nobody's, or that of somebody who is not let in.
            TooMany: They have asked too often.
            Crowded: Too many are looked at.
            Unavailable: munged does not answer, or the daemon.
        """
        # What costs nobody anything is not counted, and is read no further.
        if not is_credential(credential):
            raise NotKnown("that is no MUNGE credential")
        answer = await self._answer(request, credential)
        self._rate.take(f"uid:{answer.uid}")
        if answer.refused:
            raise NotKnown(answer.refused)
        return answer.secret

    async def _answer(self, request: Ask, credential: str) -> VouchAnswer:
        where = peer(request)
        target, query = request.scope["raw_path"], request.scope["query_string"]
        async with contextlib.AsyncExitStack() as until:
            if not _is_small(request):
                for place in (self._large_of_one.of(where), self._large):
                    await take(until, place)
            wanted = VouchRequest(
                credential=credential,
                method=request.method,
                target=(target + (b"?" + query if query else b"")).decode("latin-1"),
                digest=digest(await request.body()),
                peer=where,
            )
            await take(until, self._noisy if self._is_noisy(where) else self._of_one.of(where))
            try:
                answer: VouchAnswer = await self._desk.ask(VOUCH, wanted)
            except NotKnown:
                # Beyond its bound no more is counted: then it is noisy.
                with contextlib.suppress(TooMany):
                    self._strays.take(where)
                raise
        return answer

    def _is_noisy(self, where: str) -> bool:
        """Whether too much comes from an address that names nobody."""
        try:
            self._strays.look(where)
        except TooMany:
            return True
        return False


def _is_small(request: Ask) -> bool:
    """Whether a body says that it is small; one in chunks says nothing."""
    length = request.headers.get("content-length", "0")
    is_whole = "transfer-encoding" not in request.headers
    return is_whole and length.isascii() and length.isdigit() and int(length) <= _SMALL
