"""Job page: record, script, environment, resource use, cost, array summary and job control.

:func:`gather_job_page` gathers :class:`JobPageData` from several actions at once; an action that
fails leaves a :class:`ReplyOrError` with the reason, and the rest of the page appears. The
handlers also serve the script as a file and let owners and operators cancel, hold, release or
requeue the job.
"""

import asyncio
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.accounting.job_list_requests import JobRow, JobsAnswer, JobsRequest
from steward.accounting.job_page import layouts
from steward.accounting.job_page.phrases import (
    TimeSpan,
    describe_cpu,
    describe_end,
    describe_memory,
    describe_state,
    describe_task_ends,
    describe_time,
    format_share,
    split_time,
)
from steward.accounting.job_page.requests import PageAnswer, PageRequest, StepPart
from steward.archive.requests import (
    EnvironmentReply,
    EnvironmentRequest,
    EnvironmentVariable,
    ShowReply,
    ShowRequest,
)
from steward.automation.actions import RunOperationRequest
from steward.automation.job_holds import is_held_pending
from steward.automation.runner import OperationOutcome
from steward.bank.actions.jobs import ExplainRequest
from steward.core.errors import StewardError, UsageError
from steward.core.layouts import Column, Layout
from steward.core.timestamps import from_micros, to_micros
from steward.jobs.job_ids import JobNameError, parse_job_name
from steward.reports.history.requests import JobEventsRequest
from steward.slurm.job_changes import read_comment
from steward.slurm.job_states import FINISHED, WAITING
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.formats import highlight_script, truncate_script
from steward.web.job_list import JOB_COLUMN
from steward.web.renderer import Plot, Renderer, quote_path_part

DEFAULT_TASKS: Final = 512
"""Tasks of each step shown by default."""
MOST_TASKS: Final = 20_000
"""Most tasks of each step on request."""
_NODES: Final = 64
"""Most nodes requested for the page."""
_MOST_PLOTS: Final = 6
"""Steps whose tasks are plotted."""
_MOST_SIMILAR: Final = 8
"""Other jobs of the same name shown."""
_GLOB: Final = "*?["
"""Characters that a name pattern interprets."""


class ReplyOrError(msgspec.Struct, frozen=True):
    """A reply, or the reason why there is none.

    Attributes:
        answer: The reply; None if there is none.
        why: Reason in one line.
    """

    answer: Any = None
    why: str = ""


async def ask_or_explain(auth: AuthenticatedRequest, name: str, request: Any) -> ReplyOrError:
    """Return the daemon's reply or the reason for its failure, so that other parts still appear."""
    try:
        return ReplyOrError(await auth.call_action(name, request))
    except StewardError as error:
        return ReplyOrError(None, str(error))


