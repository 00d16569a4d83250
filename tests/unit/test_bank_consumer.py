import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.bank import BY, HOUR, balance, begin, feed, found_bank, rate
from harness.bank import life as life_of
from harness.events import NOON, at
from harness.gate import OPEN_GATE
from harness.imports import imported, imported_run
from harness.jobs import record
from harness.site import Site
from steward.bank.consumer import IDLE_S, BankConsumer
from steward.bank.errors import GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import GateStatus, PluginRequest
from steward.bank.gate.server import GateServer
from steward.bank.gate_sync import CONFIG_CHECK_S, MODEL_REFRESH_S, ClusterModels
from steward.bank.ledger import Account, RejectedJob
from steward.bank.money import MICRO
from steward.bank.records import Hold, JobRequest, ModeRule
from steward.bank.settings import BankSettings
from steward.core.errors import Unavailable
from steward.core.events import (
    CONTROLLER_STATE,
    HOLD_PLACED,
    JOB_SEEN,
    JOB_STATE,
    QUEUE_POLLED,
    RUN_END,
    ControllerState,
    Event,
    QueuePolled,
)
from steward.core.poll_status import COST_FACTOR
from steward.core.waits import Stop
from steward.jobs import JobsConsumer
from steward.slurm.client import Slurm
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel
from steward.slurm.state_files import StateFiles

SHAPE = NodeShape(nodes="n[1-64]", count=64, cpus=64, usable_cpus=64, cores=64, memory_mib=65536)


def picture() -> ClusterModel:
    debug = PartitionModel(name="debug", shapes=((0, 64),), nodes=64)
    return ClusterModel(
        cluster="c1",
        taken_us=1,
        zone="UTC",
        partitions={"debug": debug},
        default_partition="debug",
        shapes=(SHAPE,),
        selects="cr_core",
        users={1000: "ada"},
    )


class Bank(Site):
    """A Site with the bank's consumer and a running gate."""

    def __init__(self, directory: Path) -> None:
        bank = BankSettings(enabled=True, reconcile_s=1.0)
        super().__init__(directory, bank=bank, gate=OPEN_GATE)
        found_bank(self, 100)
        with self.ledger.transaction() as t:
            t.modes.set(ModeRule(mode="enforce", cluster="c1"), BY)
            t.set_mark("picture:c1", msgspec.json.encode(picture()).decode())
        begin(self, NOON - timedelta(hours=1))
        self.link = GateClient(self.settings.state_dir)
        self.said: list[Event] = []
        self.start_gate()
        self.charger = self.make()
        self.turn()

    def start_gate(self) -> None:
        self._stop = Stop()
        server = GateServer(self.settings)
        self._gate = threading.Thread(target=server.run, args=(self._stop, lambda: None))
        self._gate.start()
        deadline = time.monotonic() + 30
        while not self._answers() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            self.link.get_status()
        except GateUnavailable:
            return False  # it opens its socket in this moment
        return True

    def stop_gate(self) -> None:
        self._stop.set()
        self._gate.join(10)

    def make(self) -> BankConsumer:
        return BankConsumer(self.settings, lambda: self.now)

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.charger.tick(self.said.extend)

    def happen(self, events: Sequence[Event]) -> None:
        """Apply Slurm's observations to jobs.db and the bank."""
        begin = len(self.journal)
        feed(self, events)
        self.take([e for e in self.journal[begin:] if e.kind in BankConsumer.kinds])

    def take(self, events: Sequence[Event]) -> None:
        if events:
            self.charger.apply(events, self.charger.cursor() + 1, self.said.extend)
        self.turn()

    def holds(self) -> list[Hold]:
        return self.link.list_holds()

    def held(self) -> int:
        return sum(hold.remaining for hold in self.holds())

    def submit(self, job: JobRequest) -> str:
        """Ask the gate as slurmctld's plugin does; return the token for the job."""
        ask = PluginRequest(v=1, op="submit", cluster="c1", job=job)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.settings.gate_socket)
            connection.sendall(msgspec.json.encode(ask) + b"\n")
            said = msgspec.json.decode(connection.makefile("rb").readline())
        assert said["ok"], said
        return str(said["admin_comment"])

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def close(self) -> None:
        self.charger.close()
        self.stop_gate()
        super().close()


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    bank = Bank(tmp_path)
    yield bank
    bank.close()


def life(job_id: int, begin: int = 0, **fields: Any) -> list[Event]:
    return life_of(job_id, begin=begin, time_limit_s=7200, **fields)


