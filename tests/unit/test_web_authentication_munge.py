"""Abuse of MUNGE authentication: invalid, many or large requests block nobody else."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.socket import serving
from steward.admin.credentials.requests import (
    CallerAnswer,
    CallerRequest,
    TicketAnswer,
    TicketRequest,
)
from steward.core.access import Caller
from steward.core.actions import Action, Registry
from steward.core.errors import UnknownCredential
from steward.core.munge import hash_body
from steward.daemon.request_service import PeerLimits
from steward.web.application import build_application
from steward.web.daemon_client import DaemonClient
from steward.web.settings import WebSettings

# How handlers name what they are given is to change in a Litestar that is not out yet.
pytestmark = pytest.mark.filterwarnings("ignore:.*Inferred dependency:DeprecationWarning")

ME = "/api/v1/ask/credentials.me"
HERE, THERE = "10.0.0.1", "10.0.0.2"
ADA, EVE, JUNK, SLOW = (f"MUNGE:{word}:" for word in ("ada0", "eve0", "junk", "slow"))
UIDS = {ADA: 1001, EVE: 1002, SLOW: 1003}
PLACES, LARGE, LARGE_OF_ONE = 2, 16, 4
"""Limits: requests of one address, large bodies of all, and large bodies of one address."""
BIG = b"{" + b" " * (32 << 10) + b"}"
BURST = 10
"""Number of the 60 requests a minute that may come at the same time."""


class Ground:
    """Socket of a daemon that creates tickets, and the web application."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "s")
        self.go = directory / "go"
        self.asked = directory / "asked"
        self.asked.touch()

    def vouch(self, _context: Any, _asker: Caller, request: TicketRequest) -> TicketAnswer:
        with self.asked.open("a") as file:
            file.write(f"{request.peer} {request.target} {request.digest}\n")
        if request.credential == JUNK:
            raise UnknownCredential("the MUNGE credential is none")
        while request.credential == SLOW and not self.go.exists():
            time.sleep(0.01)
        uid = UIDS[request.credential]
        if request.credential == EVE:
            return TicketAnswer(uid=uid, reason="it was made for another request")
        return TicketAnswer(uid=uid, secret=f"stm_{uid}")

    def bearer(self, secret: str) -> Caller:
        return Caller(uid=int(secret.removeprefix("stm_")), how="munge")

    def me(self, _context: Any, _asker: Caller, _request: CallerRequest) -> CallerAnswer:
        return CallerAnswer(
            uid=1, user="ada", how="munge", clusters=(), bank=False, sensor=False, rules=False
        )

    def registry(self) -> Registry:
        vouch = Action(
            name="credentials.ticket",
            help="",
            request=TicketRequest,
            answer=TicketAnswer,
            run=self.vouch,
            only_reads=True,
        )
        me = Action(
            name="credentials.me",
            help="",
            request=CallerRequest,
            answer=CallerAnswer,
            run=self.me,
            only_reads=True,
        )
        return Registry((vouch, me), {"credentials": lambda: None})

    def questions(self) -> list[list[str]]:
        """Return peer, target and digest of each question to the daemon."""
        return [line.split() for line in self.asked.read_text().splitlines()]


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    limits = PeerLimits(connections=40, per_user=40, request_s=30.0, silence_s=60.0, send_s=30.0)
    with serving(ground.path, limits, keeps=True, asked=ground.registry(), knows=ground.bearer):
        yield ground


Post = Callable[..., Coroutine[Any, Any, httpx.Response]]


def with_pages(ground: Ground, work: Callable[[Post], Awaitable[None]], **web: Any) -> None:
    """Run a function with the application of the pages, within a minute."""

    async def run() -> None:
        settings = WebSettings(**{"requests_per_minute": 10**6, **web})
        desk = DaemonClient(ground.path)
        app: Any = build_application(settings, desk)

        async def post(
            credential: str, peer: str = HERE, path: str = ME, content: Any = b"{}"
        ) -> httpx.Response:
            way = httpx.ASGITransport(app, client=(peer, 1))
            headers = {"Authorization": f"Munge {credential}", "Content-Type": "application/json"}
            async with httpx.AsyncClient(transport=way, base_url="http://x") as client:
                return await client.post(path, content=content, headers=headers)

        try:
            async with asyncio.timeout(60):
                await work(post)
        finally:
            # Whatever is still under way there ends before its server does.
            ground.go.touch()
            desk.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 -- another process tells it, in a file
            await asyncio.sleep(0.01)


def test_nonsense_from_a_login_node_keeps_none_of_its_users_out(ground: Ground) -> None:
    async def work(post: Post) -> None:
        said = [await post(JUNK) for _ in range(5 * BURST)]
        assert {answer.status_code for answer in said} == {401}
        assert (await post(ADA)).status_code == 200

    with_pages(ground, work, requests_per_minute=60)


