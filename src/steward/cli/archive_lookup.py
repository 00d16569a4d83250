"""``steward archive`` lookup commands: list, search, show, env and diff of archived scripts.

The commands fetch pages of results from the daemon (or a local archive) and print them as a table,
JSON, or highlighted text on a terminal.
"""

from typing import Annotated, Any

import msgspec
import typer

from steward.archive.requests import (
    DiffReply,
    DiffRequest,
    EnvironmentReply,
    EnvironmentRequest,
    JobLine,
    JobListReply,
    JobListRequest,
    SearchHit,
    SearchReply,
    SearchRequest,
    ShowReply,
    ShowRequest,
    describe_job_state,
    format_exit_code,
)
from steward.cli import options, output
from steward.cli.options import (
    Accounts,
    Archive,
    Cluster,
    Clusters,
    Config,
    Format,
    JobId,
    Jobs,
    Json,
    Names,
    NoHeader,
    Parsable,
    Partitions,
    Since,
    Socket,
    States,
    Until,
    Users,
)
from steward.cli.output import (
    decode_bytes,
    draw_facts,
    draw_script,
    format_count,
    format_size,
    format_time,
    is_terminal,
    print_facts,
    print_json,
    print_renderables,
    print_table,
)
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.errors import StewardError
from steward.core.layouts import Column, read_user
from steward.core.printable import escape_line, escape_lines
from steward.daemon.registry import get_action

_PAGE_SIZE = 1000
"""Jobs fetched in one request."""
TERMINAL_LIMIT = 200
"""Jobs listed on a terminal without --limit."""

Limit = Annotated[
    int,
    typer.Option("--limit", "-L", min=0, help="How many at most; 0 for all."),
]


