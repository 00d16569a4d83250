"""Requests of the web process to the daemon: it reuses connections, and sends no change twice."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.socket import LIMITS, Done, Question, Step, Told, registry, serving
from steward.core.errors import PermissionRefused
from steward.core.rpc import encode_answer_line
from steward.web import daemon_client
from steward.web.daemon_client import DaemonClient, DaemonUnavailable
from steward.web.errors import WebError


@pytest.fixture(autouse=True)
def actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_client, "ACTIONS", {action.name: action for action in registry()})


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s")
    with serving(path, LIMITS, keeps=True):
        yield path


def done(path: str, work: Callable[[DaemonClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        desk = DaemonClient(path)
        try:
            return await work(desk)
        finally:
            desk.close()

    return asyncio.run(run())


async def pid(desk: DaemonClient, name: str) -> int:
    told: Told = await desk.call_action(name, Question())
    return told.pid


def test_what_reads_goes_over_a_kept_connection(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        assert len({await pid(desk, "test.look") for _ in range(5)}) == 1

    done(path, work)


def test_what_changes_something_has_a_connection_of_its_own(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        kept = await pid(desk, "test.look")
        others = [await pid(desk, "test.echo") for _ in range(3)]
        assert len({kept, *others}) == 4
        assert await pid(desk, "test.look") == kept

    done(path, work)


def test_what_asks_at_once_does_not_wait_for_each_other(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        found = await asyncio.gather(
            *(desk.call_action("test.look", Question(text=str(n))) for n in range(4))
        )
        assert [one.text for one in found] == ["0", "1", "2", "3"]

    done(path, work)


def test_a_kept_connection_that_broke_is_replaced(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        first = await pid(desk, "test.look")
        os.kill(first, signal.SIGKILL)
        assert await pid(desk, "test.look") != first

    done(path, work)


def test_errors_are_of_their_families_and_keep_nothing_back(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        with pytest.raises(PermissionRefused, match="not yours"):
            await desk.call_action("test.refuse", Question(text="x"))
        with pytest.raises(DaemonUnavailable, match="closed the connection"):
            await desk.call_action("test.crash", Question())
        assert await pid(desk, "test.look")

    done(path, work)


def test_a_stream_that_is_left_does_not_spoil_what_follows(path: str) -> None:
    async def work(desk: DaemonClient) -> None:
        async with contextlib.aclosing(desk.stream("test.count", Question(number=50))) as items:
            assert await anext(items) == Step(number=0)
        found = [item async for item in desk.stream("test.count", Question(number=2))]
        assert found == [Step(number=0), Step(number=1), Done(steps=2)]
        assert await pid(desk, "test.look")

    done(path, work)


def test_what_takes_long_keeps_no_page_waiting(path: str) -> None:
    """Slow requests of a user delay no page of that user or of others."""

    async def work(desk: DaemonClient) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                items = desk.stream("test.count", Question(number=50), user="ada")
                await stack.enter_async_context(contextlib.aclosing(items))
                await anext(items)
            asked = desk.call_action("test.echo", Question(text="more"), user="ada")
            more = asyncio.create_task(asked)
            async with asyncio.timeout(30):
                assert await pid(desk, "test.look")
                other = await desk.call_action("test.echo", Question(text="other"), user="grace")
                assert other.text == "other"
            assert not more.done()
        # One of the four has ended: there is room.
        async with asyncio.timeout(30):
            assert (await more).text == "more"

    done(path, work)


class Fickle:
    """Daemon that reads each request and replies as the test sets.

    b"" hangs up, None sends nothing until the other end has hung up.
    """

    def __init__(self, path: str, *answers: bytes | None) -> None:
        self.asked: list[bytes] = []
        self.heard = threading.Event()
        self.left = threading.Event()
        self._answers = list(answers)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(20)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    self.asked.append(line)
                    answer = self._answers.pop(0) if self._answers else b""
                    if answer is None:
                        self.heard.set()
                        if not lines.readline():
                            self.left.set()
                        break
                    if not answer:
                        break
                    connection.sendall(answer)

    def close(self) -> None:
        self._listener.close()


TOLD = encode_answer_line(Told(text="", uid=0, user="", pid=1))


def test_what_changes_something_is_never_sent_twice(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    daemon = Fickle(path, TOLD, b"", TOLD, TOLD)

    async def work(desk: DaemonClient) -> None:
        await desk.call_action("test.look", Question(text="first"))
        desk.close()
        with pytest.raises(DaemonUnavailable):
            await desk.call_action("test.echo", Question(text="change"))

    done(path, work)
    daemon.close()
    assert len([line for line in daemon.asked if b"change" in line]) == 1


def test_what_reads_is_asked_again_where_a_kept_connection_broke(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    daemon = Fickle(path, TOLD, b"", TOLD)

    async def work(desk: DaemonClient) -> None:
        await desk.call_action("test.look", Question(text="first"))
        await desk.call_action("test.look", Question(text="second"))

    done(path, work)
    daemon.close()
    assert len([line for line in daemon.asked if b"second" in line]) == 2


def test_a_kept_connection_ends_with_whoever_gave_up_its_question(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    daemon = Fickle(path, TOLD, None, TOLD)

    async def work(desk: DaemonClient) -> None:
        await desk.call_action("test.look", Question(text="first"))
        page = asyncio.create_task(desk.call_action("test.look", Question(text="second")))
        assert await asyncio.to_thread(daemon.heard.wait, 30)
        page.cancel()
        assert await asyncio.to_thread(daemon.left.wait, 30)
        with pytest.raises(asyncio.CancelledError):
            await page
        await desk.call_action("test.look", Question(text="third"))

    done(path, work)
    daemon.close()
    assert [b"second" in line for line in daemon.asked] == [False, True, False]


def test_what_reads_is_not_asked_for_ever(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    daemon = Fickle(path, b"", TOLD)

    async def work(desk: DaemonClient) -> None:
        with pytest.raises(DaemonUnavailable):
            await desk.call_action("test.look", Question())

    done(path, work)
    daemon.close()
    assert len(daemon.asked) == 1


@pytest.mark.parametrize("answer", [b"garbage\n", b'{"ok":true,"answer":{"x":1}}\n', b"{}\n"])
def test_an_answer_that_makes_no_sense_is_an_error_of_ours(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "s")
    daemon = Fickle(path, answer)

    async def work(desk: DaemonClient) -> None:
        with pytest.raises((WebError, DaemonUnavailable)):
            await desk.call_action("test.look", Question())

    done(path, work)
    daemon.close()


def test_no_daemon_is_said(tmp_path: Path) -> None:
    async def work(desk: DaemonClient) -> None:
        with pytest.raises(DaemonUnavailable, match="does not answer"):
            await desk.call_action("test.look", Question())

    done(str(tmp_path / "none"), work)
