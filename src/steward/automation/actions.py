"""Automation actions (``automation.*``): run, list and describe operations; read the audit log.

Their context is :class:`AutomationRoom`. ``automation.run`` is the only entry point to operations
(:mod:`steward.automation.operation`): command line, HTTP API and socket all call it.

The requests and replies come first, then one handler per action, then :data:`ACTIONS`, which
registers them: ``run``, ``list_``, ``help_`` and ``audit``.
"""

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec

from steward.automation.audit import Audit, AuditRow, Ending
from steward.automation.errors import AuditUnavailable, NotYours
from steward.automation.operation import (
    Operation,
    ParameterDescription,
    Right,
    operation,
    operations,
    parameters_of,
)
from steward.automation.runner import Runner
from steward.core.access import Access, Asker
from steward.core.actions import Action, Answer, Registry, Request, Shape
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.slurm.times import parse_time, zone_called


class AutomationRoom:
    """Context of automation's actions. Not thread-safe: use one per thread.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
        registry: All actions, for operations that call actions of other packages.
    """

    def __init__(self, settings: Settings, *, access: Access, registry: Registry) -> None:
        self.settings = settings
        self.access = access
        self.runner = Runner(settings, access, registry)


class RunRequest(Request, frozen=True, kw_only=True):
    """Request of automation.run: run one operation.

    Attributes:
        action: The operation's name.
        parameters: Parameters of the operation, by name.
        cluster: Cluster to run on; "" if only one is configured.
        dry_run: Report what would change, and change nothing.
        force: Override reasons and drains that other people set.
        for_user: User on whose behalf the caller acts, as the caller states it; it grants no
            rights. The audit log and node reasons name both.
    """

    action: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    cluster: str = ""
    dry_run: bool = False
    force: bool = False
    for_user: Annotated[str, msgspec.Meta(max_length=64)] = ""


class RunAnswer(Answer, frozen=True, kw_only=True):
    """Reply of automation.run: how the operation ended and what it returned.

    Attributes:
        id: Number in the audit log; 0 for a dry run or an operation that changes nothing.
        action: The operation's name.
        cluster: Cluster it ran on; "" for an operation without a cluster.
        status: How it ended.
        parameters: Parameters it ran with, defaults included.
        result: Result of the operation, as plain JSON.
        message: Error in one line; "" if none.
        dry_run: Whether it was a dry run.
        started: Start time, UTC.
        ended: End time, UTC.
    """

    id: int
    action: str
    cluster: str
    status: Ending
    parameters: dict[str, Any]
    result: Any
    message: str
    dry_run: bool
    started: datetime
    ended: datetime


class ListRequest(Request, frozen=True, kw_only=True):
    """Request of automation.list: list all operations."""


class HelpRequest(Request, frozen=True, kw_only=True):
    """Request of automation.help: describe one operation.

    Attributes:
        action: Name of the operation.
    """

    action: str


class OperationLine(Shape, frozen=True, kw_only=True):
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
    right: Right
    changes: bool
    remote: bool
    pack: bool
    parameters: tuple[ParameterDescription, ...]


class ListAnswer(Answer, frozen=True, kw_only=True):
    """Reply with descriptions of operations.

    Attributes:
        actions: The operations.
    """

    actions: tuple[OperationLine, ...]


class AuditRequest(Request, frozen=True, kw_only=True):
    """Request of automation.audit: list audit log entries, newest first.

    Attributes:
        id: Only the entry with this number; 0 for the latest.
        action: Only this operation; "" for all.
        cluster: Only this cluster; "" for all.
        since: Only entries that started at or after this time; "" for any time.
        before: Only entries with a lower number; 0 for all.
        limit: Maximum number of entries.
        zone: IANA time zone of ``since``; "" for the system's zone.
    """

    id: int = 0
    action: str = ""
    cluster: str = ""
    since: str = ""
    before: int = 0
    limit: int = 100
    zone: str = ""


