"""Which charges were changed though no run ended: a server elsewhere is told of them, too.

A comparison with Slurm's records, a rate that came late and a refund each enter an act
in the ledger, whoever orders them. Those acts are read here in their order, so that no
way to correct a charge has to know that there is a server elsewhere.
"""

import logging
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.consumer import cursor_name
from steward.bank.ledger import ChargeRow
from steward.bank.records import Charge
from steward.bank.told_charges import TOLD
from steward.bank.upkeep import BANK
from steward.core.config import Settings
from steward.core.moments import moment
from steward.core.sqlite import SqliteUnavailable
from steward.extensions.mybrc.outgoing import Told, told_change
from steward.jobs import Jobs, database_path
from steward.slurm.people import People

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger, Transaction

log = logging.getLogger(__name__)

_ACTS: Final = 500
_UNMARKED: Final = 10_000
"""So many acts that concern nobody elsewhere are read anew after a restart."""


class Noticing:
    """Puts corrections into the outbox.

    Args:
        settings: The whole configuration.
        ledger: What is read, and where the outbox is.
        owners: Whose jobs are.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", owners: "Owners") -> None:
        self._ledger = ledger
        self._clusters = frozenset(settings.cluster)
        self._owners = owners
        self._name = f"{cursor_name(settings)}.corrections"
        with ledger.transaction() as t:
            known = t.mark(self._name)
            if not known:
                # What was corrected before anybody was to be told is what they know already.
                known = str(t.seq)
                t.set_mark(self._name, known)
        self._position = self._marked = int(known)

    def turn(self) -> None:
        """Put what was corrected since the last time into the outbox.

        Raises:
            LedgerUnavailable: The ledger's database is away.
        """
        while True:
            with self._ledger.reading() as t:
                found = t.charges.changed(self._position, _ACTS)
                upto = found[-1][0] if len(found) == _ACTS else t.seq
                began = moment(int(t.mark("began") or 0))
                # What the end of a run brings about for the first time is told by its event.
                corrected = [row for _, who, row in found if who != BANK or row.versions > 1]
                told = list(self._to_tell(t, corrected, began))
            if told or upto - self._marked >= _UNMARKED:
                with self._ledger.transaction() as t:
                    for one in told:
                        told_change(t, one)
                    t.set_mark(self._name, str(upto))
                self._marked = upto
            self._position = upto
            if len(found) < _ACTS:
                return

    def _to_tell(
        self, t: "Transaction", rows: Iterable[ChargeRow], began: datetime
    ) -> Iterator[Told]:
        jobs: dict[tuple[str, int, datetime], set[str]] = {}
        for row in rows:
            one = row.charge
            if one.source == TOLD or one.cluster not in self._clusters or _end(one) < began:
                continue
            accounts = jobs.setdefault((one.cluster, one.job_id, one.first_submit), set())
            # Who paid before has to be told that it is theirs no more.
            accounts.update(each.charge.account for each in t.charges.versions(one.key))
        for (cluster, job_id, first), accounts in jobs.items():
            own = [
                row.charge
                for row in t.charges.of_job(cluster, job_id, first)
                if row.charge.source != TOLD
            ]
            last = max(own, key=_order)
            uid = self._owners.uid(last)
            told = _told(last, -1 if uid is None else uid)
            # Last whom it belongs to: that is how the job stands.
            for account in sorted(accounts, key=lambda name: (name == last.account, name)):
                yield msgspec.structs.replace(told, account=account)


class Owners:
    """Whose jobs are: by jobs.db, else by their users' names.

    Args:
        state_dir: Where jobs.db is.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = database_path(state_dir)
        self._people = People()
        self._jobs: Jobs | None = None

    def uid(self, charge: Charge) -> int | None:
        """The uid of the user of a job that was charged; None where nobody knows it."""
        try:
            if self._jobs is None:
                self._jobs = Jobs(self._path)
            facts = self._jobs.run_facts(charge.cluster, [charge.job_id])
        except SqliteUnavailable as error:
            log.debug("whose job %d was is told by its name: %s", charge.job_id, error)
            facts = []
        for fact in facts:
            if fact.first_submit == charge.first_submit and fact.record.uid is not None:
                return fact.record.uid
        return int(charge.user) if charge.user.isdecimal() else self._people.uid(charge.user)

    def close(self) -> None:
        """Let go of jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def _told(charge: Charge, uid: int) -> Told:
    """A job as its last charge knows it."""
    use = charge.use
    start = use.start if use is not None else None
    return Told(
        cluster=charge.cluster,
        job_id=charge.job_id,
        first_submit=charge.first_submit,
        account=charge.account,
        uid=uid,
        partition=charge.partition,
        qos=use.qos if use is not None else "",
        state=use.state if use is not None else "",
        start=start,
        end=_end(charge) if start is not None else None,
        cpus=use.tres.get("cpu", 0) if use is not None else 0,
    )


def _end(charge: Charge) -> datetime:
    """When it ended, as far as the charge says that."""
    use = charge.use
    if use is None or use.start is None:
        return charge.first_submit
    return use.start + timedelta(seconds=use.seconds)


def _order(charge: Charge) -> tuple[int, datetime]:
    return charge.restarts, _end(charge)
