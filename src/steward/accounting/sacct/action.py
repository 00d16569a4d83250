"""The action behind ``steward sacct``; a module of its own, for a command that is run often."""

from typing import Final

from steward.accounting.sacct.listing import sacct
from steward.accounting.sacct.shapes import SacctAnswer, SacctRequest, SacctText
from steward.core.actions import Action

SACCT: Final = Action(
    name="accounting.sacct",
    help="List jobs and steps with what they used, as text.",
    request=SacctRequest,
    answer=SacctAnswer,
    run=sacct,
    stream=True,
    items=(SacctText,),
    only_reads=True,
)
