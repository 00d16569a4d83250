"""Message types of the myBRC API, and conversion of amounts, times and request bodies.

Errors first (:class:`ApiError` for answers, ``Remote...`` for the client), then amounts: the API
writes SU as decimals with two places, Steward computes in micro-SU (:func:`parse_cost`,
:func:`parse_amount`, :func:`format_su`, which alone rounds). The Structs are the request and reply
bodies. :func:`parse_job` and :func:`parse_login` parse bodies: JSON, or form data of either kind,
as scripts around the old plugins send it. :func:`merge_job` applies an update to a job. The rules
are those of the reference server, so that its clients work unchanged. ``application`` and
``answers`` (server) and ``remote`` (client) use this module.
"""

import io
import itertools
import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
import msgspec.inspect
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartError, MultipartParser, parse_options_header

from steward.bank.errors import BankUsage
from steward.bank.money import MICRO, round_half_up
from steward.core.errors import StewardError, Unavailable


class ApiError(StewardError):
    """Error answered with an HTTP status other than success.

    Args:
        status: HTTP status.
        message: Message for the client.
        wait_s: Seconds for Retry-After; 0 to leave the header out.
    """

    def __init__(self, status: int, message: str, wait_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s


class RemoteUnavailable(Unavailable):
    """myBRC server elsewhere that accepts nothing now."""


class RemoteRejected(StewardError):
    """Rejection of one message by the myBRC server elsewhere."""


class RemoteFailed(StewardError):
    """Failure of the myBRC server elsewhere on one message, as far as is known."""


AMOUNT_DIGITS: Final = 11
"""Most digits of an amount, those after the decimal point included."""

AMOUNT_PLACES: Final = 2
"""Most digits of an amount after the decimal point."""

AMOUNT_PATTERN: Final = r"^([0-9]{1,9}(\.[0-9]{1,2})?|\.[0-9]{1,2})(?!\n)$"
"""Pattern of a job's amount, for the API's schema."""

_COST_PATTERN: Final = re.compile(r"[0-9]{0,40}(\.[0-9]{0,40})?", re.ASCII)
_HUNDREDTH: Final = MICRO // 10**AMOUNT_PLACES
"""Micro-SU in a hundredth of an SU."""


def parse_cost(text: str) -> int:
    """Parse a ``job_cost`` into micro-SU.

    Raises:
        BankUsage: It is negative or no decimal, or has too many digits or places.
    """
    text = text.strip()
    if not _COST_PATTERN.fullmatch(text) or not any("0" <= sign <= "9" for sign in text):
        raise BankUsage(f"invalid job_cost {text[:60]!r}: give a decimal number of 0 or more", text)
    number = Decimal(text)
    _check_digits(number, "job_cost", most_whole=AMOUNT_DIGITS)
    return _decimal_to_micro_su(number)


def parse_amount(number: Decimal) -> int:
    """Convert a job's amount to micro-SU; two of its digits are reserved for the decimals.

    Raises:
        BankUsage: It is negative or no number, or has too many digits or places.
    """
    if not number.is_finite() or number.is_signed():
        raise BankUsage(f"invalid amount {str(number)[:60]}: give a number of 0 or more", number)
    _check_digits(number, "amount", most_whole=AMOUNT_DIGITS - AMOUNT_PLACES)
    return _decimal_to_micro_su(number)


def format_su(micros: int) -> str:
    """Format micro-SU as the API's decimal, rounded half up: ``12.50``."""
    hundredths = round_half_up(Fraction(micros, _HUNDREDTH))
    whole, decimals = divmod(abs(hundredths), 10**AMOUNT_PLACES)
    return f"{'-' if hundredths < 0 else ''}{whole}.{decimals:02}"


def _check_digits(number: Decimal, field: str, most_whole: int) -> None:
    """Check a number against the API's limits on digits.

    Raises:
        BankUsage: It has too many digits or decimals.
    """
    _, digits, exponent = number.as_tuple()
    places = max(0, -int(exponent))
    whole = max(0, len(digits) + int(exponent)) if any(digits) else 0
    if whole > most_whole or len(digits) > AMOUNT_DIGITS:
        raise BankUsage(f"{field} {str(number)[:60]} has more than {AMOUNT_DIGITS} digits", number)
    if places > AMOUNT_PLACES:
        raise BankUsage(
            f"{field} {str(number)[:60]} has more than {AMOUNT_PLACES} decimals", number
        )


def _decimal_to_micro_su(number: Decimal) -> int:
    """Convert an SU decimal to micro-SU."""
    _, digits, exponent = number.as_tuple()
    # Compute with integers: the decimal context's precision would round longer numbers.
    whole = int("".join(map(str, digits)))
    return whole * 10 ** (6 + int(exponent)) if whole else 0


# Python's "$" also matches before a newline at the end; "$" in the published schemas does not.
TEXT_PATTERN: Final = r"^[^\x00-\x1f\x7f]*(?!\n)$"
"""Text without control characters: names end up in logs, tables and PostgreSQL."""

UID_PATTERN: Final = r"^[0-9]+(?!\n)$"
"""Digits only."""

_INT32_LIMIT: Final = 2**31
_EARLIEST_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_PATTERN: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}.{0,20}|[Zz+-].{0,9})?)?", re.ASCII
)
_INTEGER_PATTERN: Final = re.compile(rb"[0-9]{1,20}")
_MAX_FORM_FIELDS: Final = 200
"""Most fields of a form."""
_COUNT_FIELDS: Final = ("num_cpus", "num_req_nodes", "num_alloc_nodes")
"""Fields of a job that hold whole numbers."""
_HOUR_FIELDS: Final = ("raw_time", "cpu_time")
"""Fields of a job that hold hours."""

