"""Client of a search server (Elasticsearch or OpenSearch): requests and replies in bytes.

:class:`SearchClient` sends requests for a sink and reconnects when a credentials file changes.
Around it: error messages with remedies, credentials and TLS, then the decoding of replies
(:func:`read`, :class:`Cause`, :class:`Outcome`, :class:`BulkReply`).

``product_clients`` wraps the two official client libraries as :class:`Wire`. They handle dead
nodes, connections, TLS, and the product check. Steward encodes, compresses and decodes bodies
itself: the libraries would cost one more copy, gzip at its slowest level, and json in place of
msgspec.
"""

import base64
import gzip
import logging
import os
import re
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.extensions.search_servers.settings import ElasticsearchSinkSettings, SearchSinkSettings

REQUESTS_AT_ONCE: Final = 2
"""Requests sent at the same time without waiting for the first reply."""


class Reply(msgspec.Struct, frozen=True):
    """HTTP reply of the server, whatever its status.

    Attributes:
        status: The HTTP status.
        body: The body, decompressed.
    """

    status: int
    body: bytes


class Wire(Protocol):
    """Transport interface; ``product_clients`` implements it for each product."""

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request; replies with an error status are returned, too.

        Raises:
            ArchiveUnavailable: There was no reply.
        """
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def no_answer(urls: str, what: str, advice: str = "") -> ArchiveUnavailable:
    """Build the error for a server that did not answer.

    Args:
        urls: The server's URLs.
        what: What happened.
        advice: Remedy, if known.
    """
    text = cleaned(f"{urls} cannot be asked: {what}")
    return ArchiveUnavailable(f"{text}: {advice}" if advice else text, urls)


def too_slow(urls: str, timeout_s: float) -> ArchiveUnavailable:
    """Build the error for a server that exceeded the time limit."""
    return no_answer(urls, f"no answer within {timeout_s:g} s", "raise timeout_s if it is slow")


def tls_failed(urls: str, what: str) -> ArchiveUnavailable:
    """Build the error for a failed TLS handshake, with a remedy."""
    if "CERTIFICATE_VERIFY_FAILED" in what:
        advice = "set ca_file to the certificate that signed the server's, and check its name"
    elif "WRONG_VERSION_NUMBER" in what or "RECORD_LAYER" in what:
        advice = "the server does not speak TLS on that port: write http:// or another port"
    elif "REQUIRED" in what or "ALERT" in what.upper():
        advice = "the server refused our side: check certificate_file and key_file"
    else:
        advice = "check ca_file, certificate_file and key_file"
    return no_answer(urls, f"TLS failed ({what})", advice)


def cleaned(text: str, longest: int = 300) -> str:
    """Make a server's text fit one line of a log or table: printable and of limited length."""
    text = text[: 4 * longest]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def innermost(error: BaseException) -> str:
    """Return the message of the deepest cause of a client's error."""
    seen: Any = error
    for _ in range(8):
        inner = seen.__cause__ or getattr(seen, "reason", None) or seen.__context__
        if not isinstance(inner, BaseException):
            break
        seen = inner
    text = str(getattr(seen, "strerror", None) or seen)
    return text or type(seen).__name__


log = logging.getLogger(__name__)

_LONGEST_SECRET: Final = 1 << 16
_FIELD: Final = re.compile(r"[A-Za-z0-9+/=_-]+")
"""Characters of an API key in base64."""
_OTHERS: Final = 0o007
"""Mode bits of users other than owner and group."""

Context = Any
"""``ssl.SSLContext`` or None; typed loosely so that ssl is not imported here."""

Stamp = tuple[tuple[int, int, int] | None, ...]
"""State of the credentials files; differs once one of them changes."""


def stamp_of(settings: SearchSinkSettings) -> Stamp:
    """Return the present state of the credentials files."""
    return tuple(_stamp(path) for path in _files(settings))


