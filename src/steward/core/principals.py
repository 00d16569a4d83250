"""Service principals: identities of work without a caller, and their permissions.

Rules, timers and the bank's enforcement act without a request. Each is a
:class:`ServicePrincipal` of :data:`PRINCIPALS` with a list of permissions, and may do nothing
else. ``steward.core.access.act_as`` makes its caller.
"""

from typing import Final, Literal

import msgspec

from steward.core.errors import PermissionRefused


class ServicePrincipal(msgspec.Struct, frozen=True, kw_only=True):
    """Name and permissions of one kind of work without a caller.

    Attributes:
        name: Name in the audit log, in the ledger and in log lines; no user signs with it.
        role: Role on every cluster within the permissions.
        permissions: Names of actions, of operations, of the ledger's transactions
            (``ledger.KIND``), and of changes to jobs for which there is no operation.
    """

    name: str
    role: Literal["operator", "administrator"] = "administrator"
    permissions: frozenset[str]

    def require(self, permission: str) -> None:
        """Require a permission.

        Raises:
            PermissionRefused: The principal lacks it.
        """
        if permission not in self.permissions:
            raise PermissionRefused(
                f"service principal {self.name!r} of Steward may not run {permission}: "
                f"it may run {', '.join(sorted(self.permissions))}",
                permission,
            )


RULES: Final = ServicePrincipal(
    name="rules",
    permissions=frozenset(
        {
            *("archive.show", "bank.balance", "local.command"),
            *("notify.email", "notify.webhook"),
            *("slurm.config.get", "slurm.partition.update", "slurm.script.get"),
            *(f"slurm.job.{verb}" for verb in ("cancel", "find", "get", "hold", "release")),
            *(f"slurm.job.{verb}" for verb in ("requeue", "resume", "suspend", "step.get")),
            *(f"slurm.node.{verb}" for verb in ("down", "drain", "get", "jobs", "reserve")),
            *(f"slurm.node.{verb}" for verb in ("resume", "unreserve", "update")),
            *("slurm.trigger.set", "slurm.trigger.unset"),
        }
    ),
)
"""Rules: run any operation that a rule file names, and the actions that operations call."""

STATUS: Final = ServicePrincipal(
    name="status",
    role="operator",
    permissions=frozenset({"accounting.gaps", "archive.sinks", "bank.status", "journal.status"}),
)
"""Status and metrics: collect figures of other packages."""

SENSOR: Final = ServicePrincipal(
    name="sensor", permissions=frozenset({"slurm.trigger.set", "slurm.trigger.unset"})
)
"""Sensor: set the triggers in slurmctld that wake it."""

ENFORCEMENT: Final = ServicePrincipal(
    name="enforcement",
    permissions=frozenset(
        {"slurm.job.cancel", "slurm.job.comment", "slurm.job.hold", "slurm.job.release"}
    ),
)
"""Enforcement: hold, cancel or mark jobs that cannot be paid, and release them again."""

BANK: Final = ServicePrincipal(
    name="bank",
    permissions=frozenset(
        {"ledger.charge", "ledger.correction", "ledger.expire", "ledger.rollover"}
    ),
)
"""Bank: charge runs, and empty allocations that ended."""

RECONCILIATION: Final = ServicePrincipal(
    name="reconcile", permissions=frozenset({"ledger.charge", "ledger.correction"})
)
"""Reconciliation: correct charges by Slurm's records."""

BACKFILL: Final = ServicePrincipal(
    name="backfill", permissions=frozenset({"ledger.charge", "ledger.correction"})
)
"""Backfill: charge runs from before the bank."""

RETENTION: Final = ServicePrincipal(name="retention", permissions=frozenset({"archive.erase"}))
"""Retention: purge scripts by age, and evict them by limits of the archive."""

KAFKA: Final = ServicePrincipal(name="kafka", permissions=frozenset({"archive.erase"}))
"""Kafka consumer: erase scripts that the sending Steward has erased."""

NOTICES: Final = ServicePrincipal(
    name="notices", permissions=frozenset({"notify.email", "notify.webhook"})
)
"""Notices: send the bank's notices and statements."""

PRINCIPALS: Final = {
    principal.name: principal
    for principal in (
        *(RULES, STATUS, SENSOR, ENFORCEMENT),
        *(BANK, RECONCILIATION, BACKFILL, NOTICES, RETENTION, KAFKA),
    )
}
"""Every service principal, by name."""
