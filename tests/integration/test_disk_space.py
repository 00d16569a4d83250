"""Disk space of a real daemon: files shrink again after a load."""

from pathlib import Path

import msgspec
from job_submission import submit_to, wait_until
from sandbox_daemon import Daemon

from harness.journal import append, seen_event
from steward.admin.status.requests import DatabaseLine, StatusShowAnswer
from steward.core.events import JobFacts
from steward.core.journal import Journal
from steward.core.records import JobRecord
from steward.sandbox import Sandbox

MIB = 1 << 20


def test_the_journal_shrinks_after_a_trim(sandbox: Sandbox, submitter: str) -> None:
    daemon = Daemon(sandbox, Path(sandbox.directory) / "disk-space")

    def show() -> dict[str, DatabaseLine]:
        text = daemon.ask("status", "--json").stdout
        answer = msgspec.json.decode(text, type=StatusShowAnswer)
        assert not [part for part in answer.unknown if part.startswith("database")]
        return {line.name: line for line in answer.databases}

    daemon.state.mkdir()
    journal = Journal(str(daemon.state))
    for first in range(0, 800, 100):
        append(
            journal,
            *(
                msgspec.structs.replace(
                    seen_event(number),
                    cluster="box",
                    body=JobFacts(record=JobRecord(job_id=number, command="x" * 50_000)),
                )
                for number in range(10_000 + first, 10_100 + first)
            ),
        )
    journal.close()
    path = daemon.state / "journal.db"
    assert path.stat().st_size > 30 * MIB
    daemon.start()
    try:
        wait_until(lambda: path.stat().st_size < 8 * MIB, 60)
        lines = show()
        assert lines["journal.db"].writers == ("journal",)
        assert lines["archive-files.db"].writers == ("archive.files", "mover.files")
        free = lines["journal.db"].free
        assert free is not None
        assert free <= 5 * MIB
        job = submit_to(sandbox, "#!/bin/sh\nexit 0\n", user=submitter)
        daemon.wait_for_script(job)
        rows = daemon.ask("status", "-P").stdout.splitlines()
        assert any(row.startswith("database journal.db|") and "written by" in row for row in rows)
    finally:
        daemon.close()