S = TypeVar("S", bound=msgspec.Struct)
ApiJobId = Annotated[str, Meta(min_length=1, max_length=150, pattern=TEXT_PATTERN)]
ShortText = Annotated[str, Meta(max_length=50, pattern=TEXT_PATTERN)]
# JSON has one kind of number: 4.0 is an integer, too.
Count = Annotated[float, Meta(ge=-_INT32_LIMIT, lt=_INT32_LIMIT, multiple_of=1)]
Uid = Annotated[str, Meta(pattern=UID_PATTERN, max_length=10)]
LongText = Annotated[str, Meta(max_length=150, pattern=TEXT_PATTERN)]


class ApiNode(msgspec.Struct, frozen=True):
    """A node of a job."""

    name: Annotated[str, Meta(min_length=1, max_length=30, pattern=TEXT_PATTERN)]


class ApiJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the API returns it; unknown fields are null."""

    jobslurmid: str
    submitdate: datetime | None = None
    startdate: datetime | None = None
    enddate: datetime | None = None
    userid: str
    accountid: str
    amount: Annotated[str, Meta(extra_json_schema={"format": "decimal"})]
    jobstatus: str | None = None
    partition: str | None = None
    qos: str | None = None
    nodes: tuple[ApiNode, ...] = ()
    num_cpus: int | None = None
    num_req_nodes: int | None = None
    num_alloc_nodes: int | None = None
    raw_time: float | None = None
    cpu_time: float | None = None


class JobSent(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a client sends it; omitted fields keep their values."""

    jobslurmid: ApiJobId
    userid: Uid
    accountid: LongText
    submitdate: str | UnsetType | None = UNSET
    startdate: str | UnsetType | None = UNSET
    enddate: str | UnsetType | None = UNSET
    amount: Decimal | UnsetType = UNSET
    jobstatus: ShortText | UnsetType | None = UNSET
    partition: ShortText | UnsetType | None = UNSET
    qos: ShortText | UnsetType | None = UNSET
    nodes: tuple[ApiNode, ...] | UnsetType = UNSET
    num_cpus: Count | UnsetType | None = UNSET
    num_req_nodes: Count | UnsetType | None = UNSET
    num_alloc_nodes: Count | UnsetType | None = UNSET
    raw_time: float | UnsetType | None = UNSET
    cpu_time: float | UnsetType | None = UNSET


class ApiPartition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition with its price for an hour of a core."""

    name: str
    shared: bool | None = None
    num_nodes: int | None = None
    num_cores: int | None = None
    su_per_core_hour: str | None = None


class ApiUser(msgspec.Struct, frozen=True, kw_only=True):
    """A user of the bank."""

    username: str | None
    email: str


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a hundred jobs, links to the others, and the totals of all."""

    count: int
    total_amount: float = 0.0
    total_cpu_time: float = 0.0
    next: str | None = None
    previous: str | None = None
    results: tuple[ApiJob, ...] = ()


class UserPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a hundred users, with links to the others."""

    count: int
    next: str | None = None
    previous: str | None = None
    results: tuple[ApiUser, ...] = ()


class PartitionPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a hundred partitions, with links to the others."""

    count: int
    next: str | None = None
    previous: str | None = None
    results: tuple[ApiPartition, ...] = ()


class CanSubmitReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job can be submitted, and the reason."""

    success: bool
    message: str | None = None


class TokenReply(msgspec.Struct, frozen=True, kw_only=True):
    """A new token, shown this once."""

    token: str


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Error message."""

    detail: str


class PasswordLogin(msgspec.Struct, frozen=True, kw_only=True):
    """Name and password of a token request."""

    username: Annotated[str, Meta(min_length=1, max_length=150)]
    password: Annotated[str, Meta(min_length=1, max_length=1024)]


def parse_job(body: bytes, content_type: str) -> JobSent:
    """Parse the job in a request body.

    Raises:
        ApiError: The body cannot be read, or a field is invalid.
    """
    return _decode_body(body, content_type, JobSent)


def parse_login(body: bytes, content_type: str) -> PasswordLogin:
    """Parse the name and password in a request body.

    Raises:
        ApiError: The body cannot be read.
    """
    return _decode_body(body, content_type, PasswordLogin)


