"""HTTPS transport: send requests to the API of Steward's pages, for hosts without a daemon.

``ask_https`` is the entry point: one POST to ``/api/v1/ask/ACTION``, answered by a JSON object, by
one JSON object a line for a stream, or by a problem document (RFC 9457), which becomes the
exception for its status. The user is identified by a token, from ``STEWARD_TOKEN`` or a file that
nobody else can read; without one, by this host's munged.
"""

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from steward import __version__
from steward.client.places import ClientError, DaemonAway, RemoteApi
from steward.client.sockets import SILENCE_S, decode_replies, make_decode_error, read_replies
from steward.core.actions import Action
from steward.core.errors import (
    Conflict,
    InternalFailure,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UnknownCredential,
    UsageError,
)
from steward.core.section import TlsSettings
from steward.core.tls import TlsUnavailable, make_client_context

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse


TOKEN: Final = "STEWARD_TOKEN"  # noqa: S105 - a variable's name
"""Environment variable with the API token."""
TOKEN_FILE: Final = "~/.config/steward/token"  # noqa: S105 - a file's name
"""Default file with the API token."""
_LONGEST_TOKEN: Final = 512
"""Longest token, in bytes."""
_LONGEST_PROBLEM: Final = 1 << 16
"""Longest error response that is decoded, in bytes."""
_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts for which plain HTTP is allowed."""
_LINES: Final = "application/jsonl"
"""Content type of a stream: one JSON object a line."""

_ERROR_BY_STATUS: Final[dict[int, type[StewardError]]] = {
    400: UsageError,
    401: UnknownCredential,
    403: PermissionRefused,
    404: NotFound,
    409: Conflict,
    413: UsageError,
    422: UsageError,
    429: Unavailable,
    500: InternalFailure,
    502: DaemonAway,
    503: Unavailable,
    504: DaemonAway,
}
"""Exception class for each HTTP status."""


class _ProblemReply(msgspec.Struct, frozen=True):
    detail: str


def ask_https(api: RemoteApi, action: Action, request: Any, key: str = "") -> Iterator[Any]:
    """Send a request to the API; yield items and answer.

    Args:
        api: Address and credentials of the API.
        action: The action.
        request: A value of its request type.
        key: Idempotency key; "" for none.

    Raises:
        UsageError: The address is invalid, or there is neither a token nor MUNGE.
        DaemonAway: No Steward answers there.
        ClientError: The answer cannot be understood.
        StewardError: The action rejects the request or fails.
    """
    address = _parse_url(api.url)
    target, body = f"/api/v1/ask/{action.name}", msgspec.json.encode(request)
    token = find_token(api)
    headers = {
        "Authorization": f"Bearer {token}"
        if token
        else _make_munge_header(api, address, target, body),
        "Content-Type": "application/json",
        "User-Agent": f"steward/{__version__}",
        **({"Idempotency-Key": key} if key else {}),
    }
    path = address.path.rstrip("/") + target
    connection = _make_connection(address, api.ca_file)
    try:
        response = _send_post(connection, path, body, headers, api.url)
        yield from _read_response(response, action, api.url)
    finally:
        connection.close()


def find_token(api: RemoteApi) -> str:
    """Return this user's API token; "" if there is none.

    Raises:
        UsageError: It is malformed, or its file can be read by others.
    """
    direct = api.token or os.environ.get(TOKEN, "")
    if direct:
        return _check_token(direct.strip(), TOKEN)
    path = os.path.expanduser(api.token_file or TOKEN_FILE)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", path) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file", path)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(
                f"{path} must belong to you, with mode 0600: run 'chmod 600 {path}'", path
            )
        text = file.read(_LONGEST_TOKEN + 1)
    return _check_token(text.decode("ascii", "replace").strip(), path)


def _make_munge_header(api: RemoteApi, address: SplitResult, path: str, body: bytes) -> str:
    """Make an Authorization header with a MUNGE credential for this request alone."""
    from steward.core.munge import SCHEME, Munge, MungeUnavailable, build_statement

    try:
        credential = Munge(api.munge_socket).encode(
            build_statement("POST", path, body, address.netloc)
        )
    except MungeUnavailable as error:
        raise UsageError(
            f"{api.url} requires authentication, and MUNGE failed here ({error}): run "
            "'steward token create' on a login node, and put the token into "
            f"{os.path.expanduser(api.token_file or TOKEN_FILE)} or {TOKEN}",
            api.url,
        ) from error
    return f"{SCHEME} {credential.decode('ascii')}"


def _check_token(token: str, origin: str) -> str:
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_plain or len(token) > _LONGEST_TOKEN:
        raise UsageError(
            f"{origin} contains no valid token: create one with 'steward token create'", origin
        )
    return token


def _parse_url(url: str) -> SplitResult:
    """Parse and check the URL of the pages; plain HTTP is allowed only to this host."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is none
    except ValueError as error:
        raise UsageError(f"invalid URL {url!r} of Steward's web pages: {error}", url) from error
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query:
        raise UsageError(f"invalid URL {url!r} of Steward's web pages: write https://HOST", url)
    if parts.scheme == "http" and parts.hostname not in _HERE:
        raise UsageError(f"cannot send a token to {url!r} without encryption: use https", url)
    return parts


