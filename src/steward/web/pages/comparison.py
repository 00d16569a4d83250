"""Comparison page of two jobs: requests, results, script diff and changed environment variables.

:func:`compare_jobs` gathers a :class:`JobComparison` from the job pages, ``archive.diff`` and the
two environments; :func:`list_candidates` suggests the job to compare with. The handler is
:func:`comparison`.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath
from markupsafe import Markup, escape

from steward.accounting.job_page.notes import format_duration, format_size
from steward.accounting.job_page.phrases import describe_end, describe_state, format_share
from steward.accounting.job_page.requests import PageAnswer, PageRequest
from steward.archive.requests import DiffReply, DiffRequest, EnvironmentReply, EnvironmentRequest
from steward.core.layouts import Column, Layout
from steward.core.printable import escape_lines
from steward.core.records import UsageLine
from steward.core.timestamps import from_micros
from steward.slurm.job_states import FINISHED
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.pages.job import (
    ReplyOrError,
    ask_or_explain,
    check_job_id,
    fetch_similar_jobs,
    make_job_address,
    make_job_path_name,
)
from steward.web.renderer import Renderer

_FAILED_STATES: Final = tuple(sorted(FINISHED - {"COMPLETED", "CANCELLED", "REVOKED"}))
"""Final states of jobs that did not complete."""
_LONGEST_DIFF: Final = 60_000
"""Most characters of a diff shown."""
_MOST_CANDIDATES: Final = 30
"""Most jobs suggested for comparison."""


class ComparedFact(msgspec.Struct, frozen=True):
    """One fact of two jobs.

    Attributes:
        name: Name of the fact.
        left: Value of the first job.
        right: Value of the second job.
        is_result: Whether it is a result of the run rather than a request.
    """

    name: str
    left: datetime | str
    right: datetime | str
    is_result: bool = False

    @property
    def row_class(self) -> str:
        """CSS class of its row: ``differs`` if the two values differ."""
        return "differs" if self.left != self.right else ""


class ChangedVariable(msgspec.Struct, frozen=True):
    """A variable that differs between two environments; None where it is unset."""

    name: str
    left: str | None
    right: str | None


class JobComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between two jobs.

    Attributes:
        left: The earlier job.
        right: The later job.
        facts: Requests and results.
        script: Diff of the scripts (DiffReply).
        environments: Whether both environments are available, else why not.
        variables: Changed variables.
    """

    left: PageAnswer
    right: PageAnswer
    facts: tuple[ComparedFact, ...]
    script: ReplyOrError
    environments: ReplyOrError
    variables: tuple[ChangedVariable, ...]

    @property
    def fact_layout(self) -> Layout:
        """Columns of the facts, headed by the jobs' ids."""
        return (
            Column("Fact", "name", title="Value"),
            Column("Left", "left", "time", title=self.left.job),
            Column("Right", "right", "time", title=self.right.job),
            Column("Differs", "row_class"),
        )

    @property
    def variable_layout(self) -> Layout:
        """Columns of the changed variables, headed by the jobs' ids."""
        return (
            Column("Variable", "name", "code"),
            Column("Left", "left", "code", title=self.left.job, absent="not set"),
            Column("Right", "right", "code", title=self.right.job, absent="not set"),
        )


async def list_candidates(auth: AuthenticatedRequest, page: PageAnswer) -> tuple[list[str], str]:
    """Return jobs to compare with (``ID STATE``), and the id of the default; "" if there is none.

    For a failed job the default is the last that completed, for a completed one the last that
    failed; without such a job, the latest other one.
    """
    default_states = _FAILED_STATES if page.record.state == "COMPLETED" else ("COMPLETED",)
    preferred, others = await asyncio.gather(
        fetch_similar_jobs(auth, page, limit=1, states=default_states),
        fetch_similar_jobs(auth, page, limit=_MOST_CANDIDATES),
    )
    rows = [*preferred, *(row for row in others if row not in preferred)]
    job_ids = [str(row.job_id) if "[" in row.job else row.job for row in rows]
    labels = [f"{name} {row.state}" for name, row in zip(job_ids, rows, strict=True)]
    return labels, job_ids[0] if job_ids else ""


