"""Catalog consumer: repeats are harmless, purges remove entries, and errors name the damage."""

import os
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import archive, catalog
from harness.events import NOVEMBER
from harness.site import Site
from steward.archive.catalog.consumer import CatalogConsumer, parse_spool_time
from steward.archive.catalog.generations import CatalogCursor, CatalogGenerations
from steward.archive.catalog.matches import TermMatcher
from steward.archive.catalog.month import CatalogUnavailable, list_months
from steward.archive.catalog.search import UseFilter
from steward.archive.contents import ScriptContents
from steward.archive.errors import NotArchived
from steward.core.consumers import Rejected
from steward.core.errors import Unavailable
from steward.core.events import Event
from steward.core.script_stores import IncomingStores


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return catalog.make_site(tmp_path)


def test_a_month_has_a_file_and_a_batch_may_span_many(site: Site) -> None:
    scripts = [
        catalog.script(site, number, b"common text", NOVEMBER + timedelta(days=31 * number))
        for number in range(6)
    ]
    site.feed(*scripts)
    assert list_months(CatalogGenerations(str(catalog.directory_of(site))).get_current()) == [
        "2026-11",
        "2026-12",
        "2027-01",
        "2027-02",
        "2027-03",
        "2027-04",
    ]
    assert catalog.found(site, "common") == [5, 4, 3, 2, 1, 0]


def test_the_cursor_survives_and_a_repeat_changes_nothing(site: Site) -> None:
    script = catalog.script(site, 1, b"alpha")
    identity = catalog.identity(script, 1001, "ada")
    site.feed(script, identity)
    assert catalog.catalog_of(site).cursor() == 2
    again = CatalogConsumer(
        str(catalog.directory_of(site)), ScriptContents(IncomingStores([catalog.store_of(site)]))
    )
    assert again.cursor() == 2
    again.apply([script, identity], 2, lambda _: None)
    [hit] = catalog.hits(site, "alpha")
    assert (hit.use.uid, hit.use.user, hit.use.account) == (1001, "ada", "physics")


def test_known_bytes_are_not_read_again(site: Site) -> None:
    site.feed(catalog.script(site, 1, b"alpha"))
    second = catalog.script(site, 2, b"alpha")
    catalog.store_of(site).unlink([second.body.script.path])
    site.feed(second)
    assert catalog.found(site, "alpha") == [2, 1]


def test_gone_bytes_come_from_the_archive_or_are_rejected(site: Site) -> None:
    lost, kept = catalog.script(site, 1, b"lost"), catalog.script(site, 2, b"filed")
    catalog.store_of(site).unlink([lost.body.script.path, kept.body.script.path])
    with pytest.raises(Rejected) as caught:
        site.feed(lost)
    assert caught.value.event.body is lost.body

    class Filed:
        def locate(self, script_key: str, cluster: str = "") -> None:
            raise AssertionError("nobody asks where it is")

        def read(self, script_key: str, which: str, cluster: str = "") -> bytes:
            assert (which, cluster) == ("script", "one")
            if script_key != kept.key:
                raise NotArchived("it was never filed", script_key)
            return b"filed"

        def close(self) -> None:
            pass

    contents = ScriptContents(IncomingStores([]), lambda: [Filed()])
    consumer = CatalogConsumer(str(catalog.directory_of(site)), contents)
    consumer.apply([kept], 2, lambda _: None)
    with pytest.raises(Rejected):
        consumer.apply([lost], 3, lambda _: None)
    assert catalog.found(site, "filed") == [2]


def test_a_purged_script_leaves_no_trace_and_does_not_come_back(site: Site) -> None:
    first, shared = (
        catalog.script(site, 1, b"xylophone only here"),
        catalog.script(site, 2, b"shared words"),
    )
    again = catalog.script(site, 3, b"shared words")
    site.feed(first, shared, again, catalog.identity(first, 1001, "ada"))
    site.feed(archive.purge(first, shared))
    assert catalog.found(site, "xylophone") == []
    assert catalog.found(site, "shared") == [3]
    # The index itself, which contains groups of three letters, has no trace of it either.
    catalog.catalog_of(site).close()
    catalog.searcher_of(site).close()
    assert b"yloph" not in catalog.everything_below(catalog.directory_of(site))
    assert b"ylo" not in catalog.everything_below(catalog.directory_of(site))
    site.feed(first, catalog.identity(first, 1001, "ada"))
    assert catalog.found(site, "xylophone") == []
    site.feed(archive.purge(again))
    assert catalog.found(site, "shared") == []


def test_a_purge_of_one_sink_is_not_ours(site: Site) -> None:
    script = catalog.script(site, 1, b"alpha")
    site.feed(script)
    site.feed(archive.purge(script, sink="files"))
    assert catalog.found(site, "alpha") == [1]


def test_an_identity_without_its_script_and_a_script_without_bytes_are_harmless(site: Site) -> None:
    script = catalog.script(site, 1, b"alpha")
    site.feed(catalog.identity(script, 1001, "ada"))
    assert catalog.found(site, "alpha") == []


@pytest.mark.parametrize("key", ["nonsense", "script:1:x", "script:1:-5", f"script:1:{2**63}", ""])
def test_a_hostile_key_is_rejected(site: Site, key: str) -> None:
    script = catalog.script(site, 1, b"alpha")
    bad = Event(
        kind=script.kind,
        cluster="one",
        key=key,
        at=NOVEMBER,
        seen_at=NOVEMBER,
        source="test",
        body=script.body,
        id=9,
    )
    with pytest.raises(Rejected) as caught:
        site.feed(bad)
    assert caught.value.event.body is bad.body


