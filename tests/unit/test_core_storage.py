"""Tables from Structs: rows are read as written, and the schema is as declared."""

import ast
import enum
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steward
from harness.documentation import run_example
from steward.core.sqlite import Database, SqliteError
from steward.core.storage import CURSOR, Index, Rows, Table
from steward.core.timestamps import to_micros

MAX = 2**63 - 1
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Part(msgspec.Struct, frozen=True):
    name: str
    weight: float = 0.0


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    id: int = 0
    size: Annotated[int, msgspec.Meta(ge=-MAX, description="Size in bytes.")]
    is_new: bool
    text: str
    data: bytes
    at: datetime
    ratio: float
    color: Color
    level: Level
    kind: Literal["a", "b"]
    names: tuple[str, ...]
    parts: dict[str, Part]
    whole: Part
    anything: Any
    maybe_size: int | None = None
    maybe_new: bool | None = None
    maybe_at: datetime | None = None
    maybe_color: Color | None = None
    maybe_parts: list[Part] | None = None


THINGS = Table(Thing, "thing", key="id")

INTS = st.integers(-MAX, MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False)
TIMES = st.datetimes(timezones=st.just(UTC))
PARTS = st.builds(Part, TEXTS, st.floats(allow_nan=False, allow_infinity=False))
JSON = st.recursive(
    st.none() | st.booleans() | INTS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=5,
)
THING = st.builds(
    Thing,
    size=INTS,
    is_new=st.booleans(),
    text=TEXTS,
    data=st.binary(),
    at=TIMES,
    ratio=FLOATS,
    color=st.sampled_from(Color),
    level=st.sampled_from(Level),
    kind=st.sampled_from(["a", "b"]),
    names=st.lists(TEXTS).map(tuple),
    parts=st.dictionaries(TEXTS, PARTS),
    whole=PARTS,
    anything=JSON,
    maybe_size=st.none() | INTS,
    maybe_new=st.none() | st.booleans(),
    maybe_at=st.none() | TIMES,
    maybe_color=st.none() | st.sampled_from(Color),
    maybe_parts=st.none() | st.lists(PARTS),
)


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(str(tmp_path_factory.mktemp("things") / "a.db"), (THINGS.schema,))
    yield database
    database.close()


@given(things_in=st.lists(THING, max_size=3))
def test_what_is_written_is_read(things: Database, things_in: list[Thing]) -> None:
    with things.transaction() as connection:
        connection.execute("DELETE FROM thing")
        THINGS.insert_all(connection, things_in)
    rows = THINGS.select(things, "ORDER BY id")
    assert [row.id for row in rows] == list(range(1, len(things_in) + 1))
    assert [msgspec.structs.replace(row, id=0) for row in rows] == things_in


@given(TIMES)
def test_a_time_is_bound_as_it_is_stored(things: Database, at: datetime) -> None:
    us = things.fetch_value("SELECT ?", at)
    assert us == to_micros(at)
    assert Rows(Moment).decode((us,)) == Moment(at)


class Moment(msgspec.Struct, frozen=True):
    at: datetime


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    path: str = "it's"
    count: int = 1
    seen: datetime = NOON
    is_ok: bool = True
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    data: bytes = b"\x00\xff"
    note: str | None = None
    reply: Any = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    id: int = 0
    host: str


class Comment(msgspec.Struct, frozen=True):
    entry: int
    text: str


VISITS = Table(
    Visit,
    "visit",
    key="host, path",
    indexes={"seen": Index("seen, host", where="count > 1"), "of_host": Index("host")},
)
ENTRIES = Table(Entry, "entry", key="id", autoincrement=True)
COMMENTS = Table(Comment, "comment", references={"entry": "entry (id)"})
LABELS = Table(Entry, "label", key="id", unique="host")


