"""Facts that are still declared outside their Struct; the list only shrinks."""

import ast
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import steward
from steward.cli.app import Root
from steward.cli.groups import Entry, LazyGroup, import_command
from steward.core.actions import find_annotation
from steward.core.config import Settings
from steward.core.section import Section
from steward.daemon.registry import import_actions

ROOT = Path(steward.__file__).parent
LEFT = Path(__file__).parent.parent / "baseline" / "migrations.json"

BY_HAND = (
    *("core/storage.py", "core/journal/", "jobs/lines.py", "archive/files/", "archive/catalog/"),
    *("bank/gate/", "bank/ledger/"),
)
"""Modules whose SQL is written by hand, or derived by SQLAlchemy."""


def count_columns() -> dict[str, int]:
    """Count columns that commands declare instead of a reply's layout."""
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
    """Count tables of pages with their own headings."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text().count("<thead>")
        for path in (ROOT / "web" / "templates").glob("*.html")
        if path.name != "_table.html"
    }


def count_inserts() -> dict[str, int]:
    """Count INSERT statements outside the derived ones and the modules with hand-written SQL."""
    return {
        name: path.read_text().count("INSERT ")
        for path in ROOT.rglob("*.py")
        if not (name := path.relative_to(ROOT).as_posix()).startswith(BY_HAND)
    }


def count_commands() -> dict[str, int]:
    """Count commands written by hand, not derived from an action."""
    counts: dict[str, int] = {}
    for entry in iterate_hand_written(Root):
        module = entry.module.removeprefix("steward.").replace(".", "/") + ".py"
        counts[module] = counts.get(module, 0) + count_leaves(import_command(entry))
    return counts


def iterate_hand_written(group: type[LazyGroup]) -> Iterator[Entry]:
    """Yield the hand-written commands of a group, and of the groups in it."""
    for entry in group.entries:
        target = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(target, LazyGroup):
            yield from iterate_hand_written(type(target))
        else:
            yield entry


def count_leaves(command: Any) -> int:
    """Count the commands below a command, or itself."""
    below = getattr(command, "commands", None)
    return sum(map(count_leaves, below.values())) if below else 1


def count_fields() -> dict[str, int]:
    """Count fields of requests without a description in their annotation."""
    counts: dict[str, int] = {}
    for request in {action.request for action in import_actions().values()}:
        module = request.__module__.removeprefix("steward.").replace(".", "/") + ".py"
        counts[module] = counts.get(module, 0) + sum(
            find_annotation(field.type) is None for field in msgspec.structs.fields(request)
        )
    return counts


def count_settings() -> dict[str, int]:
    """Count keys of the configuration file, by the module that declares them."""
    counts: dict[str, int] = {}
    pending: list[type[Any]] = [Section]
    assert issubclass(Settings, Section)  # which imports every other section
    while pending:
        section = pending.pop()
        module = section.__module__.removeprefix("steward.").replace(".", "/") + ".py"
        counts[module] = counts.get(module, 0) + len(inspect.get_annotations(section))
        pending += section.__subclasses__()
    return counts


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("commands written by hand", count_commands),
        ("fields of requests without a description", count_fields),
        ("columns of commands", count_columns),
        ("tables of pages", count_page_tables),
        ("INSERT statements", count_inserts),
        ("settings", count_settings),
    ],
)
def test_nothing_is_declared_apart_that_was_not_and_the_list_is_up_to_date(
    kind: str, count: Callable[[], dict[str, int]]
) -> None:
    counts = {name: number for name, number in sorted(count().items()) if number}
    left: dict[str, int] = json.loads(LEFT.read_text())[kind]
    more = {name: number for name, number in counts.items() if number > left.get(name, 0)}
    assert not more, f"{kind}: declare these in the reply's layout, or make them constants"
    assert counts == left, f"{kind}: lower the counts of {LEFT.name}"
