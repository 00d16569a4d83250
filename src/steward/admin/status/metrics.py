"""Prometheus metrics of Steward: health of daemon, journal, sinks and gate, account balances.

``show_metrics`` runs the action status.metrics: it collects the status as ``steward status`` does
(``collect_status``) and adds each part of it to :class:`MetricFamilies`, which the Prometheus
client library renders. Metrics of a cluster's jobs and nodes are left to Slurm exporters. Label
values come from users and administrators; the library escapes them, so that none can end a line.
"""

import socket
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final

from steward.admin.status.requests import (
    ConsumerState,
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
)
from steward.admin.status.summary import StatusContext, collect_status
from steward.bank.actions.status import BankStatusReply
from steward.core.access import Caller, raise_rights
from steward.core.actions import action
from steward.core.principals import STATUS

if TYPE_CHECKING:
    from prometheus_client import Metric


_MICRO: Final = 1e6
"""Micro-SU per SU, and microseconds per second."""
_STATES: Final[tuple[ConsumerState, ...]] = ("running", "waiting", "detached")
_WEB_S: Final = 1.0
"""Time-out of connecting to the web pages, in seconds."""

MetricSamples = list[tuple[tuple[str, ...], float]]
"""Samples of one metric: label values, and the number."""


@action(
    "status.metrics",
    scope="read",
    role="operator",
    only_reads=True,
    help="Show metrics in the format of Prometheus.",
)
def show_metrics(context: StatusContext, caller: Caller, request: MetricsRequest) -> MetricsAnswer:
    """Return Steward's metrics; those of accounts only for operators.

    Raises:
        PermissionRefused: The asker is neither operator nor the user of the web process.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    del request
    context.require_scraper(caller)
    families = MetricFamilies()
    # The web process asks on behalf of anyone who can connect to it.
    service = raise_rights(caller, STATUS, "status.metrics")
    status = collect_status(context, service, gaps=False, accounts=context.is_operator(caller))
    _add_daemon(families, context, status)
    _add_journal(families, status)
    _add_sinks(families, status)
    _add_clusters(families, status)
    if status.bank is not None:
        _add_bank(families, status.bank)
    families.add_gauge(
        "steward_unknown",
        "1 if these metrics are not available now.",
        ("figures",),
        [((part,), 1) for part in sorted(status.unknown)],
    )
    registry = CollectorRegistry()
    registry.register(families)
    return MetricsAnswer(text=generate_latest(registry).decode(), content_type=CONTENT_TYPE_LATEST)


class MetricFamilies:
    """Collector of metric families for the client library."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def collect(self) -> "Iterable[Metric]":
        """Return all families."""
        return self._families

    def add_gauge(
        self, name: str, help_text: str, labels: tuple[str, ...], samples: MetricSamples
    ) -> None:
        """Add a gauge; a family without samples is omitted."""
        from prometheus_client.core import GaugeMetricFamily

        if samples:
            family = GaugeMetricFamily(name, help_text, labels=labels)
            for values, number in samples:
                family.add_metric([_clean_label(value) for value in values], number)
            self._families.append(family)

    def add_counter(
        self, name: str, help_text: str, labels: tuple[str, ...], samples: MetricSamples
    ) -> None:
        """Add a counter; ``name`` is without its ``_total``."""
        from prometheus_client.core import CounterMetricFamily

        if samples:
            family = CounterMetricFamily(name, help_text, labels=labels)
            for values, number in samples:
                family.add_metric([_clean_label(value) for value in values], number)
            self._families.append(family)

    def add_summary(self, name: str, help_text: str, count: int, total: float) -> None:
        """Add a summary: a number of events and the sum of their durations."""
        from prometheus_client.core import SummaryMetricFamily

        self._families.append(
            SummaryMetricFamily(name, help_text, count_value=count, sum_value=total)
        )

    def add_value(self, name: str, help_text: str, number: float) -> None:
        """Add a gauge without labels."""
        self.add_gauge(name, help_text, (), [((), number)])

    def add_time(self, name: str, help_text: str, at: datetime | None) -> None:
        """Add a time as a gauge, if it is known."""
        if at is not None:
            self.add_value(name, help_text, at.timestamp())


