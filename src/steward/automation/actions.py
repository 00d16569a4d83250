"""Automation actions (``automation.*``): run, list and describe operations; read the audit log.

Their context is :class:`AutomationContext`. ``automation.run`` is the only entry point to
operations (:mod:`steward.automation.operation`): command line, HTTP API and socket all call it.

After the context come requests and replies, then the actions ``automation.run``, ``.list``,
``.help`` and ``.audit``.
"""

from datetime import datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import msgspec

from steward.automation.audit import AuditLog, AuditRow
from steward.automation.errors import AuditUnavailable, OperationForbidden
from steward.automation.operation import (
    Operation,
    ParameterDescription,
    describe_parameters,
    find_operation,
    load_operations,
)
from steward.automation.runner import OperationOutcome, OperationRunner
from steward.core.access import Access, Caller
from steward.core.actions import (
    ActionMessage,
    Answer,
    HostZone,
    Registry,
    Request,
    Role,
    action,
    argument,
    described,
    option,
    route,
)
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.core.layouts import Column, Layout
from steward.core.sqlite import SqliteMissing
from steward.jobs.queries import check_clusters, list_clusters
from steward.slurm.times import load_zone, parse_time


class AutomationContext:
    """Context of automation's actions. Not thread-safe: use one per thread.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
        registry: All actions, for operations that call actions of other packages.
    """

    def __init__(self, settings: Settings, *, access: Access, registry: Registry) -> None:
        self.settings = settings
        self.access = access
        self.runner = OperationRunner(settings, access, registry)


OperationName = Annotated[
    str, argument("Name of the action, as 'steward action list' shows it.", "ACTION")
]


class RunOperationRequest(Request, frozen=True, kw_only=True):
    """Request of automation.run: run one operation."""

    action: OperationName
    parameters: Annotated[
        dict[str, Any],
        argument("Parameters of the action: 'nodes=n[1-2]' reason=\"bad DIMM\".", "NAME=VALUE"),
    ] = msgspec.field(default_factory=dict)
    cluster: Annotated[
        str,
        option(
            "Cluster to run on, if the configuration has several.",
            "--cluster",
            "-M",
            metavar="NAME",
        ),
    ] = ""
    dry_run: Annotated[bool, option("Report the changes without making them.", "--dry-run")] = False
    force: Annotated[
        bool, option("Override reasons and drains that other people set.", "--force")
    ] = False
    for_user: Annotated[
        str,
        msgspec.Meta(
            max_length=64,
            description=(
                "User on whose behalf the caller acts. It grants no rights; the audit log "
                "and node reasons name both."
            ),
        ),
    ] = ""


class ListOperationsRequest(Request, frozen=True, kw_only=True):
    """Request of automation.list: list all operations."""


class HelpOnOperationRequest(Request, frozen=True, kw_only=True):
    """Request of automation.help: describe one operation."""

    action: OperationName


class OperationDescription(ActionMessage, frozen=True, kw_only=True):
    """Description of one operation in a reply.

    Attributes:
        action: Name of the operation.
        help: One line.
        gives: Its result, in one line.
        right: Role it requires: ``everyone``, ``owner``, ``operator``, ``administrator``.
        changes: Whether it changes anything.
        remote: Whether other hosts may call it through the API.
        pack: Whether StackStorm's slurm pack has the same action.
        parameters: Its parameters.
    """

    action: str
    help: str
    gives: str
    right: Role
    changes: bool
    remote: bool
    pack: bool
    parameters: tuple[ParameterDescription, ...]


def format_parameter(value: Any) -> str:
    """Format a parameter's value as it would be typed."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


_MAX_SHOWN_VALUE: Final = 80
"""Most characters that people see of a parameter's value; whoever runs an operation chooses it."""


def _format_parameters(row: AuditRow, _: object, *, max_value: int | None = None) -> str:
    """Format parameters as NAME=VALUE on one line, without empty ones."""
    return " ".join(
        f"{name}={format_parameter(value)[:max_value]}"
        for name, value in row.parameters.items()
        if value not in (None, "", [], {})
    )


def _format_requester(row: AuditRow, _: object) -> str:
    """Format the user of an audit row, and the name that signs reasons if it differs."""
    user = row.user or str(row.uid)
    return user if row.speaker in ("", user) else f"{user} for {row.speaker}"


class ListOperationsReply(Answer, frozen=True, kw_only=True):
    """Reply with descriptions of operations.

    Attributes:
        actions: The operations.
    """

    actions: tuple[OperationDescription, ...]
    layout: ClassVar[Layout] = (
        Column("Action", "action"),
        Column("For", "right"),
        Column("Changes", "changes"),
        Column("Parameters", lambda row, _: [item.name for item in row.parameters]),
        Column("Description", "help"),
    )


class AuditRequest(Request, frozen=True, kw_only=True):
    """Request of automation.audit: list audit log entries, newest first."""

    id: Annotated[int, argument("Only the entry with this number.", "ID", ge=0)] = 0
    action: Annotated[str, option("Only entries of this action.", "--action", metavar="ACTION")] = (
        ""
    )
    cluster: Annotated[
        str, option("Only entries of this cluster.", "--cluster", "-M", metavar="NAME")
    ] = ""
    since: Annotated[
        str,
        option(
            "Earliest start time: now-1day, 2026-11-21T08:00.",
            *("--starttime", "--since", "-S"),
            metavar="TIME",
        ),
    ] = ""
    before: Annotated[int, described("Only entries with a lower number; all if 0.")] = 0
    limit: Annotated[
        int, option("Maximum number of entries.", "--limit", "-L", ge=1, le=100_000)
    ] = 100
    zone: HostZone = ""


