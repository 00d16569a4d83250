"""``steward sacct``: list jobs and steps with the options and output of Slurm's sacct.

It parses its own command line and loads neither Typer nor Rich, because scripts call it once a job.
The lines come preformatted from the daemon, from the job records on this host, or from a file.
Output is text, JSON, YAML, Parquet, or a job's archived script or environment.

:func:`run` is the entry; ``cli/sacct_command.py`` lists the command among the others.
"""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from steward.accounting.sacct.options import Options, completions, options
from steward.accounting.sacct.requests import SacctAnswer, SacctText
from steward.cli.errors import ended
from steward.cli.output import number, zone_to_ask_in
from steward.client.calls import elsewhere, where
from steward.client.places import Place
from steward.core.access import this_user
from steward.core.config import Settings
from steward.core.errors import StewardError, UsageError

if TYPE_CHECKING:
    from steward.archive.requests import EnvAnswer, ShowAnswer

_RULE = "-" * 80


class SacctFailed(StewardError):
    """The output cannot be written."""


def run(words: list[str]) -> int:
    """Run a command line, without the word ``sacct``, and return the exit code."""
    debug = bool(os.environ.get("STEWARD_DEBUG"))
    return ended(lambda: _run(words), debug=debug)


def _run(words: list[str]) -> int:
    """Parse the command line, query, and print in the requested format."""
    # Millions of rows are allocated, none in a reference cycle: the collector would cost 10 %.
    gc.disable()
    asked = options(words, os.environ, zone_to_ask_in())
    if asked.tell:
        sys.stdout.write(_told(asked))
    elif asked.output in ("script", "environment"):
        _print_scripts(asked)
    elif asked.output == "parquet":
        _write_parquet(asked)
    elif asked.output == "json":
        _print_json(asked, words)
    elif asked.output == "yaml":
        _print_yaml(asked, words)
    else:
        _print_lines(asked)
    sys.stdout.flush()
    return 0


def _told(asked: Options) -> str:
    """Return the text of an option that only informs: help, fields, version, completions."""
    from steward import __version__
    from steward.accounting.sacct.options import HELP, USAGE, field_list, reason_list, state_list

    if asked.tell == "fields":
        return field_list()
    if asked.tell == "version":
        # Scripts read Slurm's version to learn which fields and options exist.
        return f"slurm 26.05 (steward {__version__})\n"
    if asked.tell == "states":
        return state_list()
    if asked.tell == "reasons":
        return reason_list()
    if asked.tell == "completions":
        return completions(asked.prefix)
    return HELP if asked.tell == "help" else USAGE


def _print_lines(asked: Options) -> None:
    """Print the preformatted lines below their heading."""
    from steward.accounting.sacct.fields import chosen, header

    if asked.request.flags:
        print(
            "steward sacct: --flags finds imported jobs alone: squeue shows no flags",
            file=sys.stderr,
        )
    heading = header(chosen(asked.request.format), asked.request)
    pieces = _pieces(asked)
    # Fetch the first piece before the heading, so that an error prints without a heading.
    first = next(pieces, "")
    if asked.header:
        sys.stdout.write(heading)
    sys.stdout.write(first)
    for piece in pieces:
        sys.stdout.write(piece)


def _pieces(asked: Options) -> Iterator[str]:
    """Yield the text of the reply, piece by piece."""
    for item in _asked(asked):
        if isinstance(item, SacctText):
            yield item.text
        elif asked.verbose:
            _say_window(item)


def _say_window(answer: SacctAnswer) -> None:
    """Print the period searched, for --verbose."""
    from steward.cli.output import show_time
    from steward.core.timestamps import moment

    since, until = (show_time(moment(us)) for us in (answer.since, answer.until))
    sys.stdout.flush()
    print(f"sacct: looked at {since} to {until}, {number(answer.lines, 'line')}", file=sys.stderr)


def _asked(asked: Options) -> Iterator[SacctText | SacctAnswer]:
    """Query a file, the job records on this host, or the daemon."""
    if asked.file:
        from steward.accounting.sacct.output import sacct_of_file

        return sacct_of_file(asked.file, this_user(), asked.request)
    found = where(_place(asked))
    if isinstance(found, Settings):
        return _of_books(asked, found)
    from steward.accounting.sacct.output import SACCT

    return elsewhere(found, SACCT, asked.request)


def _of_books(asked: Options, settings: Settings) -> Iterator[SacctText | SacctAnswer]:
    """Query the job records on this host."""
    from steward.accounting.context import AccountingRoom
    from steward.accounting.sacct.output import sacct
    from steward.core.access import access_of

    if settings.forward.to:
        raise UsageError(
            f"a controller keeps no books: ask the Steward that it forwards to, "
            f"{settings.forward.to}"
        )
    return sacct(AccountingRoom(settings, access=access_of(settings)), this_user(), asked.request)


