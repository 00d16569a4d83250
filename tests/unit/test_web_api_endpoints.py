"""API endpoints: each names an existing action, and parses requests as it describes."""

import asyncio
import functools
import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.core.errors import StewardError
from steward.core.rpc import decode_reply_line, encode_error_line, make_error
from steward.daemon.registry import ACTIONS
from steward.slurm import (
    UnknownJob,
    UnknownNode,
    UnknownPartition,
    UnknownReservation,
    UnknownTrigger,
)
from steward.web.api.endpoints import (
    ACTION_ENDPOINTS,
    ENDPOINTS,
    Endpoint,
    find_body_type,
    list_parameters,
    read_query,
)
from steward.web.api.openapi import build_openapi_json
from steward.web.application import build_application, status_of
from steward.web.daemon_client import DaemonClient
from steward.web.errors import MalformedRequest
from steward.web.settings import WebSettings

# How handlers name what they are given is to change in a Litestar that is not out yet.
pytestmark = pytest.mark.filterwarnings("ignore:.*Inferred dependency:DeprecationWarning")

DOCUMENT = msgspec.json.decode(build_openapi_json("/api/v1"))
FOR_THE_PAGES_ALONE = {"open", "ticket", "peek", "close", "settings"}


def endpoint_id(endpoint: Endpoint) -> str:
    return endpoint.id


@functools.cache
def app_of(web: WebSettings) -> Any:
    return build_application(web, DaemonClient("/nowhere"))


