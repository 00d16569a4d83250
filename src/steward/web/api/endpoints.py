"""Endpoints of the HTTP API: table of methods and paths, and parsing of query and body.

Each :class:`Endpoint` maps a method and path to an action of the registry and builds the action's
request from path, query or body. ``ENDPOINTS`` are the resource paths; ``ASKS`` offers every action
under ``/ask/NAME``. :func:`query` and :func:`body` read and validate HTTP input; ``openapi.py``
describes the same parameters.
"""

import functools
import operator
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from litestar import Request

from steward.core.actions import LEAST, MOST, Action, is_in_bounds
from steward.core.errors import UsageError
from steward.daemon.contexts import ACTIONS
from steward.web.errors import WrongMedia, WrongRequest

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
"""HTTP methods of the API."""
CURSOR: Final = "cursor"
"""Query parameter that names where a page of results begins."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One HTTP method of one path, and the action that serves it.

    Attributes:
        method: HTTP method.
        path: Path below /api/v1; ``{name}`` marks its variable parts.
        action: Name of the action.
        help: One line for people; the action's own help if empty.
        parts: Request field for a part of the path, if their names differ. A field that holds
            several values gets this one.
        fixed: Request fields that the path determines.
        cursor: Request field for the start of a page, and reply field for the start of the next.
        status: HTTP status of a success.
    """

    method: Method
    path: str
    action: str
    help: str = ""
    parts: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    cursor: tuple[str, str] | None = None
    status: int = 200

    @property
    def done_by(self) -> Action:
        """Return the action itself."""
        return ACTIONS[self.action]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the path's variable parts, in order."""
        pieces = self.path.split("/")
        return tuple(piece[1:-1] for piece in pieces if piece.startswith("{"))

    @property
    def fields(self) -> tuple[msgspec.structs.FieldInfo, ...]:
        """Return the request fields that neither the path nor ``fixed`` determines."""
        taken = {self.parts.get(name, name) for name in self.names} | set(self.fixed)
        every = msgspec.structs.fields(self.done_by.request)
        return tuple(field for field in every if field.name not in taken)

    @property
    def id(self) -> str:
        """Return a unique identifier, used as OpenAPI operation id."""
        words = [part.strip("{}") for part in self.path.split("/") if part]
        return "_".join((self.method.lower(), *words)).replace(".", "_").replace("-", "_")

    def request(self, parts: dict[str, str], given: dict[str, Any]) -> Any:
        """Build the action's request.

        Args:
            parts: Values of the path's variable parts.
            given: Values of the other fields, from query or body.

        Raises:
            msgspec.ValidationError: A part of the path is invalid for its field.
        """
        kinds = {field.name: field.type for field in msgspec.structs.fields(self.done_by.request)}
        filled = {}
        for name in self.names:
            field = self.parts.get(name, name)
            filled[field] = _part(parts[name], kinds[field])
        return self.done_by.request(**given, **filled, **self.fixed)


def _part(text: str, kind: Any) -> Any:
    """Convert a part of a path to its field's type."""
    is_many = getattr(kind, "__origin__", None) is tuple
    return msgspec.convert((text,) if is_many else text, kind, strict=False)


def _get(path: str, action: str, help_: str = "", **more: Any) -> Endpoint:
    return Endpoint(method="GET", path=path, action=action, help=help_, **more)


def _post(path: str, action: str, help_: str = "", **more: Any) -> Endpoint:
    return Endpoint(method="POST", path=path, action=action, help=help_, **more)


_JOBS: Final = (
    _get("/jobs", "accounting.jobs", "List jobs.", cursor=("page", "next")),
    _get("/scripts", "archive.search", "Search in scripts.", cursor=("page", "next")),
    _get("/job-states", "accounting.job_states", "Count jobs by state."),
    _get("/jobs/{job}", "accounting.job", "Show what a job was and what it used."),
    _get("/jobs/{job}/script", "archive.show", "Show a job's script."),
    _get("/jobs/{job}/environment", "archive.env"),
    _get(
        "/jobs/{left}/diff/{right}", "archive.diff", "Show what differs between two jobs' scripts."
    ),
    _get("/jobs/{job}/cost", "bank.explain", "Explain what a job cost."),
    _get("/jobs/{job}/events", "history.job_events"),
)
"""Endpoints for jobs and scripts."""

