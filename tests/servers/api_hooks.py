"""Hooks for schemathesis that keep its requests from ending its own session.

A description cannot say which token authenticates the requests, nor which fields of a rate have
no effect. Changes to the cluster are dry runs, so that it can still be queried.
"""

import json
from datetime import datetime
from typing import Any

import schemathesis

_NOBODYS = 10**6
"""Number above that of any token."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Redirect revocations to tokens that do not exist, and changes to dry runs."""
    del context, kwargs
    path, body = case.operation.path, case.body
    if path == "/tokens/{token}" and str(case.path_parameters.get("token", "")).isdecimal():
        case.path_parameters["token"] = int(case.path_parameters["token"]) % _NOBODYS + _NOBODYS
    if not isinstance(body, dict):
        return
    if path.endswith("credentials.token_revoke") and isinstance(body.get("numbers"), list):
        case.body = body | {"numbers": [_nobodys(number) for number in body["numbers"]]}
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if isinstance(body.get("jobs"), list):
        case.body = body | {"jobs": [_submitted(job) for job in body["jobs"]]}
    if isinstance(body.get("rate"), dict):
        case.body = body | {
            "rate": {name: value for name, value in body["rate"].items() if name != "valid_from"}
        }
    if "dry_run" in body:
        case.body = body | {"dry_run": True}


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    """Write a single value for a list of texts as the list that it is on the wire.

    ``users=x`` is a valid list of one value. schemathesis takes it for an invalid request, even if
    it changed another parameter, too, and then did not send that one.
    """
    for name, value in (query or {}).items():
        parameter = context.operation.query.get(name)
        schema = parameter.validation_schema if parameter else {}
        of_texts = schema.get("type") == "array" and schema.get("items", {}).get("type") == "string"
        if of_texts and isinstance(value, str | int | float):
            query[name] = [value if isinstance(value, str) else json.dumps(value)]
    return query


def _submitted(job: Any) -> Any:
    """Replace an invalid submit time of a job, since most random times are invalid."""
    if not isinstance(job, dict) or "first_submit" not in job:
        return job
    try:
        datetime.fromisoformat(job["first_submit"])
    except (TypeError, ValueError):
        return job | {"first_submit": "2026-01-01T00:00:00Z"}
    return job


def _nobodys(number: Any) -> Any:
    return number % _NOBODYS + _NOBODYS if isinstance(number, int) else number
