"""What becomes of jobs in the queue that their account cannot pay: the site's rule, by partition.

A job that is held for it in Slurm is remembered in the ledger, so that it is let
go as soon as it can be paid, whoever was restarted meanwhile.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.gate.link import GateLink
from steward.bank.gate.shapes import Claim
from steward.bank.records import Hold
from steward.bank.settings import Unpaid as Rule
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.jobs import Job
from steward.slurm.errors import ScrontabJob, SlurmError
from steward.slurm.job_changes import Changing, name_of
from steward.slurm.job_states import base_state

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger

log = logging.getLogger(__name__)

PREFIX: Final = "steward: "
"""Before every reason that a job's user reads, so that it is known who speaks."""

_STRANDED: Final = "its account has no allocation that can pay it now"
_WAITING: Final = frozenset({"PENDING", "REQUEUED"})

Key = tuple[str, int]
Verb = Literal["hold", "release", "cancel", "comment"]


class Kept(msgspec.Struct):
    """A job that is held in Slurm because it cannot be paid.

    Attributes:
        jobs: Its names, as Slurm's commands take them, and whether Slurm was told.
        why: The reason that its user reads.
        is_stranded: Whether its hold is open, and only lost the allocation that was to pay it.
    """

    jobs: dict[str, bool]
    why: str
    is_stranded: bool = False


