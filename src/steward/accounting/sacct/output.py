"""sacct output: the action that streams lines as text, JSON documents or JSON lines.

:func:`stream_lines` reads Steward's data, :func:`stream_file_lines` a job log; both call
:func:`format_lines`, which reads a source, selects the runs of each job (``_select_rows``) and
formats the rows: by a compiled printer as text, by :func:`format_json_lines` as one JSON object per
line, or by :func:`format_json_jobs` as one JSON object per job.

Rows stream: only one job's lines are held back at a time, until it is certain that no later run of
the job is shown.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Final

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.sacct import fields, selection
from steward.accounting.sacct.fields import DEFAULT, LinePrinter, compile_printer
from steward.accounting.sacct.requests import SacctAnswer, SacctRequest, SacctText
from steward.accounting.sacct.selection import (
    TimeWindow,
    build_line_filter,
    resolve_clusters,
    resolve_zone,
)
from steward.accounting.sacct.values import ClusterClock, DateFormatter
from steward.core.access import Caller
from steward.core.actions import action
from steward.core.events import utc_now
from steward.core.records import USAGE_LINE_FIELDS
from steward.jobs.line_queries import (
    HIDDEN_RUN,
    HIDDEN_STEP,
    SHOWN_PIECE,
    SHOWN_RUN,
    SHOWN_STEP,
    UNNAMED_PIECE,
    LineFilter,
)
from steward.jobs.line_sources import LineSource, Row, open_file_source, open_line_source
from steward.slurm.nodelists import NodeListError, expand_nodelist
from steward.slurm.times import load_zone

_PIECE_LETTERS: Final = 256 * 1024
_ROWS_AT_ONCE: Final = 16
_CLUSTER, _JOB_ID = 1, 2
_PIECES: Final = frozenset({SHOWN_PIECE, UNNAMED_PIECE})
_NAMED: Final = frozenset({SHOWN_RUN, SHOWN_PIECE})


@action(
    "accounting.sacct",
    scope="read",
    only_reads=True,
)
def stream_lines(
    context: AccountingContext, asker: Caller, request: SacctRequest
) -> Iterator[SacctText | SacctAnswer]:
    """List jobs and steps with their resource use, as text.

    Raises:
        UsageError: The request is malformed.
        SqliteUnavailable: jobs.db does not exist yet.
    """
    now = context.now()
    clusters = resolve_clusters(context, request)
    window = selection.parse_window(request, now, resolve_zone(context, request, clusters))
    line_filter = build_line_filter(asker, request, window, clusters, context.get_scopes(asker))
    source = open_line_source(context.settings, line_filter, duplicates=request.duplicates)
    shown_clusters = clusters or context.clusters
    zones = {name: request.zone or context.get_zone(name) for name in shown_clusters}
    return format_lines(source, line_filter, request, window, now, zones)


def stream_file_lines(
    path: str, asker: Caller, request: SacctRequest
) -> Iterator[SacctText | SacctAnswer]:
    """Yield the selected lines of a job log, which the caller can read.

    Raises:
        UsageError: The request is malformed.
        StewardError: The file cannot be read, or is not a job log.
    """
    now = utc_now()
    window = selection.parse_window(request, now, load_zone(request.zone))
    line_filter = build_line_filter(asker, request, window, request.clusters, None)
    source = open_file_source(path)
    return format_lines(source, line_filter, request, window, now, {"": request.zone})


def format_lines(
    source: LineSource,
    line_filter: LineFilter,
    request: SacctRequest,
    window: TimeWindow,
    now: datetime,
    zones: dict[str, str],
) -> Iterator[SacctText | SacctAnswer]:
    """Yield the formatted lines of a source.

    Args:
        source: Where the lines come from.
        line_filter: Filter of lines.
        request: Output format.
        window: Time window.
        now: Present time.
        zones: IANA zones by cluster; "" for this host's.

    Raises:
        UsageError: The format or time format is invalid.
    """
    clock = _build_clock(zones, request.time_format, now)
    nodes = _build_node_test(line_filter.node_names)
    base = ("cluster", "job_id", *(("nodelist",) if nodes is not None else ()))
    printer: LinePrinter | None = None
    if request.form == "text":
        print_fields = fields.parse_format(request.format or DEFAULT)
        printer = compile_printer(print_fields, request, clock, now, 1 + len(base))
    columns: Sequence[str] = printer.columns if printer else USAGE_LINE_FIELDS
    rows = source.rows(
        line_filter,
        [
            *_build_columns(base, line_filter),
            *_build_columns(columns, line_filter, request.truncate),
        ],
        steps=not request.allocations,
    )
    selected = _select_rows(rows, request, nodes)
    if printer:
        yield from _join_pieces(_print_rows(selected, printer), window)
        return

    write = format_json_jobs if request.form == "json" else format_json_lines
    rows_of_runs = chain.from_iterable(selected)
    documents = write(rows_of_runs, len(base) + 1, now)
    yield from _join_pieces(([document] for document in documents), window)


def _build_clock(zones: dict[str, str], time_format: str, now: datetime) -> ClusterClock:
    """Build the time formatters of the clusters."""
    names = set(zones.values()) or {""}
    if len(names) == 1:
        return ClusterClock({"": DateFormatter(load_zone(names.pop()), time_format, now)})
    dates = {name: DateFormatter(load_zone(name), time_format, now) for name in names}
    by_cluster = {cluster: dates[name] for cluster, name in zones.items()}
    return ClusterClock({"": next(iter(dates.values())), **by_cluster})


def _build_columns(
    columns: Iterable[str], line_filter: LineFilter, truncate: bool | None = None
) -> list[str]:
    """Return the SQL of each column.

    Args:
        columns: Column names.
        line_filter: Filter of lines.
        truncate: Cut times to the window; None for columns that only distinguish jobs.
    """
    expressions = dict(fields.COMPUTED_COLUMNS)
    if truncate is None and len(line_filter.clusters) == 1:
        # All rows have the same cluster; reading its name for each would take time.
        expressions["cluster"] = "NULL"
    elif truncate and line_filter.since_us:
        since, until = line_filter.since_us, line_filter.until_us
        expressions |= {
            "start_us": f"CASE WHEN start_us <> 0 AND start_us < {since} THEN {since} "
            "ELSE start_us END",
            "end_us": f"CASE WHEN end_us = 0 OR end_us > {until} THEN {until} ELSE end_us END",
        }
        # As in Slurm, a job that has not started starts at the cut.
        expressions["start_us"] = (
            f"CASE WHEN start_us = 0 THEN {expressions['end_us']} ELSE "
            f"{expressions['start_us']} END"
        )
    return [expressions.get(column, f'"{column}"') for column in columns]


def _build_node_test(names: tuple[str, ...]) -> Callable[[str | None], bool] | None:
    """Return a test whether a node list contains a requested node; None if all nodes match."""
    if not names:
        return None
    requested = frozenset(names)
    cache: dict[str, bool] = {}

    def meets(nodes: str | None) -> bool:
        if not nodes:
            return False
        if nodes not in cache:
            if len(cache) > 10_000:
                cache.clear()
            try:
                cache[nodes] = not requested.isdisjoint(expand_nodelist(nodes))
            except NodeListError:
                cache[nodes] = False
        return cache[nodes]

    return meets


def _select_rows(
    batches: Iterable[Sequence[Row]],
    request: SacctRequest,
    nodes: Callable[[str | None], bool] | None,
) -> Iterator[list[Row]]:
    """Yield the shown rows in order: of several runs of one job id only the last.

    Pieces of a resized job are always shown, before the job's last size.
    """
    every_run = request.form != "text"
    cluster = job_id = None
    is_shown = False
    pieces: list[Row] = []
    last: list[Row] = []
    lines = last
    for batch in batches:
        ready: list[Row] = []
        for row in batch:
            mark = row[0]
            if mark >= SHOWN_STEP:
                if is_shown and mark != HIDDEN_STEP and (nodes is None or nodes(row[3])):
                    lines.append(row)
                continue
            is_shown = mark != HIDDEN_RUN and (nodes is None or nodes(row[3]))
            if not is_shown:
                continue
            is_piece = mark in _PIECES
            if row[_JOB_ID] != job_id or row[_CLUSTER] != cluster:
                job_id, cluster = row[_JOB_ID], row[_CLUSTER]
                if pieces:
                    ready += pieces
                    pieces = []
                ready += last
                last = []
            elif not is_piece:
                if request.duplicates:
                    ready += pieces
                    ready += last
                    pieces = []
                last = []
            lines = pieces if is_piece else last
            if every_run or mark in _NAMED:
                lines.append(row)
        yield ready
    yield pieces + last


def _print_rows(lists: Iterable[list[Row]], printer: LinePrinter) -> Iterator[list[str]]:
    """Yield printed lines, a few at once: a line may be a hundred times longer than its row."""
    run, step = printer.run, printer.step
    for rows in lists:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            chunk = rows[start : start + _ROWS_AT_ONCE]
            yield [run(row) if row[0] < SHOWN_STEP else step(row) for row in chunk]


def _join_pieces(
    lists: Iterable[list[str]], window: TimeWindow
) -> Iterator[SacctText | SacctAnswer]:
    """Join lines into pieces of limited size, then yield the end of the reply."""
    count = length = 0
    piece: list[str] = []
    for lines in lists:
        count += len(lines)
        text = "".join(lines)
        piece.append(text)
        length += len(text)
        if length >= _PIECE_LETTERS:
            yield SacctText("".join(piece))
            piece, length = [], 0
    if piece:
        yield SacctText("".join(piece))
    yield SacctAnswer(lines=count, since=window.since_us, until=window.until_us)


VERSION: Final = 1

_encode: Final = msgspec.json.Encoder().encode
_SECOND_US: Final = 1_000_000


def format_json_lines(rows: Iterable[Row], offset: int, now: datetime) -> Iterator[str]:  # noqa: ARG001 -- as format_json_jobs
    """Yield each line with all columns as one JSON object, from which a UsageLine can be read."""
    for row in rows:
        fields = zip(USAGE_LINE_FIELDS, row[offset:], strict=True)
        known = {field: value for field, value in fields if value is not None}
        yield _encode(known).decode() + "\n"


def format_json_jobs(rows: Iterable[Row], offset: int, now: datetime) -> Iterator[str]:
    """Yield one JSON object per job, including its steps.

    Args:
        rows: Rows of runs, each before its steps.
        offset: Number of values in a row before the columns.
        now: Present time: the end of runs that have not ended.
    """
    now_s = int(now.timestamp())
    job: dict[str, Any] | None = None
    for row in rows:
        line = dict(zip(USAGE_LINE_FIELDS, row[offset:], strict=True))
        if line["step"] and job is not None:
            job["steps"].append(_build_step(line, now_s))
            continue
        if job is not None:
            yield _encode(job).decode() + "\n"
        job = _build_job(line, now_s)
    if job is not None:
        yield _encode(job).decode() + "\n"


def _build_job(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    """Build the JSON object of a run."""
    return {
        "account": line["account"] or "",
        "comment": {
            "administrator": line["admin_comment"] or "",
            "job": line["comment"] or "",
            "system": line["system_comment"] or "",
        },
        "allocation_nodes": line["nodes"] if line["nodelist"] else 0,
        "array": {"job_id": line["array_job_id"] or 0, "task": line["array_task"] or ""},
        "cluster": line["cluster"],
        "constraints": line["constraints"] or "",
        "container": line["container"] or "",
        "derived_exit_code": _build_exit(line["derived_exit_code"], line["derived_exit_signal"]),
        "exit_code": _build_exit(line["exit_code"], line["exit_signal"]),
        "extra": line["extra"] or "",
        "failed_node": line["failed_node"] or "",
        "flags": [flag for flag in (line["job_flags"] or "").split(",") if flag],
        "group": line["group"] or "",
        "gid": line["gid"],
        "het": {"job_id": line["het_job_id"] or 0, "job_offset": line["het_offset"] or 0},
        "is_piece": bool(line["piece_us"]),
        "job_id": line["job_id"],
        "label": line["label"],
        "licenses": line["licenses"] or "",
        "name": line["name"] or "",
        "nodes": line["nodelist"] or "",
        "partition": line["partition"] or "",
        "priority": line["priority"],
        "qos": line["qos"] or "",
        "required": {
            "CPUs": line["requested_cpus"] or 0,
            "nodes": line["requested_nodes"] or 0,
        },
        "reservation": {"name": line["reservation"] or ""},
        "restart_cnt": line["restarts"],
        "sluid": line["sluid"] or "",
        "source": line["source"] or "",
        "state": _build_state(line),
        "stderr": line["stderr"] or "",
        "stdin": line["stdin"] or "",
        "stdout": line["stdout"] or "",
        "submit_line": line["submit_line"] or "",
        "time": {
            **_build_times(line, now_s),
            "eligible": _to_seconds(line["eligible_us"]),
            "submission": _to_seconds(line["submit_us"]),
            "first_submission": _to_seconds(line["first_submit_us"]),
            "limit_seconds": line["time_limit_s"],
        },
        "tres": {
            "allocated": _split_tres(line["tres_allocated"]),
            "requested": _split_tres(line["tres_requested"]),
        },
        "usage": _build_usage(line),
        "user": line["user"] or "",
        "uid": line["uid"],
        "wckey": {"wckey": line["wckey"] or ""},
        "working_directory": line["work_dir"] or "",
        "doubts": _split_words(line["doubts"]),
        "steps": [],
    }


def _build_step(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    """Build the JSON object of a step."""
    return {
        "step": {"id": line["step"], "name": line["name"] or ""},
        "exit_code": _build_exit(line["exit_code"], line["exit_signal"]),
        "nodes": {"count": line["nodes"] or 0, "list": line["nodelist"] or ""},
        "state": _build_state(line),
        "tasks": {"count": line["tasks"] or 0},
        "CPU": {"count": line["cpus"] or 0},
        "time": _build_times(line, now_s),
        "tres": {"allocated": _split_tres(line["tres_allocated"])},
        "usage": _build_usage(line),
        "submit_line": line["submit_line"] or "",
        "source": line["source"] or "",
        "doubts": _split_words(line["doubts"]),
    }


def _build_times(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    """Build the JSON object of a line's times."""
    start, end = _to_seconds(line["start_us"]), _to_seconds(line["end_us"])
    suspended = line["suspended_s"] or 0
    user, system = line["user_us"], line["system_us"]
    total = None if user is None and system is None else (user or 0) + (system or 0)
    return {
        "elapsed": max(0, (end or now_s) - start - suspended) if start else 0,
        "start": start,
        "end": end,
        "suspended": suspended,
        "user": _split_cpu(user),
        "system": _split_cpu(system),
        "total": _split_cpu(total),
    }


