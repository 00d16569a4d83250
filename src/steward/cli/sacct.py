"""``steward sacct``: list jobs and steps with the options and output of Slurm's sacct.

It parses its own command line and loads neither Click nor Rich, because scripts call it once a job.
The lines come preformatted from the daemon, from the job records on this host, or from a file.
Output is text, JSON, YAML, Parquet, or a job's archived script or environment.

:func:`execute_sacct` is the entry; ``cli/sacct_command.py`` lists the command among the others.
"""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from steward.accounting.sacct.options import SacctOptions, list_completions, parse_sacct_options
from steward.accounting.sacct.requests import SacctAnswer, SacctText
from steward.cli.errors import run_command
from steward.cli.output import find_requested_zone, format_count
from steward.client.calls import ask_daemon, find_place
from steward.client.places import ClientPlace
from steward.core.access import get_process_user
from steward.core.config import Settings
from steward.core.errors import StewardError, UsageError
from steward.daemon.registry import get_action

if TYPE_CHECKING:
    from steward.archive.requests import EnvironmentReply, ShowReply


_SEPARATOR_LINE = "-" * 80


class SacctOutputError(StewardError):
    """Error: the output cannot be written."""


def execute_sacct(arguments: list[str]) -> int:
    """Run a command line, without the word ``sacct``, and return the exit code."""
    debug = bool(os.environ.get("STEWARD_DEBUG"))
    return run_command(lambda: _run_query(arguments), debug=debug)


def _run_query(arguments: list[str]) -> int:
    """Parse the command line, query, and print in the requested format."""
    # Millions of rows are allocated, none in a reference cycle: the collector would cost 10 %.
    gc.disable()
    options = parse_sacct_options(arguments, os.environ, find_requested_zone())
    if options.tell:
        sys.stdout.write(_choose_information(options))
    elif options.output in ("script", "environment"):
        _print_scripts(options)
    elif options.output == "parquet":
        _write_parquet(options)
    elif options.output == "json":
        _print_json(options, arguments)
    elif options.output == "yaml":
        _print_yaml(options, arguments)
    else:
        _print_lines(options)
    sys.stdout.flush()
    return 0


def _choose_information(options: SacctOptions) -> str:
    """Return the text of an option that only informs: help, fields, version, completions."""
    from steward import __version__
    from steward.accounting.sacct.options import HELP, USAGE, list_fields, list_reasons, list_states

    if options.tell == "fields":
        return list_fields()
    if options.tell == "version":
        # Scripts read Slurm's version to learn which fields and options exist.
        return f"slurm 26.05 (steward {__version__})\n"
    if options.tell == "states":
        return list_states()
    if options.tell == "reasons":
        return list_reasons()
    if options.tell == "completions":
        return list_completions(options.prefix)
    return HELP if options.tell == "help" else USAGE


def _print_lines(options: SacctOptions) -> None:
    """Print the preformatted lines below their heading."""
    from steward.accounting.sacct.fields import format_header, parse_format

    if options.request.flags:
        print(
            "steward sacct: --flags matches imported jobs only, since squeue does not show flags",
            file=sys.stderr,
        )
    heading = format_header(parse_format(options.request.format), options.request)
    pieces = _iterate_pieces(options)
    # Fetch the first piece before the heading, so that an error prints without a heading.
    first_piece = next(pieces, "")
    if options.header:
        sys.stdout.write(heading)
    sys.stdout.write(first_piece)
    for piece in pieces:
        sys.stdout.write(piece)


def _iterate_pieces(options: SacctOptions) -> Iterator[str]:
    """Yield the text of the reply, piece by piece."""
    for item in _query_jobs(options):
        if isinstance(item, SacctText):
            yield item.text
        elif options.verbose:
            _print_window(item)


def _print_window(reply: SacctAnswer) -> None:
    """Print the period searched, for --verbose."""
    from steward.cli.output import format_time
    from steward.core.timestamps import from_micros

    since, until = (format_time(from_micros(us)) for us in (reply.since, reply.until))
    sys.stdout.flush()
    print(
        f"sacct: jobs from {since} to {until}, {format_count(reply.lines, 'line')}",
        file=sys.stderr,
    )


def _query_jobs(options: SacctOptions) -> Iterator[SacctText | SacctAnswer]:
    """Query a file, the job records on this host, or the daemon."""
    if options.file:
        from steward.accounting.sacct.output import stream_file_lines

        return stream_file_lines(options.file, get_process_user(), options.request)
    place = find_place(_choose_place(options))
    if isinstance(place, Settings):
        return _query_records(options, place)
    return ask_daemon(place, get_action("accounting.sacct"), options.request)


def _query_records(options: SacctOptions, settings: Settings) -> Iterator[SacctText | SacctAnswer]:
    """Query the job records on this host."""
    from steward.accounting.context import AccountingContext
    from steward.accounting.sacct.output import stream_lines
    from steward.core.access import make_access

    if settings.forward.to:
        raise UsageError(
            f"this host has no job records, it forwards events to {settings.forward.to}: run the "
            "command on that host"
        )
    return stream_lines(
        AccountingContext(settings, access=make_access(settings)),
        get_process_user(),
        options.request,
    )


