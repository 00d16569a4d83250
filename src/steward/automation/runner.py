"""Runner of operations: checks rights, parses parameters, runs, audits and times out.

:class:`OperationRunner` is the only way to run an operation: command line, HTTP API, socket and
rules all come through it. ``run`` finds the operation, parses its parameters and checks the role;
then the operation's function runs with an :class:`OperationRun` as its context. When the function
calls ``begin``, an ``_AuditedRun`` writes the start to the audit log; after it returns or fails,
the end. An error before ``begin`` is raised: nothing was changed. An error after it is part of the
:class:`OperationOutcome`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.automation.audit import AuditLog, AuditStart, Ending
from steward.automation.errors import (
    InvalidParameters,
    OperationForbidden,
    OperationTimeout,
    PartialFailure,
)
from steward.automation.operation import (
    Operation,
    Parameters,
    dump_parameters,
    find_operation,
    parse_operation_parameters,
    to_plain_json,
)
from steward.core.access import Access, Caller
from steward.core.actions import Answer, Registry, Role
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.events import utc_now
from steward.slurm import SlurmUnavailable
from steward.slurm.commands import COMMAND_TIMEOUT_S
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.slurm import Slurm
    from steward.slurm.cluster import ClusterQueries
    from steward.slurm.cluster_changes import ClusterChanges
    from steward.slurm.job_changes import JobChanges
    from steward.slurm.triggers import Triggers


MAX_OWN_PARAMETER_BYTES: Final = 16 << 10
"""Largest parameters of an operation, as JSON, for callers who are no operators, in bytes."""
MAX_OWN_PER_HOUR: Final = 1000
"""Most operations in an hour that such a caller may have in the audit log."""
_ROLE_NAMES: Final[dict[Role, str]] = {
    "owner": "the job's owner and operators",
    "operator": "operators",
    "administrator": "administrators",
}
"""Who has each role, for error messages."""


# Context of a run


class OperationRun:
    """Context of one run of an operation; implements :class:`OperationContext`.

    Args:
        ref: Name of the operation.
        settings: The whole configuration.
        access: Checks what a caller may see and do.
        registry: All actions, for operations that call other packages.
        caller: The caller.
        cluster: Cluster to work on; "" for an operation without a cluster.
        speaker: Name that signs reasons.
        dry_run: Whether it only reports what it would do.
        force: Whether it may override reasons of others.
        timeout_s: Time limit, in seconds.
        on_begin: Called once, right before the first change.
    """

    def __init__(
        self,
        ref: str,
        settings: Settings,
        access: Access,
        registry: Registry,
        caller: Caller,
        cluster: str,
        *,
        speaker: str,
        dry_run: bool,
        force: bool,
        timeout_s: float,
        on_begin: Callable[[], None],
    ) -> None:
        self.ref = ref
        self.cluster = cluster
        self.settings = settings
        self.access = access
        self.caller = caller
        self.speaker = speaker
        self.dry_run = dry_run
        self.force = force
        self.timeout_s = timeout_s
        self._registry = registry
        self._deadline = time.monotonic() + timeout_s
        self._on_begin = on_begin
        self._has_begun = False
        self.cluster_settings = settings.cluster.get(cluster, ClusterSettings())
        # A hanging command must not exceed the time limit of the whole operation.
        self._command_timeout_s = min(COMMAND_TIMEOUT_S, timeout_s)

    @cached_property
    def slurm(self) -> "Slurm":
        """Client of the cluster's Slurm."""
        from steward.slurm import Slurm

        return Slurm(self.cluster, self.cluster_settings, self._command_timeout_s)

    @cached_property
    def machine(self) -> "ClusterQueries":
        """Queries of nodes, partitions, reservations and job details."""
        from steward.slurm.cluster import ClusterQueries

        return ClusterQueries(self.cluster, self.cluster_settings, self._command_timeout_s)

    @cached_property
    def cluster_changes(self) -> "ClusterChanges":
        """Changes to nodes, partitions and reservations."""
        from steward.slurm.cluster_changes import ClusterChanges

        return ClusterChanges(self.cluster, self.cluster_settings, self._command_timeout_s)

    @cached_property
    def jobs(self) -> "JobChanges":
        """Changes to jobs."""
        from steward.slurm.job_changes import JobChanges

        return JobChanges(self.cluster, self.cluster_settings, self._command_timeout_s)

    @cached_property
    def triggers(self) -> "Triggers":
        """Sets and clears Slurm's triggers."""
        from steward.slurm.triggers import Triggers

        return Triggers(self.cluster, self.cluster_settings, self._command_timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left until the time limit, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def begin(self) -> None:
        """Mark the end of all checks, see ``OperationContext.begin``.

        Raises:
            OperationTimeout: The time limit has passed.
            AuditUnavailable: The audit log cannot be written first.
            InvalidParameters, OperationForbidden: It would fill the audit log.
        """
        assert not self.dry_run, f"{self.ref} tried a change in a dry run"
        if self.remaining_s <= 0:
            raise OperationTimeout(f"{self.ref} took longer than {self.timeout_s:g} s", self.ref)
        if not self._has_begun:
            self._on_begin()
            self._has_begun = True

    def require_role(self, role: Role, owner_uid: int | None = None) -> None:
        """Check that the caller has this role on the cluster.

        Raises:
            OperationForbidden: The caller has not.
        """
        if not self._has_role(role, owner_uid):
            scope = f" of {self.cluster}" if self.cluster else ""
            raise OperationForbidden(
                f"permission denied: {self.ref} is for {_ROLE_NAMES[role]}{scope}", self.caller.user
            )

    def is_operator(self) -> bool:
        """Return whether the caller has operator rights."""
        return self._has_role("operator")

    def request_admission(self, jobs: str, job_id: int, *, restarts: int, starts_job: bool) -> None:
        """Ask the gate, as the caller, to admit a change.

        Steward sends changes as SlurmUser, so slurmctld does not see the caller. A service
        principal asks without a uid: that of its process may be root's, whose changes always pass.
        If the gate is unavailable, its outage policy applies.

        Raises:
            BankRefused: The gate rejects it, or is unavailable and its policy is to deny.
        """
        if not self.settings.bank.enabled:
            return
        from steward.bank.errors import BankRefused, GateUnavailable
        from steward.bank.gate.client import GateClient
        from steward.bank.gate.plugin_conf import is_denied_everywhere
        from steward.bank.gate.requests import VERSION, PluginRequest
        from steward.bank.records import JobRequest

        change = JobRequest(uid=-1, job_id=job_id, released=starts_job)
        uid, user = (self.caller.uid, self.caller.user) if self.caller.service is None else (-1, "")
        request = PluginRequest(
            v=VERSION, op="modify", cluster=self.cluster, job=change, jobs=jobs, by=uid
        )
        try:
            reply = GateClient(self.settings.state_dir).grant(request, user, restarts)
        except GateUnavailable as error:
            if is_denied_everywhere(self.settings):
                raise BankRefused(f"job {jobs} is unchanged: {error}", jobs) from error
            return
        if not reply.ok:
            raise BankRefused(reply.say, jobs)

    def call_action(self, name: str, request: dict[str, Any]) -> Any:
        """Run an action of another package for the same caller and return its reply.

        Raises:
            StewardError: The action's own error.
        """
        decoded = self._registry.decode(name, request)
        return self._registry.call(name, self.caller, decoded)

    def _has_role(self, role: Role, owner_uid: int | None = None) -> bool:
        """Return whether the caller has a role on the cluster, or owns the job."""
        # An operation without a cluster requires the role on every cluster.
        clusters = [self.cluster] if self.cluster else (list(self.settings.cluster) or [""])
        if role == "everyone":
            return True
        if role == "administrator":
            return all(self.access.is_administrator(self.caller, name) for name in clusters)
        if role == "owner" and self.caller.service is None and owner_uid == self.caller.uid:
            return bool(self.caller.user)
        return all(self.access.is_operator(self.caller, name) for name in clusters)


# Runner

log = logging.getLogger(__name__)

_REMOTE_METHODS: Final = frozenset({"munge", "token", "session"})
"""Authentication methods of callers on other hosts."""
_MAX_SPEAKER_LENGTH: Final = 64
"""Maximum length of a signing name, in characters."""


class OperationOutcome(Answer, frozen=True, kw_only=True):
    """Reply of automation.run: status and result of an operation.

    Attributes:
        id: Number in the audit log; 0 for a dry run or an operation that changes nothing.
        action: Name of the operation.
        cluster: Cluster it ran on; "" for an operation without a cluster.
        status: How it ended.
        parameters: Parameters it ran with, defaults included.
        result: Result, plain JSON.
        message: Error in one line; "" if none.
        dry_run: Whether it was a dry run.
        started: Start time, UTC.
        ended: End time, UTC.
    """

    id: int = 0
    action: str
    cluster: str = ""
    status: Ending = "succeeded"
    parameters: dict[str, Any]
    result: Any = None
    message: str = ""
    dry_run: bool = False
    started: datetime
    ended: datetime

    @property
    def has_changed_nothing(self) -> bool:
        """Whether it was a dry run, or the operation only reads."""
        return not self.id

    @property
    def exit_code(self) -> int:
        """Exit code of ``steward action run``: 1 if the operation failed."""
        return int(self.status != "succeeded")


class OperationRunner:
    """Runner of operations for people and rules.

    Args:
        settings: The whole configuration.
        access: Checks what a caller may see and do.
        registry: All actions, for operations that call other packages.
    """

    def __init__(self, settings: Settings, access: Access, registry: Registry) -> None:
        self._settings = settings
        self._access = access
        self._registry = registry
        self._audit: AuditLog | None = None

    def run(
        self,
        ref: str,
        parameters: Mapping[str, Any],
        caller: Caller,
        *,
        cluster: str = "",
        dry_run: bool = False,
        force: bool = False,
        speaker: str = "",
        timeout_s: float | None = None,
    ) -> OperationOutcome:
        """Run an operation.

        Args:
            ref: Name of the operation.
            parameters: Parameters, see
                :func:`steward.automation.operation.parse_operation_parameters`.
            caller: The caller.
            cluster: Cluster to run on; "" if only one is configured.
            dry_run: Report what would change, and change nothing.
            force: Override reasons and drains that other people set.
            speaker: Name that signs reasons; the caller if "".
            timeout_s: Time limit in seconds; None for the configured one.

        Returns:
            The outcome, also of a failure after something may have been changed.

        Raises:
            UnknownOperation: No operation has this name.
            InvalidParameters: The parameters are invalid.
            OperationForbidden: The caller lacks permission.
            StewardError: Any other error before the first change; nothing was changed.
        """
        operation, decoded = self._prepare(ref, parameters, caller)
        audited_run = _AuditedRun(self, operation, decoded, caller, force)
        context = self._create_context(
            *(operation, caller, cluster, speaker, timeout_s),
            dry_run=dry_run,
            force=force,
            audited_run=audited_run,
        )
        audited_run.context = context
        if operation.role != "owner":
            context.require_role(operation.role)
        return audited_run.run()

    def check(
        self,
        ref: str,
        parameters: Mapping[str, Any],
        caller: Caller,
        *,
        cluster: str = "",
        speaker: str = "",
    ) -> bool | None:
        """Return whether the change that an operation was to make is in effect.

        Returns:
            None if that cannot be determined.

        Raises:
            StewardError: Slurm cannot be queried now, or the parameters are invalid.
        """
        operation, decoded = self._prepare(ref, parameters, caller)
        if operation.check is None:
            return None
        context = self._create_context(
            operation, caller, cluster, speaker, None, dry_run=True, force=False
        )
        return operation.check(context, decoded)

    def close(self) -> None:
        """Close the audit log."""
        if self._audit is not None:
            self._audit.close()
            self._audit = None

    @property
    def audit(self) -> AuditLog:
        """Audit log, open for writing.

        Raises:
            AuditUnavailable: It cannot be opened now.
        """
        if self._audit is None:
            self._audit = AuditLog(self._settings.state_dir)
        return self._audit

    def _prepare(
        self, ref: str, parameters: Mapping[str, Any], caller: Caller
    ) -> tuple[Operation, Parameters]:
        """Find the operation, check that it is permitted here, and parse its parameters."""
        operation = find_operation(ref)
        if caller.service is not None:
            caller.service.require(ref)
        if not operation.remote and caller.how in _REMOTE_METHODS:
            raise OperationForbidden(
                f"permission denied: {ref} runs only for callers on this host", caller.user
            )
        return operation, parse_operation_parameters(operation, parameters)

    def _create_context(
        self,
        operation: Operation,
        caller: Caller,
        cluster: str,
        speaker: str,
        timeout_s: float | None,
        *,
        dry_run: bool,
        force: bool,
        audited_run: "_AuditedRun | None" = None,
    ) -> OperationRun:
        """Create the context of a run."""
        return OperationRun(
            *(operation.ref, self._settings, self._access, self._registry, caller),
            self._resolve_cluster(operation, cluster),
            speaker=(speaker or caller.signature)[:_MAX_SPEAKER_LENGTH],
            dry_run=dry_run,
            force=force,
            timeout_s=self._settings.actions.timeout_s if timeout_s is None else timeout_s,
            on_begin=(lambda: None) if audited_run is None else audited_run.begin,
        )

    def _resolve_cluster(self, operation: Operation, requested: str) -> str:
        """Resolve the cluster to run on.

        Raises:
            InvalidParameters: The cluster is unknown, or none is named of several.
        """
        clusters = self._settings.cluster
        if not operation.on_cluster:
            return requested
        if requested and requested not in clusters:
            names = ", ".join(clusters) or "none"
            raise InvalidParameters(
                f"unknown cluster {requested!r}: the clusters are {names}", requested
            )
        cluster = requested or (next(iter(clusters)) if len(clusters) == 1 else "")
        if not cluster:
            names = ", ".join(clusters) or "none"
            raise InvalidParameters(
                f"no cluster given: add --cluster; the clusters are {names}", ""
            )
        if not clusters[cluster].asks_slurm or clusters[cluster].remote:
            raise InvalidParameters(
                f"Slurm of cluster {cluster} cannot be queried from this host: run the action "
                "on its controller",
                cluster,
            )
        return cluster


class _AuditedRun:
    """Run of one operation, with its start and end in the audit log."""

    def __init__(
        self,
        runner: OperationRunner,
        operation: Operation,
        parameters: Parameters,
        caller: Caller,
        force: bool,
    ) -> None:
        self.context: OperationRun
        self._runner = runner
        self._operation = operation
        self._parameters = parameters
        self._caller = caller
        self._force = force
        self._started = utc_now()
        self._id = 0

    def begin(self) -> None:
        """Write the start of the operation to the audit log.

        Nobody can delete from the log: only operators may write without limits.

        Raises:
            AuditUnavailable: The log cannot be written.
            InvalidParameters: The parameters of a caller who is not an operator are too large.
            OperationForbidden: Such a caller has run too many operations.
        """
        caller, parameters = self._caller, dump_parameters(self._parameters)
        if not self.context.is_operator():
            self._require_small_entry(parameters)
        self._id = self._runner.audit.begin(
            AuditStart(
                started=self._started,
                action=self._operation.ref,
                cluster=self.context.cluster,
                uid=caller.uid,
                user=caller.user,
                how=caller.how if caller.service is None else f"service {caller.service.name}",
                speaker=self.context.speaker,
                force=self._force,
                parameters=parameters,
            )
        )

    def _require_small_entry(self, parameters: Mapping[str, Any]) -> None:
        """Reject an operation whose entries would fill the audit log, see :meth:`begin`."""
        ref = self._operation.ref
        if len(msgspec.json.encode(parameters)) > MAX_OWN_PARAMETER_BYTES:
            raise InvalidParameters(
                f"{ref}: the parameters have more than {MAX_OWN_PARAMETER_BYTES} bytes: name fewer "
                "jobs at once, or shorten the reason",
                ref,
            )
        since = self._started - timedelta(hours=1)
        if self._runner.audit.count_of_user(self._caller.uid, since) >= MAX_OWN_PER_HOUR:
            raise OperationForbidden(
                f"{ref} rejected: you ran {MAX_OWN_PER_HOUR} actions within an hour. Name "
                "several jobs in one action, or try again later",
                self._caller.user,
            )

    def run(self) -> OperationOutcome:
        """Run the operation and record how it ended."""
        try:
            result = self._operation.run(self.context, self._parameters)
        except StewardError as error:
            if not self._id:
                raise
            return self._record_failure(error)
        except BaseException as error:
            if self._id:
                self._record_end("failed", f"{type(error).__name__}: {error}", None)
            raise
        if not self._operation.only_reads and not self.context.dry_run and not self._id:
            # Nothing had to be changed; the request is recorded nevertheless.
            self.begin()
        return self._record_end("succeeded", "", result)

    def _record_failure(self, error: StewardError) -> OperationOutcome:
        """Record a failure after the operation began; a time-out if its time was used up."""
        timed_out = isinstance(error, OperationTimeout) or (
            isinstance(error, SlurmUnavailable) and self.context.remaining_s <= 0
        )
        result = error.result if isinstance(error, PartialFailure) else None
        return self._record_end("timeout" if timed_out else "failed", str(error), result)

    def _record_end(self, status: Ending, message: str, result: Any) -> OperationOutcome:
        """Record the end and return the outcome."""
        ended = utc_now()
        if self._id:
            try:
                self._runner.audit.end(self._id, status, message, result, at=ended)
            except StewardError as error:
                # The change is made: the caller must get the result, and the log shows it without
                # an end.
                log.error("cannot write the end of action %d to the audit log: %s", self._id, error)
        return OperationOutcome(
            id=self._id,
            action=self._operation.ref,
            cluster=self.context.cluster,
            status=status,
            parameters=dump_parameters(self._parameters),
            result=to_plain_json(result),
            message=message,
            dry_run=self.context.dry_run,
            started=self._started,
            ended=ended,
        )
