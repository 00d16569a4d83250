"""Database of the gate (gate.db): open holds, and the last balances, rules and cluster models.

`GateStore` is the only writer, over one connection, with ``synchronous=NORMAL``: a commit survives
any kill of the process. After a power loss, the gate rebuilds what is missing from the tokens of
the jobs in the queue (`HoldRecovery` in `sync.py`). Whatever waits for the disk is left to a thread
that checkpoints the WAL (`WalCheckpointer` in `server.py`). Tables: ``hold``, ``account``, ``note``
(named values: rules, cluster models, allowances, counters) and ``fact`` (the outbox for the journal
and the ledger).
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from steward.bank.gate.balances import OpenHold
from steward.bank.gate.requests import Allowance, GateFact, PendingChanges
from steward.bank.records import AccountBooks, BankRules, GateBooks, Hold, JobRequest, Quote
from steward.core.databases import GATE
from steward.core.processes import read_boot_id
from steward.core.sqlite import Connection, open_database, transaction
from steward.slurm.cluster_model import ClusterModel

log = logging.getLogger(__name__)


_MIGRATIONS: Final = (
    """
    CREATE TABLE hold (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL, origin TEXT NOT NULL, cluster TEXT NOT NULL, job_id INTEGER NOT NULL,
        account TEXT NOT NULL, payer TEXT NOT NULL, uid INTEGER NOT NULL, user TEXT NOT NULL,
        amount INTEGER NOT NULL, remaining INTEGER NOT NULL, shares TEXT NOT NULL,
        confirmed INTEGER NOT NULL, started INTEGER NOT NULL,
        created_us INTEGER NOT NULL, expires_us INTEGER NOT NULL,
        quote TEXT NOT NULL, description TEXT NOT NULL);
    CREATE TABLE account (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE note (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE fact (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
    """,
    """
    ALTER TABLE hold ADD COLUMN parent TEXT NOT NULL DEFAULT '';
    ALTER TABLE hold ADD COLUMN changed_us INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE hold ADD COLUMN changes TEXT NOT NULL DEFAULT '{}';
    """,
)
_COLUMNS: Final = (
    "number, id, origin, cluster, job_id, account, payer, uid, user, amount, remaining, shares,"
    " confirmed, started, created_us, expires_us, parent, changed_us"
)
_INSERT_HOLD: Final = (
    f"INSERT INTO hold ({_COLUMNS}, quote, description)"  # noqa: S608 - names of ours
    f" VALUES (?{',?' * (_COLUMNS.count(',') + 2)})"
)
_SELECT_ALL: Final = f"SELECT {_COLUMNS} FROM hold ORDER BY number"  # noqa: S608 - names of ours
_UPDATE_HOLD: Final = (
    "UPDATE hold SET job_id=?, account=?, payer=?, amount=?, remaining=?, shares=?, confirmed=?,"
    " started=?, created_us=?, expires_us=?, changed_us=? WHERE number=?"
)

_SHARED_FIELDS: Final = set(Hold.__struct_fields__) - {"shares", "quote"}
"""Fields of a hold's record that an open hold has, too."""

_encode_json = msgspec.json.Encoder().encode
_decode_quote = msgspec.json.Decoder(Quote).decode
_decode_description = msgspec.json.Decoder(JobRequest).decode
_decode_changes = msgspec.json.Decoder(PendingChanges).decode
_decode_shares = msgspec.json.Decoder(tuple[tuple[int, int], ...]).decode
_decode_fact = msgspec.json.Decoder(GateFact).decode


class GateStore:
    """The gate's database and its hand-written SQL.

    Args:
        state_dir: The directory that holds it.

    Raises:
        SqliteError: The database is unusable.
        SqliteUnavailable: The database is unavailable now.
    """

    def __init__(self, state_dir: str) -> None:
        self.path = GATE.locate(state_dir)
        self.write_lock = threading.Lock()
        """Lock of the current writer: SQLite's own lock is waited for by sleeping."""
        self.last_request_at = 0.0
        """When a plugin last asked, by the monotonic clock."""
        self._db: Connection = self.connect()
        self._last_number = self._query_number("SELECT coalesce(max(number), 0) FROM hold")
        first = self.read_number("facts")
        self.fact_seq = max(first, self._query_number("SELECT coalesce(max(seq), 0) FROM fact"))
        if not first:
            # Starting at the time in µs, seqs grow even if the database was lost: facts are rarer
            # than one per µs.
            self.fact_seq = time.time_ns() // 1000
            self.set_number("facts", self.fact_seq)

    def _query_number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def connect(self) -> Connection:
        """Open a connection without automatic checkpoints.

        Raises:
            SqliteError: The database is unusable.
            SqliteUnavailable: The database is unavailable now.
        """
        db = open_database(self.path, _MIGRATIONS, synchronous="NORMAL", shrinks=False)
        db.execute("PRAGMA wal_autocheckpoint=0")
        return db

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction: all of it is written, or nothing."""
        with self.write_lock, transaction(self._db, self.path):
            yield

    @property
    def write_count(self) -> int:
        """Return a counter that grows with every row written."""
        return int(self._db.total_changes)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # Holds

    def next_number(self) -> int:
        """Return the row number of a new hold."""
        self._last_number += 1
        return self._last_number

    def insert(self, hold: OpenHold, quote: Quote | None, description: JobRequest | None) -> None:
        """Insert a new hold."""
        self._db.execute(
            _INSERT_HOLD,
            (
                hold.number,
                hold.id,
                hold.origin,
                hold.cluster,
                hold.job_id,
                hold.account,
                hold.payer,
                hold.uid,
                hold.user,
                hold.amount,
                hold.remaining,
                _encode_json(hold.shares).decode(),
                hold.confirmed,
                hold.started,
                hold.created_us,
                hold.expires_us,
                hold.parent,
                hold.changed_us,
                _encode_json(quote).decode() if quote else "",
                _encode_json(description).decode() if description else "",
            ),
        )

    def update(self, hold: OpenHold) -> None:
        """Write a hold's changed columns."""
        self._db.execute(
            _UPDATE_HOLD,
            (
                hold.job_id,
                hold.account,
                hold.payer,
                hold.amount,
                hold.remaining,
                _encode_json(hold.shares).decode(),
                hold.confirmed,
                hold.started,
                hold.created_us,
                hold.expires_us,
                hold.changed_us,
                hold.number,
            ),
        )

    def update_description(self, hold: OpenHold, quote: Quote, description: JobRequest) -> None:
        """Write the amount, quote and description that a hold covers now."""
        self._db.execute(
            "UPDATE hold SET amount=?, quote=?, description=? WHERE number=?",
            (
                hold.amount,
                _encode_json(quote).decode(),
                _encode_json(description).decode(),
                hold.number,
            ),
        )

    def read_changes(self, hold: OpenHold) -> PendingChanges:
        """Read a job's pending changes: descriptions besides the one that its hold covers."""
        row = self._db.execute("SELECT changes FROM hold WHERE number=?", (hold.number,)).fetchone()
        return _decode_changes(row[0])

    def put_changes(self, hold: OpenHold, changes: PendingChanges) -> None:
        """Store a job's pending changes."""
        self._db.execute(
            "UPDATE hold SET changes=? WHERE number=?",
            (_encode_json(changes).decode(), hold.number),
        )

    def delete(self, hold: OpenHold) -> None:
        """Delete a hold."""
        self._db.execute("DELETE FROM hold WHERE number=?", (hold.number,))

    def iter_holds(self) -> Iterator[OpenHold]:
        """Yield all open holds."""
        for row in self._db.execute(_SELECT_ALL):
            yield _decode_hold(row)

    def read_covered(self, hold: OpenHold) -> tuple[Quote | None, JobRequest | None]:
        """Read the quote and description that a hold covers."""
        row = self._db.execute(
            "SELECT quote, description FROM hold WHERE number=?", (hold.number,)
        ).fetchone()
        if row is None:
            return None, None
        return (
            _decode_quote(row[0]) if row[0] else None,
            _decode_description(row[1]) if row[1] else None,
        )

    def make_record(self, hold: OpenHold) -> Hold:
        """Build the record of a hold for other processes."""
        fields = {name: getattr(hold, name) for name in _SHARED_FIELDS}
        return Hold(**fields, shares=hold.record_shares(), quote=self.read_covered(hold)[0])

    # Received from other processes

    def load_accounts(self) -> tuple[AccountBooks, ...]:
        """Read the last balances of all accounts."""
        decode = msgspec.json.Decoder(AccountBooks).decode
        return tuple(decode(row[0]) for row in self._db.execute("SELECT body FROM account"))

    def put_accounts(self, books: GateBooks, changed: list[str]) -> None:
        """Store the accounts that changed; delete those that are gone."""
        by_name = {account.name: account for account in books.accounts}
        for name in changed:
            if name in by_name:
                self._db.execute(
                    "INSERT INTO account VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET body=excluded.body",
                    (name, _encode_json(by_name[name])),
                )
            else:
                self._db.execute("DELETE FROM account WHERE name=?", (name,))

    def load_rules(self) -> BankRules | None:
        """Read the last rules; None if there are none that this version of Steward can decode.

        The bank sends them again.
        """
        body = self._read_note("rules")
        try:
            return msgspec.json.decode(body, type=BankRules) if body else None
        except msgspec.MsgspecError as error:
            log.info("the stored rules cannot be decoded: %s", error)
            return None

    def put_rules(self, rules: BankRules) -> None:
        """Store the rules."""
        self._set_note("rules", _encode_json(rules))

    def load_models(self) -> list[ClusterModel]:
        """Read the last model of each cluster that this version of Steward can decode.

        The bank sends the others again.
        """
        models = []
        for name, body in self._db.execute(
            "SELECT name, body FROM note WHERE name GLOB 'picture:*'"
        ):
            try:
                models.append(msgspec.json.decode(body, type=ClusterModel))
            except msgspec.MsgspecError as error:
                log.info("the stored model %s cannot be decoded: %s", name, error)
        return models

    def put_model(self, model: ClusterModel) -> None:
        """Store a cluster's model."""
        self._set_note(f"picture:{model.cluster}", _encode_json(model))

    def load_allowances(self) -> list[Allowance]:
        """Read the allowances of jobs."""
        rows = self._db.execute("SELECT body FROM note WHERE name GLOB 'allowance:*'")
        return [msgspec.json.decode(row[0], type=Allowance) for row in rows]

    def put_allowance(self, allowance: Allowance) -> None:
        """Store an allowance, replacing the job's former one."""
        self._set_note(f"allowance:{allowance.cluster}:{allowance.job_id}", _encode_json(allowance))

    def drop_allowance(self, cluster: str, job_id: int) -> None:
        """Delete a job's allowance."""
        self._db.execute("DELETE FROM note WHERE name=?", (f"allowance:{cluster}:{job_id}",))

    def read_number(self, name: str) -> int:
        """Read a stored number; 0 if it is missing."""
        return int(self._read_note(name) or b"0")

    def set_number(self, name: str, value: int) -> None:
        """Store a number."""
        self._set_note(name, b"%d" % value)

    def is_of_this_boot(self) -> bool:
        """Return True if all commits are present: the database was written since the boot.

        If the boot is unknown, every start rebuilds the holds from Slurm's queue, only slower.
        """
        return bool(self._read_note("boot")) and self._read_note("boot") == read_boot_id().encode()

    def record_boot(self) -> None:
        """Mark the database as complete until the machine goes down."""
        self._set_note("boot", read_boot_id().encode())

    def _read_note(self, name: str) -> bytes:
        row = self._db.execute("SELECT body FROM note WHERE name=?", (name,)).fetchone()
        return bytes(row[0]) if row else b""

    def _set_note(self, name: str, body: bytes) -> None:
        self._db.execute(
            "INSERT INTO note VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body=excluded.body",
            (name, body),
        )

    # Outbox

    def put_fact(self, fact: GateFact) -> None:
        """Add a fact to the outbox; its seq must be the next one."""
        self.fact_seq = fact.seq
        self._db.execute("INSERT INTO fact VALUES (?, ?)", (fact.seq, _encode_json(fact)))

    def fetch_facts(self, after: int, limit: int) -> list[GateFact]:
        """List facts after a seq, and delete those up to it."""
        self._db.execute("DELETE FROM fact WHERE seq <= ?", (after,))
        # The last seq must outlive its fact, so that no seq is used twice.
        self.set_number("facts", self.fact_seq)
        rows = self._db.execute("SELECT body FROM fact ORDER BY seq LIMIT ?", (limit,))
        return [_decode_fact(row[0]) for row in rows]


def _decode_hold(row: tuple[Any, ...]) -> OpenHold:
    """Decode a row of the table ``hold``."""
    values: dict[str, Any] = dict(zip(_COLUMNS.replace(" ", "").split(","), row, strict=True))
    values["shares"] = _decode_shares(str(values["shares"]))
    values["confirmed"] = bool(values["confirmed"])
    values["started"] = bool(values["started"])
    return OpenHold(**values)
