"""History Sites: states of nodes, partitions and reservations, and runs in jobs.db."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

from harness.events import at, make_event, us
from harness.site import Site
from steward.capture.settings import SensorSettings
from steward.core.access import ClusterRoles
from steward.core.events import NODE_STATE, RESERVATION_STATE, Event, NodeState, ReservationState
from steward.core.records import UsageLine
from steward.core.sqlite import open_database, transaction
from steward.jobs import database_path
from steward.jobs.day_sums import add_cluster, track_lines
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS
from steward.reports.history.consumer import HistoryConsumer

GIB = 1 << 30
_numbers = itertools.count()


def make_site(
    directory: Path, *, private: frozenset[str] = frozenset({"jobs"}), sensor: bool = True
) -> Site:
    """Make a Site of ``c1`` and ``c2`` with a history; carl coordinates physics."""
    site = Site(directory, clusters=("c1", "c2"), sensor=SensorSettings(enabled=sensor))
    site.now = at(86_400)
    coordinators = {"physics": frozenset({"carl"})}
    site.standing = ClusterRoles(private_data=private, coordinators=coordinators)
    site.open(lambda site: HistoryConsumer(site.settings, clock=lambda: site.now))
    return site


def event(kind: str, when: float, body: Any, cluster: str = "c1") -> Event:
    """Return an event of the sensor, with a unique key."""
    key = f"{kind}:{next(_numbers)}"
    return make_event(kind, key, body, at(when), cluster=cluster, source="sensor")


def node(when: float, name: str, state: str, cluster: str = "c1", **fields: Any) -> Event:
    """Return a node.state."""
    defaults = {"cpus": 4, "memory_bytes": GIB, "partitions": ("main",)}
    body = NodeState(node=name, state=state, **{**defaults, **fields})
    return event(NODE_STATE, when, body, cluster)


def reservation(when: float, name: str, state: str, **fields: Any) -> Event:
    """Return a reservation.state."""
    body = ReservationState(reservation=name, state=state, **fields)
    return event(RESERVATION_STATE, when, body)


def add_run(site: Site, job_id: int, start: float, end: float | None, **fields: Any) -> None:
    """Write a run to jobs.db."""
    eligible = fields.pop("eligible", start)
    submit = fields.pop("submit", eligible)
    line: dict[str, Any] = {
        "cluster": "c1",
        "label": str(job_id),
        "first_submit_us": us(submit),
        "submit_us": us(submit),
        "eligible_us": us(eligible),
        "start_us": us(start),
        "end_us": 0 if end is None else us(end),
        "uid": 4001,
        "user": "ada",
        "account": "physics",
        "partition": "main",
        "state": "RUNNING" if end is None else "COMPLETED",
        "cpus": 1,
        "requested_cpus": 1,
        "nodes": 1,
        "nodelist": "n1",
        **fields,
    }
    path = database_path(site.settings.state_dir)
    with closing(open_database(path, MIGRATIONS)) as books, transaction(books):
        add_cluster(books, line["cluster"], "UTC")
        with track_lines(books, line["cluster"], [job_id]):
            put_lines(books, [UsageLine(job_id=job_id, **line)])