def list_jobs(
    users: Users = None,
    accounts: Accounts = None,
    jobs: Jobs = None,
    names: Names = None,
    states: States = None,
    partitions: Partitions = None,
    clusters: Clusters = None,
    since: Since = "",
    until: Until = "",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-L",
            min=0,
            help=f"How many at most; 0 for all. Default: {TERMINAL_LIMIT} on a terminal, else all.",
        ),
    ] = None,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    columns_: Format = "",
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """List jobs, newest first.

    Without -S or -j these are the jobs of the last seven days. Jobs without a
    script (salloc, srun) are listed as such.
    """
    style = options.make_style(as_json, parsable, noheader, columns_)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    selection = options.select_jobs(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    reply = _fetch_all_pages(place, selection, limit)
    if style.json:
        print_json(reply)
        return
    print_table(reply.layout, reply.jobs, style, reply)
    if reply.default_days:
        output.print_note(
            "The last seven days; -S for more." if reply.jobs else _describe_empty(reply)
        )
    if reply.next:
        output.print_note(f"There are more than these {len(reply.jobs)}; --limit 0 for all.")


def _describe_empty(reply: JobListReply) -> str:
    """Explain an empty list of jobs."""
    days = reply.default_days
    return f"No jobs in the last {'seven' if days == 7 else days} days; -S for more."


def _fetch_all_pages(
    place: ClientPlace, selection: dict[str, Any], limit: int | None
) -> JobListReply:
    """Fetch pages of jobs and join them into one reply, up to ``limit`` jobs; all if it is 0."""
    # A terminal gets the newest few; programs and pipes get everything.
    max_jobs = (TERMINAL_LIMIT if is_terminal() else 0) if limit is None else limit
    pages: list[JobListReply] = []
    count, page = 0, ""
    while True:
        page_size = min(_PAGE_SIZE, max_jobs - count) if max_jobs else _PAGE_SIZE
        request = JobListRequest(**selection, limit=page_size, page=page)
        reply: JobListReply = call_action(place, get_action("archive.list"), request)
        pages.append(reply)
        count += len(reply.jobs)
        page = reply.next
        if not page or (max_jobs and count >= max_jobs):
            break
    jobs = tuple(job for reply in pages for job in reply.jobs)
    zones = {name: zone for reply in pages for name, zone in reply.zones.items()}
    return msgspec.structs.replace(pages[0], jobs=jobs, zones=zones, next=page)


def search(
    terms: Annotated[
        list[str], typer.Argument(metavar="TEXT…", help="Texts that must all stand in a script.")
    ],
    case: Annotated[bool, typer.Option("--case", help="Tell upper from lower case.")] = False,
    words: Annotated[
        bool, typer.Option("--word", "-w", help="Find whole words only, as grep -w.")
    ] = False,
    sink: Annotated[
        str,
        typer.Option(
            "--in", metavar="SINK", help="Ask this sink (elasticsearch, opensearch) instead."
        ),
    ] = "",
    count: Annotated[bool, typer.Option("--count", help="Count all hits, too.")] = False,
    users: Users = None,
    accounts: Accounts = None,
    jobs: Jobs = None,
    names: Names = None,
    states: States = None,
    partitions: Partitions = None,
    clusters: Clusters = None,
    since: Since = "",
    until: Until = "",
    limit: Limit = 50,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Find scripts by what is in them.

    Each TEXT is looked for just as it is written, blanks and all, so paths and
    module names are found as well as words. The newest jobs come first.
    """
    style = options.make_style(as_json, parsable, noheader)
    place = ClientPlace(config=config, socket=socket, archive=archive)
    selection = options.select_jobs(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    request = SearchRequest(
        **selection,
        terms=tuple(terms),
        case=case,
        words=words,
        count=count,
        limit=limit or _PAGE_SIZE,
        sink=sink,
    )
    reply = _fetch_all_hits(place, request, fetch_all=limit == 0)
    if style.json:
        print_json(reply)
    elif style.parsable:
        print_table(_HIT_COLUMNS, reply.hits, style)
    elif is_terminal():
        print_renderables(*_draw_hits(reply))
    else:
        _print_hits(reply)
    _note_search_state(reply)


def _fetch_all_hits(place: ClientPlace, request: SearchRequest, *, fetch_all: bool) -> SearchReply:
    """Fetch pages of search hits, up to the limit or all of them."""
    first_reply: SearchReply = call_action(place, get_action("archive.search"), request)
    hits, reply = list(first_reply.hits), first_reply
    while reply.next and (fetch_all or len(hits) < request.limit):
        page_limit = request.limit if fetch_all else request.limit - len(hits)
        next_request = msgspec.structs.replace(
            request, page=reply.next, limit=page_limit, count=False
        )
        reply = call_action(place, get_action("archive.search"), next_request)
        hits += reply.hits
    return msgspec.structs.replace(
        first_reply, hits=tuple(hits), next=reply.next, complete=reply.complete
    )


_HIT_COLUMNS = [
    Column("Cluster", lambda hit, _: hit.job.cluster),
    Column("JobID", lambda hit, _: hit.job.job),
    Column("JobName", lambda hit, _: hit.job.name),
    Column("User", lambda hit, _: read_user(hit.job)),
    Column("Submit", lambda hit, _: hit.job.submit, "time"),
    Column("Line", lambda hit, _: str(hit.lines[0].number) if hit.lines else ""),
    Column("Text", lambda hit, _: hit.lines[0].text if hit.lines else ""),
]


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


def _note_search_state(reply: SearchReply) -> None:
    """Note the number of hits, and whether index or search is incomplete."""
    if reply.count is not None:
        output.print_note(f"{reply.count} in all.")
    elif not reply.hits:
        output.print_note("Nothing found.")
    if reply.behind:
        output.print_note(
            f"{format_count(reply.behind, 'event')} not indexed yet; try again in a moment."
        )
    if not reply.complete:
        output.print_note(
            "Looking took too long and stopped; narrow it down with -u, -S or --limit."
        )
    elif reply.next:
        output.print_note(f"There are more than these {len(reply.hits)}; --limit 0 for all.")


_DIFF_FAILED = 2
"""Exit code of diff(1) when a comparison fails."""


class ScriptMissing(StewardError):
    """Error: the job has no archived script."""


def show(
    job: JobId,
    script: Annotated[
        bool, typer.Option("--script", help="Print the script alone, byte for byte in a pipe.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Print what would submit it to Slurm again.")
    ] = False,
    cluster: Cluster = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Show a job and the script it ran.

    An array's task shows its array's script, a component of a heterogeneous
    job its leader's. Where Slurm has used an id again the newest job is shown
    and the others are mentioned.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    request = ShowRequest(job=job, cluster=cluster, sbatch=sbatch)
    reply: ShowReply = call_action(place, get_action("archive.show"), request)
    if as_json:
        print_json(reply)
    elif sbatch:
        _print_script(reply.sbatch.encode())
    elif script:
        if reply.content is None:
            raise ScriptMissing(f"no script of job {job} is kept", job)
        _print_script(reply.content.data)
    else:
        _print_job(reply)


def _print_script(data: bytes) -> None:
    """Print a script alone: highlighted on a terminal, unchanged bytes elsewhere."""
    if is_terminal():
        print_renderables(draw_script(decode_bytes(data)))
    else:
        output.write_bytes(data)


def _print_job(reply: ShowReply) -> None:
    """Print the facts of a job and its script."""
    facts = _list_show_facts(reply)
    if reply.content is None:
        script_note = (
            "an interactive job has none" if reply.job.kind == "interactive" else "none is kept"
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
            f"Slurm has used the id {escape_line(reply.job.job)} before: {', '.join(times)}."
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
            ("Kept in", script.path),
            ("Script", f"{format_size(script.length)} bytes" if script.length is not None else ""),
            ("SHA-256", script.sha256),
            ("Redacted", ", ".join(script.redacted)),
            ("Odd", ", ".join(script.flags)),
        ]
    return facts


def env(
    job: JobId,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Only these variables; * and ? match."),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="End each variable with NUL, as env -0.")
    ] = False,
    cluster: Cluster = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Show the environment a job was submitted with.

    Values that looked like secrets were taken out before they were kept.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    request = EnvironmentRequest(job=job, cluster=cluster, names=tuple(names or ()))
    reply: EnvironmentReply = call_action(place, get_action("archive.env"), request)
    if as_json:
        print_json(reply)
    elif null:
        for variable in reply.variables:
            name = variable.name.encode("utf-8", "backslashreplace")
            output.write_bytes(name + b"=" + variable.value.data + b"\0")
    elif is_terminal():
        _show_environment(reply)
    else:
        for variable in reply.variables:
            print(f"{escape_line(variable.name)}={escape_line(decode_bytes(variable.value.data))}")


def _show_environment(reply: EnvironmentReply) -> None:
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


def diff(
    left: Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")],
    right: Annotated[str, typer.Argument(metavar="JOB", help="Another's.")],
    environments: Annotated[
        bool, typer.Option("--env", help="Compare the environments, too.")
    ] = False,
    context: Annotated[
        int, typer.Option("--unified", "-U", min=0, metavar="LINES", help="Equal lines to show.")
    ] = 3,
    cluster: Cluster = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Compare the scripts of two jobs.

    The exit code is that of diff(1): 0 where nothing differs, 1 where something
    does, 2 where that cannot be told.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    request = DiffRequest(
        left=left, right=right, cluster=cluster, context=context, environments=environments
    )
    try:
        reply: DiffReply = call_action(place, get_action("archive.diff"), request)
    except StewardError as error:
        error.exit_code = _DIFF_FAILED
        raise
    if as_json:
        print_json(reply)
    elif is_terminal():
        _show_diff(decode_bytes(reply.diff.data))
    else:
        output.write_bytes(reply.diff.data)
    if reply.identical:
        output.print_note(
            f"The scripts of {escape_line(left)} and {escape_line(right)} are the same."
        )
    else:
        raise typer.Exit(1)


def _show_diff(text: str) -> None:
    """Draw a unified diff in colour."""
    from rich.text import Text

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = []
    for line in escape_lines(text).splitlines():
        is_heading = line.startswith(("+++ ", "--- "))
        lines.append(Text(line, style="bold" if is_heading else colours.get(line[:1], "default")))
    print_renderables(*lines)


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