def _choose_place(options: SacctOptions) -> ClientPlace:
    """Return where to ask; the command line takes precedence over the environment."""
    if options.config or options.socket:
        return ClientPlace(config=options.config, socket=options.socket)
    return ClientPlace(
        config=os.environ.get("STEWARD_CONFIG", ""),
        socket=os.environ.get("STEWARD_SOCKET", ""),
        archive=os.environ.get("STEWARD_ARCHIVE", ""),
    )


def _iterate_documents(options: SacctOptions) -> Iterator[str]:
    """Yield one JSON document for each job."""
    for piece in _iterate_pieces(options):
        yield from piece.splitlines()


def _make_meta(arguments: list[str]) -> dict[str, Any]:
    """Return the "meta" object of JSON and YAML output."""
    from steward import __version__
    from steward.accounting.sacct.output import VERSION

    return {
        "version": VERSION,
        "generator": f"steward {__version__}",
        "command": ["sacct", *arguments],
    }


def _print_json(options: SacctOptions, arguments: list[str]) -> None:
    """Print jobs as one JSON document, streamed job by job."""
    import msgspec

    meta = msgspec.json.encode(_make_meta(arguments)).decode()
    write = sys.stdout.write
    separator = f'{{"meta": {meta},\n "jobs": [\n'
    for document in _iterate_documents(options):
        write(separator + document)
        separator = ",\n"
    if separator != ",\n":
        write(separator)
    write('\n ],\n "warnings": [], "errors": []}\n')


def _print_yaml(options: SacctOptions, arguments: list[str]) -> None:
    """Print jobs as one YAML document, streamed job by job."""
    import msgspec
    import yaml

    def dump(value: Any) -> str:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)

    write = sys.stdout.write
    write(dump({"meta": _make_meta(arguments)}))
    prefix = "jobs:\n"
    for document in _iterate_documents(options):
        write(prefix + dump([msgspec.json.decode(document)]))
        prefix = ""
    write("jobs: []\n" if prefix else "")
    write("warnings: []\nerrors: []\n")


def _write_parquet(options: SacctOptions) -> None:
    """Write jobs to a new Parquet file, renamed when complete."""
    import tempfile

    import msgspec

    from steward.core.files import open_parent
    from steward.core.records import UsageLine
    from steward.extensions.jobacct_plugins import write_parquet

    path = os.path.abspath(options.parquet)
    if os.path.lexists(path):
        raise SacctOutputError(f"{options.parquet} exists already: choose another name", path)
    decode = msgspec.json.Decoder(UsageLine).decode
    try:
        with (
            open_parent(path) as (directory_fd, name),
            # In a private directory, because the library creates files by path.
            tempfile.TemporaryDirectory(
                prefix=".steward-parquet-", dir=f"/proc/self/fd/{directory_fd}"
            ) as work_dir,
        ):
            temporary_path = os.path.join(os.path.realpath(work_dir), "lines")
            write_parquet(
                (decode(document) for document in _iterate_documents(options)), temporary_path
            )
            os.rename(temporary_path, name, dst_dir_fd=directory_fd)
    except OSError as error:
        raise SacctOutputError(
            f"cannot write {options.parquet}: {error.strerror or error}", path
        ) from error


def _print_scripts(options: SacctOptions) -> None:
    """Print the archived script or environment of each job, headed as Slurm's sacct does."""
    for job in options.request.jobs:
        if options.output == "script":
            text = _fetch_script(options, job)
            heading = f"Batch Script for {job}"
        else:
            text = _fetch_environment(options, job)
            heading = f"Environment used for {job} (must be batch to display)"
        print(f"{heading}\n{_SEPARATOR_LINE}", flush=True)
        sys.stdout.buffer.write(text + b"\n")


def _fetch_script(options: SacctOptions, job: str) -> bytes:
    """Return a job's archived script; NONE if there is none, as sacct prints."""
    from steward.archive.requests import ShowRequest

    request = ShowRequest(job=job, cluster=_choose_cluster(options))
    reply: ShowReply = _call_archive(options, "archive.show", request)
    return reply.content.data if reply.content is not None else b"NONE"


def _fetch_environment(options: SacctOptions, job: str) -> bytes:
    """Return a job's archived environment; NONE if there is none, as sacct prints."""
    from steward.archive.requests import EnvironmentRequest

    request = EnvironmentRequest(job=job, cluster=_choose_cluster(options))
    reply: EnvironmentReply = _call_archive(options, "archive.env", request)
    lines = [
        variable.name.encode("utf-8", "backslashreplace") + b"=" + variable.value.data
        for variable in reply.variables
    ]
    return b"\n".join(lines) or b"NONE"


def _call_archive(options: SacctOptions, name: str, request: Any) -> Any:
    """Call an action of the archive."""
    from steward.client.calls import call_action
    from steward.daemon.registry import get_action

    return call_action(_choose_place(options), get_action(name), request)


def _choose_cluster(options: SacctOptions) -> str:
    """Return the first cluster of the query, or ""."""
    return options.request.clusters[0] if options.request.clusters else ""
