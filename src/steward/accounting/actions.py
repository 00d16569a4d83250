"""What the books can be asked: accounting's actions, for the registry.

Their context is a :class:`steward.accounting.room.AccountingRoom`.
"""

from typing import Final

from steward.accounting.gaps import GAPS
from steward.accounting.listing.asking import JOB_STATES, JOBS
from steward.accounting.page.action import JOB
from steward.accounting.sacct.action import SACCT
from steward.core.actions import Action

ACTIONS: Final[tuple[Action, ...]] = (SACCT, JOB, JOBS, JOB_STATES, GAPS)