class Unpaid:
    """Applies the rule, and takes it back.

    Args:
        settings: The whole configuration.
        ledger: Remembers which jobs are held.
        link: The way to the gate.
        changing: Changes jobs of a cluster, by its name.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        link: GateLink,
        changing: Mapping[str, Changing] | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._changing = changing or {
            name: Changing(name, of)
            for name, of in settings.cluster.items()
            if of.asks_slurm and not of.remote
        }
        self._kept: dict[str, dict[str, Kept]] = {}
        self._warned: set[Key] = set()
        self._is_off = False

    def rule(self, partition: str) -> Rule:
        """What the site says of jobs for a partition; of several the first one's rule."""
        for name in partition.split(","):
            of = self._settings.bank.partition.get(name)
            if of is not None and of.unpaid is not None:
                return of.unpaid
        return self._settings.bank.unpaid

    def apply(self, key: Key, jobs: Sequence[Job], claim: Claim, why: str) -> bool:
        """Do what the rule says to a job that cannot be paid; nothing while the gate is off.

        Returns:
            Whether it is done; False where slurmctld is away, so that it is to be tried again.

        Raises:
            Unavailable: The ledger or the gate is away.
        """
        if self.is_off():
            return True
        record = jobs[0].record
        rule = self.rule(record.partition)
        waiting = [job for job in jobs if base_state(job.record.state) in _WAITING]
        line = next(iter(why.splitlines()), "it cannot be paid").removeprefix("Steward: ")
        self._warn(key, rule, line)
        if rule in ("warn", "credit"):
            self._link.cover(msgspec.structs.replace(claim, mode_credit=True))
        if rule == "cancel":
            tried = [
                self._try(key[0], "cancel", name_of(job.record), PREFIX + line) for job in jobs
            ]
            return all(tried)
        if rule == "warn":
            for job in jobs:
                self._try(key[0], "comment", name_of(job.record), PREFIX + line)
        elif rule == "hold" and waiting:
            self._hold(key, [name_of(job.record) for job in waiting], line, is_stranded=False)
        return True

    def is_off(self) -> bool:
        """Whether an administrator has switched the gate off: jobs may then be unpaid."""
        is_off = os.path.lexists(self._settings.gate.off_switch)
        if is_off != self._is_off:
            self._is_off = is_off
            text = "%s is there: nothing is done to jobs that cannot be paid"
            log.warning(text if is_off else "%s is gone", self._settings.gate.off_switch)
        return is_off

    def paid(self, key: Key) -> None:
        """Let a job go that was held, now that it can be paid.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        self._warned.discard(key)
        kept = self._of(key[0]).get(str(key[1]))
        if kept is not None and not kept.is_stranded:
            self._release(key, kept)

    def held(self, cluster: str) -> list[int]:
        """Leaders of the jobs that are held because they cannot be paid."""
        return [int(name) for name, kept in self._of(cluster).items() if not kept.is_stranded]

    def strand(self, holds: Sequence[Hold], jobs: Mapping[Key, Sequence[Job]]) -> None:
        """Hold the jobs whose allocation ended, and let those go that another one pays now.

        Args:
            holds: Those that no allocation can pay now.
            jobs: Jobs in the queue, by cluster and leader.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        stranded = {(hold.cluster, hold.job_id) for hold in holds if hold.job_id}
        for key in stranded:
            waiting = [job for job in jobs.get(key, ()) if base_state(job.record.state) in _WAITING]
            if waiting and str(key[1]) not in self._of(key[0]) and not self.is_off():
                self._warn(key, "hold", _STRANDED)
                names = [name_of(job.record) for job in waiting]
                self._hold(key, names, _STRANDED, is_stranded=True)
        for cluster in self._changing:
            for name, kept in list(self._of(cluster).items()):
                key = (cluster, int(name))
                if kept.is_stranded and key not in stranded:
                    self._release(key, kept)

    def forget(self, cluster: str, leader: int) -> None:
        """The job is over: nothing is to be released any more.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        self._warned.discard((cluster, leader))
        if self._of(cluster).pop(str(leader), None) is not None:
            self._store(cluster)

    def forget_gone(self, cluster: str, waiting: Collection[int]) -> None:
        """Forget the jobs that are in the queue no more: their ids may be others' one day.

        Args:
            cluster: The cluster's name.
            waiting: Leaders of all jobs that are not over.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        of_cluster = self._of(cluster)
        gone = [name for name in of_cluster if int(name) not in waiting]
        for name in gone:
            self._warned.discard((cluster, int(name)))
            del of_cluster[name]
        if gone:
            self._store(cluster)

    def _hold(self, key: Key, names: list[str], why: str, *, is_stranded: bool) -> None:
        of_cluster = self._of(key[0])
        kept = of_cluster.setdefault(str(key[1]), Kept({}, why, is_stranded))
        todo = [name for name in names if not kept.jobs.get(name)]
        if not todo:
            return
        # Remembered first: a job that is held and forgotten would wait for ever.
        kept.jobs |= dict.fromkeys(todo, False)
        self._store(key[0])
        for name in todo:
            kept.jobs[name] = self._try(key[0], "hold", name, PREFIX + why)
        self._store(key[0])

    def _release(self, key: Key, kept: Kept) -> None:
        left = [name for name in kept.jobs if not self._try(key[0], "release", name)]
        if left:
            # slurmctld is away: they are let go when it is back.
            kept.jobs = dict.fromkeys(left, True)
            return
        log.info("cluster %s: job %s can be paid now, and is released", *key)
        del self._of(key[0])[str(key[1])]
        self._store(key[0])

    def _try(self, cluster: str, verb: Verb, *words: str) -> bool:
        """Change something in Slurm; whether Slurm could say anything of it.

        What cannot be held, a job of scrontab, is cancelled.
        """
        slurm = self._changing.get(cluster)
        if slurm is None:
            return True
        try:
            getattr(slurm, verb)(*words)
        except ScrontabJob as error:
            log.warning("%s", error)
            return verb != "hold" or self._try(cluster, "cancel", *words)
        except SlurmError as error:
            log.warning("%s", error)
            return not isinstance(error, Unavailable)
        return True

    def _warn(self, key: Key, rule: str, why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("cluster %s: job %s cannot be paid (%s): %s", *key, rule, why)

    def _of(self, cluster: str) -> dict[str, Kept]:
        if cluster not in self._kept:
            with self._ledger.reading() as t:
                text = t.mark(_mark(cluster))
            self._kept[cluster] = msgspec.json.decode(text or "{}", type=dict[str, Kept])
        return self._kept[cluster]

    def _store(self, cluster: str) -> None:
        with self._ledger.transaction() as t:
            t.set_mark(_mark(cluster), msgspec.json.encode(self._kept[cluster]).decode())


def _mark(cluster: str) -> str:
    return f"unpaid:{cluster}"
