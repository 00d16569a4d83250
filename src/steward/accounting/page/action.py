"""The action behind ``steward job``, for the registry."""

from typing import Final

from steward.accounting.page.gathering import page
from steward.accounting.page.shapes import PageAnswer, PageRequest
from steward.core.actions import Action

JOB: Final = Action(
    name="accounting.job",
    help="Show what a job was, what it used, and how well.",
    request=PageRequest,
    answer=PageAnswer,
    run=page,
)
