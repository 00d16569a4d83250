"""What a charge was priced by: short digests of what Slurm's record said.

A charge that was made is not made anew because the cluster, its nodes or the settings
are others today: only where Slurm's record of the job itself says something else.
"""

import hashlib
from datetime import datetime
from typing import Final

from steward.bank.records import Charge
from steward.core.timestamps import micros, micros_or_0
from steward.core.usage import RunFact
from steward.slurm.job_states import base_state
from steward.slurm.tres import parse_tres

_BYTES: Final = 9


def facts_of(fact: RunFact, begin: datetime, end: datetime, paid: int) -> str:
    """Two digests with a dot between: of what the run was given, and of everything else.

    Args:
        fact: The run, or the piece of one.
        begin: When what is charged for began.
        end: When it ended.
        paid: What the run's former sizes cost, micro-SU.
    """
    record = fact.record
    given = (
        sorted(parse_tres(record.tres_allocated).items()),
        record.cpus or 0,
        record.nodelist,
        record.licenses,
        record.oversubscribe,
    )
    other = (
        micros_or_0(record.start),
        micros(begin),
        micros(end),
        record.suspended_s or 0,
        record.time_limit_s,
        base_state(record.state),
        record.account.lower(),
        record.user,
        record.partition,
        record.qos,
        paid,
        *([fact.suspended_before_s] if fact.suspended_before_s else []),
    )
    return f"{_digest(given)}.{_digest(other)}"


def as_allocated(before: Charge | None, facts: str) -> dict[str, int] | None:
    """The TRES that were charged before, if the record says the same of them; else None."""
    if before is None or before.use is None or not before.facts:
        return None
    return before.use.tres if before.facts.partition(".")[0] == facts.partition(".")[0] else None


def _digest(of: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=_BYTES).hexdigest()
