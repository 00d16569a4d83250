"""slurm.job.step.get: the steps of jobs that Slurm still knows."""

from typing import Any, Final

from steward.automation.operation import Doing, Operation
from steward.automation.operations.jobs import JobGet, checked


def get(doing: Doing, asked: JobGet) -> dict[str, dict[str, Any]]:
    """The steps of jobs, {} for a job without; only of jobs that the asker may see."""
    names = checked(asked.jobids)
    details = doing.machine.job_details(names)
    steps = doing.machine.steps(names)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        may_see = any(
            doing.access.may_see_job(
                doing.asker, doing.cluster, record.get("user_id"), record.get("account") or ""
            )
            for record in details.get(name, ())
        )
        found[name] = steps.get(name, {}) if may_see else {}
    return found


OPERATIONS: Final = (
    Operation(
        ref="slurm.job.step.get",
        help="Show the steps of jobs.",
        gives="For each id its steps by their ids, {} for a job without.",
        parameters=JobGet,
        run=get,
        pack=True,
    ),
)
