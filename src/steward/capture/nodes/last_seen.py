"""When each node was heard last, and what it said then: ``nodes.db`` in the state directory.

Of thousands of nodes that report in a minute nothing is written at once: what
was heard is kept in memory, and written down every few seconds. What is lost
of it at a crash is heard again.
"""

import os
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.core.events import utc_now
from steward.core.files import read_status, write_status
from steward.core.sqlite import Connection, open_database, open_reader, transaction, translated
from steward.core.timestamps import micros, moment

FILE: Final = "nodes.db"
_REFUSALS: Final = "nodes-refused.json"
_MOST_REFUSALS: Final = 64
_MOST_TOLD: Final = 8
LATELY: Final = timedelta(minutes=30)
"""How long agents may be silent, and for how long it is told that one was refused."""
_MIGRATIONS: Final = (
    """
    CREATE TABLE node (
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        heard_us INTEGER NOT NULL,
        sequence INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        place TEXT NOT NULL,
        lost INTEGER NOT NULL,
        PRIMARY KEY (cluster, node)
    ) WITHOUT ROWID;
    """,
)


class NodeHeard(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one node.

    Attributes:
        cluster: Its cluster.
        node: NodeName.
        heard_at: When it reported last.
        sequence: Number of that batch among those of its place.
        boot_id: Of the node's boot.
        place: Id of the agent's place; another one came with the loss of its spool.
        lost: Lines that it ever lost, as far as they could be counted.
    """

    cluster: str
    node: str
    heard_at: datetime
    sequence: int = 0
    boot_id: str = ""
    place: str = ""
    lost: int = 0


class Heard:
    """Reads when nodes were heard.

    Args:
        state_dir: The state directory.

    Raises:
        SqliteUnavailable: No node was ever heard here.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, FILE)
        self._database = open_reader(self._path)

    def nodes(self, cluster: str = "") -> list[NodeHeard]:
        """Every node that was ever heard, in order of their names.

        Args:
            cluster: Of this cluster alone; of all if empty.
        """
        return list(_read(self._database, self._path, cluster))

    def silent_since(self, before: datetime, cluster: str = "") -> list[NodeHeard]:
        """The nodes that were heard last before a time."""
        return [node for node in self.nodes(cluster) if node.heard_at < before]

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


class Hearing:
    """Notes when nodes are heard; for many threads.

    Args:
        state_dir: The state directory.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, FILE)
        self._database = open_database(self._path, _MIGRATIONS, synchronous="NORMAL")
        self._lock = threading.Lock()
        read = _read(self._database, self._path, "")
        self._nodes = {(node.cluster, node.node): node for node in read}
        self._new: set[tuple[str, str]] = set()

    def last(self, cluster: str, node: str) -> NodeHeard | None:
        """What a node said last; None if it was never heard."""
        return self._nodes.get((cluster, node))

    def hear(self, heard: NodeHeard) -> None:
        """Take a node's word in; ``lost`` is what it has lost since its last."""
        name = (heard.cluster, heard.node)
        with self._lock:
            last = self._nodes.get(name)
            lost = heard.lost + (last.lost if last else 0)
            self._nodes[name] = msgspec.structs.replace(heard, lost=lost)
            self._new.add(name)

    def write(self) -> None:
        """Write down what is new.

        Raises:
            SqliteUnavailable: The disk is full; nothing is forgotten.
        """
        with self._lock:
            new, self._new = self._new, set()
            rows = [_row(self._nodes[name]) for name in new]
        if not rows:
            return
        try:
            with transaction(self._database, self._path) as database:
                database.executemany(
                    "INSERT OR REPLACE INTO node VALUES (?, ?, ?, ?, ?, ?, ?)", rows
                )
        except BaseException:
            with self._lock:
                self._new |= new
            raise

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An agent whose batch was refused.

    Attributes:
        address: Where its connection came from.
        at: When that was, last.
        why: The reason, as the agent was told it.
    """

    address: str
    at: datetime
    why: str


class Refusals:
    """The last refusal of each address that was not accepted since; for many threads.

    Args:
        state_dir: The state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, _REFUSALS)
        self._lock = threading.Lock()
        self._refusals = {one.address: one for one in refusals_in(state_dir)}
        self._is_new = False

    def add(self, address: str, why: str) -> None:
        """Note a refusal; of very many addresses the latest are kept."""
        with self._lock:
            self._refusals.pop(address, None)
            self._refusals[address] = Refusal(address=address, at=utc_now(), why=why)
            while len(self._refusals) > _MOST_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
            self._is_new = True

    def drop(self, address: str) -> None:
        """Forget an address whose batch was accepted."""
        with self._lock:
            if self._refusals.pop(address, None) is not None:
                self._is_new = True

    def write(self) -> None:
        """Write the status file, if anything is new.

        Raises:
            NotLeft: It cannot be written now.
        """
        with self._lock:
            if self._is_new:
                write_status(self._path, list(self._refusals.values()))
                self._is_new = False


def refusals_in(state_dir: str) -> list[Refusal]:
    """The refusals in a state directory's status file, oldest first."""
    found = read_status(os.path.join(state_dir, _REFUSALS), list[Refusal])
    return [] if found is None else found[0]


def refused_lately(state_dir: str, now: datetime) -> list[Refusal]:
    """The latest refusals of the last half hour, oldest first; some, if there are many."""
    return [one for one in refusals_in(state_dir) if one.at >= now - LATELY][-_MOST_TOLD:]


def _row(heard: NodeHeard) -> tuple[str, str, int, int, str, str, int]:
    lost = min(heard.lost, 2**63 - 1)
    return (
        heard.cluster,
        heard.node,
        micros(heard.heard_at),
        heard.sequence,
        heard.boot_id,
        heard.place,
        lost,
    )


def _read(database: Connection, path: str, cluster: str) -> Iterator[NodeHeard]:
    with translated(path):
        rows = database.execute(
            "SELECT cluster, node, heard_us, sequence, boot_id, place, lost FROM node "
            "WHERE cluster = ?1 OR ?1 = '' ORDER BY cluster, node",
            (cluster,),
        ).fetchall()
    for name, node, heard_us, sequence, boot_id, place, lost in rows:
        yield NodeHeard(
            cluster=name,
            node=node,
            heard_at=moment(heard_us),
            sequence=sequence,
            boot_id=boot_id,
            place=place,
            lost=lost,
        )
