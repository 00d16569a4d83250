"""What a check says: what it looked at, what is the matter, and what mends it."""

from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal

from steward.core.access import Access
from steward.core.actions import Answer, Registry, Request, Shape
from steward.core.config import Settings

Status = Literal["ok", "warning", "wrong", "skipped"]
"""``warning`` costs something, or will soon; ``wrong`` is not as it must be; what is
``skipped`` was not looked at, and ``what`` says why."""

RANK: Final[dict[Status, int]] = {"skipped": 0, "ok": 0, "warning": 1, "wrong": 2}


class Finding(Shape, frozen=True, kw_only=True):
    """What one check found of one thing.

    Attributes:
        check: The check's name.
        of: Which cluster, sink, file or part it is about; "" where there is just one.
        status: How it stands.
        looked_at: What was looked at.
        what: What was found.
        mend: Commands to type, or lines to set, that mend it.
    """

    check: str = ""
    of: str = ""
    status: Status
    looked_at: str
    what: str
    mend: tuple[str, ...] = ()


def ok(looked_at: str, what: str, *, of: str = "") -> Finding:
    """All is as it should be."""
    return Finding(status="ok", looked_at=looked_at, what=what, of=of)


def warning(looked_at: str, what: str, *mend: str, of: str = "") -> Finding:
    """It works, but at a price, or not for long."""
    return Finding(status="warning", looked_at=looked_at, what=what, mend=mend, of=of)


def wrong(looked_at: str, what: str, *mend: str, of: str = "") -> Finding:
    """It is not as it must be."""
    return Finding(status="wrong", looked_at=looked_at, what=what, mend=mend, of=of)


def skipped(looked_at: str, why: str, *, of: str = "") -> Finding:
    """It was not looked at."""
    return Finding(status="skipped", looked_at=looked_at, what=why, of=of)


def several(count: int, what: str) -> str:
    """So many of something, in words: ``1 job``, ``2 jobs``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def worst(statuses: tuple[Status, ...]) -> Status:
    """The worst of some; ``ok`` where nothing was looked at."""
    return max(statuses, key=RANK.__getitem__, default="ok") if _tells(statuses) else "ok"


def _tells(statuses: tuple[Status, ...]) -> bool:
    return any(RANK[one] for one in statuses)


class DoctorRequest(Request, frozen=True, kw_only=True):
    """doctor.run: look whether all is as it must be.

    Attributes:
        only: Names of checks; all of them if empty.
    """

    only: tuple[str, ...] = ()


class DoctorAnswer(Answer, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        findings: What each check says, in the order of the checks.
        status: The worst of it.
        host: The host that was looked at.
        steward: Version of the Steward that looked.
        taken_at: When.
        took_s: How long that took, in seconds.
    """

    findings: tuple[Finding, ...]
    status: Status
    host: str
    steward: str
    taken_at: datetime
    took_s: float


class DoctorRoom:
    """The context of the doctor's action.

    Args:
        settings: The whole configuration.
        access: Who may see what.
        fresh: Makes rooms that nobody has used: each check is a process of its own, and what
            another has open (a connection to a database) is not for it to use.
    """

    def __init__(
        self, settings: Settings, *, access: Access, fresh: Callable[[], Registry]
    ) -> None:
        self.settings = settings
        self.access = access
        self.fresh = fresh
