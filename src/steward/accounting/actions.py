"""Accounting actions for command line, HTTP API and socket: sacct, job, jobs, job_states, gaps.

Their context is a :class:`steward.accounting.context.AccountingContext`.
"""

from typing import Final

from steward.accounting.gaps import GAPS
from steward.accounting.job_list import JOB_STATES, JOBS
from steward.accounting.job_page.page import JOB
from steward.accounting.sacct.output import SACCT
from steward.core.actions import Action

ACTIONS: Final[tuple[Action, ...]] = (SACCT, JOB, JOBS, JOB_STATES, GAPS)
