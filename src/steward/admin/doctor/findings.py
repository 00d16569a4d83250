"""Findings of health checks: their type, constructors, and the request and answer of doctor.run.

``make_ok``, ``make_warning``, ``make_wrong`` and ``make_skipped`` make a :class:`CheckFinding` of
that status; ``find_worst_status`` sums them up. :class:`DoctorContext` is the action's context.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal

from steward.core.access import Access
from steward.core.actions import ActionMessage, Answer, Registry, Request, described
from steward.core.config import Settings
from steward.core.layouts import Column, Layout

FindingStatus = Literal["ok", "warning", "wrong", "skipped"]
"""Status of a finding: ``warning`` has a cost now or soon; ``wrong`` must be repaired;
``skipped`` was not checked, and ``finding`` says why."""

RANK: Final[dict[FindingStatus, int]] = {"skipped": 0, "ok": 0, "warning": 1, "wrong": 2}


class CheckFinding(ActionMessage, frozen=True, kw_only=True):
    """Result of one check for one object.

    Attributes:
        check: Name of the check.
        object: Cluster, sink, file or worker concerned; "" if there is just one.
        status: Status of the object.
        checked: Path, setting or command that the check read.
        finding: Result, in words.
        fix: Commands to type, or lines to set, that repair it.
    """

    check: str = ""
    object: str = ""
    status: FindingStatus
    checked: str
    finding: str
    fix: tuple[str, ...] = ()


def make_ok(checked: str, finding: str, *, name: str = "") -> CheckFinding:
    """Make a finding without a problem about the object ``name``."""
    return CheckFinding(status="ok", checked=checked, finding=finding, object=name)


def make_warning(checked: str, finding: str, *fix: str, name: str = "") -> CheckFinding:
    """Make a finding that something works at a cost, or not for long."""
    return CheckFinding(status="warning", checked=checked, finding=finding, fix=fix, object=name)


def make_wrong(checked: str, finding: str, *fix: str, name: str = "") -> CheckFinding:
    """Make a finding that something must be repaired."""
    return CheckFinding(status="wrong", checked=checked, finding=finding, fix=fix, object=name)


def make_skipped(checked: str, finding: str, *, name: str = "") -> CheckFinding:
    """Make a finding that something was not checked; the finding is the reason."""
    return CheckFinding(status="skipped", checked=checked, finding=finding, object=name)


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 job``, ``2 jobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def find_worst_status(statuses: tuple[FindingStatus, ...]) -> FindingStatus:
    """Return the worst of several statuses; ``ok`` if nothing was checked."""
    return max(statuses, key=RANK.__getitem__, default="ok") if _has_problem(statuses) else "ok"


def _has_problem(statuses: tuple[FindingStatus, ...]) -> bool:
    return any(RANK[status] for status in statuses)


class DoctorRequest(Request, frozen=True, kw_only=True):
    """doctor.run: run the health checks."""

    only: Annotated[tuple[str, ...], described("Names of checks; all if empty.")] = ()


class DoctorAnswer(Answer, frozen=True, kw_only=True):
    """Findings of the health checks.

    Attributes:
        findings: Findings in the order of the checks.
        status: Worst status of all findings.
        host: Name of the checked host.
        steward: Version of Steward.
        taken_at: Start time of the checks.
        took_s: Duration of the checks, in seconds.
    """

    findings: tuple[CheckFinding, ...]
    status: FindingStatus
    host: str
    steward: str
    taken_at: datetime
    took_s: float
    layout: ClassVar[Layout] = (
        Column("Check", "check"),
        Column("Object", "object"),
        Column("Status", "status", "state"),
        Column("Finding", "finding", "prose"),
        Column("Checked", "checked", "prose", show="pages"),
        Column("Fix", "fix", "code", show="pages", exact=lambda row, _: "; ".join(row.fix)),
    )


class DoctorContext:
    """Context of the action doctor.run.

    Args:
        settings: The whole configuration.
        access: Access decisions.
        make_registry: Makes an unused action registry: each check is a process of its own and must
            not use what another has open (a connection to a database).
    """

    def __init__(
        self, settings: Settings, *, access: Access, make_registry: Callable[[], Registry]
    ) -> None:
        self.settings = settings
        self.access = access
        self.make_registry = make_registry
