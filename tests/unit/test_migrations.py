"""What still declares a fact apart from the Struct that should hold it; the list only shrinks."""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import steward

ROOT = Path(steward.__file__).parent
LEFT = Path(__file__).parent.parent / "baseline" / "migrations.json"

BY_HAND = (
    *("core/storage.py", "core/journal/", "jobs/lines.py", "archive/files/", "archive/catalog/"),
    *("bank/gate/", "bank/ledger/"),
)
"""Modules whose SQL is written by hand, or derived by SQLAlchemy."""


def count_columns() -> dict[str, int]:
    """Columns of tables that commands declare, not the layout of a reply."""
    return {
        path.relative_to(ROOT).as_posix(): sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "Column"
            for node in ast.walk(ast.parse(path.read_text()))
        )
        for path in (ROOT / "cli").glob("*.py")
    }


def count_page_tables() -> dict[str, int]:
    """Tables of pages with headings of their own."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text().count("<thead>")
        for path in (ROOT / "web" / "templates").glob("*.html")
        if path.name != "_table.html"
    }


def count_inserts() -> dict[str, int]:
    """INSERT statements outside the derived ones and the modules that keep SQL by hand."""
    return {
        name: path.read_text().count("INSERT ")
        for path in ROOT.rglob("*.py")
        if not (name := path.relative_to(ROOT).as_posix()).startswith(BY_HAND)
    }


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("columns of commands", count_columns),
        ("tables of pages", count_page_tables),
        ("INSERT statements", count_inserts),
    ],
)
def test_nothing_is_declared_apart_that_was_not_and_the_list_is_up_to_date(
    kind: str, count: Callable[[], dict[str, int]]
) -> None:
    counts = {name: number for name, number in sorted(count().items()) if number}
    left: dict[str, int] = json.loads(LEFT.read_text())[kind]
    more = {name: number for name, number in counts.items() if number > left.get(name, 0)}
    assert not more, f"{kind}: declare these in the reply's layout"
    assert counts == left, f"{kind}: lower the counts of {LEFT.name}"