def authorization(settings: SearchSinkSettings) -> str:
    """Build the Authorization header's value; "" where none is configured.

    Raises:
        ArchiveUnavailable: A file cannot be read, or holds something else.
    """
    if settings.user:
        both = settings.user.encode() + b":" + _secret(settings.password_file)
        return "Basic " + base64.b64encode(both).decode("ascii")
    if settings.api_key_file:
        key = _secret(settings.api_key_file)
        encoded = base64.b64encode(key) if b":" in key else key
        text = encoded.decode("ascii", "replace")
        if _FIELD.fullmatch(text) is None:
            raise ArchiveUnavailable(
                f"{settings.api_key_file} holds no API key: write id:key, or its base64",
                settings.api_key_file,
            )
        return f"ApiKey {text}"
    return ""


def tls_context(settings: SearchSinkSettings) -> Context:
    """Build the TLS context from the certificates; None where no URL is https.

    Raises:
        ArchiveUnavailable: A certificate or a key cannot be read.
    """
    if not any(url.lower().startswith("https:") for url in settings.urls):
        return None
    import ssl

    name = settings.ca_file
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
        if settings.certificate_file:
            name = settings.certificate_file
            _warn_of_readers(settings.key_file)
            # Without this callback OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(name, settings.key_file, password=lambda: b"")
    except ssl.SSLError as error:
        raise ArchiveUnavailable(
            f"{name} cannot be used as a certificate, or not with its key ({_reason(error)}): "
            "give PEM files, the key without a password",
            name,
        ) from error
    except OSError as error:
        raise _unreadable(error.filename or name, error) from error
    return context


def _files(settings: SearchSinkSettings) -> list[str]:
    """Return the paths of the configured credentials files."""
    return [
        path
        for path in (
            *(settings.password_file, settings.api_key_file, settings.ca_file),
            *(settings.certificate_file, settings.key_file),
        )
        if path
    ]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading the file reports the error
    return status.st_mtime_ns, status.st_ino, status.st_size


def _secret(path: str) -> bytes:
    """Read a secret from a file."""
    try:
        with open(path, "rb") as file:
            secret = file.read(_LONGEST_SECRET).rstrip(b"\r\n")
    except OSError as error:
        raise _unreadable(path, error) from error
    if not secret:
        raise ArchiveUnavailable(f"{path} is empty: write the password or the key into it", path)
    _warn_of_readers(path)
    return secret


def _warn_of_readers(path: str) -> None:
    """Warn if every user can read a file with a secret."""
    try:
        is_open = os.stat(path).st_mode & _OTHERS
    except OSError:
        return  # reading the file reports the error
    if is_open:
        log.warning("%s holds a secret and every user may read it: run 'chmod 600' on it", path)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error)


def _unreadable(path: str, error: OSError) -> ArchiveUnavailable:
    return ArchiveUnavailable(
        f"{path} cannot be read: {error.strerror or error}: Steward's user has to be able to", path
    )


_SMALL: Final = 1024
"""Size up to which a body is sent uncompressed, in bytes."""
_GZIP_LEVEL: Final = 1
_NOISY: Final = (
    "elastic_transport",
    "elasticsearch",
    "opensearch",
    "opensearchpy.trace",
    "urllib3",
)

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"


class SearchClient:
    """Client of the search server that a sink's settings describe; connects at the first request.

    Args:
        settings: The sink's settings.
    """

    def __init__(self, settings: SearchSinkSettings) -> None:
        self.settings = settings
        self.where = ", ".join(settings.urls)
        self._wire: Wire | None = None
        self._stamp: Stamp = ()
        self._authorization = ""
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
        self, method: str, target: str, body: bytes | None = None, kind: str = JSON
    ) -> Reply:
        """Send a request and return the reply, whatever its status.

        Args:
            method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
            target: Path and query.
            body: Request body.
            kind: Media type of ``body``: ``JSON`` or ``LINES``.

        Returns:
            The reply, whatever its status.

        Raises:
            ArchiveUnavailable: There was no reply.
        """
        with self._lock:
            wire = self._opened()
        headers = {"accept": JSON, "accept-encoding": "gzip"}
        if self._authorization:
            headers["authorization"] = self._authorization
        if body is not None:
            headers["content-type"] = kind
            if len(body) > _SMALL:
                headers["content-encoding"] = "gzip"
                body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
        return wire.send(method, target, body, headers)

    def close(self) -> None:
        """Close connections."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _opened(self) -> Wire:
        """Return the transport; reconnect if a credentials file has changed."""
        stamp = stamp_of(self.settings)
        if self._wire is not None and stamp != self._stamp:
            self.close()
        if self._wire is None:
            self._authorization = authorization(self.settings)
            self._wire = self._made()
            self._stamp = stamp
        return self._wire

    def _made(self) -> Wire:
        """Create the transport for the sink's product."""
        for name in _NOISY:
            # These loggers print what is sent, scripts included; Steward reports errors itself.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        context = tls_context(self.settings)
        urls = [_with_port(url) for url in self.settings.urls]
        timeout_s = self.settings.timeout_s
        if self.is_elasticsearch:
            from steward.extensions.search_servers.product_clients import ElasticWire

            return ElasticWire(urls, context, timeout_s)
        from steward.extensions.search_servers.product_clients import OpenSearchWire

        return OpenSearchWire(urls, context, timeout_s)


