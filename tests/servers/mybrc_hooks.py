"""Hooks for schemathesis that fit valid requests to the bank's content.

A schema cannot say which accounts exist, that a job's name in the path is that in the body, or
that a job ends after its start. The hooks change valid requests to an existing account and to new
jobs, and leave their other fields, so that the server must accept them. They do not change invalid
requests.
"""

import itertools
import re
from datetime import UTC, datetime
from typing import Any

import schemathesis

from servers.mybrc import PASSWORD
from steward.extensions.mybrc.wire import AMOUNT_PATTERN, AMOUNT_PLACES

_UIDS = 2**32
_FIRST = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES = ("submitdate", "startdate", "enddate")
_WORDS = ("jobstatus", "partition", "qos")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_numbers = itertools.count(1000)
_users: dict[str, str] = {}
"""Owners of the reported jobs."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Change a valid request so that the bank can serve it."""
    del context, kwargs
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if "api_token_auth" in case.operation.path:
        # The old schema does not say that it has a body.
        case.body = {"username": "plugin", "password": PASSWORD}
        case.media_type = "application/json"
    elif isinstance(case.body, dict) and "jobslurmid" in case.body:
        case.body = _of_the_bank(case)


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Skip requests that no schema allows but the reference server accepts."""
    del context
    is_valid = case.meta is None or case.meta.generation.mode.is_positive
    return is_valid or not (isinstance(case.body, dict) and _is_lenient(case.body))


def _is_lenient(body: dict[str, Any]) -> bool:
    """Return whether a request has numbers for texts, texts for numbers, or days for times."""
    texts = ("jobslurmid", "userid", "accountid", *_WORDS)
    numbers = ("num_cpus", "num_req_nodes", "num_alloc_nodes", "raw_time", "cpu_time")
    return (
        any(type(body.get(name)) in (int, float) for name in texts)
        or any(isinstance(body.get(name), str) for name in numbers)
        or any(isinstance(body.get(name), str) for name in _TIMES)
    )


def _of_the_bank(case: Any) -> dict[str, Any]:
    body: dict[str, Any] = _sound(case.body) | {"accountid": "physics"}
    number = next(_numbers)
    if case.method.upper() == "POST":
        body["jobslurmid"] = f"{number} {_plain(body['jobslurmid'])}"[:150]
    else:
        named = str(case.path_parameters.get("jobslurmid", ""))
        body["jobslurmid"] = named if named in _users else str(number)
        case.path_parameters["jobslurmid"] = body["jobslurmid"]
    if body["jobslurmid"] in _users:
        # An earlier request may have had a later time than this one.
        body = {name: value for name, value in body.items() if name not in _TIMES}
    body["userid"] = _users.setdefault(body["jobslurmid"], body["userid"])
    return body


def _sound(sent: dict[str, Any]) -> dict[str, Any]:
    body = sent | {"userid": str(int(sent["userid"]) % _UIDS)}
    for name in _WORDS:
        if isinstance(body.get(name), str):
            body[name] = _plain(body[name])
    if "nodes" in body:
        body["nodes"] = [{**node, "name": _plain(node["name"])[:30]} for node in body["nodes"]]
    amount = body.get("amount")
    if isinstance(amount, str) and not re.fullmatch(AMOUNT_PATTERN, amount):
        body["amount"] = "12.34"
    elif isinstance(amount, float):
        body["amount"] = round(amount, AMOUNT_PLACES)
    if not _is_in_order([body[name] for name in _TIMES if body.get(name) is not None]):
        body |= {name: f"2026-01-0{day}T00:00:00Z" for day, name in enumerate(_TIMES, 1)}
    return body


def _is_in_order(texts: list[str]) -> bool:
    try:
        times = [datetime.fromisoformat(text).astimezone(UTC) for text in texts]
    except (ValueError, OverflowError):
        return False
    return times == sorted(times) and all(at >= _FIRST for at in times)


def _plain(text: str) -> str:
    return _CONTROL.sub("_", text)
