"""sacct value formats: durations, sizes, TRES, exit codes, states, paths and times.

:mod:`steward.accounting.sacct.fields` calls these functions from its compiled expressions.
:class:`DateFormatter` formats times in one zone, :class:`ClusterClock` for each cluster.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from typing import Final

from steward.accounting.errors import AccountingUsage
from steward.core.layouts import format_span
from steward.slurm.job_states import PENDING
from steward.slurm.times import choose_relative_format

_STANDARD: Final = "%Y-%m-%dT%H:%M:%S"
_DIRECTIVE: Final = re.compile(r"%[-_0^#]?[EO]?[A-Za-z%]|[^%]")
_TRES: Final = re.compile(r"([0-9.]+)([KMGTPE]?)n?")
_UNITS: Final = " KMGTP"
_PATTERN: Final = re.compile(r"%(\d{0,3})([%AabJjNnstux])")
_MOST_KNOWN: Final = 50_000


def format_cpu_time(microseconds: int | None) -> str:
    """Format CPU time as in TotalCPU, with thousandths below an hour: ``00:01.250``."""
    if microseconds is None:
        return ""
    seconds, rest = divmod(microseconds, 1_000_000)
    if rest >= 1000 and seconds < 3600:
        return f"{seconds // 60:02}:{seconds % 60:02}.{rest // 1000:03}"
    return format_span(seconds)


def format_unit_size(number: float | None, units: str, unit: int = 0) -> str:
    """Format a number with the largest unit that keeps it exact: ``5240K``, ``1.50G``.

    Args:
        number: The number; None becomes "".
        units: Letter of the unit to use, ``=`` for its own, "" for the largest exact one.
        unit: Unit of ``number``: 0 for none, 1 for K, 2 for M …
    """
    if number is None:
        return ""
    if int(number) == 0:
        return "0"
    if units and units != "=":
        target = _UNITS.index(units)
        number, unit = number * 1024.0 ** (unit - target), target
    elif not units:
        # Halves count as exact: 1.50G.
        while number >= 1024 and int(number) % 512 == 0 and unit < len(_UNITS) - 1:
            number, unit = number / 1024, unit + 1
    letter = _UNITS[unit].strip()
    return f"{int(number)}{letter}" if number == int(number) else f"{number:.2f}{letter}"


def format_megabytes(count: int | None, units: str) -> str:
    """Format bytes as in MaxDiskRead: in megabytes, ``0.03M`` for few."""
    if count is None:
        return ""
    amount = count / (1 << 20)
    if amount > 1:
        return format_unit_size(amount, units, 2)
    return f"{amount:.2f}M" if amount > 0 else "0"


def format_tres_units(text: str | None, units: str) -> str:
    """Format TRES in sacct's order: ``billing=4,cpu=4,mem=4G,node=1``."""
    if not text:
        return ""
    if "," not in text and not text.startswith("mem="):
        return text
    parts = sorted(part for part in text.split(",") if part)
    return ",".join(_convert_units(part, units) if units else part for part in parts)


def _convert_units(part: str, units: str) -> str:
    """Convert the memory or burst buffer part of a TRES text to units."""
    name, _, amount = part.partition("=")
    if name != "mem" and not name.startswith("bb/"):
        return part
    return f"{name}={format_unit_size(_parse_megabytes(amount), units, 2)}"


def format_memory(text: str | None, units: str) -> str:
    """Format the memory of a TRES text, as in ReqMem."""
    for part in (text or "").split(","):
        if part.startswith("mem="):
            return format_unit_size(_parse_megabytes(part[4:]), units, 2)
    return ""


def _parse_megabytes(amount: str) -> float | None:
    """Parse an amount of memory into MiB; None if malformed."""
    match = _TRES.fullmatch(amount)
    if match is None:
        return None
    letter = match[2]
    return float(match[1]) * 1024.0 ** ((" KMGTPE".index(letter) if letter else 0) - 2)


def format_usage(**amounts: str) -> str:
    """Format the known usage by resource: ``cpu=00:00:01,mem=5240K``."""
    return ",".join(
        f"{name.replace('_', '/')}={amount}" for name, amount in amounts.items() if amount
    )


def format_exit_status(code: int | None, signal: int | None) -> str:
    """Format exit code and signal: ``code:signal``, 0:0 while unknown."""
    return f"{code or 0}:{signal or 0}"


def format_state(state: str | None, cancelled_by: int | None) -> str:
    """Format a state as sacct(1): without flags of pending runs, with the uid that cancelled it."""
    if state in PENDING:
        return "PENDING"
    if state == "CANCELLED" and cancelled_by is not None:
        return f"CANCELLED by {cancelled_by}"
    return state or ""


