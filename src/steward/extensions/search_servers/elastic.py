"""Elasticsearch's own client, as :class:`steward.extensions.search_servers.wire.Wire`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from steward.archive.errors import ArchiveUnavailable
from steward.core.drivers import ELASTICSEARCH
from steward.extensions.search_servers.bounded import BoundedPool
from steward.extensions.search_servers.credentials import Context
from steward.extensions.search_servers.wire import (
    REQUESTS_AT_ONCE,
    Reply,
    innermost,
    no_answer,
    tls_failed,
    too_slow,
)


class ElasticWire:
    """The client; it speaks to Elasticsearch 8 and 9 and to nothing else.

    Args:
        urls: The nodes, each with its port.
        context: For TLS; None without.
        timeout_s: How long one request may take, in seconds.

    Raises:
        ArchiveUnavailable: The client is not installed.
    """

    def __init__(self, urls: Sequence[str], context: Context, timeout_s: float) -> None:
        try:
            import elastic_transport
            import elasticsearch
        except ImportError as error:
            raise ArchiveUnavailable(ELASTICSEARCH.missing, ELASTICSEARCH.part) from error

        class Bytes(elastic_transport.Serializer):
            """Passes bodies on as they are."""

            def loads(self, data: bytes) -> Any:
                return data

            def dumps(self, data: Any) -> bytes:
                return bytes(data)

        class Node(elastic_transport.Urllib3HttpNode):
            """Reads no more of a reply than is sound."""

            def __init__(self, config: elastic_transport.NodeConfig) -> None:
                super().__init__(config)
                self.pool: Any = BoundedPool(self.pool)

        kinds = (
            *("application/json", "application/x-ndjson", "application/vnd.elasticsearch+json"),
            *("application/vnd.elasticsearch+x-ndjson", "text/*", "application/*"),
        )
        # A server without security says so in every reply.
        warnings.filterwarnings("ignore", category=elasticsearch.ElasticsearchWarning)
        tls: dict[str, Any] = {} if context is None else {"ssl_context": context}
        self._client = elasticsearch.Elasticsearch(
            list(urls),
            node_class=Node,
            request_timeout=timeout_s,
            max_retries=0,
            retry_on_timeout=False,
            http_compress=False,
            connections_per_node=REQUESTS_AT_ONCE,
            serializers={kind: Bytes() for kind in kinds},
            **tls,
        )
        self._where = ", ".join(urls)
        self._timeout_s = timeout_s

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request; see :class:`steward.extensions.search_servers.wire.Wire`."""
        import elastic_transport
        from elasticsearch import ApiError, UnsupportedProductError

        try:
            answer = self._client.perform_request(method, target, headers=headers, body=body)
        except UnsupportedProductError as error:
            raise ArchiveUnavailable(
                f'{self._where} is not Elasticsearch: set kind = "opensearch" if it is OpenSearch',
                self._where,
            ) from error
        except ApiError as error:
            return Reply(error.meta.status, _bytes(error.body))
        except elastic_transport.ConnectionTimeout as error:
            raise too_slow(self._where, self._timeout_s) from error
        except elastic_transport.TlsError as error:
            raise tls_failed(self._where, innermost(error)) from error
        except elastic_transport.TransportError as error:
            raise no_answer(self._where, innermost(error)) from error
        return Reply(answer.meta.status, _bytes(answer.body))

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b""
