"""Bank actions: all requests that the bank's daemon answers, collected for the registry.

Their context is a :class:`steward.bank.context.BankContext`.
"""

from typing import Final

from steward.bank.actions.accounts import ACTIONS as ACCOUNTS
from steward.bank.actions.jobs import CHARGED_ACTIONS as CHARGED
from steward.bank.actions.jobs import JOB_ACTIONS as JOBS
from steward.bank.actions.maintenance import MAINTENANCE_ACTIONS as MAINTENANCE
from steward.bank.actions.maintenance import NOTICE_ACTIONS as NOTICES
from steward.bank.actions.money import ACTIONS as MONEY
from steward.bank.actions.rates import ACTIONS as RATES
from steward.bank.actions.reports import HISTORY_ACTIONS as HISTORY
from steward.bank.actions.reports import REPORT_ACTIONS as REPORTS
from steward.bank.actions.status import STATUS_ACTIONS as STATUS
from steward.core.actions import Action

ACTIONS: Final[tuple[Action, ...]] = (
    *(
        *REPORTS,
        *JOBS,
        *CHARGED,
        *MONEY,
        *ACCOUNTS,
        *RATES,
        *MAINTENANCE,
        *NOTICES,
        *STATUS,
        *HISTORY,
    ),
)
