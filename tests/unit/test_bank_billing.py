from datetime import UTC, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON
from steward.bank.billing import (
    Pricing,
    compute_charge,
    compute_freed,
    ends_hold,
    find_charge,
    is_charged,
    is_piece_of,
    match_earlier_charge,
)
from steward.bank.errors import NoRate
from steward.bank.money import MICRO
from steward.bank.prices import compute_price
from steward.bank.records import Charge, Hold, Quote, Rate, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.usage import RunEvent
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel

PRICING = Pricing(
    settings=BankSettings(),
    rates=[Rate(cluster="c1", partition="debug", weights={"cpu": MICRO}, number=3)],
    zone="UTC",
)
START = NOON + timedelta(seconds=10)
RECORD = JobRecord(
    job_id=7,
    uid=1000,
    user="ada",
    account="Physics",
    partition="debug",
    state="COMPLETED",
    submit=NOON,
    start=START,
    end=START + timedelta(hours=1),
    tres_allocated="cpu=2,node=1",
)
FACT = RunEvent(job_id=7, first_submit=NOON, restarts=0, record=RECORD)
HOLD = Hold(id="h1", remaining=10 * MICRO, quote=Quote(amount=10 * MICRO, per_task=2 * MICRO))


def fact(**changes: object) -> RunEvent:
    record = msgspec.structs.replace(RECORD, **changes)
    return msgspec.structs.replace(FACT, record=record)


def test_a_run_is_charged_by_what_slurm_shows_of_it() -> None:
    charge = compute_charge("c1", FACT, PRICING, hold=HOLD)
    assert charge is not None
    assert (charge.amount, charge.rate, charge.hold) == (2 * MICRO, 3, "h1")
    assert (charge.account, charge.user, charge.why) == ("physics", "ada", "end")
    assert charge.key == f"c1/7/{int(NOON.timestamp())}/0/0"
    assert charge.use == ResourceUse(
        tres={"cpu": 2, "node": 1}, start=START, seconds=3600, state="COMPLETED"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"start": None},
        {"state": "REVOKED"},
        {"state": "REQUEUE_FED"},
        {"end": None},
    ],
)
def test_what_costs_nothing_or_cannot_be_told_yet(changes: dict[str, object]) -> None:
    assert compute_charge("c1", fact(**changes), PRICING) is None


def test_an_end_that_nobody_saw_is_when_it_was_found_to_be_over() -> None:
    unseen = fact(end=None, state="UNKNOWN")
    found = compute_charge("c1", unseen, PRICING, seen_at=START + timedelta(minutes=30))
    assert found is not None
    assert found.amount == MICRO


def test_an_imported_run_is_a_backfills() -> None:
    assert not is_charged(msgspec.structs.replace(FACT, source="slurmdbd"))
    assert is_charged(FACT)


def test_a_partition_without_a_rate_is_named() -> None:
    with pytest.raises(NoRate, match="partition other"):
        compute_charge("c1", fact(partition="other"), PRICING)


@given(
    cuts=st.lists(st.integers(1, 3599), unique=True, max_size=4).map(sorted),
    cpus=st.lists(st.integers(1, 64), min_size=5, max_size=5),
)
def test_pieces_of_a_resized_run_meet_without_gap_or_overlap(
    cuts: list[int], cpus: list[int]
) -> None:
    ends = [START + timedelta(seconds=cut) for cut in cuts]
    charges: list[Charge] = []
    begin = START
    for end, width in zip(ends, cpus, strict=False):
        piece = fact(state="RESIZING", start=begin, end=end, tres_allocated=f"cpu={width},node=1")
        told = msgspec.structs.replace(piece, piece_end=end)
        charge = compute_charge("c1", told, PRICING)
        assert charge is not None
        charges.append(charge)
        begin = end
    last = fact(tres_allocated="cpu=1,node=1")
    pieces = [one for one in charges if is_piece_of(one, last)]
    assert pieces == charges
    final = compute_charge("c1", last, PRICING, pieces=pieces)
    assert final is not None
    uses = [one.use for one in (*charges, final) if one.use is not None]
    assert sum(use.seconds for use in uses) == 3600
    assert len({one.key for one in (*charges, final)}) == len(cuts) + 1


