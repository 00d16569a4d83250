"""Places for ledgers on SQLite: empty ones, made once and copied, for a schema takes its time."""

import shutil
from pathlib import Path

import pytest

from ledger.site import settings_for
from steward.bank.ledger import open_ledger
from steward.core.config import Settings


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of an empty ledger, to be copied."""
    where = tmp_path_factory.mktemp("ledger")
    open_ledger(settings_for(str(where))).close()
    return where


@pytest.fixture
def place(tmp_path: Path, empty: Path) -> Settings:
    """An empty ledger."""
    where = tmp_path / "state"
    shutil.copytree(empty, where)
    return settings_for(str(where))
