"""Comparison page of two jobs: requests, results, script diff and changed environment variables.

:func:`compare` gathers a :class:`Comparison` from the job pages, ``archive.diff`` and the two
environments; :func:`choice_of` suggests the job to compare with. The handler is :func:`comparison`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath
from markupsafe import Markup, escape

from steward.accounting.job_page.notes import duration, size
from steward.accounting.job_page.requests import PageAnswer, PageRequest
from steward.accounting.job_page.wording import end_words, share_word, state_word
from steward.archive.requests import DiffAnswer, DiffRequest, EnvAnswer, EnvRequest
from steward.core.printable import safe, safe_lines
from steward.core.records import Line
from steward.core.timestamps import moment
from steward.slurm.job_states import FINISHED
from steward.web import query
from steward.web.authentication import Visit
from steward.web.formats import when
from steward.web.pages.job import Either, address, address_of, checked, either, others_of
from steward.web.rendering import Renderer

_FAILED: Final = tuple(sorted(FINISHED - {"COMPLETED", "CANCELLED", "REVOKED"}))
"""Final states of jobs that did not complete."""
_LONGEST_DIFF: Final = 60_000
"""Most characters of a diff shown."""
_CHOICES: Final = 30
"""Most jobs suggested for comparison."""


class Compared(msgspec.Struct, frozen=True):
    """One fact of two jobs.

    Attributes:
        name: Name of the fact.
        left: Value of the first job.
        right: Value of the second job.
        is_result: Whether it is a result of the run rather than a request.
    """

    name: str
    left: Markup | str
    right: Markup | str
    is_result: bool = False

    @property
    def differs(self) -> bool:
        """Return True if the two values differ."""
        return self.left != self.right


class Variable(msgspec.Struct, frozen=True):
    """A variable that differs between two environments; None where it is unset."""

    name: str
    left: str | None
    right: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between two jobs.

    Attributes:
        left: The earlier job.
        right: The later job.
        facts: Requests and results.
        script: Diff of the scripts (DiffAnswer).
        environments: Whether both environments are available, else why not.
        variables: Changed variables.
    """

    left: PageAnswer
    right: PageAnswer
    facts: tuple[Compared, ...]
    script: Either
    environments: Either
    variables: tuple[Variable, ...]


async def choice_of(visit: Visit, page: PageAnswer) -> tuple[list[str], str]:
    """Return jobs to compare with, and the default; "" if there is none.

    For a failed job the default is the last that completed, for a completed one the last that
    failed.
    """
    wanted = _FAILED if page.record.state == "COMPLETED" else ("COMPLETED",)
    first, others = await asyncio.gather(
        others_of(visit, page, limit=1, states=wanted), others_of(visit, page, limit=_CHOICES)
    )
    rows = [*first, *(row for row in others if row not in first)]
    names = [str(row.job_id) if "[" in row.job else row.job for row in rows]
    told = [f"{name} {row.state}" for name, row in zip(names, rows, strict=True)]
    return told, names[0] if names else ""


async def compare(visit: Visit, page: PageAnswer, other: str) -> Comparison:
    """Return the differences between a job and another on its cluster.

    Args:
        visit: Request that the page is for.
        page: The first job.
        other: Id of the other job.

    Raises:
        StewardError: The other job is unknown, or the user may not see it.
    """
    request = PageRequest(job=other, cluster=page.cluster, tasks=0, nodes=0)
    second: PageAnswer = await visit.ask("accounting.job", request)
    # Changes read from the earlier job to the later.
    left, right = sorted((page, second), key=_submitted)
    names = (address_of(left), address_of(right))
    diff = DiffRequest(left=names[0], right=names[1], cluster=page.cluster)
    script, *environments = await asyncio.gather(
        either(visit, "archive.diff", diff),
        *(
            either(visit, "archive.env", EnvRequest(job=name, cluster=page.cluster))
            for name in names
        ),
    )
    why = next((one.why for one in environments if one.answer is None), "")
    return Comparison(
        left=left,
        right=right,
        facts=_facts(left, right),
        script=script,
        environments=Either(None if why else True, why),
        variables=() if why else _variables(environments[0].answer, environments[1].answer),
    )


def diff_lines(answer: DiffAnswer) -> Markup:
    """Return a unified diff as HTML, with added and removed lines marked."""
    text = answer.diff.data.decode("utf-8", "backslashreplace")
    lines = safe_lines(text[:_LONGEST_DIFF]).split("\n")
    found = []
    # The first two lines name the files.
    for line in lines[2:]:
        if line.startswith("+"):
            found.append(Markup("<ins>{}</ins>").format(line))
        elif line.startswith("-"):
            found.append(Markup("<del>{}</del>").format(line))
        elif line.startswith("@@"):
            found.append(Markup('<span class="gu">{}</span>').format(line))
        else:
            found.append(escape(line))
    if len(text) > _LONGEST_DIFF:
        names = f"{answer.left.job} {answer.right.job}"
        found.append(escape(f"… all of it: steward archive diff {names}"))
    return Markup("\n").join(found)


def _submitted(page: PageAnswer) -> tuple[float, int]:
    """Return the sort key of a job: submit time, then job id."""
    submit = page.record.submit
    return (submit.timestamp() if submit is not None else 0.0, page.job_id)


