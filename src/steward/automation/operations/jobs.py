"""Job operations that only read, and helpers to select jobs for those that change them.

In reading order: find jobs by fields, show job records, last jobs of a node; helpers of
:mod:`steward.automation.operations.job_changes`, which look up jobs, split arrays into targets
(:class:`JobTarget`), apply a change to each and ask the gate; job steps; archived scripts. Records
come from squeue and scontrol, last jobs from Steward's job database.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters, PartialFailure
from steward.automation.node_reasons import sign_reason
from steward.automation.operation import OperationContext, Parameters, operation
from steward.automation.operations.nodes import NodeList
from steward.bank.errors import BankRefused
from steward.core.actions import described
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.jobs.job_ids import JobName, parse_job_name
from steward.slurm import WAITING, SlurmError, UnknownJob

if TYPE_CHECKING:
    from steward.jobs import Job


# Find and show jobs

JobIds = Annotated[tuple[int | str, ...], described("Ids of the jobs: 123, 123_7, 123+1.")]
_PAGE: Final = 1000
"""Jobs read from the job database at a time."""
_MAX_OWN_JOBS: Final = 100
"""Maximum number of jobs that a caller who is not an operator may query at once."""
_MAX_JOBS_SEARCHED: Final = 20_000
"""Maximum number of jobs, newest first, searched for those that ran on a node."""
_DEPENDENCY_BYTES: Final = 2048
"""Maximum length of a dependency to search for, in bytes; squeue pads every job's to the width."""


class JobFindParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.find."""

    criterias: Annotated[
        dict[str, Any],
        described(
            "Fields that a job's record must equal, all of them: "
            '{"batch_host": "n1", "job_state": "RUNNING"}.'
        ),
    ]


class JobGetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.get and slurm.job.step.get."""

    jobids: JobIds


class NodeJobsParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.node.jobs."""

    nodes: NodeList
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="Maximum number of jobs per node.")
    ] = 20


@operation("slurm.job.find", only_reads=True, pack=True)
def find_jobs(context: OperationContext, parameters: JobFindParameters) -> list[int]:
    """Find jobs by fields of their records.

    Returns:
        Ids of the matching jobs, a list.
    """
    from steward.slurm.job_details import SCONTROL_FIELDS, list_job_fields

    if not parameters.criterias:
        raise InvalidParameters("slurm.job.find: criterias is empty: give at least one field")
    field_names = list_job_fields()
    for name in parameters.criterias:
        if name not in field_names:
            raise InvalidParameters(f"slurm.job.find: job records have no field {name!r}", name)
    is_full = not SCONTROL_FIELDS.isdisjoint(parameters.criterias)
    # One byte more than the text sought distinguishes a longer dependency from it.
    dependency = str(parameters.criterias.get("dependency", ""))
    dependency_bytes = max(512, len(dependency.encode()) + 1)
    if dependency_bytes > _DEPENDENCY_BYTES:
        raise InvalidParameters(
            f"slurm.job.find: the dependency is longer than {_DEPENDENCY_BYTES - 1} "
            "characters: search another field",
            "dependency",
        )
    scope = context.access.get_job_scope(context.caller, context.cluster)
    records = context.machine.all_job_details(
        uid=None if scope.everything or scope.accounts else scope.uid,
        full=is_full,
        dependency_bytes=dependency_bytes,
    )
    return [
        record["job_id"]
        for record in records
        if _may_see(context, record) and _matches(record, parameters.criterias)
    ]


@operation("slurm.job.get", only_reads=True, pack=True)
def get_job(
    context: OperationContext, parameters: JobGetParameters
) -> dict[str, list[dict[str, Any]]]:
    """Show all records that Slurm has of jobs.

    Returns:
        Records of each job, by requested id: several for an array, none if it is gone.
    """
    names = validate_job_ids(parameters.jobids)
    records_by_id = context.machine.job_details(_drop_hidden_jobs(context, names))
    return {
        name: [record for record in records_by_id.get(name, ()) if _may_see(context, record)]
        for name in names
    }


def _drop_hidden_jobs(context: OperationContext, names: list[str]) -> list[str]:
    """Return the jobs to query, without those that polls showed the caller may not see.

    Queries run as SlurmUser, so Slurm's own limits per user do not apply to them.

    Raises:
        InvalidParameters: There are too many jobs for a caller who is not an operator.
    """
    from steward.jobs import Jobs, database_path

    if context.is_operator():
        return names
    if len(names) > _MAX_OWN_JOBS:
        raise InvalidParameters(
            f"jobids has {len(names)} jobs, but only operators may query more than "
            f"{_MAX_OWN_JOBS} at once: query them in parts",
            "jobids",
        )
    if context.access.get_job_scope(context.caller, context.cluster).everything:
        return names
    job_ids = {name: parse_job_name(name).job_id for name in names}
    try:
        jobs = Jobs(database_path(context.settings.state_dir))
    except SqliteUnavailable:
        return names  # each record is checked after the query, too
    with closing(jobs):
        known = jobs.list_unfinished_jobs(context.cluster, job_ids.values())
    visible_ids: dict[int, bool] = {}
    for job in known:
        may_see = context.access.can_see_job(
            context.caller, context.cluster, job.record.uid, job.record.account
        )
        for job_id in (job.job_id, job.record.array_job_id):
            visible_ids[job_id] = visible_ids.get(job_id, False) or may_see
    return [name for name in names if visible_ids.get(job_ids[name], True)]


def validate_job_ids(jobids: Iterable[int | str]) -> list[str]:
    """Validate job ids for Slurm's commands and remove duplicates.

    Raises:
        InvalidParameters: The list is empty, or an entry is not a job id.
    """
    from steward.jobs.job_ids import JobNameError, parse_job_name

    names = list(dict.fromkeys(str(job_id).strip() for job_id in jobids))
    if not names:
        raise InvalidParameters("jobids is empty: give at least one job id")
    for name in names:
        try:
            is_id = parse_job_name(name).job_id > 0 and name.isascii() and name[0].isdigit()
        except JobNameError:
            is_id = False
        if not is_id or "[" in name or "." in name:
            raise InvalidParameters(f"invalid job id {name!r}: write 123, 123_7 or 123+1", name)
    return names


@operation("slurm.node.jobs", role="operator", only_reads=True)
def list_last_jobs(
    context: OperationContext, parameters: NodeJobsParameters
) -> dict[str, list[dict[str, Any]]]:
    """Show the last jobs of nodes.

    Returns:
        Last jobs of each node, newest first, with user, state and times.
    """
    from steward.jobs import JobFilter, Jobs, database_path

    rows_by_node: dict[str, list[dict[str, Any]]] = {
        name: [] for name in context.machine.node_names(parameters.nodes)
    }
    jobs = Jobs(database_path(context.settings.state_dir))
    job_filter = JobFilter(clusters=(context.cluster,))
    cursor = None
    try:
        for _ in range(_MAX_JOBS_SEARCHED // _PAGE):
            page = jobs.list(job_filter, _PAGE, cursor)
            for job in page:
                _add_node_rows(rows_by_node, job, parameters.limit)
            if len(page) < _PAGE or all(
                len(rows) >= parameters.limit for rows in rows_by_node.values()
            ):
                break
            cursor = page[-1].position
    finally:
        jobs.close()
    return rows_by_node


def _add_node_rows(rows_by_node: dict[str, list[dict[str, Any]]], job: "Job", limit: int) -> None:
    """Add a job to the rows of the nodes it ran on, up to the limit per node."""
    from steward.slurm.nodelists import NodeListError, expand_nodelist

    record = job.record
    if not record.nodelist:
        return
    try:
        names = expand_nodelist(record.nodelist)
    except NodeListError:
        return  # another scheduler's, or no node list
    row = {
        "job_id": job.label,
        "user": record.user,
        "account": record.account,
        "name": record.name,
        "state": record.state,
        "start": _format_second(record.start),
        "end": _format_second(record.end),
        "exit_code": record.exit_code,
        "exit_signal": record.exit_signal,
        "nodes": record.nodelist,
    }
    for name in names:
        if name in rows_by_node and len(rows_by_node[name]) < limit:
            rows_by_node[name].append(row)


def _format_second(moment: datetime | None) -> str | None:
    """Format a time with a precision of seconds."""
    return moment.isoformat(timespec="seconds") if moment else None


def _may_see(context: OperationContext, record: dict[str, Any]) -> bool:
    """Return whether the caller may see the job of a record."""
    uid, account = record.get("user_id"), record.get("account") or ""
    return context.access.can_see_job(context.caller, context.cluster, uid, account)


def _matches(record: dict[str, Any], criterias: dict[str, Any]) -> bool:
    """Return whether a record equals all criteria."""
    return all(
        name in record and _is_equal_field(record[name], criterion)
        for name, criterion in criterias.items()
    )


def _is_equal_field(value: Any, criterion: Any) -> bool:
    """Compare a field with a criterion; a number may be given as text."""
    if isinstance(value, bool) or isinstance(criterion, bool):
        return bool(value == criterion)
    if isinstance(value, int | float) and isinstance(criterion, str):
        return str(value) == criterion
    return bool(value == criterion)


# Select and change jobs (for steward.automation.operations.job_changes)

_NOT_CHANGEABLE: Final = "it has ended, or its state does not allow the change"
"""Message for a job that a change no longer found."""


class JobTarget(msgspec.Struct, frozen=True):
    """Jobs or tasks that one Slurm command changes.

    Attributes:
        name: Name as Slurm's commands take it: ``12``, ``12_3``, ``12_[4-9]``.
        records: Job records at the time of selection.
    """

    name: str
    records: tuple[JobRecord, ...]

    def query_current(self, context: OperationContext) -> list[JobRecord]:
        """Query the target's current records; [] if they are gone."""
        job_ids = {record.job_id for record in self.records}
        return [
            record
            for record in context.slurm.job(self.records[0].job_id)
            if record.job_id in job_ids
        ]


