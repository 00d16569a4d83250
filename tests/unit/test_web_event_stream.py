"""Slots of users who follow events: limited from the moment of the request."""

import asyncio
import contextlib
from typing import Any

import pytest

from steward.web.errors import RateLimitExceeded
from steward.web.event_stream import StreamLimiter, release_stream


def request() -> Any:
    return {"type": "http", "state": {}}


async def answer(app: Any, scope: Any) -> None:
    """Run an application for one request; ignore what it receives and sends."""
    nobody: Any = None
    await release_stream(app)(scope, nobody, nobody)


def test_nobody_keeps_others_out() -> None:
    streams = StreamLimiter(per_user=2, total=3)
    streams.reserve(request(), 1)
    streams.reserve(request(), 1)
    with pytest.raises(RateLimitExceeded, match="streams of this user"):
        streams.reserve(request(), 1)
    scope = request()
    streams.reserve(scope, 2)
    with pytest.raises(RateLimitExceeded, match="too many event streams: try"):
        streams.reserve(request(), 3)

    async def over(*_: Any) -> None:
        return

    asyncio.run(answer(over, scope))
    streams.reserve(request(), 3)


class _Gone(Exception):
    """Error: the client has disconnected."""


@pytest.mark.parametrize("ending", [None, _Gone, TimeoutError, asyncio.CancelledError])
def test_a_place_is_given_back_once_however_its_answer_ends(
    ending: type[BaseException] | None,
) -> None:
    streams = StreamLimiter(per_user=1, total=1)
    stuck: list[Any] = []

    async def happening() -> Any:
        yield b"retry"

    async def app(scope: Any, *_: Any) -> None:
        streams.reserve(scope, 1)
        # Kept, as whoever waits to send it keeps it.
        stuck.append(happening())
        await anext(stuck[-1])
        with pytest.raises(RateLimitExceeded):
            streams.reserve(request(), 1)
        if ending is not None:
            raise ending

    async def run() -> None:
        for _ in range(3):
            with contextlib.suppress(*([ending] if ending else [])):
                await answer(app, request())
        for one in stuck:
            await one.aclose()
        streams.reserve(request(), 1)

    asyncio.run(run())


def test_who_is_refused_a_place_gives_back_none() -> None:
    streams = StreamLimiter(per_user=1, total=2)
    streams.reserve(request(), 1)

    async def app(scope: Any, *_: Any) -> None:
        streams.reserve(scope, 1)

    for _ in range(2):
        with pytest.raises(RateLimitExceeded):
            asyncio.run(answer(app, request()))
