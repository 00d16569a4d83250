"""Web application of the myBRC API: OpenAPI schema, URL routes and error replies (Litestar).

Schema helpers come first: request bodies are parsed by hand, since they come as JSON or as form
data, and most paths share their error replies. :class:`ApiServices` holds the services,
:func:`make_application` builds the application, under both prefixes that clients use
(``/mybrc-rest``, ``/api``). Then come the route handlers, which run in threads, because the ledger
may block, and call ``answers`` and ``users``; then the error handlers.

Litestar is imported with this module, so only the serving process may import it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Litestar, Request, Response, Router, get, post, put, route
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
    SecurityScheme,
)
from litestar.params import FromPath, QueryParameter, RawBody

from steward.bank.ledger.ledger import Ledger
from steward.core.errors import StewardError, Unavailable
from steward.extensions.mybrc.services import (
    JobFilters,
    JobRegistry,
    SubmitChecks,
    list_partitions,
    list_users,
    page_links,
    parse_amount_filter,
)
from steward.extensions.mybrc.users import TokenAuthority
from steward.extensions.mybrc.wire import (
    AMOUNT_DIGITS,
    AMOUNT_PATTERN,
    AMOUNT_PLACES,
    TEXT_PATTERN,
    UID_PATTERN,
    ApiError,
    ApiJob,
    CanSubmitReply,
    ErrorDetail,
    JobPage,
    PartitionPage,
    TokenReply,
    UserPage,
    parse_job,
    parse_login,
)

AUTH_SCHEME: Final = "Token"
"""Authentication scheme of the Authorization header."""
_INT32: Final = 2**31


def _error_responses(**by_status: str) -> dict[int, ResponseSpec]:
    """Build OpenAPI replies from descriptions by status."""
    return {
        int(status.removeprefix("s")): ResponseSpec(
            data_container=ErrorDetail, description=text, generate_examples=False
        )
        for status, text in by_status.items()
    }


USUAL_RESPONSES: Final = _error_responses(
    s400="Invalid request.",
    s401="Missing or unknown token.",
    s413="The body is too large.",
    s429="Too many failures from this address: try again later.",
    s503="The ledger's database is unavailable: try again.",
)
"""Replies that every path may give beside its own."""

QUESTION_RESPONSES: Final = {
    400: ResponseSpec(
        data_container=CanSubmitReply,
        description="Invalid query.",
        generate_examples=False,
    )
}
"""Reply to an invalid ``can_submit_job`` question."""

NOT_FOUND_RESPONSES: Final = _error_responses(s404="Page or job not found.")
REFUSED_RESPONSES: Final = _error_responses(s403="CPU data is not accepted.")


def usual_responses(*statuses: int) -> dict[int, ResponseSpec]:
    """Return the usual replies with these statuses."""
    return {status: USUAL_RESPONSES[status] for status in statuses}


def _text_schema(
    max_length: int, *, min_length: int = 0, nullable: bool = True, pattern: str = TEXT_PATTERN
) -> Schema:
    """Build the schema of a text field."""
    # Numbers sent as text and text sent as numbers are both accepted, as on the reference server.
    types = [OpenAPIType.STRING, OpenAPIType.NULL] if nullable else OpenAPIType.STRING
    return Schema(type=types, min_length=min_length or None, max_length=max_length, pattern=pattern)


def _count_schema() -> Schema:
    types = [OpenAPIType.INTEGER, OpenAPIType.NULL]
    return Schema(type=types, minimum=-_INT32, maximum=_INT32 - 1)


def _hours_schema() -> Schema:
    return Schema(type=[OpenAPIType.NUMBER, OpenAPIType.NULL])


def _moment_schema() -> Schema:
    """Build the schema of a time field."""
    return Schema(
        type=[OpenAPIType.STRING, OpenAPIType.NULL],
        format=OpenAPIFormat.DATE_TIME,
        description="Times before 1970 are rejected, and the times of a job must be in order.",
    )


def _job_schema() -> Schema:
    """Build the schema of a job as clients send it."""
    node = Schema(
        type=OpenAPIType.OBJECT,
        required=["name"],
        properties={"name": _text_schema(30, min_length=1, nullable=False)},
    )
    amount = Schema(
        one_of=[
            Schema(type=OpenAPIType.STRING, pattern=AMOUNT_PATTERN),
            Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=999_999_999),
        ],
        description=f"At most {AMOUNT_DIGITS} digits, {AMOUNT_PLACES} of them decimals.",
    )
    return Schema(
        title="JobSent",
        type=OpenAPIType.OBJECT,
        required=["jobslurmid", "userid", "accountid"],
        properties={
            "jobslurmid": _text_schema(150, min_length=1, nullable=False),
            "submitdate": _moment_schema(),
            "startdate": _moment_schema(),
            "enddate": _moment_schema(),
            "userid": _text_schema(10, nullable=False, pattern=UID_PATTERN),
            "accountid": _text_schema(150, nullable=False),
            "amount": amount,
            "jobstatus": _text_schema(50),
            "partition": _text_schema(50),
            "qos": _text_schema(50),
            "nodes": Schema(type=OpenAPIType.ARRAY, items=node),
            "num_cpus": _count_schema(),
            "num_req_nodes": _count_schema(),
            "num_alloc_nodes": _count_schema(),
            "raw_time": _hours_schema(),
            "cpu_time": _hours_schema(),
        },
    )


def _login_schema() -> Schema:
    """Build the schema of a token request."""

    def word(max_length: int) -> Schema:
        return Schema(type=OpenAPIType.STRING, min_length=1, max_length=max_length)

    return Schema(
        title="Login",
        type=OpenAPIType.OBJECT,
        required=["username", "password"],
        properties={"username": word(150), "password": word(1024)},
    )


def _json_body(schema: Schema) -> RequestBody:
    """Build the JSON request body of a schema."""
    # Forms are accepted, too, but have no schema here: they cannot express every field.
    return RequestBody(required=True, content={"application/json": OpenAPIMediaType(schema)})


@dataclass
class JobBodyOperation(Operation):
    """OpenAPI operation whose body is a job."""

    def __post_init__(self) -> None:
        self.request_body = _json_body(_job_schema())


@dataclass
class LoginBodyOperation(Operation):
    """OpenAPI operation whose body is a name and a password; it needs no token."""

    def __post_init__(self) -> None:
        self.request_body = _json_body(_login_schema())
        # OpenAPI's way to declare that no token is needed; an empty list would be left out.
        self.security = [{}]


@dataclass
class FileBodyOperation(Operation):
    """OpenAPI operation whose body is a file."""

    def __post_init__(self) -> None:
        binary = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        content = {"application/octet-stream": OpenAPIMediaType(binary)}
        self.request_body = RequestBody(required=False, content=content)


log = logging.getLogger(__name__)

PREFIXES: Final = ("/mybrc-rest", "/api")
"""Path prefixes that clients of the API use."""
MAX_BODY_BYTES: Final = 1 << 20
"""Largest request body, in bytes: a job with some thousands of nodes."""
_LAST_SECOND: Final = 253_402_300_799
"""Last second of the year 9999."""


ApiRequest = Request[Any, Any, State]
# Each default has the parameter's own type: an optional one would accept the word "null". An
# impossible page number gives 404, as on the reference server.
Page = Annotated[int, QueryParameter()]
Text = Annotated[str, QueryParameter(max_length=150, pattern=TEXT_PATTERN)]
Amount = Annotated[str, QueryParameter(pattern=r"^([0-9]{1,9}(\.[0-9]{1,2})?)?(?!\n)$")]
Seconds = Annotated[float, QueryParameter(ge=0, le=_LAST_SECOND)]


class ApiServices(msgspec.Struct, frozen=True):
    """Services that the handlers of one server use.

    Attributes:
        tokens: Issues and checks tokens.
        jobs: Stores and lists jobs.
        submit_checks: Answers whether a job can be paid.
        ledger: Ledger, for the lists of users and partitions.
        cluster: Cluster of the jobs.
        domain: Mail domain of users without an address.
        now: Returns the current time.
        told: Called after a change of the ledger.
    """

    tokens: TokenAuthority
    jobs: JobRegistry
    submit_checks: SubmitChecks
    ledger: Ledger
    cluster: str
    domain: str
    now: Callable[[], datetime]
    told: Callable[[], None]


def make_application(services: ApiServices) -> Litestar:
    """Build the Litestar application of the API."""
    # Litestar's own replies to OPTIONS list the first method of a path alone.
    authenticated: list[Any] = [
        _options_handler("/jobs", "GET, POST, OPTIONS"),
        *(can_submit_job, jobs_list, jobs_create, jobs_update),
        *(users_list, partitions_list, upload_cpu_data),
    ]
    routers = [
        router
        for prefix in PREFIXES
        for router in (
            Router(path=prefix, route_handlers=[api_token_auth]),
            Router(path=prefix, route_handlers=authenticated, before_request=_authenticate),
        )
    ]
    security_scheme = SecurityScheme(
        type="apiKey", name="Authorization", security_scheme_in="header", description="Token …"
    )
    return Litestar(
        route_handlers=[swagger, *routers],
        state=State({"office": services}),
        openapi_config=OpenAPIConfig(
            title="myBRC REST API",
            version="v1",
            description="The myBRC REST API, served by Steward's bank.",
            components=Components(security_schemes={AUTH_SCHEME: security_scheme}),
            security=[{AUTH_SCHEME: []}],
            path="/schema",
            render_plugins=[JsonRenderPlugin()],
        ),
        exception_handlers={
            ApiError: _handle_api_error,
            StewardError: _handle_steward_error,
            HTTPException: _handle_http_error,
            TimeoutError: _handle_timeout,
            Exception: _handle_bug,
        },
        request_max_body_size=MAX_BODY_BYTES,
        logging_config=None,
        debug=False,
    )


def _options_handler(path: str, methods: str) -> HTTPRouteHandler:
    """Build the OPTIONS handler of a path."""

    @route(
        path, http_method="OPTIONS", status_code=204, include_in_schema=False, sync_to_thread=False
    )
    def options() -> Response[None]:
        return Response(None, status_code=204, headers={"Allow": methods})

    return options


@get(
    ["/swagger.json", *(f"{prefix}/swagger.json" for prefix in PREFIXES)],
    include_in_schema=False,
    sync_to_thread=False,
)
def swagger(request: ApiRequest) -> dict[str, Any]:
    """Return the OpenAPI 3.1 schema, at the path of the reference server."""
    return request.app.openapi_schema.to_schema()


async def _authenticate(request: ApiRequest) -> None:
    """Authenticate a request by its token."""
    services: ApiServices = request.app.state.office
    header = request.headers.get("authorization", "")
    request.state.caller = await asyncio.to_thread(
        services.tokens.authenticate, header, _client_address(request)
    )


@post(
    "/api_token_auth",
    sync_to_thread=True,
    status_code=200,
    operation_class=LoginBodyOperation,
    responses=usual_responses(400, 413, 429, 503),
)
def api_token_auth(request: ApiRequest, state: State, body: RawBody) -> TokenReply:
    """Issue a token for a name and its password."""
    office: ApiServices = state.office
    login = parse_login(body, request.headers.get("content-type", ""))
    return TokenReply(
        token=office.tokens.login(login.username, login.password, _client_address(request))
    )


@get(
    "/can_submit_job/{job_cost:str}/{user_id:str}/{account_id:str}",
    sync_to_thread=True,
    responses={**USUAL_RESPONSES, **QUESTION_RESPONSES},
)
def can_submit_job(
    state: State, job_cost: FromPath[str], user_id: FromPath[str], account_id: FromPath[str]
) -> Response[CanSubmitReply]:
    """Return whether this user can submit a job with this cost for this account."""
    office: ApiServices = state.office
    try:
        return Response(office.submit_checks.check_job(job_cost, user_id, account_id))
    except ApiError as error:
        return Response(CanSubmitReply(success=False, message=str(error)), status_code=error.status)


@get("/jobs", sync_to_thread=True, responses={**USUAL_RESPONSES, **NOT_FOUND_RESPONSES})
def jobs_list(
    request: ApiRequest,
    state: State,
    page: Page = 1,
    user: Text = "",
    account: Text = "",
    jobstatus: Text = "",
    partition: Text = "",
    min_amount: Amount = "",
    max_amount: Amount = "",
    start_time: Seconds = 0,
    end_time: Seconds = _LAST_SECOND,
) -> JobPage:
    """List jobs, a hundred at a time, by start time.

    ``start_time`` and ``end_time`` bound the start, in seconds since 1970.
    """
    office: ApiServices = state.office
    filters = JobFilters(
        user=user,
        account=account,
        jobstatus=jobstatus,
        partition=partition,
        min_amount=parse_amount_filter("min_amount", min_amount),
        max_amount=parse_amount_filter("max_amount", max_amount),
        begin=_filter_time(start_time),
        end=_filter_time(end_time),
    )
    found = office.jobs.list_jobs(page, filters)
    following, previous = page_links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@post("/jobs", sync_to_thread=True, operation_class=JobBodyOperation, responses=USUAL_RESPONSES)
def jobs_create(request: ApiRequest, state: State, body: RawBody) -> ApiJob:
    """Store a new job, and charge its amount."""
    office: ApiServices = state.office
    sent = parse_job(body, request.headers.get("content-type", ""))
    job = office.jobs.create(sent, request.state.caller)
    office.told()
    return job


@put(
    "/jobs/{jobslurmid:str}",
    sync_to_thread=True,
    operation_class=JobBodyOperation,
    # 404 because a job id that contains a slash does not match the path.
    responses={**USUAL_RESPONSES, **NOT_FOUND_RESPONSES},
)
def jobs_update(
    request: ApiRequest, state: State, jobslurmid: FromPath[str], body: RawBody
) -> ApiJob:
    """Store a job, new or known, and charge the difference."""
    office: ApiServices = state.office
    sent = parse_job(body, request.headers.get("content-type", ""))
    job = office.jobs.update(jobslurmid, sent, request.state.caller)
    office.told()
    return job


@get("/users", sync_to_thread=True, responses={**USUAL_RESPONSES, **NOT_FOUND_RESPONSES})
def users_list(request: ApiRequest, state: State, page: Page = 1) -> UserPage:
    """List the bank's users, a hundred at a time."""
    office: ApiServices = state.office
    found = list_users(office.ledger, office.domain, page)
    following, previous = page_links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@get("/partitions", sync_to_thread=True, responses={**USUAL_RESPONSES, **NOT_FOUND_RESPONSES})
