"""``steward archive list`` and ``search``: which jobs there were, and what their scripts hold."""

from typing import Annotated, Any

import msgspec
import typer

from steward.archive.requests import Hit, ListAnswer, ListRequest, SearchAnswer, SearchRequest
from steward.cli import options, output
from steward.cli.jobs_table import columns, user
from steward.cli.options import Place
from steward.cli.text import number, safe
from steward.cli.times import show as show_time
from steward.client.asking import action, call

_PAGE = 1000
_SCREEN = 200

Limit = Annotated[
    int,
    typer.Option("--limit", "-L", min=0, help="How many at most; 0 for all."),
]


def list_jobs(
    users: options.Users = None,
    accounts: options.Accounts = None,
    jobs: options.Jobs = None,
    names: options.Names = None,
    states: options.States = None,
    partitions: options.Partitions = None,
    clusters: options.Clusters = None,
    since: options.Since = "",
    until: options.Until = "",
    limit: Limit = 0,
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    columns_: options.Format = "",
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """List jobs, newest first.

    Without -S or -j these are the jobs of the last seven days. Jobs without a
    script (salloc, srun) are listed as such.
    """
    style = options.style(as_json, parsable, noheader, columns_)
    place = Place(config=config, socket=socket, archive=archive)
    wanted = options.selection(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    answer = _all_pages(place, wanted, limit)
    if style.json:
        output.print_json(answer)
        return
    several = len({job.cluster for job in answer.jobs}) > 1
    output.print_table(columns(answer.zones, clusters=several), answer.jobs, style)
    if answer.default_days:
        output.note("The last seven days; -S for more." if answer.jobs else _nothing(answer))
    if answer.next:
        output.note(f"There are more than these {len(answer.jobs)}; --limit 0 for all.")


def _nothing(answer: ListAnswer) -> str:
    days = answer.default_days
    return f"No jobs in the last {'seven' if days == 7 else days} days; -S for more."


def _all_pages(place: Place, wanted: dict[str, Any], limit: int) -> ListAnswer:
    """Pages put together into one answer, up to ``limit`` jobs."""
    # A person reads the newest few; programs and pipes get all that was asked for.
    most = limit or (_SCREEN if output.is_terminal() and not limit else 0)
    pages: list[ListAnswer] = []
    count, page = 0, ""
    while True:
        size = min(_PAGE, most - count) if most else _PAGE
        request = ListRequest(**wanted, limit=size, page=page)
        answer: ListAnswer = call(place, action("archive.list"), request)
        pages.append(answer)
        count += len(answer.jobs)
        page = answer.next
        if not page or (most and count >= most):
            break
    jobs = tuple(job for answer in pages for job in answer.jobs)
    zones = {name: zone for answer in pages for name, zone in answer.zones.items()}
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
    users: options.Users = None,
    accounts: options.Accounts = None,
    jobs: options.Jobs = None,
    names: options.Names = None,
    states: options.States = None,
    partitions: options.Partitions = None,
    clusters: options.Clusters = None,
    since: options.Since = "",
    until: options.Until = "",
    limit: Limit = 50,
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
    archive: options.Archive = "",
) -> None:
    """Find scripts by what is in them.

    Each TEXT is looked for just as it is written, blanks and all, so paths and
    module names are found as well as words. The newest jobs come first.
    """
    style = options.style(as_json, parsable, noheader)
    place = Place(config=config, socket=socket, archive=archive)
    wanted = options.selection(
        clusters, users, accounts, partitions, jobs, names, states, since, until
    )
    request = SearchRequest(
        **wanted,
        terms=tuple(terms),
        case=case,
        words=words,
        count=count,
        limit=limit or _PAGE,
        sink=sink,
    )
    answer = _all_hits(place, request, all_of_them=limit == 0)
    if style.json:
        output.print_json(answer)
    elif style.parsable:
        output.print_table(_HIT_COLUMNS, answer.hits, style)
    elif output.is_terminal():
        output.show(*_hits_for_people(answer))
    else:
        _print_hits(answer)
    _tell_about(answer)


def _all_hits(place: Place, request: SearchRequest, *, all_of_them: bool) -> SearchAnswer:
    """The hits, of as many pages as it takes to come to the limit."""
    first: SearchAnswer = call(place, action("archive.search"), request)
    hits, answer = list(first.hits), first
    while answer.next and (all_of_them or len(hits) < request.limit):
        room = request.limit if all_of_them else request.limit - len(hits)
        more = msgspec.structs.replace(request, page=answer.next, limit=room, count=False)
        answer = call(place, action("archive.search"), more)
        hits += answer.hits
    return msgspec.structs.replace(
        first, hits=tuple(hits), next=answer.next, complete=answer.complete
    )


_HIT_COLUMNS = [
    output.Column("Cluster", lambda hit: hit.job.cluster),
    output.Column("JobID", lambda hit: hit.job.job),
    output.Column("JobName", lambda hit: hit.job.name),
    output.Column("User", lambda hit: user(hit.job)),
    output.Column("Submit", lambda hit: show_time(hit.job.submit)),
    output.Column("Line", lambda hit: str(hit.lines[0].number) if hit.lines else ""),
    output.Column("Text", lambda hit: hit.lines[0].text if hit.lines else ""),
]


def _headline(hit: Hit, zones: dict[str, str]) -> str:
    job = hit.job
    when = show_time(job.submit, zones.get(job.cluster, ""))
    return f"{safe(job.job)}  {safe(job.name)}  {safe(user(job))}  {when}"


def _hits_for_people(answer: SearchAnswer) -> list[Any]:
    from rich.text import Text

    shown: list[Any] = []
    for hit in answer.hits:
        shown.append(Text(_headline(hit, answer.zones), style="bold"))
        for line in hit.lines:
            text = Text(f"{line.number:>6}  ", style="dim")
            at = 0
            for begin, end in line.spans:
                text.append(safe(line.text[at:begin]), style="default not dim")
                text.append(safe(line.text[begin:end]), style="bold red not dim")
                at = end
            shown.append(text.append(safe(line.text[at:]), style="default not dim"))
        if hit.more_lines:
            lines = "line" if hit.more_lines == 1 else "lines"
            shown.append(Text(f"{'':>6}  and {hit.more_lines} more {lines}", style="dim"))
    return shown


def _print_hits(answer: SearchAnswer) -> None:
    for hit in answer.hits:
        print(_headline(hit, answer.zones))
        for line in hit.lines:
            print(f"{line.number:>6}  {safe(line.text)}")


def _tell_about(answer: SearchAnswer) -> None:
    if answer.count is not None:
        output.note(f"{answer.count} in all.")
    elif not answer.hits:
        output.note("Nothing found.")
    if answer.behind:
        output.note(f"{number(answer.behind, 'event')} not indexed yet; try again in a moment.")
    if not answer.complete:
        output.note("Looking took too long and stopped; narrow it down with -u, -S or --limit.")
    elif answer.next:
        output.note(f"There are more than these {len(answer.hits)}; --limit 0 for all.")
