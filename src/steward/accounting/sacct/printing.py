"""A format, compiled: one function that makes the text of a line from its columns.

The expressions of the fields are our own (see ``fields``); nothing that
anybody types becomes code but whole numbers and the choice of fields.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from steward.accounting.sacct import values
from steward.accounting.sacct.fields import Field
from steward.accounting.sacct.shapes import SacctRequest
from steward.accounting.sacct.values import Clock
from steward.core.printable import safe

_COLUMN: Final = re.compile(r"\{([a-z_]+)\}")
_MOST_KNOWN: Final = 20_000
_MOST_LETTERS: Final = 64
"""Of the expression of an array's tasks, as SLURM_BITSTR_LEN has it by default."""

Row = Sequence[Any]


class Printer(msgspec.Struct, frozen=True, kw_only=True):
    """What prints lines.

    Attributes:
        columns: The columns of a line that are needed, in their order.
        run: Makes the text of a run's row, with its newline.
        step: The same for a step's.
    """

    columns: tuple[str, ...]
    run: Callable[[Row], str]
    step: Callable[[Row], str]


def printer(
    fields: Sequence[Field], request: SacctRequest, clock: Clock, now: datetime, offset: int
) -> Printer:
    """Compile a format.

    Args:
        fields: What to print.
        request: How: style, delimiter, units.
        clock: Writes times.
        now: The present moment: what runs has run until now.
        offset: How many values of a row stand before the columns; the second is the cluster.
    """
    names = {name for field in fields for how in (field.run, field.step) for name in _in(how)}
    columns = tuple(sorted(names))
    places = {name: f"r[{offset + number}]" for number, name in enumerate(columns)}
    namespace = _namespace(request, clock, now)
    # Of one zone there is one function; to look it up for each line would cost as much again.
    date = "date" if len(clock) == 1 else "dates[r[1]]"

    def compiled(which: Callable[[Field], str]) -> Callable[[Row], str]:
        parts = []
        for field in fields:
            how = which(field)
            if field.few and how:
                parts.append(_kept(field, how, request, places, namespace))
            else:
                parts.append(_placed(_cell(field, how, request), places, date, field.kind))
        return _function("r", f"{_template(fields, request)!r} % ({', '.join(parts)},)", namespace)

    return Printer(
        columns=columns,
        run=compiled(lambda field: field.run),
        step=compiled(lambda field: field.step),
    )


def _function(names: str, code: str, namespace: dict[str, Any]) -> Callable[..., str]:
    function: Callable[..., str] = eval(f"lambda {names}: {code}", namespace)  # noqa: S307 -- our own expressions
    return function