def look_up_jobs(
    context: OperationContext, jobids: Iterable[int | str]
) -> dict[str, list[JobRecord]]:
    """Look up jobs for a change and check the caller's rights; return records by requested name.

    Raises:
        UnknownJob: Slurm does not know one of them.
        OperationForbidden: The caller may not change one of them.
    """
    records_by_name: dict[str, list[JobRecord]] = {}
    for name in validate_job_ids(jobids):
        records = query_records(context, name)
        # Of a job that the caller may not see, the answer does not show that it exists.
        if not all(
            context.access.can_see_job(context.caller, context.cluster, record.uid, record.account)
            for record in records
        ):
            records = []
        if not records:
            raise UnknownJob(
                f"unknown job {name} on cluster {context.cluster}: slurmctld lists only pending, "
                "running and recently ended jobs",
                (),
                name,
            )
        for record in records:
            context.require_role("owner", record.uid)
        records_by_name[name] = records
    return records_by_name


def query_records(context: OperationContext, name: str) -> list[JobRecord]:
    """Query the current records of a job, array task or het component; [] if it is gone."""
    job_name = parse_job_name(name)
    records = _split_array_rows(context, job_name.job_id, context.slurm.job(job_name.job_id))
    return [record for record in records if _is_named_record(record, job_name)]


def _split_array_rows(
    context: OperationContext, job_id: int, records: list[JobRecord]
) -> list[JobRecord]:
    """Split records that squeue shows as one row.

    Some pending tasks of an array may be held by an administrator: squeue shows them in the array's
    row, with one priority and all reasons.
    """
    if not any(
        record.array_job_id and record.state in WAITING and "," in record.reason
        for record in records
    ):
        return records
    records_by_id: dict[int, list[JobRecord]] = {}
    for record in context.slurm.job(job_id, apart=True):
        records_by_id.setdefault(record.job_id, []).append(record)
    return [
        msgspec.structs.replace(
            group[0], array_task=",".join(record.array_task for record in group)
        )
        for group in records_by_id.values()
    ]


def select_targets(
    name: str,
    records: Sequence[JobRecord],
    needs_change: Callable[[JobRecord], bool],
    *,
    allow_whole: bool = True,
) -> list[JobTarget]:
    """Select what has to be changed of a job, as targets of single commands.

    For an array in several states these are its tasks: a command on the whole array changes some
    tasks and fails for others.

    Args:
        name: Name of the job.
        records: Current records of the job.
        needs_change: Return whether a record still has to be changed.
        allow_whole: Whether one command may change all records if all have to be changed.
    """
    remaining = [record for record in records if needs_change(record)]
    is_split_array = len(records) > 1 and all(task.array_job_id for task in records)
    if not remaining or not is_split_array or (allow_whole and len(remaining) == len(records)):
        return [JobTarget(name, tuple(records))] if remaining else []
    targets = [JobTarget(_name_record(record), (record,)) for record in remaining]
    if any("..." in target.name for target in targets):
        # Slurm abbreviates a long row of tasks, so no command can name them alone.
        return [JobTarget(name, tuple(records))]
    return targets


def _name_record(record: JobRecord) -> str:
    """Return the name of a record for Slurm's commands."""
    from steward.slurm.job_changes import format_job_target

    tasks = record.array_task.partition("%")[0]
    return format_job_target(record) if tasks.isdigit() else f"{record.array_job_id}_[{tasks}]"


def change_jobs(
    context: OperationContext,
    records_by_job: Mapping[str, list[JobRecord]],
    targets_by_job: Mapping[str, Sequence[JobTarget]],
    change: Callable[[JobTarget], bool],
) -> dict[str, Any]:
    """Apply a change to jobs one by one and return each outcome.

    Args:
        context: Context of the operation.
        records_by_job: Records before the change, by job.
        targets_by_job: Targets to change for each job, see :func:`select_targets`.
        change: Function that changes one target; returns False if it was gone.

    Raises:
        PartialFailure: Slurm rejected some of the changes.
    """
    result: dict[str, Any] = {}
    failed: list[str] = []
    for name, records in records_by_job.items():
        outcome: dict[str, Any] = {"state": _join_states(records), "changed": False}
        result[name] = outcome
        if not targets_by_job[name]:
            outcome["message"] = "nothing to change"
        elif context.dry_run:
            outcome["would_change"] = True
        else:
            errors = {
                job_target.name: _change_target(context, job_target, change)
                for job_target in targets_by_job[name]
            }
            outcome["changed"] = not all(errors.values())
            failures = {target: error for target, error in errors.items() if error}
            if failures:
                outcome["message"] = _summarize_errors(name, failures, len(errors))
                failed.append(name)
    if failed:
        more = f" ({len(failed)} of {len(records_by_job)})" if len(records_by_job) > 1 else ""
        message = f"job {failed[0]}: {result[failed[0]]['message']}{more}"
        raise PartialFailure(message, result)
    return result


