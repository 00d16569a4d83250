"""Packing of a closed day of the job log: zstd for its records, Parquet for its sacct lines.

``python -m steward.extensions.jobacct_plugins.log.packing LOCATION DAY DATABASE NAME=LENGTH…``
writes two files whose names begin with a dot; its caller (``consumer.Closing``) renames them. It is
a process of its own because packing takes CPU and memory. :func:`write_parquet` uses DuckDB.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Final, get_type_hints

import msgspec

from steward.core.drivers import PARQUET as PARQUET_DRIVER
from steward.core.errors import StewardError
from steward.core.records import FIELDS, Line
from steward.extensions.jobacct_plugins.log.blanking import Blanking, blanked_lines
from steward.extensions.jobacct_plugins.log.files import (
    LATE,
    MODE,
    NEW,
    OPEN,
    PACKED,
    PARQUET,
    LogUnavailable,
    created,
    stop_with_parent,
    sync,
)
from steward.extensions.jobacct_plugins.log.reader import Source, lines_of_unit
from steward.extensions.jobacct_plugins.log.state import Keeping
from steward.jobs.lines import rank_of

_LEVEL: Final = 9
"""zstd compression level."""
_MEMORY: Final = "512MB"
"""Memory limit of DuckDB."""
_KEYS: Final = {"cluster", "step"}
"""Text fields that must not be NULL, as they identify a line."""
_encode = msgspec.json.Encoder().encode
_HINTS: Final = get_type_hints(Line)


def pack(location: str, day: str, lengths: dict[str, int], blanking: Blanking) -> str:
    """Pack a day's records, with purged text blanked; return the path of the new file.

    Args:
        location: The log's directory.
        day: The day, ``2026-11-21``.
        lengths: Valid bytes of each open file.
        blanking: The purged scripts.
    """
    import zstandard

    packed = f"{location}/{day}{PACKED}"
    sources: list[Source] = [(packed, None)] if os.path.exists(packed) else []
    sources += [
        (f"{location}/{name}", lengths[name])
        for name in (f"{day}{OPEN}", f"{day}{LATE}")
        if name in lengths and os.path.exists(f"{location}/{name}")
    ]
    path = f"{location}/.{day}{PACKED}{NEW}"
    with created(path) as file:
        writer = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
        with writer:
            for line in blanked_lines(sources, blanking):
                writer.write(line)
        sync(file)
    return path


def write_parquet(lines: Iterable[Line], path: str) -> None:
    """Write lines as Parquet (zstd), in sacct's order.

    Args:
        lines: The lines.
        path: The file; names beside it that continue with ``.lines`` are used for temporary data.

    Raises:
        LogUnavailable: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise LogUnavailable(PARQUET_DRIVER.missing, PARQUET_DRIVER.part) from error

    between = f"{path}.lines{NEW}"
    try:
        with created(between) as file:
            for line in lines:
                # Add the rank as one more field beside the line's own.
                rank = b'{"rank":%d,' % rank_of(line.step)
                file.write(rank + _encode(line)[1:] + b"\n")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, MODE))
        with duckdb.connect() as database:
            database.execute(f"SET memory_limit = '{_MEMORY}'")
            database.execute("SET threads = 2")
            database.execute(f"SET temp_directory = {_quoted(f'{path}.spill{NEW}')}")
            database.execute(_COPY.format(between=_quoted(between), path=_quoted(path)))
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(fd, MODE)
            os.fsync(fd)
        finally:
            os.close(fd)
    finally:
        if os.path.exists(between):
            os.unlink(between)


def _type(field: str) -> str:
    return "VARCHAR" if _HINTS[field] is str else "BIGINT"


def _selected() -> Iterator[str]:
    """Yield SQL columns that restore the defaults a line's JSON leaves out; text stays NULL."""
    for field in msgspec.structs.fields(Line):
        if field.name in _KEYS:
            yield f'coalesce("{field.name}", \'\') AS "{field.name}"'
        elif isinstance(field.default, int):
            yield f'coalesce("{field.name}", {field.default}) AS "{field.name}"'
        else:
            yield f'"{field.name}"'


_COLUMNS: Final = ", ".join(f"'{field}': '{_type(field)}'" for field in FIELDS)
_COPY: Final = (
    f"COPY (SELECT {', '.join(_selected())} "  # noqa: S608 - our own names; paths are quoted
    "FROM read_json({between}, format = 'newline_delimited', "
    f"columns = {{{{'rank': 'BIGINT', {_COLUMNS}}}}}, ignore_errors = true) "
    "ORDER BY cluster, job_id, submit_us, restarts, piece_us = 0, piece_us, rank, step) "
    "TO {path} (FORMAT parquet, COMPRESSION zstd)"
)
"""SQL that reads lines as JSON and writes them as sorted Parquet."""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def main(arguments: list[str]) -> int:
    """Write a day's two files; return the exit code."""
    stop_with_parent()
    location, day, database, *parts = arguments
    lengths = {name: int(length) for name, _, length in (part.rpartition("=") for part in parts)}
    try:
        keeping = Keeping(database, reading=True)
        packed = pack(location, day, lengths, Blanking(keeping.purges()))
        lines = lines_of_unit([(packed, None)], is_superseded=keeping.is_superseded)
        write_parquet(lines, f"{location}/.{day}{PARQUET}{NEW}")
        keeping.close()
    except (StewardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
