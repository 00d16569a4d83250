"""Elasticsearch and OpenSearch as destinations, on real servers: nothing lost, nothing twice."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search_sinks import DAY, NOON, correction, deletion, document, sink_on

from servers.search import Elasticsearch, OpenSearch, SearchServer
from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument
from steward.extensions.search_servers.destination import SearchDestination
from steward.extensions.search_servers.documents import extract_environment, extract_script
from steward.extensions.search_servers.index_template import build_template
from steward.extensions.search_servers.settings import SearchSinkSettings

KINDS = {"elasticsearch": Elasticsearch, "opensearch": OpenSearch}


@pytest.fixture
def sink(search_server: SearchServer) -> SearchSinkSettings:
    return sink_on(search_server)


@pytest.fixture
def destination(sink: SearchSinkSettings) -> Iterator[SearchDestination]:
    made = SearchDestination(sink)
    yield made
    made.close()


def fields_of(server: SearchServer, index: str) -> int:
    status, answer = server.request("GET", f"/{index}/_mapping")
    assert status == 200
    return max(len(msgspec.json.encode(of)) for of in answer.values())


def test_months_lie_in_indices_of_their_own_behind_one_alias(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    documents = [document(1), document(2, at=NOON + 31 * DAY)]
    assert destination.send(documents) == []
    assert set(search_server.documents(sink.index)) == {of.id for of in documents}
    assert set(search_server.documents(f"{sink.index}-2026.03")) == {documents[0].id}
    assert set(search_server.documents(f"{sink.index}-2026.04")) == {documents[1].id}


def test_a_repeat_an_older_version_and_a_later_one(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    old, new = document(1, version=5, state="PENDING"), document(1, version=9, state="RUNNING")
    for sent in ([old], [new], [new], [old], [old, new, old]):
        assert destination.send(sent) == []
        states = [of["state"] for of in search_server.documents(sink.index).values()]
        assert states == ["PENDING" if sent == [old] and len(states) == 0 else states[0]]
    (kept,) = search_server.documents(sink.index).values()
    assert kept["state"] == "RUNNING"
    assert kept["version"] == 9


def test_a_correction_replaces_the_identity_and_nothing_else(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    script, environment = b"#!/bin/sh\n\xff\0\n", b"\x01\0\0\0A=\xfe\0"
    first = document(1, script, environment=environment, version=10, qos="high", uid=None, user="")
    later = correction(first, 20, uid=4001, user="ada", qos="", state="COMPLETED")
    missing = correction(document(2), 20)
    refused = destination.send([first, later, missing])
    assert [of.document for of in refused] == [missing]
    assert "steward archive resend" in refused[0].why
    for again in (first, correction(first, 15, state="RUNNING"), later):
        assert destination.send([again]) == []
    (kept,) = search_server.documents(sink.index).values()
    assert (kept["user"], kept["uid"], kept["state"]) == ("ada", 4001, "COMPLETED")
    assert kept["verified"] is True
    assert kept["version"] == 20
    assert "qos" not in kept, "it is not known any more"
    assert extract_script(kept) == script
    assert extract_environment(kept) == environment


def test_what_was_purged_stays_away(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    first = document(1, version=5)
    assert destination.send([first, deletion(first, 9), first]) == []
    assert search_server.documents(sink.index) == {}
    assert destination.send([first, deletion(first, 9), deletion(document(2), 9)]) == []
    assert search_server.documents(sink.index) == {}
    assert destination.send([document(1, version=12)]) == []
    assert len(search_server.documents(sink.index)) == 1, "it was sent again on purpose"


def test_months_that_are_wholly_older_are_dropped(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    destination.expire(datetime(2026, 3, 1, tzinfo=UTC))
    search_server.request("PUT", f"/{sink.index}-notes", {"aliases": {sink.index: {}}})
    documents = [document(1), document(2, at=NOON + 31 * DAY)]
    assert destination.send(documents) == []
    destination.expire(datetime(2026, 3, 31, 23, tzinfo=UTC))
    assert len(search_server.documents(sink.index)) == 2
    destination.expire(datetime(2026, 4, 1, tzinfo=UTC))
    assert set(search_server.documents(sink.index)) == {documents[1].id}
    assert search_server.request("GET", f"/{sink.index}-notes")[0] == 200, "it is no month of ours"


def test_a_hundred_thousand_variables_make_no_field(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    assert destination.send([document(1)]) == []
    before = fields_of(search_server, sink.index)
    for first in range(0, 100_000, 20_000):
        documents = [
            document(
                2 + number,
                environment=b"\0\0\0\0"
                + b"".join(b"V%d=%d\0" % (one, one) for one in range(number, number + 500)),
            )
            for number in range(first, first + 20_000, 500)
        ]
        assert destination.send(documents) == []
    assert fields_of(search_server, sink.index) == before
    found = ask(search_server, sink, {"term": {"environment.V99999": "99999"}})
    assert found == [document(2 + 99_500).id]


def ask(server: SearchServer, sink: SearchSinkSettings, query: dict[str, Any]) -> list[str]:
    server.request("POST", f"/{sink.index}/_refresh")
    status, answer = server.request("POST", f"/{sink.index}/_search", {"query": query, "size": 99})
    assert status == 200, answer
    return sorted(hit["_id"] for hit in answer["hits"]["hits"])


def test_code_is_found_by_its_words_its_parts_and_as_it_is_written(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    script = (
        b"#!/bin/bash\n#SBATCH --mem-per-cpu=4G\n"
        b"module load GROMACS/2023.1-foss\n./a_b in/file.nc\n"
    )
    assert destination.send([document(1, script), document(2)]) == []
    for query in (
        {"match_phrase": {"script": "module load gromacs"}},
        {"match": {"script": "a_b"}},
        {"match": {"script": "file.nc"}},
        {"match_phrase": {"script": "mem per cpu 4g"}},
        {"term": {"script.words": "--mem-per-cpu=4G"}},
        {"prefix": {"script.words": "GROMACS/2023"}},
        {"term": {"script.letters": "nc"}},
        {"wildcard": {"script.letters": "*omac*"}},
        {"term": {"script.raw": script.decode()}},
        {"term": {"environment.PATH": "/usr/bin:/bin"}},
        {"term": {"user": "ada"}},
        {"range": {"spooled": {"gte": "2026-03-05", "lt": "2026-03-06"}}},
    ):
        assert document(1, script).id in ask(search_server, sink, query), query


HOSTILE = st.binary(max_size=400) | st.text(max_size=200).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)


def test_whatever_a_job_holds_is_taken_and_comes_back(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    numbers = iter(range(1, 10**6))

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(HOSTILE, HOSTILE, st.text(max_size=50)), min_size=20, max_size=40))
    def send(jobs: list[tuple[bytes, bytes, str]]) -> None:
        documents = [
            document(next(numbers), script, environment=b"\1\0\0\0" + environment, name=name)
            for script, environment, name in jobs
        ]
        assert destination.send(documents) == []
        kept = search_server.documents(sink.index)
        for sent in documents:
            assert extract_script(kept[sent.id]) == sent.script
            assert extract_environment(kept[sent.id]) == sent.environment

    send()


def test_what_is_larger_than_a_term_may_be_is_taken_too(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    long = b"x" * 100_000
    hostile = document(
        1,
        b"#!/bin/sh\n" + long + b"\n" + "é".encode() * 50_000,
        environment=b"\2\0\0\0" + long + b"=1\0V=" + "é".encode() * 50_000 + b"\0",
        name="n" * 50_000,
        comment="é" * 50_000,
        submit_line="\ud800" + "y" * 100_000,
    )
    assert destination.send([hostile]) == []
    (kept,) = search_server.documents(sink.index).values()
    assert extract_script(kept) == hostile.script
    assert extract_environment(kept) == hostile.environment
    assert kept["submit_line"].startswith("\\ud800y")


def test_one_document_that_is_refused_holds_up_no_other(
    search_server: SearchServer, sink: SearchSinkSettings, destination: SearchDestination
) -> None:
    bad = document(2, time_limit_s=2**70)
    refused = destination.send([document(1), bad, document(3)])
    assert [of.document for of in refused] == [bad]
    assert "time_limit_s" in refused[0].why
    assert refused[0].why.isprintable()
    assert len(search_server.documents(sink.index)) == 2


def test_an_index_template_that_the_site_changed_is_left_alone_and_a_lost_one_is_put(
    search_server: SearchServer, sink: SearchSinkSettings
) -> None:
    path = f"/_index_template/{sink.index}"
    SearchDestination(sink).send([document(1)])
    assert search_server.request("DELETE", path)[0] == 200
    SearchDestination(sink).send([document(1)])
    is_elasticsearch = search_server.name.startswith("elasticsearch")
    own = build_template(sink, is_elasticsearch=is_elasticsearch) | {"_meta": {"by": "the site"}}
    assert search_server.request("PUT", path, own)[0] == 200
    SearchDestination(msgspec.structs.replace(sink, environments=False)).send([document(2)])
    answer = search_server.request("GET", path)[1]
    assert answer["index_templates"][0]["index_template"]["_meta"] == {"by": "the site"}


def test_the_wrong_kind_is_told(elasticsearch: Elasticsearch, opensearch: OpenSearch) -> None:
    for theirs, ours, kind in (
        (elasticsearch, opensearch, "elasticsearch"),
        (opensearch, elasticsearch, "opensearch"),
    ):
        sink = msgspec.structs.replace(sink_on(ours), urls=(theirs.url,))
        with pytest.raises(ArchiveUnavailable, match=f'kind = "{kind}"'):
            SearchDestination(sink).send([document(1)])


Bounded = Callable[..., SearchServer]


@pytest.fixture(params=sorted(KINDS))
def bounded(
    request: pytest.FixtureRequest, tmp_path: Path, majors: dict[str, int]
) -> Iterator[Bounded]:
    """Start a server for one test, with these settings."""
    with ExitStack() as stack:

        def start(**bounds: str) -> SearchServer:
            named = {name.replace("__", "."): value for name, value in bounds.items()}
            server = KINDS[request.param](majors[request.param], tmp_path, named)
            return stack.enter_context(server)

        yield start


@pytest.mark.search
@pytest.mark.servers
def test_a_server_that_takes_little_gets_little_at_once(bounded: Bounded) -> None:
    server = bounded(http__max_content_length="300kb")
    sink = sink_on(server)
    destination = SearchDestination(sink)
    noise = random.Random(1)
    texts = [noise.randbytes(20_000).hex().encode() for _ in range(40)]
    documents = [document(number, text) for number, text in enumerate(texts)]
    large = document(99, noise.randbytes(200_000).hex().encode())
    refused = destination.send([*documents, large])
    assert [of.document for of in refused] == [large]
    assert "http.max_content_length" in refused[0].why
    assert len(server.documents(sink.index)) == 40


@pytest.mark.search
@pytest.mark.servers
def test_a_server_that_has_too_much_asks_for_patience_and_gets_smaller_requests(
    bounded: Bounded,
) -> None:
    server = bounded(indexing_pressure__memory__limit="400kb")
    sink = sink_on(server)
    text = b"#!/bin/sh\n" + b"echo done\n" * 2_000
    documents = [document(number, text) for number in range(60)]
    patience: list[str] = []

    def send(some: list[ArchivedDocument]) -> None:
        destination = SearchDestination(sink)
        while True:
            try:
                assert destination.send(some) == []
            except ArchiveUnavailable as error:
                patience.append(str(error))
                time.sleep(0.05 * len(threads))
            else:
                return

    threads = [threading.Thread(target=send, args=(documents[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert patience
    assert all("overloaded" in why for why in patience)
    assert len(server.documents(sink.index)) == 60


def test_a_server_that_is_killed_midway_has_everything_once(search_server: SearchServer) -> None:
    sink = sink_on(search_server)
    destination = SearchDestination(sink, request_bytes=1 << 15, timeout_s=10.0)
    documents = [document(number, b"#!/bin/sh\n# %d\n" % number) for number in range(3000)]
    begun = threading.Event()

    def kill() -> None:
        begun.wait(30)
        search_server.kill()
        search_server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    failures = 0
    for first in range(0, len(documents), 300):
        some = documents[first : first + 300]
        while True:
            try:
                assert destination.send(some) == []
            except ArchiveUnavailable:
                failures += 1
                killer.join(60)
            else:
                break
        begun.set()
    killer.join(60)
    assert failures
    assert set(search_server.documents(sink.index)) == {of.id for of in documents}
