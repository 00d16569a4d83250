"""The page of a job: what it was, its script and environment, what it used and cost."""

from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.accounting.page.notes import duration
from steward.accounting.page.shapes import PageAnswer, PageRequest
from steward.accounting.page.wording import (
    cpu_words,
    end_words,
    ends_of_tasks,
    exit_word,
    memory_words,
    share_word,
    state_word,
    time_words,
)
from steward.archive.answers import EnvAnswer, EnvRequest, ShowAnswer, ShowRequest
from steward.automation.actions import RunAnswer, RunRequest
from steward.core.errors import UsageError
from steward.core.moments import moment
from steward.core.printable import safe
from steward.slurm.changing import read_comment
from steward.web import query
from steward.web.errors import NoSuchPage
from steward.web.events import rows_of
from steward.web.highlighting import beginning, highlighted
from steward.web.job_columns import Shown
from steward.web.job_facts import (
    MOST_TASKS,
    TASKS,
    checked,
    cost_of,
    facts_of,
    plots_of,
    script_of,
)
from steward.web.rendering import Renderer, part
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]

WORDS: Final[dict[str, Any]] = {
    "cpu_words": cpu_words,
    "end_words": end_words,
    "ends_of_tasks": ends_of_tasks,
    "exit_word": exit_word,
    "memory_words": memory_words,
    "share_word": share_word,
    "state_word": state_word,
    "time_words": time_words,
    "lasted": duration,
    "moment": moment,
}
"""What templates of jobs say things with."""

_DONE: Final = {
    "cancel": "Slurm was told to cancel it.",
    "hold": "Slurm was told to hold it.",
    "release": "Slurm was told to release it.",
    "requeue": "Slurm was told to put it into the queue again.",
}
_LONGEST_REASON: Final = 500
_NOTABLE: Final = 20


@get("/jobs/{cluster:str}/{job:str}", include_in_schema=False)
async def job_page(
    request: Ask, visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """A job, or an array as a whole."""
    tasks = max(1, min(query.number(request, "tasks", TASKS), MOST_TASKS))
    facts = await facts_of(visit, cluster, job, tasks=tasks)
    shown: ShowAnswer | None = facts.script.answer
    script = script_of(shown) if shown is not None else None
    events = facts.events.answer
    return pages.page(
        "job.html",
        visit,
        here="/jobs",
        facts=facts,
        page=facts.page,
        record=facts.page.record,
        zone=facts.page.zone,
        base=address(cluster, facts.name),
        said=read_comment(facts.page.record.admin_comment),
        verbs=facts.verbs(visit),
        done=_DONE.get(str(request.query_params.get("done", "")), ""),
        script=highlighted(script) if script is not None else None,
        script_is_cut=script is not None and len(script) > len(beginning(script)),
        events=rows_of(visit, events.events) if events is not None else [],
        plots={run.line.restarts: plots_of(run.steps) for run in facts.page.runs},
        shown=Shown(zones={facts.page.cluster: facts.page.zone}),
        notable=_NOTABLE,
        **WORDS,
    )


@get("/jobs/{cluster:str}/{job:str}/script", include_in_schema=False)
async def script_file(visit: Visit, cluster: FromPath[str], job: FromPath[str]) -> Response[bytes]:
    """The script, byte for byte."""
    checked(job)
    answer: ShowAnswer = await visit.ask("archive.show", ShowRequest(job=job, cluster=cluster))
    if answer.content is None:
        raise NoSuchPage(f"no script of job {job} is kept", job)
    return Response(
        answer.content.data,
        media_type="text/plain; charset=utf-8",
        headers={
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="job-{answer.job.job_id}.sh"',
        },
    )


@get("/jobs/{cluster:str}/{job:str}/environment", include_in_schema=False)
async def environment(
    visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """The environment that it was submitted with, without secrets."""
    checked(job)
    answer: EnvAnswer = await visit.ask("archive.env", EnvRequest(job=job, cluster=cluster))
    variables = [
        (one.name, safe(one.value.data.decode("utf-8", "backslashreplace")), one.redacted)
        for one in sorted(answer.variables, key=lambda one: one.name)
    ]
    return pages.either(
        "job_environment.html",
        visit,
        here="/jobs",
        base=address(cluster, job),
        job=answer.job,
        variables=variables,
        flags=answer.flags,
    )


@get("/jobs/{cluster:str}/{job:str}/array", include_in_schema=False)
async def array(
    visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """An array, summed up."""
    checked(job)
    page: PageAnswer = await visit.ask(
        "accounting.job", PageRequest(job=job, cluster=cluster, array=True)
    )
    return pages.either(
        "job_array.html",
        visit,
        here="/jobs",
        base=address(cluster, job),
        page=page,
        array=page.array,
        **WORDS,
    )


@get("/jobs/{cluster:str}/{job:str}/cost", include_in_schema=False)
async def cost(
    visit: Visit, pages: Renderer, cluster: FromPath[str], job: FromPath[str]
) -> Response[Any]:
    """What it was charged, line by line."""
    checked(job)
    return pages.either(
        "job_cost.html",
        visit,
        here="/jobs",
        base=address(cluster, job),
        job=job,
        cost=await cost_of(visit, cluster, job),
    )


@post("/jobs/{cluster:str}/{job:str}/{verb:str}", include_in_schema=False, status_code=303)
async def act(
    request: Ask,
    visit: Visit,
    pages: Renderer,
    cluster: FromPath[str],
    job: FromPath[str],
    verb: FromPath[str],
) -> Response[Any]:
    """Cancel, hold, release or requeue it; the daemon decides who may."""
    checked(job)
    if verb not in _DONE:
        raise NoSuchPage("there is no such page", verb)
    form = await request.form()
    reason = str(form.get("reason", "")).strip()
    if len(reason) > _LONGEST_REASON:
        raise UsageError(f"a reason has at most {_LONGEST_REASON} letters", "reason")
    parameters: dict[str, Any] = {"jobids": [job]}
    if reason and verb in ("cancel", "hold"):
        parameters["reason"] = reason
    answer: RunAnswer = await visit.ask(
        "automation.run",
        RunRequest(action=f"slurm.job.{verb}", parameters=parameters, cluster=cluster),
    )
    line = answer.result.get(job, {}) if isinstance(answer.result, dict) else {}
    if answer.status == "succeeded" and line.get("changed", True):
        return pages.redirect(address(cluster, job), visit, done=verb)
    return pages.page(
        "job_undone.html",
        visit,
        status=409,
        here="/jobs",
        base=address(cluster, job),
        job=job,
        verb=verb,
        message=answer.message or line.get("message", "") or "there was nothing to be changed",
    )


def address(cluster: str, job: str) -> str:
    """The address of a job's page, without the prefix."""
    return f"/jobs/{part(cluster)}/{part(job)}"


ROUTES: Final = (job_page, script_file, environment, array, cost, act)