def test_each_size_is_rid_of_its_own_suspended_time() -> None:
    cut = START + timedelta(minutes=20)
    first = fact(state="RESIZING", end=cut, suspended_s=120, tres_allocated="cpu=4,node=2")
    piece = compute_charge("c1", msgspec.structs.replace(first, piece_end=cut), PRICING)
    assert piece is not None
    last = msgspec.structs.replace(fact(suspended_s=420), suspended_before_s=120)
    rest = compute_charge("c1", last, PRICING, pieces=[piece])
    assert rest is not None
    assert [one.use.seconds for one in (piece, rest) if one.use] == [18 * 60, 35 * 60]
    # A later observation corrects the suspended time.
    known = msgspec.structs.replace(last, suspended_before_s=0)
    anew = compute_charge("c1", known, PRICING, pieces=[piece], earlier=rest)
    assert anew is not None
    assert anew.use is not None
    assert anew.use.seconds == 33 * 60


def test_a_former_jobs_pieces_are_none_of_this_run() -> None:
    old = Charge(
        cluster="c1",
        job_id=7,
        first_submit=NOON - timedelta(days=9),
        piece_us=to_micros(NOON - timedelta(days=9)),
    )
    assert not is_piece_of(old, FACT)


def test_what_a_hold_is_rid_of() -> None:
    assert (compute_freed(FACT, HOLD), ends_hold(FACT)) == (0, True)
    task = fact(array_job_id=5, array_task="3")
    assert (compute_freed(task, HOLD), ends_hold(task)) == (2 * MICRO, False)
    # Cancelled while they waited, before they had records of their own.
    rest = fact(array_job_id=7, array_task="4-6%2", start=None, state="CANCELLED")
    assert (compute_freed(rest, HOLD), ends_hold(rest)) == (6 * MICRO, False)
    requeued = fact(state="REQUEUED")
    assert (compute_freed(requeued, HOLD), ends_hold(requeued)) == (0, False)
    piece = msgspec.structs.replace(FACT, piece_end=RECORD.end)
    assert (compute_freed(piece, HOLD), ends_hold(piece)) == (0, False)


def test_a_run_whose_job_turns_out_to_be_older_is_charged_under_its_old_name() -> None:
    charge = compute_charge("c1", FACT, PRICING)
    earlier = compute_charge(
        "c1", msgspec.structs.replace(FACT, first_submit=NOON - timedelta(hours=1)), PRICING
    )
    assert charge is not None
    assert earlier is not None
    assert earlier.key != charge.key
    assert match_earlier_charge(earlier, [charge]).key == charge.key
    other = msgspec.structs.replace(earlier, restarts=1)
    assert match_earlier_charge(other, [charge]) == other


def node(cpus: int) -> NodeShape:
    return NodeShape(nodes="n1", cpus=cpus, usable_cpus=cpus, memory_mib=100)


def cluster(cpus: int = 8, *, exclusive: bool = False) -> ClusterModel:
    debug = PartitionModel(name="debug", shapes=((0, 1),), nodes=1, exclusive=exclusive)
    return ClusterModel(cluster="c1", shapes=(node(cpus),), partitions={"debug": debug})


def again(before: Charge, told: RunEvent, pricing: Pricing, why: str = "reconcile") -> Charge:
    found = compute_charge(*("c1", told, pricing), earlier=find_charge(told, [before]), reason=why)
    assert found is not None
    return found


