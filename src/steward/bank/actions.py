"""What the bank can be asked: its actions, for the registry.

Their context is a :class:`steward.bank.room.BankRoom`.
"""

from typing import Final

from steward.bank.asking_accounts import ACTIONS as ACCOUNTS
from steward.bank.asking_charged import ACTIONS as CHARGED
from steward.bank.asking_course import ACTIONS as COURSE
from steward.bank.asking_jobs import ACTIONS as JOBS
from steward.bank.asking_money import ACTIONS as MONEY
from steward.bank.asking_notices import ACTIONS as NOTICES
from steward.bank.asking_rates import ACTIONS as RATES
from steward.bank.asking_standing import ACTIONS as STANDING
from steward.bank.asking_upkeep import ACTIONS as UPKEEP
from steward.bank.asking_views import ACTIONS as VIEWS
from steward.core.actions import Action

ACTIONS: Final[tuple[Action, ...]] = (
    *(*VIEWS, *JOBS, *CHARGED, *MONEY, *ACCOUNTS, *RATES, *UPKEEP, *NOTICES, *STANDING, *COURSE),
)