def test_the_schema_says_what_is_declared() -> None:
    assert VISITS.schema == (
        "CREATE TABLE visit (host TEXT NOT NULL, path TEXT NOT NULL DEFAULT 'it''s', "
        "count INTEGER NOT NULL DEFAULT 1, seen INTEGER NOT NULL DEFAULT 1767268800000000, "
        "is_ok INTEGER NOT NULL DEFAULT True, tags TEXT NOT NULL DEFAULT '{}', "
        "data BLOB NOT NULL DEFAULT X'00ff', note TEXT, reply TEXT, "
        "PRIMARY KEY (host, path)) WITHOUT ROWID;\n"
        "CREATE INDEX visit_seen ON visit (seen, host) WHERE count > 1;\n"
        "CREATE INDEX visit_of_host ON visit (host);\n"
    )
    assert ENTRIES.schema == (
        "CREATE TABLE entry (id INTEGER PRIMARY KEY AUTOINCREMENT, host TEXT NOT NULL);\n"
    )
    assert COMMENTS.schema == (
        "CREATE TABLE comment (entry INTEGER NOT NULL REFERENCES entry (id), text TEXT NOT NULL);\n"
    )
    assert CURSOR.schema == (
        "CREATE TABLE cursor (position INTEGER NOT NULL DEFAULT 0);\n"
        "INSERT INTO cursor DEFAULT VALUES;\n"
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Database]:
    tables = (VISITS, ENTRIES, COMMENTS, CURSOR)
    database = Database(str(tmp_path / "a.db"), ("".join(table.schema for table in tables),))
    yield database
    database.close()


def test_defaults_are_the_fields(site: Database) -> None:
    with site.transaction() as connection:
        connection.execute("INSERT INTO visit (host) VALUES ('a')")
    assert VISITS.select(site) == [Visit(host="a")]
    assert [cursor.position for cursor in CURSOR.select(site)] == [0]


def test_unique_columns_identify_a_row(tmp_path: Path) -> None:
    schema = "CREATE TABLE label (id INTEGER PRIMARY KEY, host TEXT NOT NULL, UNIQUE (host));\n"
    assert LABELS.schema == schema
    labels = Table(Comment, "remark", unique="entry")
    database = Database(str(tmp_path / "a.db"), (labels.schema,))
    with database.transaction() as connection:
        for text in ("first", "second"):
            connection.execute(labels.build_upsert(), labels.encode(Comment(1, text)))
    assert labels.select(database) == [Comment(1, "second")]
    database.close()


def test_a_row_that_exists_is_settled(site: Database) -> None:
    first, second = Visit(host="a", note="first"), Visit(host="a", note="second", count=7)
    with site.transaction() as connection:
        assert VISITS.insert(connection, first).rowcount == 1
        assert VISITS.insert(connection, second, "ignore").rowcount == 0
        assert VISITS.select(site) == [first]
        connection.execute(VISITS.build_upsert(("note",)), VISITS.encode(second))
        assert VISITS.select(site) == [msgspec.structs.replace(first, note="second")]
        adding = VISITS.build_upsert(("note",)) + ", count = count + excluded.count"
        connection.execute(adding, VISITS.encode(second))
        assert [visit.count for visit in VISITS.select(site)] == [8]
        VISITS.insert_all(connection, [second, Visit(host="b")], "replace")
        assert VISITS.select(site, "WHERE count > ? ORDER BY host", 1) == [second]
    with pytest.raises(SqliteError, match=r"a\.db: UNIQUE"), site.transaction() as connection:
        VISITS.insert(connection, first)
    # A row that lacks a value is no row that exists.
    incomplete = Visit(host="c", path=None)  # type: ignore[arg-type]
    with pytest.raises(SqliteError, match="NOT NULL"), site.transaction() as connection:
        VISITS.insert(connection, incomplete, "ignore")


def test_a_row_that_cannot_be_decoded_is_named_with_its_file(site: Database) -> None:
    with site.transaction() as connection:
        connection.execute("INSERT INTO visit (host, tags) VALUES ('a', 'no JSON')")
    with pytest.raises(SqliteError, match=r"a\.db: a row is not a Visit: JSON is malformed"):
        VISITS.select(site)


