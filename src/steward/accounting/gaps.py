"""Accounting gaps (``steward accounting gaps``): missing or doubtful accounting data.

:func:`list_accounting_gaps` runs each check in ``_CHECKS`` on each cluster, plus the check for
silent nodes, and returns the findings by time. Each finding says what is unknown and, if possible,
why. Data that may still arrive are no gap: nodes report once a minute, and a worker that was down
catches up.
"""

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.errors import AccountingUsage
from steward.accounting.job_page.notes import format_duration
from steward.accounting.job_page.page import parse_us
from steward.capture.nodes.node_reports import NodeReportsReader
from steward.core.access import Caller
from steward.core.actions import ActionMessage, Answer, Request, Zone, action, option, route
from steward.core.errors import PermissionRefused, Unavailable
from steward.core.layouts import Column, Layout, format_count
from steward.core.records import UsageLine
from steward.jobs import StoredLaunch
from steward.jobs.filters import Clusters
from steward.slurm.times import TimeError, load_zone, parse_time

log = logging.getLogger(__name__)

_LATENESS: Final = timedelta(minutes=5)
"""Data younger than this may still arrive."""
_DEFAULT_DAYS: Final = 7
_US: Final = 1_000_000
_TOLERATED_CPU_S: Final = 1.0
"""Tolerated CPU time of a cgroup beyond its tasks', in seconds.

The session manager's own and that of Slurm's launch.
"""

Kind = Literal[
    "step-no-end",
    "step-doubtful",
    "step-unattributed",
    "node-silent",
    "node-gap",
    "run-no-steps",
    "run-lost",
    "job-unconfirmed",
    "script-missed",
    "orphan-cpu",
]

GAP_LABELS: Final[dict[Kind, str]] = {
    "step-no-end": "steps without an end",
    "step-doubtful": "steps with incomplete usage",
    "step-unattributed": "steps without a known run",
    "orphan-cpu": "steps with CPU time outside their tasks",
    "run-no-steps": "runs without a step",
    "run-lost": "runs without an end, which Slurm no longer shows",
    "job-unconfirmed": "scripts whose job Slurm never showed",
    "script-missed": "scripts that capture missed",
    "node-gap": "losses of records that nodes reported",
    "node-silent": "nodes that no longer report",
}
"""Name of each kind for people, in the plural."""

_MAX_SILENT_S: Final = 100 * 366 * 86400
"""Upper limit of ``silent_s``, in seconds: earlier times leave the calendar's range."""


class GapsRequest(Request, frozen=True, kw_only=True):
    """Request of accounting.gaps: missing or doubtful data in a period."""

    clusters: Clusters = ()
    since: Annotated[
        str,
        option(
            "Start of the period: now-1day, 2026-11-21T08:00.",
            *("--starttime", "--since", "-S"),
            metavar="TIME",
            default="seven days ago",
        ),
    ] = ""
    until: Annotated[
        str,
        option("End of the period.", "--endtime", "--until", "-E", metavar="TIME", default="now"),
    ] = ""
    zone: Zone = ""
    silent_s: Annotated[
        float,
        option(
            "Longest time between reports of a node before it counts as silent, in seconds.",
            "--silent",
            metavar="SECONDS",
            ge=1,
            le=_MAX_SILENT_S,
        ),
    ] = 900.0
    limit: Annotated[
        int,
        option("Maximum number of gaps.", "--limit", "-L", ge=1, le=10_000),
    ] = 1000


class Finding(ActionMessage, frozen=True, kw_only=True):
    """Missing or doubtful accounting data of one step, run, job or node.

    Attributes:
        kind: Kind of gap.
        cluster: Cluster name.
        at: Time it concerns.
        node: Node it concerns; "" for none, or for all nodes of a step.
        job: Job name as Slurm prints it; "" for none.
        step: Step; "" for none.
        user: Owner's name, or uid in digits; "" if unknown.
        cpu_s: CPU time in seconds that is not, or not surely, attributed; None for other kinds.
        lines: Number of lost reports; 0 if unknown.
        missing: Description for people.
    """

    kind: Kind
    cluster: str
    at: datetime
    node: str = ""
    job: str = ""
    step: str = ""
    user: str = ""
    cpu_s: float | None = None
    lines: int = 0
    missing: str = ""


