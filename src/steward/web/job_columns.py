"""The columns that a list of jobs may have, and how each shows its value."""

from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec
from markupsafe import Markup, escape

from steward.accounting.listing.shapes import JobRow
from steward.accounting.page.wording import exit_word
from steward.core.printable import safe
from steward.web.filters import amount, duration, number, percent, size, state, when


class Shown(msgspec.Struct, frozen=True):
    """What a cell needs to know beside its row.

    Attributes:
        zones: By cluster the zone that times are shown in.
        costs: By cluster and raw job id what a job was charged, micro-SU.
        unit: Name of the bank's unit.
        decimals: How many of its decimals are shown.
    """

    zones: dict[str, str]
    costs: dict[tuple[str, int], int] = {}
    unit: str = ""
    decimals: int = 2


Cell = Callable[[JobRow, Shown], Markup | str]


class Column(msgspec.Struct, frozen=True):
    """One column.

    Attributes:
        key: Its name in an address.
        title: Its heading.
        cell: Shows a row's value.
        is_number: Whether values stand at the right.
        of_bank: Whether only a bank knows of it.
    """

    key: str
    title: str
    cell: Cell
    is_number: bool = False
    of_bank: bool = False


def _time(value: Callable[[JobRow], datetime | None]) -> Cell:
    return lambda row, shown: when(value(row), shown.zones.get(row.cluster, ""))


def _states(row: JobRow, shown: Shown) -> Markup:  # noqa: ARG001 -- a cell's shape
    if not row.tasks:
        return state(safe(row.state) or "UNVERIFIED" * (not row.verified) or "UNKNOWN")
    one = Markup("<span>{} {}</span>")
    parts = [one.format(number(count), state(safe(word))) for word, count in row.tasks.items()]
    return Markup('<span class="tasks">{}</span>').format(Markup(" ").join(parts))


def _limit(row: JobRow, shown: Shown) -> str:  # noqa: ARG001 -- a cell's shape
    return duration(row.limit_s) if row.limit_s else ""


def _cost(row: JobRow, shown: Shown) -> str:
    found = shown.costs.get((row.cluster, row.job_id))
    return "" if found is None else amount(found, "", shown.decimals)


def _text(value: Callable[[JobRow], str]) -> Cell:
    return lambda row, _: escape(safe(value(row)))


COLUMNS: Final = {
    column.key: column
    for column in (
        Column("cluster", "Cluster", _text(lambda row: row.cluster)),
        Column("name", "Name", _text(lambda row: row.name)),
        Column("user", "User", _text(lambda row: row.user or str(row.uid or ""))),
        Column("account", "Account", _text(lambda row: row.account)),
        Column("partition", "Partition", _text(lambda row: row.partition)),
        Column("qos", "QOS", _text(lambda row: row.qos)),
        Column("state", "State", _states),
        Column("reason", "Reason", _text(lambda row: row.reason)),
        Column("submit", "Submitted", _time(lambda row: row.submit)),
        Column("eligible", "Eligible", _time(lambda row: row.eligible)),
        Column("start", "Started", _time(lambda row: row.start)),
        Column("end", "Ended", _time(lambda row: row.end)),
        Column("waited", "Waited", lambda row, _: _lasted(row.waited_s), is_number=True),
        Column("elapsed", "Elapsed", lambda row, _: _lasted(row.elapsed_s), is_number=True),
        Column("limit", "Time limit", _limit, is_number=True),
        Column("nodes", "Nodes", lambda row, _: _count(row.nodes), is_number=True),
        Column("nodelist", "Node list", _text(lambda row: row.nodelist)),
        Column("cpus", "CPUs", lambda row, _: _count(row.cpus), is_number=True),
        Column("memory", "Memory", lambda row, _: _size(row.memory_bytes), is_number=True),
        Column("tres", "TRES", _text(lambda row: row.tres)),
        Column("cpu", "CPU used", lambda row, _: _share(row.cpu), is_number=True),
        Column("cputime", "CPU time", lambda row, _: _lasted(row.cpu_used_s), is_number=True),
        Column("peak", "Memory peak", lambda row, _: _size(row.peak_bytes), is_number=True),
        Column("memused", "Memory used", lambda row, _: _share(row.memory), is_number=True),
        Column(
            "exit",
            "Exit",
            lambda row, _: "" if row.tasks else exit_word(row.exit_code, row.exit_signal),
            is_number=True,
        ),
        Column("restarts", "Restarts", lambda row, _: _count(row.restarts or None), is_number=True),
        Column("cost", "Cost", _cost, is_number=True, of_bank=True),
    )
}
"""All columns beside the job's own, in the order in which they stand."""

USUAL: Final = (
    *("name", "user", "account", "partition", "state", "submit"),
    *("elapsed", "cpus", "cpu", "peak"),
)
"""The columns of who has chosen none."""


def _lasted(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _count(value: int | None) -> str:
    return "" if value is None else number(value)


def _size(value: int | None) -> str:
    return "" if value is None else size(value)


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)