class AuditAnswer(Answer, frozen=True, kw_only=True):
    """Reply of automation.audit: audit log entries.

    Attributes:
        actions: Entries, newest first.
    """

    actions: tuple[AuditRow, ...]


def run(room: AutomationRoom, asker: Asker, request: RunRequest) -> RunAnswer:
    """Run an operation for a caller and return its result.

    Raises:
        StewardError: The operation failed or the caller lacks permission; nothing was changed.
    """
    ran = room.runner.run(
        request.action,
        request.parameters,
        asker,
        cluster=request.cluster,
        dry_run=request.dry_run,
        force=request.force,
        # Include the caller's own name: whoever is named as speaker may replace their own reasons.
        speaker=f"{asker.user or asker.uid} for {request.for_user}" if request.for_user else "",
    )
    return RunAnswer(
        id=ran.id,
        action=ran.ref,
        cluster=ran.cluster,
        status=ran.status,
        parameters=ran.parameters,
        result=ran.result,
        message=ran.message,
        dry_run=ran.dry_run,
        started=ran.started,
        ended=ran.ended,
    )


def list_(room: AutomationRoom, asker: Asker, request: ListRequest) -> ListAnswer:  # noqa: ARG001 - an action's shape
    """Return descriptions of all operations."""
    return ListAnswer(actions=tuple(line(one) for one in operations().values()))


def help_(room: AutomationRoom, asker: Asker, request: HelpRequest) -> ListAnswer:  # noqa: ARG001 - an action's shape
    """Return the description of one operation.

    Raises:
        UnknownOperation: No operation has that name.
    """
    return ListAnswer(actions=(line(operation(request.action)),))


def audit(room: AutomationRoom, asker: Asker, request: AuditRequest) -> AuditAnswer:
    """Return audit log entries: all for operators, a user's own for everybody else.

    Raises:
        AuditUnavailable: The audit log cannot be read.
        TimeError: ``since`` is not a valid time.
    """
    since: datetime | None = None
    if request.since:
        since = parse_time(request.since, utc_now(), zone_called(request.zone))
    names = [request.cluster] if request.cluster else (list(room.settings.cluster) or [""])
    is_operator = all(room.access.is_operator(asker, name) for name in names)
    if not asker.user and not is_operator:
        raise NotYours("your uid has no name: nothing here can be known to be yours")
    try:
        log = Audit(room.settings.state_dir, read_only=True)
    except AuditUnavailable:
        # The log does not exist yet: nothing has been run.
        return AuditAnswer(actions=())
    try:
        if request.id:
            found = log.row(request.id)
            rows = [] if found is None else [found]
        else:
            rows = log.rows(
                limit=request.limit,
                since=since,
                before=request.before,
                ref=request.action,
                cluster=request.cluster,
                uid=None if is_operator else asker.uid,
            )
    finally:
        log.close()
    return AuditAnswer(actions=tuple(row for row in rows if is_operator or row.uid == asker.uid))


def line(one: Operation) -> OperationLine:
    """Describe an operation for a reply."""
    return OperationLine(
        action=one.ref,
        help=one.help,
        gives=one.gives,
        right=one.right,
        changes=one.changes,
        remote=one.remote,
        pack=one.pack,
        parameters=parameters_of(one),
    )


ACTIONS: Final = (
    Action(
        name="automation.run",
        help="Do something to a cluster.",
        request=RunRequest,
        answer=RunAnswer,
        run=run,
    ),
    Action(
        name="automation.list",
        help="List what can be done.",
        request=ListRequest,
        answer=ListAnswer,
        run=list_,
        only_reads=True,
    ),
    Action(
        name="automation.help",
        help="Say what an action takes.",
        request=HelpRequest,
        answer=ListAnswer,
        run=help_,
        only_reads=True,
    ),
    Action(
        name="automation.audit",
        help="Show what was done, and by whom.",
        request=AuditRequest,
        answer=AuditAnswer,
        run=audit,
        only_reads=True,
    ),
)
