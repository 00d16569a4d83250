"""OpenAPI 3.1 document of the HTTP API, derived from the endpoints and the actions' Structs.

:func:`build_openapi_json` builds the document once. Schemas come from msgspec, descriptions of
fields from their annotations (requests) or the docstrings' ``Attributes:`` (replies), operations
from ``endpoints.py``.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from steward import __version__
from steward.core.access import SCOPES
from steward.core.actions import MAX_INTEGER, MIN_INTEGER, describe_default, find_annotation
from steward.daemon.idempotency import LONGEST_KEY
from steward.web.api.endpoints import (
    ACTION_ENDPOINTS,
    CURSOR,
    ENDPOINTS,
    Endpoint,
    find_body_type,
    find_value_type,
    list_parameters,
    strip_limits,
)
from steward.web.api.responses import KEY, LINES, MEDIA, STREAM, Problem, find_page_type

_REFERENCE: Final = "#/components/schemas/{name}"
_PROBLEMS: Final = {
    400: "Malformed request.",
    401: "Missing, unknown or expired token or session.",
    403: "Permission denied, or a scope of the token is missing.",
    404: "Not found, or permission denied.",
    409: "Conflict with the present state, or with another request with this idempotency key.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "Invalid request: the message gives the reason.",
    429: "Too many requests in a short time.",
    500: "Internal failure: Steward's log has the reason.",
    503: "A dependency is unavailable: try again.",
}
"""Descriptions of the error responses, by HTTP status."""
_ONLY_CHANGES: Final = frozenset({413, 415})
"""Statuses that only requests with a body can get."""
_ATTRIBUTES = re.compile(r"^Attributes:\n(?P<list>(?:(?: .*)?\n?)*)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^ {4}(\w+): +((?:.*\n?)(?:^ {6,}.*\n?)*)", re.MULTILINE)

API_DESCRIPTION: Final = (
    "All actions of Steward. Times are ISO 8601, in UTC; durations are seconds, sizes "
    "bytes,\namounts micro-SU. Times in requests are written as in Slurm's commands:\n"
    "`2026-11-21T08:00`, `now-1day`."
)
"""Introduction of the OpenAPI document."""


@functools.cache
def build_openapi_json(root: str) -> bytes:
    """Return the OpenAPI document as JSON.

    Args:
        root: Path prefix of the API.
    """
    endpoints = (*ENDPOINTS, STREAM, *ACTION_ENDPOINTS)
    types = list(_list_types(endpoints))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    for struct in _collect_structs(types):
        _add_descriptions(struct, components)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _describe_operation(
            endpoint, schema_of
        )
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Steward", "version": __version__, "description": API_DESCRIPTION},
        "servers": [{"url": root}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": _bound_integers(components),
            "responses": {str(status): _describe_problem(status) for status in _PROBLEMS},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Token created by `steward token create`.",
                }
            },
        },
    }
    return msgspec.json.encode(document)


def _list_types(endpoints: Iterable[Endpoint]) -> Iterator[Any]:
    """Yield each type that parameters, bodies and replies use, once."""
    seen: list[Any] = []
    for endpoint in endpoints:
        candidates: list[Any] = [find_page_type(endpoint)]
        if endpoint.method == "GET":
            candidates += [parameter.kind for parameter in list_parameters(endpoint)]
        else:
            candidates.append(find_body_type(endpoint))
        for value_type in candidates:
            if value_type not in seen:
                seen.append(value_type)
                yield value_type
    yield Problem


def _describe_operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    """Describe an endpoint as an OpenAPI operation."""
    action, is_read = endpoint.definition, endpoint.method == "GET"
    scope = action.scope
    fields = {field.name: field for field in msgspec.structs.fields(action.request)}
    descriptions = _read_field_docs(action.request)
    parameters: list[dict[str, Any]] = []
    for name in endpoint.names:
        field = fields[endpoint.parts.get(name, name)]
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        kind, _ = find_value_type(field.type)
        if strip_limits(kind) is int:
            limits = find_annotation(kind)
            least = limits.ge if limits is not None else None
            schema = {"type": "integer", "minimum": least or 0, "maximum": MAX_INTEGER}
        parameters.append(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": descriptions.get(field.name, ""),
                "schema": schema,
            }
        )
    if is_read:
        for parameter in list_parameters(endpoint):
            value_schema = _bound_integers(schema_of[parameter.kind])
            parameters.append(
                {
                    "name": parameter.name,
                    "in": "query",
                    "required": parameter.required,
                    "description": descriptions.get(parameter.field, ""),
                    "schema": {"type": "array", "items": value_schema}
                    if parameter.is_list
                    else value_schema,
                }
            )
    elif not action.stream:
        parameters.append(_describe_key())
    statuses = [status for status in _PROBLEMS if not (is_read and status in _ONLY_CHANGES)]
    responses: dict[str, Any] = {
        str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses
    }
    responses[str(endpoint.status)] = _describe_success(endpoint, schema_of)
    if is_read:
        responses["304"] = {"description": "Not modified: the ETag equals If-None-Match."}
    operation = {
        "operationId": endpoint.id,
        "summary": endpoint.help or action.help,
        "description": f"Action `{action.name}`; "
        + (f"requires the scope `{scope}`: {SCOPES[scope]}." if scope != "any" else "any token."),
        "tags": [endpoint.path.split("/")[1]],
        "parameters": parameters,
        "responses": responses,
    }
    if not is_read:
        body_type = find_body_type(endpoint)
        operation["requestBody"] = {
            "required": any(field.required for field in msgspec.structs.fields(body_type)),
            "content": {"application/json": {"schema": schema_of[body_type]}},
        }
    return operation


def _describe_success(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    """Describe the successful response of an endpoint."""
    action = endpoint.definition
    if endpoint is STREAM:
        return {
            "description": (
                "One event per message, as JSON in the field `data`; `id` is its position."
            ),
            "content": {MEDIA: {"schema": {"type": "string"}}},
        }
    if action.stream:
        return {
            "description": "One line of JSON per item; the last line has the result.",
            "content": {LINES: {"schema": {"type": "string"}}},
        }
    headers: dict[str, Any] = {}
    if endpoint.method == "GET":
        headers["ETag"] = {"schema": {"type": "string"}}
    if endpoint.cursor is not None:
        headers["Link"] = {
            "description": (
                f'URL of the next page, `rel="next"`; its `{CURSOR}` is `next` of this one.'
            ),
            "schema": {"type": "string"},
        }
    return {
        "description": (inspect.getdoc(action.answer) or "").partition("\n")[0],
        "headers": headers,
        "content": {"application/json": {"schema": schema_of[find_page_type(endpoint)]}},
    }


def _describe_key() -> dict[str, Any]:
    """Describe the Idempotency-Key header."""
    return {
        "name": KEY.title(),
        "in": "header",
        "required": False,
        "description": (
            "Idempotency key: Steward makes the change only once under the same key within a day."
        ),
        "schema": {"type": "string", "maxLength": LONGEST_KEY, "pattern": "^[!-~]+$"},
    }


def _describe_problem(status: int) -> dict[str, Any]:
    """Describe the error response of a status."""
    response: dict[str, Any] = {
        "description": _PROBLEMS[status],
        "content": {
            "application/problem+json": {"schema": {"$ref": _REFERENCE.format(name="Problem")}}
        },
    }
    if status == 429:
        response["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    return response


def _bound_integers(schema: Any) -> Any:
    """Add 64-bit bounds, those of the database, to the integers of a schema."""
    if isinstance(schema, list):
        return [_bound_integers(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bound_integers(item) for name, item in schema.items()}
    if bounded.get("type") == "integer":
        bounded = {"minimum": MIN_INTEGER, "maximum": MAX_INTEGER, **bounded}
    return bounded


def _collect_structs(types: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """Collect the Structs among types, including those nested in fields."""
    structs: set[type[msgspec.Struct]] = set()
    pending = list(types)
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in structs:
                structs.add(kind)
                pending += [field.type for field in msgspec.structs.fields(kind)]
        else:
            pending += getattr(kind, "__args__", ())
    return structs


def _add_descriptions(struct: type[msgspec.Struct], components: dict[str, Any]) -> None:
    """Add descriptions from a Struct's docstring to its schema."""
    names = (struct.__name__, f"{struct.__module__}.{struct.__qualname__}")
    schema = next((components[name] for name in names if name in components), None)
    if schema is None or schema.get("title") != struct.__name__:
        return
    schema["description"] = (inspect.getdoc(struct) or "").partition("\n")[0]
    descriptions = _read_field_docs(struct)
    for field in msgspec.structs.fields(struct):
        property_schema = schema.get("properties", {}).get(field.encode_name)
        if property_schema is not None and field.name in descriptions:
            property_schema["description"] = descriptions[field.name]


@functools.cache
def _read_field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the field descriptions of a Struct: in its annotations, or in the docstrings."""
    descriptions: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        section = _ATTRIBUTES.search(f"{text}\n")
        if section is not None:
            for name, lines in _ATTRIBUTE.findall(section["list"]):
                descriptions[name] = " ".join(lines.split())
    for field in msgspec.structs.fields(struct):
        annotation = find_annotation(field.type)
        if annotation is not None and annotation.description:
            descriptions[field.name] = f"{annotation.description}{describe_default(field)}"
    return descriptions