def test_a_job_without_a_hold_is_given_one_and_charged_once(bank: Bank) -> None:
    pending, running, ended = life(1)
    bank.happen([pending])
    (hold,) = bank.holds()
    assert (hold.job_id, hold.origin, hold.account) == (1, "queue", "physics")
    assert hold.amount >= 2 * 2 * HOUR
    bank.happen([running])
    assert bank.holds()[0].started
    bank.happen([ended])
    assert bank.holds() == []
    assert balance(bank) == 98 * HOUR
    with bank.ledger.reading() as t:
        (row,) = t.charges.list_of_job("c1", 1)
    assert (row.charge.hold, row.charge.why, row.overdraw) == (hold.id, "end", 0)
    # The same events once more, as after a crash in front of the cursor.
    bank.take([e for e in feed(bank, []) if e.kind in BankConsumer.kinds])
    assert balance(bank) == 98 * HOUR
    assert bank.ledger.check() == []
    assert HOLD_PLACED in {event.kind for event in bank.said}


def test_imported_runs_are_charged_once_and_observed_ones_keep_their_charge(bank: Bank) -> None:
    bank.happen(life(1))
    assert balance(bank) == 98 * HOUR
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "qos": "normal"}

    def ran(job_id: int, start: float, end: float, **more: Any) -> Event:
        return imported_run(job_id, start - 1, end, start=at(start), **fields, **more)

    events = [
        ran(1, 1, 7201),
        ran(2, 1, 3601),
        ran(3, -7200, -3700),  # ended before the bank started
        ran(4, 1, 1801, state="RESIZING"),
        ran(4, 1, 3601),
    ]
    for _ in range(2):
        bank.happen([imported(*events)])
        bank.happen([imported(*events[1:])])
        assert balance(bank) == 94 * HOUR
    assert bank.ledger.check() == []


def test_an_import_without_the_restart_count_charges_no_run_again(bank: Bank) -> None:
    pending, running, _ended = life(1)
    shown = as_running(running)
    bank.happen([pending, running])
    bank.happen([record(1, 0, "REQUEUED", seen=601, end=601, **shown)])
    later = {**shown, "start": at(900), "restarts": 1}
    bank.happen([record(1, 601, "RUNNING", seen=901, **later)])
    bank.happen([record(1, 601, "COMPLETED", seen=1801, end=1801, source="jobcomp", **later)])
    spent = balance(bank)
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "qos": "normal"}
    bank.happen([imported(imported_run(1, 601, 1801, start=at(900), **fields))])
    assert balance(bank) == spent
    bank.happen([imported(imported_run(1, 2000, 5600, start=at(2000), **fields))])
    assert balance(bank) == spent - 2 * HOUR


@pytest.mark.parametrize("source", ["one event", "two events", "observed first"])
def test_each_imported_run_of_a_requeued_job_has_the_rate_of_its_first_submission(
    bank: Bank, source: str
) -> None:
    with bank.ledger.transaction() as t:
        t.rates.add(msgspec.structs.replace(rate("debug", 10 * HOUR), valid_from=at(1000)), BY)
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "qos": "normal"}
    first = imported_run(1, 0, 601, start=at(1), state="REQUEUED", **fields)
    second = imported_run(1, 1200, 4801, start=at(1201), restarts=1, **fields)
    other = imported_run(1, 6000, 9601, start=at(6001), **fields)  # the id was used again
    if source == "one event":
        bank.happen([imported(first, second)])
    elif source == "two events":
        bank.happen([imported(first)])
        bank.happen([imported(second)])
    else:
        shown = {name: getattr(first.body.record, name) for name in ("nodelist", "tres_allocated")}
        bank.happen([record(1, 0, "REQUEUED", seen=601, start=at(1), end=601, **fields, **shown)])
        bank.happen([imported(second)])
    bank.happen([imported(other)])
    with bank.ledger.reading() as t:
        charges = [row.charge for row in t.charges.list_of_job("c1", 1)]
    assert sorted((charge.first_submit, charge.restarts, charge.amount) for charge in charges) == [
        (at(0), 0, 2 * HOUR // 6),
        (at(0), 1, 2 * HOUR),
        (at(6000), 0, 20 * HOUR),
    ]


def test_an_imported_later_run_waits_until_jobs_db_has_the_first(bank: Bank) -> None:
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "qos": "normal"}
    second = imported_run(1, 1200, 4801, start=at(1201), restarts=1, **fields)
    feed(bank, [])
    position = bank.consumer(JobsConsumer).cursor()
    early = msgspec.structs.replace(imported(second), id=position + 2)
    with pytest.raises(Unavailable, match=rf"jobs.db .* {position + 2}"):
        bank.take([early])
    bank.take([msgspec.structs.replace(early, id=position + 1)])
    assert balance(bank) == 98 * HOUR


