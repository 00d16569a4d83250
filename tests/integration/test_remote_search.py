"""Search in Elasticsearch and OpenSearch: results as the catalog's, only the caller's."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_sinks import DAY, NOON, deletion, document, sink_on
from spool_daemon import Daemon, settings_in, submit

from servers.search import SearchServer
from steward.archive.catalog.matches import TermMatcher, decode_script_text
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import UseFilter
from steward.archive.context import ArchiveContext
from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument
from steward.archive.requests import SearchReply
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.actions import Registry
from steward.core.config import ArchiveSettings, Settings
from steward.core.errors import UsageError
from steward.core.events import JOB_SCRIPT, JOB_SEEN, Event, JobFacts
from steward.daemon.registry import import_actions
from steward.extensions.search_servers.client import SearchClient, ServerReply
from steward.extensions.search_servers.destination import SearchDestination
from steward.extensions.search_servers.search import SearchServerSearcher
from steward.jobs import JobsConsumer
from steward.slurm.settings import ClusterSettings

ROOT = Caller(uid=0, user="root")
ADA = Caller(uid=4001, user="ada")
BELA = Caller(uid=4002, user="bela")


class SearchSite:
    """Library whose one searchable sink is on a real server."""

    def __init__(self, server: SearchServer, directory: Path) -> None:
        self.server = server
        self.sink = sink_on(server)
        self.settings = Settings(
            state_dir=str(directory),
            cluster={"alpha": ClusterSettings(timezone="UTC")},
            archive=ArchiveSettings(
                sink={"far": self.sink, "near": FilesSinkSettings(path=str(directory / "near"))}
            ),
        )
        self.jobs = JobsConsumer(self.settings)
        access = Access(self.settings.access, 0, lambda _: ClusterRoles())
        self.library = ArchiveContext(self.settings, access=access)
        self._registry = Registry(
            import_actions("archive").values(), {"archive": lambda: self.library}
        )
        self._destination = SearchDestination(self.sink)
        self._events = 0

    def send(self, *documents: ArchivedDocument) -> None:
        """Archive documents, so that a search finds them at once."""
        assert self._destination.send(documents) == []
        self.server.request("POST", f"/{self.sink.index}/_refresh")

    def show(self, *documents: ArchivedDocument) -> None:
        """Add the jobs of documents to jobs.db."""
        events: list[Event] = []
        for of in documents:
            assert of.identity is not None
            bodies = ((JOB_SCRIPT, of.body), (JOB_SEEN, JobFacts(record=of.identity.record)))
            for kind, body in bodies:
                self._events += 1
                key = of.key if kind == JOB_SCRIPT else f"seen:{of.key}"
                now = datetime.now(UTC)
                events.append(
                    Event(
                        kind=kind,
                        cluster=of.cluster,
                        key=key,
                        at=now,
                        seen_at=now,
                        source="test",
                        body=body,
                        id=self._events,
                    )
                )
        self.jobs.apply(events, self._events, lambda _: None)

    def ask(self, asker: Caller, *terms: str, sink: str = "far", **request: Any) -> SearchReply:
        """Return the reply to a search."""
        asked = self._registry.decode(
            "archive.search", {"terms": terms, "sink": sink, "lines": 1, **request}
        )
        answer: SearchReply = self._registry.call("archive.search", asker, asked)
        return answer

    def found(self, asker: Caller, *terms: str, **request: Any) -> list[int]:
        """Return the ids of the jobs that a search finds."""
        return [hit.job.job_id for hit in self.ask(asker, *terms, **request).hits]

    def close(self) -> None:
        """Close everything."""
        self._destination.close()
        self.library.close()
        self.jobs.close()


@pytest.fixture
def site(search_server: SearchServer, tmp_path: Path) -> Iterator[SearchSite]:
    made = SearchSite(search_server, tmp_path)
    yield made
    made.close()


def test_each_user_finds_what_is_theirs(site: SearchSite) -> None:
    site.send(
        document(1, b"srun shared thing\n"),
        document(2, b"srun shared thing\n", uid=4002, user="bela"),
        document(3, b"srun shared thing\n", uid=None, user=""),
        # The uid, or the name, of a removed user.
        document(4, b"srun shared thing\n", uid=4001, user="gone"),
        document(5, b"srun shared thing\n", uid=999, user="ada"),
    )
    assert site.found(ADA, "shared") == [1]
    assert site.found(BELA, "shared") == [2]
    assert sorted(site.found(ROOT, "shared")) == [1, 2, 3, 4, 5]
    assert site.found(ADA, "shared", users=["bela"]) == []
    assert site.ask(BELA, "shared", count=True).count == 1


def test_what_may_not_be_read_is_not_even_fetched(
    site: SearchSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = document(2, b"secret\n", uid=4002, user="bela")
    site.send(document(1, b"secret\n"), theirs)
    fetched: list[str] = []
    real = SearchClient.request

    def watched(client: SearchClient, method: str, target: str, *more: Any) -> ServerReply:
        if target.startswith("/_mget"):
            fetched.extend(doc["_id"] for doc in msgspec.json.decode(more[0])["docs"])
        return real(client, method, target, *more)

    monkeypatch.setattr(SearchClient, "request", watched)
    searcher = site.library.get_sink_searcher("far")

    def allowed(use: ScriptUse) -> bool:
        return use.uid == 4001

    page = searcher.find_page(TermMatcher(["secret"]), UseFilter(), allowed, limit=10)
    assert [hit.use.job_id for hit in page.hits] == [1]
    assert theirs.id not in fetched
    assert len(fetched) == 1


def test_hits_are_told_as_the_catalog_tells_them(site: SearchSite) -> None:
    script = b"#!/bin/bash\nmodule load GROMACS/2023\ngmx mdrun\ngmx again\n"
    site.send(document(1, script, name="md", account="chem", partition="gpu"))
    (hit,) = site.ask(ADA, "gmx").hits
    assert (hit.job.job_id, hit.job.name, hit.job.account) == (1, "md", "chem")
    assert [(line.number, line.text, line.spans) for line in hit.lines] == [
        (3, "gmx mdrun", ((0, 3),))
    ]
    assert hit.more_lines == 1


def test_a_search_obeys_its_filters(site: SearchSite) -> None:
    documents = [
        document(1, at=NOON, name="md[1]", account="chem", state="FAILED"),
        document(2, at=NOON + DAY, name="post", partition="gpu", state="COMPLETED"),
        document(3, at=NOON + 40 * DAY, cluster="beta", name="md2", uid=4002, user="bela"),
    ]
    site.send(*documents)
    site.show(*documents[:2])

    def found(**request: Any) -> list[int]:
        return site.found(ROOT, "hostname", **request)

    assert found() == [3, 2, 1]
    assert found(clusters=["alpha"]) == [2, 1]
    assert found(users=["bela"]) == found(users=["4002"]) == [3]
    assert found(accounts=["Chem"]) == [1]
    assert found(partitions=["gpu"]) == [2]
    assert found(names=["md*"]) == [3, 1]
    assert found(names=["md[[]1]"]) == [1]
    assert found(names=["m?[0-9]"]) == [3]
    assert found(since="2026-03-06", until="2026-03-07") == [2]
    assert found(states=["f"]) == [1]
    assert found(jobs=["2"]) == [2]
    assert found(jobs=["77"]) == []


def test_pages_follow_each_other_newest_first(site: SearchSite) -> None:
    site.send(*(document(number, at=NOON + number // 3 * 1000) for number in range(1, 250)))
    numbers: list[int] = []
    page = ""
    while True:
        answer = site.ask(ADA, "hostname", limit=40, page=page)
        numbers += [hit.job.job_id for hit in answer.hits]
        page = answer.next
        if not page:
            break
    assert len(numbers) == 249
    assert sorted(set(numbers)) == list(range(1, 250))
    assert [number // 3 for number in numbers] == sorted((n // 3 for n in numbers), reverse=True)


def test_what_was_purged_is_not_found(site: SearchSite) -> None:
    first = document(1)
    site.send(first)
    site.send(deletion(first, 2))
    assert site.found(ROOT, "hostname") == []


def test_nothing_is_found_where_nothing_is(site: SearchSite) -> None:
    assert site.found(ROOT, "hostname") == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("near", "of kind 'files'"),
        ("kafka", "no searchable sink 'kafka'"),
        ("x\n", "no searchable sink"),
    ],
)
def test_only_what_can_be_searched_is(site: SearchSite, name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        site.ask(ROOT, "hostname", sink=name)
    assert site.found(ROOT, "hostname", sink=site.sink.kind) == []


def test_a_server_that_is_away_is_told_in_one_line(site: SearchSite) -> None:
    far = msgspec.structs.replace(site.sink, urls=("http://127.0.0.1:9",))
    searcher = SearchServerSearcher(far)
    with pytest.raises(ArchiveUnavailable, match=r"^cannot reach http://127.0.0.1:9: .*refused"):
        searcher.find_page(TermMatcher(["a"]), UseFilter(), anybody, limit=1)


def test_users_are_told_no_more_of_a_server_than_that_it_cannot_answer(
    site: SearchSite, caplog: pytest.LogCaptureFixture
) -> None:
    site.send(document(1))
    broken = {"mappings": {"properties": {"key": {"type": "text"}}}}
    name = f"{site.sink.index}-2025.01"
    assert site.server.request("PUT", f"/{name}", broken)[0] == 200
    with pytest.raises(ArchiveUnavailable) as told:
        site.ask(ROOT, "hostname")
    assert site.sink.urls[0] in str(told.value)
    with pytest.raises(ArchiveUnavailable, match="failed on this search") as told:
        site.ask(ADA, "hostname")
    assert "http" not in str(told.value)
    assert site.sink.urls[0] in caplog.text


def test_no_pattern_costs_a_server_more_than_it_has(site: SearchSite) -> None:
    site.send(document(1, name="aaab"))
    assert site.found(ADA, "hostname", names=["*" * 5000 + "b"]) == [1]
    assert site.found(ADA, "hostname", names=["*a?????????????????????????????"]) == []
    assert site.found(ADA, "hostname", names=["*a*a*a*b", "x" * 1000]) == [1]
    assert site.found(ADA, "hostname", names=["*" + "ab?[a-c]" * 10] * 500) == []
    for many in (["*a" * 40], ["y" * 1025], [f"{number}" * 30 for number in range(900)]):
        with pytest.raises(UsageError, match="give at most"):
            site.ask(ADA, "hostname", names=many)
    with pytest.raises(UsageError, match="70000 accounts are too many"):
        site.ask(ADA, "hostname", accounts=[f"a{number}" for number in range(70000)])


def test_a_server_that_repeats_a_page_keeps_no_search_going(
    site: SearchSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.send(*(document(number, at=NOON + number) for number in range(1, 420)))
    searcher = site.library.get_sink_searcher("far")
    real = SearchClient.request

    def without_end(client: SearchClient, method: str, target: str, *more: Any) -> ServerReply:
        if "_search" in target:
            asked = msgspec.json.decode(more[0])
            asked.pop("search_after", None)
            more = (msgspec.json.encode(asked), *more[1:])
        return real(client, method, target, *more)

    monkeypatch.setattr(SearchClient, "request", without_end)
    with pytest.raises(ArchiveUnavailable, match="the same page"):
        searcher.count(TermMatcher(["hostname"]), UseFilter(), anybody)


def anybody(use: ScriptUse) -> bool:
    return True


def has_come(server: SearchServer, index: str, count: int) -> bool:
    """Return whether this many documents can be found."""
    server.request("POST", f"/{index}/_refresh")
    status, answer = server.request("GET", f"/{index}/_count")
    return status == 200 and bool(answer["count"] == count)


def test_the_command_line_searches_in_a_sink_of_a_running_daemon(
    search_server: SearchServer, tmp_path: Path
) -> None:
    sink = sink_on(search_server)
    settings = settings_in(tmp_path, archive=ArchiveSettings(catalog=False, sink={"far": sink}))

    def steward(*words: str) -> "subprocess.CompletedProcess[str]":
        words = ("archive", "search", *words, "--socket", settings.socket)
        return subprocess.run(
            [sys.executable, "-m", "steward", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={name: value for name, value in os.environ.items() if "STEWARD" not in name},
        )

    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 31))
        daemon.wait(lambda: has_come(search_server, sink.index, 30))
        done = steward("--in", "far", "job-name=storm-17", "--json")
        assert done.returncode == 0, done.stderr
        (hit,) = msgspec.json.decode(done.stdout)["hits"]
        assert hit["job"]["job_id"] == 17
        assert hit["lines"][0]["text"] == "#SBATCH --job-name=storm-17"
        done = steward("--in", sink.kind, "simulate", "--count", "--json")
        assert msgspec.json.decode(done.stdout)["count"] == 30
        for words, what in (
            (("--in", "near", "a"), "no searchable sink 'near'"),
            (("--in", "far", "a", "--name", "*a" * 50), "50 wildcards"),
        ):
            done = steward(*words)
            assert done.returncode == 2
            assert what in done.stderr
            assert done.stderr.count("\n") == 1


WORDS = (
    *("srun", "--mem=4G", "module load", "GROMACS/2023.1", "a_b", "file.nc", "$HOME/bin:$PATH"),
    *("/opt/apps/x86_64/v1.2", "Größe", "STRASSE", "naïve", "日本語", "éa", "x", "ab", "don't"),
    *("\0", "\t", "\n", "  ", "#", "%j_%a.out", "*?[]", '"', "\\", "0x1F", "1e-5", "K\u212aB"),
    *("w" * 300, "user@host:22", "a,b;c|d", "Abc", "aBC", "\udcff"),
)


def test_the_same_is_found_as_by_looking_at_every_script(site: SearchSite) -> None:
    chance = random.Random(4)
    texts = {
        number: "".join(
            chance.choice(WORDS) + chance.choice(("", " ", "\n", "/", "-")) for _ in range(8)
        )
        for number in range(1, 200)
    }
    scripts = {number: text.encode("utf-8", "surrogateescape") for number, text in texts.items()}
    site.send(*(document(number, script) for number, script in scripts.items()))
    searcher = site.library.get_sink_searcher("far")
    for _ in range(250):
        text = decode_script_text(scripts[chance.randint(1, 199)])
        begin = chance.randrange(len(text))
        terms = [text[begin : begin + chance.randint(1, 12)]]
        if chance.random() < 0.3:
            terms.append(chance.choice(WORDS))
        matcher = TermMatcher(terms, case=chance.random() < 0.3, words=chance.random() < 0.3)
        expected = {
            number for number, of in scripts.items() if matcher.matches(decode_script_text(of))
        }
        page = searcher.find_page(matcher, UseFilter(), anybody, limit=1000, timeout_s=60.0)
        assert page.complete
        assert {hit.use.job_id for hit in page.hits} == expected, (terms, matcher.words)