_BANK: Final = (
    _get("/accounts", "bank.account_show"),
    _post("/accounts", "bank.account_create"),
    _get("/accounts/{account}", "bank.account_show", parts={"account": "names"}),
    Endpoint(
        method="PATCH",
        path="/accounts/{account}",
        action="bank.account_change",
        parts={"account": "name"},
    ),
    _get("/accounts/{account}/balance", "bank.balance", parts={"account": "accounts"}),
    _get("/accounts/{account}/statement", "bank.statement"),
    _get("/accounts/{account}/course", "bank.course"),
    _get("/accounts/{account}/holds", "bank.holds"),
    _get("/accounts/{account}/users", "bank.user_show", parts={"account": "accounts"}),
    Endpoint(
        method="PUT",
        path="/accounts/{account}/users/{user}",
        action="bank.user_change",
        help="Set what a user may spend of an account.",
    ),
    _get("/accounts/{account}/allocations", "bank.allocation_show", parts={"account": "names"}),
    _post("/accounts/{account}/allocations", "bank.allocation_create"),
    Endpoint(
        method="PATCH",
        path="/allocations/{allocation}",
        action="bank.allocation_change",
        parts={"allocation": "number"},
    ),
    _post("/accounts/{account}/deposits", "bank.deposit"),
    _post("/accounts/{account}/withdrawals", "bank.withdraw"),
    _post("/accounts/{account}/adjustments", "bank.adjust"),
    _post("/refunds", "bank.refund"),
    _post("/allowances", "bank.allow"),
    _post("/transfers", "bank.transfer"),
    _get("/balances", "bank.balance", "Show what is left in all accounts."),
    _get("/holds", "bank.holds", "List what is held for jobs."),
    _get("/usage", "bank.usage", "Show who spent what."),
    _get(
        "/users/{user}/accounts",
        "bank.user_show",
        "List a user's accounts.",
        parts={"user": "users"},
    ),
    _get("/rates", "bank.rate_show"),
    _post("/rates", "bank.rate_create"),
    _post("/quotes", "bank.quote", "Say what a job would cost."),
)
"""Endpoints for bank accounts, money and rates."""

_CLUSTER: Final = (
    _get("/nodes", "history.nodes", "List nodes, as they are or were."),
    _get(
        "/nodes/{node}",
        "history.nodes",
        "Show a node, or those of a list.",
        parts={"node": "nodes"},
    ),
    _get("/nodes/{node}/history", "history.node"),
    _get("/partitions", "history.partitions"),
    _get("/reservations", "history.reservations"),
    _get("/nodes/{node}/jobs", "history.node_jobs", "List what ran on a node."),
    _get("/events", "history.events", "Show what happened.", cursor=("before", "older")),
    _get("/actions", "automation.list", "List what can be done to a cluster."),
    _get("/actions/{action}", "automation.help", "Show what an action takes."),
    _post("/actions/{action}", "automation.run", "Have an action done."),
    _get("/audit", "automation.audit"),
    _get("/rules", "rules.list"),
    _get("/rules/executions", "rules.history", "Show what rules did."),
    _post("/rules/{rule}/enable", "rules.enable"),
    _post("/rules/{rule}/disable", "rules.disable"),
)
"""Endpoints for nodes, events and operations."""

_REPORTS: Final = tuple(
    _get(f"/reports/{action.partition('.')[2]}", action)
    for action in ACTIONS
    if action.startswith("reports.")
)
"""One endpoint for each report."""

_STEWARD: Final = (
    _get("/me", "credentials.me"),
    _get("/tokens", "credentials.token_list"),
    _post("/tokens", "credentials.token_create", status=201),
    Endpoint(
        method="DELETE",
        path="/tokens/{token}",
        action="credentials.token_revoke",
        help="Take a token back.",
        parts={"token": "numbers"},
    ),
    _get("/status", "status.show"),
    _get("/doctor", "doctor.run"),
    _get("/gaps", "accounting.gaps"),
)
"""Endpoints for Steward itself: user, tokens and status."""

