"""Several processes on one ledger, and processes that are killed in the middle."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from ledger.fixtures import BY, account, charge, keyed
from steward.bank.ledger import open_ledger
from steward.bank.ledger.ledger import Ledger
from steward.core.config import Settings

PATIENCE_S = 60.0

_WRITER = """
import sys
import msgspec
from ledger.concurrency import WRITERS
from steward.core.config import Settings

WRITERS[sys.argv[2]](msgspec.json.decode(sys.argv[1], type=Settings), int(sys.argv[3]))
"""


def deposit(settings: Settings, number: int) -> None:
    """Deposit 1 in an endless loop, each time with a new key."""
    ledger = open_ledger(settings)
    for turn in range(1_000_000):
        with ledger.transaction() as t:
            t.transfers.deposit("phys", 1, keyed(f"{number}/{turn}"))


def charge_on(settings: Settings, number: int) -> None:
    """Charge 3 for each job and settle it, with the cursor in the same transaction."""
    ledger = open_ledger(settings)
    while True:
        with ledger.transaction() as t:
            at = t.read_cursor(f"bank{number}")
            for job_id in range(at + 1, at + 4):
                made = t.charges.post(charge(3, job_id=number * 1_000_000 + job_id), BY)
                t.settlements.add(f"h{job_id}", made.key, made.added, final=True)
            t.move_cursor(f"bank{number}", at + 3)


WRITERS: dict[str, Callable[[Settings, int], None]] = {"deposit": deposit, "charge": charge_on}


def start(settings: Settings, kind: str, number: int) -> "subprocess.Popen[bytes]":
    """Start a process that writes until it is killed."""
    words = (_WRITER, msgspec.json.encode(settings).decode(), kind, str(number))
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen([sys.executable, "-c", *words], env=environment)


@contextmanager
def writing(settings: Settings, *kinds: str) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Run processes that write within the block."""
    running = [start(settings, kind, number) for number, kind in enumerate(kinds)]
    try:
        yield running
    finally:
        for each in running:
            each.kill()
            each.wait(PATIENCE_S)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come to this: {what}"
        time.sleep(0.02)


def position(ledger: Ledger, number: int) -> int:
    with ledger.reading() as t:
        return t.read_cursor(f"bank{number}")


def proved(ledger: Ledger, *chargers: int) -> None:
    """Check the ledger, and that each cursor matches its charges."""
    assert ledger.check() == []
    with ledger.reading() as t:
        positions = [t.read_cursor(f"bank{number}") for number in chargers]
        (every,) = t.queries.sum_usage(())
        assert every.charges == sum(positions)
        assert every.amount == 3 * sum(positions)
        settled = t.settlements.list_after(0, limit=1_000_000)
        assert len(settled) == len({each.charge for each in settled}) == sum(positions)


class CrowdCases:
    rounds = 2

    def test_writers_queue_up(self, ledger: Ledger, place: Settings) -> None:
        with ledger.transaction() as t:
            account(t, "phys", 10)
        with writing(place, "charge", "deposit", "charge") as running:
            wait_until(lambda: min(position(ledger, n) for n in (0, 2)) >= 9, "both charge")
            wait_until(lambda: deposited(ledger) > 15, "deposits are made")
            assert [each.poll() for each in running] == [None, None, None]
        proved(ledger, 0, 2)

    def test_whoever_is_killed_leaves_all_or_nothing(self, ledger: Ledger, place: Settings) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        chance = random.Random(seed)
        with ledger.transaction() as t:
            account(t, "phys", 10)
        for _ in range(self.rounds):
            at = position(ledger, 0)
            with writing(place, "charge", "deposit"):
                wait_until(lambda at=at: position(ledger, 0) > at, "it charges")  # type: ignore[misc]
                time.sleep(chance.random() / 20)  # so as to hit any place
            proved(ledger, 0)


def deposited(ledger: Ledger) -> int:
    with ledger.reading() as t:
        return t.allocations.get_open_ended("phys").granted
