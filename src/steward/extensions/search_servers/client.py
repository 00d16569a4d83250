"""Client of a search server (Elasticsearch or OpenSearch): requests and replies in bytes.

:class:`SearchClient` sends requests for a sink over httpx, to each of its nodes in turn
(:class:`NodeRotation`). It reconnects when a credentials file changes: a new password, API key or
certificate applies to the next request, without a restart. Error messages with remedies,
credentials and TLS come before it; the decoding of replies follows (:class:`ServerError`,
:class:`BulkOutcome`, :class:`BulkReply`, :func:`decode_reply`): done, refused for good, or to be
retried.
"""

import base64
import gzip
import logging
import os
import random
import re
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.core.section import TlsSettings
from steward.core.tls import TlsUnavailable, make_client_context
from steward.core.waits import Backoff
from steward.extensions.search_servers.settings import ElasticsearchSinkSettings, SearchSinkSettings

if TYPE_CHECKING:
    import ssl

    import httpcore
    import httpx

REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit of one request, in seconds: a bulk request to a busy server takes some, never that."""
CONCURRENT_REQUESTS: Final = 2
"""Requests sent at the same time without waiting for the first reply."""

MAX_REPLY_BYTES: Final = 64 << 20
"""Largest reply in bytes: a document with the largest script, each byte escaped, is smaller."""


class ServerReply(msgspec.Struct, frozen=True):
    """HTTP reply of the server, whatever its status.

    Attributes:
        status: The HTTP status.
        body: The body, decompressed.
    """

    status: int
    body: bytes


def no_answer_error(urls: str, problem: str, remedy: str = "") -> ArchiveUnavailable:
    """Build the error for a server that did not answer.

    Args:
        urls: The server's URLs.
        problem: What happened.
        remedy: Remedy, if known.
    """
    text = clean_text(f"cannot reach {urls}: {problem}")
    return ArchiveUnavailable(f"{text}: {remedy}" if remedy else text, urls)


def tls_error(urls: str, problem: str) -> ArchiveUnavailable:
    """Build the error for a failed TLS handshake, with a remedy."""
    if "CERTIFICATE_VERIFY_FAILED" in problem:
        remedy = "set ca_file to the certificate that signed the server's, and check its name"
    elif "WRONG_VERSION_NUMBER" in problem or "RECORD_LAYER" in problem:
        remedy = "the server does not speak TLS on that port: write http:// or another port"
    elif "REQUIRED" in problem or "ALERT" in problem.upper():
        remedy = (
            "the server rejected the client certificate or requires one: check certificate_file "
            "and key_file"
        )
    else:
        remedy = "check ca_file, certificate_file and key_file"
    return no_answer_error(urls, f"TLS failed ({problem})", remedy)


def clean_text(text: str, max_length: int = 300) -> str:
    """Make a server's text fit one line of a log or table: printable and of limited length."""
    text = text[: 4 * max_length]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


log = logging.getLogger(__name__)

_MAX_SECRET_BYTES: Final = 1 << 16
_API_KEY_PATTERN: Final = re.compile(r"[A-Za-z0-9+/=_-]+")
"""Characters of an API key in base64."""
_OTHERS_MODE: Final = 0o007
"""Mode bits of users other than owner and group."""

CredentialsStamp = tuple[tuple[int, int, int] | None, ...]
"""State of the credentials files; differs once one of them changes."""


def stamp_credentials(settings: SearchSinkSettings) -> CredentialsStamp:
    """Return the present state of the credentials files."""
    return tuple(_stamp_file(path) for path in _credential_files(settings))


def build_authorization(settings: SearchSinkSettings) -> str:
    """Build the Authorization header's value; "" where none is configured.

    Raises:
        ArchiveUnavailable: A file cannot be read, or holds something else.
    """
    if settings.user:
        user_and_password = settings.user.encode() + b":" + _read_secret(settings.password_file)
        return "Basic " + base64.b64encode(user_and_password).decode("ascii")
    if settings.password_file:
        key = _read_secret(settings.password_file)
        encoded = base64.b64encode(key) if b":" in key else key
        text = encoded.decode("ascii", "replace")
        if _API_KEY_PATTERN.fullmatch(text) is None:
            raise ArchiveUnavailable(
                f"{settings.password_file} contains no API key: write id:key, or its base64 (a "
                "password needs 'user', too)",
                settings.password_file,
            )
        return f"ApiKey {text}"
    return ""


