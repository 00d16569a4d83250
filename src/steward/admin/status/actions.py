"""Actions status.show and status.metrics: their declarations for the registry.

Their context is a :class:`steward.admin.status.summary.StatusContext`.
"""

from typing import Final

from steward.admin.status.metrics import show_metrics
from steward.admin.status.requests import (
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.admin.status.summary import show_status
from steward.core.actions import Action

ACTIONS: Final = (
    Action(
        name="status.show",
        help="How Steward itself stands.",
        request=StatusShowRequest,
        answer=StatusShowAnswer,
        run=show_status,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="status.metrics",
        help="Figures for Prometheus.",
        request=MetricsRequest,
        answer=MetricsAnswer,
        run=show_metrics,
        only_reads=True,
        role="operator",
    ),
)
