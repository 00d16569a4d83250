"""Search sinks when indices are changed or servers misbehave."""

import logging
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest
from search_sinks import DAY, NOON, correction, deletion, document, sink_on

from servers.http_server import Quiet, answering
from servers.search import Elasticsearch, OpenSearch, SearchServer
from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument
from steward.extensions.search_servers import client
from steward.extensions.search_servers.destination import SearchDestination
from steward.extensions.search_servers.settings import SearchSinkSettings

APRIL = NOON + 31 * DAY


@pytest.fixture
def sink(search_server: SearchServer) -> SearchSinkSettings:
    return sink_on(search_server)


@pytest.fixture
def destination(sink: SearchSinkSettings) -> Iterator[SearchDestination]:
    made = SearchDestination(sink)
    yield made
    made.close()


def block(server: SearchServer, index: str, name: str, *, on: bool = True) -> None:
    if name == "closed":
        path, body = f"/{index}/_{'close' if on else 'open'}", None
        method = "POST"
    else:
        path, body = f"/{index}/_settings", {f"index.blocks.{name}": on}
        method = "PUT"
    status, answer = server.request(method, path, body)
    assert status == 200, answer


@pytest.mark.parametrize("how", ["write", "read_only", "closed"])
def test_a_past_month_that_the_site_shut_holds_up_no_other(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination, how: str
) -> None:
    march, april = document(1), document(2, at=APRIL)
    assert destination.send([march, april]) == []
    block(search_server, f"{sink.index}-2026.03", how)
    late = [correction(march, 9), document(3), deletion(march, 9), document(4, at=APRIL)]
    for one in late[:3]:
        refused = destination.send([one, document(4, at=APRIL)])
        assert [of.document for of in refused] == [one]
        assert "open it, then run 'steward journal retry" in refused[0].why
    assert len(search_server.documents(f"{sink.index}-2026.04")) == 2
    block(search_server, f"{sink.index}-2026.03", how, on=False)
    for one in late[:3]:
        assert destination.send([one]) == []
    assert set(search_server.documents(f"{sink.index}-2026.03")) == {late[1].id}


def test_a_month_that_cannot_be_dropped_keeps_no_other_from_being(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    assert destination.send([document(1), document(2, at=APRIL)]) == []
    block(search_server, f"{sink.index}-2026.03", "read_only")
    destination.expire(datetime(2026, 5, 1, tzinfo=UTC))
    assert search_server.request("GET", f"/{sink.index}-2026.04")[0] == 404
    block(search_server, f"{sink.index}-2026.03", "read_only", on=False)
    destination.expire(datetime(2026, 5, 1, tzinfo=UTC))
    assert search_server.request("GET", f"/{sink.index}-2026.03")[0] == 404


@pytest.mark.parametrize("how", ["write", "closed"])
def test_where_the_present_month_is_shut_everything_waits(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination, how: str
) -> None:
    now_ns = int(datetime.now(UTC).timestamp() * 1e9)
    assert destination.send([document(1, at=now_ns)]) == []
    (name,) = search_server.request("GET", f"/{sink.index}-*")[1]
    block(search_server, name, how)
    for one in (document(2, at=now_ns), correction(document(1, at=now_ns), 9)):
        with pytest.raises(ArchiveUnavailable, match=r"closed .*: open it"):
            destination.send([one])
    block(search_server, name, how, on=False)


def test_a_full_disk_is_waited_for(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    assert destination.send([document(1)]) == []
    block(search_server, f"{sink.index}-2026.03", "read_only_allow_delete")
    with pytest.raises(ArchiveUnavailable):
        destination.send([document(2), document(3, at=APRIL)])
    block(search_server, f"{sink.index}-2026.03", "read_only_allow_delete", on=False)
    assert destination.send([document(2), document(3, at=APRIL)]) == []


def test_a_purge_removes_a_later_version_too(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    documents = [document(number, version=100) for number in range(5)]
    assert destination.send(documents) == []
    assert destination.send([deletion(of, 7) for of in documents[:3]]) == []
    assert set(search_server.documents(sink.index)) == {of.id for of in documents[3:]}


def test_a_month_begun_without_a_template_has_our_mapping_all_the_same(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    assert destination.send([document(1)]) == []
    assert search_server.request("DELETE", f"/_index_template/{sink.index}")[0] == 200
    assert destination.send([document(2, at=APRIL)]) == []
    name = f"{sink.index}-2026.04"
    made = search_server.request("GET", f"/{name}")[1][name]
    assert made["mappings"]["dynamic"] == "false"
    assert sink.index in made["aliases"]


def test_a_template_of_the_sites_that_refuses_everything_is_told_of_once(
    search_server: SearchServer,
    sink: SearchSinkSettings,
    destination: SearchDestination,
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = {"index_patterns": [f"{sink.index}-*"], "priority": 9999, "data_stream": {}}
    path = f"/_index_template/site-{sink.index}"
    assert search_server.request("PUT", path, theirs)[0] == 200
    with caplog.at_level(logging.WARNING):
        for first in range(0, 9, 3):
            some = [document(number) for number in range(first, first + 3)]
            assert len(destination.send(some)) == 3
    told = [line for line in caplog.messages if "none of 3 documents was accepted" in line]
    assert len(told) == 1
    assert f"/_index_template/{sink.index}" in told[0]


@pytest.mark.search
@pytest.mark.servers
@pytest.mark.parametrize("kind", [Elasticsearch, OpenSearch])
def test_what_the_server_never_has_room_for_is_set_aside_in_the_end(
    kind: type[Elasticsearch] | type[OpenSearch], tmp_path: Path, majors: dict[str, int]
) -> None:
    major = majors[kind.__name__.lower()]
    with kind(major, tmp_path, {"indexing_pressure.memory.limit": "400kb"}) as server:
        sink = sink_on(server)
        destination = SearchDestination(sink)
        noise = random.Random(2).randbytes(400_000).hex().encode()
        documents = [document(1), document(2, noise), document(3)]
        waits = 0
        refused = None
        while refused is None:
            try:
                refused = destination.send(documents)
            except ArchiveUnavailable:
                waits += 1
                assert waits < 20
        assert [of.document for of in refused] == [documents[1]]
        assert "indexing_pressure.memory.limit" in refused[0].why
        assert waits >= 5
        assert len(server.documents(sink.index)) == 2
        destination.close()


class Flooding(Quiet, BaseHTTPRequestHandler):
    """Server whose replies exceed every limit."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Elastic-Product", "Elasticsearch")
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        try:
            for _ in range(64):
                self.wfile.write(b'"' * (1 << 16))
        except OSError:
            pass  # the other side has had enough, as it should


@pytest.mark.parametrize("kind", ["elasticsearch", "opensearch"])
def test_a_reply_without_end_is_not_read_to_its_end(
    kind: str,
    elasticsearch: SearchServer,
    opensearch: SearchServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 20)
    server = elasticsearch if kind == "elasticsearch" else opensearch
    with answering(Flooding) as flood:
        url = f"http://127.0.0.1:{flood.server_port}"
        sink = msgspec.structs.replace(sink_on(server), urls=(url,))
        with pytest.raises(ArchiveUnavailable, match="more than 1 MiB"):
            SearchDestination(sink).send(
                [ArchivedDocument(cluster="a", key="script:1:1", version=1)]
            )