def test_what_was_charged_is_not_priced_by_todays_cluster() -> None:
    ran = fact(nodelist="n1")
    shared = msgspec.structs.replace(PRICING, model=cluster())
    first = compute_charge("c1", ran, shared)
    assert first is not None
    dear = [*PRICING.rates, Rate(cluster="c1", partition="debug", weights={"cpu": 9}, number=4)]
    today = msgspec.structs.replace(
        PRICING,
        model=cluster(exclusive=True),
        rates=dear,
        settings=BankSettings(over_limit="charge", suspended=True),
    )
    fresh = compute_charge("c1", ran, today)
    assert fresh is not None
    assert fresh.amount != first.amount
    assert again(first, ran, today) == msgspec.structs.replace(first, why="reconcile")
    # What its record says otherwise is priced as it was then.
    shorter = fact(nodelist="n1", end=START + timedelta(minutes=30))
    found = again(first, shorter, today)
    assert (found.amount, found.rate, found.whole) == (MICRO, 3, False)
    # Another partition has another rate.
    moved = fact(nodelist="n1", partition="gpu")
    gpu = Rate(cluster="c1", partition="gpu", weights={"cpu": 5 * MICRO}, number=5)
    assert again(first, moved, msgspec.structs.replace(shared, rates=[*dear, gpu])).rate == 5


def test_nodes_that_were_charged_whole_stay_what_they_were() -> None:
    ran = fact(nodelist="n1")
    first = compute_charge(
        "c1", ran, msgspec.structs.replace(PRICING, model=cluster(exclusive=True))
    )
    assert first is not None
    assert (first.amount, first.whole) == (8 * MICRO, True)
    grown = msgspec.structs.replace(PRICING, model=cluster(64))
    assert again(first, ran, grown).amount == 8 * MICRO
    longer = again(first, fact(nodelist="n1", end=START + timedelta(hours=2)), grown)
    assert (longer.amount, longer.whole) == (16 * MICRO, True)
    # What it was given is another thing: then its nodes are looked at anew.
    other = again(first, fact(nodelist="n1", tres_allocated="cpu=3,node=1"), grown)
    assert (other.amount, other.whole) == (64 * MICRO, True)


def test_what_was_charged_before_the_cluster_was_seen_is_made_good() -> None:
    first = compute_charge("c1", fact(nodelist="n1"), PRICING)
    assert first is not None
    seen = msgspec.structs.replace(PRICING, model=cluster(exclusive=True))
    assert again(first, fact(nodelist="n1"), seen).amount == 8 * MICRO


def test_a_job_that_turns_out_to_have_been_alone_is_charged_so() -> None:
    pricing = msgspec.structs.replace(PRICING, model=cluster())
    first = compute_charge("c1", fact(nodelist="n1"), pricing)
    assert first is not None
    assert not first.whole
    assert again(first, fact(nodelist="n1", oversubscribe="NO"), pricing).amount == 8 * MICRO


@pytest.mark.parametrize(("minimum", "amounts"), [(10, (0, 2, 8)), (1, (0, 2, 0)), (3, (0, 2, 1))])
def test_the_minimum_is_charged_once_a_run(minimum: int, amounts: tuple[int, ...]) -> None:
    rate = Rate(cluster="c1", partition="debug", weights={"cpu": MICRO}, minimum=minimum * MICRO)
    pricing = msgspec.structs.replace(PRICING, rates=[rate])
    pieces: list[Charge] = []
    ends = [START + timedelta(microseconds=1), START + timedelta(hours=1)]
    for end in ends:
        piece = msgspec.structs.replace(fact(state="RESIZING", end=end), piece_end=end)
        charge = compute_charge("c1", piece, pricing, pieces=pieces)
        assert charge is not None
        pieces.append(charge)
    last = compute_charge("c1", fact(end=ends[-1]), pricing, pieces=pieces)
    assert last is not None
    every = [*pieces, last]
    assert tuple(one.amount // MICRO for one in every) == amounts
    assert [compute_price(one.use, rate, UTC).amount for one in every if one.use] == [
        one.amount for one in every
    ]
