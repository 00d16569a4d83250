"""HTTP transports over the official Elasticsearch and OpenSearch clients, with bounded replies.

Both client libraries read a whole reply into memory, however large it becomes after decompression;
:class:`BoundedPool` replaces their connection pool and stops at :data:`MAX_REPLY_BYTES`, whoever
answers in the server's place. :class:`ElasticsearchTransport` and :class:`OpenSearchTransport`
implement ``client.SearchTransport``; ``client.SearchClient`` picks one by the sink's kind.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.core.drivers import ELASTICSEARCH, OPENSEARCH
from steward.extensions.search_servers.client import (
    CONCURRENT_REQUESTS,
    ServerReply,
    TlsContext,
    describe_root_cause,
    no_answer_error,
    timeout_error,
    tls_error,
)

MAX_REPLY_BYTES: Final = 64 << 20
"""Largest reply in bytes: a document with the largest script, each byte escaped, is smaller."""


class ClientResponse(msgspec.Struct, frozen=True):
    """Fields of a reply that the client libraries use.

    Attributes:
        status: The HTTP status.
        headers: Its headers.
        data: Its body, decompressed.
    """

    status: int
    headers: Any
    data: bytes


class BoundedPool:
    """Connection pool with urllib3's interface that limits the size of replies.

    Args:
        pool: The pool that connects.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def urlopen(self, *args: Any, **kwargs: Any) -> ClientResponse:
        """Send a request and read the reply.

        Raises:
            urllib3.exceptions.HTTPError: There was no reply, or it is too large.
        """
        from urllib3.exceptions import HTTPError

        response = self._pool.urlopen(*args, **{**kwargs, "preload_content": False})
        data = response.read(MAX_REPLY_BYTES + 1, decode_content=True)
        if len(data) > MAX_REPLY_BYTES:
            response.close()
            raise HTTPError(f"its reply has more than {MAX_REPLY_BYTES >> 20} MiB")
        response.release_conn()
        return ClientResponse(response.status, response.headers, data)

    def close(self) -> None:
        """Close connections."""
        self._pool.close()


class ElasticsearchTransport:
    """Transport over the official client for Elasticsearch 8 and 9, which refuses other servers.

    Args:
        urls: The nodes, each with its port.
        context: TLS context; None for no TLS.
        timeout_s: Time limit of one request, in seconds.

    Raises:
        ArchiveUnavailable: The client is not installed.
    """

    def __init__(self, urls: Sequence[str], context: TlsContext, timeout_s: float) -> None:
        try:
            import elastic_transport
            import elasticsearch
        except ImportError as error:
            raise ArchiveUnavailable(ELASTICSEARCH.missing_error, ELASTICSEARCH.part) from error

        class Bytes(elastic_transport.Serializer):
            """Serializer that passes bodies through unchanged."""

            def loads(self, data: bytes) -> Any:
                return data

            def dumps(self, data: Any) -> bytes:
                return bytes(data)

        class Node(elastic_transport.Urllib3HttpNode):
            """Node with a bounded connection pool."""

            def __init__(self, config: elastic_transport.NodeConfig) -> None:
                super().__init__(config)
                self.pool: Any = BoundedPool(self.pool)

        media_types = (
            *("application/json", "application/x-ndjson", "application/vnd.elasticsearch+json"),
            *("application/vnd.elasticsearch+x-ndjson", "text/*", "application/*"),
        )
        # A server without security adds a warning to every reply.
        warnings.filterwarnings("ignore", category=elasticsearch.ElasticsearchWarning)
        tls: dict[str, Any] = {} if context is None else {"ssl_context": context}
        self._client = elasticsearch.Elasticsearch(
            list(urls),
            node_class=Node,
            request_timeout=timeout_s,
            max_retries=0,
            retry_on_timeout=False,
            http_compress=False,
            connections_per_node=CONCURRENT_REQUESTS,
            serializers={media_type: Bytes() for media_type in media_types},
            **tls,
        )
        self._server_names = ", ".join(urls)
        self._timeout_s = timeout_s

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> ServerReply:
        """Send a request; see :class:`steward.extensions.search_servers.client.SearchTransport`."""
        import elastic_transport
        from elasticsearch import ApiError, UnsupportedProductError

        try:
            response = self._client.perform_request(method, target, headers=headers, body=body)
        except UnsupportedProductError as error:
            raise ArchiveUnavailable(
                f'{self._server_names} is not Elasticsearch: set kind = "opensearch" if it is '
                "OpenSearch",
                self._server_names,
            ) from error
        except ApiError as error:
            return ServerReply(error.meta.status, _as_bytes(error.body))
        except elastic_transport.ConnectionTimeout as error:
            raise timeout_error(self._server_names, self._timeout_s) from error
        except elastic_transport.TlsError as error:
            raise tls_error(self._server_names, describe_root_cause(error)) from error
        except elastic_transport.TransportError as error:
            raise no_answer_error(self._server_names, describe_root_cause(error)) from error
        return ServerReply(response.meta.status, _as_bytes(response.body))

    def close(self) -> None:
        """Close connections."""
        self._client.close()


