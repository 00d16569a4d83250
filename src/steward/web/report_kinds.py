"""The reports that there are pages of: what each is asked, and the columns of its table."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from steward.reports.shapes import (
    AccountsRequest,
    ClusterRequest,
    JobsRequest,
    PartitionsRequest,
    ReportRequest,
    UsersRequest,
    WaitsRequest,
    WasteRequest,
)
from steward.web.filters import duration, number, percent

_HOUR_S: Final = 3600


class Column(msgspec.Struct, frozen=True):
    """A column.

    Attributes:
        title: Its heading.
        text: What stands in it.
        plain: The same for programs.
        is_number: Whether it is one.
        link: What of a row it leads to: ``users``, ``accounts``, ``partitions``; "" for nothing.
        is_odd: Whether it is left out where nothing stands in it.
    """

    title: str
    text: Callable[[Any], str]
    plain: Callable[[Any], str]
    is_number: bool = True
    link: str = ""
    is_odd: bool = False


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A report.

    Attributes:
        name: In its address.
        title: For people.
        says: What it tells.
        request: What its action is asked.
        columns: Of its table.
        plot: Attribute of a row that is drawn by period, or by row where there is one period.
        of_jobs: Whether it can be of some accounts, users and partitions alone.
    """

    name: str
    title: str
    says: str
    request: type[ReportRequest]
    columns: Sequence[Column]
    plot: str
    of_jobs: bool = True


def _word(title: str, name: str, link: str = "") -> Column:
    def text(row: Any) -> str:
        return str(getattr(row, name))

    return Column(title, text, text, is_number=False, link=link)


def _count(title: str, name: str) -> Column:
    def plain(row: Any) -> str:
        return str(getattr(row, name))

    return Column(title, lambda row: number(getattr(row, name)), plain)


def _hours(title: str, name: str, *, is_odd: bool = False) -> Column:
    def text(row: Any) -> str:
        seconds = getattr(row, name)
        return number(None if seconds is None else seconds / _HOUR_S, 1)

    def plain(row: Any) -> str:
        seconds = getattr(row, name)
        return "" if seconds is None else f"{seconds / _HOUR_S:.3f}"

    return Column(title, text, plain, is_odd=is_odd)


def _share(title: str, part: str, whole: str) -> Column:
    def plain(row: Any) -> str:
        of, all_of = getattr(row, part), getattr(row, whole)
        return f"{of / all_of:.4f}" if of is not None and all_of else ""

    return Column(title, lambda row: percent(getattr(row, part), getattr(row, whole)), plain)


def _wait(title: str, name: str) -> Column:
    def plain(row: Any) -> str:
        found = getattr(row, name)
        return "" if found is None else str(found)

    return Column(title, lambda row: duration(getattr(row, name)), plain)


def _user() -> Column:
    def text(row: Any) -> str:
        return row.user or ("" if row.uid is None else str(row.uid))

    return Column("User", text, text, is_number=False, link="users")


def _size() -> Column:
    def text(row: Any) -> str:
        return f"{row.least_cpus}-{row.most_cpus or ''}" if row.least_cpus else ""

    return Column("CPUs", text, text, is_odd=True)


_USED: Final = (
    _count("Jobs", "jobs"),
    _hours("CPU hours", "cpu_s"),
    _hours("GPU hours", "gpu_s", is_odd=True),
    _hours("Node hours", "node_s"),
)
_WAITED: Final = (
    _count("Started", "started"),
    _wait("Median wait", "median_s"),
    _wait("90 % waited less than", "p90_s"),
    _wait("Longest wait", "longest_s"),
)

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            name="cluster",
            title="What the cluster did",
            says="What its CPUs and GPUs did, in hours, as 'sreport cluster Utilization' tells it.",
            request=ClusterRequest,
            columns=(
                _count("Jobs", "jobs"),
                _hours("Allocated", "allocated_cpu_s"),
                _hours("Down", "down_cpu_s"),
                _hours("Planned down", "planned_down_cpu_s"),
                _hours("Idle", "idle_cpu_s"),
                _hours("Planned", "planned_cpu_s"),
                _hours("Reported", "reported_cpu_s"),
                _share("Used", "allocated_cpu_s", "reported_cpu_s"),
                _hours("GPUs allocated", "allocated_gpu_s", is_odd=True),
                _hours("GPUs idle", "idle_gpu_s", is_odd=True),
                _share("GPUs used", "allocated_gpu_s", "reported_gpu_s"),
            ),
            plot="allocated_cpu_s",
            of_jobs=False,
        ),
        Kind(
            name="accounts",
            title="Who used what",
            says="Each account in all, then its users.",
            request=AccountsRequest,
            columns=(_word("Account", "account", "accounts"), _user(), *_USED),
            plot="cpu_s",
        ),
        Kind(
            name="users",
            title="Who used most",
            says="Users, the ones who used most first.",
            request=UsersRequest,
            columns=(
                _user(),
                *_USED,
                _count("Completed", "completed"),
                _count("Failed", "failed"),
            ),
            plot="cpu_s",
        ),
        Kind(
            name="partitions",
            title="Partitions",
            says="What was used of each, and how long jobs waited for it.",
            request=PartitionsRequest,
            columns=(_word("Partition", "partition", "partitions"), *_USED, *_WAITED),
            plot="cpu_s",
        ),
        Kind(
            name="waits",
            title="How long jobs waited",
            says="From when they might have begun until they did.",
            request=WaitsRequest,
            columns=(_word("Partition", "partition", "partitions"), _size(), *_WAITED),
            plot="median_s",
        ),
        Kind(
            name="jobs",
            title="Jobs by state and size",
            says="How many there were, by account, size and the state in which they ended.",
            request=JobsRequest,
            columns=(
                _word("Account", "account", "accounts"),
                _size(),
                _word("State", "state"),
                _count("Jobs", "jobs"),
                _hours("CPU hours", "cpu_s"),
                _hours("GPU hours", "gpu_s", is_odd=True),
            ),
            plot="jobs",
        ),
        Kind(
            name="waste",
            title="Asked for and not used",
            says="Of jobs that ended: how much of their CPUs, memory and time limit they used.",
            request=WasteRequest,
            columns=(
                _word("Account", "account", "accounts"),
                _user(),
                _count("Jobs", "jobs"),
                _hours("CPU hours", "cpu_s"),
                _share("CPUs used", "used_cpu_s", "cpu_s"),
                _share("Memory used", "used_memory_byte_s", "memory_byte_s"),
                _share("Time limit used", "elapsed_s", "limit_s"),
            ),
            plot="cpu_s",
        ),
    )
}
"""By name, in the order in which they are offered."""


def shown_columns(kind: Kind, rows: Sequence[Any]) -> list[Column]:
    """The columns of a table, without those in which nothing would stand."""
    nothing = ("", "0.0", number(None))
    return [
        column
        for column in kind.columns
        if not column.is_odd or any(column.text(row) not in nothing for row in rows)
    ]
