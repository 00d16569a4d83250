"""The shapes of what is asked and told of sinks: how they stand, and that they are to be refilled.

The same promise as in ``answers.py``.
"""

from datetime import datetime
from typing import Literal

from steward.archive.shapes import Selection
from steward.core.actions import Answer, Request, Shape

State = Literal["running", "waiting", "detached", "new", "removed"]
"""How a sink is, see :class:`SinkLine`."""


class SinksRequest(Request, frozen=True, kw_only=True):
    """archive.sinks: how each sink stands."""


class SinkLine(Shape, frozen=True, kw_only=True):
    """How a sink stands.

    Attributes:
        name: Its name.
        kind: ``files``, ``elasticsearch``, ``opensearch`` or ``kafka``; "" where it is
            configured no more.
        state: ``running``; ``waiting``, something that it needs is away; ``detached``, the
            journal waits for it no more; ``new``, it has not run yet; ``removed``, it is
            configured no more but the journal waits for it (``steward journal forget``).
        detail: Why it waits.
        position: The last event that the journal need not keep for it.
        backlog: How many scripts it has still to archive, for the first time or again.
        behind: How many events it has still to put to use: corrections and purges, too.
        oldest_s: Age of the oldest of these, in seconds; None for none.
        error: What went wrong last, also where it went on since.
        error_at: When that was.
        rate: How many events a second it put to use over the last minute; each script of an
            order to send or to purge counts.
        set_aside: How many events were set aside for it.
        missed: How many events it missed while it was detached.
        refill: The command that makes up for them; "" where it missed none.
    """

    name: str
    kind: str
    state: State
    detail: str = ""
    position: int = 0
    backlog: int = 0
    behind: int = 0
    oldest_s: float | None = None
    error: str = ""
    error_at: datetime | None = None
    rate: float = 0.0
    set_aside: int = 0
    missed: int = 0
    refill: str = ""


class SinksAnswer(Answer, frozen=True, kw_only=True):
    """How each sink stands, those that are configured first."""

    sinks: tuple[SinkLine, ...] = ()


class ResendRequest(Selection, frozen=True, kw_only=True):
    """archive.resend: have a sink archive scripts again; ``since`` "" means all time.

    Attributes:
        sink: The sink's name.
        missing: Only what it does not have, as far as that is known here. Of a sink on
            another machine only what it was sent in the last days is known.
    """

    sink: str
    missing: bool = False


class ResendAnswer(Answer, frozen=True, kw_only=True, tag="answer", tag_field="item"):
    """The end of an order to archive scripts again: the sink does it in its own time.

    Attributes:
        sink: The sink's name.
        scripts: How many scripts it will archive again.
        total_bytes: Size of scripts and environments together.
        present: How many were left out because it has them.
    """

    sink: str
    scripts: int
    total_bytes: int
    present: int = 0
