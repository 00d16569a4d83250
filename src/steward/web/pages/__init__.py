"""The pages: one module a theme, each with its handlers in ``ROUTES``."""

from typing import Any, Final

from steward.web.pages import (
    account,
    accounts,
    changing,
    cluster,
    comparing,
    events,
    home,
    job,
    jobs,
    login,
    nodes,
    reports,
    rules,
    steward,
    users,
)

ROUTES: Final[tuple[Any, ...]] = (
    *home.ROUTES,
    *login.ROUTES,
    *jobs.ROUTES,
    *job.ROUTES,
    *comparing.ROUTES,
    *accounts.ROUTES,
    *account.ROUTES,
    *cluster.ROUTES,
    *changing.ROUTES,
    *nodes.ROUTES,
    *events.ROUTES,
    *rules.ROUTES,
    *steward.ROUTES,
    *reports.ROUTES,
    *users.ROUTES,
)
"""Every page."""
