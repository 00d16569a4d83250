"""Schema parts that Alembic's comparison omits: keys and check constraints."""

import sqlalchemy
from sqlalchemy import CheckConstraint, Connection

from steward.bank.ledger.tables import metadata

Parts = dict[str, tuple[list[str], list[str]]]


def derived_parts() -> Parts:
    """Return each table's key columns, and its checks by name, as derived from its Struct."""
    return {
        table.name: (
            [column.name for column in table.primary_key],
            sorted(
                str(constraint.name)
                for constraint in table.constraints
                if isinstance(constraint, CheckConstraint)
            ),
        )
        for table in metadata.sorted_tables
    }


def migrated_parts(connection: Connection) -> Parts:
    """Return the same parts of the schema that the migrations created."""
    inspector = sqlalchemy.inspect(connection)
    return {
        name: (
            inspector.get_pk_constraint(name)["constrained_columns"],
            sorted(str(check["name"]) for check in inspector.get_check_constraints(name)),
        )
        for name in inspector.get_table_names()
        if name != "alembic_version"
    }