def as_running(running: Event) -> dict[str, Any]:
    """Return a record of a run with the fields of its start record."""
    fields = ("account", "partition", "qos", "cpus", "tres_allocated", "nodelist", "start")
    return {name: getattr(running.body.record, name) for name in fields}


def test_a_requeued_job_that_slurm_forgot_holds_nothing(bank: Bank) -> None:
    pending, running, _ended = life(1)
    bank.happen([pending, running])
    shown = as_running(running)
    bank.happen([record(1, 0, "REQUEUED", seen=3611, end=3601, **shown)])
    (hold,) = bank.holds()
    spent = 100 * HOUR - balance(bank)
    assert spent > 0
    bank.happen([record(1, 0, "UNKNOWN", seen=3700, **shown)])
    assert bank.holds() == [], hold
    assert balance(bank) == 100 * HOUR - spent


def test_a_job_whose_requeue_slurm_forgot_holds_nothing_when_it_ends(bank: Bank) -> None:
    pending, running, _ended = life(1)
    bank.happen([pending, running])
    shown = as_running(running)
    told = {**shown, "source": "jobcomp"}
    bank.happen([record(1, 0, "REQUEUED", seen=3601, end=3601, **told)])
    (hold,) = bank.holds()
    spent = 100 * HOUR - balance(bank)
    bank.happen([record(1, 0, "FAILED", seen=3602, end=3602, **told)])
    assert bank.holds() == [], hold
    assert 100 * HOUR - balance(bank) > spent


def test_a_hold_of_an_array_whose_id_another_job_has_is_free(bank: Bank) -> None:
    shown: dict[str, Any] = {"account": "physics", "partition": "debug", "tres_requested": "cpu=2"}
    array = record(1, 0, array_job_id=1, array_task="0-2", time_limit_s=3600, **shown)
    bank.happen([array])
    (hold,) = bank.holds()
    # slurmctld was killed and forgot it; no poll ran while the other one had its id.
    bobs: dict[str, Any] = {**shown, "uid": 1001, "user": "bob"}
    bank.happen([record(1, 30, "COMPLETED", seen=31, end=31, source="jobcomp", **bobs)])
    bank.later(200)
    bank.take([event for event in bank.tick() if event.kind in BankConsumer.kinds])
    assert hold.id not in {one.id for one in bank.holds()}


def test_events_that_come_again_change_nothing(bank: Bank) -> None:
    events = life(1)
    feed(bank, events)
    mine = [e for e in bank.journal if e.kind in BankConsumer.kinds]
    for _ in range(3):
        bank.take(mine)
    assert balance(bank) == 98 * HOUR
    assert bank.holds() == []
    with bank.ledger.reading() as t:
        assert len(t.settlements.list_after(0)) <= 1


def test_a_gate_that_is_new_learns_everything_again(bank: Bank) -> None:
    pending, running, ended = life(1)
    bank.happen([pending])
    bank.stop_gate()
    for path in Path(bank.settings.state_dir).glob("gate.db*"):
        path.unlink()
    bank.start_gate()
    bank.turn()
    state = bank.link.get_status()
    assert (state.rules >= 0, "c1" in state.pictures) == (True, True)
    bank.later(120)
    bank.turn()
    assert [hold.job_id for hold in bank.holds()] == [1]
    bank.happen([running, ended])
    assert (bank.holds(), balance(bank)) == ([], 98 * HOUR)


def test_a_job_that_vanished_is_given_its_money_back(bank: Bank) -> None:
    pending, *_ = life(1)
    bank.happen([pending])
    assert bank.held()
    cancelled = record(*(1, 0, "CANCELLED"), seen=60, end=59, account="physics", partition="debug")
    bank.happen([cancelled])
    assert (bank.held(), balance(bank)) == (0, 100 * HOUR)


