"""Packing of a closed day of the job log: zstd for its records, Parquet for its sacct lines.

``python -m steward.extensions.jobacct_plugins.log.parquet LOCATION DAY DATABASE NAME=LENGTH…``
writes two files whose names begin with a dot; its caller (``consumer.DayCloser``) renames them. It
is a process of its own because packing takes CPU and memory. :func:`write_parquet` uses DuckDB.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from steward.core.drivers import PARQUET as PARQUET_DRIVER
from steward.core.errors import StewardError
from steward.core.records import USAGE_LINE_FIELDS, UsageLine
from steward.extensions.jobacct_plugins.log.files import (
    LATE_SUFFIX,
    LOG_FILE_MODE,
    NEW_SUFFIX,
    OPEN_SUFFIX,
    PACKED_SUFFIX,
    PARQUET_SUFFIX,
    JobLogUnavailable,
    create_log_file,
    stop_with_parent,
    sync_file,
)
from steward.extensions.jobacct_plugins.log.purges import PurgeBlanker, read_blanked_lines
from steward.extensions.jobacct_plugins.log.reader import LogSource, read_unit_lines
from steward.extensions.jobacct_plugins.log.state import LogState
from steward.jobs.lines import TEXT_FIELDS, rank_step

_ZSTD_LEVEL: Final = 9
"""zstd compression level."""
_MEMORY_LIMIT: Final = "512MB"
"""Memory limit of DuckDB."""
_KEY_FIELDS: Final = {"cluster", "step"}
"""Text fields that must not be NULL, as they identify a line."""
_encode = msgspec.json.Encoder().encode


def pack_records(location: str, day: str, lengths: dict[str, int], blanker: PurgeBlanker) -> str:
    """Pack a day's records, with purged text blanked; return the path of the new file.

    Args:
        location: The log's directory.
        day: The day, ``2026-11-21``.
        lengths: Valid bytes of each open file.
        blanker: The purged scripts.
    """
    import zstandard

    packed = f"{location}/{day}{PACKED_SUFFIX}"
    sources: list[LogSource] = [(packed, None)] if os.path.exists(packed) else []
    sources += [
        (f"{location}/{name}", lengths[name])
        for name in (f"{day}{OPEN_SUFFIX}", f"{day}{LATE_SUFFIX}")
        if name in lengths and os.path.exists(f"{location}/{name}")
    ]
    path = f"{location}/.{day}{PACKED_SUFFIX}{NEW_SUFFIX}"
    with create_log_file(path) as file:
        writer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(file, closefd=False)
        with writer:
            for line in read_blanked_lines(sources, blanker):
                writer.write(line)
        sync_file(file)
    return path


def write_parquet(lines: Iterable[UsageLine], path: str) -> None:
    """Write lines as Parquet (zstd), in sacct's order.

    Args:
        lines: The lines.
        path: The file; names beside it that continue with ``.lines`` are used for temporary data.

    Raises:
        JobLogUnavailable: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise JobLogUnavailable(PARQUET_DRIVER.missing_error, PARQUET_DRIVER.part) from error

    lines_path = f"{path}.lines{NEW_SUFFIX}"
    try:
        with create_log_file(lines_path) as file:
            for line in lines:
                # Add the rank as one more field beside the line's own.
                rank = b'{"rank":%d,' % rank_step(line.step)
                file.write(rank + _encode(line)[1:] + b"\n")
        os.close(
            os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, LOG_FILE_MODE)
        )
        with duckdb.connect() as database:
            database.execute(f"SET memory_limit = '{_MEMORY_LIMIT}'")
            database.execute("SET threads = 2")
            database.execute(f"SET temp_directory = {_quote_sql(f'{path}.spill{NEW_SUFFIX}')}")
            database.execute(_COPY.format(between=_quote_sql(lines_path), path=_quote_sql(path)))
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(fd, LOG_FILE_MODE)
            os.fsync(fd)
        finally:
            os.close(fd)
    finally:
        if os.path.exists(lines_path):
            os.unlink(lines_path)


def _sql_type(field: str) -> str:
    return "VARCHAR" if field in TEXT_FIELDS else "BIGINT"


def _select_columns() -> Iterator[str]:
    """Yield SQL columns that restore the defaults a line's JSON leaves out; text stays NULL."""
    for field in msgspec.structs.fields(UsageLine):
        if field.name in _KEY_FIELDS:
            yield f'coalesce("{field.name}", \'\') AS "{field.name}"'
        elif isinstance(field.default, int):
            yield f'coalesce("{field.name}", {field.default}) AS "{field.name}"'
        else:
            yield f'"{field.name}"'


_COLUMNS: Final = ", ".join(f"'{field}': '{_sql_type(field)}'" for field in USAGE_LINE_FIELDS)
_COPY: Final = (
    f"COPY (SELECT {', '.join(_select_columns())} "  # noqa: S608 - our own names; paths are quoted
    "FROM read_json({between}, format = 'newline_delimited', "
    f"columns = {{{{'rank': 'BIGINT', {_COLUMNS}}}}}, ignore_errors = true) "
    "ORDER BY cluster, job_id, submit_us, restarts, piece_us = 0, piece_us, rank, step) "
    "TO {path} (FORMAT parquet, COMPRESSION zstd)"
)
"""SQL that reads lines as JSON and writes them as sorted Parquet."""


def _quote_sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def main(arguments: list[str]) -> int:
    """Write a day's two files; return the exit code."""
    stop_with_parent()
    location, day, database, *parts = arguments
    lengths = {name: int(length) for name, _, length in (part.rpartition("=") for part in parts)}
    try:
        state = LogState(database, read_only=True)
        packed = pack_records(location, day, lengths, PurgeBlanker(state.list_purges()))
        lines = read_unit_lines([(packed, None)], is_superseded=state.is_superseded)
        write_parquet(lines, f"{location}/.{day}{PARQUET_SUFFIX}{NEW_SUFFIX}")
        state.close()
    except (StewardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
