"""HTML responses from Jinja templates: renderer, links, security headers and plots.

:class:`Renderer` turns a template and its context into a response and builds addresses below the
path prefix. :class:`Plot` is the data of a chart that ``static/plots.js`` draws.
"""

import functools
import hashlib
import os
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from litestar import Response

from steward import __version__
from steward.core.actions import Answer
from steward.core.layouts import format_for_programs, write_csv
from steward.web.authentication import AuthenticatedRequest
from steward.web.formats import FILTERS

WEB_DIRECTORY: Final = os.path.dirname(__file__)
STATIC_DIRECTORY: Final = os.path.join(WEB_DIRECTORY, "static")
SECURITY_HEADERS: Final = {
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
"""Security headers of every response: no external resources, no inline scripts."""


class Renderer:
    """Renderer of Jinja templates.

    Args:
        prefix: Path prefix of all pages, such as ``/steward``; "" for none.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._jinja = jinja2.Environment(
            loader=jinja2.FileSystemLoader(os.path.join(WEB_DIRECTORY, "templates")),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._jinja.filters.update(FILTERS)
        self._jinja.globals.update(
            url=self.make_address, static=self.make_static_address, version=__version__
        )

    def make_address(self, path: str, /, **query: Any) -> str:
        """Return the address of a page.

        Args:
            path: Path such as ``/jobs``, with its parts already quoted, see
                :func:`quote_path_part`.
            query: Query parameters; lists are repeated, None and "" omitted.
        """
        pairs = [
            (name, str(item))
            for name, value in query.items()
            for item in (value if isinstance(value, (list, tuple, set, frozenset)) else (value,))
            if item is not None and item != ""
        ]
        return f"{self.prefix}{path}" + (f"?{urlencode(pairs)}" if pairs else "")

    def make_static_address(self, name: str) -> str:
        """Return the address of a static file, with a hash of its content for caching."""
        return f"{self.prefix}/static/{name}?v={_hash_file(name)}"

    def render_page(
        self,
        template: str,
        auth: AuthenticatedRequest | None = None,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        **context: Any,
    ) -> Response[str]:
        """Return a page, or a part of one, as an HTML response.

        Args:
            template: File name in templates/.
            auth: Authenticated request that it is for; None without a user.
            status: HTTP status.
            headers: Additional headers.
            context: Variables of the template.
        """
        return Response(
            self.render_text(template, auth, **context),
            status_code=status,
            media_type="text/html",
            headers={"Cache-Control": "no-store", "Vary": "HX-Request", **(headers or {})},
        )

    def render_page_or_part(
        self, template: str, auth: AuthenticatedRequest, **context: Any
    ) -> Response[str]:
        """Return the part of a page that htmx requests, or the full page for others.

        Args:
            template: Template of the page; that of the part has the same name with ``_`` in front:
                ``_job_cost.html`` for ``job_cost.html``.
            auth: Authenticated request that it is for.
            context: Variables of both templates.
        """
        return self.render_page(f"_{template}" if auth.is_part else template, auth, **context)

    def render_text(
        self, template: str, auth: AuthenticatedRequest | None = None, **context: Any
    ) -> str:
        """Render a template to text; see :meth:`render_page`."""
        return self._jinja.get_template(template).render(auth=auth, part=quote_path_part, **context)

    def make_redirect(
        self, path: str, auth: AuthenticatedRequest | None = None, /, **query: Any
    ) -> Response[None]:
        """Redirect the browser to another page after a change."""
        address = self.make_address(path, **query)
        if auth is not None and auth.is_part:
            return Response(None, status_code=204, headers={"HX-Redirect": address})
        return Response(None, status_code=303, headers={"Location": address})


def download_reply(
    reply: Answer, rows: Iterable[Any], file_stem: str, file_format: str
) -> Response[Any]:
    """Return a reply as a file: all columns of its rows as CSV, or the reply as JSON.

    Args:
        reply: The reply; its layout has the columns.
        rows: The rows.
        file_stem: Name of the file, without suffix.
        file_format: ``csv`` or ``json``.
    """
    headers = {"Content-Disposition": f'attachment; filename="{file_stem}.{file_format}"'}
    if file_format == "json":
        return Response(msgspec.json.encode(reply), media_type="application/json", headers=headers)
    columns = reply.layout
    cell_rows = ([format_for_programs(column, row, reply) for column in columns] for row in rows)
    text = write_csv(columns, cell_rows, header=True)
    return Response(text, media_type="text/csv", headers=headers)


def quote_path_part(text: object) -> str:
    """Quote a text as one part of a path: job and account names may hold any character."""
    return quote(str(text), safe="")


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a plot; ``static/plots.js`` draws it beside a table of the same values.

    Attributes:
        title: Title, also for screen readers.
        x: Horizontal axis: seconds since 1970 if ``is_time``, else numbers.
        series: Name and values, one for each of ``x``; None for a missing value.
        unit: Unit of the values: "", ``%``, ``bytes``, ``s``, ``SU``.
        is_time: Whether ``x`` holds times.
        zone: IANA zone of those times.
        bars: Whether to draw bars.
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
        """Return the plot as JSON, for an element's attribute."""
        return msgspec.json.encode(self).decode()


@functools.lru_cache(maxsize=64)
def _hash_file(name: str) -> str:
    """Return a hash of a static file; the version if the file is missing."""
    try:
        with open(os.path.join(STATIC_DIRECTORY, name), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except FileNotFoundError:
        return __version__
