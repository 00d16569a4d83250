"""Home page: own jobs and balances, clusters, problems; and the health check ``/healthz``."""

import asyncio
import logging
from typing import Any, Final

from litestar import Response, get

from steward.accounting.job_list_requests import JobsAnswer, JobsRequest
from steward.admin.credentials.errors import NotKnown
from steward.admin.status.requests import StatusShowAnswer, StatusShowRequest
from steward.bank.actions.reports import BalanceAnswer, BalanceRequest
from steward.core.errors import StewardError
from steward.reports.history.requests import NodeCountsAnswer, NodeCountsRequest
from steward.web.authentication import Visit
from steward.web.daemon_client import Crowded, DaemonAway
from steward.web.node_map import Count, counted
from steward.web.pages.status import troubles
from steward.web.rendering import Renderer
from steward.web.settings import HEALTH, HEALTHY

log = logging.getLogger(__name__)

_JOBS: Final = 10
"""Most jobs shown."""
_ACCOUNTS: Final = 8
"""Most accounts shown."""


@get("/", include_in_schema=False)
async def home(visit: Visit, pages: Renderer) -> Response[Any]:
    """Show the user's jobs and balances, the clusters, and problems for operators."""
    sees = [role.cluster for role in visit.me.clusters if role.sees_nodes]
    is_caretaker = bool(visit.me.clusters) and all(role.operator for role in visit.me.clusters)
    jobs: JobsAnswer | None
    balance: BalanceAnswer | None
    status: StatusShowAnswer | None
    nodes: NodeCountsAnswer | None
    jobs, balance, nodes, status = await asyncio.gather(
        _asked(
            visit,
            "accounting.jobs",
            JobsRequest(users=(visit.user,), states=("RUNNING", "PENDING"), limit=_JOBS),
            wanted=bool(visit.user),
        ),
        _asked(visit, "bank.balance", BalanceRequest(), wanted=visit.me.bank),
        _asked(visit, "history.node_counts", NodeCountsRequest(), wanted=bool(sees)),
        _asked(visit, "status.show", StatusShowRequest(gaps=False), wanted=is_caretaker),
    )
    return pages.page(
        "home.html",
        visit,
        jobs=jobs,
        balance=balance,
        accounts=balance.accounts[:_ACCOUNTS] if balance else (),
        more=len(balance.accounts) - _ACCOUNTS if balance else 0,
        clusters=[(name, _counted(nodes, name)) for name in sees],
        silent_since=nodes.silent_since if nodes else {},
        zones={role.cluster: role.zone for role in visit.me.clusters},
        is_caretaker=is_caretaker,
        standing=status,
        troubles=troubles(status) if status else (),
    )


def _counted(answer: NodeCountsAnswer | None, cluster: str) -> list[Count]:
    """Count the nodes of one cluster by state."""
    told = answer.counts if answer else ()
    return counted((one.state, one.nodes) for one in told if one.cluster == cluster)


async def _asked(visit: Visit, name: str, request: Any, *, wanted: bool) -> Any:
    """Return a reply, or None on failure: that part of the page says so, others still appear."""
    if not wanted:
        return None
    try:
        return await visit.ask(name, request)
    except (NotKnown, DaemonAway, Crowded):
        # These errors affect every part of the page.
        raise
    except StewardError as error:
        log.warning("the first page of %s is without %s: %s", visit.user, name, error)
        return None


@get(HEALTH, include_in_schema=False, sync_to_thread=False, media_type="text/plain")
def healthz() -> str:
    """Report that this process answers; independent of the daemon."""
    return HEALTHY.decode()


ROUTES: Final = (home, healthz)