class _Known(dict[Any, str]):
    """What was made of values; a few at a time, for they may be anybody's.

    Args:
        make: Makes it of a value, or of a tuple of them.
    """

    def __init__(self, make: Callable[[Any], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> str:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        made = self[key] = self._make(key)
        return made


def _kept(
    field: Field,
    how: str,
    request: SacctRequest,
    places: dict[str, str],
    namespace: dict[str, Any],
) -> str:
    """The expression that looks up what was made of a field's values before."""
    names = list(dict.fromkeys(_in(how)))
    own = {name: f"k[{number}]" if names[1:] else "k" for number, name in enumerate(names)}
    make = _function("k", _placed(_cell(field, how, request), own, "date", field.kind), namespace)
    name = f"known{sum(key.startswith('known') for key in namespace)}"
    namespace[name] = _Known(make)
    return f"{name}[{', '.join(places[column] for column in names)}]"


def _in(how: str) -> list[str]:
    return _COLUMN.findall(how)


def _cell(field: Field, how: str, request: SacctRequest) -> str:
    """The expression of a field's value, cut where it is too wide for a table."""
    if not how:
        return "''"
    width = abs(field.width)
    if request.style != "table" or field.kind != "text":
        return f"({how})"
    return f"(v if len(v := {how}) <= {width} else v[:{max(width - 1, 0)}] + {'+'[:width]!r})"


def _placed(code: str, places: dict[str, str], date: str, kind: str) -> str:
    """An expression with each column's place in the row."""
    if kind == "date":
        code = code.replace("date(", f"{date}(")
    return _COLUMN.sub(lambda match: places[match[1]], code)


def _template(fields: Sequence[Field], request: SacctRequest) -> str:
    if request.style == "table":
        return "".join(f"{_spec(field)} " for field in fields) + "\n"
    between = request.delimiter.replace("%", "%%")
    end = between if request.style == "parsable" else ""
    return between.join("%s" for _ in fields) + end + "\n"


def _spec(field: Field) -> str:
    width = abs(field.width)
    side = "-" if field.width < 0 else ""
    cut = f".{width}" if field.kind == "date" else ""
    return f"%{side}{width}{cut}s"


def header(fields: Sequence[Field], request: SacctRequest) -> str:
    """The heading, with its newlines."""
    if request.style != "table":
        names = request.delimiter.join(field.name for field in fields)
        return names + (request.delimiter if request.style == "parsable" else "") + "\n"
    cells = [
        f"{field.name[: abs(field.width)]:{'<' if field.width < 0 else '>'}{abs(field.width)}} "
        for field in fields
    ]
    rules = ["-" * abs(field.width) + " " for field in fields]
    return "".join(cells) + "\n" + "".join(rules) + "\n"


def _namespace(request: SacctRequest, clock: Clock, now: datetime) -> dict[str, Any]:
    """What the expressions may call, and nothing else."""
    now_s = int(now.timestamp())
    units = request.units or ("=" if request.noconvert else "")

    def elapsed(start_us: int | None, end_us: int | None, suspended_s: int | None) -> int:
        if not start_us:
            return 0
        end_s = end_us // 1_000_000 if end_us else now_s
        return max(0, end_s - start_us // 1_000_000 - (suspended_s or 0))

    def planned(eligible_us: int | None, start_us: int | None, end_us: int | None) -> int:
        if not eligible_us:
            return 0
        until_us = start_us or end_us
        until_s = until_us // 1_000_000 if until_us else now_s
        return max(0, until_s - eligible_us // 1_000_000)

    return {
        "__builtins__": {"len": len, "str": str},
        "clock": lru_cache(maxsize=4096)(values.span),
        "count": lambda number: values.size(number, "=" if request.noconvert else ""),
        "cpu_time": values.cpu_time,
        "date": clock[""],
        "dates": clock,
        "elapsed": elapsed,
        "exit_text": values.exit_text,
        "label": _label,
        "limit_minutes": _limit_minutes,
        "limit_text": values.limit_text,
        "megabytes": lambda count: values.megabytes(count, units),
        "memory": lambda text: values.memory_of(text, units),
        "number": _number,
        "path": _expanded_path if request.expand_patterns else _path,
        "planned": planned,
        "seconds": _seconds,
        "size": lambda number: values.size(number, units),
        "state_text": values.state_text,
        "shares_text": values.shares_text,
        "exclusive_text": values.exclusive_text,
        "text": _text,
        "total": _total,
        "tres": lru_cache(maxsize=4096)(lambda text: _text(values.tres(text, units))),
        "uid": _local_uid if request.use_local_uid else _uid,
        "used": values.used,
    }


def _text(value: str | None) -> str:
    if not value:
        return ""
    return value if value.isascii() and value.isprintable() else safe(value)


def _path(value: str | None, *_of_job: Any) -> str:
    return _text(value)


def _expanded_path(value: str | None, *of_job: Any) -> str:
    return _text(values.expand_path(value or "", *of_job))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _seconds(microseconds: int | None) -> str:
    return "" if microseconds is None else values.span(microseconds // 1_000_000)


def _total(user_us: int | None, system_us: int | None) -> int | None:
    if user_us is None and system_us is None:
        return None
    return (user_us or 0) + (system_us or 0)


def _label(label: str) -> str:
    label = safe(label)
    if label.endswith("]") and len(label) > _MOST_LETTERS:
        head, _, tasks = label.partition("[")
        kept = tasks[:_MOST_LETTERS].rpartition(",")[0] or tasks[:_MOST_LETTERS]
        return f"{head}[{kept},...]"
    return label


def _limit_minutes(seconds: int | None, start_us: int | None) -> str:
    if seconds is None:
        return values.limit_text(None, started=bool(start_us))
    return str(seconds // 60)


def _uid(uid: int | None, user: str | None) -> str:  # noqa: ARG001 -- as the other
    return _number(uid)


@lru_cache(maxsize=4096)
def _local_uid(uid: int | None, user: str | None) -> str:
    """The uid that a user's name resolves to on this host."""
    import pwd

    try:
        return str(pwd.getpwnam(user).pw_uid) if user else _number(uid)
    except (KeyError, ValueError):
        return _number(uid)
