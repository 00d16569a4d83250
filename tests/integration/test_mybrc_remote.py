"""SU holds and charges reported to a remote myBRC server, despite kills."""

import multiprocessing
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import msgspec
import pytest

from servers.mybrc import (
    BY,
    SU,
    answers,
    balance,
    client_of,
    mybrc_settings,
    token_of,
    until,
    with_money,
)
from servers.server import free_port
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.records import Charge, ResourceUse
from steward.bank.settings import BankSettings, RemoteBankSettings
from steward.core.config import Settings
from steward.core.waits import Stop
from steward.daemon.consumer_workers import run_mybrc, run_remote
from steward.extensions.mybrc.outbox import MYBRC_KIND, RemoteJob, queue_change, queue_hold

SUBMITTED = datetime(2026, 3, 1, 10, tzinfo=UTC)
JOBS = 120
PATIENCE = 120.0
BANK = Authorship(who="bank")
_FORK = multiprocessing.get_context("spawn")


def _serve(settings: Settings) -> None:
    run_mybrc(settings, Stop(), lambda: None)


def _send(settings: Settings) -> None:
    run_remote(settings, Stop(), lambda: None)


class Killable:
    """Process that a test kills and starts again."""

    def __init__(self, work: object, settings: Settings) -> None:
        self._work = work
        self._settings = settings
        self.start()

    def start(self) -> None:
        """Start the process."""
        self._process = _FORK.Process(target=self._work, args=(self._settings,), daemon=True)  # type: ignore[arg-type]
        self._process.start()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.join(PATIENCE)
        assert self._process.exitcode == -signal.SIGKILL


@pytest.fixture
def there(tmp_path: Path) -> Settings:
    """Start the remote server."""
    directory = tmp_path / "there"
    directory.mkdir()
    settings = mybrc_settings(directory, free_port())
    with_money(settings, "physics", amount=100_000 * SU)
    return settings


@pytest.fixture
def server(there: Settings) -> Iterator[Killable]:
    started = Killable(_serve, there)
    until(lambda: answers(_url(there)), "the server elsewhere does not come up", PATIENCE)
    yield started
    started.kill()


@pytest.fixture
def here(tmp_path: Path, there: Settings, server: Killable) -> Settings:
    """Start the Steward that reports to it."""
    del server
    token = tmp_path / "token"
    token.write_text(f"Token {token_of(_url(there))}\n")
    remote = RemoteBankSettings(url=f"{_url(there)}/mybrc-rest", token_file=str(token))
    settings = mybrc_settings(tmp_path, 1, bank=BankSettings(enabled=True, remote=remote))
    with_money(settings, "physics", amount=100_000 * SU)
    return settings


def _url(settings: Settings) -> str:
    return f"http://{settings.mybrc.listen}"


def told(number: int, state: str = "") -> RemoteJob:
    start = SUBMITTED + timedelta(minutes=1)
    end = start + timedelta(hours=1) if state else None
    return RemoteJob(
        cluster="c",
        job_id=number,
        first_submit=SUBMITTED,
        account="physics",
        uid=4_000_001,
        partition="long",
        state=state,
        start=start,
        end=end,
        cpus=4,
    )


def hold(settings: Settings, number: int, amount: int = 50 * SU) -> None:
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        queue_hold(t, told(number), amount)
        queue_hold(t, told(number), amount)
    ledger.close()


def charge(settings: Settings, number: int, amount: int) -> None:
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        t.charges.post(charged(number, amount), BANK)
        queue_change(t, told(number, "COMPLETED"))
    ledger.close()


def charged(number: int, amount: int) -> Charge:
    now = datetime.now(UTC)
    return Charge(
        cluster="c",
        job_id=number,
        first_submit=SUBMITTED,
        account="physics",
        user="4000001",
        amount=amount,
        use=ResourceUse(tres={"cpu": 4}, start=now, seconds=3600, state="COMPLETED"),
    )


def waiting(settings: Settings) -> int:
    ledger = open_ledger(settings)
    with ledger.reading() as t:
        count = t.outbox.count_pending(MYBRC_KIND)
    ledger.close()
    return count