def _facts(left: PageAnswer, right: PageAnswer) -> tuple[Compared, ...]:
    """Compare the requests and results of two jobs; facts empty in both are omitted."""
    asked = [
        Compared(name, safe(_text(value(left))), safe(_text(value(right))))
        for name, value in _ASKED.items()
    ]
    became = [
        Compared(name, value(left), value(right), is_result=True) for name, value in _BECAME.items()
    ]
    return tuple(one for one in (*asked, *became) if one.left or one.right)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _limit(page: PageAnswer) -> str:
    """Format a job's time limit."""
    limit = page.record.time_limit_s
    return duration(limit) if limit else ""


_ASKED: Final[dict[str, Callable[[PageAnswer], object]]] = {
    "Command": lambda page: page.record.submit_line or page.record.command,
    "Directory": lambda page: page.record.work_dir,
    "Account": lambda page: page.record.account,
    "Partition": lambda page: page.record.partition,
    "QOS": lambda page: page.record.qos,
    "Asked for": lambda page: page.record.tres_requested,
    "Time limit": _limit,
    "Features": lambda page: page.record.constraints,
    "Reservation": lambda page: page.record.reservation,
    "Dependency": lambda page: page.record.dependency,
    "Container": lambda page: page.record.container,
    "Comment": lambda page: page.record.comment,
}


def _line(page: PageAnswer) -> Line | None:
    """Return the record of a job's last run, or None."""
    return page.runs[-1].line if page.runs else None


def _time(value: Callable[[Line], int]) -> Callable[[PageAnswer], Markup | str]:
    """Return a function that formats a time of a job's last run."""

    def shown(page: PageAnswer) -> Markup | str:
        line = _line(page)
        us = value(line) if line is not None else 0
        return when(moment(us), page.zone) if us else ""

    return shown


def _run(value: Callable[[PageAnswer, Line], str]) -> Callable[[PageAnswer], Markup | str]:
    """Return a function that formats a fact of a job's last run."""

    def shown(page: PageAnswer) -> str:
        line = _line(page)
        return value(page, line) if line is not None else ""

    return shown


def _share(name: str) -> Callable[[PageAnswer, Line], str]:
    """Return a function that formats an efficiency of a job's last run."""

    def shown(page: PageAnswer, _: Line) -> str:
        share = getattr(page.runs[-1].efficiency, name)
        return "" if share is None else share_word(share)

    return shown


def _peak(page: PageAnswer, _: Line) -> str:
    """Format the peak memory of a job's last run."""
    used = page.runs[-1].efficiency.memory_used_bytes
    return "" if used is None else size(used)


_BECAME: Final[dict[str, Callable[[PageAnswer], Markup | str]]] = {
    "State": lambda page: f"{state_word(page)}{end_words(page)}",
    "Submitted": _time(lambda line: line.submit_us),
    "Started": _time(lambda line: line.start_us),
    "Ended": _time(lambda line: line.end_us),
    "Ran for": _run(
        lambda page, line: duration(page.runs[-1].efficiency.elapsed_s) if line.start_us else ""
    ),
    "Nodes": _run(lambda _, line: safe(line.nodelist)),
    "Given": _run(lambda _, line: safe(line.tres_allocated)),
    "CPU efficiency": _run(_share("cpu")),
    "Memory peak": _run(_peak),
    "Memory efficiency": _run(_share("memory")),
    "Time of its limit": _run(_share("time")),
    "Restarts": _run(lambda _, line: str(line.restarts or "")),
}


def _variables(left: EnvAnswer, right: EnvAnswer) -> tuple[Variable, ...]:
    """Return the changed variables; of redacted ones only whether they are set."""
    values = [{one.name: one for one in answer.variables} for answer in (left, right)]
    found = []
    for name in sorted(values[0].keys() | values[1].keys()):
        one, two = values[0].get(name), values[1].get(name)
        if one is not None and two is not None and one.value.data == two.value.data:
            continue
        found.append(
            Variable(
                name=name,
                left=None if one is None else _value(one.value.data),
                right=None if two is None else _value(two.value.data),
            )
        )
    return tuple(found)


def _value(data: bytes) -> str:
    return safe(data.decode("utf-8", "backslashreplace"))


Ask = Request[Any, Any, Any]


@get("/jobs/{cluster:str}/{job:str}/compare", include_in_schema=False)
async def comparison(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """Compare a job with a named one, or with the last of its name that ended differently."""
    checked(job)
    page: PageAnswer = await visit.ask(
        "accounting.job", PageRequest(job=job, cluster=cluster, tasks=0, nodes=0)
    )
    choices, first = await choice_of(visit, page)
    other = query.text(request, "with") or first
    if other:
        checked(other)
    found = await compare(visit, page, other) if other else None
    return pages.page(
        "job_compare.html",
        visit,
        here="/jobs",
        base=address(cluster, job),
        page=page,
        other=other,
        choices=choices,
        found=found,
        addresses=[address(cluster, address_of(one)) for one in (found.left, found.right)]
        if found
        else [],
        diff=diff_lines(found.script.answer) if found and found.script.answer else None,
    )


ROUTES: Final = (comparison,)
