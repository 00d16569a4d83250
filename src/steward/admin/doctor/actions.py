"""Action ``doctor.run``: select health checks, run them, and collect their findings.

``run_checks`` queries Slurm once for all checks (``make_check_context``) and passes them to
``check_processes``, which runs each in a process with a time limit.
"""

import socket
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from steward import __version__
from steward.admin.doctor.check_processes import CheckRun, run_in_processes
from steward.admin.doctor.checks import CHECKS, HealthCheck
from steward.admin.doctor.context import CheckContext, make_check_context
from steward.admin.doctor.findings import (
    DoctorAnswer,
    DoctorContext,
    DoctorRequest,
    find_worst_status,
)
from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import utc_now
from steward.jobs.queries import list_clusters

_TIMEOUT_S: Final = 60.0
"""Time limit of each check, in seconds."""


def run_checks(context: DoctorContext, caller: Caller, request: DoctorRequest) -> DoctorAnswer:
    """Run all health checks, or the named ones.

    Raises:
        PermissionRefused: The asker is not an operator of every cluster.
        UsageError: There is no such check.
    """
    if not all(
        context.access.is_operator(caller, name) for name in list_clusters(context.settings)
    ):
        raise PermissionRefused(
            "permission denied: only operators may run the health checks", caller.user
        )
    checks = _select_checks(request.only)
    taken_at, began = utc_now(), time.monotonic()
    asks_slurm = any(check.asks_slurm for check in checks)
    check_context = make_check_context(
        context.settings, context.make_registry, caller, asks_slurm=asks_slurm
    )
    runs = [_bind_check(check, check_context) for check in checks]
    findings = tuple(
        msgspec.structs.replace(finding, check=check.name)
        for check, check_findings in zip(checks, run_in_processes(runs, _TIMEOUT_S), strict=True)
        for finding in check_findings
    )
    return DoctorAnswer(
        findings=findings,
        status=find_worst_status(tuple(finding.status for finding in findings)),
        host=socket.gethostname(),
        steward=__version__,
        taken_at=taken_at,
        took_s=round(time.monotonic() - began, 3),
    )


def _bind_check(check: HealthCheck, check_context: CheckContext) -> CheckRun:
    return lambda: tuple(check.run(check_context))


def _select_checks(names: Sequence[str]) -> tuple[HealthCheck, ...]:
    by_name = {check.name: check for check in CHECKS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(
            f"unknown check {unknown[0]!r}: the checks are {', '.join(by_name)}", unknown
        )
    return tuple(check for check in CHECKS if not names or check.name in names)


@action(
    "doctor.run",
    scope="read",
    role="operator",
    routes=(route("GET /doctor"),),
    only_reads=True,
)
def run_doctor(context: DoctorContext, caller: Caller, request: DoctorRequest) -> DoctorAnswer:
    """Run all health checks, or the named ones.

    Raises:
        PermissionRefused: The asker is not an operator of every cluster.
        UsageError: There is no such check.
    """
    return run_checks(context, caller, request)
