"""Writes ``dashboards/steward.json``: Steward's figures in Grafana, from the lists below."""

import json
from pathlib import Path
from typing import Any, Final

PATH: Final = Path(__file__).parents[1] / "dashboards" / "steward.json"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
WIDTH: Final = 24

Panel = tuple[str, str, str, dict[str, str]]
"""Title, kind, unit, and for each legend its query."""

ROWS: Final[dict[str, list[Panel]]] = {
    "Steward": [
        ("Daemon", "stat", "bool_on_off", {"": "steward_up"}),
        ("Web", "stat", "bool_on_off", {"": "steward_web_up"}),
        ("Version", "stat", "none", {"{{version}}": "steward_info"}),
        (
            "Running since",
            "stat",
            "dateTimeFromNow",
            {"": "steward_start_time_seconds * 1000"},
        ),
        (
            "Restarts of its processes in an hour",
            "timeseries",
            "none",
            {"{{worker}}": "increase(steward_worker_restarts_total[1h])"},
        ),
        ("Processes that do not run", "stat", "none", {"": "sum(1 - steward_worker_up)"}),
        (
            "Figures that cannot be told",
            "stat",
            "none",
            {"{{figures}}": "steward_unknown"},
        ),
    ],
    "Backlog": [
        ("Oldest event", "timeseries", "s", {"{{consumer}}": "steward_consumer_lag_seconds"}),
        ("Lag, events", "timeseries", "none", {"{{consumer}}": "steward_consumer_lag_events"}),
        ("Dead letters", "timeseries", "none", {"{{consumer}}": "steward_consumer_dead_letters"}),
        (
            "Detached, and what they missed",
            "timeseries",
            "none",
            {
                "{{consumer}}": 'steward_consumer_state{state="detached"}',
                "{{consumer}} missed": "steward_consumer_missed_events",
            },
        ),
        ("Scripts to archive", "timeseries", "none", {"{{sink}}": "steward_sink_backlog_scripts"}),
        ("Oldest to archive", "timeseries", "s", {"{{sink}}": "steward_sink_backlog_seconds"}),
        ("Sinks that take nothing", "stat", "none", {"": "sum(1 - steward_sink_up)"}),
        ("Scripts missed", "timeseries", "none", {"{{cluster}}": "steward_missed_scripts_total"}),
        (
            "Events a second",
            "timeseries",
            "none",
            {"": "rate(steward_journal_appended_events_total[5m])"},
        ),
        (
            "Journal",
            "timeseries",
            "bytes",
            {"on disk": "steward_journal_bytes", "at most": "steward_journal_max_bytes"},
        ),
        ("Events kept", "timeseries", "none", {"": "steward_journal_events"}),
        (
            "Free on disk",
            "timeseries",
            "percentunit",
            {"{{what}}": "steward_disk_free_bytes / steward_disk_size_bytes"},
        ),
        ("Databases", "timeseries", "bytes", {"{{database}}": "steward_database_bytes"}),
        (
            "Free pages of databases",
            "timeseries",
            "bytes",
            {"{{database}}": "steward_database_free_bytes"},
        ),
    ],
    "Slurm": [
        ("slurmctld answers", "stat", "bool_on_off", {"{{cluster}}": "steward_slurm_up"}),
        ("Version", "stat", "none", {"{{cluster}} {{version}}": "steward_slurm_info"}),
        (
            "What a look at the queue takes",
            "timeseries",
            "s",
            {"{{cluster}}": "steward_snapshot_seconds"},
        ),
        (
            "Time to the next look",
            "timeseries",
            "s",
            {"{{cluster}}": "steward_snapshot_interval_seconds"},
        ),
        (
            "Age of the last look",
            "timeseries",
            "s",
            {"{{cluster}}": "time() - steward_snapshot_time_seconds"},
        ),
    ],
    "Bank": [
        ("Gate decides", "stat", "bool_on_off", {"": "steward_gate_deciding"}),
        (
            "Requests a second",
            "timeseries",
            "none",
            {
                "{{answer}}": "rate(steward_gate_requests_total[5m])",
                "by policy": "rate(steward_gate_by_policy_total[5m])",
            },
        ),
        (
            "Answer",
            "timeseries",
            "s",
            {
                "mean": "rate(steward_gate_answer_seconds_sum[5m]) / "
                "rate(steward_gate_answer_seconds_count[5m])",
                "slowest": "steward_gate_slowest_seconds",
            },
        ),
        ("Open holds", "timeseries", "none", {"": "steward_gate_holds"}),
        (
            "A plugin asked last",
            "stat",
            "dateTimeFromNow",
            {"": "steward_gate_last_request_time_seconds * 1000"},
        ),
        (
            "Runs charged something else than due",
            "timeseries",
            "none",
            {"{{cluster}}": "steward_reconcile_differences"},
        ),
        (
            "Charges not compared yet",
            "timeseries",
            "s",
            {"{{cluster}} {{source}}": "time() - steward_reconciled_time_seconds"},
        ),
        (
            "Age of the oldest balance at a myBRC server",
            "timeseries",
            "s",
            {"": "time() - steward_remote_balance_time_seconds"},
        ),
        ("Notices that are dead letters", "stat", "none", {"": "steward_bank_notice_dead_letters"}),
        (
            "Balance",
            "timeseries",
            "none",
            {"{{account}}": 'steward_account_balance_su{account=~"$account"}'},
        ),
        (
            "Holds",
            "timeseries",
            "none",
            {"{{account}}": 'steward_account_holds_su{account=~"$account"}'},
        ),
        (
            "Available",
            "timeseries",
            "none",
            {
                "{{account}}": 'steward_account_balance_su{account=~"$account"} + '
                'steward_account_credit_limit_su{account=~"$account"} - '
                'steward_account_holds_su{account=~"$account"}'
            },
        ),
        (
            "Holds",
            "timeseries",
            "none",
            {"{{account}}": 'steward_account_hold_count{account=~"$account"}'},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(title, len(panels) + 1, y))
        y += 1
        x = 0
        for panel in row:
            width, height = (4, 4) if panel[1] == "stat" else (8, 7)
            if x + width > WIDTH:
                x, y = 0, y + 7
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": width, "h": height}))
            x += width
        y += 7
    return {
        "title": "Steward",
        "uid": "steward",
        "tags": ["slurm", "steward"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [_source(), _accounts()]},
        "panels": panels,
    }


def text() -> str:
    """Return the dashboard as text."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"type": "row", "title": title, "id": number, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    title, kind, unit, queries = panel
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for at, (legend, query) in enumerate(queries.items())
    ]
    made: dict[str, Any] = {
        "type": kind,
        "title": title,
        "id": number,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }
    if title == "Version":
        made["options"] = {"textMode": "name", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return made


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _accounts() -> dict[str, Any]:
    return {
        "name": "account",
        "label": "Account",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(steward_account_balance_su, account)",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


if __name__ == "__main__":
    PATH.write_text(text())