def read_steward_comment(record: JobRecord) -> str:
    """Return Steward's comment on a job (by the bank or an operation); "" if none."""
    from steward.slurm.job_changes import read_comment

    return read_comment(record.admin_comment)


def sign_job_reason(context: OperationContext, reason: str) -> str:
    """Sign a reason for the comment that a job's user sees; "" if no reason was given."""
    # The bank uses the same form, so that a comment can be found and cleared.
    return f"steward: {sign_reason(reason, context.speaker)}" if reason.strip() else ""


def _summarize_errors(name: str, errors: Mapping[str, str], count: int) -> str:
    """Summarize the errors of a job's targets in one line."""
    target, error = next(iter(errors.items()))
    if target == name:
        return error
    more = f" ({len(errors)} of {count} tasks)" if count > 1 else ""
    return f"{target}: {error}{more}"


def _is_named_record(record: JobRecord, job_name: JobName) -> bool:
    """Return whether a record belongs to the job, task or component that a name denotes."""
    if job_name.offset is not None:
        return record.het_job_id == job_name.job_id and record.het_offset == job_name.offset
    if job_name.task is None:
        return True
    if record.array_job_id != job_name.job_id:
        return False
    from steward.slurm import includes_task

    return record.array_task == str(job_name.task) or includes_task(
        record.array_task, job_name.task
    )


def _change_target(
    context: OperationContext, target: JobTarget, change: Callable[[JobTarget], bool]
) -> str:
    """Change one target; return "" on success, else the error."""
    context.begin()
    try:
        return "" if change(target) else _NOT_CHANGEABLE
    except (SlurmError, BankRefused) as error:
        return str(error)


def request_grant(
    context: OperationContext, target: JobTarget, *, starts_job: bool, is_requeue: bool = False
) -> None:
    """Ask the gate, as the caller, to admit what a change of these jobs may cost.

    Args:
        context: Context of the operation.
        target: Jobs to change.
        starts_job: Whether the change lets them start.
        is_requeue: Whether the cost is that of their next run.

    Raises:
        BankRefused: The gate rejects the change.
    """
    record = target.records[0]
    restarts = max(task.restarts for task in target.records) + is_requeue
    job_id = record.array_job_id or record.job_id
    context.request_admission(target.name, job_id, restarts=restarts, starts_job=starts_job)


def _join_states(records: Iterable[JobRecord]) -> str:
    """Join the distinct states of records."""
    return ",".join(dict.fromkeys(record.state for record in records))


# Job steps


@operation("slurm.job.step.get", only_reads=True, pack=True)
def get_steps(context: OperationContext, parameters: JobGetParameters) -> dict[str, dict[str, Any]]:
    """Show the steps of jobs.

    Returns:
        Steps of each job, by their ids; {} for a job without steps.
    """
    names = validate_job_ids(parameters.jobids)
    details = context.machine.job_details(_drop_hidden_jobs(context, names))
    visible_names = [
        name
        for name, records in details.items()
        if any(_may_see(context, record) for record in records)
    ]
    steps = context.machine.steps(visible_names) if visible_names else {}
    return {name: steps.get(name, {}) for name in names}


# Archived scripts


class ScriptGetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.script.get."""

    jobid: Annotated[str, described("Id of the job: 123, 123_7, 123+1.")]


@operation("slurm.script.get", only_reads=True, on_cluster=False)
def get_script(context: OperationContext, parameters: ScriptGetParameters) -> dict[str, Any]:
    """Show the archived script of a job.

    Returns:
        Script of the job; base64 if it is not text, see encoding.
    """
    reply = context.call_action(
        "archive.show", {"job": parameters.jobid, "cluster": context.cluster}
    )
    details: dict[str, Any] = msgspec.to_builtins(reply)
    content = details["content"] or {}
    return {
        "jobid": parameters.jobid,
        "cluster": details["job"]["cluster"],
        "script": content.get("text"),
        "encoding": content.get("encoding"),
        "script_of": details["script_of"],
        "sha256": (details["script"] or {}).get("sha256"),
    }
