"""What a search server's replies mean: done, refused for good, or to be tried again."""

import re
from typing import Any, Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.extensions.search_servers.client import SearchClient
from steward.extensions.search_servers.wire import Reply, cleaned

TOO_MANY: Final = 429
TOO_LARGE: Final = 413
CONFLICT: Final = 409
MISSING: Final = 404

_FAULTS: Final = frozenset(
    {
        *("null_pointer_exception", "class_cast_exception", "number_format_exception"),
        *("array_index_out_of_bounds_exception", "index_out_of_bounds_exception"),
        *("string_index_out_of_bounds_exception", "arithmetic_exception"),
    }
)
"""A server's own mistakes with one document: it would make them again for ever."""

_SHUT: Final = re.compile(r"FORBIDDEN/[578]/")
"""A block that a person has put on an index: read-only, read, write. The disks' own is another."""

_CLOSED: Final = "index_closed_exception"
_PASSING: Final = (
    *("validation_exception", "index_not_found_exception", "cluster_block_exception"),
    _CLOSED,
)
"""What is said of a document and is true of its index: nothing is wrong with the document."""


class Cause(msgspec.Struct, frozen=True):
    """Why something failed, as a server says it."""

    type: str = ""
    reason: str | None = ""
    caused_by: "Cause | None" = None

    def __str__(self) -> str:
        text = f"{self.type}: {self.reason or ''}".strip(": ")
        inner = self.caused_by
        while inner is not None and inner.caused_by is not None:
            inner = inner.caused_by
        if inner is not None and inner.reason and inner.reason not in text:
            text += f" ({inner.reason})"
        return cleaned(text)

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed the index, or keeps it from being written or read."""
        return self.type == _CLOSED or (
            self.type == "cluster_block_exception" and bool(_SHUT.search(self.reason or ""))
        )


class Outcome(msgspec.Struct, frozen=True):
    """What became of one document of a bulk request."""

    status: int
    error: Cause | str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the server has this version of the document, or a later one."""
        # 404 is a deletion of what is not there.
        return 200 <= self.status < 300 or (
            self.status in (CONFLICT, MISSING) and not self._passing
        )

    @property
    def is_refused(self) -> bool:
        """Whether it will never take the document as it is."""
        if self._passing or self.status in (TOO_MANY, 401, 403, 408):
            return False
        return 400 <= self.status < 500 or self.type in _FAULTS

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed its index, or keeps it from being written."""
        return isinstance(self.error, Cause) and self.error.is_shut

    @property
    def type(self) -> str:
        """The kind of error; "" for none."""
        return self.error.type if isinstance(self.error, Cause) else ""

    @property
    def why(self) -> str:
        """The server's reason."""
        text = cleaned(str(self.error)) if isinstance(self.error, str) else str(self.error or "")
        return text or f"status {self.status}"

    @property
    def _passing(self) -> bool:
        return self.type in _PASSING


class BulkReply(msgspec.Struct, frozen=True):
    """The reply to a bulk request: an outcome for each document, in order."""

    items: tuple[dict[str, Outcome], ...] = ()

    def outcomes(self) -> list[Outcome]:
        """The outcomes."""
        return [next(iter(item.values())) for item in self.items]


class _Failure(msgspec.Struct, frozen=True):
    error: Cause | str | None = None


def read(client: SearchClient, reply: Reply, shape: Any) -> Any:
    """The body of a reply that succeeded, as this shape.

    Raises:
        ArchiveUnavailable: It did not succeed, or its body is something else.
    """
    if not 200 <= reply.status < 300:
        raise unavailable(client, reply)
    try:
        return msgspec.json.decode(reply.body, type=shape)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ArchiveUnavailable(
            f"{client.where} does not answer as {client.product} does ({cleaned(str(error))}): "
            "check 'urls' and what stands in between",
            client.where,
        ) from error


def reason(reply: Reply) -> str:
    """What a reply that is an error says."""
    try:
        error = msgspec.json.decode(reply.body, type=_Failure).error
    except (msgspec.MsgspecError, UnicodeError):
        # A proxy's page, most likely.
        error = reply.body[:200].decode("utf-8", "replace")
    text = cleaned(str(error or ""))
    return f"{reply.status}, {text}" if text else f"status {reply.status}"


def cause_of(reply: Reply) -> Cause:
    """Why a request failed, as far as the server says it in its usual form."""
    try:
        error = msgspec.json.decode(reply.body, type=_Failure).error
    except (msgspec.MsgspecError, UnicodeError):
        return Cause()  # a proxy's page, most likely
    return error if isinstance(error, Cause) else Cause()


def unavailable(client: SearchClient, reply: Reply) -> ArchiveUnavailable:
    """The error for a request that failed, which is tried again."""
    of = client.settings
    advice = {
        401: (
            f"it does not know us: check {of.api_key_file or of.password_file}"
            if of.user or of.api_key_file
            else "it wants to know who we are: set user and password_file, or api_key_file"
        ),
        403: (
            f"it does not let us: grant 'manage' on {of.index}-*, and 'monitor' and "
            "'manage_index_templates' on the cluster"
        ),
        TOO_MANY: "it asks for patience, and gets smaller requests",
        TOO_LARGE: "lower batch_bytes, or raise its http.max_content_length",
    }.get(reply.status, "")
    text = f"{client.where} cannot be used ({reason(reply)})"
    return ArchiveUnavailable(f"{text}: {advice}" if advice else text, client.where)