def _add_daemon(families: MetricFamilies, context: StatusContext, status: StatusShowAnswer) -> None:
    """Add metrics of the daemon, its workers, the web process, disks and databases."""
    families.add_gauge(
        "steward_info",
        "Version of Steward and of Python.",
        ("version", "python"),
        [((status.steward, status.python), 1)],
    )
    families.add_value("steward_up", "1 if the daemon runs.", status.running)
    families.add_time("steward_start_time_seconds", "Start time of the daemon.", status.since)
    workers = status.workers
    families.add_gauge(
        "steward_worker_up",
        "1 if the process of a worker runs.",
        ("worker",),
        [((item.name,), bool(item.pid)) for item in workers],
    )
    families.add_counter(
        "steward_worker_restarts",
        "Number of restarts of a worker after a failure.",
        ("worker",),
        [((item.name,), item.restarts) for item in workers],
    )
    if context.settings.web.listen:
        is_up = _is_listening(context.settings.web.listen)
        families.add_value("steward_web_up", "1 if the web pages have a listener.", is_up)
    disks = [((item.purpose,), item) for item in status.disks]
    families.add_gauge(
        "steward_disk_free_bytes",
        "Free space of a file system that Steward writes to.",
        ("what",),
        [(labels, item.free) for labels, item in disks],
    )
    families.add_gauge(
        "steward_disk_size_bytes",
        "Size of a file system that Steward writes to.",
        ("what",),
        [(labels, item.total) for labels, item in disks],
    )
    databases = [((item.name,), item) for item in status.databases]
    families.add_gauge(
        "steward_database_bytes",
        "Size of a database on disk.",
        ("database",),
        [(labels, item.bytes) for labels, item in databases],
    )
    families.add_gauge(
        "steward_database_free_bytes",
        "Size of the free pages in a database.",
        ("database",),
        [(labels, item.free) for labels, item in databases if item.free is not None],
    )


def _add_journal(families: MetricFamilies, status: StatusShowAnswer) -> None:
    """Add metrics of the journal and its consumers."""
    journal = status.journal
    if journal is not None:
        families.add_counter(
            "steward_journal_appended_events",
            "Number of events ever recorded.",
            (),
            [((), journal.head)],
        )
        families.add_value(
            "steward_journal_events", "Number of events in the journal.", journal.events
        )
        families.add_value("steward_journal_bytes", "Size of the journal on disk.", journal.bytes)
        families.add_value(
            "steward_journal_max_bytes", "Maximum size of the journal.", journal.max_bytes
        )
    consumers = status.consumers
    for name, help_text, attribute in (
        ("lag_events", "Lag of a consumer, in events.", "lag"),
        ("lag_seconds", "Age of the oldest event that a consumer has not applied.", "lag_s"),
        ("dead_letters", "Number of dead letters of a consumer.", "dead_letters"),
        ("missed_events", "Number of events that a consumer missed while detached.", "missed"),
    ):
        samples: MetricSamples = [
            ((consumer.name,), getattr(consumer, attribute) or 0) for consumer in consumers
        ]
        families.add_gauge(f"steward_consumer_{name}", help_text, ("consumer",), samples)
    families.add_gauge(
        "steward_consumer_state",
        "1 for the present state of a consumer.",
        ("consumer", "state"),
        [
            ((consumer.name, state), consumer.state == state)
            for consumer in consumers
            for state in _STATES
        ],
    )


def _add_sinks(families: MetricFamilies, status: StatusShowAnswer) -> None:
    sinks = [((sink.name, sink.kind), sink) for sink in status.sinks]
    labels = ("sink", "kind")
    families.add_gauge(
        "steward_sink_up",
        "1 if a sink is available.",
        labels,
        [(values, sink.state == "running") for values, sink in sinks],
    )
    families.add_gauge(
        "steward_sink_backlog_scripts",
        "Number of scripts that a sink has not archived yet.",
        labels,
        [(values, sink.backlog) for values, sink in sinks],
    )
    families.add_gauge(
        "steward_sink_backlog_seconds",
        "Age of the oldest event that a sink has not applied.",
        labels,
        [(values, sink.oldest_s or 0) for values, sink in sinks],
    )


def _add_clusters(families: MetricFamilies, status: StatusShowAnswer) -> None:
    """Add metrics of clusters: missed scripts, Slurm, polls."""
    families.add_counter(
        "steward_missed_scripts",
        "Number of jobs whose script left the spool before capture read it.",
        ("cluster",),
        [
            ((cluster.cluster,), cluster.missed_scripts)
            for cluster in status.clusters
            if cluster.missed_scripts is not None
        ],
    )
    polled = [cluster for cluster in status.clusters if cluster.polled_at is not None]
    families.add_gauge(
        "steward_slurm_info",
        "Version of Slurm on a cluster.",
        ("cluster", "version"),
        [((cluster.cluster, cluster.slurm), 1) for cluster in polled],
    )
    families.add_gauge(
        "steward_slurm_up",
        "1 if slurmctld answered the last poll.",
        ("cluster",),
        [((cluster.cluster,), bool(cluster.up)) for cluster in polled],
    )
    families.add_gauge(
        "steward_snapshot_seconds",
        "Duration of the last poll of a cluster's queue.",
        ("cluster",),
        [((cluster.cluster,), cluster.cost_s or 0) for cluster in polled],
    )
    families.add_gauge(
        "steward_snapshot_interval_seconds",
        "Interval of polls of a cluster's queue, or of checks that show that it has not changed.",
        ("cluster",),
        [((cluster.cluster,), cluster.interval_s or 0) for cluster in polled],
    )
    families.add_gauge(
        "steward_snapshot_time_seconds",
        "Time of the last poll of a cluster's queue, or of the last check that showed no change.",
        ("cluster",),
        [
            ((cluster.cluster,), cluster.current_at.timestamp())
            for cluster in polled
            if cluster.current_at
        ],
    )


