"""Modules that a command imports: only what it needs, because a script may run it for every job."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.bank import charge, config_of, feed, life, make_shared_site
from harness.socket import serving
from steward.client import calls
from steward.client.places import ClientPlace
from steward.core.config.reader import load_settings
from steward.daemon.contexts import make_registry

_COMMAND: Final = """
import sys
from steward.__main__ import main
code = main()
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""
NEVER: Final = frozenset(
    {
        *("alembic", "asyncio", "confluent_kafka", "http", "httpx", "jinja2", "litestar"),
        *("prometheus_client", "psycopg", "pydantic", "rich", "sqlalchemy", "ssl", "typer"),
        *("uvicorn", "zstandard"),
    }
)
"""Modules that none of these commands needs."""
FORBIDDEN: Final = {
    ("--help",): {"msgspec", "logging", "steward.core.config", "steward.cli.options"},
    ("job", "7"): {"importlib.metadata", "secrets", "steward.bank.context"},
    ("archive", "list"): {"importlib.metadata", "secrets", "steward.bank.context"},
    ("bank", "balance"): {
        "importlib.metadata",
        "secrets",
        "pysqlite3",
        "steward.bank.job_charges",
        "steward.jobs",
    },
}
"""Further modules that a command does not need, by its words."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Configuration of a bank with a charged job, whose daemon's socket answers."""
    directory = tmp_path_factory.mktemp("bank")
    path = str(config_of(directory))
    site = make_shared_site(directory)
    feed(site, life(7))
    charge(site, 7, hours=4)
    site.ledger.close()
    settings = load_settings(path)
    registry = make_registry(settings)
    with serving(settings.socket, asked=registry, state_dir=settings.state_dir):
        yield path


def list_modules(config: str, *words: str) -> tuple[str, set[str]]:
    """Return the output of a command and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"STEWARD_CONFIG": config},
        check=True,
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
def test_a_command_imports_only_what_it_needs(config: str, words: tuple[str, ...]) -> None:
    output, modules = list_modules(config, *words)
    assert output
    assert sorted(modules & (NEVER | FORBIDDEN[words])) == []


def test_without_a_daemon_the_ledger_is_read_here(config: str, tmp_path: Path) -> None:
    balances, _ = list_modules(config, "bank", "balance")
    alone = tmp_path / "alone.toml"
    run_dir = f'run_dir = "{Path(config).parent}"'
    alone.write_text(Path(config).read_text().replace(run_dir, f'run_dir = "{tmp_path}"'))
    assert list_modules(str(alone), "bank", "balance")[0] == balances


def test_a_daemon_that_does_not_answer_is_not_waited_for(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LEDGER_SILENCE_S", 0.1)
    alone = tmp_path / "alone.toml"
    run_dir = f'run_dir = "{Path(config).parent}"'
    alone.write_text(Path(config).read_text().replace(run_dir, f'run_dir = "{tmp_path}"'))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(load_settings(str(alone)).socket)
        silent.listen()
        place = ClientPlace(config=str(alone))
        action = calls.get_action("bank.balance")
        reply = calls.call_action(place, action, action.request())
    assert [row.account for row in reply.accounts if row.account == "physics"]