async def compare_jobs(
    auth: AuthenticatedRequest, page: PageAnswer, other_job: str
) -> JobComparison:
    """Return the differences between a job and another on its cluster.

    Args:
        auth: Request that the page is for.
        page: The first job.
        other_job: Id of the other job.

    Raises:
        StewardError: The other job is unknown, or the user may not see it.
    """
    request = PageRequest(job=other_job, cluster=page.cluster, tasks=0, nodes=0)
    other_page: PageAnswer = await auth.call_action("accounting.job", request)
    # Changes read from the earlier job to the later.
    left, right = sorted((page, other_page), key=_get_submit_order)
    job_ids = (make_job_path_name(left), make_job_path_name(right))
    diff_request = DiffRequest(left=job_ids[0], right=job_ids[1], cluster=page.cluster)
    script, *environments = await asyncio.gather(
        ask_or_explain(auth, "archive.diff", diff_request),
        *(
            ask_or_explain(auth, "archive.env", EnvironmentRequest(job=name, cluster=page.cluster))
            for name in job_ids
        ),
    )
    error = next((result.why for result in environments if result.answer is None), "")
    return JobComparison(
        left=left,
        right=right,
        facts=_compare_facts(left, right),
        script=script,
        environments=ReplyOrError(None if error else True, error),
        variables=()
        if error
        else _find_changed_variables(environments[0].answer, environments[1].answer),
    )


def render_diff(reply: DiffReply) -> Markup:
    """Return a unified diff as HTML, with added and removed lines marked."""
    text = reply.diff.data.decode("utf-8", "backslashreplace")
    lines = escape_lines(text[:_LONGEST_DIFF]).split("\n")
    rendered = []
    # The first two lines name the files.
    for line in lines[2:]:
        if line.startswith("+"):
            rendered.append(Markup("<ins>{}</ins>").format(line))
        elif line.startswith("-"):
            rendered.append(Markup("<del>{}</del>").format(line))
        elif line.startswith("@@"):
            rendered.append(Markup('<span class="gu">{}</span>').format(line))
        else:
            rendered.append(escape(line))
    if len(text) > _LONGEST_DIFF:
        names = f"{reply.left.job} {reply.right.job}"
        rendered.append(escape(f"… full diff: steward archive diff {names}"))
    return Markup("\n").join(rendered)


def _get_submit_order(page: PageAnswer) -> tuple[float, int]:
    """Return the sort key of a job: submit time, then job id."""
    submit = page.record.submit
    return (submit.timestamp() if submit is not None else 0.0, page.job_id)


def _compare_facts(left: PageAnswer, right: PageAnswer) -> tuple[ComparedFact, ...]:
    """Compare the requests and results of two jobs; facts empty in both are omitted."""
    facts = (
        ComparedFact(name, get_value(left), get_value(right), is_result=values is _RESULT_FACTS)
        for values in (_REQUEST_FACTS, _RESULT_FACTS)
        for name, get_value in values.items()
    )
    return tuple(fact for fact in facts if fact.left or fact.right)


def _format_time_limit(page: PageAnswer) -> str:
    """Format a job's time limit."""
    limit = page.record.time_limit_s
    return format_duration(limit) if limit else ""


_REQUEST_FACTS: Final[dict[str, Callable[[PageAnswer], str]]] = {
    "Command": lambda page: page.record.submit_line or page.record.command,
    "Directory": lambda page: page.record.work_dir,
    "Account": lambda page: page.record.account,
    "Partition": lambda page: page.record.partition,
    "QOS": lambda page: page.record.qos,
    "Requested": lambda page: page.record.tres_requested,
    "Time limit": _format_time_limit,
    "Features": lambda page: page.record.constraints,
    "Reservation": lambda page: page.record.reservation,
    "Dependency": lambda page: page.record.dependency,
    "Container": lambda page: page.record.container,
    "Comment": lambda page: page.record.comment,
}


def _find_last_run(page: PageAnswer) -> UsageLine | None:
    """Return the record of a job's last run, or None."""
    return page.runs[-1].line if page.runs else None


def _make_time_fact(
    get_value: Callable[[UsageLine], int],
) -> Callable[[PageAnswer], datetime | str]:
    """Return a function that reads a time of a job's last run."""

    def read(page: PageAnswer) -> datetime | str:
        line = _find_last_run(page)
        us = get_value(line) if line is not None else 0
        return from_micros(us) if us else ""

    return read


