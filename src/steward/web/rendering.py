"""Turns templates into answers, with what every page has: who is logged in, links, headers."""

import functools
import hashlib
import os
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from litestar import Response

from steward import __version__
from steward.web.authentication import Visit
from steward.web.formats import FILTERS

HERE: Final = os.path.dirname(__file__)
STATIC: Final = os.path.join(HERE, "static")
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "interest-cohort=()",
}
"""On every answer: nothing is loaded from elsewhere, no script stands in a page."""


class Renderer:
    """Renders pages.

    Args:
        prefix: The path that the pages lie under: ``/steward``; "" for none.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._jinja = jinja2.Environment(
            loader=jinja2.FileSystemLoader(os.path.join(HERE, "templates")),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._jinja.filters.update(FILTERS)
        self._jinja.globals.update(url=self.url, static=self.static, version=__version__)

    def url(self, path: str, /, **query: Any) -> str:
        """The address of a page.

        Args:
            path: ``/jobs``, with its parts quoted already, see :func:`part`.
            query: What stands behind the question mark; lists are repeated, and what is None
                or empty is left out.
        """
        pairs = [
            (name, str(one))
            for name, value in query.items()
            for one in (value if isinstance(value, (list, tuple, set, frozenset)) else (value,))
            if one is not None and one != ""
        ]
        return f"{self.prefix}{path}" + (f"?{urlencode(pairs)}" if pairs else "")

    def static(self, name: str) -> str:
        """The address of a static file, another one for each content."""
        return f"{self.prefix}/static/{name}?v={_digest(name)}"

    def page(
        self,
        template: str,
        visit: Visit | None = None,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        **context: Any,
    ) -> Response[str]:
        """A page, or a part of one.

        Args:
            template: Its file in templates/.
            visit: Whose request it is for; None for nobody's.
            status: Of HTTP.
            headers: More of them.
            context: What the template shows.
        """
        return Response(
            self.text(template, visit, **context),
            status_code=status,
            media_type="text/html",
            headers={"Cache-Control": "no-store", "Vary": "HX-Request", **(headers or {})},
        )

    def either(self, template: str, visit: Visit, **context: Any) -> Response[str]:
        """What is a part of another page where htmx asks for it, and a page for everybody else.

        Args:
            template: The page's, which includes the part's: ``_job_cost.html`` lies beside
                ``job_cost.html``.
            visit: Whose request it is for.
            context: What both show.
        """
        return self.page(f"_{template}" if visit.is_part else template, visit, **context)

    def text(self, template: str, visit: Visit | None = None, **context: Any) -> str:
        """What a template says; see :meth:`page`."""
        return self._jinja.get_template(template).render(visit=visit, part=part, **context)

    def redirect(self, path: str, visit: Visit | None = None, /, **query: Any) -> Response[None]:
        """Send the browser to another page, after something was done."""
        where = self.url(path, **query)
        if visit is not None and visit.is_part:
            return Response(None, status_code=204, headers={"HX-Redirect": where})
        return Response(None, status_code=303, headers={"Location": where})


def part(text: object) -> str:
    """A text as one part of a path: job names and accounts hold anything."""
    return quote(str(text), safe="")


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """What a plot shows; ``static/plots.js`` draws it, and a table beside it says the same.

    Attributes:
        title: What it is, for those who do not see it, too.
        x: What stands below: seconds since 1970 where ``is_time``, or numbers.
        series: A name and its values, one for each of ``x``; None where there is none.
        unit: Of the values: "", ``%``, ``bytes``, ``s``, ``SU``.
        is_time: Whether ``x`` are times.
        zone: IANA name of the zone of those times.
        bars: Whether it is drawn as bars.
    """

    title: str
    x: list[float]
    series: list[tuple[str, list[float | None]]]
    unit: str = ""
    is_time: bool = True
    zone: str = ""
    bars: bool = False

    @property
    def json(self) -> str:
        """As its element's attribute holds it."""
        return msgspec.json.encode(self).decode()


@functools.lru_cache(maxsize=64)
def _digest(name: str) -> str:
    try:
        with open(os.path.join(STATIC, name), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except FileNotFoundError:
        return __version__
