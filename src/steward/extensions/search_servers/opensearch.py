"""OpenSearch's own client, as :class:`steward.extensions.search_servers.wire.Wire`."""

from collections.abc import Mapping, Sequence
from typing import Any

from steward.archive.errors import ArchiveUnavailable
from steward.core.drivers import OPENSEARCH
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


class OpenSearchWire:
    """The client; it speaks to OpenSearch 2 and 3.

    Args:
        urls: The nodes, each with its port.
        context: For TLS; None without.
        timeout_s: How long one request may take, in seconds.

    Raises:
        ArchiveUnavailable: The client is not installed.
    """

    def __init__(self, urls: Sequence[str], context: Context, timeout_s: float) -> None:
        try:
            import opensearchpy
        except ImportError as error:
            raise ArchiveUnavailable(OPENSEARCH.missing, OPENSEARCH.part) from error

        class Replying(opensearchpy.Urllib3HttpConnection):
            """Gives out every reply with its status, as bytes, and no more of it than is sound."""

            def _create_urllib3_pool(self) -> None:
                super()._create_urllib3_pool()
                self.pool = BoundedPool(self.pool)

            def perform_request(self, *args: Any, **named: Any) -> Any:
                named["ignore"] = range(300, 600)
                status, _, text = super().perform_request(*args, **named)
                return status, {}, Reply(status, text.encode("utf-8", "surrogatepass"))

        class Bytes(opensearchpy.serializer.Serializer):
            """Passes bodies on as they are."""

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
            # With no retry left this only has a node that was silent counted as dead.
            retry_on_timeout=True,
            http_compress=False,
            pool_maxsize=REQUESTS_AT_ONCE,
            **tls,
        )
        self._where = ", ".join(urls)
        self._timeout_s = timeout_s

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request; see :class:`steward.extensions.search_servers.wire.Wire`."""
        from opensearchpy import exceptions

        try:
            reply = self._client.transport.perform_request(
                method, target, body=body, headers=headers
            )
        except exceptions.ConnectionTimeout as error:
            raise too_slow(self._where, self._timeout_s) from error
        except exceptions.SSLError as error:
            raise tls_failed(self._where, innermost(_cause(error))) from error
        except exceptions.OpenSearchException as error:
            raise no_answer(self._where, innermost(_cause(error))) from error
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()


def _cause(error: Exception) -> BaseException:
    """What the client was told, where it says so."""
    # An error of its transport has it as ``info``, which raises where there is none.
    info = error.args[2] if len(error.args) > 2 else None
    return info if isinstance(info, BaseException) else error