def format_oversubscribe(oversubscribe: str | None) -> str:
    """Return whether CPUs may be shared, as sacct since 26.05: YES or NO; "" if unknown."""
    return "YES" if oversubscribe == "YES" else "NO" if oversubscribe else ""


def format_exclusive(oversubscribe: str | None) -> str:
    """Return what a run has exclusively, as sacct since 26.05: NODE, USER, MCS … or NO."""
    if oversubscribe in ("OK", "YES"):
        return "NO"
    return "NODE" if oversubscribe == "NO" else oversubscribe or ""


def expand_path(
    path: str,
    job_id: int,
    array_job_id: int | None,
    array_task: str | None,
    name: str | None,
    user: str | None,
    nodelist: str | None,
) -> str:
    """Replace the patterns in a path, see sbatch(1) under "filename pattern".

    As with ``sacct --expand-patterns``, ranges become their first value: %n, %s and %t are 0.
    """
    if "\\" in path:
        return path.replace("\\", "")  # a backslash disables patterns
    task = array_task if array_task and array_task.isdigit() else "0"
    replacements: dict[str, Callable[[], str]] = {
        "%": lambda: "%",
        "A": lambda: str(array_job_id or job_id),
        "a": lambda: task,
        "b": lambda: str(int(task) % 10),
        "J": lambda: f"{job_id}.0",
        "j": lambda: str(job_id),
        "N": lambda: _get_first_node(nodelist or ""),
        "n": lambda: "0",
        "s": lambda: "0",
        "t": lambda: "0",
        "u": lambda: user or "",
        "x": lambda: name or "",
    }

    def value(match: re.Match[str]) -> str:
        digits, letter = match.groups()
        text = replacements[letter]()
        return text.zfill(min(int(digits), 10)) if digits and text.isdigit() else text

    return _PATTERN.sub(value, path)


def _get_first_node(nodelist: str) -> str:
    from steward.slurm.nodelists import NodeListError, expand_nodelist

    try:
        names = expand_nodelist(nodelist)
    except NodeListError:
        return ""  # the job never had nodes
    return names[0] if names else ""


def format_time_limit(seconds: int | None, *, started: bool) -> str:
    """Format a time limit; a job that never started may get its partition's limit."""
    if seconds is None:
        return "UNLIMITED" if started else "Partition_Limit"
    return format_span(seconds)


class DateFormatter:
    """Formatter of times in one zone.

    Args:
        zone: The time zone.
        form: SLURM_TIME_FORMAT: "", ``standard``, ``relative``, or a format of strftime(3).
        now: Present time, for ``relative``.

    Raises:
        AccountingUsage: The format is invalid.
    """

    def __init__(self, zone: tzinfo, form: str, now: datetime) -> None:
        self._zone = zone
        self._now = now.astimezone(zone)
        self._cache: dict[int, str] = {}
        if form in ("", "standard"):
            self._write: Callable[[int], str] = self._standard
        elif form == "relative":
            self._write = self._relative
        elif "".join(_DIRECTIVE.findall(form)) == form:
            self._write = lambda seconds: self._moment(seconds).strftime(form)
        else:
            raise AccountingUsage(
                f"invalid SLURM_TIME_FORMAT {form!r}: see strftime(3) for its formats"
            )

    def __call__(self, microseconds: int | None) -> str:
        """Format a time in µs since the epoch; ``Unknown`` for 0 and times out of range."""
        if not microseconds:
            return "Unknown"
        seconds = microseconds // 1_000_000
        try:
            return self._write(seconds)
        except (OverflowError, ValueError, OSError):
            return "Unknown"

    def _moment(self, seconds: int) -> datetime:
        return datetime.fromtimestamp(seconds, UTC).astimezone(self._zone)

    def _standard(self, seconds: int) -> str:
        minute, second = divmod(seconds, 60)
        prefix = self._cache.get(minute)
        if prefix is None:
            if len(self._cache) >= _MOST_KNOWN:
                self._cache.clear()
            moment = self._moment(minute * 60)
            if moment.second:
                # Zone with an offset in seconds, as some had before 1972.
                return self._moment(seconds).strftime(_STANDARD)
            prefix = self._cache[minute] = moment.strftime("%Y-%m-%dT%H:%M:")
        return f"{prefix}{second:02}"

    def _relative(self, seconds: int) -> str:
        moment = self._moment(seconds)
        return moment.strftime(choose_relative_format(moment, self._now))


class ClusterClock(dict[str, DateFormatter]):
    """Formatters of times by cluster; "" applies to all other clusters."""

    def __missing__(self, cluster: str) -> DateFormatter:
        return self[""]