def _make_connection(address: SplitResult, ca_file: str) -> "HTTPConnection":
    """Make the HTTP or HTTPS connection."""
    from http.client import HTTPConnection, HTTPSConnection

    assert address.hostname is not None
    if address.scheme == "http":
        return HTTPConnection(address.hostname, address.port, timeout=SILENCE_S)
    try:
        context = make_client_context(TlsSettings(ca_file=ca_file))
    except TlsUnavailable as error:
        raise UsageError(str(error), ca_file) from error
    return HTTPSConnection(address.hostname, address.port, timeout=SILENCE_S, context=context)


def _send_post(
    connection: "HTTPConnection", path: str, body: bytes, headers: dict[str, str], url: str
) -> "HTTPResponse":
    """Send the POST request and return the response."""
    from http.client import HTTPException

    try:
        connection.request("POST", path, body=body, headers=headers)
        return connection.getresponse()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", "") or str(error) or type(error).__name__
        raise DaemonAway(f"{url} does not answer: {reason}", url) from error


def _read_response(response: "HTTPResponse", action: Action, url: str) -> Iterator[Any]:
    """Decode a response: a stream of lines, one answer, or an error."""
    content_type = response.headers.get_content_type()
    if response.status == 200 and content_type == _LINES:
        lines = cast("BinaryIO", response)
        yield from decode_replies(action, read_replies(lines, url))
        return
    text = _read_body(response, url)
    if response.status == 200 and content_type == "application/json":
        try:
            yield msgspec.json.decode(text, type=action.answer)
        except msgspec.MsgspecError as error:
            raise make_decode_error(url, error) from error
        return
    raise _make_error(response.status, content_type, text, url)


def _read_body(response: "HTTPResponse", url: str) -> bytes:
    from http.client import HTTPException

    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise DaemonAway(f"{url} closed the connection before the end of its reply", url) from error


def _make_error(status: int, content_type: str, text: bytes, url: str) -> StewardError:
    """Make the exception for an error response."""
    error_type = _ERROR_BY_STATUS.get(status, ClientError)
    if content_type != "application/problem+json":
        fallback = error_type if issubclass(error_type, Unavailable) else ClientError
        return fallback(
            f"{url} answers {status} {content_type}: is this the URL of Steward's web pages?", url
        )
    try:
        problem = msgspec.json.decode(text[:_LONGEST_PROBLEM], type=_ProblemReply)
    except msgspec.MsgspecError as error:
        return make_decode_error(url, error)
    return error_type(problem.detail, url)
