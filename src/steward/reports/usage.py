"""Usage reports from job runs: by account, user and partition, wait times, job counts, waste.

One function for each report returns rows of :mod:`steward.reports.requests` from shares of a
:class:`ShareKind`, which come from day sums and from runs. ``reports.actions`` calls them. Resource
sums are seconds of a CPU, GPU or node.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import add, attrgetter, itemgetter
from typing import Any, Final

import msgspec

from steward.jobs.day_sum_queries import CountShare, DaySums, UsageShare, WaitShare, WasteShare
from steward.jobs.line_queries import LineFilter
from steward.jobs.sum_tables import COUNTS, USAGE, WAITS, Cube, round_wait
from steward.jobs.waste import Waste, measure_waste
from steward.reports.requests import (
    AccountRow,
    JobCountsRow,
    PartitionRow,
    UserRow,
    WaitRow,
    WasteRow,
)
from steward.reports.runs import ALL_FIELDS, FIELDS_WITHOUT_USE, Periods, RunPiece, RunPieces
from steward.slurm.job_states import FINISHED

_US: Final = 1_000_000
_MIB: Final = 1 << 20
_SUCCESS_STATE: Final = "COMPLETED"
_WASTE_GROUP: Final = len(WasteShare._fields) - len(Waste._fields)
"""Number of leading fields of a share of waste that name its group; the others are amounts."""

GroupKey = tuple[Any, ...]
SizeClass = tuple[int, int]


class UsageSum(msgspec.Struct):
    """Number of runs and resource seconds of one group in one period."""

    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0

    def add_share(self, share: UsageShare) -> None:
        """Add a share of usage."""
        self.jobs += share.jobs
        self.cpu_s += share.cpu_s
        self.gpu_s += share.gpu_s
        self.node_s += share.node_s

    @property
    def amounts(self) -> dict[str, int]:
        """Return the fields by their names in rows."""
        return {
            "jobs": self.jobs,
            "cpu_s": self.cpu_s,
            "gpu_s": self.gpu_s,
            "node_s": self.node_s,
        }


class ShareKind(msgspec.Struct, frozen=True):
    """Kind of shares that a report adds up, from sums and from runs.

    Attributes:
        share: Type of the shares.
        cube: Table with their sums.
        columns: Columns of the table to group the sums by.
        share_runs: Yields the shares of runs in each period that counts.
        round_share: Rounds a share of runs as sums are.
        is_summed: Whether sums are fine enough; else the report reads every run.
        fields: Number of fields to read of each piece; see :mod:`steward.reports.runs`.
    """

    share: type[Any]
    cube: Cube[Any]
    columns: tuple[str, ...]
    share_runs: Callable[[Iterable[RunPieces], Periods], Iterator[Any]]
    round_share: Callable[[Any], Any] | None = None
    is_summed: bool = True
    fields: int = FIELDS_WITHOUT_USE

    def can_sum(self, line_filter: LineFilter) -> bool:
        """Return whether sums are fine enough, and have the columns of a filter."""
        columns = {
            "account": line_filter.accounts,
            "user": line_filter.users,
            "uid": line_filter.uids or line_filter.scopes,
            "partition": line_filter.partitions,
        }
        filtered = {name for name, values in columns.items() if values}
        return self.is_summed and filtered <= {*self.cube.keys}

    def share_rounded(self, runs: Iterable[RunPieces], periods: Periods) -> Iterator[Any]:
        """Yield the shares of runs that are added to sums."""
        shares = self.share_runs(runs, periods)
        return shares if self.round_share is None else map(self.round_share, shares)


def share_usage(
    runs: Iterable[RunPieces], periods: Periods, group: tuple[str, ...]
) -> Iterator[UsageShare]:
    """Yield the usage of runs in each period that counts.

    Args:
        runs: The runs.
        periods: The periods to count them in.
        group: Fields by which the report counts runs: a resized run counts once in each group.
    """
    get_group = attrgetter("cluster", *group)
    parts = periods.parts
    for run in runs:
        counted: set[GroupKey] = set()
        for piece in run:
            for part, seconds in periods.split_seconds(piece):
                period, is_counted = parts[part]
                key = (period, get_group(piece))
                if is_counted:
                    yield _make_share(period, piece, seconds, jobs=int(key not in counted))
                counted.add(key)
        ended = periods.find_end_period(run)
        if ended is not None and parts[ended][1]:
            yield _make_share(parts[ended][0], run[-1], 0, jobs=0, is_end=True)


def share_waits(runs: Iterable[RunPieces], periods: Periods) -> Iterator[WaitShare]:
    """Yield the waits of runs that started in each period that counts."""
    for run in runs:
        first = run[0]
        part = periods.find_period(first.start_us) if first.start_us else None
        if part is None or not first.eligible_us or not periods.parts[part][1]:
            continue
        yield WaitShare(
            periods.parts[part][0],
            *(first.cluster, first.account, first.user, first.partition),
            cpus=first.cpus or first.requested_cpus,
            wait_s=max(0, first.start_us - first.eligible_us) // _US,
            runs=1,
        )


def share_counts(runs: Iterable[RunPieces], periods: Periods) -> Iterator[CountShare]:
    """Yield the number and usage of runs in each period that counts.

    A run that ended before it started counts in the period of its end, and one that ended within a
    second where it ran: a count of failures must include both.
    """
    parts = periods.parts
    for run in runs:
        counted: set[int] = set()
        last = run[-1]
        for piece in run:
            group = (piece.cluster, piece.account, last.state, piece.cpus or piece.requested_cpus)
            for part, seconds in periods.split_seconds(piece):
                period, is_counted = parts[part]
                if is_counted:
                    jobs = int(period not in counted)
                    amounts = (jobs, piece.cpus * seconds, piece.gpus * seconds)
                    yield CountShare(period, *group, *amounts)
                counted.add(period)
        if not last.start_us and last.end_us:
            ended = periods.find_period(last.end_us)
            if ended is not None and parts[ended][1]:
                group = (last.cluster, last.account, last.state, last.cpus or last.requested_cpus)
                yield CountShare(parts[ended][0], *group, 1, 0, 0)


def share_waste(runs: Iterable[RunPieces], periods: Periods) -> Iterator[WasteShare]:
    """Yield the waste of runs in the period of their end, if it counts."""
    for run in runs:
        part = periods.find_end_period(run)
        if part is not None and periods.parts[part][1]:
            last = run[-1]
            yield WasteShare(
                periods.parts[part][0],
                *(last.cluster, last.account, last.user, last.uid),
                *measure_waste(run),
            )


def cut_edges(sums: DaySums) -> Periods:
    """Return periods of which runs count at the edges alone, as sums cover the inner days."""
    bounds: list[int] = []
    parts: list[tuple[int, bool]] = []
    for period, (since_us, until_us) in enumerate(pairwise(sums.bounds_us)):
        inner = sums.inner[period] or (until_us, until_us)
        ends = ((since_us, inner[0], True), (*inner, False), (inner[1], until_us, True))
        for begin_us, end_us, is_edge in ends:
            if begin_us < end_us:
                bounds.append(begin_us)
                parts.append((period, is_edge))
    return Periods([*bounds, sums.bounds_us[-1]], parts)


def _make_share(
    period: int, piece: RunPiece, seconds: int, *, jobs: int, is_end: bool = False
) -> UsageShare:
    is_over = is_end and piece.state in FINISHED
    is_success = piece.state == _SUCCESS_STATE
    return UsageShare(
        period,
        *(piece.cluster, piece.account, piece.user, piece.uid, piece.partition, jobs),
        *(piece.cpus * seconds, piece.gpus * seconds, piece.nodes * seconds),
        completed=int(is_over and is_success),
        failed=int(is_over and not is_success),
    )


def _round_wait_share(share: WaitShare) -> WaitShare:
    return share._replace(wait_s=round_wait(share.wait_s))


_ACCOUNT_GROUP: Final = ("account", "user", "uid")
ACCOUNT_USAGE: Final = ShareKind(
    UsageShare, USAGE, _ACCOUNT_GROUP, partial(share_usage, group=_ACCOUNT_GROUP)
)
USER_USAGE: Final = ShareKind(UsageShare, USAGE, _ACCOUNT_GROUP, partial(share_usage, group=()))
PARTITION_USAGE: Final = ShareKind(
    UsageShare, USAGE, ("partition",), partial(share_usage, group=("partition",))
)
COUNTS_BY_SIZE: Final = ShareKind(CountShare, COUNTS, ("account", "state", "cpus"), share_counts)
WASTE: Final = ShareKind(WasteShare, USAGE, _ACCOUNT_GROUP, share_waste, fields=ALL_FIELDS)
CLUSTER_USAGE: Final = ShareKind(UsageShare, USAGE, (), partial(share_usage, group=()))
PARTITION_WAITS: Final = ShareKind(
    WaitShare, WAITS, ("partition", "wait_s"), share_waits, _round_wait_share
)


def report_accounts(shares: Iterable[UsageShare]) -> list[AccountRow]:
    """Report usage by account: a total row for each account, then its users, largest first."""
    get_group = attrgetter("cluster", *_ACCOUNT_GROUP)
    by_user: dict[tuple[int, GroupKey], UsageSum] = defaultdict(UsageSum)
    for share in shares:
        by_user[share.period, get_group(share)].add_share(share)
    by_account: dict[tuple[int, str, str], UsageSum] = defaultdict(UsageSum)
    for (period, (cluster, account, _, _)), usage in by_user.items():
        total = by_account[period, cluster, account]
        total.jobs += usage.jobs
        total.cpu_s += usage.cpu_s
        total.gpu_s += usage.gpu_s
        total.node_s += usage.node_s
    user_rows = [
        (
            (period, cluster, account, -usage.cpu_s, user, str(uid)),
            AccountRow(
                period=period, cluster=cluster, account=account, user=user, uid=uid, **usage.amounts
            ),
        )
        for (period, (cluster, account, user, uid)), usage in by_user.items()
    ]
    account_rows = [
        (
            (period, cluster, account, float("-inf"), "", ""),
            AccountRow(
                period=period, cluster=cluster, account=account, user="", uid=None, **usage.amounts
            ),
        )
        for (period, cluster, account), usage in by_account.items()
    ]
    return [row for _, row in sorted([*account_rows, *user_rows], key=lambda usage: usage[0])]


class _UserSum(UsageSum):
    accounts: set[str] = msgspec.field(default_factory=set)
    completed: int = 0
    failed: int = 0


def report_users(shares: Iterable[UsageShare], top: int) -> list[UserRow]:
    """Report usage by user over all accounts, largest first.

    Args:
        shares: The usage, by :data:`ACCOUNT_USAGE` at least.
        top: Number of users for each cluster and period; 0 for all.
    """
    sums: dict[tuple[int, str, str, int | None], _UserSum] = defaultdict(_UserSum)
    for share in shares:
        user_sum = sums[share.period, share.cluster, share.user, share.uid]
        user_sum.add_share(share)
        user_sum.accounts.add(share.account)
        user_sum.completed += share.completed
        user_sum.failed += share.failed
    rows = [
        UserRow(
            period=period,
            cluster=cluster,
            user=user,
            uid=uid,
            accounts=tuple(sorted(filter(None, user_sum.accounts))),
            completed=user_sum.completed,
            failed=user_sum.failed,
            **user_sum.amounts,
        )
        for (period, cluster, user, uid), user_sum in sums.items()
    ]
    rows.sort(key=lambda row: (row.period, row.cluster, -row.cpu_s, row.user, str(row.uid)))
    return _limit_rows(rows, top)


def _limit_rows(rows: list[Any], top: int) -> list[Any]:
    """Return the first rows of each period and cluster; all if ``top`` is 0."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    limited = []
    for row in rows:
        counts[row.period, row.cluster] += 1
        if top <= 0 or counts[row.period, row.cluster] <= top:
            limited.append(row)
    return limited


