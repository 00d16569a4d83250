"""The first page, and what says that the process lives."""

from typing import Any, Final

from litestar import Response, get

from steward.web.rendering import Renderer
from steward.web.visit import Visit


@get("/", include_in_schema=False)
async def home(visit: Visit, pages: Renderer) -> Response[Any]:
    """Where everything begins."""
    return pages.page("home.html", visit)


@get("/healthz", include_in_schema=False, sync_to_thread=False, media_type="text/plain")
def healthz() -> str:
    """That this process answers; of the daemon it says nothing."""
    return "ok\n"


ROUTES: Final = (home, healthz)
