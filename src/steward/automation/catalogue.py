"""Every operation, by its name."""

import difflib
import importlib
from functools import cache
from typing import Final

from steward.automation.errors import UnknownOperation
from steward.automation.operation import Operation

_WHERE: Final = (
    *(
        "config",
        "jobs",
        "jobs_changing",
        "steps",
        "nodes",
        "reservations",
        "triggers",
        "partitions",
        "scripts",
    ),
    *("bank", "notify", "programs"),
)


@cache
def operations() -> dict[str, Operation]:
    """All of them, those of StackStorm's pack first."""
    found: list[Operation] = []
    for name in _WHERE:
        module = importlib.import_module(f"steward.automation.operations.{name}")
        found += module.OPERATIONS
    found.sort(key=lambda one: (not one.pack, one.ref))
    return {one.ref: one for one in found}


def operation(ref: str) -> Operation:
    """The operation of that name.

    Raises:
        UnknownOperation: There is none.
    """
    known = operations()
    if ref in known:
        return known[ref]
    near = difflib.get_close_matches(ref, known, 1)
    hint = f"is it {near[0]}?" if near else "'steward action list' shows all"
    raise UnknownOperation(f"there is no action {ref!r}: {hint}", ref)