def test_all_is_told_though_both_sides_are_killed(
    here: Settings, there: Settings, server: Killable
) -> None:
    sender = Killable(_send, here)
    for number in range(1, JOBS + 1):
        hold(here, number)
        if number % 3:
            # To the hundredth, since that is what the API can say.
            charge(here, number, number * 1_010_000)
        if number % 40 == 20:
            server.kill()
        if number % 40 == 30:
            sender.kill()
            sender.start()
        if number % 40 == 39:
            server.start()
    until(lambda: waiting(here) == 0, "not all is told", PATIENCE)
    sender.kill()
    charged = sum(number * 1_010_000 for number in range(1, JOBS + 1) if number % 3)
    held = sum(50 * SU for number in range(1, JOBS + 1) if number % 3 == 0)
    assert balance(here) == 100_000 * SU - charged
    assert balance(there) == 100_000 * SU - charged - held


def test_a_charge_that_changes_while_nobody_listens_is_told_as_it_is_in_the_end(
    here: Settings, there: Settings, server: Killable
) -> None:
    server.kill()
    hold(here, 7)
    for amount in (3 * SU, 9 * SU, 4 * SU):
        charge(here, 7, amount)
    sender = Killable(_send, here)
    server.start()
    until(lambda: waiting(here) == 0, "not all is told", PATIENCE)
    sender.kill()
    assert balance(there) == 100_000 * SU - 4 * SU
    with client_of(_url(there), token_of(_url(there))) as client:
        (found,) = client.get("/jobs/").json()["results"]
    assert found["jobstatus"] == "COMPLETED"
    assert found["submitdate"] == "2026-03-01T10:00:00Z"
    assert (found["amount"], found["num_cpus"]) == ("4.00", 4)


def test_what_is_corrected_and_given_back_later_is_told_though_the_sender_is_killed(
    here: Settings, there: Settings, server: Killable
) -> None:
    del server
    sender = Killable(_send, here)
    charge(here, 7, 9 * SU)
    until(lambda: balance(there) == 100_000 * SU - 9 * SU, "the charge is not told", PATIENCE)
    sender.kill()
    ledger = open_ledger(here)
    with ledger.transaction() as t:
        t.charges.post(charged(7, 6 * SU), Authorship(who="reconcile", why="its record"))
    with ledger.transaction() as t:
        t.charges.refund(charged(7, 0).key, BY, SU)
    ledger.close()
    sender.start()
    until(lambda: balance(there) == balance(here), "the correction is not told", PATIENCE)
    sender.kill()
    assert balance(there) == 100_000 * SU - 5 * SU


def test_what_is_refused_there_holds_up_nothing_else(
    here: Settings, there: Settings, server: Killable
) -> None:
    del server
    ledger = open_ledger(here)
    with ledger.transaction() as t:
        stranger = msgspec.structs.replace(told(1), account="unheard-of")
        queue_hold(t, stranger, SU)
        queue_change(t, stranger)
    ledger.close()
    charge(here, 2, 5 * SU)
    sender = Killable(_send, here)
    until(lambda: waiting(here) == 1, "the others are not told", PATIENCE)
    sender.kill()
    assert balance(there) == 100_000 * SU - 5 * SU
    ledger = open_ledger(here)
    with ledger.reading() as t:
        (item,) = t.outbox.list_due(MYBRC_KIND, datetime.now(UTC) + timedelta(days=1))
    ledger.close()
    assert item.tries == 1
    assert "unheard-of" in item.error


def test_the_servers_own_token_ends_and_all_waits(
    here: Settings, there: Settings, server: Killable, capfd: pytest.CaptureFixture[str]
) -> None:
    del server
    users = Path(there.mybrc.users_file)
    kept = users.read_text()
    users.write_text("# nobody\n")
    token = {"Authorization": Path(here.bank.remote.token_file).read_text().strip()}

    def is_refused() -> bool:
        answer = httpx.get(f"{_url(there)}/api/jobs/", headers=token, timeout=60)
        return answer.status_code in (401, 429)

    until(is_refused, "the server lets the token in", PATIENCE)
    charge(here, 1, 5 * SU)
    sender = Killable(_send, here)
    said = ""

    def is_put_off() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "cannot notify the myBRC server" in said

    until(is_put_off, "it was not tried", PATIENCE)
    assert waiting(here) == 1
    users.write_text(kept)
    until(lambda: waiting(here) == 0, "not all is told", PATIENCE)
    sender.kill()
    assert balance(there) == 100_000 * SU - 5 * SU
