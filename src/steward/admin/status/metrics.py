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
from steward.bank.actions.upkeep import BankStatusReply
from steward.core.access import Asker

if TYPE_CHECKING:
    from prometheus_client import Metric


_MICRO: Final = 1e6
"""Micro-SU per SU, and microseconds per second."""
_STATES: Final[tuple[ConsumerState, ...]] = ("running", "waiting", "detached")
_WEB_S: Final = 1.0
"""Time-out of connecting to the web pages, in seconds."""

MetricSamples = list[tuple[tuple[str, ...], float]]
"""Samples of one metric: label values, and the number."""


def show_metrics(room: StatusContext, asker: Asker, request: MetricsRequest) -> MetricsAnswer:
    """Return Steward's metrics; those of accounts only for operators.

    Raises:
        PermissionRefused: The asker is neither operator nor the user of the web process.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    del request
    room.admit_scraper(asker)
    families = MetricFamilies()
    # The web process asks on behalf of anyone who can connect to it.
    status = collect_status(room, gaps=False, accounts=room.is_operator(asker))
    _add_daemon(families, room, status)
    _add_journal(families, status)
    _add_sinks(families, status)
    _add_clusters(families, status)
    if status.bank is not None:
        _add_bank(families, status.bank)
    families.gauge(
        "steward_unknown",
        "Whether these figures could not be told now.",
        ("figures",),
        [((what,), 1) for what in sorted(status.unknown)],
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

    def gauge(self, name: str, words: str, labels: tuple[str, ...], figures: MetricSamples) -> None:
        """Add a gauge; a family without samples is omitted."""
        from prometheus_client.core import GaugeMetricFamily

        if figures:
            family = GaugeMetricFamily(name, words, labels=labels)
            for values, figure in figures:
                family.add_metric([_clean_label(value) for value in values], figure)
            self._families.append(family)

    def counter(
        self, name: str, words: str, labels: tuple[str, ...], figures: MetricSamples
    ) -> None:
        """Add a counter; ``name`` is without its ``_total``."""
        from prometheus_client.core import CounterMetricFamily

        if figures:
            family = CounterMetricFamily(name, words, labels=labels)
            for values, figure in figures:
                family.add_metric([_clean_label(value) for value in values], figure)
            self._families.append(family)

    def summary(self, name: str, words: str, count: int, total: float) -> None:
        """Add a summary: a number of events and the sum of their durations."""
        from prometheus_client.core import SummaryMetricFamily

        self._families.append(SummaryMetricFamily(name, words, count_value=count, sum_value=total))

    def one(self, name: str, words: str, figure: float) -> None:
        """Add a gauge without labels."""
        self.gauge(name, words, (), [((), figure)])

    def moment(self, name: str, words: str, at: datetime | None) -> None:
        """Add a time as a gauge, if it is known."""
        if at is not None:
            self.one(name, words, at.timestamp())


def _add_daemon(to: MetricFamilies, room: StatusContext, status: StatusShowAnswer) -> None:
    """Add metrics of the daemon, its workers, the web process and disks."""
    to.gauge(
        "steward_info",
        "Steward's version and Python's.",
        ("version", "python"),
        [((status.steward, status.python), 1)],
    )
    to.one("steward_up", "Whether the daemon runs.", status.running)
    to.moment("steward_start_time_seconds", "When the daemon was started.", status.since)
    parts = status.parts
    to.gauge(
        "steward_part_up",
        "Whether a process of the daemon runs.",
        ("part",),
        [((one.name,), bool(one.pid)) for one in parts],
    )
    to.counter(
        "steward_part_restarts",
        "How often a process was started again because it failed.",
        ("part",),
        [((one.name,), one.restarts) for one in parts],
    )
    if room.settings.web.listen:
        is_up = _is_listening(room.settings.web.listen)
        to.one("steward_web_up", "Whether something listens where the pages are.", is_up)
    disks = [((one.what, one.path), one) for one in status.disks]
    to.gauge(
        "steward_disk_free_bytes",
        "What Steward may still write to a file system.",
        ("what", "path"),
        [(labels, one.free) for labels, one in disks],
    )
    to.gauge(
        "steward_disk_size_bytes",
        "Size of a file system that Steward writes to.",
        ("what", "path"),
        [(labels, one.total) for labels, one in disks],
    )


def _add_journal(to: MetricFamilies, status: StatusShowAnswer) -> None:
    """Add metrics of the journal and its consumers."""
    journal = status.journal
    if journal is not None:
        to.counter(
            "steward_journal_appended_events",
            "How many events were ever recorded.",
            (),
            [((), journal.head)],
        )
        to.one("steward_journal_events", "How many events are kept.", journal.events)
        to.one("steward_journal_bytes", "What the journal takes on disk.", journal.bytes)
        to.one("steward_journal_max_bytes", "What it may take.", journal.max_bytes)
    consumers = status.consumers
    for name, words, attribute in (
        ("behind_events", "How many events a consumer has still to see.", "behind"),
        ("behind_seconds", "Age of the oldest of these events.", "behind_s"),
        ("set_aside_events", "How many events were set aside for it.", "set_aside"),
        ("missed_events", "How many it missed while it was detached.", "missed"),
    ):
        figures: MetricSamples = [((one.name,), getattr(one, attribute) or 0) for one in consumers]
        to.gauge(f"steward_consumer_{name}", words, ("consumer",), figures)
    to.gauge(
        "steward_consumer_state",
        "1 for the state that a consumer is in.",
        ("consumer", "state"),
        [((one.name, state), one.state == state) for one in consumers for state in _STATES],
    )


def _add_sinks(to: MetricFamilies, status: StatusShowAnswer) -> None:
    sinks = [((one.name, one.kind), one) for one in status.sinks]
    labels = ("sink", "kind")
    to.gauge(
        "steward_sink_up",
        "Whether a sink takes what it is given.",
        labels,
        [(values, one.state == "running") for values, one in sinks],
    )
    to.gauge(
        "steward_sink_backlog_scripts",
        "How many scripts it has still to archive.",
        labels,
        [(values, one.backlog) for values, one in sinks],
    )
    to.gauge(
        "steward_sink_backlog_seconds",
        "Age of the oldest event that it has still to put to use.",
        labels,
        [(values, one.oldest_s or 0) for values, one in sinks],
    )


def _add_clusters(to: MetricFamilies, status: StatusShowAnswer) -> None:
    """Add metrics of clusters: missed scripts, Slurm, polls."""
    to.counter(
        "steward_missed_scripts",
        "Jobs whose scripts left the spool before they were read.",
        ("cluster",),
        [((one.cluster,), one.missed_scripts) for one in status.clusters],
    )
    looked = [one for one in status.clusters if one.looked_at is not None]
    to.gauge(
        "steward_slurm_info",
        "Slurm's version on a cluster.",
        ("cluster", "version"),
        [((one.cluster, one.slurm), 1) for one in looked],
    )
    to.gauge(
        "steward_slurm_up",
        "Whether a cluster's slurmctld answered Steward's last look.",
        ("cluster",),
        [((one.cluster,), bool(one.up)) for one in looked],
    )
    to.gauge(
        "steward_snapshot_seconds",
        "How long the last look at a cluster's queue took.",
        ("cluster",),
        [((one.cluster,), one.cost_s or 0) for one in looked],
    )
    to.gauge(
        "steward_snapshot_interval_seconds",
        "How long it is from that look to the next.",
        ("cluster",),
        [((one.cluster,), one.interval_s or 0) for one in looked],
    )
    to.gauge(
        "steward_snapshot_time_seconds",
        "When that look was.",
        ("cluster",),
        [((one.cluster,), one.looked_at.timestamp()) for one in looked if one.looked_at],
    )


def _add_bank(to: MetricFamilies, bank: BankStatusReply) -> None:
    """Add metrics of the gate, SU holds and bank accounts."""
    to.one("steward_gate_deciding", "Whether the gate decides.", bank.gate == "deciding")
    to.moment("steward_gate_asked_time_seconds", "When a plugin asked last.", bank.asked_at)
    if bank.tally is not None:
        tally = bank.tally
        to.counter(
            "steward_gate_requests",
            "What submit plugins were answered since the gate began.",
            ("answer",),
            [(("allowed",), tally.allowed), (("refused",), tally.refused)],
        )
        to.counter(
            "steward_gate_by_policy",
            "Those of these requests that the policy answered.",
            (),
            [((), tally.by_policy)],
        )
        to.summary(
            "steward_gate_answer_seconds",
            "How long answers took.",
            tally.allowed + tally.refused,
            tally.spent_us / _MICRO,
        )
        to.one("steward_gate_slowest_seconds", "The slowest answer.", tally.slowest_us / _MICRO)
    if bank.holds is not None:
        to.one("steward_gate_holds", "How many holds are open.", bank.holds)
    to.moment(
        "steward_remote_balance_time_seconds",
        "When a myBRC server elsewhere said the oldest of the balances.",
        bank.remote_at,
    )
    to.one("steward_bank_notices_set_aside", "Notices that nobody took.", bank.notices)
    _add_reconciliation(to, bank)
    _add_accounts(to, bank)


def _add_reconciliation(to: MetricFamilies, bank: BankStatusReply) -> None:
    """Add metrics of the reconciliation of charges."""
    compared: MetricSamples = []
    for one in bank.reconciled:
        for source, at in (("slurmctld", one.until), ("slurmdbd", one.by_slurmdbd_until)):
            if at is not None:
                compared.append(((one.cluster, source), at.timestamp()))
    to.gauge(
        "steward_reconciled_time_seconds",
        "Up to which end of a run charges were compared with Slurm's records.",
        ("cluster", "source"),
        compared,
    )
    to.gauge(
        "steward_reconcile_differences",
        "How many runs the last comparison found that were charged something else.",
        ("cluster",),
        [((one.cluster,), one.differences) for one in bank.reconciled],
    )


def _add_accounts(to: MetricFamilies, bank: BankStatusReply) -> None:
    money = bank.money
    label = ("account",)
    to.gauge(
        "steward_account_balance_su",
        "What an account has that can be drawn on now, in units.",
        label,
        [((one.account,), one.balance / _MICRO) for one in money],
    )
    to.gauge(
        "steward_account_credit_su",
        "What it may owe.",
        label,
        [((one.account,), one.credit / _MICRO) for one in money],
    )
    to.gauge(
        "steward_account_held_su",
        "What is held of it for jobs that have not ended.",
        label,
        [((one.account,), one.held / _MICRO) for one in money if one.held is not None],
    )
    to.gauge(
        "steward_account_holds",
        "How many holds these are.",
        label,
        [((one.account,), one.holds) for one in money if one.holds is not None],
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