_NOT_ASKED: Final = frozenset(
    f"credentials.{verb}" for verb in ("open", "vouch", "peek", "close", "settings")
)
"""Actions reserved for the ``steward web`` process itself."""

ASK: Final = "/ask/"
"""Path below which every action is callable by name."""
ENDPOINTS: Final[tuple[Endpoint, ...]] = (*_JOBS, *_BANK, *_CLUSTER, *_REPORTS, *_STEWARD)
"""All endpoints except those below /ask/."""

ASKS: Final = tuple(
    _post(f"{ASK}{name}", name) for name in sorted(ACTIONS) if name not in _NOT_ASKED
)
"""Every action by its name, below /ask/."""


Ask = Request[Any, Any, Any]

_JSON: Final = "application/json"
_PATTERNS: Final = {
    int: re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII),
    float: re.compile(r"-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?", re.ASCII),
    bool: re.compile("true|false"),
}
"""Numbers and booleans as JSON writes them; msgspec alone would accept more."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A query parameter of an endpoint.

    Attributes:
        name: Name in the query.
        field: Request field that it sets.
        kind: Type of its value, or of each of its values.
        many: Whether it may be repeated.
        required: Whether it is mandatory.
        default: Value if it is absent.
    """

    name: str
    field: str
    kind: Any
    many: bool
    required: bool
    default: Any = None


@functools.cache
def parameters(endpoint: Endpoint) -> tuple[Parameter, ...]:
    """Return the query parameters of an endpoint."""
    return tuple(_parameters(endpoint))


def _parameters(endpoint: Endpoint) -> Iterator[Parameter]:
    """Yield the query parameters of an endpoint."""
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
    """Return the type of one value, without None, and whether the field holds several."""
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
        # A query omits unused parameters, so "" is not offered as a choice.
        return operator.getitem(Literal, tuple(filter(None, get_args(kind)))), False
    return kind, False


def query(endpoint: Endpoint, request: Ask) -> dict[str, Any]:
    """Read the query of a request as fields of the action's request.

    Raises:
        WrongRequest: The query is malformed or holds an unknown parameter.
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
    """Convert the values of a query parameter; reject repetitions of a single one."""
    if not parameter.many and len(values) > 1:
        raise WrongRequest(f"{parameter.name!r} is given more than once")
    found = tuple(_value(parameter, text) for text in values)
    return found if parameter.many else found[0]


def _value(parameter: Parameter, text: str) -> Any:
    """Convert and validate one value of a query parameter."""
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
    """Describe why a value is invalid."""
    kind = parameter.kind
    what = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "")
    if get_origin(kind) is Literal:
        what = "one of " + ", ".join(repr(one) for one in get_args(kind))
    return f"{parameter.name!r} is not {what or 'as it must be'}: {text[:80]!r}"


@functools.cache
def body_of(endpoint: Endpoint) -> type[msgspec.Struct]:
    """Return the Struct of an endpoint's body: the request's fields not set by the path."""
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
    """Return a field's definition for msgspec.defstruct."""
    if field.required:
        return field.name, field.type
    if field.default_factory is not msgspec.NODEFAULT:
        return field.name, field.type, msgspec.field(default_factory=field.default_factory)
    return field.name, field.type, field.default


async def body(endpoint: Endpoint, request: Ask) -> dict[str, Any]:
    """Read the JSON body of a request as fields of the action's request.

    Raises:
        WrongRequest: The body is malformed or has the wrong shape.
        WrongMedia: The body is not JSON.
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
        # Free-form fields have no bounds in their type, so check their numbers here.
        raise UsageError("the body holds too large a number")
    return {name: getattr(found, name) for name in found.__struct_fields__}


def _whole(value: Any) -> Any:
    """Convert floats such as 1.0 to integers, recursively: JSON does not distinguish them."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and LEAST <= value <= MOST else value
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return value