def _with_port(url: str) -> str:
    """Add the default port to a URL: one of the client libraries requires it."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 80
    return parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{port}").geturl()


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
"""Errors that are a server's own bugs with one document: retries would fail forever."""

_SHUT: Final = re.compile(r"FORBIDDEN/[578]/")
"""Block that a person has put on an index: read-only, read, write. The disk-full block differs."""

_CLOSED: Final = "index_closed_exception"
_PASSING: Final = (
    *("validation_exception", "index_not_found_exception", "cluster_block_exception"),
    _CLOSED,
)
"""Errors reported for a document that concern its index: the document itself is fine."""


class Cause(msgspec.Struct, frozen=True):
    """Error of a server, with its cause."""

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
        """Whether a person has closed the index, or blocked writing or reading."""
        return self.type == _CLOSED or (
            self.type == "cluster_block_exception" and bool(_SHUT.search(self.reason or ""))
        )


class Outcome(msgspec.Struct, frozen=True):
    """Result of one document of a bulk request."""

    status: int
    error: Cause | str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the server has this version of the document, or a later one."""
        # 404 answers the deletion of a missing document.
        return 200 <= self.status < 300 or (
            self.status in (CONFLICT, MISSING) and not self._passing
        )

    @property
    def is_refused(self) -> bool:
        """Whether the server will never accept the document as it is."""
        if self._passing or self.status in (TOO_MANY, 401, 403, 408):
            return False
        return 400 <= self.status < 500 or self.type in _FAULTS

    @property
    def is_shut(self) -> bool:
        """Whether a person has closed the document's index or blocked writing."""
        return isinstance(self.error, Cause) and self.error.is_shut

    @property
    def type(self) -> str:
        """Error type; "" for none."""
        return self.error.type if isinstance(self.error, Cause) else ""

    @property
    def why(self) -> str:
        """Error text of the server."""
        text = cleaned(str(self.error)) if isinstance(self.error, str) else str(self.error or "")
        return text or f"status {self.status}"

    @property
    def _passing(self) -> bool:
        return self.type in _PASSING


class BulkReply(msgspec.Struct, frozen=True):
    """Reply to a bulk request: one outcome for each document, in order."""

    items: tuple[dict[str, Outcome], ...] = ()

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes."""
        return [next(iter(item.values())) for item in self.items]


class _Failure(msgspec.Struct, frozen=True):
    error: Cause | str | None = None


def read(client: SearchClient, reply: Reply, shape: Any) -> Any:
    """Decode the body of a successful reply into a type.

    Raises:
        ArchiveUnavailable: The request failed, or the body is something else.
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
    """Describe the error of a failed reply."""
    try:
        error = msgspec.json.decode(reply.body, type=_Failure).error
    except (msgspec.MsgspecError, UnicodeError):
        # most likely a proxy's error page
        error = reply.body[:200].decode("utf-8", "replace")
    text = cleaned(str(error or ""))
    return f"{reply.status}, {text}" if text else f"status {reply.status}"


def cause_of(reply: Reply) -> Cause:
    """Parse the cause of a failed reply; empty where the body has another form."""
    try:
        error = msgspec.json.decode(reply.body, type=_Failure).error
    except (msgspec.MsgspecError, UnicodeError):
        return Cause()  # most likely a proxy's error page
    return error if isinstance(error, Cause) else Cause()


def unavailable(client: SearchClient, reply: Reply) -> ArchiveUnavailable:
    """Build the error for a failed request, which is retried, with a remedy."""
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
