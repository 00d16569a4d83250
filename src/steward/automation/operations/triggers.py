"""Trigger operations: set and clear Slurm's triggers (``strigger``) that start a listed program.

slurmctld starts the program when the event happens. :mod:`steward.automation.operations.programs`
checks that root has listed it; ``_require_event`` rejects events that this Slurm lacks or never
fires.
"""

from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters, PartialFailure
from steward.automation.operation import Operation, OperationContext, Parameters
from steward.automation.operations.programs import require_listed_program
from steward.slurm import EventNeverFires, SlurmError, UnknownEvent, UnknownJob, UnknownTrigger


class TriggerSetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.trigger.set."""

    program: Annotated[
        str,
        msgspec.Meta(
            description="What slurmctld starts, as [actions] programs_file lists it; "
            "arguments may follow, with blanks between."
        ),
    ]
    jobid: Annotated[
        int | str | None, msgspec.Meta(description="The job whose end or nodes are waited for.")
    ] = None
    offset: Annotated[
        int, msgspec.Meta(description="Seconds between event and program; before it if negative.")
    ] = 0
    fini: Annotated[bool, msgspec.Meta(description="Whether the job's end is waited for.")] = False
    nodes: Annotated[
        str, msgspec.Meta(description="The nodes that are waited for; all if empty.")
    ] = ""
    event: Annotated[
        str,
        msgspec.Meta(
            description="What is waited for: burst_buffer, drained (drain), down, fail, up, idle, "
            "reconfig, and from Slurm 23.02 draining, resume."
        ),
    ] = ""


class TriggerUnsetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.trigger.unset."""

    trigger_ids: Annotated[tuple[int, ...], msgspec.Meta(description="Their ids.")]
    user: Annotated[str, msgspec.Meta(description="Whose they are.")] = "slurm"


def set_trigger(doing: OperationContext, asked: TriggerSetParameters) -> Any:
    """Set a trigger and return its id; if an equal one exists, return that one's id."""
    program = asked.program.strip()
    require_listed_program(program.partition(" ")[0], doing.settings.actions.programs_file)
    job = "" if asked.jobid is None else str(asked.jobid)
    event = _resolve_event(asked, job)
    _require_event(doing, event)
    nodes = asked.nodes.strip()
    if nodes:
        doing.machine.node_names(nodes)
    if job and (not job.isdigit() or not doing.slurm.job(int(job))):
        raise UnknownJob(f"Slurm of {doing.cluster} knows no job {job} (any more)", (), job)
    if doing.dry_run:
        return {"event": event, "nodes": nodes, "jobid": job, "program": program}
    doing.begin()
    return doing.triggers.set(
        program,
        event,
        nodes=nodes,
        job=job,
        offset_s=asked.offset,
        patience_s=doing.left_s,
    )


def clear_triggers(doing: OperationContext, asked: TriggerUnsetParameters) -> dict[str, Any]:
    """Clear triggers by id."""
    known = {one.id: one for one in doing.triggers.all()}
    for number in asked.trigger_ids:
        if number not in known:
            raise UnknownTrigger(f"there is no trigger {number}", (), str(number))
        if known[number].user != asked.user:
            raise UnknownTrigger(
                f"trigger {number} is not {asked.user}'s but {known[number].user}'s: "
                f"user={known[number].user}",
                (),
                str(number),
            )
    if not asked.trigger_ids:
        raise InvalidParameters("trigger_ids is empty: name a trigger")
    if doing.dry_run:
        return {str(number): {"would_change": True} for number in asked.trigger_ids}
    result: dict[str, Any] = {}
    failed = []
    for number in dict.fromkeys(asked.trigger_ids):
        doing.begin()
        try:
            doing.triggers.clear(number, asked.user)
            result[str(number)] = {"changed": True}
        except SlurmError as error:
            result[str(number)] = {"changed": False, "message": str(error)}
            failed.append(number)
    if failed:
        raise PartialFailure(result[str(failed[0])]["message"], result)
    return result


def _resolve_event(asked: TriggerSetParameters, job: str) -> str:
    """Determine the event that a trigger waits for.

    Raises:
        InvalidParameters: No event is named; strigger would assume the job's time limit.
    """
    if asked.fini:
        if asked.event not in ("", "fini"):
            raise InvalidParameters(
                f"fini and event={asked.event} are two events: name one of them"
            )
        return "fini"
    if asked.event:
        return asked.event
    if job:
        raise InvalidParameters(
            f"slurm.trigger.set jobid={job} names no event: add fini=true for the job's end, or "
            "event=time for its time limit. slurmctld has no trigger for a job's start"
        )
    raise InvalidParameters("slurm.trigger.set needs event=…, or a job: jobid=… fini=true")


def _require_event(doing: OperationContext, event: str) -> None:
    """Raise an error if this Slurm lacks a trigger event or never fires it."""
    known = doing.triggers.events()
    name = {"drain": "drained"}.get(event, event)
    if name not in known:
        names = ", ".join(known)
        raise UnknownEvent(f"Slurm of {doing.cluster} has no event {event!r}: it has {names}")
    if known[name]:
        raise EventNeverFires(f"a trigger for {event} never fires: {known[name]}")


OPERATIONS: Final = (
    Operation(
        ref="slurm.trigger.set",
        help="Have slurmctld start a listed program when something happens.",
        gives="The trigger's id; of one that is there already, that one's.",
        parameters=TriggerSetParameters,
        run=set_trigger,
        right="administrator",
        changes=True,
        remote=False,
        pack=True,
    ),
    Operation(
        ref="slurm.trigger.unset",
        help="Take triggers away.",
        gives="For each id whether it was taken away.",
        parameters=TriggerUnsetParameters,
        run=clear_triggers,
        right="administrator",
        changes=True,
        pack=True,
    ),
)
