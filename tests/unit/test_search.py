"""Search: hits are exact, complete, in order, and nobody else's."""

from datetime import timedelta
from pathlib import Path

import pytest
from catalogue_site import NOON, Site, anybody
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steward.archive.catalog.matching import Matcher, SearchError
from steward.archive.catalog.month import Use
from steward.archive.catalog.search import Searcher
from steward.archive.catalog.walking import Owner, Place, SearchThresholds, Wanted


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def searching(site: Site, **thresholds: int) -> None:
    """Have the site search with other thresholds."""
    site.searcher = Searcher(str(site.directory), thresholds=SearchThresholds(**thresholds))


def test_words_paths_and_modules_are_found_in_any_case_and_newest_first(site: Site) -> None:
    site.keep(1, "#!/bin/sh\nmodule load GROMACS/2023\n/opt/apps/gromacs/bin/gmx mdrun\n")
    site.keep(2, "#!/bin/sh\nmodule load GROMACS/2024\n")
    site.keep(3, "#!/bin/sh\nsleep 1\n")
    assert site.found("gromacs") == [2, 1]
    assert site.found("module load gromacs/2023") == [1]
    assert site.found("/opt/apps/GROMACS") == [1]
    assert site.found("/bin/sh") == [3, 2, 1]
    assert site.found("gromacs/2025") == []


def test_all_terms_must_stand_in_the_script(site: Site) -> None:
    site.keep(1, "srun alpha\nsrun beta\n")
    site.keep(2, "srun alpha\n")
    assert site.found("alpha", "beta") == [1]
    assert site.found("beta", "al") == [1]


def test_the_groups_alone_are_no_hit(site: Site) -> None:
    # All groups of three of "abcde" stand here, but not the text.
    site.keep(1, "abc bcd cde")
    assert site.found("abcde") == []
    assert site.found("abc", "cde") == [1]


def test_case_and_whole_words_can_be_asked_for(site: Site) -> None:
    site.keep(1, "module load R\n")
    site.keep(2, "module load ruby\n")
    assert site.found("load r") == [2, 1]
    assert site.found("load R", case=True) == [1]
    assert site.found("load r", words=True) == [1]


@pytest.mark.parametrize(
    "term", ["é", "qz", "§", "ab", "a", "\n", "z\n", "%_", '"', "'", "*", "''"]
)
def test_short_and_odd_terms_are_found(site: Site, term: str) -> None:
    site.keep(1, f"one {term} two")
    site.keep(2, "xyxyxy")
    site.keep(3, f"at the end {term}")
    assert site.found(term) == [3, 1]


def test_a_short_term_is_found_beyond_the_newest_uses(site: Site) -> None:
    searching(site, look_first=5, groups_at_once=2)
    for job_id in range(10, 30):
        site.keep(job_id, f"nothing here but {job_id}")
    for job_id in range(1, 6):
        site.keep(job_id, f"qz{job_id} QZ qz {job_id}qz")
    assert site.found("qz") == [5, 4, 3, 2, 1]
    assert site.found("z") == [5, 4, 3, 2, 1]


def test_bytes_that_are_no_text_are_found_around(site: Site) -> None:
    site.keep(1, b"caf\xe9 before\0after \xff\xfe gromacs")
    assert site.found("gromacs") == [1]
    assert site.found("after") == [1]
    assert site.found("before after") == []
    assert site.found("before\0after") == [1]
    assert site.found("caf\udce9 be") == [1]


def test_a_script_of_many_jobs_is_indexed_once_and_found_for_each(site: Site) -> None:
    for job_id in (1, 2, 3):
        site.keep(job_id, "the same script")
    site.keep(4, "another")
    assert site.found("same") == [3, 2, 1]
    months = list(site.directory.glob("g*/2026-11.db"))
    assert len(months) == 1


def test_lines_show_where_the_terms_stand(site: Site) -> None:
    text = "#!/bin/sh\n" + "x" * 500 + "needle" + "y" * 500 + "\nno\nneedle and Needle\nneedle\n"
    site.keep(1, text)
    matcher = Matcher(["needle"])
    hit = site.searcher.page(matcher, Wanted(), anybody, limit=5, lines=2).hits[0]
    assert [line.number for line in hit.lines] == [2, 4]
    assert hit.more_lines == 1
    for line in hit.lines:
        assert len(line.text) <= 200
        assert line.spans
        for first, last in line.spans:
            assert line.text[first:last].lower() == "needle"
    assert len(hit.lines[1].spans) == 2


