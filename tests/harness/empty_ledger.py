"""Ledgers on SQLite: copies of one empty ledger, because its schema takes time to create."""

import shutil
from pathlib import Path

import pytest

from ledger.fixtures import settings_for
from steward.bank.ledger import open_ledger
from steward.core.config import Settings


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State directory of an empty ledger; copy it, do not change it."""
    directory = tmp_path_factory.mktemp("ledger")
    open_ledger(settings_for(str(directory))).close()
    return directory


@pytest.fixture
def place(tmp_path: Path, empty: Path) -> Settings:
    """Settings of an empty ledger."""
    directory = tmp_path / "state"
    shutil.copytree(empty, directory)
    return settings_for(str(directory))
