"""How the API describes itself in OpenAPI: what the handlers' own annotations cannot say.

Bodies are read by hand, since they come as JSON or as form data, and answers
that are not a success are the same for most paths. Litestar is imported with
this module, so nothing may import it but what serves.
"""

from dataclasses import dataclass
from typing import Final

from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)

from steward.extensions.mybrc import amounts
from steward.extensions.mybrc.shapes import PLAIN, UID, Answer, Detail

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


def _moment() -> Schema:
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
            Schema(type=OpenAPIType.STRING, pattern=amounts.PATTERN),
            Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=999_999_999),
        ],
        description=f"At most {amounts.DIGITS} digits, {amounts.PLACES} of them decimals.",
    )
    return Schema(
        title="JobSent",
        type=OpenAPIType.OBJECT,
        required=["jobslurmid", "userid", "accountid"],
        properties={
            "jobslurmid": _text(150, least=1, nullable=False),
            "submitdate": _moment(),
            "startdate": _moment(),
            "enddate": _moment(),
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
