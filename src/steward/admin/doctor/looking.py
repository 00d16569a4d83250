"""Runs the checks that were asked for, and puts together what they found."""

import socket
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from steward import __version__
from steward.admin.doctor.apart import Work, run_apart
from steward.admin.doctor.checks import CHECKS, Check
from steward.admin.doctor.findings import worst
from steward.admin.doctor.ground import Ground, ground_of
from steward.admin.doctor.room import DoctorAnswer, DoctorRequest, DoctorRoom
from steward.core.access import Asker
from steward.core.errors import Refused, UsageError
from steward.core.events import utc_now
from steward.jobs.queries import clusters_of

_TIMEOUT_S: Final = 60.0


def look(room: DoctorRoom, asker: Asker, request: DoctorRequest) -> DoctorAnswer:
    """Look at everything, or at some of it.

    Raises:
        Refused: The asker is no operator of every cluster.
        UsageError: There is no such check.
    """
    if not all(room.access.is_operator(asker, name) for name in clusters_of(room.settings)):
        raise Refused("only operators may have Steward looked over", asker.user)
    chosen = _chosen(request.only)
    taken_at, began = utc_now(), time.monotonic()
    asks_slurm = any(check.asks_slurm for check in chosen)
    ground = ground_of(room.settings, room.fresh, asker, asks_slurm=asks_slurm)
    works = [_work(check, ground) for check in chosen]
    findings = tuple(
        msgspec.structs.replace(finding, check=check.name)
        for check, found in zip(chosen, run_apart(works, _TIMEOUT_S), strict=True)
        for finding in found
    )
    return DoctorAnswer(
        findings=findings,
        status=worst(tuple(finding.status for finding in findings)),
        host=socket.gethostname(),
        steward=__version__,
        taken_at=taken_at,
        took_s=round(time.monotonic() - began, 3),
    )


def _work(check: Check, ground: Ground) -> Work:
    return lambda: tuple(check.run(ground))


def _chosen(only: Sequence[str]) -> tuple[Check, ...]:
    known = {check.name: check for check in CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(f"there is no check {unknown[0]!r}: there are {', '.join(known)}", unknown)
    return tuple(check for check in CHECKS if not only or check.name in only)