def _as_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b""


class OpenSearchTransport:
    """Transport over the official client for OpenSearch 2 and 3.

    Args:
        urls: The nodes, each with its port.
        context: TLS context; None for no TLS.
        timeout_s: Time limit of one request, in seconds.

    Raises:
        ArchiveUnavailable: The client is not installed.
    """

    def __init__(self, urls: Sequence[str], context: TlsContext, timeout_s: float) -> None:
        try:
            import opensearchpy
        except ImportError as error:
            raise ArchiveUnavailable(OPENSEARCH.missing_error, OPENSEARCH.part) from error

        class Replying(opensearchpy.Urllib3HttpConnection):
            """Connection that returns every reply with its status, as bytes of limited size."""

            def _create_urllib3_pool(self) -> None:
                super()._create_urllib3_pool()
                self.pool = BoundedPool(self.pool)

            def perform_request(self, *args: Any, **kwargs: Any) -> Any:
                kwargs["ignore"] = range(300, 600)
                status, _, text = super().perform_request(*args, **kwargs)
                return status, {}, ServerReply(status, text.encode("utf-8", "surrogatepass"))

        class Bytes(opensearchpy.serializer.Serializer):
            """Serializer that passes bodies through unchanged."""

            mimetype = "application/json"

            def loads(self, s: Any) -> Any:
                return s

            def dumps(self, data: Any) -> Any:
                return data

        tls: dict[str, Any] = {} if context is None else {"ssl_context": context}
        self._client = opensearchpy.OpenSearch(
            list(urls),
            connection_class=Replying,
            serializer=Bytes(),
            timeout=timeout_s,
            max_retries=0,
            # With no retries left, this only makes the client count a silent node as dead.
            retry_on_timeout=True,
            http_compress=False,
            pool_maxsize=CONCURRENT_REQUESTS,
            **tls,
        )
        self._server_names = ", ".join(urls)
        self._timeout_s = timeout_s

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> ServerReply:
        """Send a request; see :class:`steward.extensions.search_servers.client.SearchTransport`."""
        from opensearchpy import exceptions

        try:
            reply = self._client.transport.perform_request(
                method, target, body=body, headers=headers
            )
        except exceptions.ConnectionTimeout as error:
            raise timeout_error(self._server_names, self._timeout_s) from error
        except exceptions.SSLError as error:
            raise tls_error(
                self._server_names, describe_root_cause(_underlying_error(error))
            ) from error
        except exceptions.OpenSearchException as error:
            raise no_answer_error(
                self._server_names, describe_root_cause(_underlying_error(error))
            ) from error
        assert isinstance(reply, ServerReply)
        return reply

    def close(self) -> None:
        """Close connections."""
        self._client.close()


def _underlying_error(error: Exception) -> BaseException:
    """Return the error behind a client library's error, where it has one."""
    # Transport errors carry it as ``info``; that property raises where there is none.
    info = error.args[2] if len(error.args) > 2 else None
    return info if isinstance(info, BaseException) else error