def test_what_cannot_be_paid_is_remembered_until_it_can(bank: Bank) -> None:
    pending, *_ = life(1, tres_requested="cpu=64,node=1", cpus=64, tres_allocated="")
    bank.happen([pending])
    assert bank.held() == 0
    with bank.ledger.reading() as t:
        assert '"1"' in t.read_mark("unpaid:c1")
    with bank.ledger.transaction() as t:
        t.transfers.deposit("physics", 1000 * MICRO, BY)
    bank.turn()
    assert [hold.job_id for hold in bank.holds() if hold.amount] == [1]
    with bank.ledger.reading() as t:
        assert t.read_mark("unpaid:c1") == "{}"


def test_while_the_gate_is_off_nothing_is_done_to_jobs_that_cannot_be_paid(bank: Bank) -> None:
    off = Path(bank.settings.gate_off)
    off.touch()
    pending, *_ = life(1, tres_requested="cpu=64,node=1", cpus=64, tres_allocated="")
    bank.happen([pending])
    with bank.ledger.reading() as t:
        assert t.read_mark("unpaid:c1") in ("", "{}")
    off.unlink()
    bank.later(120)
    bank.turn()
    with bank.ledger.reading() as t:
        assert '"1"' in t.read_mark("unpaid:c1")


@pytest.mark.parametrize("account", ["physics", "closed"])
def test_a_job_that_runs_unpaid_keeps_others_from_the_same_money(bank: Bank, account: str) -> None:
    if account == "closed":
        with bank.ledger.transaction() as t:
            t.accounts.create(Account(name="closed", parent_pays=True, parent="physics"), BY)
            t.accounts.change("closed", BY, closed=True)
        bank.turn()
    fields: dict[str, Any] = {"tres_allocated": "cpu=64,node=1", "cpus": 64, "account": account}
    _, running, ended = life(1, **fields)
    bank.happen([running])
    (hold,) = bank.holds()
    assert (hold.started, hold.amount > 100 * HOUR) == (True, True)
    another = JobRequest(uid=1000, account="physics", partition="debug", time_limit_min=60)
    verdict = bank.link.get_verdict("c1", another)
    assert "overdrawn" in verdict.say
    assert not verdict.ok
    bank.later(120)
    bank.turn()
    assert [one.remaining for one in bank.holds()] == [hold.remaining]
    bank.happen([ended])
    assert (bank.held(), balance(bank)) == (0, 36 * HOUR)
    assert bank.link.get_verdict("c1", another).ok


def test_of_an_unpaid_array_only_what_runs_is_held_for(bank: Bank) -> None:
    fields: dict[str, Any] = {"cpus": 64, "array_job_id": 5}
    _, running, _ = life(6, array_task="1", tres_allocated="cpu=64,node=1", **fields)
    pending, *_ = life(5, array_task="2-9", tres_requested="cpu=64,node=1", **fields)
    bank.happen([pending, running])
    (hold,) = bank.holds()
    assert (hold.job_id, hold.quote and hold.quote.tasks) == (5, 1)
    for _ in range(2):
        bank.later(120)
        bank.turn()
        assert bank.holds() == [hold]
        with bank.ledger.reading() as t:
            assert '"5"' in t.read_mark("unpaid:c1")


def test_an_array_is_held_for_as_its_dearest_task_asks(bank: Bank) -> None:
    fields: dict[str, Any] = {"array_job_id": 5}
    _, running, _ = life(6, array_task="0", **fields)
    waiting, *_ = life(5, array_task="1", tres_requested="cpu=2,mem=1G,node=1", **fields)
    bank.happen([waiting, running])
    (before,) = bank.holds()
    assert before.quote
    # Its user extends the pending task; the running one stays as it is.
    (longer, *_) = life(
        5, array_task="1", tres_requested="cpu=2,mem=1G,node=1", **fields | {"nodes": 1}
    )
    body = msgspec.structs.replace(
        longer.body, record=msgspec.structs.replace(longer.body.record, time_limit_s=10 * 7200)
    )
    seen = msgspec.structs.replace(longer, key="longer", kind=JOB_STATE, body=body)
    bank.happen([seen])
    bank.later(120)
    bank.turn()
    (hold,) = bank.holds()
    assert hold.quote
    assert hold.quote.time_s >= 72000
    assert hold.remaining == 2 * hold.quote.per_task > before.remaining


