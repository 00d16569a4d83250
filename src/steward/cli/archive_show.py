"""``steward archive show``, ``env`` and ``diff``: what one job ran, and how two differ."""

from typing import Annotated

import typer

from steward.archive.requests import (
    DiffAnswer,
    DiffRequest,
    EnvAnswer,
    EnvRequest,
    ShowAnswer,
    ShowRequest,
)
from steward.cli import options, output
from steward.cli.jobs_table import facts
from steward.cli.options import Place
from steward.cli.text import decode, safe, safe_lines, size
from steward.cli.times import show as show_time
from steward.client.asking import action, call
from steward.core.errors import StewardError

_TROUBLE = 2
"""Exit code of diff(1) where it cannot compare."""


class NoScript(StewardError):
    """The job has no kept script."""


def show(
    job: options.JobId,
    script: Annotated[
        bool, typer.Option("--script", help="Print the script alone, byte for byte in a pipe.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Print what would submit it to Slurm again.")
    ] = False,
    cluster: options.Cluster = "",
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Show a job and the script it ran.

    An array's task shows its array's script, a component of a heterogeneous
    job its leader's. Where Slurm has used an id again the newest job is shown
    and the others are mentioned.
    """
    place = Place(config=config, socket=socket, archive=archive)
    request = ShowRequest(job=job, cluster=cluster, sbatch=sbatch)
    answer: ShowAnswer = call(place, action("archive.show"), request)
    if as_json:
        output.print_json(answer)
    elif sbatch:
        _print_script(answer.sbatch.encode())
    elif script:
        if answer.content is None:
            raise NoScript(f"no script of job {job} is kept", job)
        _print_script(answer.content.data)
    else:
        _print_job(answer)


def _print_script(data: bytes) -> None:
    """A script alone: highlighted for a person, and just its bytes for everything else."""
    if output.is_terminal():
        output.show(output.drawn_script(decode(data)))
    else:
        output.write(data)


def _print_job(answer: ShowAnswer) -> None:
    rows = _facts_of(answer)
    if answer.content is None:
        kind = "an interactive job has none" if answer.job.kind == "interactive" else "none is kept"
        output.print_facts([*rows, ("Script", kind)])
    elif output.is_terminal():
        script = output.drawn_script(decode(answer.content.data))
        output.show(*output.drawn_facts(rows), "", script)
    else:
        output.print_facts(rows)
        print()
        output.write(answer.content.data)
    if answer.others:
        times = [show_time(other.submit, answer.zone) for other in answer.others]
        output.note(f"Slurm has used the id {safe(answer.job.job)} before: {', '.join(times)}.")


def _facts_of(answer: ShowAnswer) -> list[tuple[str, str]]:
    rows = facts(answer.job, answer.zone)
    record, script = answer.record, answer.script
    if record is not None:
        rows += [
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
        rows += [
            ("Script of", answer.script_of),
            ("Kept in", script.path),
            ("Script", f"{size(script.length)} bytes" if script.length is not None else ""),
            ("SHA-256", script.sha256),
            ("Redacted", ", ".join(script.redacted)),
            ("Odd", ", ".join(script.flags)),
        ]
    return rows


def env(
    job: options.JobId,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Only these variables; * and ? match."),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="End each variable with NUL, as env -0.")
    ] = False,
    cluster: options.Cluster = "",
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Show the environment a job was submitted with.

    Values that looked like secrets were taken out before they were kept.
    """
    place = Place(config=config, socket=socket, archive=archive)
    request = EnvRequest(job=job, cluster=cluster, names=tuple(names or ()))
    answer: EnvAnswer = call(place, action("archive.env"), request)
    if as_json:
        output.print_json(answer)
    elif null:
        for variable in answer.variables:
            name = variable.name.encode("utf-8", "backslashreplace")
            output.write(name + b"=" + variable.value.data + b"\0")
    elif output.is_terminal():
        _show_environment(answer)
    else:
        for variable in answer.variables:
            print(f"{safe(variable.name)}={safe(decode(variable.value.data))}")


def _show_environment(answer: EnvAnswer) -> None:
    from rich.text import Text

    lines = []
    for variable in answer.variables:
        line = Text(safe(variable.name), style="cyan").append("=", style="dim")
        value = safe(decode(variable.value.data))
        lines.append(line.append(value, style="yellow" if variable.redacted else "default"))
    output.show(*lines)
    if answer.flags:
        output.note(f"Odd: {', '.join(answer.flags)}.")


def diff(
    left: Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")],
    right: Annotated[str, typer.Argument(metavar="JOB", help="Another's.")],
    environments: Annotated[
        bool, typer.Option("--env", help="Compare the environments, too.")
    ] = False,
    context: Annotated[
        int, typer.Option("--unified", "-U", min=0, metavar="LINES", help="Equal lines to show.")
    ] = 3,
    cluster: options.Cluster = "",
    as_json: options.Json = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Compare the scripts of two jobs.

    The exit code is that of diff(1): 0 where nothing differs, 1 where something
    does, 2 where that cannot be told.
    """
    place = Place(config=config, socket=socket, archive=archive)
    request = DiffRequest(
        left=left, right=right, cluster=cluster, context=context, environments=environments
    )
    try:
        answer: DiffAnswer = call(place, action("archive.diff"), request)
    except StewardError as error:
        error.exit_code = _TROUBLE
        raise
    if as_json:
        output.print_json(answer)
    elif output.is_terminal():
        _show_diff(decode(answer.diff.data))
    else:
        output.write(answer.diff.data)
    if answer.identical:
        output.note(f"The scripts of {safe(left)} and {safe(right)} are the same.")
    else:
        raise typer.Exit(1)


def _show_diff(text: str) -> None:
    from rich.text import Text

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = []
    for line in safe_lines(text).splitlines():
        is_heading = line.startswith(("+++ ", "--- "))
        lines.append(Text(line, style="bold" if is_heading else colours.get(line[:1], "default")))
    output.show(*lines)