class GapsAnswer(Answer, frozen=True, kw_only=True):
    """Reply of accounting.gaps: findings, oldest first.

    Attributes:
        findings: Findings up to the limit.
        more: Whether there are more.
        since: Start of the period.
        until: End of the period.
        zones: IANA time zone of each cluster; "" for the system's.
    """

    findings: tuple[Finding, ...]
    since: datetime
    until: datetime
    more: bool = False
    zones: dict[str, str] = msgspec.field(default_factory=dict)
    layout: ClassVar[Layout] = (
        Column("Time", "at", "time"),
        Column("Cluster", "cluster", show=lambda reply: len(reply.zones) > 1),
        Column("Kind", "kind"),
        Column("Node", "node", max_width=30),
        Column(
            "JobID", lambda row, _: f"{row.job}.{row.step}" if row.step else row.job, right=True
        ),
        Column("User", "user"),
        Column(
            "CPU",
            lambda row, _: "" if row.cpu_s is None else format_duration(row.cpu_s),
            right=True,
            exact=lambda row, _: "" if row.cpu_s is None else f"{row.cpu_s:.6f}",
        ),
        Column("Lines", lambda row, _: row.lines or None, "count"),
        Column("Missing", "missing"),
    )

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period of the findings."""
        return self.since, self.until

    @property
    def zone(self) -> str:
        """IANA time zone of the period: that of the first cluster."""
        return next(iter(self.zones.values()), "")

    @property
    def empty_reason(self) -> str:
        """Reason why there are no findings."""
        return "No gaps in this period."

    def list_warnings(self) -> Iterable[str]:
        """Return that there are more gaps than these."""
        if self.more:
            yield (
                f"there are more than {format_count(len(self.findings), 'finding')}: raise "
                "--limit, or narrow the period with -S and -E"
            )


class _Span(msgspec.Struct, frozen=True):
    """Period to check, and the maximum number of findings."""

    since: datetime
    until: datetime
    settled: datetime
    """No more data are expected for events before this time."""
    limit: int


@action(
    "accounting.gaps",
    scope="read",
    role="operator",
    routes=(route("GET /gaps"),),
)
def list_accounting_gaps(
    context: AccountingContext, asker: Caller, request: GapsRequest
) -> GapsAnswer:
    """List gaps in accounting data: lost records, silent nodes, CPU time without a job.

    Raises:
        PermissionRefused: The requester is not an operator of every cluster; findings concern all
            users' jobs.
        AccountingUsage: A time is malformed.
        UsageError: A cluster does not exist.
    """
    if not context.is_operator(asker):
        raise PermissionRefused(
            "permission denied: gaps concern jobs of all users, so only operators may list them"
        )
    context.check_clusters(request.clusters)
    span = _parse_span(context, request)
    findings: list[Finding] = []
    with context.jobs.snapshot():
        for cluster in request.clusters or context.clusters:
            for check in _CHECKS:
                findings += check(context, cluster, span)
    findings += _find_silent_nodes(context, request)
    page = heapq.nsmallest(
        span.limit, findings, key=lambda finding: (finding.at, finding.cluster, finding.job)
    )
    return GapsAnswer(
        findings=tuple(page),
        more=len(findings) > len(page),
        since=span.since,
        until=span.until,
        zones={cluster: context.get_zone(cluster) for cluster in context.clusters},
    )


def _parse_span(context: AccountingContext, request: GapsRequest) -> _Span:
    """Parse the period of a request."""
    now = context.now()
    zone = load_zone(request.zone or context.get_zone((*request.clusters, *context.clusters)[0]))
    try:
        since = parse_time(request.since, now, zone) if request.since else None
        until = parse_time(request.until, now, zone) if request.until else now
    except TimeError as error:
        raise AccountingUsage(str(error), request) from error
    since = since or min(now, until) - timedelta(days=_DEFAULT_DAYS)
    settled = min(until, now - _LATENESS)
    return _Span(since, until, settled, request.limit)


def _find_unended(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find launches whose end no node reported."""
    launches = context.jobs.list_unended_launches(span.since, span.settled, cluster, span.limit + 1)
    for launch in launches:
        ended_at = launch.usage.run_end
        if ended_at is not None and ended_at > span.settled:
            continue
        yield _make_launch_finding(
            launch, "step-no-end", "the node did not report the end of this step"
        )