def _make_run_fact(
    get_value: Callable[[PageAnswer, UsageLine], str],
) -> Callable[[PageAnswer], str]:
    """Return a function that formats a fact of a job's last run."""

    def format_fact(page: PageAnswer) -> str:
        line = _find_last_run(page)
        return get_value(page, line) if line is not None else ""

    return format_fact


def _make_share_fact(name: str) -> Callable[[PageAnswer, UsageLine], str]:
    """Return a function that formats an efficiency of a job's last run."""

    def format_fact(page: PageAnswer, _: UsageLine) -> str:
        share = getattr(page.runs[-1].efficiency, name)
        return "" if share is None else format_share(share)

    return format_fact


def _format_peak_memory(page: PageAnswer, _: UsageLine) -> str:
    """Format the peak memory of a job's last run."""
    peak_bytes = page.runs[-1].efficiency.memory_used_bytes
    return "" if peak_bytes is None else format_size(peak_bytes)


_RESULT_FACTS: Final[dict[str, Callable[[PageAnswer], datetime | str]]] = {
    "State": lambda page: f"{describe_state(page)}{describe_end(page)}",
    "Submitted": _make_time_fact(lambda line: line.submit_us),
    "Started": _make_time_fact(lambda line: line.start_us),
    "Ended": _make_time_fact(lambda line: line.end_us),
    "Elapsed": _make_run_fact(
        lambda page, line: (
            format_duration(page.runs[-1].efficiency.elapsed_s) if line.start_us else ""
        )
    ),
    "Nodes": _make_run_fact(lambda _, line: line.nodelist),
    "Allocated": _make_run_fact(lambda _, line: line.tres_allocated),
    "CPU efficiency": _make_run_fact(_make_share_fact("cpu")),
    "Memory peak": _make_run_fact(_format_peak_memory),
    "Memory efficiency": _make_run_fact(_make_share_fact("memory")),
    "Time limit efficiency": _make_run_fact(_make_share_fact("time")),
    "Restarts": _make_run_fact(lambda _, line: str(line.restarts or "")),
}


def _find_changed_variables(
    left: EnvironmentReply, right: EnvironmentReply
) -> tuple[ChangedVariable, ...]:
    """Return the changed variables; of redacted ones only whether they are set."""
    environments = [
        {variable.name: variable for variable in reply.variables} for reply in (left, right)
    ]
    changes = []
    for name in sorted(environments[0].keys() | environments[1].keys()):
        variable, other = environments[0].get(name), environments[1].get(name)
        if variable is not None and other is not None and variable.value.data == other.value.data:
            continue
        changes.append(
            ChangedVariable(
                name=name,
                left=None if variable is None else _decode_value(variable.value.data),
                right=None if other is None else _decode_value(other.value.data),
            )
        )
    return tuple(changes)


def _decode_value(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


HttpRequest = Request[Any, Any, Any]


@get("/jobs/{cluster:str}/{job:str}/compare", include_in_schema=False)
async def comparison(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    cluster: FromPath[str],
    job: FromPath[str],
) -> Response[Any]:
    """Compare a job with a named one, or with the last of its name that ended differently."""
    check_job_id(job)
    page: PageAnswer = await auth.call_action(
        "accounting.job", PageRequest(job=job, cluster=cluster, tasks=0, nodes=0)
    )
    candidates, default_job = await list_candidates(auth, page)
    other_job = query.read_text(request, "with") or default_job
    if other_job:
        check_job_id(other_job)
    job_comparison = await compare_jobs(auth, page, other_job) if other_job else None
    return pages.render_page(
        "job_compare.html",
        auth,
        here="/jobs",
        base=make_job_address(cluster, job),
        page=page,
        other=other_job,
        choices=candidates,
        comparison=job_comparison,
        addresses=[
            make_job_address(cluster, make_job_path_name(job_page))
            for job_page in (job_comparison.left, job_comparison.right)
        ]
        if job_comparison
        else [],
        diff=render_diff(job_comparison.script.answer)
        if job_comparison and job_comparison.script.answer
        else None,
    )


ROUTES: Final = (comparison,)
