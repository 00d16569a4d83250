"""Home page: own jobs and balances, clusters, problems; and the health check ``/healthz``."""

import asyncio
import logging
from typing import Any, Final

from litestar import Response, get

from steward.accounting.job_list_requests import JobsAnswer, JobsRequest
from steward.admin.status.requests import StatusShowAnswer, StatusShowRequest
from steward.bank.actions.reports import BalanceReply, BalanceRequest
from steward.core.errors import StewardError, UnknownCredential
from steward.reports.history.requests import NodeCountsReply, NodeCountsRequest
from steward.web.authentication import AuthenticatedRequest
from steward.web.daemon_client import DaemonUnavailable, ServerBusy
from steward.web.node_map import StateCount, count_states
from steward.web.pages.status import list_problems
from steward.web.renderer import Renderer
from steward.web.settings import HEALTH_PATH, HEALTHY_BODY

log = logging.getLogger(__name__)

_MOST_JOBS: Final = 10
"""Most jobs shown."""
_MOST_ACCOUNTS: Final = 8
"""Most accounts shown."""


@get("/", include_in_schema=False)
async def home(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the user's jobs and balances, the clusters, and problems for operators."""
    visible_clusters = [role.cluster for role in auth.me.clusters if role.sees_nodes]
    is_operator = bool(auth.me.clusters) and all(role.operator for role in auth.me.clusters)
    jobs: JobsAnswer | None
    balance: BalanceReply | None
    status: StatusShowAnswer | None
    nodes: NodeCountsReply | None
    jobs, balance, nodes, status = await asyncio.gather(
        _ask_optional(
            auth,
            "accounting.jobs",
            JobsRequest(users=(auth.user,), states=("RUNNING", "PENDING"), limit=_MOST_JOBS),
            is_needed=bool(auth.user),
        ),
        _ask_optional(auth, "bank.balance", BalanceRequest(), is_needed=auth.me.bank),
        _ask_optional(
            auth, "history.node_counts", NodeCountsRequest(), is_needed=bool(visible_clusters)
        ),
        _ask_optional(auth, "status.show", StatusShowRequest(gaps=False), is_needed=is_operator),
    )
    return pages.render_page(
        "home.html",
        auth,
        jobs=jobs,
        balance=balance,
        accounts=balance.accounts[:_MOST_ACCOUNTS] if balance else (),
        more=len(balance.accounts) - _MOST_ACCOUNTS if balance else 0,
        clusters=[(name, _count_cluster_nodes(nodes, name)) for name in visible_clusters],
        silent_since=nodes.silent_since if nodes else {},
        is_operator=is_operator,
        status_reply=status,
        problems=list_problems(status) if status else (),
    )


def _count_cluster_nodes(reply: NodeCountsReply | None, cluster: str) -> list[StateCount]:
    """Count the nodes of one cluster by state."""
    counts = reply.counts if reply else ()
    return count_states((count.state, count.nodes) for count in counts if count.cluster == cluster)


async def _ask_optional(
    auth: AuthenticatedRequest, name: str, request: Any, *, is_needed: bool
) -> Any:
    """Return a reply, or None on failure: that part of the page says so, others still appear."""
    if not is_needed:
        return None
    try:
        return await auth.call_action(name, request)
    except (UnknownCredential, DaemonUnavailable, ServerBusy):
        # These errors affect every part of the page.
        raise
    except StewardError as error:
        log.warning("home page of %s omits a part: action %s failed: %s", auth.user, name, error)
        return None


@get(HEALTH_PATH, include_in_schema=False, sync_to_thread=False, media_type="text/plain")
def healthz() -> str:
    """Report that this process answers; independent of the daemon."""
    return HEALTHY_BODY.decode()


ROUTES: Final = (home, healthz)
