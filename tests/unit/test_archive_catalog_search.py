"""Search: hits are exact, complete and in order, and only the caller's own."""

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import catalog
from harness.events import NOVEMBER
from harness.site import Site
from steward.archive.catalog.matches import SearchError, TermMatcher
from steward.archive.catalog.month import ScriptUse
from steward.archive.catalog.search import (
    CatalogSearcher,
    OwnerFilter,
    SearchThresholds,
    UseFilter,
    UsePosition,
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return catalog.make_site(tmp_path)


def searching(site: Site, **thresholds: int) -> None:
    """Search on the Site with other thresholds."""
    site.context("archive").searcher = CatalogSearcher(
        str(catalog.directory_of(site)), thresholds=SearchThresholds(**thresholds)
    )


def test_words_paths_and_modules_are_found_in_any_case_and_newest_first(site: Site) -> None:
    catalog.keep(site, 1, "#!/bin/sh\nmodule load GROMACS/2023\n/opt/apps/gromacs/bin/gmx mdrun\n")
    catalog.keep(site, 2, "#!/bin/sh\nmodule load GROMACS/2024\n")
    catalog.keep(site, 3, "#!/bin/sh\nsleep 1\n")
    assert catalog.found(site, "gromacs") == [2, 1]
    assert catalog.found(site, "module load gromacs/2023") == [1]
    assert catalog.found(site, "/opt/apps/GROMACS") == [1]
    assert catalog.found(site, "/bin/sh") == [3, 2, 1]
    assert catalog.found(site, "gromacs/2025") == []


def test_all_terms_must_stand_in_the_script(site: Site) -> None:
    catalog.keep(site, 1, "srun alpha\nsrun beta\n")
    catalog.keep(site, 2, "srun alpha\n")
    assert catalog.found(site, "alpha", "beta") == [1]
    assert catalog.found(site, "beta", "al") == [1]


def test_the_groups_alone_are_no_hit(site: Site) -> None:
    # All groups of three of "abcde" stand here, but not the text.
    catalog.keep(site, 1, "abc bcd cde")
    assert catalog.found(site, "abcde") == []
    assert catalog.found(site, "abc", "cde") == [1]


def test_case_and_whole_words_can_be_asked_for(site: Site) -> None:
    catalog.keep(site, 1, "module load R\n")
    catalog.keep(site, 2, "module load ruby\n")
    assert catalog.found(site, "load r") == [2, 1]
    assert catalog.found(site, "load R", case=True) == [1]
    assert catalog.found(site, "load r", words=True) == [1]


@pytest.mark.parametrize(
    "term", ["é", "qz", "§", "ab", "a", "\n", "z\n", "%_", '"', "'", "*", "''"]
)
def test_short_and_odd_terms_are_found(site: Site, term: str) -> None:
    catalog.keep(site, 1, f"one {term} two")
    catalog.keep(site, 2, "xyxyxy")
    catalog.keep(site, 3, f"at the end {term}")
    assert catalog.found(site, term) == [3, 1]


def test_a_short_term_is_found_beyond_the_newest_uses(site: Site) -> None:
    searching(site, look_first=5, groups_at_once=2)
    for job_id in range(10, 30):
        catalog.keep(site, job_id, f"nothing here but {job_id}")
    for job_id in range(1, 6):
        catalog.keep(site, job_id, f"qz{job_id} QZ qz {job_id}qz")
    assert catalog.found(site, "qz") == [5, 4, 3, 2, 1]
    assert catalog.found(site, "z") == [5, 4, 3, 2, 1]


def test_bytes_that_are_no_text_are_found_around(site: Site) -> None:
    catalog.keep(site, 1, b"caf\xe9 before\0after \xff\xfe gromacs")
    assert catalog.found(site, "gromacs") == [1]
    assert catalog.found(site, "after") == [1]
    assert catalog.found(site, "before after") == []
    assert catalog.found(site, "before\0after") == [1]
    assert catalog.found(site, "caf\udce9 be") == [1]


def test_a_script_of_many_jobs_is_indexed_once_and_found_for_each(site: Site) -> None:
    for job_id in (1, 2, 3):
        catalog.keep(site, job_id, "the same script")
    catalog.keep(site, 4, "another")
    assert catalog.found(site, "same") == [3, 2, 1]
    months = list(catalog.directory_of(site).glob("g*/2026-11.db"))
    assert len(months) == 1


def test_lines_show_where_the_terms_stand(site: Site) -> None:
    text = "#!/bin/sh\n" + "x" * 500 + "needle" + "y" * 500 + "\nno\nneedle and Needle\nneedle\n"
    catalog.keep(site, 1, text)
    matcher = TermMatcher(["needle"])
    hit = (
        catalog.searcher_of(site)
        .find_page(matcher, UseFilter(), catalog.anybody, limit=5, lines=2)
        .hits[0]
    )
    assert [line.number for line in hit.lines] == [2, 4]
    assert hit.more_lines == 1
    for line in hit.lines:
        assert len(line.text) <= 200
        assert line.spans
        for first, last in line.spans:
            assert line.text[first:last].lower() == "needle"
    assert len(hit.lines[1].spans) == 2


def test_nothing_of_others_is_told(site: Site) -> None:
    catalog.keep(site, 1, "secret plan", uid=1001, user="ada")
    catalog.keep(site, 2, "secret plan", uid=1002, user="bela")
    unknown = catalog.script(site, 3, b"secret plan")
    site.feed(unknown)
    matcher = TermMatcher(["secret"])
    bela = UseFilter(owner=OwnerFilter(1002, "bela"))
    page = catalog.searcher_of(site).find_page(matcher, bela, catalog.anybody, limit=10)
    assert [hit.use.job_id for hit in page.hits] == [2]
    assert catalog.searcher_of(site).count(matcher, bela, catalog.anybody) == 1
    # A former user's uid, given to another user, opens nothing.
    other = UseFilter(owner=OwnerFilter(1002, "cora"))
    assert catalog.searcher_of(site).count(matcher, other, catalog.anybody) == 0
    nobody = UseFilter(owner=OwnerFilter(None, ""))
    assert catalog.searcher_of(site).count(matcher, nobody, catalog.anybody) == 0
    by_account = UseFilter(owner=OwnerFilter(9, "dora", ("physics",)))
    assert catalog.searcher_of(site).count(matcher, by_account, catalog.anybody) == 2

    def only_ada(use: ScriptUse) -> bool:
        return use.uid == 1001

    assert catalog.searcher_of(site).count(matcher, UseFilter(), only_ada) == 1


def test_filters_restrict(site: Site) -> None:
    for job_id, cluster, name in ((1, "one", "md-run"), (2, "two", "md-run"), (3, "one", "other")):
        script = catalog.script(
            site, job_id, b"text", NOVEMBER + timedelta(days=job_id), cluster, name
        )
        site.feed(script, catalog.identity(script, 1000 + job_id, f"user{job_id}", f"acc{job_id}"))

    def found(wanted: UseFilter) -> list[int]:
        page = catalog.searcher_of(site).find_page(
            TermMatcher(["text"]), wanted, catalog.anybody, limit=10
        )
        return [hit.use.job_id for hit in page.hits]

    assert found(UseFilter()) == [3, 2, 1]
    assert found(UseFilter(clusters=("one",))) == [3, 1]
    assert found(UseFilter(users=("user1",), uids=(1002,))) == [2, 1]
    assert found(UseFilter(accounts=("acc3",))) == [3]
    assert found(UseFilter(names=("md-*",))) == [2, 1]
    assert found(UseFilter(names=("[!m]*",))) == [3]
    assert found(UseFilter(since=NOVEMBER + timedelta(days=2))) == [3, 2]
    assert found(UseFilter(until=NOVEMBER + timedelta(days=2))) == [1]
    assert found(UseFilter(keys=frozenset())) == []
    many = tuple(str(number) for number in range(40_000))
    assert found(UseFilter(names=("md-*", *many[:2000]))) == [2, 1]
    assert found(UseFilter(users=("user1", *many), uids=(1002, *range(40_000, 80_000)))) == [2, 1]
    assert found(UseFilter(clusters=("one", *many), accounts=("acc3", *many))) == [3]
    owner = OwnerFilter(9, "dora", ("acc3", *many))
    assert found(UseFilter(owner=owner)) == [3]


@pytest.mark.parametrize("few", [0, 10**6])
def test_pages_follow_each_other_without_gap_or_repeat(site: Site, few: int) -> None:
    searching(site, few_scripts=few)
    for job_id in range(1, 41):
        # Four at each moment, over two months, every fifth without a hit.
        at = NOVEMBER - timedelta(days=job_id // 4)
        text = "blank" if job_id % 5 == 0 else f"word {job_id % 7}"
        site.feed(catalog.script(site, job_id, text.encode(), at))
    matcher, searcher = TermMatcher(["word"]), catalog.searcher_of(site)
    whole = searcher.find_page(matcher, UseFilter(), catalog.anybody, limit=100)
    assert whole.after is None
    assert len(whole.hits) == 32
    places = [hit.use.position for hit in whole.hits]
    assert places == sorted(places, reverse=True)
    parts: list[UsePosition] = []
    after: UsePosition | None = None
    while True:
        page = searcher.find_page(matcher, UseFilter(), catalog.anybody, limit=3, after=after)
        parts += [hit.use.position for hit in page.hits]
        after = page.after
        if after is None:
            break
        assert len(page.hits) == 3
    assert parts == places


def test_when_the_time_is_over_the_next_page_goes_on(site: Site) -> None:
    for job_id in range(1, 6):
        catalog.keep(site, job_id, f"word {job_id}")
    matcher, searcher = TermMatcher(["word"]), catalog.searcher_of(site)
    found: list[int] = []
    after: UsePosition | None = None
    for _ in range(7):
        page = searcher.find_page(
            matcher, UseFilter(), catalog.anybody, limit=9, after=after, timeout_s=0.0
        )
        found += [hit.use.job_id for hit in page.hits]
        after = page.after
        if after is None:
            break
        assert not page.complete
    assert found == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("terms", [[], [""], ["x" * 1001], ["x"] * 21])
def test_what_cannot_be_searched_for_is_refused(terms: list[str]) -> None:
    with pytest.raises(SearchError):
        TermMatcher(terms)


# Few letters, so that terms do occur; some fold to two letters, or to none of their own case.
LETTERS = st.sampled_from("abAB /\n\"'*é\0ßİ\u03c3\u03c2\u03a3\U0001f600-")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    scripts=st.lists(st.text(LETTERS, max_size=12), min_size=1, max_size=8),
    terms=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=2),
    case=st.booleans(),
    look_first=st.integers(1, 3),
)
def test_the_index_misses_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    scripts: list[str],
    terms: list[str],
    case: bool,
    look_first: int,
) -> None:
    site = catalog.make_site(tmp_path_factory.mktemp("site"))
    site.feed(
        *[
            catalog.script(site, job_id, text.encode(), NOVEMBER + timedelta(seconds=job_id))
            for job_id, text in enumerate(scripts, start=1)
        ]
    )

    def holds(text: str, term: str) -> bool:
        return term in text if case else term.casefold() in text.casefold()

    expected = [
        job_id
        for job_id, text in enumerate(scripts, start=1)
        if all(holds(text, term) for term in terms)
    ]
    searching(site, look_first=look_first)
    assert catalog.found(site, *terms, case=case) == expected[::-1]
    catalog.searcher_of(site).close()
    catalog.catalog_of(site).close()


@given(text=st.text(max_size=300), term=st.text(min_size=1, max_size=3), limit=st.integers(0, 5))
def test_lines_of_any_text_stay_inside_it(text: str, term: str, limit: int) -> None:
    lines, more = TermMatcher([term]).find_lines(text, limit)
    assert len(lines) <= limit
    assert more == 0 or len(lines) == limit
    for line in lines:
        assert 1 <= line.number <= text.count("\n") + 1
        for first, last in line.spans:
            assert 0 <= first <= last <= len(line.text)