def test_nothing_of_others_is_told(site: Site) -> None:
    site.keep(1, "secret plan", uid=1001, user="ada")
    site.keep(2, "secret plan", uid=1002, user="bela")
    unknown = site.script(3, b"secret plan")
    site.take(unknown)
    matcher = Matcher(["secret"])
    bela = Wanted(owner=Owner(1002, "bela"))
    page = site.searcher.page(matcher, bela, anybody, limit=10)
    assert [hit.use.job_id for hit in page.hits] == [2]
    assert site.searcher.count(matcher, bela, anybody) == 1
    # A former user's uid, given to somebody else, opens nothing.
    other = Wanted(owner=Owner(1002, "cora"))
    assert site.searcher.count(matcher, other, anybody) == 0
    nobody = Wanted(owner=Owner(None, ""))
    assert site.searcher.count(matcher, nobody, anybody) == 0
    by_account = Wanted(owner=Owner(9, "dora", ("physics",)))
    assert site.searcher.count(matcher, by_account, anybody) == 2

    def only_ada(use: Use) -> bool:
        return use.uid == 1001

    assert site.searcher.count(matcher, Wanted(), only_ada) == 1


def test_filters_restrict(site: Site) -> None:
    for job_id, cluster, name in ((1, "one", "md-run"), (2, "two", "md-run"), (3, "one", "other")):
        script = site.script(job_id, b"text", NOON + timedelta(days=job_id), cluster, name)
        site.take(script, site.identity(script, 1000 + job_id, f"user{job_id}", f"acc{job_id}"))

    def found(wanted: Wanted) -> list[int]:
        page = site.searcher.page(Matcher(["text"]), wanted, anybody, limit=10)
        return [hit.use.job_id for hit in page.hits]

    assert found(Wanted()) == [3, 2, 1]
    assert found(Wanted(clusters=("one",))) == [3, 1]
    assert found(Wanted(users=("user1",), uids=(1002,))) == [2, 1]
    assert found(Wanted(accounts=("acc3",))) == [3]
    assert found(Wanted(names=("md-*",))) == [2, 1]
    assert found(Wanted(names=("[!m]*",))) == [3]
    assert found(Wanted(since=NOON + timedelta(days=2))) == [3, 2]
    assert found(Wanted(until=NOON + timedelta(days=2))) == [1]
    assert found(Wanted(keys=frozenset())) == []
    many = tuple(str(number) for number in range(40_000))
    assert found(Wanted(names=("md-*", *many[:2000]))) == [2, 1]
    assert found(Wanted(users=("user1", *many), uids=(1002, *range(40_000, 80_000)))) == [2, 1]
    assert found(Wanted(clusters=("one", *many), accounts=("acc3", *many))) == [3]
    owner = Owner(9, "dora", ("acc3", *many))
    assert found(Wanted(owner=owner)) == [3]


@pytest.mark.parametrize("few", [0, 10**6])
def test_pages_follow_each_other_without_gap_or_repeat(site: Site, few: int) -> None:
    searching(site, few_scripts=few)
    for job_id in range(1, 41):
        # Four at each moment, over two months, every fifth without a hit.
        at = NOON - timedelta(days=job_id // 4)
        text = "blank" if job_id % 5 == 0 else f"word {job_id % 7}"
        site.take(site.script(job_id, text.encode(), at))
    matcher = Matcher(["word"])
    whole = site.searcher.page(matcher, Wanted(), anybody, limit=100)
    assert whole.after is None
    assert len(whole.hits) == 32
    places = [hit.use.place for hit in whole.hits]
    assert places == sorted(places, reverse=True)
    parts: list[Place] = []
    after: Place | None = None
    while True:
        page = site.searcher.page(matcher, Wanted(), anybody, limit=3, after=after)
        parts += [hit.use.place for hit in page.hits]
        after = page.after
        if after is None:
            break
        assert len(page.hits) == 3
    assert parts == places


def test_when_the_time_is_over_the_next_page_goes_on(site: Site) -> None:
    for job_id in range(1, 6):
        site.keep(job_id, f"word {job_id}")
    matcher = Matcher(["word"])
    found: list[int] = []
    after: Place | None = None
    for _ in range(7):
        page = site.searcher.page(matcher, Wanted(), anybody, limit=9, after=after, longest_s=0.0)
        found += [hit.use.job_id for hit in page.hits]
        after = page.after
        if after is None:
            break
        assert not page.complete
    assert found == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("terms", [[], [""], ["x" * 1001], ["x"] * 21])
def test_what_cannot_be_searched_for_is_refused(terms: list[str]) -> None:
    with pytest.raises(SearchError):
        Matcher(terms)


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
    site = Site(tmp_path_factory.mktemp("site"))
    site.take(
        *[
            site.script(job_id, text.encode(), NOON + timedelta(seconds=job_id))
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
    assert site.found(*terms, case=case) == expected[::-1]
    site.searcher.close()
    site.catalogue.close()


@given(text=st.text(max_size=300), term=st.text(min_size=1, max_size=3), limit=st.integers(0, 5))
def test_lines_of_any_text_stay_inside_it(text: str, term: str, limit: int) -> None:
    lines, more = Matcher([term]).lines(text, limit)
    assert len(lines) <= limit
    assert more == 0 or len(lines) == limit
    for line in lines:
        assert 1 <= line.number <= text.count("\n") + 1
        for first, last in line.spans:
            assert 0 <= first <= last <= len(line.text)
