"""OpenSearch 2 and 3, and Elasticsearch 8 and 9: one node each, answering plain HTTP."""

import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from servers.jars import directory_of
from servers.server import HOST, Server, free_port

_LOG4J: Final = """
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""
_REQUEST_TIMEOUT_S: Final = 30.0


class SearchServer(Server):
    """Base of both servers: ``url``, and requests."""

    major: int
    port: int

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> tuple[int, Any]:
        """Send a request; return its status and its JSON body. Bytes are sent unchanged."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            sent = body if isinstance(body, bytes | None) else json.dumps(body)
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, sent, headers)
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text else None
        finally:
            connection.close()

    def documents(self, index: str) -> dict[str, Any]:
        """Return all documents of an index, an alias or a pattern by id, up to ten thousand."""
        self.request("POST", f"/{index}/_refresh")
        status, answer = self.request("GET", f"/{index}/_search?size=10000&version=true")
        assert status == 200, answer
        return {hit["_id"]: hit["_source"] for hit in answer["hits"]["hits"]}

    def answers(self) -> bool:
        try:
            status, health = self.request("GET", "/_cluster/health", timeout_s=5.0)
        except (http.client.HTTPException, ValueError):
            return False  # it is coming up
        return status == 200 and health["status"] in ("green", "yellow")


class OpenSearch(SearchServer):
    """Node of OpenSearch.

    Args:
        major: 2 or 3.
        directory: Directory of its data and log.
        settings: Further lines of opensearch.yml, such as ``http.max_content_length``.
    """

    def __init__(
        self, major: int, directory: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"opensearch-{major}", directory)
        self.major = major
        self._settings = dict(settings or {})
        self.port = free_port()
        self._transport = free_port()

    def command(self) -> Sequence[str]:
        home = directory_of(self.name)
        config = self.directory / "config"
        config.mkdir(exist_ok=True)
        _write_settings(
            config / "opensearch.yml",
            {
                "network.host": HOST,
                "transport.port": str(self._transport),
                "cluster.routing.allocation.disk.threshold_enabled": "false",
                **self._settings,
            },
        )
        return self.java(
            *("-cp", f"{home}/main:{home}/lib/*", "OpenSearchNode"),
            *(str(self.directory), str(config), str(self.port)),
        )


class Elasticsearch(SearchServer):
    """Node of Elasticsearch: the server itself, with its HTTP, and no other module.

    Args:
        major: 8 or 9.
        directory: Directory of its data and log.
        settings: Further lines of elasticsearch.yml, such as
            ``indexing_pressure.memory.limit``.
    """

    def __init__(
        self, major: int, directory: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"elasticsearch-{major}", directory)
        self.major = major
        self.port = free_port()
        self._transport = free_port()
        self._settings = dict(settings or {})

    def command(self) -> Sequence[str]:
        home = directory_of(self.name)
        config = self.directory / "config"
        config.mkdir(exist_ok=True)
        (config / "log4j2.properties").write_text(_LOG4J)
        _write_settings(
            config / "elasticsearch.yml",
            {
                "network.host": HOST,
                "http.port": str(self.port),
                "transport.port": str(self._transport),
                "path.data": str(self.directory / "data"),
                "path.logs": str(self.directory / "logs"),
                "discovery.type": "single-node",
                "cluster.name": "steward-tests",
                "cluster.routing.allocation.disk.threshold_enabled": "false",
                **self._settings,
            },
        )
        native = "org.elasticsearch.nativeaccess,org.apache.lucene.core"
        return self.java(
            *("-p", f"{home}/lib", "--add-modules=jdk.net,ALL-MODULE-PATH"),
            *([f"--enable-native-access={native}"] if self.major > 8 else []),
            *(f"-Des.path.home={home}", "-Des.distribution.type=tar"),
            "-Dorg.elasticsearch.nativeaccess.enableVectorLibrary=false",
            *("-cp", f"{home}/main", "ElasticsearchNode", str(config)),
        )


def _write_settings(path: Path, settings: Mapping[str, str]) -> None:
    # A JSON string is a YAML string.
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