def _build_usage(line: dict[str, Any]) -> dict[str, Any]:
    """Return measured values under the names of Steward's lines."""
    names = (
        *("ave_cpu_us", "min_cpu_us", "min_cpu_node", "min_cpu_task"),
        *("cgroup_user_us", "cgroup_system_us"),
        *("max_rss_bytes", "max_rss_node", "max_rss_task", "ave_rss_bytes"),
        *("peak_bytes", "peak_node", "peak_allocated_bytes"),
        *("max_pages", "max_pages_node", "max_pages_task", "ave_pages", "minor_faults"),
        *("max_read_bytes", "max_read_node", "max_read_task", "ave_read_bytes", "read_bytes"),
        *("max_written_bytes", "max_written_node", "max_written_task"),
        *("ave_written_bytes", "written_bytes"),
    )
    return {name: None if line[name] == "" else line[name] for name in names}


def _build_state(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "current": [line["state"] or "UNKNOWN"],
        "reason": line["reason"] or "None",
        "cancelled_by": line["cancelled_by"],
    }


def _build_exit(code: int | None, signal: int | None) -> dict[str, Any]:
    """Build the JSON object of an exit code."""
    if code is None and signal is None:
        return {"status": "PENDING", "return_code": None, "signal": None}
    status = "SIGNALED" if signal else "SUCCESS" if not code else "ERROR"
    return {"status": status, "return_code": code, "signal": signal}


def _split_tres(text: str | None) -> dict[str, str]:
    parts = (part.partition("=") for part in (text or "").split(",") if part)
    return {name: amount for name, _, amount in parts}


def _split_words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _split_cpu(microseconds: int | None) -> dict[str, int] | None:
    if microseconds is None:
        return None
    seconds, rest = divmod(microseconds, _SECOND_US)
    return {"seconds": seconds, "microseconds": rest}


def _to_seconds(microseconds: int | None) -> int:
    return (microseconds or 0) // _SECOND_US
