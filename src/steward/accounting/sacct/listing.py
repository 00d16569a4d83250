"""Lines as text, in pieces: which of a job's runs are shown, and in what order.

Rows stream through: never more than one job's lines are held back, until it
is known that no later run of the job is meant as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

from steward.accounting.room import AccountingRoom
from steward.accounting.sacct import fields, selecting, sources
from steward.accounting.sacct.printing import Printer, printer
from steward.accounting.sacct.selecting import Window
from steward.accounting.sacct.shapes import SacctAnswer, SacctRequest, SacctText
from steward.accounting.sacct.sources import Row, Source
from steward.accounting.sacct.values import Clock, Dates
from steward.core.access import Asker
from steward.core.events import utc_now
from steward.core.lines import FIELDS
from steward.jobs.line_queries import (
    HIDDEN_RUN,
    HIDDEN_STEP,
    SHOWN_PIECE,
    SHOWN_RUN,
    SHOWN_STEP,
    UNNAMED_PIECE,
    LineFilter,
)
from steward.slurm.times import zone_called

_PIECE_LETTERS: Final = 256 * 1024
_CLUSTER, _JOB_ID = 1, 2


def sacct(
    room: AccountingRoom, asker: Asker, request: SacctRequest
) -> Iterator[SacctText | SacctAnswer]:
    """The lines that are meant, and that the asker may see.

    Raises:
        UsageError: Something in the request cannot be understood.
        SqliteUnavailable: There are no books yet.
    """
    now = room.now()
    clusters = selecting.clusters_asked(room, request)
    when = selecting.window(request, now, selecting.zone_asked(room, request, clusters))
    wanted = selecting.line_filter(asker, request, when, clusters, room.scopes(asker))
    source = sources.books(room, wanted, duplicates=request.duplicates)
    shown = clusters or room.clusters
    zones = {name: request.zone or room.zone(name) for name in shown}
    return listed(source, wanted, request, when, now, zones)


def sacct_of_file(
    path: str, asker: Asker, request: SacctRequest
) -> Iterator[SacctText | SacctAnswer]:
    """The lines of a job log that whoever asks can read.

    Raises:
        UsageError: Something in the request cannot be understood.
        StewardError: The file cannot be read, or is no job log.
    """
    now = utc_now()
    when = selecting.window(request, now, zone_called(request.zone))
    wanted = selecting.line_filter(asker, request, when, request.clusters, None)
    source = sources.file_source(path)
    return listed(source, wanted, request, when, now, {"": request.zone})


def listed(
    source: Source,
    wanted: LineFilter,
    request: SacctRequest,
    when: Window,
    now: datetime,
    zones: dict[str, str],
) -> Iterator[SacctText | SacctAnswer]:
    """The lines of a source.

    Args:
        source: Where they come from.
        wanted: Which.
        request: How they are to be shown.
        when: The window of time.
        now: The present moment.
        zones: IANA names of the clusters' zones; "" for this host's own.

    Raises:
        UsageError: The format or the form of times cannot be understood.
    """
    clock = _clock(zones, request.time_format, now)
    nodes = _on_nodes(request.nodelist)
    base = ("cluster", "job_id", *(("nodelist",) if nodes is not None else ()))
    made: Printer | None = None
    if request.form == "text":
        chosen = fields.chosen(request.format or fields.DEFAULT)
        made = printer(chosen, request, clock, now, 1 + len(base))
    columns: Sequence[str] = made.columns if made else FIELDS
    rows = source.rows(
        wanted,
        [*_sql(base, wanted), *_sql(columns, wanted, request.truncate)],
        steps=not request.allocations,
    )
    kept = _kept(rows, request, nodes)
    if made:
        run, step = made.run, made.step
        # Made as they are sent: a line may be a hundred times longer than its row.
        lines = (run(row) if row[0] < SHOWN_STEP else step(row) for row in _flat(kept))
        yield from _in_pieces(lines, when)
        return
    from steward.accounting.sacct.documents import documents, plain_lines

    write = documents if request.form == "json" else plain_lines
    yield from _in_pieces(write(_flat(kept), len(base) + 1, now), when)


def _clock(zones: dict[str, str], form: str, now: datetime) -> Clock:
    names = set(zones.values()) or {""}
    if len(names) == 1:
        return Clock({"": Dates(zone_called(names.pop()), form, now)})
    dates = {name: Dates(zone_called(name), form, now) for name in names}
    by_cluster = {cluster: dates[name] for cluster, name in zones.items()}
    return Clock({"": next(iter(dates.values())), **by_cluster})


def _sql(columns: Iterable[str], wanted: LineFilter, truncate: bool | None = None) -> list[str]:
    """SQL for each column.

    Args:
        columns: Their names.
        wanted: Which lines there will be.
        truncate: Whether times are cut to the window; None for the columns that only tell
            jobs apart.
    """
    cut = {}
    if truncate is None and len(wanted.clusters) == 1:
        # All rows are of one: to fetch its name for each of them would take time.
        cut = {"cluster": "NULL"}
    elif truncate and wanted.since_us:
        since, until = wanted.since_us, wanted.until_us
        cut = {
            "start_us": f"CASE WHEN start_us <> 0 AND start_us < {since} THEN {since} "
            "ELSE start_us END",
            "end_us": f"CASE WHEN end_us = 0 OR end_us > {until} THEN {until} ELSE end_us END",
        }
        # What has not begun begins where it is cut, as in Slurm.
        cut["start_us"] = f"CASE WHEN start_us = 0 THEN {cut['end_us']} ELSE {cut['start_us']} END"
    return [cut.get(column, f'"{column}"') for column in columns]


def _on_nodes(nodelist: str) -> Callable[[str | None], bool] | None:
    """Whether a list of nodes holds one of those that are asked for; None for any."""
    if not nodelist:
        return None
    from steward.slurm.nodelists import NodeListError, expand

    asked = frozenset(expand(nodelist))
    known: dict[str, bool] = {}

    def meets(nodes: str | None) -> bool:
        if not nodes:
            return False
        if nodes not in known:
            if len(known) > 10_000:
                known.clear()
            try:
                known[nodes] = not asked.isdisjoint(expand(nodes))
            except NodeListError:
                known[nodes] = False
        return known[nodes]

    return meets


def _kept(
    batches: Iterable[Sequence[Row]],
    request: SacctRequest,
    nodes: Callable[[str | None], bool] | None,
) -> Iterator[list[Row]]:
    """The rows that are shown, in order: of several runs of one job id the last.

    Pieces of a resized job are shown always, before what became of it.
    """
    every_run = request.form != "text"
    cluster = job_id = None
    keep = False
    pieces: list[Row] = []
    last: list[Row] = []
    lines = last
    out: list[Row] = []
    for batch in batches:
        for row in batch:
            mark = row[0]
            if mark >= SHOWN_STEP:
                if keep and mark != HIDDEN_STEP and (nodes is None or nodes(row[3])):
                    lines.append(row)
                continue
            keep = mark != HIDDEN_RUN and (nodes is None or nodes(row[3]))
            if not keep:
                continue
            is_piece = mark in (SHOWN_PIECE, UNNAMED_PIECE)
            if row[_JOB_ID] != job_id or row[_CLUSTER] != cluster:
                job_id, cluster = row[_JOB_ID], row[_CLUSTER]
                out += pieces
                out += last
                pieces, last = [], []
            elif not is_piece:
                if request.duplicates:
                    out += pieces
                    out += last
                    pieces = []
                last = []
            lines = pieces if is_piece else last
            if every_run or mark in (SHOWN_RUN, SHOWN_PIECE):
                lines.append(row)
        yield out
        out = []
    yield pieces + last


def _flat(lists: Iterable[list[Row]]) -> Iterator[Row]:
    for items in lists:
        yield from items


def _in_pieces(lines: Iterable[str], when: Window) -> Iterator[SacctText | SacctAnswer]:
    count = letters = 0
    piece: list[str] = []
    for line in lines:
        piece.append(line)
        letters += len(line)
        if letters >= _PIECE_LETTERS:
            yield SacctText("".join(piece))
            count += len(piece)
            piece, letters = [], 0
    if piece:
        yield SacctText("".join(piece))
    yield SacctAnswer(lines=count + len(piece), since=when.since_us, until=when.until_us)
