"""Web pages: one module for each topic, each with its handlers in ``ROUTES``."""

from typing import Any, Final

from steward.web.pages import (
    accounts,
    comparison,
    events,
    home,
    job,
    jobs,
    login,
    nodes,
    reports,
    rules,
    status,
    users,
)
from steward.web.pages.accounts import ACCOUNT_ROUTES
from steward.web.pages.nodes import CHANGE_ROUTES, CLUSTER_ROUTES

ROUTES: Final[tuple[Any, ...]] = (
    *home.ROUTES,
    *login.ROUTES,
    *jobs.ROUTES,
    *job.ROUTES,
    *comparison.ROUTES,
    *accounts.ROUTES,
    *ACCOUNT_ROUTES,
    *CLUSTER_ROUTES,
    *CHANGE_ROUTES,
    *nodes.ROUTES,
    *events.ROUTES,
    *rules.ROUTES,
    *status.ROUTES,
    *reports.ROUTES,
    *users.ROUTES,
)
"""Handlers of all pages."""
