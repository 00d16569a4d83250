"""Whose rows somebody may see, as a condition in SQL: one rule for jobs and for lines."""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from steward.jobs.records import ScopeLike

NOTHING: Final = "1 = 0"
"""The condition that holds for no row."""


class Values(Protocol):
    """Binds values, in the way of the database that is asked."""

    def bind(self, value: object) -> str:
        """What stands for a value in the statement."""
        ...

    def one_of(self, column: str, values: Iterable[object]) -> str:
        """The condition that a column has one of these values."""
        ...


def scoped(scopes: Mapping[str, ScopeLike], values: Values, table: str = "") -> str:
    """The condition that a row may be seen.

    Args:
        scopes: Whose rows may be seen, by cluster; of other clusters none.
        values: Binds what is compared with.
        table: Put before each column, with its dot.
    """
    parts = []
    for cluster, scope in scopes.items():
        here = f"{table}cluster = {values.bind(cluster)}"
        if scope.everything:
            parts.append(here)
            continue
        mine = []
        if scope.uid is not None:
            own = f"{table}uid = {values.bind(scope.uid)}"
            if scope.user:
                own = f'({own} AND {table}"user" = {values.bind(scope.user)})'
            mine.append(own)
        if scope.accounts:
            charged = values.one_of(f"{table}account", sorted(scope.accounts))
            mine.append(f"({table}uid IS NOT NULL AND {charged})")
        if mine:
            parts.append(f"({here} AND {any_of(mine)})")
    return any_of(parts) if parts else NOTHING


def any_of(parts: Iterable[str]) -> str:
    """The condition that one of these holds; there is at least one."""
    alternatives = list(parts)
    if len(alternatives) == 1:
        return alternatives[0]
    # Halved, not chained: how deep an expression may be is limited.
    half = len(alternatives) // 2
    return f"({any_of(alternatives[:half])} OR {any_of(alternatives[half:])})"
