"""Trigger operations: set and clear Slurm's triggers (``strigger``) that start a listed program.

slurmctld starts the program when the event happens. :mod:`steward.automation.operations.programs`
checks that root has listed it; ``_require_event`` rejects events that this Slurm lacks or never
fires.
"""

from typing import Annotated, Any

from steward.automation.errors import InvalidParameters, PartialFailure
from steward.automation.operation import OperationContext, Parameters, operation
from steward.automation.operations.programs import require_listed_program
from steward.core.actions import described
from steward.slurm import EventNeverFires, SlurmError, UnknownEvent, UnknownJob, UnknownTrigger


class TriggerSetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.trigger.set."""

    program: Annotated[
        str,
        described(
            "Program that slurmctld starts, as listed in [actions] programs_file; arguments may "
            "follow, separated by blanks."
        ),
    ]
    jobid: Annotated[
        int | str | None, described("Job whose end, time limit or nodes fire the trigger.")
    ] = None
    offset: Annotated[
        int,
        described(
            "Delay from the event to the start of the program, in seconds. Default 0. If negative, "
            "the program starts before the event."
        ),
    ] = 0
    fini: Annotated[bool, described("Whether the end of the job fires the trigger.")] = False
    nodes: Annotated[str, described("Nodes that fire the trigger; all if empty.")] = ""
    event: Annotated[
        str,
        described(
            "Event that fires the trigger: burst_buffer, drained (drain), down, fail, up, idle, "
            "reconfig, and from Slurm 23.02 draining, resume."
        ),
    ] = ""


class TriggerUnsetParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.trigger.unset."""

    trigger_ids: Annotated[tuple[int, ...], described("Ids of the triggers.")]
    user: Annotated[str, described("Owner of the triggers.")] = "slurm"


@operation("slurm.trigger.set", role="administrator", remote=False, pack=True)
def set_trigger(context: OperationContext, parameters: TriggerSetParameters) -> Any:
    """Set a trigger that starts a listed program on an event.

    Returns:
        Id of the trigger; if an equal one exists, the id of that.
    """
    program = parameters.program.strip()
    require_listed_program(program.partition(" ")[0], context.settings.actions.programs_file)
    job = "" if parameters.jobid is None else str(parameters.jobid)
    event = _resolve_event(parameters, job)
    _require_event(context, event)
    nodes = parameters.nodes.strip()
    if nodes:
        context.machine.node_names(nodes)
    if job and (not job.isdigit() or not context.slurm.job(int(job))):
        raise UnknownJob(
            f"unknown job {job} on cluster {context.cluster}: slurmctld lists only pending, "
            "running and recently ended jobs",
            (),
            job,
        )
    if context.dry_run:
        return {"event": event, "nodes": nodes, "jobid": job, "program": program}
    context.begin()
    return context.triggers.set(
        program,
        event,
        nodes=nodes,
        job=job,
        offset_s=parameters.offset,
        patience_s=context.remaining_s,
    )


@operation("slurm.trigger.unset", role="administrator", pack=True)
def clear_triggers(context: OperationContext, parameters: TriggerUnsetParameters) -> dict[str, Any]:
    """Clear triggers.

    Returns:
        For each id, whether the trigger was cleared.
    """
    triggers_by_id = {trigger.id: trigger for trigger in context.triggers.list_all()}
    for number in parameters.trigger_ids:
        if number not in triggers_by_id:
            raise UnknownTrigger(f"unknown trigger {number}", (), str(number))
        if triggers_by_id[number].user != parameters.user:
            raise UnknownTrigger(
                f"trigger {number} belongs to {triggers_by_id[number].user}, not to "
                f"{parameters.user}: give user={triggers_by_id[number].user}",
                (),
                str(number),
            )
    if not parameters.trigger_ids:
        raise InvalidParameters("trigger_ids is empty: give at least one id")
    if context.dry_run:
        return {str(number): {"would_change": True} for number in parameters.trigger_ids}
    result: dict[str, Any] = {}
    failed = []
    for number in dict.fromkeys(parameters.trigger_ids):
        context.begin()
        try:
            context.triggers.clear(number, parameters.user)
            result[str(number)] = {"changed": True}
        except SlurmError as error:
            result[str(number)] = {"changed": False, "message": str(error)}
            failed.append(number)
    if failed:
        raise PartialFailure(result[str(failed[0])]["message"], result)
    return result


def _resolve_event(parameters: TriggerSetParameters, job: str) -> str:
    """Determine the event that a trigger waits for.

    Raises:
        InvalidParameters: No event is named; strigger would assume the job's time limit.
    """
    if parameters.fini:
        if parameters.event not in ("", "fini"):
            raise InvalidParameters(
                f"fini and event={parameters.event} exclude each other: give one of them"
            )
        return "fini"
    if parameters.event:
        return parameters.event
    if job:
        raise InvalidParameters(
            f"slurm.trigger.set jobid={job}: no event given. Add fini=true for the job's end, "
            "or event=time for its time limit; slurmctld has no event for a start"
        )
    raise InvalidParameters("slurm.trigger.set: no event given. Add event=…, or jobid=… fini=true")


def _require_event(context: OperationContext, event: str) -> None:
    """Raise an error if this Slurm lacks a trigger event or never fires it."""
    events = context.triggers.list_events()
    name = {"drain": "drained"}.get(event, event)
    if name not in events:
        names = ", ".join(events)
        raise UnknownEvent(f"Slurm of {context.cluster} has no event {event!r}: use one of {names}")
    if events[name]:
        raise EventNeverFires(f"a trigger for {event} never fires: {events[name]}")
