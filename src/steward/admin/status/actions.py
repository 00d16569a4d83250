"""Actions status.show and status.metrics: their declarations for the registry.

Their context is a :class:`steward.admin.status.summary.StatusRoom`.
"""

from typing import Final

from steward.admin.status.metrics import metrics
from steward.admin.status.requests import (
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.admin.status.summary import show
from steward.core.actions import Action

ACTIONS: Final = (
    Action(
        name="status.show",
        help="How Steward itself stands.",
        request=StatusShowRequest,
        answer=StatusShowAnswer,
        run=show,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="status.metrics",
        help="Figures for Prometheus.",
        request=MetricsRequest,
        answer=MetricsAnswer,
        run=metrics,
        only_reads=True,
        role="operator",
    ),
)