def partitions_list(request: ApiRequest, state: State, page: Page = 1) -> PartitionPage:
    """List partitions and their prices, a hundred at a time."""
    office: ApiServices = state.office
    found = list_partitions(office.ledger, office.cluster, office.now(), page)
    following, previous = page_links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@put(
    "/upload_cpu_data/{filename:str}",
    sync_to_thread=False,
    operation_class=FileBodyOperation,
    responses={**USUAL_RESPONSES, **REFUSED_RESPONSES},
)
def upload_cpu_data(filename: FromPath[str]) -> ErrorDetail:
    """Reject a file of CPU data: Steward measures usage itself and keeps no such files."""
    what = "CPU data is not accepted: Steward measures usage itself, see 'steward sacct'"
    log.info("ignoring CPU data in a file of %d characters", len(filename))
    raise ApiError(403, what)


def _client_address(request: ApiRequest) -> str:
    return request.client.host if request.client else ""


def _filter_time(seconds: float) -> datetime | None:
    """Convert a time filter; None where it bounds nothing."""
    if not 0 < seconds < _LAST_SECOND:
        return None
    return datetime.fromtimestamp(seconds, tz=UTC)


def _error_reply(
    status: int, message: str, headers: dict[str, str] | None = None
) -> Response[ErrorDetail]:
    """Build an error reply."""
    return Response(
        ErrorDetail(detail=message),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _handle_api_error(_: ApiRequest, error: ApiError) -> Response[ErrorDetail]:
    """Reply to an ApiError with its status."""
    headers = {"Retry-After": str(error.wait_s)} if error.wait_s else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = AUTH_SCHEME
    return _error_reply(error.status, str(error), headers)


def _handle_steward_error(_: ApiRequest, error: StewardError) -> Response[ErrorDetail]:
    """Reply to Steward's errors: 503 for a temporary one, otherwise 400."""
    if isinstance(error, Unavailable):
        log.warning(
            "cannot serve a request of the myBRC API, asking the client to retry: %s", error
        )
        return _error_reply(503, "the ledger is unavailable: try again", {"Retry-After": "2"})
    return _error_reply(400, str(error))


def _handle_http_error(_: ApiRequest, error: HTTPException) -> Response[ErrorDetail]:
    """Reply to Litestar's own errors, such as invalid parameters."""
    extra = error.extra if isinstance(error.extra, list) else []
    parts = [
        f"{item.get('key')}: {item.get('message')}" for item in extra if isinstance(item, dict)
    ]
    return _error_reply(
        error.status_code, "; ".join([error.detail, *parts]), dict(error.headers or {})
    )


def _handle_timeout(_: ApiRequest, __: TimeoutError) -> Response[ErrorDetail]:
    """Reply to a body that arrives too slowly."""
    return _error_reply(408, "the body was not complete in time", {"Connection": "close"})


def _handle_bug(_: ApiRequest, error: Exception) -> Response[ErrorDetail]:
    """Reply to an unexpected exception, and log it."""
    # The client must not see internals; the log has them.
    log.error("a request of the myBRC API failed", exc_info=error)
    return _error_reply(500, "Unexpected server error.")
