"""The API below /api/v1: one module a theme, each with its handlers in ``ROUTES``."""

from typing import Any, Final

ROUTES: Final[tuple[Any, ...]] = ()
"""Every path of the API."""
