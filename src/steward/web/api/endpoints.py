"""Endpoints of the HTTP API: table of methods and paths, and parsing of query and body.

Each :class:`Endpoint` is a route that an action declares and builds the action's request from path,
query or body. ``ENDPOINTS`` are the resource paths; ``ACTION_ENDPOINTS`` offers every action under
``/ask/NAME``. :func:`read_query` and :func:`read_json_body` read and validate
HTTP input; ``openapi.py`` describes the same parameters.
"""

import functools
import operator
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from litestar import Request

from steward.core.actions import MAX_INTEGER, MIN_INTEGER, Action, Route, has_valid_integers
from steward.core.errors import UsageError
from steward.daemon.registry import ACTIONS
from steward.web.errors import MalformedRequest, UnsupportedMediaType

CURSOR: Final = "cursor"
"""Query parameter that names where a page of results begins."""


class Endpoint(Route, frozen=True, kw_only=True, eq=False):
    """A route and the name of the action that serves it.

    Attributes:
        action: Name of the action.
    """

    action: str

    @property
    def definition(self) -> Action:
        """Return the action itself."""
        return ACTIONS[self.action]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the path's variable parts, in order."""
        pieces = self.path.split("/")
        return tuple(piece[1:-1] for piece in pieces if piece.startswith("{"))

    @property
    def fields(self) -> tuple[msgspec.structs.FieldInfo, ...]:
        """Return the request fields that the path does not determine."""
        determined = {self.parts.get(name, name) for name in self.names}
        all_fields = msgspec.structs.fields(self.definition.request)
        return tuple(field for field in all_fields if field.name not in determined)

    @property
    def id(self) -> str:
        """Return a unique identifier, used as OpenAPI operation id."""
        words = [part.strip("{}") for part in self.path.split("/") if part]
        return "_".join((self.method.lower(), *words)).replace(".", "_").replace("-", "_")

    def build_request(self, path_texts: dict[str, str], values: dict[str, Any]) -> Any:
        """Build the action's request.

        Args:
            path_texts: Values of the path's variable parts.
            values: Values of the other fields, from query or body.

        Raises:
            msgspec.ValidationError: A part of the path is invalid for its field.
        """
        field_types = {
            field.name: field.type for field in msgspec.structs.fields(self.definition.request)
        }
        path_values = {}
        for name in self.names:
            field = self.parts.get(name, name)
            path_values[field] = _convert_part(path_texts[name], field_types[field])
        return self.definition.request(**values, **path_values)


def _convert_part(text: str, field_type: Any) -> Any:
    """Convert a part of a path to its field's type."""
    _, is_list = find_value_type(field_type)
    return msgspec.convert((text,) if is_list else text, field_type, strict=False)


ASK_PATH: Final = "/ask/"
"""Path below which every action is callable by name."""
ENDPOINTS: Final = tuple(
    Endpoint(action=action.name, **msgspec.structs.asdict(route))
    for action in ACTIONS.values()
    for route in action.routes
)
"""All endpoints except those below /ask/."""
ACTION_ENDPOINTS: Final = tuple(
    Endpoint(method="POST", path=f"{ASK_PATH}{name}", action=name)
    for name, action in ACTIONS.items()
    if not action.for_web
)
"""Every action by its name, below /ask/."""


HttpRequest = Request[Any, Any, Any]

_JSON: Final = "application/json"
_PATTERNS: Final = {
    int: re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII),
    float: re.compile(r"-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?", re.ASCII),
    bool: re.compile("true|false"),
}
"""Numbers and booleans as JSON writes them; msgspec alone would accept more."""


_BOUNDS: Final = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
"""Limits on a value in the annotation of its field."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A query parameter of an endpoint.

    Attributes:
        name: Name in the query.
        field: Request field that it sets.
        kind: Type of its value, or of each of its values.
        is_list: Whether it may be repeated.
        required: Whether it is mandatory.
        default: Value if it is absent.
    """

    name: str
    field: str
    kind: Any
    is_list: bool
    required: bool
    default: Any = None

    @property
    def plain_kind(self) -> Any:
        """Return the type without limits."""
        return strip_limits(self.kind)