class AuditReply(Answer, frozen=True, kw_only=True):
    """Reply of automation.audit: audit log entries.

    Attributes:
        actions: Entries, newest first.
    """

    actions: tuple[AuditRow, ...]
    layout: ClassVar[Layout] = (
        Column("ID", "id", link="action", right=True),
        Column("Started", "started", "time"),
        Column("Ended", "ended", "time", show="requested"),
        Column("User", _format_requester),
        Column("How", "how", show="requested"),
        Column("Cluster", "cluster"),
        Column("Action", "action"),
        Column("Forced", lambda row, _: row.force or None, show="requested"),
        Column(
            "Parameters",
            partial(_format_parameters, max_value=_MAX_SHOWN_VALUE),
            max_width=60,
            exact=_format_parameters,
        ),
        Column("Status", "status", "state"),
        Column("Message", "message", max_width=60),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No entry of the audit log that you may see matches. Give fewer options to see more."


@action(
    "automation.run",
    scope="actions",
    command="action run",
    routes=(route("POST /actions/{action}"),),
)
def run_operation(
    context: AutomationContext, caller: Caller, request: RunOperationRequest
) -> OperationOutcome:
    """Run an action on a cluster.

    Write a list with commas and an object as JSON: criterias='{"user": "ada"}'. If the action
    fails, the command exits with 1.

    Raises:
        StewardError: The caller lacks permission, or the operation failed before its first change.
            The reply reports a failure after that.
    """
    return context.runner.run(
        request.action,
        request.parameters,
        caller,
        cluster=request.cluster,
        dry_run=request.dry_run,
        force=request.force,
        # Include the caller's own name: whoever is named as speaker may replace their own reasons.
        speaker=f"{caller.signature} for {request.for_user}" if request.for_user else "",
    )


@action(
    "automation.list",
    scope="read",
    command="action list",
    rows="actions",
    routes=(route("GET /actions"),),
    only_reads=True,
)
def list_operations(
    context: AutomationContext,  # noqa: ARG001 - an action's shape
    caller: Caller,  # noqa: ARG001 - an action's shape
    request: ListOperationsRequest,  # noqa: ARG001 - an action's shape
) -> ListOperationsReply:
    """List the actions on clusters with their parameters."""
    return ListOperationsReply(
        actions=tuple(describe_operation(operation) for operation in load_operations().values())
    )


@action(
    "automation.help",
    scope="read",
    command="action help",
    routes=(route("GET /actions/{action}"),),
    only_reads=True,
)
def help_on_operation(
    context: AutomationContext,  # noqa: ARG001 - an action's shape
    caller: Caller,  # noqa: ARG001 - an action's shape
    request: HelpOnOperationRequest,
) -> ListOperationsReply:
    """Describe an action: its parameters and its result.

    Raises:
        UnknownOperation: No operation has that name.
    """
    return ListOperationsReply(actions=(describe_operation(find_operation(request.action)),))


@action(
    "automation.audit",
    scope="read",
    command="action audit",
    rows="actions",
    routes=(route("GET /audit"),),
    only_reads=True,
)
def list_audit(context: AutomationContext, caller: Caller, request: AuditRequest) -> AuditReply:
    """Show the audit log: actions, their callers and their results.

    Operators see all entries, others their own.

    Raises:
        OperationForbidden: The caller's uid has no name, so no entry can be the caller's own.
        AuditUnavailable: The audit log cannot be read.
        TimeError: ``since`` is not a valid time.
        UsageError: The cluster does not exist.
    """
    if request.cluster:
        check_clusters([request.cluster], list_clusters(context.settings))
    since: datetime | None = None
    if request.since:
        since = parse_time(request.since, utc_now(), load_zone(request.zone))
    names = [request.cluster] if request.cluster else (list(context.settings.cluster) or [""])
    is_operator = all(context.access.is_operator(caller, name) for name in names)
    if not caller.user and not is_operator:
        raise OperationForbidden(
            "permission denied: your uid has no user name on the daemon's host, so no entries are "
            "yours"
        )
    try:
        log = AuditLog(context.settings.state_dir, read_only=True)
    except AuditUnavailable as error:
        if not isinstance(error.__cause__, SqliteMissing):
            raise
        # The log does not exist yet: nothing has been run.
        return AuditReply(actions=())
    try:
        if request.id:
            entry = log.find_entry(request.id)
            rows = [] if entry is None else [entry]
        else:
            rows = log.list_entries(
                limit=request.limit,
                since=since,
                before=request.before,
                ref=request.action,
                cluster=request.cluster,
                uid=None if is_operator else caller.uid,
            )
    finally:
        log.close()
    # The uid may have been another user's before.
    own = (caller.uid, caller.user)
    return AuditReply(
        actions=tuple(row for row in rows if is_operator or (row.uid, row.user) == own)
    )


def describe_operation(operation: Operation) -> OperationDescription:
    """Describe an operation for a reply."""
    return OperationDescription(
        action=operation.ref,
        help=operation.help,
        gives=operation.result_help,
        right=operation.role,
        changes=not operation.only_reads,
        remote=operation.remote,
        pack=operation.pack,
        parameters=describe_parameters(operation),
    )
