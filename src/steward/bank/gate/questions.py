"""What the gate is asked by Steward's own processes, and that changes nothing."""

from collections.abc import Iterator
from itertools import islice

import msgspec

from steward.bank.errors import BankUsage, NoEstimate
from steward.bank.gate.keeper import Keeper
from steward.bank.gate.purses import Open
from steward.bank.gate.shapes import Held, Means, Verdict, Wanted
from steward.bank.records import Description, Hold, Quote


class Questions:
    """Answers by the gate's state.

    Args:
        keeper: That state.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def means(self, account: str, user: str, now_us: int) -> Means:
        """What an account, and a user in it, can pay now.

        Raises:
            BankUsage: There is no such account.
        """
        if account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {account}", account)
        return self._keeper.purses.means(account, user, self._uid_of(account, user), now_us)

    def _uid_of(self, account: str, user: str) -> int:
        for picture in self._keeper.ground.pictures.values():
            for uid, name in picture.users.items():
                if user and name == user:
                    return uid
        for hold in self._keeper.purses.holds.values():
            if user and hold.user == user and hold.account == account:
                return hold.uid
        return -1

    def holds(self, wanted: Wanted) -> list[Hold]:
        """Open holds, in the order in which they were placed."""
        chosen = islice(self._chosen(wanted), wanted.limit)
        return [self._keeper.store.whole(hold) for hold in chosen]

    def held(self) -> list[Held]:
        """What is held of each account that anything is held of, by name."""
        sums: dict[str, tuple[int, int]] = {}
        for hold in self._keeper.purses.holds.values():
            payer = hold.payer or hold.account
            holds, held = sums.get(payer, (0, 0))
            sums[payer] = (holds + 1, held + hold.remaining)
        return [Held(account=name, holds=n, held=held) for name, (n, held) in sorted(sums.items())]

    def _chosen(self, wanted: Wanted) -> Iterator[Open]:
        purses = self._keeper.purses
        holds: Iterator[Open] = iter(purses.holds.values())
        if wanted.changed:
            holds = iter(purses.changed.values())
        elif wanted.cluster and wanted.job_id:
            found = purses.by_job.get((wanted.cluster, wanted.job_id))
            holds = iter([found] if found else [])
        if wanted.after:
            after = purses.holds.get(wanted.after)
            # Of 100,000 the last page is asked for, too: no more is done here than must be.
            for hold in holds:
                if hold is after:
                    break
        for hold in holds:
            if (
                wanted.account in ("", hold.account)
                and wanted.cluster in ("", hold.cluster)
                and wanted.user in ("", hold.user)
                and wanted.job_id in (0, hold.job_id)
            ):
                yield hold

    def quote(self, cluster: str, job: Description, user: str, now_us: int) -> Quote:
        """What a job may cost at the most.

        Raises:
            NoRate: Nothing says what its partition costs.
            NoEstimate: It cannot be told.
        """
        ground = self._keeper.ground
        if ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        case = self._keeper.deciding.case(cluster, job, user, now_us)
        return msgspec.structs.replace(
            ground.quote(cluster, case.job, now_us), account=case.account
        )

    def would(self, cluster: str, job: Description, user: str, now_us: int) -> Verdict:
        """What would be said of a job, if it were submitted now; nothing is held.

        Raises:
            NoEstimate: Its cluster was never pictured.
        """
        if self._keeper.ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        decision = self._keeper.deciding.submit(cluster, job, user, now_us)
        say = decision.say or decision.short
        return Verdict(ok=decision.ok, say=say, quote=decision.quote)

    def afford(self, cluster: str, job: Description, user: str, cost: int, now_us: int) -> Verdict:
        """What would be said of a job of which the cost is told; nothing is held.

        Raises:
            BankUsage: The gate has not been told of its account.
        """
        decision = self._keeper.deciding.afford(cluster, job, user, cost, now_us)
        if decision.account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {decision.account}", decision.account)
        return Verdict(
            ok=decision.ok,
            say=decision.say or decision.short,
            quote=decision.quote,
            chosen=self._keeper.ground.chosen(cluster, decision.account),
        )
