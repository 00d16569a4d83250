"""The catalogue as a consumer: repeats are harmless, what is purged is gone, damage is named."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from catalogue_site import NOON, Site, anybody, everything_below
from hypothesis import given, settings
from hypothesis import strategies as st

from steward.archive.catalog.consumer import Catalogue, spool_time
from steward.archive.catalog.generations import Generations
from steward.archive.catalog.matching import Matcher
from steward.archive.catalog.month import CatalogueUnavailable, months_in
from steward.archive.catalog.walking import Wanted
from steward.archive.contents import Contents
from steward.archive.errors import NotArchived
from steward.core.consumers import Rejected
from steward.core.errors import Unavailable
from steward.core.events import Event
from steward.core.incoming import Stores


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_month_has_a_file_and_a_batch_may_span_many(site: Site) -> None:
    scripts = [
        site.script(number, b"common text", NOON + timedelta(days=31 * number))
        for number in range(6)
    ]
    site.take(*scripts)
    assert months_in(Generations(str(site.directory)).current()) == [
        "2026-11",
        "2026-12",
        "2027-01",
        "2027-02",
        "2027-03",
        "2027-04",
    ]
    assert site.found("common") == [5, 4, 3, 2, 1, 0]


def test_the_cursor_survives_and_a_repeat_changes_nothing(site: Site) -> None:
    script = site.script(1, b"alpha")
    identity = site.identity(script, 1001, "ada")
    site.take(script, identity)
    assert site.catalogue.cursor() == 2
    again = Catalogue(str(site.directory), Contents(Stores([site.store])))
    assert again.cursor() == 2
    again.apply([script, identity], 2, lambda _: None)
    [hit] = site.hits("alpha")
    assert (hit.use.uid, hit.use.user, hit.use.account) == (1001, "ada", "physics")


def test_known_bytes_are_not_read_again(site: Site) -> None:
    site.take(site.script(1, b"alpha"))
    second = site.script(2, b"alpha")
    site.store.unlink([second.body.script.path])
    site.take(second)
    assert site.found("alpha") == [2, 1]


def test_gone_bytes_come_from_the_archive_or_are_rejected(site: Site) -> None:
    lost, kept = site.script(1, b"lost"), site.script(2, b"filed")
    site.store.unlink([lost.body.script.path, kept.body.script.path])
    with pytest.raises(Rejected) as caught:
        site.take(lost)
    assert caught.value.event is lost

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

    contents = Contents(Stores([]), lambda: [Filed()])
    catalogue = Catalogue(str(site.directory), contents)
    catalogue.apply([kept], 2, lambda _: None)
    with pytest.raises(Rejected):
        catalogue.apply([lost], 3, lambda _: None)
    assert site.found("filed") == [2]


def test_a_purged_script_leaves_no_trace_and_does_not_come_back(site: Site) -> None:
    first, shared = site.script(1, b"xylophone only here"), site.script(2, b"shared words")
    again = site.script(3, b"shared words")
    site.take(first, shared, again, site.identity(first, 1001, "ada"))
    site.take(site.purge(first, shared))
    assert site.found("xylophone") == []
    assert site.found("shared") == [3]
    # Nor is there a word of it in the index itself, which holds groups of three letters.
    site.catalogue.close()
    site.searcher.close()
    assert b"yloph" not in everything_below(site.directory)
    assert b"ylo" not in everything_below(site.directory)
    site.take(first, site.identity(first, 1001, "ada"))
    assert site.found("xylophone") == []
    site.take(site.purge(again))
    assert site.found("shared") == []


def test_a_purge_of_one_sink_is_not_ours(site: Site) -> None:
    script = site.script(1, b"alpha")
    site.take(script)
    site.take(site.purge(script, sink="files"))
    assert site.found("alpha") == [1]


def test_an_identity_without_its_script_and_a_script_without_bytes_are_harmless(site: Site) -> None:
    script = site.script(1, b"alpha")
    site.take(site.identity(script, 1001, "ada"))
    assert site.found("alpha") == []


@pytest.mark.parametrize("key", ["nonsense", "script:1:x", "script:1:-5", f"script:1:{2**63}", ""])
def test_a_hostile_key_is_rejected(site: Site, key: str) -> None:
    script = site.script(1, b"alpha")
    bad = Event(
        kind=script.kind,
        cluster="one",
        key=key,
        at=NOON,
        seen_at=NOON,
        source="test",
        body=script.body,
        id=9,
    )
    with pytest.raises(Rejected) as caught:
        site.take(bad)
    assert caught.value.event is bad


def test_a_big_script_is_found_to_its_end(site: Site) -> None:
    lines = [f"echo {number * 7919 % 100003} payload" for number in range(60_000)]
    text = "\n".join([*lines, "the very last words"])
    assert len(text) > 2**20
    site.keep(1, text)
    [hit] = site.hits("very last")
    assert hit.lines[0].number == 60_001
    assert site.found("echo 7919 payload") == [1]


def test_damage_is_named_with_what_helps_and_stops_the_cursor(site: Site) -> None:
    site.keep(1, "alpha")
    site.catalogue.close()
    site.searcher.close()
    current = Path(Generations(str(site.directory)).current())
    (current / "2026-11.db").write_bytes(b"this is no database, " * 1000)
    with pytest.raises(CatalogueUnavailable, match="reindex") as caught:
        site.take(site.script(2, b"beta"))
    assert isinstance(caught.value, Unavailable)
    with pytest.raises(CatalogueUnavailable, match="reindex"):
        site.found("alpha")


def test_readers_and_writer_follow_to_a_new_generation(site: Site) -> None:
    site.keep(1, "alpha")
    assert site.found("alpha") == [1]
    generations = Generations(str(site.directory))
    with generations.lock():
        generations.enter(generations.make())
    assert site.found("alpha") == []
    site.keep(2, "alpha")
    assert site.found("alpha") == [2]
    assert len(list(site.directory.glob("g*"))) == 1


def test_files_are_nobody_elses(site: Site) -> None:
    site.keep(1, "alpha")
    for folder, _, names in os.walk(site.directory):
        assert os.stat(folder).st_mode & 0o077 == 0
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                assert os.stat(path).st_mode & 0o077 == 0


def test_an_empty_catalogue_has_no_hits(site: Site) -> None:
    assert site.found("alpha") == []
    page = site.searcher.page(Matcher(["a"]), Wanted(), anybody, limit=1)
    assert page.after is None


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_killed_between_batches_or_not_the_result_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    site = Site(tmp_path_factory.mktemp("site"))
    events = []
    for job_id in range(1, 6):
        text = f"text {data.draw(st.integers(1, 3))}"
        script = site.script(job_id, text.encode(), NOON + timedelta(days=9 * job_id))
        events += [script, site.identity(script, 1000 + job_id, f"user{job_id}")]
        if data.draw(st.booleans()):
            events.append(site.purge(script))
    purged = {key for event in events for key in getattr(event.body, "script_keys", ())}
    start = 0
    while start < len(events):
        size = data.draw(st.integers(1, 4))
        batch = events[start : start + size]
        site.catalogue.apply(batch, batch[-1].id, lambda _: None)
        # A crash may lose the cursor's move, and then a batch comes again.
        start += data.draw(st.integers(0 if size > 1 else 1, size))
    expected = [
        event.body.job_id
        for event in events
        if event.kind == "job.script" and event.key not in purged
    ]
    assert site.found("text") == expected[::-1]
    assert all(hit.use.uid == 1000 + hit.use.job_id for hit in site.hits("text"))
    site.catalogue.close()
    site.searcher.close()


def test_a_key_tells_the_time_in_the_spool() -> None:
    assert spool_time("script:17:1700000000123456789") == 1_700_000_000_123_456