def asked(*requests: tuple[str, str], web: WebSettings | None = None, **more: Any) -> Any:
    """Return the application's reply, without a daemon."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app_of(web or WebSettings(requests_per_minute=10**6)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.request(method, path, **more) for method, path in requests]

    return asyncio.run(run())


PARTS = {"token": "7", "allocation": "7"}
"""Values of path parts that are numbers; the others are names."""


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=endpoint_id)
def test_parts_of_a_path_become_fields(endpoint: Endpoint) -> None:
    texts = {name: PARTS.get(name, "a1") for name in endpoint.names}
    values = {field.name: None for field in endpoint.fields if field.required}
    request = endpoint.build_request(texts, values)
    for name, text in texts.items():
        number = int(text) if text.isdecimal() else text
        value = getattr(request, endpoint.parts.get(name, name))
        assert value in (text, (text,), number, (number,))
        fields = {
            field.name: field for field in msgspec.structs.fields(endpoint.definition.request)
        }
        msgspec.convert(value, fields[endpoint.parts.get(name, name)].type)


def test_every_action_can_be_asked_for_but_those_of_the_pages_themselves() -> None:
    left_out = set(ACTIONS) - {endpoint.action for endpoint in ACTION_ENDPOINTS}
    assert left_out == {f"credentials.{verb}" for verb in FOR_THE_PAGES_ALONE}
    assert not left_out & {endpoint.action for endpoint in ENDPOINTS}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=endpoint_id)
def test_an_endpoint_fits_its_action(endpoint: Endpoint) -> None:
    action = endpoint.definition
    fields = {field.name for field in msgspec.structs.fields(action.request)}
    assert {endpoint.parts.get(name, name) for name in endpoint.names} <= fields
    assert set(endpoint.parts) <= set(endpoint.names)
    if endpoint.cursor is not None:
        assert endpoint.cursor[0] in fields
        assert endpoint.cursor[1] in action.answer.__struct_fields__
    # What is cached and asked again must not change anything.
    assert endpoint.method != "GET" or not action.writes


def test_what_reads_nothing_is_no_get() -> None:
    reading = ("archive.", "accounting.")  # which say so by their names alone
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and not endpoint.action.startswith(reading):
            assert endpoint.definition.only_reads, endpoint.path


def test_what_is_called_is_called_once() -> None:
    every = [*ENDPOINTS, *ACTION_ENDPOINTS]
    assert len({endpoint.id for endpoint in every}) == len(every)
    assert len({(endpoint.method, endpoint.path) for endpoint in every}) == len(every)


def test_the_description_says_what_fields_mean() -> None:
    row = DOCUMENT["components"]["schemas"]["JobRow"]["properties"]
    assert row["job_id"]["description"].startswith("Raw id")
    (users,) = [
        one for one in DOCUMENT["paths"]["/jobs"]["get"]["parameters"] if one["name"] == "users"
    ]
    assert "uids" in users["description"]


def test_the_description_refers_to_what_is_there() -> None:
    def references(value: Any) -> Any:
        if isinstance(value, dict):
            for name, one in value.items():
                if name == "$ref":
                    yield one
                yield from references(one)
        elif isinstance(value, list):
            for one in value:
                yield from references(one)

    for reference in set(references(DOCUMENT)):
        found: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=endpoint_id)
def test_a_body_or_query_has_what_the_path_has_not(endpoint: Endpoint) -> None:
    taken = {endpoint.parts.get(name, name) for name in endpoint.names}
    if endpoint.method == "GET":
        assert not taken & {parameter.field for parameter in list_parameters(endpoint)}
    else:
        assert not taken & set(find_body_type(endpoint).__struct_fields__)


def is_below(path: str) -> bool:
    """Return whether a path stays below the API: clients resolve ``..`` before they send it."""
    return not {".", ".."} & set(path.split("/"))


@given(
    path=st.text(max_size=30).filter(is_below),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD"]),
)
def test_whatever_is_asked_for_is_answered_in_form(path: str, method: str) -> None:
    (answer,) = asked((method, f"/api/v1/{quote(path)}"))
    assert answer.status_code < 500
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.headers["content-type"] == "application/problem+json"


def test_all_lies_below_the_prefix_as_well() -> None:
    web = WebSettings(url="https://ood.example.org/pun/steward")
    below, above, missing = asked(
        ("GET", "/pun/steward/api/v1/openapi.json"),
        ("GET", "/api/v1/openapi.json"),
        ("GET", "/pun/steward/api/v1/nothing"),
        web=web,
    )
    assert below.json() == above.json()
    assert below.json()["servers"] == [{"url": "/pun/steward/api/v1"}]
    assert missing.headers["content-type"] == "application/problem+json"


def test_who_asks_too_much_is_told_when_to_come_again() -> None:
    web = WebSettings(requests_per_minute=60)
    path = ("GET", "/api/v1/openapi.json")
    *passed, refused, healthz = asked(*[path] * 30, ("GET", "/healthz"), web=web)
    assert passed[0].status_code == 200
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"] == "application/problem+json"
    assert healthz.status_code == 200


def test_who_makes_up_a_token_for_each_request_is_one_who_asks_too_much() -> None:
    app: Any = build_application(WebSettings(requests_per_minute=60), DaemonClient("/nowhere"))

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answers = [
                await client.get("/api/v1/me", headers={"Authorization": f"Bearer stt_{number}"})
                for number in range(30)
            ]
        return [answer.status_code for answer in answers]

    statuses = asyncio.run(run())
    assert statuses[0] == 503
    assert statuses[-1] == 429


def test_a_method_that_is_none_is_told_which_there_are() -> None:
    (answer,) = asked(("PUT", "/api/v1/jobs"))
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize(
    ("path", "query", "fields"),
    [
        ("/reports/users", "top=7&users=ada&users=bela", {"top": 7, "users": ("ada", "bela")}),
        ("/reports/waits", "group=size&zone=UTC", {"group": "size", "zone": "UTC"}),
        ("/gaps", "silent_s=60.5", {"silent_s": 60.5}),
        ("/reports/users", "top=-1", "'top' is out of range: Expected `int` >= 0"),
        ("/reports/users", "top=few", "'top' is not a whole number: 'few'"),
        (
            "/reports/waits",
            "group=colour",
            "'group' is not one of 'size', 'account', 'user': 'colour'",
        ),
    ],
)
def test_a_query_is_read_by_the_annotations_of_its_fields(
    path: str, query: str, fields: Any
) -> None:
    (endpoint,) = (one for one in ENDPOINTS if (one.method, one.path) == ("GET", path))
    request: Any = SimpleNamespace(query_params=httpx.QueryParams(query))
    if isinstance(fields, dict):
        assert read_query(endpoint, request) == fields
    else:
        with pytest.raises(MalformedRequest, match="^" + re.escape(fields)):
            read_query(endpoint, request)


def test_parameters_are_described_by_their_annotations() -> None:
    operation = DOCUMENT["paths"]["/reports/users"]["get"]
    top = next(one for one in operation["parameters"] if one["name"] == "top")
    assert top["description"] == (
        "Maximum number of rows of each cluster and period; 0 means all. Default: all."
    )
    assert top["schema"]["minimum"] == 0


def test_numbers_in_paths_have_the_bounds_of_their_fields() -> None:
    paths = msgspec.json.decode(build_openapi_json("/api/v1"))["paths"]
    for path, method in (("/allocations/{allocation}", "patch"), ("/tokens/{token}", "delete")):
        (parameter,) = [one for one in paths[path][method]["parameters"] if one["in"] == "path"]
        assert parameter["schema"] == {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    "error",
    [
        *(UnknownJob("no job 7"), UnknownNode(["n9"]), UnknownPartition("no p")),
        *(UnknownReservation("no r"), UnknownTrigger("no t")),
    ],
)
def test_a_name_that_slurm_does_not_know_is_not_found(error: StewardError) -> None:
    # As it comes over the daemon's socket.
    assert status_of(make_error(decode_reply_line(encode_error_line(error)))) == 404