def test_what_a_waiting_job_asks_for_no_more_is_free_again(bank: Bank) -> None:
    asked: dict[str, Any] = {"account": "physics", "partition": "debug", "cpus": 2, "nodes": 1}
    asked |= {"tres_requested": "cpu=2,mem=1G,node=1", "qos": "normal"}
    bank.happen([record(5, 0, seen=1, time_limit_s=72000, **asked)])
    (before,) = bank.holds()
    (longer, shorter) = (record(5, 0, seen=at, time_limit_s=7200, **asked) for at in (30, 31))
    changed = msgspec.structs.replace(longer, key="shorter", kind=JOB_STATE, body=shorter.body)
    bank.happen([changed])
    bank.later(30)
    bank.turn()
    (hold,) = bank.holds()
    assert hold.quote
    assert hold.amount == hold.remaining == hold.quote.amount < before.remaining / 5


def test_an_unpaid_array_that_is_over_is_forgotten(bank: Bank) -> None:
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "array_job_id": 5}
    asked: dict[str, Any] = {"tres_requested": "cpu=64,node=1", "cpus": 64, "nodes": 1, **fields}
    bank.happen([record(5, 0, seen=1, array_task="1-9", **asked)])
    with bank.ledger.reading() as t:
        assert '"5"' in t.read_mark("unpaid:c1")
    bank.happen([record(5, 0, "CANCELLED", seen=60, end=59, array_task="1-9", **fields)])
    bank.later(120)
    bank.turn()
    with bank.ledger.reading() as t:
        assert t.read_mark("unpaid:c1") == "{}"