def _find_unattributed(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find launches that fit no run."""
    for launch in context.jobs.list_unattributed(span.since, span.settled, cluster, span.limit + 1):
        used_s = sum(task.user_us + task.system_us for task in launch.usage.tasks) / _US
        words = "no run of this step is known, so its CPU time belongs to no job"
        yield _make_launch_finding(launch, "step-unattributed", words, cpu_s=used_s)


def _make_launch_finding(
    launch: StoredLaunch, kind: Kind, words: str, cpu_s: float | None = None
) -> Finding:
    """Make a finding about a launch."""
    usage = launch.usage
    return Finding(
        kind=kind,
        cluster=launch.cluster,
        at=parse_us(usage.launched_us),
        node=usage.node,
        job=str(usage.job_id),
        step=usage.step,
        user=str(usage.start.uid) if usage.start is not None else "",
        cpu_s=cpu_s,
        missing=words,
    )


def _find_doubtful(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find steps with missing data (``doubts``), or with CPU time beyond their tasks'."""
    for line in context.jobs.list_doubtful_steps(span.since, span.settled, cluster, span.limit + 1):
        doubts = [doubt for doubt in line.doubts.split(",") if doubt in _DOUBTS]
        if doubts:
            words = "; ".join(_DOUBTS[doubt] for doubt in doubts)
            yield _make_line_finding(line, "step-doubtful", words)
        excess_s = _get_cgroup_excess_s(line)
        if excess_s > _TOLERATED_CPU_S:
            words = "processes outside of tasks, or that outlived their task, used this CPU time"
            yield _make_line_finding(line, "orphan-cpu", words, cpu_s=excess_s)


_DOUBTS: Final = {
    "no-start": "its start was not reported, so its allocated resources are unknown",
    "tasks-missing": "fewer tasks reported than started",
    "lost-lines": "its node could not record all of its usage",
}
"""Description of each doubt about a step, except a missing end, which is reported per node."""


def _get_cgroup_excess_s(line: UsageLine) -> float:
    """Return the CPU time of a cgroup beyond its tasks', in seconds."""
    if line.cgroup_user_us is None:
        return 0.0
    cgroups = line.cgroup_user_us + (line.cgroup_system_us or 0)
    return (cgroups - (line.user_us or 0) - (line.system_us or 0)) / _US


def _find_stepless(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find ended runs without any step, where nodes report."""
    if not _hears_nodes(context, cluster):
        return
    for line in context.jobs.list_stepless_runs(span.since, span.settled, cluster, span.limit + 1):
        yield _make_line_finding(line, "run-no-steps", "no node reported a step of this run")


def _find_lost_runs(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find runs that disappeared from Slurm without an end."""
    for line in context.jobs.list_runs_without_end(
        span.since, span.settled, cluster, span.limit + 1
    ):
        yield _make_line_finding(
            line, "run-lost", "Slurm no longer shows it, and no source reported its end"
        )


def _make_line_finding(
    line: UsageLine, kind: Kind, words: str, cpu_s: float | None = None
) -> Finding:
    """Make a finding about a run or step."""
    return Finding(
        kind=kind,
        cluster=line.cluster,
        at=parse_us(line.end_us or line.start_us or line.submit_us),
        node=line.nodelist,
        job=line.label,
        step=line.step,
        user=line.user or ("" if line.uid is None else str(line.uid)),
        cpu_s=cpu_s,
        missing=words,
    )


def _find_unconfirmed(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find jobs whose script was captured but which Slurm never showed."""
    for job in context.jobs.list_unconfirmed(span.since, span.settled, cluster, span.limit + 1):
        yield Finding(
            kind="job-unconfirmed",
            cluster=cluster,
            at=job.first_submit,
            job=job.label,
            missing="its script was captured, but Slurm never showed the job",
        )


def _find_missed(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find jobs whose script capture missed."""
    for job in context.jobs.list_missed_jobs(span.since, span.until, cluster, span.limit + 1):
        yield Finding(
            kind="script-missed",
            cluster=cluster,
            at=job.at,
            job=str(job.job_id),
            missing="slurmctld removed its script before capture read it",
        )


def _find_node_losses(context: AccountingContext, cluster: str, span: _Span) -> Iterator[Finding]:
    """Find losses that nodes reported themselves."""
    for gap in context.jobs.list_node_losses(span.since, span.until, cluster):
        yield Finding(
            kind="node-gap",
            cluster=gap.cluster,
            at=gap.at,
            node=gap.node,
            lines=gap.lines,
            missing=_GAPS.get(gap.why, gap.why),
        )


_GAPS: Final = {
    "reboot": "it rebooted before it sent all its records",
    "lost": "it could not write records, or had no space for them",
    "garbled": "it sent malformed lines",
}
"""Description of each loss that a node reports (node.gap)."""


def _find_silent_nodes(context: AccountingContext, request: GapsRequest) -> Iterator[Finding]:
    """Yield nodes that reported before but no longer do."""
    before = context.now() - timedelta(seconds=request.silent_s)
    try:
        reader = NodeReportsReader(context.settings.state_dir)
    except Unavailable as error:
        log.debug("no node has reported yet: %s", error)
        return
    try:
        for report in reader.read_silent(before):
            if not request.clusters or report.cluster in request.clusters:
                yield Finding(
                    kind="node-silent",
                    cluster=report.cluster,
                    at=report.heard_at,
                    node=report.node,
                    missing="no report since then",
                )
    finally:
        reader.close()


def _hears_nodes(context: AccountingContext, cluster: str) -> bool:
    """Return True if the nodes of a cluster are configured to report."""
    cluster_settings = context.settings.cluster.get(cluster)
    is_remote = cluster_settings is not None and cluster_settings.remote
    return bool(context.settings.nodes.listen) or is_remote


_CHECKS: Final[tuple[Callable[[AccountingContext, str, _Span], Iterable[Finding]], ...]] = (
    _find_unended,
    _find_unattributed,
    _find_doubtful,
    _find_stepless,
    _find_lost_runs,
    _find_unconfirmed,
    _find_missed,
    _find_node_losses,
)
