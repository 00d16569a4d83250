"""The pages: one module a theme, each with its handlers in ``ROUTES``."""

from typing import Any, Final

from steward.web.pages import home, login

ROUTES: Final[tuple[Any, ...]] = (*home.ROUTES, *login.ROUTES)
"""Every page."""
