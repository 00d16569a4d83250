"""Documentation site in a real browser: its search, and the files that its pages load."""

import base64
import functools
import hashlib
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from browser_user import chromium
from playwright.sync_api import Page, expect
from site_questions import QUESTIONS

from packages.wheels import SITE, locked, locked_set

ROOT: Final = Path(__file__).parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
FEWEST: Final = 54
"""Number of questions, of sixty, whose page must be among the first three results."""
FIRST: Final = 3
_INLINE: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_BUILD_S: Final = 300


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the built site."""
    directory = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", directory],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def policy(site: Path) -> str:
    """Return a Content-Security-Policy without other hosts, with the hashes of inline scripts."""
    scripts = {one for page in site.rglob("*.html") for one in _INLINE.findall(page.read_text())}
    digests = (hashlib.sha256(one.encode()).digest() for one in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; worker-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@pytest.fixture(scope="module")
def address(site: Path, policy: str) -> Iterator[str]:
    """Return the base URL of the site."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", policy)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """Open a window on the start page; check afterwards that nothing was blocked or foreign."""
    problems: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                problems.append(request.url)
                if not request.url.startswith((address, "data:"))
                else None
            ),
        )
        page.goto(f"{address}index.html")
        yield page
    assert problems == []


def search(page: Page, address: str, question: str) -> list[str]:
    """Type a question into the search box; return the names of the pages found, best first."""
    box = page.locator("input.md-search__input")
    status = page.locator(".md-search-result__meta")
    # The site searches at each key. Press the last key separately, so that the results are those of
    # the whole question.
    box.fill("")
    box.press("End")
    expect(status).to_have_text("Type to start searching")
    box.fill(question)
    box.press("End")
    expect(status).to_contain_text("matching document")
    # Each item is a page, with its sections below it.
    links = page.locator("li.md-search-result__item > a:first-child")
    hrefs = [str(link.get_attribute("href")) for link in links.all()[:FIRST]]
    return [re.sub(r"\.html.*", "", href.removeprefix(address)) for href in hrefs]


def test_search_finds_the_pages_that_answer_questions(page: Page, address: str) -> None:
    questions = {text: pages for asked in QUESTIONS.values() for text, pages in asked.items()}
    assert len(questions) == 60
    page.locator("input.md-search__input").focus()
    missed = {}
    for question, pages in questions.items():
        found = search(page, address, question)
        if not set(found) & set(pages):
            missed[question] = found
    assert len(questions) - len(missed) >= FEWEST, missed


def test_the_sites_lock_has_its_packages() -> None:
    # Beside its own packages, those that other systems would need.
    assert {name for name, _ in locked(SITE)} == locked_set(SITE) | {"colorama", "tzdata"}