def test_numbers_are_given_and_not_again(site: Database) -> None:
    with site.transaction() as connection:
        assert [ENTRIES.insert(connection, Entry(host="a")).lastrowid for _ in range(2)] == [1, 2]
        connection.execute("DELETE FROM entry")
        ENTRIES.insert_all(connection, [Entry(host="b"), Entry(id=9, host="c")])
    assert [entry.id for entry in ENTRIES.select(site, "ORDER BY id")] == [3, 9]


def test_a_reference_to_nothing_is_refused(site: Database) -> None:
    with pytest.raises(SqliteError, match="FOREIGN KEY"), site.transaction() as connection:
        COMMENTS.insert(connection, Comment(1, "to nobody"))


def test_a_part_of_a_table_and_a_join_are_read(site: Database) -> None:
    with site.transaction() as connection:
        VISITS.insert(connection, Visit(host="a", count=3))
        ENTRIES.insert(connection, Entry(host="a"))
    entries = Rows(Entry)
    assert entries.fetch(site, "SELECT count, host FROM visit") == [Entry(id=3, host="a")]
    (row,) = site.fetch(
        f"SELECT {ENTRIES.select_list}, {VISITS.select_list} "
        "FROM entry JOIN visit ON visit.host = entry.host"
    )
    assert ENTRIES.decode(row[:2]) == Entry(id=1, host="a")
    assert VISITS.decode(row[2:]) == Visit(host="a", count=3)


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    node: str
    is_down: bool = False
    until_us: int | None = None


def test_rows_like_arrays_are_read(tmp_path: Path) -> None:
    table = Table(Span, "span")
    database = Database(str(tmp_path / "a.db"), (table.schema,))
    spans = [Span(node="a"), Span(node="b", is_down=True, until_us=2)]
    with database.transaction() as connection:
        table.insert_all(connection, spans)
    assert table.select(database) == spans
    assert table.select(database)[1].is_down is True
    assert table.decode(("b", 1, 2)) == spans[1]
    database.close()


