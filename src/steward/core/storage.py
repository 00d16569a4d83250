"""Tables from Structs: one declaration gives schema, INSERT, SELECT and the decoding of rows.

The fields of a frozen Struct are the columns of a :class:`Table`: name, type and default. The
``Table`` adds what fields cannot say: key, indexes, references. :class:`Rows` decodes the rows of
any other query into a Struct.

Times are stored as µs since the epoch, enums as their values, ``X | None`` in a column that may be
NULL, and every other type that JSON expresses as JSON text.

:mod:`steward.core.sqlalchemy_tables` derives tables of stores that can live on PostgreSQL.
"""

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import inspect

from steward.core.sqlite import Connection, Database, SqliteError
from steward.core.timestamps import from_micros, to_micros

Record = TypeVar("Record", bound=msgspec.Struct)
Convert = Callable[[Any], Any]
OnConflict = Literal["abort", "ignore", "replace"]
"""Effect of an insert if a row with the same key or unique columns exists."""

_SCALARS: Final[Mapping[type[inspect.Type], tuple[str, Convert | None]]] = {
    inspect.IntType: ("INTEGER", None),
    inspect.BoolType: ("INTEGER", bool),
    inspect.DateTimeType: ("INTEGER", from_micros),
    inspect.FloatType: ("REAL", None),
    inspect.StrType: ("TEXT", None),
    inspect.BytesType: ("BLOB", None),
}
"""SQL types and decoders."""
_JSON_TYPES: Final = (
    *(inspect.AnyType, inspect.DictType, inspect.StructType, inspect.ListType, inspect.SetType),
    *(inspect.FrozenSetType, inspect.TupleType, inspect.VarTupleType),
)


class Index(msgspec.Struct, frozen=True):
    """Index of a table: comma-separated columns, and the condition of a partial index."""

    columns: str
    where: str = ""
    is_unique: bool = False


class StoredField(msgspec.Struct, frozen=True):
    """Field of a stored record: type and default in SQL, encoding and decoding of its values.

    Attributes:
        name: Name of the field.
        hint: Type of the field.
        sql_type: Type in SQLite.
        is_nullable: Whether it may be NULL.
        default: Clause for the field's default; "" for none.
        encode: Conversion to the stored value, for those that no driver converts.
        decode: Conversion of a stored value other than NULL.
    """

    name: str
    hint: Any
    sql_type: str
    is_nullable: bool
    default: str
    encode: Convert | None
    decode: Convert | None


class Rows(Generic[Record]):
    """Rows of a query whose columns are the fields of a Struct, in order."""

    def __init__(self, record: type[Record]) -> None:
        self.record = record
        self._columns = derive_columns(record)
        self.columns: tuple[str, ...] = record.__struct_fields__
        self.select_list = ", ".join(self.columns)
        self._decoders = [
            (index, column.decode) for index, column in enumerate(self._columns) if column.decode
        ]
        is_scalar = {decode for _, decode in self._decoders} <= {bool}
        self._is_plain = record.__struct_config__.array_like and is_scalar

    def decode(self, row: Sequence[Any]) -> Record:
        """Decode a row."""
        values = list(row)
        for index, decode in self._decoders:
            if values[index] is not None:
                values[index] = decode(values[index])
        return self.record(**dict(zip(self.columns, values, strict=True)))

    def decode_all(self, rows: Sequence[Sequence[Any]]) -> list[Record]:
        """Decode rows; of an ``array_like`` Struct without times and JSON five times as fast."""
        if self._is_plain:
            # Not strict, because SQLite has no booleans. The record is a runtime value.
            return msgspec.convert(rows, list[self.record], strict=False)  # type: ignore[name-defined]
        return [self.decode(row) for row in rows]

    def fetch(self, database: Database, statement: str, *values: Any) -> list[Record]:
        """Return the records of a query."""
        rows = database.fetch(statement, *values)
        try:
            return self.decode_all(rows)
        except (msgspec.MsgspecError, ValueError) as error:
            raise SqliteError(
                f"{database.path}: a row is not a {self.record.__name__}: {error}", database.path
            ) from error


