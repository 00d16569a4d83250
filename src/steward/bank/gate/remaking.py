"""Holds made anew from the tokens of the jobs that Slurm shows.

Needed where gate.db was lost, where the machine went down with the last
commits, and where another host's gate decided until now. A token is taken at
its word only if its MAC is ours.
"""

import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from steward.bank.estimate import description_of
from steward.bank.gate import token
from steward.bank.gate.keeper import Keeper
from steward.bank.gate.purses import Open
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import micros
from steward.slurm import Slurm
from steward.slurm.job_states import FINISHED, WAITING

log = logging.getLogger(__name__)

_OVER_US: Final = 60_000_000
"""What an ended job held is kept so long for its charge to come, in µs."""


def shown(settings: Settings, cluster: str) -> list[JobRecord]:
    """The jobs of a cluster that carry a token of whomever.

    Raises:
        SlurmUnavailable: slurmctld does not answer.
    """
    queue = Slurm(cluster, settings.cluster[cluster]).queue()
    return [record for record in queue.records if token.find(record.admin_comment)]


def remake(keeper: Keeper, cluster: str, records: Iterable[JobRecord], now_us: int) -> int:
    """Place the holds that are missing; how many. Within one transaction of the store."""
    made = 0
    for record in sorted(records, key=_most_telling):
        found = token.genuine(
            record.admin_comment, keeper.secret, cluster, -1 if record.uid is None else record.uid
        )
        if found is None:
            if record.restarts == 0:
                log.warning("job %d of cluster %s carries a forged token", record.job_id, cluster)
            continue
        if found.id in keeper.purses.holds:
            continue
        _place(keeper, cluster, record, found, now_us)
        made += 1
    return made


def _most_telling(record: JobRecord) -> int:
    """Of an array's many records the one that still waits describes it best, ended ones least."""
    if record.state in WAITING:
        return 0
    return 2 if record.state in FINISHED else 1


def _place(
    keeper: Keeper, cluster: str, record: JobRecord, found: token.Token, now_us: int
) -> None:
    is_over = record.state in FINISHED
    payer = keeper.purses.payer_of(found.account)
    hold = Open(
        number=keeper.store.next_number(),
        id=found.id,
        # One of an ended job lapses by time alone: the queue's next look does not void it.
        origin="queue" if is_over else "submit",
        cluster=cluster,
        job_id=record.array_job_id or record.job_id,
        account=found.account,
        payer=payer,
        uid=-1 if record.uid is None else record.uid,
        user=record.user,
        amount=found.amount,
        remaining=found.amount,
        shares=keeper.purses.draw(payer, found.amount, now_us),
        confirmed=not is_over,
        started=record.state not in WAITING,
        created_us=micros(record.submit) if record.submit else now_us,
        expires_us=now_us + _OVER_US if is_over else 0,
    )
    description = description_of(msgspec.structs.replace(record, admin_comment=""))
    keeper.purses.add(hold)
    keeper.put_down(hold, None, description, now_us, why="made anew from its token")


class Remaking:
    """Asks each cluster until it has answered, or for as long as one may wait for it.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.waiting = [
            name for name, of in settings.cluster.items() if of.asks_slurm and not of.remote
        ]
        """Clusters that have not answered yet."""
        self._untried = max(1, len(self.waiting))

    @property
    def is_tried(self) -> bool:
        """Whether all have been asked once."""
        return self._untried <= 0

    def run(self, keeper: Keeper, now_us: int) -> None:
        """Ask the next of those that have not answered yet; one, as it may take its time."""
        self._untried -= 1
        if not self.waiting:
            return
        cluster = self.waiting.pop(0)
        try:
            records = shown(self._settings, cluster)
        except StewardError as error:
            # Asked again; a slurmctld that is down asks for no jobs either.
            log.debug("the holds of cluster %s cannot be made anew yet: %s", cluster, error)
            self.waiting.append(cluster)
            return
        with keeper.store.transaction():
            made = remake(keeper, cluster, records, now_us)
        if made:
            log.warning(
                "cluster %s: %d holds were made anew from their jobs' tokens", cluster, made
            )
