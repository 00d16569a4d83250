"""A journal, what reads it, and the events that tests put in it."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2

from harness.builders import script_event
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import (
    JOB_SEEN,
    Event,
    JobFacts,
)
from steward.core.incoming import Stores, stores_of
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import rows_of
from steward.core.records import JobRecord
from steward.extensions.kafka.settings import KafkaSinkSettings


def seen_event(job_id: int) -> Event:
    base = script_event(job_id)
    facts = JobFacts(record=JobRecord(job_id=job_id))
    return Event(
        kind=JOB_SEEN,
        cluster="c1",
        key=f"seen:{job_id}",
        at=base.at,
        seen_at=base.seen_at,
        source="test",
        body=facts,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path))


@pytest.fixture
def reader(journal: Journal, tmp_path: Path) -> JournalReader:
    return JournalReader(str(tmp_path))


def two_sinks(tmp_path: Path) -> Stores:
    """The stores where sink ``a`` is of files and sink ``b`` is not."""
    archive = ArchiveSettings(
        sink={"a": FilesSinkSettings(path=str(tmp_path / "a")), "b": KafkaSinkSettings()}
    )
    return stores_of(Settings(state_dir=str(tmp_path), archive=archive))


def append(journal: Journal, *events: Event) -> int:
    return journal.append(rows_of(events))


def fill(journal: Journal, megabytes: int) -> None:
    """Put large events in a journal, and let go of all of them."""
    count = megabytes * 16
    for first in range(0, count, 256):
        rows = [
            ("job.seen", "c1", f"large:{number}", os.urandom(1 << 16))
            for number in range(first, min(first + 256, count))
        ]
        journal.append(rows)
    with tables(journal) as db:
        db.execute("DELETE FROM event")


@contextmanager
def tables(journal: Journal) -> Iterator[Any]:
    """The tables of a journal's file, in one transaction of another connection."""
    with closing(dbapi2.connect(journal.path)) as db, db:
        yield db