class JobPageData(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a job page.

    Attributes:
        page: The job's record and runs.
        name: Job id in addresses, without an array's task expression.
        row: Row of the job list for a whole array, else None.
        script: Its script (ShowReply).
        cost: Its charges (ExplainReply).
        events: Events of its nodes (JobEventsReply).
        others: Other jobs of the same name and user, latest first.
    """

    page: PageAnswer
    name: str
    row: JobRow | None
    script: ReplyOrError
    cost: ReplyOrError
    events: ReplyOrError
    others: tuple[JobRow, ...] = ()

    @property
    def spans(self) -> dict[int, list[TimeSpan]]:
        """Return the time spans of each run, by restart count."""
        now_us = to_micros(self.page.now)
        return {
            run.line.restarts: [span for span in split_time(run, now_us) if span.seconds > 0]
            for run in self.page.runs
        }

    def list_controls(self, auth: AuthenticatedRequest) -> tuple[str, ...]:
        """Return the job controls to offer; the operation itself decides on permission."""
        page, role = self.page, auth.find_role(self.page.cluster)
        record = page.record
        is_owner = record.uid is not None and record.uid == auth.me.uid
        if not page.verified or not (is_owner or (role is not None and role.operator)):
            return ()
        states = set(self.row.tasks) if self.row is not None else {record.state}
        controls = []
        if not states <= FINISHED:
            controls.append("cancel")
        if states & WAITING:
            # Some tasks of an array may be held, and others not.
            controls += ["hold"] if self.row is not None or not is_held_pending(record) else []
            controls += ["release"] if self.row is not None or is_held_pending(record) else []
        if states & {"RUNNING", "SUSPENDED"} and record.batch is not False:
            controls.append("requeue")
        return tuple(controls)


async def gather_job_page(
    auth: AuthenticatedRequest, cluster: str, job: str, *, tasks: int = DEFAULT_TASKS
) -> JobPageData:
    """Gather the data of a job page.

    Args:
        auth: Request that the page is for.
        cluster: The job's cluster.
        job: The job's id.
        tasks: Largest number of tasks of each step.

    Raises:
        StewardError: The job is unknown, or the user may not see it.
    """
    is_whole = check_job_id(job)
    page, script, events, row = await asyncio.gather(
        auth.call_action(
            "accounting.job", PageRequest(job=job, cluster=cluster, tasks=tasks, nodes=_NODES)
        ),
        ask_or_explain(auth, "archive.show", ShowRequest(job=job, cluster=cluster)),
        _fetch_events(auth, cluster, job),
        fetch_array_row(auth, cluster, job) if is_whole else _return_none(),
    )
    assert isinstance(page, PageAnswer)
    cost, others = await asyncio.gather(
        # For an array the cost is requested later: it may have thousands of tasks.
        fetch_cost(auth, cluster, job) if row is None else _return_no_reply(),
        fetch_similar_jobs(auth, page, limit=_MOST_SIMILAR, arrays=row is not None),
    )
    return JobPageData(
        page=page,
        name=make_job_path_name(page, row),
        row=row,
        script=script,
        cost=cost,
        events=events,
        others=others,
    )


def check_job_id(job: str) -> bool:
    """Validate a job id; return True if it is a plain number, which may name an array.

    Raises:
        PageNotFound: The text is not a job id.
    """
    try:
        return parse_job_name(job).is_whole
    except JobNameError as error:
        raise PageNotFound(str(error), job) from error


def make_job_path_name(page: PageAnswer, row: JobRow | None = None) -> str:
    """Return a job's id as addresses write it."""
    if row is not None:
        return row.job
    return str(page.job_id) if "[" in page.job else page.job


async def fetch_array_row(auth: AuthenticatedRequest, cluster: str, job: str) -> JobRow | None:
    """Return the row of the array with this id, or None if it is no array."""
    request = JobsRequest(clusters=(cluster,), jobs=(job,), limit=1)
    reply: JobsAnswer = await auth.call_action("accounting.jobs", request)
    return next((row for row in reply.jobs if row.tasks and row.job == job), None)


async def fetch_similar_jobs(
    auth: AuthenticatedRequest,
    page: PageAnswer,
    *,
    limit: int,
    states: tuple[str, ...] = (),
    arrays: bool = False,
) -> tuple[JobRow, ...]:
    """Return other jobs of the same name and user, latest first.

    Args:
        auth: Request that the page is for.
        page: Page of the job.
        limit: Largest number of jobs.
        states: Only jobs in these states.
        arrays: Whether an array is one row rather than its tasks.
    """
    record = page.record
    if not record.name or (record.uid is None and not record.user):
        return ()
    request = JobsRequest(
        clusters=(page.cluster,),
        names=(make_exact_pattern(record.name),),
        users=(str(record.uid) if record.uid is not None else record.user,),
        states=states,
        arrays="together" if arrays else "apart",
        limit=limit + 1,
    )
    try:
        reply: JobsAnswer = await auth.call_action("accounting.jobs", request)
    except StewardError:
        # A name that no filter can express has no others.
        return ()
    own_array_id = record.array_job_id if arrays else 0
    similar = [
        row
        for row in reply.jobs
        if row.job_id != page.job_id and (not own_array_id or row.array_job_id != own_array_id)
    ]
    return tuple(similar[:limit])


def make_exact_pattern(name: str) -> str:
    """Return a pattern that matches exactly this name."""
    return "".join(f"[{letter}]" if letter in _GLOB else letter for letter in name)


def plot_steps(steps: tuple[StepPart, ...]) -> list[tuple[StepPart, list[Plot]]]:
    """Plot CPU time and memory by task, for steps with several tasks."""
    plots: list[tuple[StepPart, list[Plot]]] = []
    for step in steps:
        tasks = sorted(step.tasks, key=lambda task: task.task)
        if len(tasks) < 2 or len(plots) == _MOST_PLOTS:
            continue
        task_numbers = [float(task.task) for task in tasks]
        cpu = Plot(
            title=f"CPU time by task, step {step.line.step}",
            x=task_numbers,
            series=[
                ("user", [task.user_s for task in tasks]),
                ("system", [task.system_s for task in tasks]),
            ],
            unit="s",
            is_time=False,
            bars=len(tasks) <= DEFAULT_TASKS,
        )
        peaks: list[float | None] = [
            None if task.max_rss_bytes is None else float(task.max_rss_bytes) for task in tasks
        ]
        memory = Plot(
            title=f"Memory peak by task, step {step.line.step}",
            x=task_numbers,
            series=[("peak", peaks)],
            unit="bytes",
            is_time=False,
            bars=len(tasks) <= DEFAULT_TASKS,
        )
        has_peaks = any(peak is not None for peak in peaks)
        plots.append((step, [cpu, memory] if has_peaks else [cpu]))
    return plots


def decode_script(reply: ShowReply) -> str | None:
    """Return a script as text, or None if none is archived."""
    content = reply.content
    return None if content is None else content.data.decode("utf-8", "backslashreplace")


async def fetch_cost(auth: AuthenticatedRequest, cluster: str, job: str) -> ReplyOrError:
    """Return the charges of a job, if there is a bank."""
    if not auth.me.bank:
        return ReplyOrError()
    return await ask_or_explain(auth, "bank.explain", ExplainRequest(job=job, cluster=cluster))


async def _fetch_events(auth: AuthenticatedRequest, cluster: str, job: str) -> ReplyOrError:
    """Return the events of a job's nodes, if there is a sensor."""
    if not auth.me.sensor:
        return ReplyOrError()
    return await ask_or_explain(
        auth, "history.job_events", JobEventsRequest(job=job, cluster=cluster)
    )


async def _return_none() -> None:
    return None


async def _return_no_reply() -> ReplyOrError:
    """Return an empty reply, in place of a request that is not needed."""
    return ReplyOrError()


HttpRequest = Request[Any, Any, Any]

JOB_TEMPLATE_FUNCTIONS: Final[dict[str, Any]] = {
    "cpu_words": describe_cpu,
    "end_words": describe_end,
    "ends_of_tasks": describe_task_ends,
    "memory_words": describe_memory,
    "share_word": format_share,
    "state_word": describe_state,
    "time_words": describe_time,
    "moment": from_micros,
    "layouts": layouts,
}
"""Functions and layouts that the job templates use."""

_DONE_MESSAGES: Final = {
    "cancel": "Steward sent the cancel request to Slurm.",
    "hold": "Steward sent the hold request to Slurm.",
    "release": "Steward sent the release request to Slurm.",
    "requeue": "Steward sent the requeue request to Slurm.",
}
"""Confirmation of each job control."""
_LONGEST_REASON: Final = 500


@get("/jobs/{cluster:str}/{job:str}", include_in_schema=False)
async def job_page(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    cluster: FromPath[str],
    job: FromPath[str],
) -> Response[Any]:
    """Show a job, or a whole array."""
    tasks = max(1, min(query.read_number(request, "tasks", DEFAULT_TASKS), MOST_TASKS))
    data = await gather_job_page(auth, cluster, job, tasks=tasks)
    script_reply: ShowReply | None = data.script.answer
    script = decode_script(script_reply) if script_reply is not None else None
    return pages.render_page(
        "job.html",
        auth,
        here="/jobs",
        facts=data,
        page=data.page,
        record=data.page.record,
        zone=data.page.zone,
        base=make_job_address(cluster, data.name),
        admin_comment=read_comment(data.page.record.admin_comment),
        verbs=data.list_controls(auth),
        done=_DONE_MESSAGES.get(str(request.query_params.get("done", "")), ""),
        script=highlight_script(script) if script is not None else None,
        script_is_cut=script is not None and len(script) > len(truncate_script(script)),
        plots={run.line.restarts: plot_steps(run.steps) for run in data.page.runs},
        job_layout=JobsAnswer.layout,
        job_column=JOB_COLUMN,
        **JOB_TEMPLATE_FUNCTIONS,
    )


@get("/jobs/{cluster:str}/{job:str}/script", include_in_schema=False)
async def script_file(
    auth: AuthenticatedRequest, cluster: FromPath[str], job: FromPath[str]
) -> Response[bytes]:
    """Return the script, byte for byte."""
    check_job_id(job)
    reply: ShowReply = await auth.call_action("archive.show", ShowRequest(job=job, cluster=cluster))
    if reply.content is None:
        raise PageNotFound(f"the archive has no script of job {job}", job)
    return Response(
        reply.content.data,
        media_type="text/plain; charset=utf-8",
        headers={
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="job-{reply.job.job_id}.sh"',
        },
    )


def _read_variable(variable: EnvironmentVariable, _: object) -> str | None:
    """Return the value of a variable as text; None if it was redacted."""
    if variable.redacted:
        return None
    return variable.value.data.decode("utf-8", "backslashreplace")


_VARIABLE_LAYOUT: Final[Layout] = (
    Column("Name", "name", "code"),
    Column(
        "Value",
        _read_variable,
        "code",
        absent="redacted: possible secret, never stored",
    ),
)
"""Columns of an environment."""


@get("/jobs/{cluster:str}/{job:str}/environment", include_in_schema=False)
async def environment(
    auth: AuthenticatedRequest, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """Show the environment at submission, with secrets redacted."""
    check_job_id(job)
    reply: EnvironmentReply = await auth.call_action(
        "archive.env", EnvironmentRequest(job=job, cluster=cluster)
    )
    return pages.render_page_or_part(
        "job_environment.html",
        auth,
        here="/jobs",
        base=make_job_address(cluster, job),
        job=reply.job,
        layout=_VARIABLE_LAYOUT,
        variables=sorted(reply.variables, key=lambda variable: variable.name),
        flags=reply.flags,
    )


@get("/jobs/{cluster:str}/{job:str}/array", include_in_schema=False)
async def array(
    auth: AuthenticatedRequest, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """Show the summary of an array."""
    check_job_id(job)
    page: PageAnswer = await auth.call_action(
        "accounting.job", PageRequest(job=job, cluster=cluster, array=True)
    )
    return pages.render_page_or_part(
        "job_array.html",
        auth,
        here="/jobs",
        base=make_job_address(cluster, job),
        page=page,
        array=page.array,
        **JOB_TEMPLATE_FUNCTIONS,
    )


@get("/jobs/{cluster:str}/{job:str}/cost", include_in_schema=False)
async def cost(
    auth: AuthenticatedRequest, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """Show the charges, line by line."""
    check_job_id(job)
    return pages.render_page_or_part(
        "job_cost.html",
        auth,
        here="/jobs",
        base=make_job_address(cluster, job),
        job=job,
        cost=await fetch_cost(auth, cluster, job),
    )


@post("/jobs/{cluster:str}/{job:str}/{verb:str}", include_in_schema=False, status_code=303)
async def act(
    request: HttpRequest,
    auth: AuthenticatedRequest,
    pages: Renderer,
    cluster: FromPath[str],
    job: FromPath[str],
    verb: FromPath[str],
) -> Response[Any]:
    """Cancel, hold, release or requeue the job; the daemon checks permission."""
    check_job_id(job)
    if verb not in _DONE_MESSAGES:
        raise PageNotFound("page not found", verb)
    form = await request.form()
    reason = str(form.get("reason", "")).strip()
    if len(reason) > _LONGEST_REASON:
        raise UsageError(
            f"the reason is longer than {_LONGEST_REASON} characters: shorten it", "reason"
        )
    parameters: dict[str, Any] = {"jobids": [job]}
    if reason and verb in ("cancel", "hold"):
        parameters["reason"] = reason
    reply: OperationOutcome = await auth.call_action(
        "automation.run",
        RunOperationRequest(action=f"slurm.job.{verb}", parameters=parameters, cluster=cluster),
    )
    outcome = reply.result.get(job, {}) if isinstance(reply.result, dict) else {}
    if reply.status == "succeeded" and outcome.get("changed", True):
        return pages.make_redirect(make_job_address(cluster, job), auth, done=verb)
    return pages.render_page(
        "job_undone.html",
        auth,
        status=409,
        here="/jobs",
        base=make_job_address(cluster, job),
        job=job,
        verb=verb,
        message=reply.message or outcome.get("message", "") or "nothing to change",
    )


def make_job_address(cluster: str, job: str) -> str:
    """Return the address of a job's page, without the prefix."""
    return f"/jobs/{quote_path_part(cluster)}/{quote_path_part(job)}"


ROUTES: Final = (job_page, script_file, environment, array, cost, act)
