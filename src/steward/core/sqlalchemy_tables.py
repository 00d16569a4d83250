"""SQLAlchemy tables from Structs, for stores that can live on PostgreSQL.

:func:`derive_table` makes a table whose columns are the fields of a Struct, as
:mod:`steward.core.storage` does for SQLite. Statements take and return the values of the fields:
``insert(table).values(user="ann", at=now)``, ``table.c.at < now``. :func:`decode_row` makes a
Struct of a row. Alembic migrates these tables.

Importing SQLAlchemy takes 200 ms and 28 MB, so only modules that open such a store import this one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy import Index as SqlIndex
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from steward.core.storage import Convert, Index, StoredField, derive_columns
from steward.core.timestamps import from_micros, to_micros

Record = TypeVar("Record", bound=msgspec.Struct)

_TYPES: Final[Mapping[str, type[TypeEngine[Any]]]] = {
    "INTEGER": BigInteger,
    "REAL": Double,
    "TEXT": Text,
    "BLOB": LargeBinary,
}
"""SQLAlchemy's types by SQLite's."""
_DRIVER_ENCODERS: Final[Mapping[Any, Convert]] = {bool: int, from_micros: to_micros}
"""Encoders, by decoder, of values that SQLite's driver encodes and PostgreSQL's does not."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class StoredType(TypeDecorator[Any]):
    """Type of a column whose stored values differ from the field's.

    Args:
        sql_type: Type in SQLite.
        encode: Conversion to the stored value.
        decode: Conversion of the stored value; None for no conversion.
        null: Value that is stored as NULL besides None, and read for NULL.
    """

    impl: TypeEngine[Any] | type[TypeEngine[Any]] = Text
    cache_ok = True

    def __init__(
        self, sql_type: str, encode: Convert, decode: Convert | None, null: str | None
    ) -> None:
        super().__init__()
        self.impl = _TYPES[sql_type]()
        self.sql_type, self.encode, self.decode, self.null = sql_type, encode, decode, null

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 -- SQLAlchemy's signature
        """Encode a value."""
        return None if value is None or value == self.null else self.encode(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 -- SQLAlchemy's signature
        """Decode a stored value."""
        if value is None:
            return self.null
        return value if self.decode is None else self.decode(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any] | None:
        """Return the conversion of stored values; None, which is faster, if they stay the same."""
        if self.decode is None and self.null is None:
            return None
        return super().result_processor(dialect, coltype)


def derive_table(
    metadata: MetaData,
    record: type[msgspec.Struct],
    name: str,
    *,
    key: str,
    names: Mapping[str, str] = _NOTHING,
    not_null: str = "",
    empty_as_null: str = "",
    references: Mapping[str, str] = _NOTHING,
    indexes: Mapping[str, Index] = _NOTHING,
    checks: Mapping[str, str] = _NOTHING,
) -> Table:
    """Derive a table whose columns are the fields of a Struct.

    The column of a time has the suffix ``_us``. A field that is a Struct is stored as JSON bytes.
    Characters of a text that databases reject are replaced.

    Args:
        metadata: The tables of the store.
        record: The Struct.
        name: Name of the table.
        key: Fields of the primary key, comma-separated.
        names: Column names, by field, that differ; other fields are ignored.
        not_null: Field that is never NULL, although its type includes None.
        empty_as_null: Text field that is stored as NULL if it is "".
        references: Foreign keys: ``TABLE.FIELD`` by field.
        indexes: Indexes of fields, by the end of their names; the unique ones as constraints.
        checks: Conditions in SQL, by the names of their constraints.

    Raises:
        TypeError: No column stores the type of a field.
    """
    columns = [
        Column(
            names.get(field.name, f"{field.name}_us" * (field.decode is from_micros) or field.name),
            _derive_type(field, "" if field.name == empty_as_null else None),
            *([ForeignKey(references[field.name])] if field.name in references else ()),
            key=field.name,
            nullable=(field.is_nullable and field.name != not_null) or field.name == empty_as_null,
            autoincrement=False,
        )
        for field in derive_columns(record)
    ]
    constraints = [CheckConstraint(condition, name=check) for check, condition in checks.items()]
    table_key = PrimaryKeyConstraint(*key.split(", "))
    return Table(name, metadata, *columns, table_key, *constraints, *_derive_indexes(name, indexes))


def _derive_indexes(table: str, indexes: Mapping[str, Index]) -> Iterator[SchemaItem]:
    """Derive the indexes of a table, the unique ones as constraints."""
    for suffix, index in indexes.items():
        fields = index.columns.split(", ")
        if index.is_unique:
            yield UniqueConstraint(*fields, name=f"{table}_{suffix}")
        else:
            where = text(index.where) if index.where else None
            yield SqlIndex(
                *(f"{table}_{suffix}", *fields), sqlite_where=where, postgresql_where=where
            )


def _derive_type(field: StoredField, null: str | None) -> TypeEngine[Any]:
    """Derive the type of a column."""
    if isinstance(field.hint, type) and issubclass(field.hint, msgspec.Struct):
        return StoredType("BLOB", msgspec.json.encode, field.decode, None)
    encode = field.encode or _DRIVER_ENCODERS.get(field.decode)
    if encode is None and field.sql_type == "TEXT":
        encode = sanitize_text
    if encode is None:
        return _TYPES[field.sql_type]()
    return StoredType(field.sql_type, encode, field.decode, null)


def sanitize_text(value: str) -> str:
    """Replace NUL and lone surrogates, which databases reject, in a text."""
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def decode_row(record: type[Record], row: Sequence[Any]) -> Record:
    """Make a Struct of a row that begins with the values of its fields, in order."""
    return record(**dict(zip(record.__struct_fields__, row, strict=False)))
