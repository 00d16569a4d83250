"""A history of states and books of jobs that are written down, and who asks for them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from steward.capture.settings import SensorSettings
from steward.core.access import Access, Asker, Standing
from steward.core.actions import Action
from steward.core.config import Settings
from steward.core.events import NODE_STATE, RESERVATION_STATE, Event
from steward.core.lines import Line
from steward.core.moments import micros
from steward.core.sqlite import open_database, transaction
from steward.core.state_facts import NodeState, ReservationState
from steward.jobs import database_path
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS
from steward.reports.history.actions import ACTIONS
from steward.reports.history.consumer import HistoryConsumer
from steward.reports.history.room import HistoryRoom
from steward.slurm.settings import ClusterSettings

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ROOT = Asker(uid=0, user="root")
ADA = Asker(uid=1000, user="ada")
BELA = Asker(uid=1001, user="bela")
COORDINATOR = Asker(uid=1002, user="coord")
GIB = 1 << 30


def at(seconds: float) -> datetime:
    """So many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def us(seconds: float) -> int:
    """The same in microseconds since the epoch."""
    return micros(at(seconds))


class Told:
    """Makes events, each with a key and a position of its own."""

    def __init__(self) -> None:
        self.number = 0

    def event(self, kind: str, when: float, body: Any, cluster: str = "c1") -> Event:
        self.number += 1
        return Event(
            kind=kind,
            cluster=cluster,
            key=f"{kind}:{self.number}",
            at=at(when),
            seen_at=at(when),
            source="sensor",
            body=body,
            id=self.number,
        )

    def node(self, when: float, node: str, state: str, **fields: Any) -> Event:
        cluster = fields.pop("cluster", "c1")
        body = {"cpus": 4, "memory_bytes": GIB, "partitions": ("main",), **fields}
        return self.event(NODE_STATE, when, NodeState(node=node, state=state, **body), cluster)

    def reservation(self, when: float, name: str, state: str, **fields: Any) -> Event:
        body = ReservationState(reservation=name, state=state, **fields)
        return self.event(RESERVATION_STATE, when, body)


class Site:
    """A Steward with a history and books.

    Args:
        directory: Its state directory.
        private: What Slurm's PrivateData says.
        now: The present moment, in seconds after noon.
        sensor: Whether it has one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        private: frozenset[str] = frozenset({"jobs"}),
        now: float = 86_400,
        sensor: bool = True,
    ) -> None:
        self.told = Told()
        self.now = now
        self.settings = Settings(
            state_dir=str(directory),
            cluster={"c1": ClusterSettings(timezone="UTC"), "c2": ClusterSettings(timezone="UTC")},
            sensor=SensorSettings(enabled=sensor),
        )
        standing = Standing(private_data=private, coordinators={"physics": frozenset({"coord"})})
        self.access = Access(self.settings.access, own_uid=999, standing=lambda _cluster: standing)
        self.consumer = HistoryConsumer(self.settings, clock=lambda: at(self.now))
        self.room = HistoryRoom(self.settings, access=self.access, now=lambda: at(self.now))
        self._books = open_database(database_path(str(directory)), MIGRATIONS)
        self._actions: dict[str, tuple[Action, Any]] = {
            action.name: (action, self.room) for action in ACTIONS
        }

    def offer(self, actions: Sequence[Action], room: Any) -> None:
        """Let another room be asked, too."""
        self._actions |= {action.name: (action, room) for action in actions}

    def feed(self, *events: Event) -> None:
        """Have events kept."""
        self.consumer.apply(events, max(event.id for event in events), lambda _new: None)

    def ran(self, job_id: int, start: float, end: float | None, **fields: Any) -> None:
        """A run in the books."""
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
            "uid": 1000,
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
        with transaction(self._books):
            put_lines(self._books, [Line(job_id=job_id, **line)])

    def ask(self, name: str, asker: Asker = ROOT, /, **request: Any) -> Any:
        """The answer of an action."""
        action, room = self._actions[name]
        return action.run(room, asker, msgspec.convert(request, action.request))

    def close(self) -> None:
        """Let go of all files."""
        self.consumer.close()
        self.room.close()
        self._books.close()