def merge_job(sent: JobSent, previous: ApiJob | None) -> tuple[ApiJob, int]:
    """Merge an update into the stored job; return the job and its amount in micro-SU.

    Raises:
        ApiError: A time or the amount is invalid, or the times are out of order.
    """
    fields: dict[str, Any] = {} if previous is None else msgspec.structs.asdict(previous)
    sent_fields = msgspec.structs.asdict(sent)
    for name in ("submitdate", "startdate", "enddate"):
        value = sent_fields.pop(name)
        if value is not UNSET:
            fields[name] = None if value is None else _parse_time(name, value)
    sent_amount = sent_fields.pop("amount")
    for name in _COUNT_FIELDS:
        if isinstance(sent_fields[name], float):
            sent_fields[name] = int(sent_fields[name])
    for name in _HOUR_FIELDS:
        # A form can contain "nan" and "inf"; JSON has neither, so no reply could return them.
        if isinstance(sent_fields[name], float) and not math.isfinite(sent_fields[name]):
            raise ApiError(400, f"invalid {name} {sent_fields[name]}: give a number of hours")
    fields.update({name: value for name, value in sent_fields.items() if value is not UNSET})
    try:
        amount = Decimal(fields.get("amount", "0")) if sent_amount is UNSET else sent_amount
        amount_micros = parse_amount(amount)
    except BankUsage as error:
        raise ApiError(400, str(error)) from error
    fields["amount"] = format_su(amount_micros)
    job = ApiJob(**fields)
    _check_time_order(job)
    return job, amount_micros


def _decode_body(body: bytes, content_type: str, struct_type: type[S]) -> S:
    """Decode a JSON or form body into a Struct."""
    media_type, options = parse_options_header(content_type)
    try:
        if media_type == "multipart/form-data":
            pairs = _parse_multipart(body, options.get("boundary", ""))
        elif media_type == "application/x-www-form-urlencoded":
            pairs = parse_qsl(
                body.decode(),
                keep_blank_values=True,
                max_num_fields=_MAX_FORM_FIELDS,
                errors="strict",
            )
        else:
            return msgspec.json.decode(
                _quote_ids(body, struct_type), type=struct_type, strict=False
            )
        # An empty form field is unknown; a form cannot express the list of nodes.
        form_fields = {name: value for name, value in pairs if value and name != "nodes"}
        return msgspec.convert(form_fields, struct_type, strict=False)
    except (
        *(msgspec.DecodeError, UnicodeError, ValueError, RecursionError, MultipartError),
    ) as error:
        raise ApiError(400, f"cannot decode the body: {error}") from error


def _parse_multipart(body: bytes, boundary: str) -> list[tuple[str, str]]:
    """Parse the fields of a multipart body, without files."""
    parser = MultipartParser(
        io.BytesIO(body),
        boundary,
        content_length=len(body),
        part_limit=_MAX_FORM_FIELDS,
        spool_limit=len(body),
        memory_limit=len(body),
        disk_limit=0,
    )
    return [(part.name, part.raw.decode()) for part in parser if not part.filename]


def _quote_ids(body: bytes, struct_type: type[msgspec.Struct]) -> bytes:
    """Quote whole numbers of a JSON object where the field is text: clients send ids as numbers."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    text_fields = {
        field.name for field in msgspec.structs.fields(struct_type) if _is_text(field.type)
    }
    for name in text_fields & fields.keys():
        if _INTEGER_PATTERN.fullmatch(bytes(fields[name])):
            fields[name] = msgspec.Raw(b'"' + bytes(fields[name]) + b'"')
    return msgspec.json.encode(fields)


@cache
def _is_text(field_type: Any) -> bool:
    """Return True if a field accepts text, whatever else it accepts."""
    types = msgspec.inspect.type_info(field_type)
    member_types = types.types if isinstance(types, msgspec.inspect.UnionType) else (types,)
    return any(isinstance(member_type, msgspec.inspect.StrType) for member_type in member_types)


def _parse_time(name: str, text: str) -> datetime:
    """Parse a time; without a zone it is UTC."""
    message = (
        f"invalid {name} {text[:60]!r}: give a time since 1970, such as 2026-01-31T12:00:00+00:00"
    )
    if not _TIME_PATTERN.fullmatch(text):
        raise ApiError(400, message)
    try:
        parsed = datetime.fromisoformat(text)
        parsed = parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ApiError(400, message) from error
    if parsed < _EARLIEST_TIME:
        raise ApiError(400, message)
    return parsed


def _check_time_order(job: ApiJob) -> None:
    """Raise ApiError unless a job's submit, start and end are in order."""
    times = [
        (name, at)
        for name, at in (
            ("submitted", job.submitdate),
            ("started", job.startdate),
            ("ended", job.enddate),
        )
        if at is not None
    ]
    for (earlier, before), (later, after) in itertools.pairwise(times):
        if after < before:
            raise ApiError(400, f"the job {later} before it was {earlier}")
