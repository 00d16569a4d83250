"""gate.db: open holds, and what the gate was last told, so that a kill loses nothing.

One connection, one writer, ``synchronous=NORMAL``: a commit survives any kill
of the process; what a loss of power takes is made anew from the tokens of the
jobs that Slurm shows (``remaking.py``). What waits for the disk is left to a
thread (``checkpoints.py``).
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from steward.bank.gate.balances import Open
from steward.bank.gate.requests import Allowance, Changes, GateFact
from steward.bank.records import AccountBooks, Books, Description, Hold, Quote, Rules
from steward.core.sqlite import Connection, open_database, transaction
from steward.slurm.cluster_model import Picture

log = logging.getLogger(__name__)

DATABASE: Final = "gate.db"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"

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
_INSERT: Final = (
    f"INSERT INTO hold ({_COLUMNS}, quote, description)"  # noqa: S608 - names of ours
    f" VALUES (?{',?' * (_COLUMNS.count(',') + 2)})"
)
_ALL: Final = f"SELECT {_COLUMNS} FROM hold ORDER BY number"  # noqa: S608 - names of ours
_UPDATE: Final = (
    "UPDATE hold SET job_id=?, account=?, payer=?, amount=?, remaining=?, shares=?, confirmed=?,"
    " started=?, created_us=?, expires_us=?, changed_us=? WHERE number=?"
)

_encode = msgspec.json.Encoder().encode
_quote = msgspec.json.Decoder(Quote).decode
_description = msgspec.json.Decoder(Description).decode
_changes = msgspec.json.Decoder(Changes).decode
_shares = msgspec.json.Decoder(tuple[tuple[int, int], ...]).decode
_fact = msgspec.json.Decoder(GateFact).decode


class Store:
    """The gate's database.

    Args:
        state_dir: The directory that holds it.

    Raises:
        SqliteError: It cannot be used as it is.
        SqliteUnavailable: It cannot be used now.
    """

    def __init__(self, state_dir: str) -> None:
        self.path = os.path.join(state_dir, DATABASE)
        self.writing = threading.Lock()
        """Held by whoever writes: waiting for SQLite's own is by naps."""
        self.asked_at = 0.0
        """When a plugin asked last, by the monotonic clock."""
        self._db: Connection = self.connect()
        self._number = self._one("SELECT coalesce(max(number), 0) FROM hold")
        first = self.number("facts")
        self.fact_seq = max(first, self._one("SELECT coalesce(max(seq), 0) FROM fact"))
        if not first:
            # Grows also where the database was lost: nobody tells as many facts as µs go by.
            self.fact_seq = time.time_ns() // 1000
            self.set_number("facts", self.fact_seq)

    def _one(self, question: str) -> int:
        return int(self._db.execute(question).fetchone()[0])

    def connect(self) -> Connection:
        """A connection that leaves checkpoints to who asks for them.

        Raises:
            SqliteError: It cannot be used as it is.
            SqliteUnavailable: It cannot be used now.
        """
        db = open_database(self.path, _MIGRATIONS, synchronous="NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        return db

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within is written together, or not at all."""
        with self.writing, transaction(self._db, self.path):
            yield

    @property
    def writes(self) -> int:
        """Grows with every row that is written."""
        return int(self._db.total_changes)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # Holds

    def next_number(self) -> int:
        """The row of a new hold."""
        self._number += 1
        return self._number

    def insert(self, hold: Open, quote: Quote | None, description: Description | None) -> None:
        """Write a new hold down."""
        self._db.execute(
            _INSERT,
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
                _encode(hold.shares).decode(),
                hold.confirmed,
                hold.started,
                hold.created_us,
                hold.expires_us,
                hold.parent,
                hold.changed_us,
                _encode(quote).decode() if quote else "",
                _encode(description).decode() if description else "",
            ),
        )

    def update(self, hold: Open) -> None:
        """Write down how a hold has changed."""
        self._db.execute(
            _UPDATE,
            (
                hold.job_id,
                hold.account,
                hold.payer,
                hold.amount,
                hold.remaining,
                _encode(hold.shares).decode(),
                hold.confirmed,
                hold.started,
                hold.created_us,
                hold.expires_us,
                hold.changed_us,
                hold.number,
            ),
        )

    def describe(self, hold: Open, quote: Quote, description: Description) -> None:
        """Write down what a hold covers now."""
        self._db.execute(
            "UPDATE hold SET amount=?, quote=?, description=? WHERE number=?",
            (hold.amount, _encode(quote).decode(), _encode(description).decode(), hold.number),
        )

    def changes(self, hold: Open) -> Changes:
        """What a job may be beside what its hold covers."""
        row = self._db.execute("SELECT changes FROM hold WHERE number=?", (hold.number,)).fetchone()
        return _changes(row[0])

    def put_changes(self, hold: Open, changes: Changes) -> None:
        """Store what a job may be beside what its hold covers."""
        self._db.execute(
            "UPDATE hold SET changes=? WHERE number=?", (_encode(changes).decode(), hold.number)
        )

    def delete(self, hold: Open) -> None:
        """Forget a hold."""
        self._db.execute("DELETE FROM hold WHERE number=?", (hold.number,))

    def holds(self) -> Iterator[Open]:
        """All open holds."""
        for row in self._db.execute(_ALL):
            yield _open(row)

    def covered(self, hold: Open) -> tuple[Quote | None, Description | None]:
        """What a hold covers."""
        row = self._db.execute(
            "SELECT quote, description FROM hold WHERE number=?", (hold.number,)
        ).fetchone()
        if row is None:
            return None, None
        return (_quote(row[0]) if row[0] else None, _description(row[1]) if row[1] else None)

    def whole(self, hold: Open) -> Hold:
        """A hold as others know it."""
        return Hold(
            id=hold.id,
            origin=hold.origin,
            cluster=hold.cluster,
            job_id=hold.job_id,
            account=hold.account,
            uid=hold.uid,
            user=hold.user,
            amount=hold.amount,
            remaining=hold.remaining,
            shares=hold.record_shares(),
            confirmed=hold.confirmed,
            started=hold.started,
            created_us=hold.created_us,
            expires_us=hold.expires_us,
            quote=self.covered(hold)[0],
        )

    # What the gate was told

    def accounts(self) -> tuple[AccountBooks, ...]:
        """The accounts as they were told last."""
        decode = msgspec.json.Decoder(AccountBooks).decode
        return tuple(decode(row[0]) for row in self._db.execute("SELECT body FROM account"))

    def put_accounts(self, books: Books, changed: list[str]) -> None:
        """Write down the accounts that have changed."""
        by_name = {account.name: account for account in books.accounts}
        for name in changed:
            if name in by_name:
                self._db.execute(
                    "INSERT INTO account VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET body=excluded.body",
                    (name, _encode(by_name[name])),
                )
            else:
                self._db.execute("DELETE FROM account WHERE name=?", (name,))

    def rules(self) -> Rules | None:
        """The rules as they were told last."""
        body = self._note("rules")
        return msgspec.json.decode(body, type=Rules) if body else None

    def put_rules(self, rules: Rules) -> None:
        """Write the rules down."""
        self._set_note("rules", _encode(rules))

    def pictures(self) -> list[Picture]:
        """The clusters as they were pictured last."""
        rows = self._db.execute("SELECT body FROM note WHERE name GLOB 'picture:*'")
        return [msgspec.json.decode(row[0], type=Picture) for row in rows]

    def put_picture(self, picture: Picture) -> None:
        """Write a picture down."""
        self._set_note(f"picture:{picture.cluster}", _encode(picture))

    def allowances(self) -> list[Allowance]:
        """The jobs that are allowed to pass."""
        rows = self._db.execute("SELECT body FROM note WHERE name GLOB 'allowance:*'")
        return [msgspec.json.decode(row[0], type=Allowance) for row in rows]

    def put_allowance(self, allowance: Allowance) -> None:
        """Write an allowance down, in place of the job's former one."""
        self._set_note(f"allowance:{allowance.cluster}:{allowance.job_id}", _encode(allowance))

    def drop_allowance(self, cluster: str, job_id: int) -> None:
        """Forget a job's allowance."""
        self._db.execute("DELETE FROM note WHERE name=?", (f"allowance:{cluster}:{job_id}",))

    def number(self, name: str) -> int:
        """A number that was written down; 0 where it was not."""
        return int(self._note(name) or b"0")

    def set_number(self, name: str, value: int) -> None:
        """Write a number down."""
        self._set_note(name, b"%d" % value)

    def is_of_this_boot(self) -> bool:
        """Whether all that was committed is there: it was written since the machine started."""
        return bool(self._note("boot")) and self._note("boot") == _boot_id()

    def set_boot(self) -> None:
        """From here on it is all there, until the machine goes down."""
        self._set_note("boot", _boot_id())

    def _note(self, name: str) -> bytes:
        row = self._db.execute("SELECT body FROM note WHERE name=?", (name,)).fetchone()
        return bytes(row[0]) if row else b""

    def _set_note(self, name: str, body: bytes) -> None:
        self._db.execute(
            "INSERT INTO note VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body=excluded.body",
            (name, body),
        )

    # What the gate tells

    def put_fact(self, fact: GateFact) -> None:
        """Write down what is to be told; its seq is the next one."""
        self.fact_seq = fact.seq
        self._db.execute("INSERT INTO fact VALUES (?, ?)", (fact.seq, _encode(fact)))

    def facts(self, after: int, limit: int) -> list[GateFact]:
        """What was not told yet, behind a seq; all up to it is forgotten."""
        self._db.execute("DELETE FROM fact WHERE seq <= ?", (after,))
        # The last seq must outlive its fact: none is given twice.
        self.set_number("facts", self.fact_seq)
        rows = self._db.execute("SELECT body FROM fact ORDER BY seq LIMIT ?", (limit,))
        return [_fact(row[0]) for row in rows]


def _open(row: tuple[Any, ...]) -> Open:
    values: dict[str, Any] = dict(zip(_COLUMNS.replace(" ", "").split(","), row, strict=True))
    values["shares"] = _shares(str(values["shares"]))
    values["confirmed"] = bool(values["confirmed"])
    values["started"] = bool(values["started"])
    return Open(**values)


def _boot_id() -> bytes:
    try:
        with open(_BOOT_ID, "rb") as file:
            return file.read().strip()
    except OSError:
        # Then every start makes the holds anew from what Slurm shows, which is only slower.
        return b""
