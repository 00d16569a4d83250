"""Runs operations: reads their parameters, asks who may, writes down what is done.

All who want something done come through here: the command line, the daemon's
socket, rules and packs.
"""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.automation.audit import Audit, AuditBegun, Ending
from steward.automation.catalogue import operation as operation_called
from steward.automation.describing import given, plain, read
from steward.automation.errors import DoneInPart, NotYours, OutOfTime, WrongParameters
from steward.automation.operation import Operation, Parameters
from steward.automation.work import Work
from steward.core.access import Access, Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.events import utc_now
from steward.slurm import SlurmUnavailable

log = logging.getLogger(__name__)

_FROM_ELSEWHERE: Final = frozenset({"munge", "token", "session"})
_LONGEST_SPEAKER: Final = 64


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an operation.

    Attributes:
        id: Its number in the audit log; 0 for what changes nothing, or was a dry run.
        ref: The operation.
        cluster: Where; "" for what is done on none.
        status: How it ended.
        parameters: As it was run, with defaults.
        result: What it gave, plain JSON.
        message: What went wrong, one line; "" for nothing.
        dry_run: Whether it only said what it would do.
        started: When, UTC.
        ended: When, UTC.
    """

    id: int = 0
    ref: str
    cluster: str = ""
    status: Ending = "succeeded"
    parameters: dict[str, Any]
    result: Any = None
    message: str = ""
    dry_run: bool = False
    started: datetime
    ended: datetime


class Runner:
    """Runs operations for people and rules.

    Args:
        settings: The whole configuration.
        access: Who may see and do what.
        registry: What other rooms can be asked for.
    """

    def __init__(self, settings: Settings, access: Access, registry: Registry) -> None:
        self._settings = settings
        self._access = access
        self._registry = registry
        self._audit: Audit | None = None

    def run(
        self,
        ref: str,
        parameters: Mapping[str, Any],
        asker: Asker,
        *,
        cluster: str = "",
        dry_run: bool = False,
        force: bool = False,
        speaker: str = "",
        timeout_s: float | None = None,
    ) -> Ran:
        """Run an operation.

        Args:
            ref: Its name.
            parameters: What it is given, see :func:`steward.automation.describing.read`.
            asker: Who wants it.
            cluster: Where; "" where there is only one.
            dry_run: Whether it only says what it would do.
            force: Whether reasons and drains of others are overridden.
            speaker: For whom a reason speaks; the asker if "".
            timeout_s: How long it may take, in seconds; the configuration's if None.

        Returns:
            What became of it, also where it went wrong after something may have been changed.

        Raises:
            UnknownOperation: There is no such operation.
            WrongParameters: The parameters are not what it takes.
            NotYours: The asker may not.
            StewardError: Whatever else stood against it; nothing was changed.
        """
        called, decoded = self._prepared(ref, parameters, asker)
        recorder = _Recorder(self, called, decoded, asker, force)
        work = self._work(
            *(called, asker, cluster, speaker, timeout_s),
            dry_run=dry_run,
            force=force,
            recorder=recorder,
        )
        recorder.work = work
        if called.right != "owner":
            work.needs(called.right)
        return recorder.ran()

    def check(
        self,
        ref: str,
        parameters: Mapping[str, Any],
        asker: Asker,
        *,
        cluster: str = "",
        speaker: str = "",
    ) -> bool | None:
        """Whether the change is there that an operation was to make.

        Returns:
            None where that cannot be seen.

        Raises:
            StewardError: It cannot be asked now, or the parameters are wrong.
        """
        called, decoded = self._prepared(ref, parameters, asker)
        if called.check is None:
            return None
        work = self._work(called, asker, cluster, speaker, None, dry_run=True, force=False)
        return called.check(work, decoded)

    def close(self) -> None:
        """Let go of the audit log."""
        if self._audit is not None:
            self._audit.close()
            self._audit = None

    @property
    def audit(self) -> Audit:
        """The audit log, for writing.

        Raises:
            AuditUnavailable: It cannot be opened now.
        """
        if self._audit is None:
            self._audit = Audit(self._settings.state_dir)
        return self._audit

    def _prepared(
        self, ref: str, parameters: Mapping[str, Any], asker: Asker
    ) -> tuple[Operation, Parameters]:
        called = operation_called(ref)
        if not called.remote and asker.how in _FROM_ELSEWHERE:
            raise NotYours(f"{ref} is not to be had from other hosts", asker.user)
        return called, read(called, parameters)

    def _work(
        self,
        called: Operation,
        asker: Asker,
        cluster: str,
        speaker: str,
        timeout_s: float | None,
        *,
        dry_run: bool,
        force: bool,
        recorder: "_Recorder | None" = None,
    ) -> Work:
        return Work(
            *(called.ref, self._settings, self._access, self._registry, asker),
            self._cluster(called, cluster),
            speaker=(speaker or asker.user or f"uid {asker.uid}")[:_LONGEST_SPEAKER],
            dry_run=dry_run,
            force=force,
            timeout_s=self._settings.actions.timeout_s if timeout_s is None else timeout_s,
            began=(lambda: None) if recorder is None else recorder.begin,
        )

    def _cluster(self, called: Operation, named: str) -> str:
        """The cluster that is meant.

        Raises:
            WrongParameters: There is no such one, or none is named of several.
        """
        known = self._settings.cluster
        if not called.on_cluster:
            return named
        if named and named not in known:
            names = ", ".join(known) or "none"
            raise WrongParameters(f"there is no cluster {named!r}: there are {names}", named)
        found = named or (next(iter(known)) if len(known) == 1 else "")
        if not found:
            names = ", ".join(known) or "none"
            raise WrongParameters(f"say on which cluster with --cluster: there are {names}", "")
        if not known[found].asks_slurm or known[found].remote:
            raise WrongParameters(f"Slurm of cluster {found} is not asked from here", found)
        return found


class _Recorder:
    """One run: what is written of it, and what is told at its end."""

    def __init__(
        self, runner: Runner, called: Operation, parameters: Parameters, asker: Asker, force: bool
    ) -> None:
        self.work: Work
        self._runner = runner
        self._called = called
        self._parameters = parameters
        self._asker = asker
        self._force = force
        self._started = utc_now()
        self._id = 0

    def begin(self) -> None:
        self._id = self._runner.audit.begin(
            AuditBegun(
                at=self._started,
                ref=self._called.ref,
                cluster=self.work.cluster,
                uid=self._asker.uid,
                user=self._asker.user,
                how=self._asker.how,
                speaker=self.work.speaker,
                force=self._force,
                parameters=given(self._parameters),
            )
        )

    def ran(self) -> Ran:
        """Run it, and write down how it ended."""
        try:
            result = self._called.run(self.work, self._parameters)
        except StewardError as error:
            if not self._id:
                raise
            return self._failed(error)
        except BaseException as error:
            if self._id:
                self._ended("failed", f"{type(error).__name__}: {error}", None)
            raise
        if self._called.changes and not self.work.dry_run and not self._id:
            # There was nothing left to be changed; that it was asked for is told all the same.
            self.begin()
        return self._ended("succeeded", "", result)

    def _failed(self, error: StewardError) -> Ran:
        timed_out = isinstance(error, OutOfTime) or (
            isinstance(error, SlurmUnavailable) and self.work.left_s <= 0
        )
        result = error.result if isinstance(error, DoneInPart) else None
        return self._ended("timeout" if timed_out else "failed", str(error), result)

    def _ended(self, status: Ending, message: str, result: Any) -> Ran:
        ended = utc_now()
        if self._id:
            try:
                self._runner.audit.end(self._id, status, message, result, at=ended)
            except StewardError as error:
                # It is done: whoever asked must be told how, and the log shows it without an end.
                log.error("the end of action %d is not in the audit log: %s", self._id, error)
        return Ran(
            id=self._id,
            ref=self._called.ref,
            cluster=self.work.cluster,
            status=status,
            parameters=given(self._parameters),
            result=plain(result),
            message=message,
            dry_run=self.work.dry_run,
            started=self._started,
            ended=ended,
        )