def _add_bank(families: MetricFamilies, bank: BankStatusReply) -> None:
    """Add metrics of the gate, SU holds and bank accounts."""
    families.add_value("steward_gate_deciding", "1 if the gate decides.", bank.gate == "deciding")
    families.add_time(
        "steward_gate_last_request_time_seconds",
        "Time of the last request of a submit plugin.",
        bank.last_request_at,
    )
    if bank.tally is not None:
        tally = bank.tally
        families.add_counter(
            "steward_gate_requests",
            "Number of requests of submit plugins, by answer.",
            ("answer",),
            [(("admitted",), tally.admitted), (("rejected",), tally.rejected)],
        )
        families.add_counter(
            "steward_gate_by_policy",
            "Number of these requests that the outage policy answered.",
            (),
            [((), tally.by_policy)],
        )
        families.add_summary(
            "steward_gate_answer_seconds",
            "Response times of the gate.",
            tally.admitted + tally.rejected,
            tally.spent_us / _MICRO,
        )
        families.add_value(
            "steward_gate_slowest_seconds", "Longest response time.", tally.slowest_us / _MICRO
        )
    if bank.hold_count is not None:
        families.add_value("steward_gate_holds", "Number of open SU holds.", bank.hold_count)
    families.add_time(
        "steward_remote_balance_time_seconds",
        "Query time of the oldest balance of the remote myBRC server.",
        bank.remote_at,
    )
    families.add_value(
        "steward_bank_notice_dead_letters", "Number of undelivered notices.", bank.notices
    )
    _add_reconciliation(families, bank)
    _add_accounts(families, bank)


def _add_reconciliation(families: MetricFamilies, bank: BankStatusReply) -> None:
    """Add metrics of the reconciliation of charges."""
    samples: MetricSamples = []
    for progress in bank.reconciled:
        for source, at in (("slurmctld", progress.until), ("slurmdbd", progress.by_slurmdbd_until)):
            if at is not None:
                samples.append(((progress.cluster, source), at.timestamp()))
    families.add_gauge(
        "steward_reconciled_time_seconds",
        "End time up to which runs were reconciled with Slurm's records.",
        ("cluster", "source"),
        samples,
    )
    families.add_gauge(
        "steward_reconcile_differences",
        "Number of runs that the last reconciliation found charged differently.",
        ("cluster",),
        [((progress.cluster,), progress.differences) for progress in bank.reconciled],
    )


def _add_accounts(families: MetricFamilies, bank: BankStatusReply) -> None:
    money = bank.money
    label = ("account",)
    families.add_gauge(
        "steward_account_balance_su",
        "Balance of an account: SU of its active allocations.",
        label,
        [((account.account,), account.balance / _MICRO) for account in money],
    )
    families.add_gauge(
        "steward_account_credit_limit_su",
        "Credit limit of an account.",
        label,
        [((account.account,), account.credit_limit / _MICRO) for account in money],
    )
    families.add_gauge(
        "steward_account_holds_su",
        "SU held for jobs of an account.",
        label,
        [
            ((account.account,), account.holds / _MICRO)
            for account in money
            if account.holds is not None
        ],
    )
    families.add_gauge(
        "steward_account_hold_count",
        "Number of open SU holds of an account.",
        label,
        [
            ((account.account,), account.hold_count)
            for account in money
            if account.hold_count is not None
        ],
    )


def _is_listening(listen: str) -> bool:
    """Return whether something listens at an address and port."""
    host, _, port = listen.rpartition(":")
    try:
        address = (host.strip("[]") or "localhost", int(port))
        with socket.create_connection(address, timeout=_WEB_S):
            return True
    except (OSError, ValueError):
        return False


def _clean_label(value: str) -> str:
    """Make a label value encodable as UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode()
