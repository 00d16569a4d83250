"""One small protocol over the two official clients: requests in bytes, replies in bytes.

Of the clients' own we use what is theirs to know: nodes that are dead, kept
connections, TLS, what product answers. Bodies are encoded, compressed and read
by us: the clients' way costs a copy more, gzip at its slowest and json in
place of msgspec.
"""

import gzip
import logging
from threading import Lock
from typing import Final
from urllib.parse import urlsplit

from steward.extensions.search_servers.credentials import (
    Stamp,
    authorization,
    stamp_of,
    tls_context,
)
from steward.extensions.search_servers.settings import ElasticsearchSinkSettings, SearchSinkSettings
from steward.extensions.search_servers.wire import Reply, Wire

_SMALL: Final = 1024
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
    """A search server, as a sink's settings describe it. Nothing is connected before a request.

    Args:
        settings: The sink's.
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
        """Whether it is Elasticsearch, and not OpenSearch."""
        return isinstance(self.settings, ElasticsearchSinkSettings)

    @property
    def product(self) -> str:
        """The server's, as its makers write it."""
        return "Elasticsearch" if self.is_elasticsearch else "OpenSearch"

    def request(
        self, method: str, target: str, body: bytes | None = None, kind: str = JSON
    ) -> Reply:
        """Ask something.

        Args:
            method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
            target: Path and query.
            body: What is sent.
            kind: What ``body`` is: ``JSON`` or ``LINES``.

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
        """Let go of connections."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _opened(self) -> Wire:
        stamp = stamp_of(self.settings)
        if self._wire is not None and stamp != self._stamp:
            self.close()
        if self._wire is None:
            self._authorization = authorization(self.settings)
            self._wire = self._made()
            self._stamp = stamp
        return self._wire

    def _made(self) -> Wire:
        for name in _NOISY:
            # They log what is sent, scripts and all; what goes wrong we say ourselves.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        context = tls_context(self.settings)
        urls = [_with_port(url) for url in self.settings.urls]
        timeout_s = self.settings.timeout_s
        if self.is_elasticsearch:
            from steward.extensions.search_servers.elastic import ElasticWire

            return ElasticWire(urls, context, timeout_s)
        from steward.extensions.search_servers.opensearch import OpenSearchWire

        return OpenSearchWire(urls, context, timeout_s)


def _with_port(url: str) -> str:
    """The URL with its port, which one of the clients wants to see."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    port = 443 if parts.scheme == "https" else 80
    return parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{port}").geturl()
