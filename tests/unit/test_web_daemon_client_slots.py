"""Slots of the daemon client: a busy user does not block others."""

import asyncio
import contextlib

import pytest

from steward.web.daemon_client import ServerBusy, SlotsByUser, acquire_slot


def test_only_so_many_wait_for_the_places_of_one() -> None:
    async def run() -> None:
        places = SlotsByUser(2)
        async with contextlib.AsyncExitStack() as until:
            for _ in range(2):
                await acquire_slot(until, places.get_slots("a"))
            waiting = [
                asyncio.create_task(acquire_slot(until, places.get_slots("a"))) for _ in range(64)
            ]
            await asyncio.sleep(0)
            with pytest.raises(ServerBusy):
                await asyncio.wait_for(acquire_slot(until, places.get_slots("a")), 10)
            # Another one waits for nobody of these.
            await acquire_slot(until, places.get_slots("b"))
            for one in waiting[:32]:
                one.cancel()
            await asyncio.wait(waiting[:32])
            again = asyncio.create_task(acquire_slot(until, places.get_slots("a")))
            await asyncio.sleep(0)
            assert not again.done(), "whoever went makes room to wait"
            for one in (again, *waiting):
                one.cancel()
            await asyncio.wait([again, *waiting])

    asyncio.run(run())