Waits = dict[int, int]
"""Numbers of runs by their wait, in seconds."""


def _summarize_waits(waits: Waits) -> dict[str, int]:
    """Return count, median, 90th percentile and maximum of waits; {} for none."""
    if not waits:
        return {}
    ordered = sorted(waits.items())
    counts = list(accumulate(runs for _, runs in ordered))
    started = counts[-1]

    def find(number: int) -> int:
        return ordered[bisect_right(counts, number)][0]

    return {
        "started": started,
        "median_s": find((started - 1) // 2),
        "p90_s": find((9 * started + 9) // 10 - 1),
        "longest_s": ordered[-1][0],
    }


def report_partitions(shares: Iterable[UsageShare | WaitShare]) -> list[PartitionRow]:
    """Report usage and waits by partition."""
    usage: dict[tuple[int, str, str], UsageSum] = defaultdict(UsageSum)
    waits: dict[tuple[int, str, str], Waits] = defaultdict(Counter)
    for share in shares:
        key = (share.period, share.cluster, share.partition)
        if isinstance(share, WaitShare):
            waits[key][share.wait_s] += share.runs
        else:
            usage[key].add_share(share)
    return [
        PartitionRow(
            period=period,
            cluster=cluster,
            partition=partition,
            **usage.get((period, cluster, partition), UsageSum()).amounts,
            **_summarize_waits(waits.get((period, cluster, partition), {})),
        )
        for period, cluster, partition in sorted({*usage, *waits})
    ]


def make_size_classifier(bounds: Sequence[int]) -> Callable[[int], SizeClass]:
    """Make a function that returns the size class of a number of CPUs: its least and most, or 0."""
    ordered = sorted({bound for bound in bounds if bound > 0})

    def classify(cpus: int) -> SizeClass:
        number = bisect_right(ordered, cpus)
        least = ordered[number - 1] if number else 0
        return least, ordered[number] - 1 if number < len(ordered) else 0

    return classify


def choose_waits(group: str, bounds: Sequence[int]) -> ShareKind:
    """Return the kind of shares from which to report waits by a requested group."""
    # Sums know a size up to a power of two.
    is_known = all(bound & (bound - 1) == 0 for bound in bounds if bound > 0)
    return msgspec.structs.replace(
        PARTITION_WAITS,
        columns=("partition", "cpus", "wait_s") if group else PARTITION_WAITS.columns,
        is_summed=not group or (group == "size" and is_known),
    )


def report_waits(shares: Iterable[WaitShare], group: str, bounds: Sequence[int]) -> list[WaitRow]:
    """Report waits by partition and by the requested group."""
    classify = make_size_classifier(bounds)
    waits: dict[tuple[int, str, str, str, str, SizeClass], Waits] = defaultdict(Counter)
    for share in shares:
        key = (
            *(share.period, share.cluster, share.partition),
            share.account if group == "account" else "",
            share.user if group == "user" else "",
            classify(share.cpus) if group == "size" else (0, 0),
        )
        waits[key][share.wait_s] += share.runs
    return [
        WaitRow(
            period=period,
            cluster=cluster,
            partition=partition,
            account=account,
            user=user,
            least_cpus=least,
            most_cpus=most,
            **_summarize_waits(waits_of_group),
        )
        for (period, cluster, partition, account, user, (least, most)), waits_of_group in sorted(
            waits.items(), key=itemgetter(0)
        )
    ]


def report_job_counts(shares: Iterable[CountShare], bounds: Sequence[int]) -> list[JobCountsRow]:
    """Count runs by account, size and state."""
    classify = make_size_classifier(bounds)
    sums: dict[tuple[int, GroupKey], UsageSum] = defaultdict(UsageSum)
    for share in shares:
        key = (share.cluster, share.account, classify(share.cpus), share.state)
        usage = sums[share.period, key]
        usage.jobs += share.jobs
        usage.cpu_s += share.cpu_s
        usage.gpu_s += share.gpu_s
    return [
        JobCountsRow(
            period=period,
            cluster=cluster,
            account=account,
            least_cpus=least,
            most_cpus=most,
            state=state,
            jobs=usage.jobs,
            cpu_s=usage.cpu_s,
            gpu_s=usage.gpu_s,
        )
        for (period, (cluster, account, (least, most), state)), usage in sorted(
            sums.items(), key=lambda item: item[0]
        )
    ]


def report_waste(shares: Iterable[WasteShare], top: int) -> list[WasteRow]:
    """Report allocated and unused resources of runs that ended, largest CPU waste first.

    Args:
        shares: The waste.
        top: Number of users for each cluster and period; 0 for all.
    """
    sums: dict[GroupKey, list[int]] = defaultdict(lambda: [0] * len(Waste._fields))
    for share in shares:
        amounts = sums[share[:_WASTE_GROUP]]
        amounts[:] = map(add, amounts, share[_WASTE_GROUP:])
    rows = []
    for (period, cluster, account, user, uid), amounts in sums.items():
        waste = Waste(*amounts)
        if not waste.ended:
            # Sums also have users whose runs went on after the period.
            continue
        row = WasteRow(
            period=period,
            cluster=cluster,
            account=account,
            user=user,
            uid=uid,
            jobs=waste.ended,
            measured=waste.measured,
            cpu_s=waste.measured_cpu_s,
            used_cpu_s=waste.used_cpu_ms // 1000,
            memory_measured=waste.memory_measured,
            memory_byte_s=waste.memory_mib_s * _MIB,
            used_memory_byte_s=waste.used_memory_mib_s * _MIB,
            limited=waste.limited,
            limit_s=waste.limit_s,
            elapsed_s=waste.elapsed_s,
        )
        rows.append(row)
    rows.sort(
        key=lambda row: (
            *(row.period, row.cluster, row.used_cpu_s - row.cpu_s),
            *(row.user, row.account, str(row.uid)),
        )
    )
    return _limit_rows(rows, top)