class Table(Rows[Record]):
    """Table whose columns are the fields of a Struct.

    SQLite numbers the rows whose only key column is an integer, where it is 0. A table with
    another key is stored in the order of its key (``WITHOUT ROWID``).

    Args:
        record: The Struct.
        name: Name of the table.
        key: Names of the primary key's columns, comma-separated; "" for no key.
        unique: Columns that identify a row besides the key, comma-separated; "" for none.
        autoincrement: Whether SQLite never numbers a row like a deleted one.
        indexes: Indexes, by the end of their names.
        references: Foreign keys: ``TABLE (COLUMN)`` by column.
        has_one_row: Whether the schema inserts a row of defaults, the only one.
        later: Columns that migrations after the first add, comma-separated, an item a migration.

    Raises:
        TypeError: No column stores the type of a field.
        ValueError: A column that is named here is no field.
    """

    def __init__(
        self,
        record: type[Record],
        name: str,
        *,
        key: str = "",
        unique: str = "",
        autoincrement: bool = False,
        indexes: Mapping[str, Index] | None = None,
        references: Mapping[str, str] | None = None,
        has_one_row: bool = False,
        later: Sequence[str] = (),
    ) -> None:
        super().__init__(record)
        self.name, self.key, self.unique = name, key, unique
        indexes, references = indexes or {}, references or {}
        named = ", ".join(
            (key, unique, *references, *later, *(x.columns for x in indexes.values()))
        )
        unknown = set(filter(None, named.split(", "))) - set(self.columns)
        if unknown:
            raise ValueError(f"table {name}: {record.__name__} has no field {min(unknown)!r}")
        encoders = {column.name: column.encode for column in self._columns}
        definitions = {}
        end = f", PRIMARY KEY ({key})) WITHOUT ROWID" if key else ")"
        for column in self._columns:
            constraints = " NOT NULL" * (not column.is_nullable) + column.default
            if column.name == key and column.sql_type == "INTEGER" and column.encode is None:
                encoders[key] = lambda number: number or None
                constraints = " PRIMARY KEY" + " AUTOINCREMENT" * autoincrement
                end = ")"
            if column.name in references:
                constraints += f" REFERENCES {references[column.name]}"
            definitions[column.name] = f"{column.name} {column.sql_type}{constraints}"
        add = f"ALTER TABLE {name} ADD COLUMN"
        self.additions = tuple(
            "".join(f"{add} {definitions.pop(column)};\n" for column in columns.split(", "))
            for columns in later
        )
        """Scripts that add the later columns, one a migration."""
        end = f", UNIQUE ({unique})" * bool(unique) + end
        self.schema = f"CREATE TABLE {name} ({', '.join(definitions.values())}{end};\n"
        """Script that creates the table without its later columns, and its indexes."""
        for suffix, index in indexes.items():
            start = f"CREATE {'UNIQUE ' * index.is_unique}INDEX {name}_{suffix}"
            where = f" WHERE {index.where}" * bool(index.where)
            self.schema += f"{start} ON {name} ({index.columns}){where};\n"
        self.schema += f"INSERT INTO {name} DEFAULT VALUES;\n" * has_one_row
        self._encoders = [
            (index, encode) for index, encode in enumerate(encoders.values()) if encode
        ]
        self.select_list = ", ".join(f"{name}.{column}" for column in self.columns)
        insert = self.build_insert(", ".join(self.columns))
        self._inserts: dict[OnConflict, str] = {
            "abort": insert,
            # Not OR IGNORE, which also drops a row without a value that it needs.
            "ignore": f"{insert} ON CONFLICT DO NOTHING",
            "replace": insert.replace("INSERT", "INSERT OR REPLACE", 1),
        }

    def select(self, database: Database, clause: str = "", *values: Any) -> list[Record]:
        """Return the records that match a clause: WHERE, ORDER BY, LIMIT."""
        statement = f"SELECT {self.select_list} FROM {self.name} {clause}"  # noqa: S608 -- values are bound
        return self.fetch(database, statement, *values)

    def build_insert(self, columns: str) -> str:
        """Build the INSERT of values of these columns, comma-separated, in their order."""
        marks = ", ".join("?" * (columns.count(",") + 1))
        return f"INSERT INTO {self.name} ({columns}) VALUES ({marks})"  # noqa: S608 -- our own column names

    def build_upsert(self, update: Iterable[str] | None = None) -> str:
        """Build the INSERT of an encoded record that overwrites columns of the row it identifies.

        Args:
            update: The columns; None for all that do not identify the row.
        """
        if update is None:
            fixed = f"{self.key}, {self.unique}".split(", ")
            update = (name for name in self.columns if name not in fixed)
        changes = ", ".join(f"{name} = excluded.{name}" for name in update)
        target = self.unique or self.key
        return f"{self._inserts['abort']} ON CONFLICT ({target}) DO UPDATE SET {changes}"

    def encode(self, record: Record) -> Sequence[Any]:
        """Encode a record as the values of a row."""
        values = list(msgspec.structs.astuple(record))
        for index, encode in self._encoders:
            if values[index] is not None:
                values[index] = encode(values[index])
        return values

    def insert(
        self, connection: Connection, record: Record, on_conflict: OnConflict = "abort"
    ) -> Any:
        """Insert a record; return SQLite's cursor, which has its number and the count of rows."""
        return connection.execute(self._inserts[on_conflict], self.encode(record))

    def insert_all(
        self, connection: Connection, records: Iterable[Record], on_conflict: OnConflict = "abort"
    ) -> None:
        """Insert records."""
        connection.executemany(self._inserts[on_conflict], map(self.encode, records))


