"""What automation can be asked: its actions, for the registry.

Their context is a :class:`steward.automation.actions.AutomationRoom`. What is done to
a cluster is an operation, see :mod:`steward.automation.operation`; ``automation.run``
is the one way in to all of them.
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
    """The context of automation's actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: Who may see and do what.
        registry: What other rooms can be asked for.
    """

    def __init__(self, settings: Settings, *, access: Access, registry: Registry) -> None:
        self.settings = settings
        self.access = access
        self.runner = Runner(settings, access, registry)


class RunRequest(Request, frozen=True, kw_only=True):
    """automation.run: have something done.

    Attributes:
        action: The operation's name.
        parameters: What it is given.
        cluster: Where; "" where there is only one.
        dry_run: Whether it only says what it would do.
        force: Whether reasons and drains of others are overridden.
        for_user: Whose wish it is, as the asker says; it gives no rights. The audit log and
            the reasons of nodes name both.
    """

    action: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    cluster: str = ""
    dry_run: bool = False
    force: bool = False
    for_user: Annotated[str, msgspec.Meta(max_length=64)] = ""


class RunAnswer(Answer, frozen=True, kw_only=True):
    """What became of it.

    Attributes:
        id: Its number in the audit log; 0 for what changes nothing, or was a dry run.
        action: The operation's name.
        cluster: Where; "" for what is done on none.
        status: How it ended.
        parameters: As it was run, with defaults.
        result: What it gave.
        message: What went wrong, one line; "" for nothing.
        dry_run: Whether it only said what it would do.
        started: When, UTC.
        ended: When, UTC.
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
    """automation.list: what can be done."""


class HelpRequest(Request, frozen=True, kw_only=True):
    """automation.help: what one operation takes.

    Attributes:
        action: Its name.
    """

    action: str


class OperationLine(Shape, frozen=True, kw_only=True):
    """One operation.

    Attributes:
        action: Its name.
        help: One line.
        gives: One line on its result.
        right: Who may: ``everyone``, ``owner``, ``operator``, ``administrator``.
        changes: Whether it changes anything.
        remote: Whether it may be had from other hosts.
        pack: Whether StackStorm's slurm pack has it.
        parameters: What it takes.
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
    """Operations.

    Attributes:
        actions: They.
    """

    actions: tuple[OperationLine, ...]


class AuditRequest(Request, frozen=True, kw_only=True):
    """automation.audit: what was done, newest first.

    Attributes:
        id: Only the action of this number; 0 for the latest.
        action: Only these; "" for all.
        cluster: Only on this cluster; "" for all.
        since: Only what was begun since; "" for any time.
        before: Only what was begun before the action of this number; 0 for all.
        limit: How many at the most.
        zone: IANA name of the zone that ``since`` is in; "" for the system's.
    """

    id: int = 0
    action: str = ""
    cluster: str = ""
    since: str = ""
    before: int = 0
    limit: int = 100
    zone: str = ""


class AuditAnswer(Answer, frozen=True, kw_only=True):
    """What was done.

    Attributes:
        actions: Newest first.
    """

    actions: tuple[AuditRow, ...]


def run(room: AutomationRoom, asker: Asker, request: RunRequest) -> RunAnswer:
    """Have something done.

    Raises:
        StewardError: It cannot be done, or not by this asker; nothing was changed.
    """
    ran = room.runner.run(
        request.action,
        request.parameters,
        asker,
        cluster=request.cluster,
        dry_run=request.dry_run,
        force=request.force,
        # Never the name alone: one speaks over one's own reasons.
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
    """What can be done."""
    return ListAnswer(actions=tuple(line(one) for one in operations().values()))


def help_(room: AutomationRoom, asker: Asker, request: HelpRequest) -> ListAnswer:  # noqa: ARG001 - an action's shape
    """What one operation takes.

    Raises:
        UnknownOperation: There is none of that name.
    """
    return ListAnswer(actions=(line(operation(request.action)),))


def audit(room: AutomationRoom, asker: Asker, request: AuditRequest) -> AuditAnswer:
    """What was done; others than operators are shown what they did themselves.

    Raises:
        AuditUnavailable: It cannot be read.
        TimeError: ``since`` is no time.
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
        # Nothing was ever done.
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
    """An operation, described."""
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