def test_a_column_that_came_later_is_added_to_what_there_is(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    grown = Table(Visit, "visit", key="host, path", later=("note, count", "data"))
    fields = [name for name in Visit.__struct_fields__ if name not in ("note", "count", "data")]
    old = Database(path, (grown.schema,))
    with old.transaction() as connection:
        connection.execute("INSERT INTO visit (host) VALUES ('a')")
    assert [row[1] for row in old.fetch("PRAGMA table_info(visit)")] == fields
    old.close()
    migrations = (grown.schema, *grown.additions)
    assert len(migrations) == 3
    for name in ("a.db", "fresh.db"):
        database = Database(str(tmp_path / name), migrations)
        with database.transaction() as connection:
            grown.insert(connection, Visit(host="b", count=2))
        visits = grown.select(database, "ORDER BY host")
        assert visits[-2:] == [Visit(host="a"), Visit(host="b", count=2)][-len(visits) :]
        database.close()


def test_a_column_that_the_documentation_adds_is_stored(tmp_path: Path) -> None:
    example = run_example("Add a column to a table")
    table, migrations = example["REPORTS"], example["MIGRATIONS"]
    path = str(tmp_path / "site.db")
    first_release = Database(path, migrations[:1])
    with first_release.transaction() as connection:
        connection.execute("INSERT INTO disk_report VALUES ('n1', 5)")
    first_release.close()
    database = Database(path, migrations)
    report = example["DiskReport"](node="n2", free_bytes=7, mount="/scratch")
    with database.transaction() as connection:
        table.insert(connection, report)
    rows = table.select(database, "ORDER BY node")
    assert [(row.node, row.free_bytes, row.mount) for row in rows] == [
        ("n1", 5, "/"),
        ("n2", 7, "/scratch"),
    ]
    database.close()


@pytest.mark.parametrize(
    "kind", [complex, int | str, Literal[1, "a"], Literal[1], type(None), Path]
)
def test_a_type_that_no_column_stores_is_named(kind: Any) -> None:
    record = msgspec.defstruct("Wrong", [("size", kind)])
    with pytest.raises(TypeError, match=r"^Wrong\.size: no column stores "):
        Table(record, "wrong")


@pytest.mark.parametrize(
    "declared",
    [
        {"key": "host, nothing"},
        {"indexes": {"of_nothing": Index("nothing")}},
        {"references": {"nothing": "entry (id)"}},
    ],
)
def test_a_column_that_is_no_field_is_named(declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^table visit: Visit has no field 'nothing'"):
        Table(Visit, "visit", **declared)


def test_a_reader_of_nothing_and_a_writer_of_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    Database(path, (CURSOR.schema,), for_owner=True).close()
    assert Path(path).stat().st_mode & 0o777 == 0o600
    reader = Database(path, (), read_only=True)
    assert reader.fetch_value("SELECT position FROM cursor") == 0
    assert reader.fetch_value("SELECT position FROM cursor WHERE position > 0") is None
    with pytest.raises(SqliteError, match=r"a\.db: no such table"):
        reader.fetch("SELECT * FROM missing")
    reader.close()


ROOT = Path(steward.__file__).parent
LIGHT = (
    *("steward.core.storage", "steward.automation.audit", "steward.daemon.idempotency"),
    *("steward.daemon.serve", "steward.daemon.source_workers", "steward.daemon.socket"),
    *("steward.capture.jobcomp", "steward.capture.sensor.store", "steward.capture.run_store"),
    *("steward.archive.remote.sink", "steward.archive.files.sink", "steward.core.journal.server"),
    *("steward.extensions.controllers.forwarder", "steward.reports.history.consumer"),
    *("steward.automation.rules.consumer", "steward.extensions.jobacct_plugins.consumer"),
    *("steward.bank.gate.server", "steward.web.application", "steward.capture.nodes.listener"),
    *("steward.daemon.controller", "steward.extensions.kafka", "steward.client"),
)
"""Modules of processes that open neither the ledger nor a store on PostgreSQL."""


def list_started_modules() -> set[str]:
    """List the modules that workers of the daemon import when they start."""
    return {
        node.module or ""
        for path in (ROOT / "daemon").glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    }


def find_loaded(modules: Iterable[str], *libraries: str, then: str = "") -> str:
    """Return libraries that a process has loaded after these imports, with the first importer."""
    code = (
        "import importlib, sys\n"
        f"for module in {sorted(modules)}:\n"
        "    importlib.import_module(module)\n"
        f"    for name in {libraries}:\n"
        "        if name in sys.modules: sys.exit(f'{module} loads {name}')\n"
        f"{then}\n"
        f"print([name for name in {libraries} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_one_sqlite_library_and_no_sqlalchemy_are_loaded() -> None:
    modules = {*LIGHT, *list_started_modules()}
    assert find_loaded(modules, "sqlalchemy", "_sqlite3", "sqlite3") == "[]\n"


def test_the_ledgers_library_loads_no_second_sqlite(tmp_path: Path) -> None:
    modules = ("steward.bank.ledger.engine", "steward.core.sqlite")
    opened = (
        "from steward.bank.ledger import open_ledger\n"
        "from steward.bank.settings import BankSettings\n"
        "from steward.core.config import Settings\n"
        f"open_ledger(Settings(state_dir={str(tmp_path)!r}, bank=BankSettings(enabled=True)))"
    )
    assert find_loaded(modules, "_sqlite3", "sqlite3", then=opened) == "[]\n"


def test_no_module_loads_a_second_sqlite() -> None:
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in ROOT.rglob("*.py")
        if path.stem != "__main__" and "migrations" not in path.parts
    }
    assert find_loaded(modules, "_sqlite3", "sqlite3") == "[]\n"
