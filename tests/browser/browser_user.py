"""Real Chromium that opens Steward's pages as a user of the cluster."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from web_site import WebSite

AXE: Final = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
_CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS: Final = (
    # A browser of root has no sandbox, and should make no requests of its own.
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_BEGUN_MS: Final = 250
_PATIENCE_MS: Final = 30_000
_SERIOUS: Final = ("serious", "critical")
_NOT_DONE: Final = (400, 403, 404)
COLOURS: Final = ("light", "dark")
"""Colour schemes that a browser may request."""


class Trouble(msgspec.Struct, frozen=True):
    """Warning or error that the browser reported about a page.

    Attributes:
        where: Address of the page.
        what: Text of the report.
    """

    where: str
    what: str


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser."""
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    assert found, "there is no Chromium: scripts/setup.sh browser installs it"
    # Waits for elements last as long as waits for clicks.
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


class Person:
    """User with a separate browser window.

    Args:
        browser: The browser.
        site: Site of the pages.
        user: Name of the user, who logs in by a link.
        options: Options of the window: ``color_scheme``, ``viewport``, ``java_script_enabled``.
    """

    def __init__(self, browser: Browser, site: WebSite, user: str, **options: Any) -> None:
        self.site = site
        self.user = user
        self.troubles: list[Trouble] = []
        self.bytes = 0
        self._context = browser.new_context(base_url=site.url, **options)
        self._context.set_default_timeout(_PATIENCE_MS)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self._say(f"error: {error}"))
        self.page.on("request", self._asked)
        self.page.goto(site.link(user))
        self.page.get_by_role("button", name=f"Continue as {user}").click()
        self.page.get_by_role("button", name="Log out").wait_for()

    def close(self) -> None:
        """Close the window."""
        self._context.close()

    def open(self, path: str) -> int:
        """Open a page, and wait until everything is loaded; return its status."""
        answer = self.page.goto(path, wait_until="load")
        assert answer is not None
        # Parts that take a while come after the page; they are asked for when it is there.
        self.page.wait_for_timeout(_BEGUN_MS)
        self.page.wait_for_function("() => !document.querySelector('.htmx-request')")
        return answer.status

    def hindrances(self) -> list[str]:
        """Return the serious findings of axe-core on the open page."""
        # Playwright evaluates it as the debugger does, which the page's policy is not about.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in _SERIOUS
        ]

    def assert_no_hindrance(self, paths: Iterable[str]) -> None:
        """Check that each page exists with one heading, without findings of axe-core or browser."""
        found: dict[str, list[str]] = {}
        for path in paths:
            assert self.open(path) == 200, path
            assert self.page.locator("h1").count() == 1, path
            found[path] = self.hindrances()
        assert {path: hindrances for path, hindrances in found.items() if hindrances} == {}
        assert self.troubles == []

    def send_by_hand(self, forms: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Send forms that no page offers, with the CSRF token of a page: each is rejected.

        Args:
            forms: Address and fields of each form.
        """
        self.open("/")
        csrf = self.page.locator("input[name=csrf]").first.input_value()
        for path, fields in forms:
            form: dict[str, str | float | bool] = {"csrf": csrf, **fields}
            answer = self.page.request.post(path, form=form, max_redirects=0)
            assert answer.status in _NOT_DONE, (path, answer.status)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._say(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.site.url, "data:", "blob:")):
            self._say(f"asks {request.url}")

    def _say(self, what: str) -> None:
        self.troubles.append(Trouble(self.page.url.removeprefix(self.site.url), what))
