"""Printers of the archive's replies: search hits, scripts, environments, diffs, streams.

Each prints highlighted text on a terminal, else plain text or unchanged bytes.
``export_target.py`` writes exported files.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

from steward.archive.errors import NotArchived
from steward.archive.export import ExportFile, ExportReply
from steward.archive.requests import (
    DiffReply,
    EnvironmentReply,
    JobLine,
    Progress,
    SearchHit,
    SearchReply,
    ShowReply,
    describe_job_state,
    format_exit_code,
)
from steward.cli import output
from steward.cli.commands import print_reply, prints
from steward.cli.export_target import open_target
from steward.cli.output import (
    ProgressLine,
    Style,
    decode_bytes,
    draw_facts,
    draw_script,
    format_size,
    format_time,
    is_terminal,
    print_facts,
    print_json,
    print_json_rows,
    print_renderables,
    print_table,
)
from steward.cli.parameters import Argument, Option
from steward.core.actions import Action, Answer
from steward.core.errors import UsageError
from steward.core.layouts import read_user
from steward.core.printable import escape_line, escape_lines


@prints("archive.search")
def print_search(reply: SearchReply, style: Style) -> None:
    """Print search hits with their matching lines."""
    if style.is_for_programs:
        print_table(reply.layout, reply.hits, style, reply)
    elif is_terminal():
        print_renderables(*_draw_hits(reply))
    else:
        _print_hits(reply)
    print_reply(reply, style, "")


def _format_headline(hit: SearchHit, zones: dict[str, str]) -> str:
    """Format the headline of a search hit: job, name, user, submit time."""
    job = hit.job
    submit_time = format_time(job.submit, zones.get(job.cluster, ""))
    user = read_user(job)
    return f"{escape_line(job.job)}  {escape_line(job.name)}  {escape_line(user)}  {submit_time}"


def _draw_hits(reply: SearchReply) -> list[Any]:
    """Draw search hits with the matches in colour."""
    from rich.text import Text

    drawn_lines: list[Any] = []
    for hit in reply.hits:
        drawn_lines.append(Text(_format_headline(hit, reply.zones), style="bold"))
        for line in hit.lines:
            text = Text(f"{line.number:>6}  ", style="dim")
            position = 0
            for begin, end in line.spans:
                text.append(escape_line(line.text[position:begin]), style="default not dim")
                text.append(escape_line(line.text[begin:end]), style="bold red not dim")
                position = end
            drawn_lines.append(
                text.append(escape_line(line.text[position:]), style="default not dim")
            )
        if hit.more_lines:
            noun = "line" if hit.more_lines == 1 else "lines"
            drawn_lines.append(Text(f"{'':>6}  and {hit.more_lines} more {noun}", style="dim"))
    return drawn_lines


def _print_hits(reply: SearchReply) -> None:
    """Print search hits as plain text."""
    for hit in reply.hits:
        print(_format_headline(hit, reply.zones))
        for line in hit.lines:
            print(f"{line.number:>6}  {escape_line(line.text)}")


@prints("archive.show")
def print_job(
    reply: ShowReply,
    *,
    script: Annotated[
        bool,
        Option(
            "--script",
            help="Print only the script: highlighted on a terminal, unchanged elsewhere.",
        ),
    ] = False,
) -> None:
    """Print the facts of a job and its script, or a script alone.

    Raises:
        NotArchived: The script alone was requested, and there is none.
    """
    if reply.sbatch:
        _print_script(reply.sbatch.encode())
    elif not script:
        _print_facts_and_script(reply)
    elif reply.content is None:
        raise NotArchived(
            f"job {reply.job.job} has no archived script: 'steward archive show "
            f"{reply.job.job}' shows what is known of the job",
            reply.job,
        )
    else:
        _print_script(reply.content.data)


def _print_script(data: bytes) -> None:
    """Print a script alone: highlighted on a terminal, unchanged bytes elsewhere."""
    if is_terminal():
        print_renderables(draw_script(decode_bytes(data)))
    else:
        output.write_bytes(data)


def _print_facts_and_script(reply: ShowReply) -> None:
    """Print the facts of a job and its script."""
    facts = _list_show_facts(reply)
    if reply.content is None:
        script_note = (
            "none: interactive job" if reply.job.kind == "interactive" else "none archived"
        )
        print_facts([*facts, ("Script", script_note)])
    elif is_terminal():
        script = draw_script(decode_bytes(reply.content.data))
        print_renderables(*draw_facts(facts), "", script)
    else:
        print_facts(facts)
        print()
        output.write_bytes(reply.content.data)
    if reply.others:
        times = [format_time(earlier_job.submit, reply.zone) for earlier_job in reply.others]
        output.print_note(
            f"Slurm used the id {escape_line(reply.job.job)} for earlier jobs, submitted at "
            f"{', '.join(times)}."
        )


def _list_show_facts(reply: ShowReply) -> list[tuple[str, str]]:
    """Return the facts shown above a script, as names and values."""
    facts = _list_job_facts(reply.job, reply.zone)
    record, script = reply.record, reply.script
    if record is not None:
        facts += [
            ("Submitted by", record.submit_line),
            ("From", record.submit_host),
            ("Directory", record.work_dir),
            ("Output", record.stdout),
            ("Errors", record.stderr if record.stderr != record.stdout else ""),
            ("Requested", record.tres_requested),
            ("Nodes", record.nodelist),
            ("Depends on", record.dependency),
        ]
    if script is not None:
        facts += [
            ("Script of", reply.script_of),
            ("Archived in", script.path),
            ("Script", f"{format_size(script.length)} bytes" if script.length is not None else ""),
            ("SHA-256", script.sha256),
            ("Redacted", ", ".join(script.redacted)),
            ("Odd", ", ".join(script.flags)),
        ]
    return facts


def _list_job_facts(job: JobLine, zone: str) -> list[tuple[str, str]]:
    """Return the facts shown above a job's script, as names and values."""
    times = [(name, format_time(getattr(job, name.lower()), zone)) for name in _JOB_TIMES]
    return [
        ("Job", f"{job.job} on {job.cluster}"),
        ("Name", job.name),
        ("User", read_user(job)),
        ("Account", job.account),
        ("Partition", job.partition),
        ("State", f"{describe_job_state(job)} {_format_failure(job)}".strip()),
        *times,
        ("Restarts", str(job.restarts) if job.restarts else ""),
    ]


