"""The paths of the myBRC API, under both prefixes that its clients know.

Handlers are thin: they run in threads, since the ledger may make them wait, and
say what they found. Litestar is imported with this module, so nothing may
import it but what serves.
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
from steward.extensions.mybrc import answers
from steward.extensions.mybrc.answers import Affording, Filters, Teller, amount_filter, links
from steward.extensions.mybrc.users import Doorkeeper
from steward.extensions.mybrc.wire import (
    DIGITS,
    PATTERN,
    PLACES,
    PLAIN,
    UID,
    Answer,
    ApiError,
    Detail,
    Job,
    JobPage,
    PartitionPage,
    TokenGiven,
    UserPage,
    job_of,
    login_of,
)

SCHEME: Final = "Token"
_INT32: Final = 2**31


def _responses(**by_status: str) -> dict[int, ResponseSpec]:
    return {
        int(status.removeprefix("s")): ResponseSpec(
            data_container=Detail, description=what, generate_examples=False
        )
        for status, what in by_status.items()
    }


USUAL: Final = _responses(
    s400="Something about the request is wrong.",
    s401="There is no token, or it is nobody's.",
    s413="The body is too large.",
    s429="Too much has failed from this address: wait.",
    s503="The ledger's database is away: try again.",
)
"""What every path may answer beside its own."""

ANSWERED: Final = {
    400: ResponseSpec(
        data_container=Answer,
        description="Something about the question is wrong.",
        generate_examples=False,
    )
}
"""How a wrong question about a job is answered."""

NOT_FOUND: Final = _responses(s404="There is no such page, or no such job.")
REFUSED: Final = _responses(s403="This is not taken here.")


def only(*statuses: int) -> dict[int, ResponseSpec]:
    """Those of the usual answers that a path has."""
    return {status: USUAL[status] for status in statuses}


def _text(most: int, *, least: int = 0, nullable: bool = True, pattern: str = PLAIN) -> Schema:
    # Whole numbers, and numbers as texts, are taken as the reference server takes them.
    kinds = [OpenAPIType.STRING, OpenAPIType.NULL] if nullable else OpenAPIType.STRING
    return Schema(type=kinds, min_length=least or None, max_length=most, pattern=pattern)


def _count() -> Schema:
    kinds = [OpenAPIType.INTEGER, OpenAPIType.NULL]
    return Schema(type=kinds, minimum=-_INT32, maximum=_INT32 - 1)


def _hours() -> Schema:
    return Schema(type=[OpenAPIType.NUMBER, OpenAPIType.NULL])


def _moment_schema() -> Schema:
    return Schema(
        type=[OpenAPIType.STRING, OpenAPIType.NULL],
        format=OpenAPIFormat.DATE_TIME,
        description="Times before 1970 are refused, and those of a job go on in their order.",
    )


def _job() -> Schema:
    node = Schema(
        type=OpenAPIType.OBJECT,
        required=["name"],
        properties={"name": _text(30, least=1, nullable=False)},
    )
    amount = Schema(
        one_of=[
            Schema(type=OpenAPIType.STRING, pattern=PATTERN),
            Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=999_999_999),
        ],
        description=f"At most {DIGITS} digits, {PLACES} of them decimals.",
    )
    return Schema(
        title="JobSent",
        type=OpenAPIType.OBJECT,
        required=["jobslurmid", "userid", "accountid"],
        properties={
            "jobslurmid": _text(150, least=1, nullable=False),
            "submitdate": _moment_schema(),
            "startdate": _moment_schema(),
            "enddate": _moment_schema(),
            "userid": _text(10, nullable=False, pattern=UID),
            "accountid": _text(150, nullable=False),
            "amount": amount,
            "jobstatus": _text(50),
            "partition": _text(50),
            "qos": _text(50),
            "nodes": Schema(type=OpenAPIType.ARRAY, items=node),
            "num_cpus": _count(),
            "num_req_nodes": _count(),
            "num_alloc_nodes": _count(),
            "raw_time": _hours(),
            "cpu_time": _hours(),
        },
    )


def _login() -> Schema:
    def word(most: int) -> Schema:
        return Schema(type=OpenAPIType.STRING, min_length=1, max_length=most)

    return Schema(
        title="Login",
        type=OpenAPIType.OBJECT,
        required=["username", "password"],
        properties={"username": word(150), "password": word(1024)},
    )


def _body(schema: Schema) -> RequestBody:
    # Form data is read, too, but what a form cannot say would make its description another.
    return RequestBody(required=True, content={"application/json": OpenAPIMediaType(schema)})


@dataclass
class SendsJob(Operation):
    """An operation whose body is a job."""

    def __post_init__(self) -> None:
        self.request_body = _body(_job())


@dataclass
class SendsLogin(Operation):
    """An operation whose body is a name and a password; it needs no token."""

    def __post_init__(self) -> None:
        self.request_body = _body(_login())
        # OpenAPI's way to say that no token is needed; an empty list would be left out.
        self.security = [{}]


@dataclass
class SendsFile(Operation):
    """An operation whose body is a file."""

    def __post_init__(self) -> None:
        binary = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        content = {"application/octet-stream": OpenAPIMediaType(binary)}
        self.request_body = RequestBody(required=False, content=content)


log = logging.getLogger(__name__)

PREFIXES: Final = ("/mybrc-rest", "/api")
LARGEST: Final = 1 << 20
"""Of a body, in bytes: a job with some thousands of nodes."""
_LAST_SECOND: Final = 253_402_300_799
"""Of the year 9999."""


Ask = Request[Any, Any, State]
# Each has a default of its own kind: of one that may be None, the word "null" would be taken.
# A page that cannot be is one that is not there: 404, as on the server that the API is of.
Page = Annotated[int, QueryParameter()]
Text = Annotated[str, QueryParameter(max_length=150, pattern=PLAIN)]
Amount = Annotated[str, QueryParameter(pattern=r"^([0-9]{1,9}(\.[0-9]{1,2})?)?(?!\n)$")]
Seconds = Annotated[float, QueryParameter(ge=0, le=_LAST_SECOND)]


class Office(msgspec.Struct, frozen=True):
    """Who does the work of one server.

    Attributes:
        doorkeeper: Gives tokens, and knows them again.
        teller: Takes in jobs, and shows them.
        affording: Knows whether a job can be paid.
        ledger: What the lists are read from.
        cluster: Whose jobs all this is about.
        domain: Behind the names of users without an address.
        now: The time.
        told: Called when the ledger has changed.
    """

    doorkeeper: Doorkeeper
    teller: Teller
    affording: Affording
    ledger: Ledger
    cluster: str
    domain: str
    now: Callable[[], datetime]
    told: Callable[[], None]


def make_application(office: Office) -> Litestar:
    """The API as a server can serve it."""
    # Litestar's own answers to OPTIONS know of a path's first method alone.
    guarded: list[Any] = [
        _options("/jobs", "GET, POST, OPTIONS"),
        *(can_submit_job, jobs_list, jobs_create, jobs_update),
        *(users_list, partitions_list, upload_cpu_data),
    ]
    routers = [
        router
        for prefix in PREFIXES
        for router in (
            Router(path=prefix, route_handlers=[api_token_auth]),
            Router(path=prefix, route_handlers=guarded, before_request=_admit),
        )
    ]
    header = SecurityScheme(
        type="apiKey", name="Authorization", security_scheme_in="header", description="Token …"
    )
    return Litestar(
        route_handlers=[swagger, *routers],
        state=State({"office": office}),
        openapi_config=OpenAPIConfig(
            title="myBRC REST API",
            version="v1",
            description="The myBRC REST API, as Steward's bank speaks it.",
            components=Components(security_schemes={SCHEME: header}),
            security=[{SCHEME: []}],
            path="/schema",
            render_plugins=[JsonRenderPlugin()],
        ),
        exception_handlers={
            ApiError: _refused,
            StewardError: _failed,
            HTTPException: _wrong,
            TimeoutError: _slow,
            Exception: _broken,
        },
        request_max_body_size=LARGEST,
        logging_config=None,
        debug=False,
    )


def _options(path: str, methods: str) -> HTTPRouteHandler:
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
def swagger(request: Ask) -> dict[str, Any]:
    """The description, where the reference server has its own; it is of OpenAPI 3.1."""
    return request.app.openapi_schema.to_schema()


async def _admit(request: Ask) -> None:
    """Let only those in that have a token."""
    office: Office = request.app.state.office
    header = request.headers.get("authorization", "")
    request.state.caller = await asyncio.to_thread(
        office.doorkeeper.caller, header, _address(request)
    )


@post(
    "/api_token_auth",
    sync_to_thread=True,
    status_code=200,
    operation_class=SendsLogin,
    responses=only(400, 413, 429, 503),
)
def api_token_auth(request: Ask, state: State, body: RawBody) -> TokenGiven:
    """Give a token to whoever knows a name and its password."""
    office: Office = state.office
    login = login_of(body, request.headers.get("content-type", ""))
    return TokenGiven(
        token=office.doorkeeper.login(login.username, login.password, _address(request))
    )


@get(
    "/can_submit_job/{job_cost:str}/{user_id:str}/{account_id:str}",
    sync_to_thread=True,
    responses={**USUAL, **ANSWERED},
)
def can_submit_job(
    state: State, job_cost: FromPath[str], user_id: FromPath[str], account_id: FromPath[str]
) -> Response[Answer]:
    """Say whether a job with this cost can be submitted by this user for this account."""
    office: Office = state.office
    try:
        return Response(office.affording.answer(job_cost, user_id, account_id))
    except ApiError as error:
        return Response(Answer(success=False, message=str(error)), status_code=error.status)


@get("/jobs", sync_to_thread=True, responses={**USUAL, **NOT_FOUND})
def jobs_list(
    request: Ask,
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
    """Show jobs, a hundred at a time, in the order of their start.

    ``start_time`` and ``end_time`` are seconds since 1970 between which they started.
    """
    office: Office = state.office
    filters = Filters(
        user=user,
        account=account,
        jobstatus=jobstatus,
        partition=partition,
        min_amount=amount_filter("min_amount", min_amount),
        max_amount=amount_filter("max_amount", max_amount),
        begin=_moment(start_time),
        end=_moment(end_time),
    )
    found = office.teller.page(page, filters)
    following, previous = links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@post("/jobs", sync_to_thread=True, operation_class=SendsJob, responses=USUAL)
def jobs_create(request: Ask, state: State, body: RawBody) -> Job:
    """Take in a new job, and charge what it may cost."""
    office: Office = state.office
    sent = job_of(body, request.headers.get("content-type", ""))
    job = office.teller.create(sent, request.state.caller)
    office.told()
    return job


@put(
    "/jobs/{jobslurmid:str}",
    sync_to_thread=True,
    operation_class=SendsJob,
    # A job's id with a slash in it is no part of a path.
    responses={**USUAL, **NOT_FOUND},
)
def jobs_update(request: Ask, state: State, jobslurmid: FromPath[str], body: RawBody) -> Job:
    """Take in a job, new or not, and charge the difference."""
    office: Office = state.office
    sent = job_of(body, request.headers.get("content-type", ""))
    job = office.teller.update(jobslurmid, sent, request.state.caller)
    office.told()
    return job


@get("/users", sync_to_thread=True, responses={**USUAL, **NOT_FOUND})
def users_list(request: Ask, state: State, page: Page = 1) -> UserPage:
    """Show the users that the bank knows, a hundred at a time."""
    office: Office = state.office
    found = answers.users(office.ledger, office.domain, page)
    following, previous = links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@get("/partitions", sync_to_thread=True, responses={**USUAL, **NOT_FOUND})
def partitions_list(request: Ask, state: State, page: Page = 1) -> PartitionPage:
    """Show the partitions and what they cost, a hundred at a time."""
    office: Office = state.office
    found = answers.partitions(office.ledger, office.cluster, office.now(), page)
    following, previous = links(str(request.url), page, found.count)
    return msgspec.structs.replace(found, next=following, previous=previous)


@put(
    "/upload_cpu_data/{filename:str}",
    sync_to_thread=False,
    operation_class=SendsFile,
    responses={**USUAL, **REFUSED},
)
def upload_cpu_data(filename: FromPath[str]) -> Detail:
    """Refuse a file of CPU data: Steward measures use itself, and keeps no such files."""
    what = "CPU data is not taken: use is measured by Steward itself, see 'steward sacct'"
    log.info("CPU data in a file of %d letters is not taken", len(filename))
    raise ApiError(403, what)


def _address(request: Ask) -> str:
    return request.client.host if request.client else ""


def _moment(seconds: float) -> datetime | None:
    """A bound of the list; None where it bounds nothing."""
    if not 0 < seconds < _LAST_SECOND:
        return None
    return datetime.fromtimestamp(seconds, tz=UTC)


def _said(status: int, what: str, headers: dict[str, str] | None = None) -> Response[Detail]:
    return Response(
        Detail(detail=what), status_code=status, headers=headers, media_type="application/json"
    )


def _refused(_: Ask, error: ApiError) -> Response[Detail]:
    headers = {"Retry-After": str(error.wait_s)} if error.wait_s else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = SCHEME
    return _said(error.status, str(error), headers)


def _failed(_: Ask, error: StewardError) -> Response[Detail]:
    if isinstance(error, Unavailable):
        log.warning("a request of the myBRC API is to come again: %s", error)
        return _said(503, "the ledger cannot be used just now, try again", {"Retry-After": "2"})
    return _said(400, str(error))


def _wrong(_: Ask, error: HTTPException) -> Response[Detail]:
    extra = error.extra if isinstance(error.extra, list) else []
    parts = [f"{one.get('key')}: {one.get('message')}" for one in extra if isinstance(one, dict)]
    return _said(error.status_code, "; ".join([error.detail, *parts]), dict(error.headers or {}))


def _slow(_: Ask, __: TimeoutError) -> Response[Detail]:
    return _said(408, "the body took too long", {"Connection": "close"})


def _broken(_: Ask, error: Exception) -> Response[Detail]:
    # Whatever it is, the client learns nothing of our insides; the log does.
    log.error("a request of the myBRC API failed", exc_info=error)
    return _said(500, "Unexpected server error.")
