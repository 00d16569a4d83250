"""Operations that look at jobs: find them, show them, and what ran last on a node."""

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from steward.automation.errors import WrongParameters
from steward.automation.operation import Doing, Operation, Parameters
from steward.automation.operations.nodes import NodeList

if TYPE_CHECKING:
    from steward.jobs import Job

JobIds = Annotated[
    tuple[int | str, ...], msgspec.Meta(description="The jobs' ids: 123, 123_7, 123+1.")
]
_PAGE: Final = 1000
_MOST_LOOKED_AT: Final = 20_000
"""Of so many jobs, the newest first, it is looked which nodes they had."""
_DEPENDENCY_BYTES: Final = 2048
"""Longest dependency that is read of every job: squeue pads each to as many bytes."""


class JobFind(Parameters, frozen=True, kw_only=True):
    """slurm.job.find."""

    criterias: Annotated[
        dict[str, Any],
        msgspec.Meta(
            description="What fields of a job's record must be, all of them: "
            '{"batch_host": "n1", "job_state": "RUNNING"}.'
        ),
    ]


class JobGet(Parameters, frozen=True, kw_only=True):
    """slurm.job.get, slurm.job.step.get."""

    jobids: JobIds


class NodeJobs(Parameters, frozen=True, kw_only=True):
    """slurm.node.jobs."""

    nodes: NodeList
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="How many of each node at the most.")
    ] = 20


def find(doing: Doing, asked: JobFind) -> list[int]:
    """Ids of the jobs that match."""
    from steward.slurm import job_details

    if not asked.criterias:
        raise WrongParameters("slurm.job.find: criterias is empty: say what to look for")
    known = job_details.fields()
    for name in asked.criterias:
        if name not in known:
            raise WrongParameters(f"slurm.job.find: no job has a field {name!r}", name)
    is_full = not job_details.OF_SCONTROL.isdisjoint(asked.criterias)
    # One byte more than is looked for tells a longer one from it.
    dependency = str(asked.criterias.get("dependency", ""))
    dependency_bytes = max(512, len(dependency.encode()) + 1)
    if dependency_bytes > _DEPENDENCY_BYTES:
        raise WrongParameters(
            f"slurm.job.find: the dependency has more than {_DEPENDENCY_BYTES - 1} letters: "
            "look for another field",
            "dependency",
        )
    records = doing.machine.all_job_details(full=is_full, dependency_bytes=dependency_bytes)
    return [
        record["job_id"]
        for record in records
        if _may_see(doing, record) and _matches(record, asked.criterias)
    ]


def get(doing: Doing, asked: JobGet) -> dict[str, list[dict[str, Any]]]:
    """Everything that Slurm shows of jobs, by the id that was asked for."""
    found = doing.machine.job_details(checked(asked.jobids))
    return {
        name: [record for record in records if _may_see(doing, record)]
        for name, records in found.items()
    }


def checked(jobids: Iterable[int | str]) -> list[str]:
    """Ids of jobs as Slurm's commands take them, each once.

    Raises:
        WrongParameters: None is named, or one is no job's id.
    """
    from steward.jobs.names import JobNameError, parse

    names = list(dict.fromkeys(str(one).strip() for one in jobids))
    if not names:
        raise WrongParameters("jobids is empty: name a job")
    for name in names:
        try:
            is_id = parse(name).job_id > 0 and name.isascii() and name[0].isdigit()
        except JobNameError:
            is_id = False
        if not is_id or "[" in name or "." in name:
            raise WrongParameters(f"{name!r} is no job's id", name)
    return names


def last_jobs(doing: Doing, asked: NodeJobs) -> dict[str, list[dict[str, Any]]]:
    """What ran last on nodes, the newest first, as far as Steward has recorded it."""
    from steward.jobs import JobFilter, Jobs, database_path

    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in doing.machine.node_names(asked.nodes)
    }
    jobs = Jobs(database_path(doing.settings.state_dir))
    wanted = JobFilter(clusters=(doing.cluster,))
    before = None
    try:
        for _ in range(_MOST_LOOKED_AT // _PAGE):
            page = jobs.list(wanted, _PAGE, before)
            for job in page:
                _add(found, job, asked.limit)
            if len(page) < _PAGE or all(len(rows) >= asked.limit for rows in found.values()):
                break
            before = page[-1].position
    finally:
        jobs.close()
    return found


def _add(found: dict[str, list[dict[str, Any]]], job: "Job", limit: int) -> None:
    from steward.slurm.nodelists import NodeListError, expand

    record = job.record
    if not record.nodelist:
        return
    try:
        names = expand(record.nodelist)
    except NodeListError:
        return  # of another scheduler, or a text that is none
    row = {
        "job_id": job.label,
        "user": record.user,
        "account": record.account,
        "name": record.name,
        "state": record.state,
        "start": _second(record.start),
        "end": _second(record.end),
        "exit_code": record.exit_code,
        "exit_signal": record.exit_signal,
        "nodes": record.nodelist,
    }
    for name in names:
        if name in found and len(found[name]) < limit:
            found[name].append(row)


def _second(moment: datetime | None) -> str | None:
    return moment.isoformat(timespec="seconds") if moment else None


def _may_see(doing: Doing, record: dict[str, Any]) -> bool:
    uid, account = record.get("user_id"), record.get("account") or ""
    return doing.access.may_see_job(doing.asker, doing.cluster, uid, account)


def _matches(record: dict[str, Any], criterias: dict[str, Any]) -> bool:
    return all(
        name in record and _equal(record[name], wanted) for name, wanted in criterias.items()
    )


def _equal(value: Any, wanted: Any) -> bool:
    """Whether a field is what was asked for; a number may be asked for in letters."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return bool(value == wanted)
    if isinstance(value, int | float) and isinstance(wanted, str):
        return str(value) == wanted
    return bool(value == wanted)


OPERATIONS: Final = (
    Operation(
        ref="slurm.job.find",
        help="Find jobs by the fields of their records.",
        gives="The ids of the jobs that match, a list.",
        parameters=JobFind,
        run=find,
        pack=True,
    ),
    Operation(
        ref="slurm.job.get",
        help="Show everything that Slurm knows of jobs.",
        gives="For each id its job's records: several for an array, none where it is gone.",
        parameters=JobGet,
        run=get,
        pack=True,
    ),
    Operation(
        ref="slurm.node.jobs",
        help="Show what ran last on nodes.",
        gives="For each node its last jobs, newest first, with user, state and times.",
        parameters=NodeJobs,
        run=last_jobs,
        right="operator",
    ),
)