def strip_limits(kind: Any) -> Any:
    """Return a type without the limits of its annotation."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@functools.cache
def list_parameters(endpoint: Endpoint) -> tuple[Parameter, ...]:
    """Return the query parameters of an endpoint."""
    return tuple(_iterate_parameters(endpoint))


def _iterate_parameters(endpoint: Endpoint) -> Iterator[Parameter]:
    """Yield the query parameters of an endpoint."""
    renamed = {endpoint.cursor[0]: CURSOR} if endpoint.cursor else {}
    for field in endpoint.fields:
        kind, is_list = find_value_type(field.type)
        yield Parameter(
            name=renamed.get(field.name, field.name),
            field=field.name,
            kind=kind,
            is_list=is_list,
            required=field.required,
            default=None
            if field.default is msgspec.NODEFAULT
            or (get_origin(kind) is Literal and not field.default)
            else field.default,
        )


def find_value_type(field_type: Any) -> tuple[Any, bool]:
    """Return the type of one value, without None, and whether the field holds several."""
    origin = get_origin(field_type)
    if origin is Annotated:
        plain_type, meta, *_ = get_args(field_type)
        member_type, is_list = find_value_type(plain_type)
        bounds = {name: getattr(meta, name) for name in _BOUNDS if getattr(meta, name) is not None}
        if is_list or not bounds:
            return member_type, is_list
        return Annotated[member_type, msgspec.Meta(**bounds)], False
    if origin in (Union, types.UnionType):
        (member_type,) = [member for member in get_args(field_type) if member is not type(None)]
        return find_value_type(member_type)
    if origin is tuple:
        return get_args(field_type)[0], True
    if origin is Literal and "" in get_args(field_type):
        # A query omits unused parameters, so "" is not offered as a choice.
        return operator.getitem(Literal, tuple(filter(None, get_args(field_type)))), False
    return field_type, False


def read_query(endpoint: Endpoint, request: HttpRequest) -> dict[str, Any]:
    """Read the query of a request as fields of the action's request.

    Raises:
        MalformedRequest: The query is malformed or holds an unknown parameter.
    """
    parameters = {parameter.name: parameter for parameter in list_parameters(endpoint)}
    texts_by_name: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        texts_by_name.setdefault(name, []).append(value)
    unknown = sorted(set(texts_by_name) - set(parameters))
    if unknown:
        names = ", ".join(parameters) or "none"
        raise MalformedRequest(f"unknown parameter {unknown[0]!r}: the parameters are {names}")
    for parameter in parameters.values():
        if parameter.required and parameter.name not in texts_by_name:
            raise MalformedRequest(f"missing parameter {parameter.name!r}")
    return {
        parameters[name].field: _read_values(parameters[name], values)
        for name, values in texts_by_name.items()
    }


def _read_values(parameter: Parameter, values: list[str]) -> Any:
    """Convert the values of a query parameter; reject repetitions of a single one."""
    if not parameter.is_list and len(values) > 1:
        raise MalformedRequest(f"duplicate parameter {parameter.name!r}")
    parsed = tuple(_read_value(parameter, text) for text in values)
    return parsed if parameter.is_list else parsed[0]


def _read_value(parameter: Parameter, text: str) -> Any:
    """Convert and validate one value of a query parameter."""
    pattern = _PATTERNS.get(parameter.plain_kind)
    if pattern is not None and not pattern.fullmatch(text):
        raise MalformedRequest(_describe_mismatch(parameter, text))
    try:
        value = msgspec.convert(text, parameter.kind, strict=pattern is None)
    except msgspec.ValidationError as error:
        reason = _describe_mismatch(parameter, text)
        if pattern is not None:
            reason = f"{parameter.name!r} is out of range: {error}"
        raise MalformedRequest(reason) from None
    if not has_valid_integers(value):
        raise MalformedRequest(f"{parameter.name!r} is too large")
    return value


def _describe_mismatch(parameter: Parameter, text: str) -> str:
    """Describe why a value is invalid."""
    kind = parameter.plain_kind
    expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "")
    if get_origin(kind) is Literal:
        expected = "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    return f"{parameter.name!r} is not {expected or 'valid'}: {text[:80]!r}"


@functools.cache
def find_body_type(endpoint: Endpoint) -> type[msgspec.Struct]:
    """Return the Struct of an endpoint's body: the request's fields not set by the path."""
    request_type = endpoint.definition.request
    fields = endpoint.fields
    if len(fields) == len(msgspec.structs.fields(request_type)):
        return request_type
    return msgspec.defstruct(
        f"{endpoint.id.title().replace('_', '')}Body",
        [_define_field(field) for field in fields],
        namespace={"__doc__": request_type.__doc__},
        module=request_type.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _define_field(field: msgspec.structs.FieldInfo) -> Any:
    """Return a field's definition for msgspec.defstruct."""
    if field.required:
        return field.name, field.type
    if field.default_factory is not msgspec.NODEFAULT:
        return field.name, field.type, msgspec.field(default_factory=field.default_factory)
    return field.name, field.type, field.default


async def read_json_body(endpoint: Endpoint, request: HttpRequest) -> dict[str, Any]:
    """Read the JSON body of a request as fields of the action's request.

    Raises:
        MalformedRequest: The body is malformed or has the wrong shape.
        UnsupportedMediaType: The body is not JSON.
    """
    if request.query_params:
        raise MalformedRequest(
            "this request takes its parameters in the body: the query must be empty"
        )
    data = await request.body()
    if data and request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(f"the body must be {_JSON}")
    try:
        decoded = _normalize_numbers(msgspec.json.decode(data or b"{}"))
        body = msgspec.convert(decoded, find_body_type(endpoint))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MalformedRequest(f"cannot decode the body: {error}") from None
    if not has_valid_integers(decoded):
        # Free-form fields have no bounds in their type, so check their numbers here.
        raise UsageError("a number in the body is too large")
    return {name: getattr(body, name) for name in body.__struct_fields__}


def _normalize_numbers(value: Any) -> Any:
    """Convert floats such as 1.0 to integers, recursively: JSON does not distinguish them."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and MIN_INTEGER <= value <= MAX_INTEGER else value
    if isinstance(value, dict):
        return {name: _normalize_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    return value
