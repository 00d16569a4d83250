"""Reads what an endpoint is given: its query, or its body.

A name that is not known is an error and not passed over: a filter with a typing
mistake would let all through.
"""

import functools
import operator
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from litestar import Request

from steward.core.actions import LEAST, MOST, is_in_bounds
from steward.core.errors import UsageError
from steward.web.api.endpoints import CURSOR, Endpoint
from steward.web.errors import WrongMedia, WrongRequest

Ask = Request[Any, Any, Any]

_JSON: Final = "application/json"
_PATTERNS: Final = {
    int: re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII),
    float: re.compile(r"-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?", re.ASCII),
    bool: re.compile("true|false"),
}
"""How JSON writes them; msgspec takes more."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A name in a query.

    Attributes:
        name: It.
        field: The request's field that it becomes.
        kind: The type of its value, or of each of its values.
        many: Whether it may be given more than once.
        required: Whether it must be given.
        default: What it is where it is not given.
    """

    name: str
    field: str
    kind: Any
    many: bool
    required: bool
    default: Any = None


@functools.cache
def parameters(endpoint: Endpoint) -> tuple[Parameter, ...]:
    """The names that an endpoint's query may hold."""
    return tuple(_parameters(endpoint))


def _parameters(endpoint: Endpoint) -> Iterator[Parameter]:
    renamed = {endpoint.cursor[0]: CURSOR} if endpoint.cursor else {}
    for field in endpoint.fields:
        kind, many = _kind(field.type)
        yield Parameter(
            name=renamed.get(field.name, field.name),
            field=field.name,
            kind=kind,
            many=many,
            required=field.required,
            default=None
            if field.default is msgspec.NODEFAULT
            or (get_origin(kind) is Literal and not field.default)
            else field.default,
        )


def _kind(kind: Any) -> tuple[Any, bool]:
    """The type of one value, without the None that stands for no value; whether there are many."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, many = _kind(get_args(kind)[0])
        return (inner if many else kind), many
    if origin in (Union, types.UnionType):
        (inner,) = [one for one in get_args(kind) if one is not type(None)]
        return _kind(inner)
    if origin is tuple:
        return get_args(kind)[0], True
    if origin is Literal and "" in get_args(kind):
        # What is not wanted is left out of a query: "" is no choice there.
        return operator.getitem(Literal, tuple(filter(None, get_args(kind)))), False
    return kind, False


def query(endpoint: Endpoint, request: Ask) -> dict[str, Any]:
    """The fields that a query gives.

    Raises:
        WrongRequest: It cannot be read, or holds a name that is not known.
    """
    known = {parameter.name: parameter for parameter in parameters(endpoint)}
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise WrongRequest(f"there is no parameter {unknown[0]!r}: there are {names}")
    for parameter in known.values():
        if parameter.required and parameter.name not in given:
            raise WrongRequest(f"the parameter {parameter.name!r} is missing")
    return {known[name].field: _read(known[name], values) for name, values in given.items()}


def _read(parameter: Parameter, values: list[str]) -> Any:
    if not parameter.many and len(values) > 1:
        raise WrongRequest(f"{parameter.name!r} is given more than once")
    found = tuple(_value(parameter, text) for text in values)
    return found if parameter.many else found[0]


def _value(parameter: Parameter, text: str) -> Any:
    pattern = _PATTERNS.get(parameter.kind)
    if pattern is not None and not pattern.fullmatch(text):
        raise WrongRequest(_not_of(parameter, text))
    try:
        value = msgspec.convert(text, parameter.kind, strict=pattern is None)
    except msgspec.ValidationError:
        raise WrongRequest(_not_of(parameter, text)) from None
    if not is_in_bounds(value):
        raise WrongRequest(f"{parameter.name!r} is too large a number")
    return value


def _not_of(parameter: Parameter, text: str) -> str:
    kind = parameter.kind
    what = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "")
    if get_origin(kind) is Literal:
        what = "one of " + ", ".join(repr(one) for one in get_args(kind))
    return f"{parameter.name!r} is not {what or 'as it must be'}: {text[:80]!r}"


@functools.cache
def body_of(endpoint: Endpoint) -> type[msgspec.Struct]:
    """The shape of an endpoint's body: the request's, without what the path says."""
    whole = endpoint.done_by.request
    fields = endpoint.fields
    if len(fields) == len(msgspec.structs.fields(whole)):
        return whole
    return msgspec.defstruct(
        f"{endpoint.id.title().replace('_', '')}Body",
        [_field(field) for field in fields],
        namespace={"__doc__": whole.__doc__},
        module=whole.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _field(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return field.name, field.type
    if field.default_factory is not msgspec.NODEFAULT:
        return field.name, field.type, msgspec.field(default_factory=field.default_factory)
    return field.name, field.type, field.default


async def body(endpoint: Endpoint, request: Ask) -> dict[str, Any]:
    """The fields that a body gives.

    Raises:
        WrongRequest: It cannot be read, or is not of its shape.
        WrongMedia: It is not JSON.
    """
    if request.query_params:
        raise WrongRequest("what is to be done is said in the body: the query must be empty")
    data = await request.body()
    if data and request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise WrongMedia(f"the body must be {_JSON}")
    try:
        plain = _whole(msgspec.json.decode(data or b"{}"))
        found = msgspec.convert(plain, body_of(endpoint))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WrongRequest(f"the body cannot be read: {error}") from None
    if not is_in_bounds(plain):
        # Where anything may stand no description says how large: it is none of the shape.
        raise UsageError("the body holds too large a number")
    return {name: getattr(found, name) for name in found.__struct_fields__}


def _whole(value: Any) -> Any:
    """A value in which 1.0 is 1, as in JSON, where they are the same."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and LEAST <= value <= MOST else value
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return value
