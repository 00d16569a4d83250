"""What the doctor is asked and answers, and what its action works with."""

from collections.abc import Callable
from datetime import datetime

from steward.admin.doctor.findings import Finding, Status
from steward.core.access import Access
from steward.core.actions import Answer, Registry, Request
from steward.core.config import Settings


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