@pytest.mark.parametrize(
    "shown", ["bogus", "MUNGE:", "MUNGE::", "MUNGE:not base64:", "MUNGE:abcd", "munge:abcd:"]
)
def test_what_can_be_no_credential_costs_nothing(ground: Ground, shown: str) -> None:
    """An impossible credential uses no time of the daemon, no slot and no memory."""

    read: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(shown)
        yield b"{}"

    async def work(post: Post) -> None:
        for _ in range(5 * BURST):
            assert (await post(shown, content=body())).status_code == 401
        assert (ground.questions(), read) == ([], [])
        # Nor is its address slowed for it.
        slow = [asyncio.create_task(post(SLOW)) for _ in range(PLACES)]
        await until(lambda: len(ground.questions()) == PLACES)
        ground.go.touch()
        assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}

    with_pages(ground, work, requests_per_minute=60)


def test_a_noisy_address_has_one_place_and_others_have_theirs(ground: Ground) -> None:
    async def work(post: Post) -> None:
        for _ in range(BURST):
            assert (await post(JUNK)).status_code == 401
        slow = [asyncio.create_task(post(SLOW)) for _ in range(4)]
        await until(lambda: len(ground.questions()) > BURST)
        assert (await post(ADA, THERE)).status_code == 200
        assert sum(peer == HERE for peer, *_ in ground.questions()[BURST:]) == 1
        ground.go.touch()
        # Each has its turn: then it is known whose they are, and that it is too much for one.
        answers = await asyncio.gather(*slow)
        assert [answer.status_code for answer in answers] == [200, 429, 429, 429]

    # So few that no time which this may take makes up for one.
    with_pages(ground, work, requests_per_minute=1)


def test_one_address_does_not_take_all_places(ground: Ground) -> None:
    async def work(post: Post) -> None:
        slow = [asyncio.create_task(post(SLOW)) for _ in range(4 * PLACES)]
        await until(lambda: len(ground.questions()) >= PLACES)
        assert (await post(ADA, THERE)).status_code == 200
        assert [peer for peer, *_ in ground.questions()] == [HERE] * PLACES + [THERE]
        ground.go.touch()
        assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}

    with_pages(ground, work)


def test_whom_munge_names_is_counted_as_themselves(ground: Ground) -> None:
    """Requests count for the user whom MUNGE names, not for neighbours or the host."""

    async def work(post: Post) -> None:
        said = [(await post(EVE)).status_code for _ in range(5 * BURST)]
        assert set(said) == {401, 429}
        assert said[:BURST] == [401] * BURST
        slow = [asyncio.create_task(post(SLOW)) for _ in range(PLACES)]
        begun = len(said)
        await until(lambda: len(ground.questions()) == begun + PLACES)
        ground.go.touch()
        assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}
        assert (await post(ADA)).status_code == 200

    with_pages(ground, work, requests_per_minute=60)


class Drawn:
    """Bodies that arrive as slowly as possible."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        self.begun += 1
        yield BIG[:1]
        await self.go.wait()
        yield BIG[1:]


def test_so_many_strangers_bodies_are_read_and_no_more(ground: Ground) -> None:
    async def work(post: Post) -> None:
        drawn = Drawn()
        hosts = [f"10.0.1.{number}" for number in range(LARGE // LARGE_OF_ONE)]
        first = [asyncio.create_task(post(ADA, HERE, content=drawn.body())) for _ in range(9)]
        await until(lambda: drawn.begun == LARGE_OF_ONE)
        # What is small comes in all the same, and others' bodies of any size.
        assert (await post(ADA, HERE)).status_code == 200
        assert (await post(ADA, THERE, content=BIG)).status_code == 200
        assert drawn.begun == LARGE_OF_ONE
        more = [
            asyncio.create_task(post(ADA, host, content=drawn.body()))
            for host in hosts
            for _ in range(LARGE_OF_ONE)
        ]
        await until(lambda: drawn.begun == LARGE)
        assert (await post(ADA, THERE)).status_code == 200
        assert drawn.begun == LARGE
        drawn.go.set()
        answers = await asyncio.gather(*first, *more)
        assert {answer.status_code for answer in answers} == {200}
        assert {one for *_, one in ground.questions()} == {hash_body(BIG), hash_body(b"{}")}

    with_pages(ground, work)


@pytest.mark.parametrize("prefix", ["/steward", "/a.b-c_d~e/steward"])
def test_the_pages_path_is_taken_off_as_it_was_sent(ground: Ground, prefix: str) -> None:
    """Otherwise the signed request would differ from the sent one."""

    async def work(post: Post) -> None:
        for sent in (f"{prefix}{ME}", ME):
            assert (await post(ADA, path=sent)).status_code == 200
        assert [target for _, target, _ in ground.questions()] == [ME, ME]
        for sent in (
            f"/%{ord(prefix[1]):x}{prefix[2:]}{ME}",
            f"{prefix[:-1]}%{ord(prefix[-1]):x}{ME}",
            f"{prefix}%2F{ME[1:]}",
            f"{prefix}x{ME}",
            f"{prefix}{prefix}{ME}",
        ):
            assert (await post(ADA, path=sent)).status_code == 404, sent
        assert len(ground.questions()) == 2

    with_pages(ground, work, url=f"https://steward.example.org{prefix}/")


def test_who_shows_a_credential_where_nobody_asks_for_one_is_counted(ground: Ground) -> None:
    async def work(post: Post) -> None:
        said = [(await post(ADA, path="/login")).status_code for _ in range(2)]
        assert said[1] == 429
        assert (await post(ADA)).status_code == 200

    with_pages(ground, work, requests_per_minute=1)
