"""Memory of the archive's commands: it does not grow with the number of scripts."""

import os
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.site import ROOT, Site
from steward.archive.catalog import rebuild
from steward.archive.files import tree
from steward.archive.files.verify import verify_sink
from steward.cli import commands, output
from steward.cli.archive import print_stream
from steward.cli.output import Style
from steward.client.places import ClientPlace
from steward.daemon.registry import get_action

FEW, MANY = 500, 2500
"""Numbers of scripts, all of one user and day: a single directory, and one manifest."""
GROWTH = 150_000
"""Bytes that a command may need more for many scripts: 60 for each, less than its file's name."""
STYLES = {
    "table": Style(),
    "parsable": Style(parsable=True),
    "csv": Style(csv=True),
    "json": Style(json=True),
}


@pytest.fixture(scope="module", params=["default", "job_archive"])
def sites(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[int, Site]]:
    """An archive with few and one with many scripts, with manifests and without."""
    sites = {}
    for count in (FEW, MANY):
        directory = tmp_path_factory.mktemp(str(count))
        site = sites[count] = archive.make_library(directory, layout=request.param)
        for first in range(1, count + 1, 250):
            scripts = [archive.script(site, number) for number in range(first, first + 250)]
            site.feed(*scripts, *map(archive.identity, scripts))
            archive.trim(site)
    yield sites
    for site in sites.values():
        site.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree, "MAX_NAMES_IN_MEMORY", 100)
    monkeypatch.setattr(rebuild, "COMMIT_EVERY", 100)
    monkeypatch.setattr(commands, "PAGE_ROWS", 100)
    monkeypatch.setattr(output, "BLOCK_ROWS", 100)
    with open(os.devnull, "w", encoding="utf-8") as null:
        monkeypatch.setattr("sys.stdout", null)
        yield


def measure_peak(work: Callable[[], object]) -> int:
    """Return the largest memory that Python's objects took meanwhile, in bytes."""
    work()  # imports, and caches of a fixed size
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_growth(sites: dict[int, Site], work: Callable[[Site], object]) -> None:
    few, many = (measure_peak(partial(work, sites[count])) for count in (FEW, MANY))
    assert many < few + GROWTH, (few, many)


def test_verification_needs_no_list_of_files(sites: dict[int, Site]) -> None:
    def verify(site: Site) -> None:
        assert sum(1 for _ in verify_sink(site.settings, "files")) == 0

    check_growth(sites, verify)


def test_a_rebuild_needs_no_list_of_scripts(sites: dict[int, Site]) -> None:
    def rebuild_catalog(site: Site) -> None:
        for item in site.ask("archive.reindex", ROOT):
            last = item
        assert last.scripts == (MANY if site is sites[MANY] else FEW)

    check_growth(sites, rebuild_catalog)


@pytest.mark.parametrize("style", STYLES)
def test_a_list_is_printed_page_by_page(
    sites: dict[int, Site], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = get_action("archive.list")

    def list_jobs(site: Site) -> None:
        def call(_: ClientPlace, action: Any, request: object) -> object:
            return site.registry.call(action.name, ROOT, request)

        monkeypatch.setattr(commands, "call_action", call)
        request = action.request(since="2020-01-01")
        pages = commands.ReplyPages(ClientPlace(), action, request, 0)
        commands.print_pages(action, pages, STYLES[style], None)
        assert pages.count == (MANY if site is sites[MANY] else FEW)

    check_growth(sites, list_jobs)


@pytest.mark.parametrize("style", STYLES)
def test_problems_are_printed_as_they_come(
    sites: dict[int, Site], style: str, tmp_path: Path
) -> None:
    action = get_action("archive.verify")

    def print_problems(site: Site) -> None:
        root = archive.root_of(site)
        kept = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."]
        for path in kept:
            path.rename(tmp_path / path.name)
        try:
            items = site.ask("archive.verify", ROOT)
            reply = print_stream(items, STYLES[style], action)
        finally:
            for path in kept:
                (tmp_path / path.name).rename(path)
        assert reply.exit_code == 1

    check_growth(sites, print_problems)