_JOB_TIMES = ("Submit", "Start", "End")


def _format_failure(job: JobLine) -> str:
    """Format a non-zero exit code; "" for success."""
    code = format_exit_code(job)
    return f"(exit code {code})" if code not in ("", "0:0") else ""


@prints("archive.env")
def print_environment(
    reply: EnvironmentReply,
    *,
    null: Annotated[
        bool, Option("--null", "-0", help="End each variable with NUL, as env -0 does.")
    ] = False,
) -> None:
    """Print an environment, one variable a line."""
    if null:
        for variable in reply.variables:
            name = variable.name.encode("utf-8", "backslashreplace")
            output.write_bytes(name + b"=" + variable.value.data + b"\0")
    elif is_terminal():
        _draw_environment(reply)
    else:
        for variable in reply.variables:
            print(f"{escape_line(variable.name)}={escape_line(decode_bytes(variable.value.data))}")


def _draw_environment(reply: EnvironmentReply) -> None:
    """Draw an environment, with redacted values in colour."""
    from rich.text import Text

    lines = []
    for variable in reply.variables:
        line = Text(escape_line(variable.name), style="cyan").append("=", style="dim")
        value = escape_line(decode_bytes(variable.value.data))
        lines.append(line.append(value, style="yellow" if variable.redacted else "default"))
    print_renderables(*lines)
    if reply.flags:
        output.print_note(f"Odd: {', '.join(reply.flags)}.")


@prints("archive.diff")
def print_diff(reply: DiffReply, style: Style) -> None:
    """Print a unified diff."""
    if is_terminal():
        _draw_diff(decode_bytes(reply.diff.data))
    else:
        output.write_bytes(reply.diff.data)
    print_reply(reply, style, "")


def _draw_diff(text: str) -> None:
    """Draw a unified diff in colour."""
    from rich.text import Text

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = []
    for line in escape_lines(text).splitlines():
        is_heading = line.startswith(("+++ ", "--- "))
        lines.append(Text(line, style="bold" if is_heading else colours.get(line[:1], "default")))
    print_renderables(*lines)


@prints("archive.export")
def write_export(
    items: Iterator[ExportFile | ExportReply],
    style: Style,
    *,
    target: Annotated[
        str,
        Argument(
            metavar="DIR|FILE.tar|-",
            help="Target: a directory, a tar file, or '-' for a tar on stdout.",
        ),
    ],
    target_format: Annotated[
        str,
        Option(
            "--format",
            metavar="FORMAT",
            help="Format: dir, tar, tar.gz, tar.xz or tar.zst. Default: from the target's name.",
        ),
    ] = "",
) -> ExportReply:
    """Write exported files to a directory or a tar.

    Raises:
        UsageError: The format does not fit the target, or a tar would go to a terminal.
        ExportError: The target cannot be written.
    """
    destination = open_target(target, target_format)
    if target == "-" and is_terminal():
        raise UsageError("cannot write a tar to a terminal: redirect stdout to a file or a pipe")
    if target == "-" and style.json:
        raise UsageError(
            "--json and a tar on stdout exclude each other: give a directory or a file as target"
        )
    # Nothing is written if the action fails.
    first_item = next(items)
    reply: ExportReply | None = None
    with ProgressLine() as progress, destination:
        for item in itertools.chain((first_item,), items):
            if isinstance(item, ExportReply):
                reply = item
            else:
                destination.add(item)
                progress.step("files")
    assert reply is not None, "a stream ends with its reply"
    if style.json:
        print_json(reply)
    else:
        print_reply(reply, style, "")
    return reply


@prints("archive.reindex", "archive.resend", "archive.secrets", "archive.verify")
def print_stream(items: Iterator[Any], style: Style, action: Action) -> Answer:
    """Print the rows of a stream, if it has any, and its reply; show progress meanwhile."""
    replies: list[Answer] = []

    def iterate_rows() -> Iterator[Any]:
        count = 0
        with ProgressLine() as progress:
            for item in items:
                if isinstance(item, Progress):
                    progress.show(item.done, item.total, item.what)
                elif isinstance(item, Answer):
                    replies.append(item)
                else:
                    count += 1
                    if count == output.BLOCK_ROWS:
                        progress.end()  # the table begins
                    yield item

    rows = iterate_rows()
    assert issubclass(action.answer, Answer), "the reply of a stream"
    if style.json and action.rows:
        print_json_rows(action.rows, rows, lambda: {"version": 1, "summary": replies[0]})
        return replies[0]
    first_rows = list(itertools.islice(rows, 1))
    if first_rows or style.is_for_programs:
        layout = action.answer.get_layout(action.rows)
        print_table(layout, itertools.chain(first_rows, rows), style)
    for _ in rows:
        pass  # the user left the pager
    if style.json:
        print_json(replies[0])
    else:
        print_reply(replies[0], style, "")
    return replies[0]