def encode_json(value: Any) -> str:
    """Encode a value as the JSON text of a column."""
    return msgspec.json.encode(value).decode()


def derive_columns(record: type[msgspec.Struct]) -> list[StoredField]:
    """Derive the columns of a table from the fields of a Struct.

    Raises:
        TypeError: No column stores the type of a field.
    """
    hints = typing.get_type_hints(record)
    return [
        _derive_column(record, field, hints[field.name])
        for field in inspect.type_info(record).fields  # type: ignore[attr-defined]
    ]


def _derive_column(record: type[msgspec.Struct], field: inspect.Field, hint: Any) -> StoredField:
    """Derive a column from a field of a Struct."""
    kinds = _list_kinds(field.type)
    stored = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
    kind = stored[0] if len(stored) == 1 else None
    sql_type, decode = _SCALARS.get(type(kind), ("", None))  # type: ignore[arg-type]
    encode: Convert | None = None
    if isinstance(kind, inspect.LiteralType):
        sql_type = "TEXT" if {type(value) for value in kind.values} == {str} else ""
    elif isinstance(kind, inspect.EnumType):
        sql_type = "TEXT" if isinstance(next(iter(kind.cls)).value, str) else "INTEGER"
        encode, decode = attrgetter("value"), kind.cls
    elif isinstance(kind, _JSON_TYPES):
        sql_type, encode, decode = "TEXT", encode_json, msgspec.json.Decoder(hint).decode
    if not sql_type:
        raise TypeError(
            f"{record.__name__}.{field.name}: no column stores {hint}; use int, float, str, bytes, "
            "bool, datetime, an enum, a Literal of texts, or a type that JSON expresses"
        )
    # None is among the values of Any.
    is_nullable = stored != kinds or isinstance(kind, inspect.AnyType)
    is_made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if is_made else field.default
    default = ""
    if value is not None and value is not msgspec.NODEFAULT:
        default = f" DEFAULT {_quote(encode(value) if encode else value)}"
    return StoredField(field.name, hint, sql_type, is_nullable, default, encode, decode)


def _list_kinds(kind: inspect.Type) -> list[inspect.Type]:
    """Return the alternatives of a type, without its metadata."""
    if isinstance(kind, inspect.Metadata):
        return _list_kinds(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [alternative for part in kind.types for alternative in _list_kinds(part)]
    return [kind]


def _quote(value: Any) -> str:
    """Quote a value for SQL."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, datetime):
        return str(to_micros(value))
    return repr(value)


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a consumer's table ``cursor``: journal position of the last event applied."""

    position: int = 0


class OutboxBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a consumer's table ``outbox``: encoded events to append to the journal."""

    number: int = 0
    events: bytes


CURSOR: Final = Table(Cursor, "cursor", has_one_row=True)
OUTBOX: Final = Table(OutboxBatch, "outbox", key="number")


def read_cursor(database: Database) -> int:
    """Read a consumer's cursor: the position of the last event applied; 0 at first."""
    return int(database.fetch_value("SELECT position FROM cursor"))


def move_cursor(connection: Connection, position: int) -> None:
    """Move a consumer's cursor, inside the transaction of the events' effect.

    A replayed event may have an older position, which is ignored.
    """
    connection.execute("UPDATE cursor SET position = max(position, ?)", (position,))
