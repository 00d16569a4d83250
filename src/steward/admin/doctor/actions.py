"""What the doctor can be asked: to look at everything, or at some of it."""

from typing import Final

from steward.admin.doctor.room import DoctorAnswer, DoctorRequest, DoctorRoom
from steward.core.access import Asker
from steward.core.actions import Action


def run(room: DoctorRoom, asker: Asker, request: DoctorRequest) -> DoctorAnswer:
    """Look at everything, or at some of it.

    Raises:
        Refused: The asker is no operator of every cluster.
        UsageError: There is no such check.
    """
    # The checks know of every room: a process that is not asked for them loads none.
    from steward.admin.doctor.looking import look

    return look(room, asker, request)


ACTIONS: Final = (
    Action(
        name="doctor.run",
        help="Look whether all is as it must be.",
        request=DoctorRequest,
        answer=DoctorAnswer,
        run=run,
        only_reads=True,
        role="operator",
    ),
)
