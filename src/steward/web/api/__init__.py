"""The API below /api/v1: a table of endpoints, each an action of the registry."""

from typing import Any, Final

from steward.web.api.routing import routes

ROUTES: Final[tuple[Any, ...]] = routes()
"""Every path of the API."""
