"""Node reports: when each compute node last reported, and which agents were refused.

- :class:`NodeReportsReader` reads ``nodes.db`` in the state directory.
- :class:`NodeReportsWriter` collects reports in memory, because thousands of nodes report within a
  minute, and writes them to that database when its caller asks, about every second. Reports lost in
  a crash are sent again.
- :class:`AgentRefusals` keeps the last refusal per address in the status file
  ``nodes-refused.json``, which ``list_recent_refusals`` reads for the doctor and status pages.
"""

import os
import threading
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.core.databases import NODES
from steward.core.events import utc_now
from steward.core.files import read_status, write_status
from steward.core.sqlite import Database
from steward.core.storage import Table

_REFUSALS_FILE: Final = "nodes-refused.json"
"""File name of the status file of refusals."""
_MAX_REFUSALS: Final = 64
"""Maximum number of addresses kept."""
_MAX_REFUSALS_SHOWN: Final = 8
"""Maximum number of refusals shown."""
_MAX_INTEGER: Final = 2**63 - 1
"""Largest integer that SQLite stores."""
RECENT_PERIOD: Final = timedelta(minutes=30)
"""How long agents may be silent before they count as missing, and how long a refusal is shown."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Last report of a node.

    Attributes:
        cluster: Cluster of the node.
        node: NodeName.
        heard_at: Time of its last report.
        sequence: Number of the last batch within its spool.
        boot_id: Boot id of the node.
        place: Id of the agent's spool; a new id means that the old spool was lost.
        lost: Total number of lines it ever lost, as far as counted.
    """

    cluster: str
    node: str
    heard_at: datetime
    sequence: int = 0
    boot_id: str = ""
    place: str = ""
    lost: int = 0


_NODES: Final = Table(NodeReport, "node", key="cluster, node")


class NodeReportsReader:
    """Reader of the nodes' last reports.

    Args:
        state_dir: The state directory.

    Raises:
        SqliteUnavailable: No node has ever reported here.
    """

    def __init__(self, state_dir: str) -> None:
        self._database = Database(NODES.locate(state_dir), (), read_only=True)

    def read_reports(self, cluster: str = "") -> list[NodeReport]:
        """Return all nodes that ever reported, sorted by name.

        Args:
            cluster: Only this cluster; all if empty.
        """
        return _NODES.select(
            self._database, "WHERE cluster = ?1 OR ?1 = '' ORDER BY cluster, node", cluster
        )

    def read_silent(self, before: datetime, cluster: str = "") -> list[NodeReport]:
        """Return the nodes whose last report is older than a time."""
        return [report for report in self.read_reports(cluster) if report.heard_at < before]

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class NodeReportsWriter:
    """Writer of the nodes' last reports; thread-safe.

    Args:
        state_dir: The state directory.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    def __init__(self, state_dir: str) -> None:
        path = NODES.locate(state_dir)
        self._database = Database(path, (_NODES.schema,), synchronous="NORMAL")
        self._lock = threading.Lock()
        reports = _NODES.select(self._database)
        self._reports = {(report.cluster, report.node): report for report in reports}
        self._unwritten: set[tuple[str, str]] = set()

    def get_last(self, cluster: str, node: str) -> NodeReport | None:
        """Return a node's last report; None if it never reported."""
        return self._reports.get((cluster, node))

    def record(self, report: NodeReport) -> None:
        """Record a report; its ``lost_lines`` counts lines lost since the report before."""
        key = (report.cluster, report.node)
        with self._lock:
            last_report = self._reports.get(key)
            lost_lines = report.lost + (last_report.lost if last_report else 0)
            self._reports[key] = msgspec.structs.replace(report, lost=min(lost_lines, _MAX_INTEGER))
            self._unwritten.add(key)

    def write(self) -> None:
        """Write new reports to the database.

        Raises:
            SqliteUnavailable: The disk is full; the reports are retained.
        """
        with self._lock:
            unwritten, self._unwritten = self._unwritten, set()
            reports = [self._reports[key] for key in unwritten]
        if not reports:
            return
        try:
            with self._database.transaction() as connection:
                _NODES.insert_all(connection, reports, "replace")
        except BaseException:
            with self._lock:
                self._unwritten |= unwritten
            raise

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class AgentRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Agent whose batch was refused.

    Attributes:
        address: Address of its connection.
        at: Time of the last refusal.
        why: Reason, as sent to the agent.
    """

    address: str
    at: datetime
    why: str


class AgentRefusals:
    """Last refusal of each address that has not been accepted since; thread-safe.

    Args:
        state_dir: The state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _REFUSALS_FILE)
        self._lock = threading.Lock()
        self._refusals = {refusal.address: refusal for refusal in read_refusals(state_dir)}
        self._has_changes = False

    def add(self, address: str, reason: str) -> None:
        """Record a refusal; only the latest 64 addresses are kept."""
        with self._lock:
            self._refusals.pop(address, None)
            self._refusals[address] = AgentRefusal(address=address, at=utc_now(), why=reason)
            while len(self._refusals) > _MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
            self._has_changes = True

    def drop(self, address: str) -> None:
        """Remove an address whose batch was accepted."""
        with self._lock:
            if self._refusals.pop(address, None) is not None:
                self._has_changes = True

    def write(self) -> None:
        """Write the status file if there are changes.

        Raises:
            StatusWriteError: It cannot be written now.
        """
        with self._lock:
            refusals = list(self._refusals.values()) if self._has_changes else None
            self._has_changes = False
        if refusals is None:
            return
        try:
            write_status(self._path, refusals)  # without the lock, which the event loop takes
        except BaseException:
            self._has_changes = True
            raise


def read_refusals(state_dir: str) -> list[AgentRefusal]:
    """Read refusals from the status file, oldest first."""
    status = read_status(os.path.join(state_dir, _REFUSALS_FILE), list[AgentRefusal])
    return [] if status is None else status[0]


def list_recent_refusals(state_dir: str, now: datetime) -> list[AgentRefusal]:
    """Return the latest 8 refusals of the last half hour, oldest first."""
    return [refusal for refusal in read_refusals(state_dir) if refusal.at >= now - RECENT_PERIOD][
        -_MAX_REFUSALS_SHOWN:
    ]