def test_a_big_script_is_found_to_its_end(site: Site) -> None:
    lines = [f"echo {number * 7919 % 100003} payload" for number in range(60_000)]
    text = "\n".join([*lines, "the very last words"])
    assert len(text) > 2**20
    catalog.keep(site, 1, text)
    [hit] = catalog.hits(site, "very last")
    assert hit.lines[0].number == 60_001
    assert catalog.found(site, "echo 7919 payload") == [1]


def test_damage_is_named_with_what_helps_and_stops_the_cursor(site: Site) -> None:
    catalog.keep(site, 1, "alpha")
    catalog.catalog_of(site).close()
    catalog.searcher_of(site).close()
    current = Path(CatalogGenerations(str(catalog.directory_of(site))).get_current())
    (current / "2026-11.db").write_bytes(b"this is no database, " * 1000)
    with pytest.raises(CatalogUnavailable, match="reindex") as caught:
        site.feed(catalog.script(site, 2, b"beta"))
    assert isinstance(caught.value, Unavailable)
    with pytest.raises(CatalogUnavailable, match="reindex"):
        catalog.found(site, "alpha")


def test_readers_and_writer_follow_to_a_new_generation(site: Site) -> None:
    catalog.keep(site, 1, "alpha")
    assert catalog.found(site, "alpha") == [1]
    generations = CatalogGenerations(str(catalog.directory_of(site)))
    with generations.lock():
        generations.make_current(generations.create())
    assert catalog.found(site, "alpha") == []
    catalog.keep(site, 2, "alpha")
    assert catalog.found(site, "alpha") == [2]
    assert len(list(catalog.directory_of(site).glob("g*"))) == 1


def test_files_are_nobody_elses(site: Site) -> None:
    catalog.keep(site, 1, "alpha")
    for folder, _, names in os.walk(catalog.directory_of(site)):
        assert os.stat(folder).st_mode & 0o077 == 0
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                assert os.stat(path).st_mode & 0o077 == 0


def test_an_empty_catalog_has_no_hits(site: Site) -> None:
    assert catalog.found(site, "alpha") == []
    page = catalog.searcher_of(site).find_page(
        TermMatcher(["a"]), UseFilter(), catalog.anybody, limit=1
    )
    assert page.after is None


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_killed_between_batches_or_not_the_result_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    site = catalog.make_site(tmp_path_factory.mktemp("site"))
    events = []
    for job_id in range(1, 6):
        text = f"text {data.draw(st.integers(1, 3))}"
        script = catalog.script(site, job_id, text.encode(), NOVEMBER + timedelta(days=9 * job_id))
        events += [script, catalog.identity(script, 1000 + job_id, f"user{job_id}")]
        if data.draw(st.booleans()):
            events.append(archive.purge(script))
    purged = {key for event in events for key in getattr(event.body, "script_keys", ())}
    start = 0
    while start < len(events):
        size = data.draw(st.integers(1, 4))
        batch = events[start : start + size]
        catalog.catalog_of(site).apply(batch, batch[-1].id, lambda _: None)
        # A crash may lose the cursor's move, and then a batch comes again.
        start += data.draw(st.integers(0 if size > 1 else 1, size))
    expected = [
        event.body.job_id
        for event in events
        if event.kind == "job.script" and event.key not in purged
    ]
    assert catalog.found(site, "text") == expected[::-1]
    assert all(hit.use.uid == 1000 + hit.use.job_id for hit in catalog.hits(site, "text"))
    catalog.catalog_of(site).close()
    catalog.searcher_of(site).close()


def test_a_key_tells_the_time_in_the_spool() -> None:
    assert parse_spool_time("script:17:1700000000123456789") == 1_700_000_000_123_456


def test_a_purge_with_a_strange_key_is_rejected(site: Site) -> None:
    script = catalog.script(site, 1, b"alpha")
    site.feed(script)
    purge = archive.purge(msgspec.structs.replace(script, key="script:1:noon"))
    with pytest.raises(Rejected) as caught:
        site.feed(purge)
    assert caught.value.event.body is purge.body
    assert catalog.found(site, "alpha") == [1]


def test_a_closed_catalog_has_no_file_open(site: Site) -> None:
    directory = catalog.directory_of(site)
    site.feed(catalog.script(site, 1, b"alpha"))
    catalog.catalog_of(site).close()
    assert archive.list_open_files(directory) == []
    cursor = CatalogCursor(CatalogGenerations(str(directory)).get_current())
    assert cursor.load_position() == 1
    assert archive.list_open_files(directory)
    cursor.close()
    assert archive.list_open_files(directory) == []


def test_the_index_is_asked_for_groups_of_letters_of_every_term() -> None:
    trigrams = TermMatcher(["GROMACS", "ab", "x" * 200]).list_trigrams()
    assert trigrams == ["gro", "rom", "oma", "mac", "acs", "xxx"]
    long_term = "".join(map(chr, range(0x4E00, 0x4E00 + 250)))
    sample = TermMatcher([long_term]).list_trigrams()
    assert sample[0] == long_term[:3]
    assert sample[-1] == long_term[-3:]
    assert len(sample) < 100