def build_tls_context(settings: SearchSinkSettings) -> "ssl.SSLContext":
    """Build the TLS context from the certificates; it trusts nobody where no URL is https.

    Raises:
        ArchiveUnavailable: A certificate or a key cannot be read.
    """
    import ssl

    if not any(url.lower().startswith("https:") for url in settings.urls):
        # Reading the system's CA certificates takes longer than most requests.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.key_file:
        _warn_if_readable(settings.key_file)
    try:
        context: ssl.SSLContext = make_client_context(settings.tls or TlsSettings())
    except TlsUnavailable as error:
        raise ArchiveUnavailable(str(error), error.offender) from error
    return context


def _credential_files(settings: SearchSinkSettings) -> list[str]:
    """Return the paths of the configured credentials files."""
    return [
        path
        for path in (
            *(settings.password_file, settings.ca_file),
            *(settings.certificate_file, settings.key_file),
        )
        if path
    ]


def _stamp_file(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading the file reports the error
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read_secret(path: str) -> bytes:
    """Read a secret from a file."""
    try:
        with open(path, "rb") as file:
            secret = file.read(_MAX_SECRET_BYTES).rstrip(b"\r\n")
    except OSError as error:
        raise _unreadable_error(path, error) from error
    if not secret:
        raise ArchiveUnavailable(
            f"{path} is empty: write the password or the API key into it", path
        )
    _warn_if_readable(path)
    return secret


def _warn_if_readable(path: str) -> None:
    """Warn if every user can read a file with a secret."""
    try:
        is_open = os.stat(path).st_mode & _OTHERS_MODE
    except OSError:
        return  # reading the file reports the error
    if is_open:
        log.warning("%s contains a secret, but all users can read it: run 'chmod 600' on it", path)


def _unreadable_error(path: str, error: OSError) -> ArchiveUnavailable:
    return ArchiveUnavailable(
        f"cannot read {path}: {error.strerror or error}. Let Steward's user read it", path
    )


_MIN_GZIP_BYTES: Final = 1024
"""Size up to which a body is sent uncompressed, in bytes."""
_GZIP_LEVEL: Final = 1
_PIECE_BYTES: Final = 16 * 1024
_PAUSE_S: Final = (1.0, 60.0)
"""First and longest pause of a node that failed, in seconds."""

JSON_TYPE: Final = "application/json"
NDJSON_TYPE: Final = "application/x-ndjson"


class NodeRotation:
    """Choice of the node for each request: all in turn, and one that failed pauses.

    Args:
        urls: The nodes.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        # Commands that run for a moment start with different nodes.
        self._next_turns = dict.fromkeys(random.sample(urls, len(urls)), 0.0)
        self._backoffs = {url: Backoff(*_PAUSE_S) for url in urls}
        self._lock = Lock()

    def take_turn(self) -> str:
        """Return the URL whose turn comes first; where all pause, the one that pauses least."""
        with self._lock:
            url = min(self._next_turns, key=self._next_turns.__getitem__)
            self._next_turns[url] = time.monotonic()
            return url

    def pause(self, url: str) -> None:
        """Pass a node over for a while: it failed."""
        with self._lock:
            self._next_turns[url] = time.monotonic() + self._backoffs[url].next_s()

    def resume(self, url: str) -> None:
        """Let the next pause of a node be short again: it works."""
        with self._lock:
            self._backoffs[url].reset()


class _Deadline(local):
    """Deadline of a thread's request, on the monotonic clock."""

    at = 0.0

    def get_remaining_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            httpcore.ReadTimeout: The deadline has passed.
        """
        import httpcore

        remaining_s = self.at - time.monotonic()
        if remaining_s <= 0:
            raise httpcore.ReadTimeout("the request takes too long")
        return remaining_s


class _BoundedStream:
    """Connection with one deadline for all steps, see httpcore's ``NetworkStream``.

    httpcore's own time-outs begin again with each step, so a server that sends a byte now and
    then would never time out.
    """

    def __init__(self, stream: "httpcore.NetworkStream", deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self.close = stream.close
        self.get_extra_info = stream.get_extra_info

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002 -- httpcore's signature
        return self._stream.read(max_bytes, self._deadline.get_remaining_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002 -- httpcore's signature
        self._stream.write(buffer, self._deadline.get_remaining_s())

    def start_tls(self, **options: Any) -> "_BoundedStream":
        options["timeout"] = self._deadline.get_remaining_s()
        return _BoundedStream(self._stream.start_tls(**options), self._deadline)


class _BoundedBackend:
    """Maker of such connections, see httpcore's ``NetworkBackend``."""

    def __init__(self, deadline: _Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(self, **options: Any) -> _BoundedStream:
        import httpcore

        options["timeout"] = self._deadline.get_remaining_s()
        return _BoundedStream(httpcore.SyncBackend().connect_tcp(**options), self._deadline)


class SearchClient:
    """Client of the search server that a sink's settings describe; connects at the first request.

    Args:
        settings: The sink's settings.
        timeout_s: Time limit of one request, in seconds.
    """

    def __init__(self, settings: SearchSinkSettings, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.settings = settings
        self._timeout_s = timeout_s
        self.where = ", ".join(settings.urls)
        self._nodes = NodeRotation(settings.urls)
        self._http: httpx.Client | None = None
        self._stamp: CredentialsStamp = ()
        self._deadline = _Deadline()
        self._lock = Lock()

    @property
    def is_elasticsearch(self) -> bool:
        """Whether the server is Elasticsearch rather than OpenSearch."""
        return isinstance(self.settings, ElasticsearchSinkSettings)

    @property
    def product(self) -> str:
        """Product name, as its makers write it."""
        return "Elasticsearch" if self.is_elasticsearch else "OpenSearch"

    def request(
        self, method: str, target_path: str, body: bytes | None = None, media_type: str = JSON_TYPE
    ) -> ServerReply:
        """Send a request and return the reply, whatever its status.

        Args:
            method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
            target_path: Path and query.
            body: Request body.
            media_type: Media type of ``body``: ``JSON_TYPE`` or ``NDJSON_TYPE``.

        Returns:
            The reply, whatever its status.

        Raises:
            ArchiveUnavailable: There was no reply.
        """
        import httpx

        headers: dict[str, str] = {}
        content: Iterator[bytes] | None = None
        if body is not None:
            headers["content-type"] = self._add_version(media_type)
            if len(body) > _MIN_GZIP_BYTES:
                headers["content-encoding"] = "gzip"
                body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
            headers["content-length"] = str(len(body))
            content = _split_body(body)
        http = self._connect()
        url = self._nodes.take_turn()
        target = url.rstrip("/") + target_path
        self._deadline.at = time.monotonic() + self._timeout_s
        try:
            with http.stream(method, target, content=content, headers=headers) as response:
                reply = ServerReply(response.status_code, _read_body(response))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, zlib.error) as error:
            # ValueError: a name that no host can have, or a reply without end.
            self._nodes.pause(url)
            raise self._describe_failure(error) from error
        if reply.status >= 500 or reply.status == HTTP_TOO_MANY:
            self._nodes.pause(url)
        else:
            self._nodes.resume(url)
        if (
            self.is_elasticsearch
            and 200 <= reply.status < 300
            and response.headers.get("x-elastic-product") != self.product
        ):
            raise ArchiveUnavailable(
                f'{self.where} is not Elasticsearch: set kind = "opensearch" if it is OpenSearch',
                self.where,
            )
        return reply

    def close(self) -> None:
        """Close connections."""
        with self._lock:
            self._http = None

    def _connect(self) -> "httpx.Client":
        """Return the HTTP client; make another if a credentials file has changed."""
        with self._lock:
            stamp = stamp_credentials(self.settings)
            if self._http is None or stamp != self._stamp:
                self._http = None
                self._http = self._build_http()
                self._stamp = stamp
            return self._http

    def _build_http(self) -> "httpx.Client":
        """Create an HTTP client with the present credentials."""
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        import httpx

        # At the level debug it logs each step of a request.
        logging.getLogger("httpcore").setLevel(logging.WARNING)
        headers = {"accept": self._add_version(JSON_TYPE), "accept-encoding": "gzip"}
        authorization = build_authorization(self.settings)
        if authorization:
            headers["authorization"] = authorization
        transport = httpx.HTTPTransport(verify=build_tls_context(self.settings), trust_env=False)
        # httpx has no parameter for it.
        transport._pool._network_backend = _BoundedBackend(self._deadline)  # type: ignore[assignment]
        http = httpx.Client(
            transport=transport,
            headers=headers,
            # A server that sets cookies without end does not fill the memory.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=self._timeout_s,
            # Ignore the environment: a proxy of somebody's shell is not the site's.
            trust_env=False,
        )
        # Requests that are under way in other threads keep a client that is replaced or closed.
        weakref.finalize(http, transport.close)
        return http

    def _describe_failure(self, error: Exception) -> ArchiveUnavailable:
        """Build the error for a request without a reply, with a remedy."""
        import ssl

        import httpx

        if isinstance(error, httpx.TimeoutException):
            problem = f"no answer within {self._timeout_s:g} s"
            return no_answer_error(self.where, problem, "check whether it is overloaded")
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        problem = (cause and cause.strerror) or str(cause or error) or type(error).__name__
        if isinstance(cause, ssl.SSLError):
            return tls_error(self.where, problem)
        return no_answer_error(self.where, problem)

    def _add_version(self, media_type: str) -> str:
        """Return a media type for the headers; with it Elasticsearch 9 answers as 8 does."""
        if not self.is_elasticsearch:
            return media_type
        return media_type.replace("/", "/vnd.elasticsearch+") + "; compatible-with=8"


def _split_body(body: bytes) -> Iterator[bytes]:
    """Yield a request's body in pieces: httpx copies each several times, and each is timed."""
    for first in range(0, len(body), _PIECE_BYTES):
        yield body[first : first + _PIECE_BYTES]


def _read_body(response: "httpx.Response") -> bytes:
    """Read a reply's body.

    Raises:
        ValueError: The body is too large.
        httpx.HTTPError: The body did not come, or not in time.
        zlib.error: The body is no gzip.
    """
    is_gzip = response.headers.get("content-encoding", "").lower() == "gzip"
    # httpx decompresses a chunk whatever size that makes.
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_gzip else None
    parts: list[bytes] = []
    size = 0
    for chunk in response.iter_raw():
        limit = MAX_REPLY_BYTES + 1 - size
        parts.append(decompressor.decompress(chunk, limit) if decompressor else chunk)
        size += len(parts[-1])
        if size > MAX_REPLY_BYTES:
            raise ValueError(f"the reply has more than {MAX_REPLY_BYTES >> 20} MiB")
        if decompressor and decompressor.unused_data:
            raise ValueError("the reply has data after the end of its gzip stream")
    if decompressor and not decompressor.eof:
        raise ValueError("the reply ends within its gzip stream")
    return b"".join(parts)


HTTP_TOO_MANY: Final = 429
HTTP_TOO_LARGE: Final = 413
HTTP_CONFLICT: Final = 409
HTTP_MISSING: Final = 404

_SERVER_BUGS: Final = frozenset(
    {
        *("null_pointer_exception", "class_cast_exception", "number_format_exception"),
        *("array_index_out_of_bounds_exception", "index_out_of_bounds_exception"),
        *("string_index_out_of_bounds_exception", "arithmetic_exception"),
    }
)
"""Errors that are a server's own bugs with one document: retries would fail forever."""

_INDEX_BLOCK_PATTERN: Final = re.compile(r"FORBIDDEN/[578]/")
"""Block that a person has put on an index: read-only, read, write. The disk-full block differs."""

_INDEX_CLOSED: Final = "index_closed_exception"
_INDEX_ERRORS: Final = (
    *("validation_exception", "index_not_found_exception", "cluster_block_exception"),
    _INDEX_CLOSED,
)
"""Errors reported for a document that concern its index: the document itself is fine."""


class ServerError(msgspec.Struct, frozen=True):
    """Error of a server, with its cause."""

    type: str = ""
    reason: str | None = ""
    caused_by: "ServerError | None" = None

    def __str__(self) -> str:
        text = f"{self.type}: {self.reason or ''}".strip(": ")
        root_cause = self.caused_by
        while root_cause is not None and root_cause.caused_by is not None:
            root_cause = root_cause.caused_by
        if root_cause is not None and root_cause.reason and root_cause.reason not in text:
            text += f" ({root_cause.reason})"
        return clean_text(text)

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed the index, or blocked writing or reading."""
        return self.type == _INDEX_CLOSED or (
            self.type == "cluster_block_exception"
            and bool(_INDEX_BLOCK_PATTERN.search(self.reason or ""))
        )


class BulkOutcome(msgspec.Struct, frozen=True):
    """Result of one document of a bulk request."""

    status: int
    error: ServerError | str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the server has this version of the document, or a later one."""
        # 404 answers the deletion of a missing document.
        return 200 <= self.status < 300 or (
            self.status in (HTTP_CONFLICT, HTTP_MISSING) and not self._is_index_error
        )

    @property
    def is_refused(self) -> bool:
        """Whether the server will never accept the document as it is."""
        if self._is_index_error or self.status in (HTTP_TOO_MANY, 401, 403, 408):
            return False
        return 400 <= self.status < 500 or self.type in _SERVER_BUGS

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed the document's index or blocked writing."""
        return isinstance(self.error, ServerError) and self.error.is_shut

    @property
    def type(self) -> str:
        """Error type; "" for none."""
        return self.error.type if isinstance(self.error, ServerError) else ""

    @property
    def why(self) -> str:
        """Error text of the server."""
        text = clean_text(str(self.error)) if isinstance(self.error, str) else str(self.error or "")
        return text or f"status {self.status}"

    @property
    def _is_index_error(self) -> bool:
        return self.type in _INDEX_ERRORS


class BulkReply(msgspec.Struct, frozen=True):
    """Reply to a bulk request: one outcome for each document, in order."""

    items: tuple[dict[str, BulkOutcome], ...] = ()

    def outcomes(self) -> list[BulkOutcome]:
        """Return the outcomes."""
        return [next(iter(item.values())) for item in self.items]


class _ErrorReply(msgspec.Struct, frozen=True):
    error: ServerError | str | None = None


def decode_reply(client: SearchClient, reply: ServerReply, reply_type: Any) -> Any:
    """Decode the body of a successful reply into a type.

    Raises:
        ArchiveUnavailable: The request failed, or the body is something else.
    """
    if not 200 <= reply.status < 300:
        raise unavailable_error(client, reply)
    try:
        return msgspec.json.decode(reply.body, type=reply_type)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ArchiveUnavailable(
            f"{client.where} does not answer as {client.product} does "
            f"({clean_text(str(error))}): check 'urls' and any proxy",
            client.where,
        ) from error


def describe_failure(reply: ServerReply) -> str:
    """Describe the error of a failed reply."""
    try:
        error = msgspec.json.decode(reply.body, type=_ErrorReply).error
    except (msgspec.MsgspecError, UnicodeError):
        # most likely a proxy's error page
        error = reply.body[:200].decode("utf-8", "replace")
    text = clean_text(str(error or ""))
    return f"{reply.status}, {text}" if text else f"status {reply.status}"


def parse_cause(reply: ServerReply) -> ServerError:
    """Parse the cause of a failed reply; empty where the body has another form."""
    try:
        error = msgspec.json.decode(reply.body, type=_ErrorReply).error
    except (msgspec.MsgspecError, UnicodeError):
        return ServerError()  # most likely a proxy's error page
    return error if isinstance(error, ServerError) else ServerError()


def unavailable_error(client: SearchClient, reply: ServerReply) -> ArchiveUnavailable:
    """Build the error for a failed request, which is retried, with a remedy."""
    settings = client.settings
    remedy = {
        401: (
            f"check the credentials in {settings.password_file}"
            if settings.password_file
            else "set 'password_file' and 'user', or 'password_file' with an API key"
        ),
        403: (
            f"grant the user 'manage' on {settings.index}-*, and 'monitor' and "
            "'manage_index_templates' on the cluster"
        ),
        HTTP_TOO_MANY: "the server is overloaded, Steward retries with smaller requests",
        HTTP_TOO_LARGE: "raise its http.max_content_length",
    }.get(reply.status, "")
    text = f"cannot use {client.where} ({describe_failure(reply)})"
    return ArchiveUnavailable(f"{text}: {remedy}" if remedy else text, client.where)