def _place(asked: Options) -> Place:
    """Return where to ask; the command line takes precedence over the environment."""
    if asked.config or asked.socket:
        return Place(config=asked.config, socket=asked.socket)
    return Place(
        config=os.environ.get("STEWARD_CONFIG", ""),
        socket=os.environ.get("STEWARD_SOCKET", ""),
        archive=os.environ.get("STEWARD_ARCHIVE", ""),
    )


def _documents(asked: Options) -> Iterator[str]:
    """Yield one JSON document for each job."""
    for piece in _pieces(asked):
        yield from piece.splitlines()


def _meta(words: list[str]) -> dict[str, Any]:
    """Return the "meta" object of JSON and YAML output."""
    from steward import __version__
    from steward.accounting.sacct.output import VERSION

    return {
        "version": VERSION,
        "generator": f"steward {__version__}",
        "command": ["sacct", *words],
    }


def _print_json(asked: Options, words: list[str]) -> None:
    """Print jobs as one JSON document, streamed job by job."""
    import msgspec

    meta = msgspec.json.encode(_meta(words)).decode()
    write = sys.stdout.write
    between = f'{{"meta": {meta},\n "jobs": [\n'
    for document in _documents(asked):
        write(between + document)
        between = ",\n"
    if between != ",\n":
        write(between)
    write('\n ],\n "warnings": [], "errors": []}\n')


def _print_yaml(asked: Options, words: list[str]) -> None:
    """Print jobs as one YAML document, streamed job by job."""
    import msgspec
    import yaml

    def written(value: Any) -> str:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)

    write = sys.stdout.write
    write(written({"meta": _meta(words)}))
    begun = "jobs:\n"
    for document in _documents(asked):
        write(begun + written([msgspec.json.decode(document)]))
        begun = ""
    write("jobs: []\n" if begun else "")
    write("warnings: []\nerrors: []\n")


def _write_parquet(asked: Options) -> None:
    """Write jobs to a new Parquet file, renamed when complete."""
    import tempfile

    import msgspec

    from steward.core.files import directory_of
    from steward.core.records import Line
    from steward.extensions.jobacct_plugins import write_parquet

    path = os.path.abspath(asked.parquet)
    if os.path.lexists(path):
        raise SacctFailed(f"{asked.parquet} is there already: give another name", path)
    decode = msgspec.json.Decoder(Line).decode
    try:
        with (
            directory_of(path) as (directory, name),
            # In a private directory, because the library creates files by path.
            tempfile.TemporaryDirectory(
                prefix=".steward-parquet-", dir=f"/proc/self/fd/{directory}"
            ) as work,
        ):
            part = os.path.join(os.path.realpath(work), "lines")
            write_parquet((decode(document) for document in _documents(asked)), part)
            os.rename(part, name, dst_dir_fd=directory)
    except OSError as error:
        raise SacctFailed(
            f"cannot write {asked.parquet}: {error.strerror or error}", path
        ) from error


def _print_scripts(asked: Options) -> None:
    """Print the archived script or environment of each job, headed as Slurm's sacct does."""
    for job in asked.request.jobs:
        if asked.output == "script":
            text = _script(asked, job)
            heading = f"Batch Script for {job}"
        else:
            text = _environment(asked, job)
            heading = f"Environment used for {job} (must be batch to display)"
        print(f"{heading}\n{_RULE}", flush=True)
        sys.stdout.buffer.write(text + b"\n")


def _script(asked: Options, job: str) -> bytes:
    """Return a job's archived script; NONE if there is none, as sacct prints."""
    from steward.archive.requests import ShowRequest

    request = ShowRequest(job=job, cluster=_cluster(asked))
    answer: ShowAnswer = _of_archive(asked, "archive.show", request)
    return answer.content.data if answer.content is not None else b"NONE"


def _environment(asked: Options, job: str) -> bytes:
    """Return a job's archived environment; NONE if there is none, as sacct prints."""
    from steward.archive.requests import EnvRequest

    request = EnvRequest(job=job, cluster=_cluster(asked))
    answer: EnvAnswer = _of_archive(asked, "archive.env", request)
    lines = [
        variable.name.encode("utf-8", "backslashreplace") + b"=" + variable.value.data
        for variable in answer.variables
    ]
    return b"\n".join(lines) or b"NONE"


def _of_archive(asked: Options, name: str, request: Any) -> Any:
    """Call an action of the archive."""
    from steward.client.calls import call
    from steward.daemon.registry import action

    return call(_place(asked), action(name), request)


def _cluster(asked: Options) -> str:
    """Return the first cluster of the query, or ""."""
    return asked.request.clusters[0] if asked.request.clusters else ""