def test_a_requeued_jobs_next_run_is_covered_and_charged_by_itself(bank: Bank) -> None:
    fields: dict[str, Any] = {
        "account": "physics",
        "partition": "debug",
        "tres_allocated": "cpu=1,node=1",
        "time_limit_s": 7200,
        "cpus": 1,
    }
    shown = {**fields, "nodelist": "n1"}
    start, again = NOON + timedelta(seconds=10), NOON + timedelta(seconds=8000)
    bank.happen([record(1, 0, seen=1, **fields)])
    bank.happen([record(1, 0, "RUNNING", seen=11, start=start, **shown)])
    bank.happen([record(1, 0, "COMPLETED", seen=3611, start=start, end=3610, **shown)])
    assert (bank.held(), balance(bank)) == (0, 99 * HOUR)
    # Its user requeues it, without a question to the gate.
    bank.happen([record(1, 4000, seen=4001, restarts=1, **fields)])
    assert [hold.job_id for hold in bank.holds()] == [1]
    bank.happen([record(1, 4000, "RUNNING", seen=8001, start=again, restarts=1, **shown)])
    last = record(1, 4000, "COMPLETED", seen=9801, start=again, end=9800, restarts=1, **shown)
    bank.happen([last])
    assert (bank.held(), balance(bank)) == (0, 99 * HOUR - HOUR // 2)


def poll(event_id: int) -> Event:
    """Return the event of a poll of the whole queue that began at this minute."""
    began = datetime.now(UTC) + timedelta(minutes=1)
    return Event(
        kind=QUEUE_POLLED,
        cluster="c1",
        key="queue.polled:1",
        at=began,
        seen_at=began,
        source="snapshot",
        body=QueuePolled(began=began),
        id=event_id,
    )


def test_a_poll_voids_what_it_does_not_show_once_jobs_db_has_what_it_shows(bank: Bank) -> None:
    bank.submit(JobRequest(uid=1000, account="physics", time_limit_min=60, min_cpus=1))
    (unseen,) = bank.holds()
    shown = msgspec.structs.replace(life(9)[0], id=len(bank.journal) + 1)
    bank.take([shown, poll(shown.id + 1)])
    assert unseen in bank.holds()
    feed(bank, [shown])
    bank.turn()
    assert [hold.job_id for hold in bank.holds()] == [9]


def test_a_poll_waits_for_no_event_that_jobs_db_itself_tells(bank: Bank) -> None:
    for event in life(1):
        bank.happen([event])
    bank.submit(JobRequest(uid=1000, account="physics", time_limit_min=60, min_cpus=1))
    end = next(event for event in bank.journal if event.kind == RUN_END)
    far = 1 << 40
    bank.take([msgspec.structs.replace(end, id=far), poll(far + 1)])
    assert bank.holds() == []


def test_a_job_that_is_over_for_nobody_to_tell_loses_its_hold_to_the_sweep(bank: Bank) -> None:
    pending, running, ended = life(1)
    bank.happen([pending])
    # jobs.db hears of the end, the bank does not.
    feed(bank, [running, ended])
    assert bank.held()
    bank.later(3600 * 24)
    bank.turn()
    assert bank.held() == 0
    assert JOB_SEEN in {event.kind for event in bank.journal}


def test_a_partition_without_a_rate_stops_nobody(bank: Bank) -> None:
    for event in life(1, partition="nothing"):
        bank.happen([event])
    for event in life(2):
        bank.happen([event])
    assert balance(bank) == 98 * HOUR
    with bank.ledger.reading() as t:
        assert int(t.read_mark("unpriced:c1")) > 0


def test_what_was_settled_and_refused_long_ago_is_forgotten(bank: Bank) -> None:
    def settled() -> list[int]:
        with bank.ledger.reading() as t:
            return [one.seq for one in t.settlements.list_after(0)]

    def refused() -> list[str]:
        with bank.ledger.reading() as t:
            return [one.id for one in t.rejections.list_since(NOON - timedelta(days=365))]

    for job in (1, 2):
        for event in life(job, begin=job * 5000):
            bank.happen([event])
    first = settled()
    assert len(first) == 2
    with bank.ledger.transaction() as t:
        for days in (1, 91):
            at = bank.now - timedelta(days=days)
            t.rejections.add(
                RejectedJob(id=f"{days}", at=at, mode="enforce", cluster="c1", reason="dear")
            )
    bank.later(90_000)
    bank.turn()
    # From here on they are known to have been taken: they go when a day has passed.
    assert (settled(), refused()) == (first, ["1"])
    for event in life(3, begin=100_000):
        bank.happen([event])
    bank.later(80_000)
    bank.turn()
    assert settled()[:2] == first
    bank.later(10_000)
    bank.turn()
    (last,) = settled()
    assert last > first[-1]
    bank.later(90_000)
    bank.turn()
    # The last stays, so that it is known where numbers go on.
    assert settled() == [last]
    assert bank.ledger.check() == []


@pytest.mark.parametrize(
    ("body", "is_expired"),
    [
        (ControllerState(up=True, reconfigured=True), True),
        (ControllerState(up=True, restarted=True), True),
        (ControllerState(up=True), True),
        (ControllerState(up=False), False),
    ],
)
def test_a_slurmctld_with_a_new_configuration_is_asked_for_its_picture(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, body: ControllerState, is_expired: bool
) -> None:
    billing = {"cpu": "1"}

    def shown(self: Slurm, zone: str = "") -> ClusterModel:
        debug = msgspec.structs.replace(picture().partitions["debug"], billing=billing)
        at_us = int(time.time() * 1_000_000)
        return msgspec.structs.replace(picture(), partitions={"debug": debug}, taken_us=at_us)

    def known() -> dict[str, str]:
        with bank.ledger.reading() as t:
            kept = t.read_mark("picture:c1")
        return msgspec.json.decode(kept, type=ClusterModel).partitions["debug"].billing

    monkeypatch.setattr(Slurm, "read_model", shown)
    monkeypatch.setattr(Slurm, "read_configuration_mark", lambda _: "the same")
    of = msgspec.structs.replace(bank.settings.cluster["c1"], slurm=True)
    bank.settings = msgspec.structs.replace(bank.settings, cluster={"c1": of})
    bank.charger.close()
    bank.charger = bank.make()
    bank.turn()
    assert known() == {"cpu": "1"}
    billing = {"cpu": "2"}
    bank.turn()
    assert known() == {"cpu": "1"}, "a picture is kept for a while"
    event = Event(
        kind=CONTROLLER_STATE,
        cluster="c1",
        key="controller.state:1",
        at=NOON,
        seen_at=NOON,
        source="states",
        body=body,
        id=1,
    )
    bank.take([event])
    assert bank.charger.cursor() == 1
    assert (known() == {"cpu": "2"}) == is_expired


def test_one_late_answer_of_slurmctld_does_not_put_the_next_question_off(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, late_s, asked_s = 0.0, 0.0, list[float]()

    def mark(_: Slurm) -> str:
        nonlocal now_s
        asked_s.append(now_s)
        now_s += late_s
        return "the same"

    monkeypatch.setattr(Slurm, "read_model", lambda *_: picture())
    monkeypatch.setattr(Slurm, "read_configuration_mark", mark)
    of = msgspec.structs.replace(bank.settings.cluster["c1"], slurm=True)
    settings = msgspec.structs.replace(bank.settings, cluster={"c1": of})
    pictures = ClusterModels(settings, bank.ledger, lambda: now_s)

    def waits_s() -> float:
        """Return the seconds between two questions."""
        nonlocal now_s
        count = len(asked_s)
        while len(asked_s) == count:
            now_s += 0.5
            pictures.query_due()
        return asked_s[-1] - asked_s[-2]

    pictures.query_due()
    assert waits_s() == CONFIG_CHECK_S
    late_s = 2.5
    assert waits_s() == CONFIG_CHECK_S
    assert waits_s() <= 2 * late_s, "it was late once"
    assert waits_s() == COST_FACTOR * late_s, "it was late twice"


@pytest.mark.parametrize(("cost_s", "count"), [(0.0, 5), (1.0, 2), (5.0, 1)])
def test_a_picture_is_taken_again_until_the_nodes_have_registered(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, cost_s: float, count: int
) -> None:
    now_s, booted = 0.0, "once"
    taken_s = list[float]()

    def shown(*_: object) -> ClusterModel:
        nonlocal now_s
        taken_s.append(now_s)
        now_s += cost_s
        return picture()

    monkeypatch.setattr(Slurm, "read_model", shown)
    monkeypatch.setattr(Slurm, "read_configuration_mark", lambda _: booted)
    of = msgspec.structs.replace(bank.settings.cluster["c1"], slurm=True)
    settings = msgspec.structs.replace(bank.settings, cluster={"c1": of})
    pictures = ClusterModels(settings, bank.ledger, lambda: now_s)

    def pass_time(seconds: float) -> list[float]:
        """Return the seconds at which polls ran while this much time passed."""
        nonlocal now_s
        began_s, count = now_s, len(taken_s)
        while now_s < began_s + seconds:
            now_s += 0.5
            pictures.query_due()
        return [at_s - began_s for at_s in taken_s[count:]]

    pass_time(5 * MODEL_REFRESH_S)
    booted = "again"
    restarted = pass_time(MODEL_REFRESH_S)
    assert restarted[0] <= CONFIG_CHECK_S
    gaps = [later - sooner for sooner, later in pairwise(restarted)]
    assert len(restarted) == count
    assert gaps == sorted(gaps), "the gaps grow"
    assert all(gap >= COST_FACTOR * cost_s for gap in gaps)
    if not cost_s:
        assert restarted[1] <= CONFIG_CHECK_S + 6, "slurmd registers within seconds"
    pass_time(2 * MODEL_REFRESH_S)
    pictures.expire("c1")
    assert len(pass_time(MODEL_REFRESH_S)) <= 2, "it has not changed, though slurmctld was away"
    assert len(pass_time(5 * MODEL_REFRESH_S)) <= 5, "a settled cluster is pictured by the minute"


def test_unchanged_state_files_save_queries(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stamp = 0.0, (("node_state", 1, 1),)
    queries = list[str]()

    def read_mark(_: Slurm) -> str:
        queries.append("mark")
        return "the same"

    def read_model(*_: object) -> ClusterModel:
        queries.append("model")
        return picture()

    monkeypatch.setattr(Slurm, "read_model", read_model)
    monkeypatch.setattr(Slurm, "read_configuration_mark", read_mark)
    monkeypatch.setattr(StateFiles, "read_stamp", lambda _: stamp)
    of = msgspec.structs.replace(bank.settings.cluster["c1"], slurm=True)
    settings = msgspec.structs.replace(bank.settings, cluster={"c1": of})
    models = ClusterModels(settings, bank.ledger, lambda: now_s)

    def pass_time(seconds: float) -> dict[str, int]:
        nonlocal now_s
        queries.clear()
        end_s = now_s + seconds
        while now_s < end_s:
            models.query_due()
            now_s += 0.5
        return {name: queries.count(name) for name in ("mark", "model")}

    pass_time(2 * MODEL_REFRESH_S)
    assert pass_time(MODEL_REFRESH_S) == {"mark": 0, "model": 1}
    pass_time(MODEL_REFRESH_S / 2)
    stamp = (("node_state", 1, 2),)
    assert pass_time(2 * CONFIG_CHECK_S) == {"mark": 1, "model": 0}
    models.expire("c1")
    assert pass_time(2 * CONFIG_CHECK_S) == {"mark": 1, "model": 1}


def test_an_idle_bank_asks_the_gate_only_when_something_changed(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = 0
    now_s = time.monotonic()
    real_query = GateClient.get_status

    def query(client: GateClient) -> GateStatus:
        nonlocal queries
        queries += 1
        return real_query(client)

    bank.charger.close()
    slow = msgspec.structs.replace(bank.settings.bank, reconcile_s=60.0)
    settings = msgspec.structs.replace(bank.settings, bank=slow)
    bank.charger = BankConsumer(settings, lambda: bank.now, idle_s=IDLE_S)
    monkeypatch.setattr("steward.bank.consumer.time.monotonic", lambda: now_s)

    def pass_time(seconds: int) -> int:
        """Return the number of complete ticks, one a second at most."""
        nonlocal now_s, queries
        queries = 0
        for _ in range(seconds):
            bank.charger.tick(bank.said.extend)
            now_s += 1
        return queries

    pass_time(20)
    with monkeypatch.context() as patch:
        patch.setattr(GateClient, "get_status", query)
        assert pass_time(100) <= 4
        with bank.ledger.transaction() as t:
            t.transfers.deposit("physics", 5, BY)
        assert pass_time(1) == 1, "a deposit reaches the gate at once"
        pass_time(20)
        bank.stop_gate()
        bank.start_gate()
        assert pass_time(1) == 1, "a new gate gets what it lacks at once"
        pass_time(20)
        bank.submit(JobRequest(uid=1000, account="physics", time_limit_min=1, min_cpus=1))
        assert pass_time(1) == 1, "so does the journal what the gate did"
        pass_time(20)
        bank.charger.apply([life(1)[0]], bank.charger.cursor() + 1, bank.said.extend)
        assert pass_time(1) == 1, "events are followed at once"


@pytest.mark.parametrize("is_late", [False, True])
def test_two_jobs_of_one_id_in_a_batch_have_a_hold_each(bank: Bank, is_late: bool) -> None:
    first = life(1)
    bank.happen(first[:2])
    (old,) = bank.holds()
    # Slurm reused the id; the gate admitted the second job.
    token = bank.submit(JobRequest(uid=1000, account="physics", time_limit_min=120, min_cpus=2))
    (new,) = (hold for hold in bank.holds() if hold.id != old.id)
    second = life(1, begin=9000, admin_comment=token)[0]
    said = feed(bank, [first[2], second])
    shown = [event for event in (first[2], second, *said) if event.kind in BankConsumer.kinds]
    if is_late:
        shown.sort(key=lambda event: event.kind == RUN_END)
    bank.take(shown)
    assert [(hold.id, hold.remaining) for hold in bank.holds()] == [(new.id, new.amount)]
    assert balance(bank) == 98 * HOUR


def test_a_job_that_a_sweep_finds_before_its_event_is_applied_has_one_hold(bank: Bank) -> None:
    token = bank.submit(JobRequest(uid=1000, account="physics", time_limit_min=120, min_cpus=2))
    (hold,) = bank.holds()
    # On a busy host jobs.db is ahead of the bank, which has not confirmed the job's hold yet.
    before = len(bank.journal)
    feed(bank, [life(1, admin_comment=token)[0]])
    bank.later(2)
    bank.turn()
    bank.take([event for event in bank.journal[before:] if event.kind in BankConsumer.kinds])
    assert [(shown.id, shown.job_id) for shown in bank.holds()] == [(hold.id, 1)]


def test_a_job_without_a_hold_is_seen_beside_the_end_of_the_one_before_it(bank: Bank) -> None:
    first, second = life(1), life(1, begin=9000)[0]
    bank.happen(first[:2])
    (old,) = bank.holds()
    said = feed(bank, [first[2], second])
    bank.take([event for event in (first[2], second, *said) if event.kind in BankConsumer.kinds])
    (hold,) = bank.holds()
    assert (hold.id != old.id, hold.job_id) == (True, 1)


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "REQUEUED"])
def test_a_job_that_began_anew_after_a_forgotten_end_is_charged_for_both(
    bank: Bank, state: str
) -> None:
    events = life(1)
    for event in events:
        bank.happen([event])
    assert (bank.held(), balance(bank)) == (0, 98 * HOUR)
    # slurmctld was killed before it saved the end, and ran the job once more.
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "cpus": 2}
    fields |= {"tres_allocated": "cpu=2,mem=1G,node=1", "nodelist": "n1"}
    start = NOON + timedelta(seconds=4000)
    bank.happen([record(1, 0, "RUNNING", seen=4001, start=start, **fields)])
    last = record(1, 0, state, seen=5800, start=start, end=5800, source="jobcomp", **fields)
    bank.happen([last])
    assert balance(bank) == 97 * HOUR
    bank.happen([last])
    assert balance(bank) == 97 * HOUR
    bank.later(3600 * 24)
    bank.turn()
    assert (bank.held(), balance(bank)) == (0, 97 * HOUR)
    assert bank.ledger.check() == []
