"""What is served is served to HEAD as well."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from steward.config_web import WebSettings
from steward.serving import headed
from steward.web.application import application
from steward.web.desk import Desk

# How handlers name what they are given is to change in a Litestar that is not out yet.
pytestmark = pytest.mark.filterwarnings("ignore:.*Inferred dependency:DeprecationWarning")


def asked(app: Any, requests: Sequence[tuple[str, str]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(headed(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(run())


def test_head_counts_among_the_requests_of_whoever_asks() -> None:
    app = application(WebSettings(requests_per_minute=60), Desk("/nowhere"))
    path = "/api/v1/openapi.json"
    *answers, last = asked(app, [*[("HEAD", path)] * 30, ("GET", path)])
    assert answers[0].status_code == 200
    assert answers[-1].status_code == last.status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/v1/openapi.json", {"GET", "HEAD", "OPTIONS"}),
        ("/static/app.js", {"GET", "HEAD", "OPTIONS"}),
        ("/logout", {"OPTIONS", "POST"}),
    ],
)
def test_which_methods_there_are_is_told_with_head(path: str, allowed: set[str]) -> None:
    app = application(WebSettings(), Desk("/nowhere"))
    (refused,) = asked(app, [("PUT", path)])
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == allowed
    (head,) = asked(app, [("HEAD", path)])
    assert (head.status_code == 405) == ("GET" not in allowed)


def test_an_answer_without_an_end_is_over_with_its_head() -> None:
    ended = asyncio.Event()

    async def endless(_: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-kind", b"news")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"news", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    (answer,) = asked(endless, [("HEAD", "/")])
    assert answer.headers["x-kind"] == "news"
    assert ended.is_set()


def test_other_methods_are_answered_whole() -> None:
    async def echo(scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        body = scope["method"].encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    answers = asked(echo, [(method, "/") for method in ("GET", "POST", "OPTIONS")])
    assert [answer.text for answer in answers] == ["GET!", "POST!", "OPTIONS!"]
