"""Server of the myBRC API for tests: a ledger, an account with SU, a client with a token."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from servers.server import free_port
from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.settings import BankSettings, GateSettings
from steward.core.config import Settings
from steward.core.http_server import Timeouts
from steward.core.waits import Stop
from steward.daemon.consumer_workers import run_mybrc
from steward.extensions.mybrc.settings import MybrcSettings
from steward.extensions.mybrc.users import hash_password
from steward.slurm.settings import ClusterSettings

SU = 1_000_000
PASSWORD = "correct horse"
PATIENCE = 30.0
BY = Authorship(who="tests")


def mybrc_settings(
    directory: Path,
    port: int = 0,
    *,
    bank: BankSettings | None = None,
    gate: GateSettings | None = None,
) -> Settings:
    """Return the configuration of a server at a port, for one user ``plugin``."""
    users = directory / "users"
    if not users.exists():
        users.write_text(f"# who may\nplugin:{hash_password(PASSWORD)}\n")
    return Settings(
        state_dir=str(directory),
        run_dir=str(directory),
        cluster={"c": ClusterSettings()},
        bank=bank or BankSettings(enabled=True),
        gate=gate or GateSettings(),
        mybrc=MybrcSettings(listen=f"127.0.0.1:{port or free_port()}", users_file=str(users)),
    )


def with_money(settings: Settings, *accounts: str, amount: int = 1000 * SU) -> None:
    """Deposit SU in some accounts."""
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        for name in accounts:
            t.accounts.create(Account(name=name), BY)
            t.transfers.deposit(name, amount, BY)
    ledger.close()


@contextmanager
def serving(
    settings: Settings,
    verify: ssl.SSLContext | bool = True,
    *,
    timeouts: Timeouts | None = None,
) -> Iterator[str]:
    """Run the server in a thread; yield its address."""
    stop = Stop()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            run_mybrc(settings, stop, lambda: None, timeouts=timeouts)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    scheme = "https" if settings.mybrc.tls else "http"
    url = f"{scheme}://{settings.mybrc.listen}"
    until(lambda: bool(failed) or answers(url, verify), "the server does not answer")
    assert not failed, failed
    try:
        yield url
    finally:
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def answers(url: str, verify: ssl.SSLContext | bool = True) -> bool:
    """Return whether a server answers."""
    try:
        asked = httpx.get(f"{url}/schema/openapi.json", timeout=5, verify=verify)
    except httpx.HTTPError:
        return False
    return asked.status_code == 200


def until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def token_of(url: str, prefix: str = "/mybrc-rest") -> str:
    """Create a token for the user ``plugin``."""
    answer = httpx.post(
        f"{url}{prefix}/api_token_auth/",
        json={"username": "plugin", "password": PASSWORD},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    token: str = answer.json()["token"]
    return token


def client_of(url: str, token: str, prefix: str = "/mybrc-rest") -> httpx.Client:
    """Return a client that has a token."""
    return httpx.Client(
        base_url=url + prefix, headers={"Authorization": f"Token {token}"}, timeout=20
    )


def job(jobslurmid: str = "1001", **fields: Any) -> dict[str, Any]:
    """Return a job as a client sends it."""
    sent = {"jobslurmid": jobslurmid, "userid": "10001", "accountid": "physics", "amount": "10.00"}
    return sent | fields


def balance(settings: Settings, account: str = "physics") -> int:
    """Return the balance of an account, in micro-SU; also prove the ledger."""
    ledger = open_ledger(settings)
    try:
        with ledger.reading() as t:
            found = t.queries.get_balance(account)
        assert ledger.check() == []
    finally:
        ledger.close()
    return found
