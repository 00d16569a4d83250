"""SQLAlchemy tables from Structs: rows are read as written, and the schema is as declared."""

import enum
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
import sqlalchemy
from pysqlite3 import dbapi2
from sqlalchemy import Connection, MetaData, insert, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from steward.core.sqlalchemy_tables import decode_row, derive_table, sanitize_text
from steward.core.storage import Index

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    weight: float = 0.0


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    user: str = ""
    key: str = ""
    made: datetime | None = None
    ended: datetime | None = None
    is_new: bool = False
    color: Color = Color.RED
    owners: tuple[str, ...] = ()
    part: Part = Part("wheel")
    size: float = 0.0
    data: bytes = b""


class ThingRow(Thing, frozen=True, kw_only=True):
    box: int


metadata = MetaData()
box = derive_table(metadata, msgspec.defstruct("Box", [("id", int)], frozen=True), "box", key="id")
thing = derive_table(
    *(metadata, ThingRow, "thing"),
    key="box, id",
    names={"user": "user_name", "absent": "ignored"},
    not_null="made",
    empty_as_null="key",
    references={"box": "box.id"},
    indexes={
        "key": Index("user, key", is_unique=True),
        "made": Index("made"),
        "ended": Index("ended", "ended_us IS NOT NULL"),
    },
    checks={"has_a_size": "size >= 0"},
)


@pytest.fixture
def connection() -> Any:
    engine = sqlalchemy.create_engine("sqlite://", module=dbapi2)
    metadata.create_all(engine)
    with engine.begin() as opened:
        opened.execute(insert(box), {"id": 1})
        yield opened
    engine.dispose()


def add(connection: Connection, **fields: Any) -> ThingRow:
    values: dict[str, Any] = {"id": 1, "box": 1, "made": NOON} | fields
    row = ThingRow(**values)
    connection.execute(insert(thing), msgspec.structs.asdict(row))
    return row


def test_what_is_written_is_read(connection: Connection) -> None:
    row = add(
        connection,
        user="ann",
        key="k",
        ended=NOON,
        is_new=True,
        color=Color.BLUE,
        owners=("ann", "bob"),
        part=Part("wheel", 2.5),
        size=1.5,
        data=b"\0\xff",
    )
    (stored,) = connection.execute(select(thing))
    assert decode_row(ThingRow, stored) == row
    assert msgspec.structs.asdict(decode_row(Thing, stored)).items() <= (
        msgspec.structs.asdict(row).items()
    )
    raw = connection.exec_driver_sql("SELECT made_us, is_new, color, owners, part FROM thing")
    assert tuple(raw.one()) == (
        *(1767268800000000, 1, "blue", '["ann","bob"]'),
        b'{"name":"wheel","weight":2.5}',
    )


def test_conditions_and_changes_take_the_values_of_fields(connection: Connection) -> None:
    add(connection)
    add(connection, id=2, made=NOON + timedelta(days=1), is_new=True, color=Color.BLUE)
    elsewhere = NOON.astimezone(timezone(timedelta(hours=5)))
    for condition in (thing.c.made > elsewhere, thing.c.is_new == 1, thing.c.color == Color.BLUE):
        assert connection.execute(select(thing.c.id).where(condition)).scalars().all() == [2]
    connection.execute(update(thing).where(thing.c.id == 2).values(ended=elsewhere, user="a\0"))
    latest = connection.execute(select(sqlalchemy.func.max(thing.c.ended))).scalar()
    assert latest is not None
    assert (latest, latest.tzinfo) == (NOON, UTC)
    found = select(thing.c.user).where(thing.c.user == "a\0")
    assert connection.execute(found).scalar() == "a\ufffd"


def test_an_empty_text_is_null_where_it_is_declared(connection: Connection) -> None:
    add(connection)
    add(connection, id=2)  # the key is unique, so it is NULL in both
    rows = connection.execute(select(thing.c.key, thing.c.user)).all()
    assert [tuple(row) for row in rows] == [("", "")] * 2
    raw = connection.exec_driver_sql("SELECT count(*) FROM thing WHERE key IS NULL")
    assert raw.scalar() == 2


@pytest.mark.parametrize("fields", [{"made": None}, {"size": -1.0}, {"user": None}])
def test_what_the_table_forbids_is_rejected(connection: Connection, fields: Any) -> None:
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        add(connection, **fields)


def test_the_schema_on_postgresql_is_as_declared() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    schema = " ".join(str(CreateTable(thing).compile(dialect=dialect)).split())
    assert schema == (
        "CREATE TABLE thing ( id BIGINT NOT NULL, user_name TEXT NOT NULL, key TEXT, "
        "made_us BIGINT NOT NULL, ended_us BIGINT, is_new BIGINT NOT NULL, color TEXT NOT NULL, "
        "owners TEXT NOT NULL, part BYTEA NOT NULL, size DOUBLE PRECISION NOT NULL, "
        "data BYTEA NOT NULL, box BIGINT NOT NULL, PRIMARY KEY (box, id), "
        "CONSTRAINT has_a_size CHECK (size >= 0), CONSTRAINT thing_key UNIQUE (user_name, key), "
        "FOREIGN KEY(box) REFERENCES box (id) )"
    )
    assert sorted(str(CreateIndex(index).compile(dialect=dialect)) for index in thing.indexes) == [
        "CREATE INDEX thing_ended ON thing (ended_us) WHERE ended_us IS NOT NULL",
        "CREATE INDEX thing_made ON thing (made_us)",
    ]


def test_a_type_that_no_column_stores_is_named() -> None:
    wrong = msgspec.defstruct("Wrong", [("size", complex)])
    with pytest.raises(TypeError, match=r"^Wrong\.size: no column stores "):
        derive_table(MetaData(), wrong, "wrong", key="size")


def test_texts_that_databases_reject_are_replaced() -> None:
    assert sanitize_text("a\0\udc80ü") == "a\ufffd?ü"
