"""What a check says: what it looked at, what is the matter, and what mends it."""

from typing import Final, Literal

from steward.core.actions import Shape

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
