from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.archive import purge
from harness.events import at
from harness.jobs import Books, read_json, record, script
from steward.core.events import ArchivePurge
from steward.jobs import Jobs
from steward.jobs.compression import decompress_json

# Long enough that the random bytes of SQLite's log (salts and checksums) do not spell it.
PRIVATE: dict[str, Any] = {
    "name": "confidential-name",
    "submit_line": "sbatch confidential-line",
    "command": "/confidential/command",
    "work_dir": "/confidential/dir",
    "stdout": "/confidential/out",
    "comment": "confidential-comment",
}


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def bytes_on_disk(books: Books) -> bytes:
    """Return the files of a state directory, and their stored JSON as it is without compression."""
    return b"".join([read_files(books), *map(decompress_json, read_json(books))])


def read_files(books: Books) -> bytes:
    return b"".join(path.read_bytes() for path in books.directory.iterdir())


def test_a_purge_forgets_the_script_and_what_was_written_but_not_the_job(books: Books) -> None:
    kept = script(7, 0.4, claimed_name="confidential-claim", claimed_dir="/confidential/claim")
    books.take(kept, record(7, 0, account="a", start=at(3), **PRIVATE))
    for second in range(4, 20):
        told = {**PRIVATE, "comment": "confidential" * second}
        books.take(record(7, 0, "RUNNING", seen=second, account="a", start=at(3), **told))
    assert b"confidential" in bytes_on_disk(books)
    private = [data for data in read_json(books) if b"confidential" in decompress_json(data)]
    fragments = [data[at : at + 20] for data in private for at in range(60, len(data) - 20, 20)]
    assert all(fragment in read_files(books) for fragment in fragments[:3])
    assert books.take(purge(kept)) == []
    jobs = Jobs(books.path)
    (job,) = jobs.find("7")
    assert job.purged
    assert job.script_key == ""
    assert jobs.list_scripts(job) == []
    assert jobs.find_by_scripts([kept.key]) == {}
    assert (job.record.uid, job.record.account, job.record.start) == (1000, "a", at(3))
    assert {getattr(job.record, field) for field in PRIVATE} == {""}
    assert b"confidential" not in bytes_on_disk(books)
    assert not any(fragment in read_files(books) for fragment in fragments)


def test_what_was_purged_stays_so_when_slurm_or_the_spool_tell_it_again(books: Books) -> None:
    kept = script(7, 0.4, claimed_name="confidential-claim")
    books.take(kept, record(7, 0, **PRIVATE))
    books.take(purge(kept))
    assert books.take(kept) == []
    assert books.take(record(7, 0, "COMPLETED", seen=9, end=8, **PRIVATE)) == []
    (job,) = Jobs(books.path).find("7")
    assert (job.ended, job.record.name, job.script_key) == (True, "", "")
    assert b"confidential" not in bytes_on_disk(books)
    assert "confidential" not in repr(Jobs(books.path).list_runs(job))


def test_a_script_that_nobody_confirmed_leaves_no_job_behind(books: Books) -> None:
    kept = script(7, 0.4, claimed_name="confidential-claim")
    books.take(kept)
    books.take(purge(kept))
    jobs = Jobs(books.path)
    assert jobs.find("7") == []
    books.take(record(7, 0, **PRIVATE))
    assert jobs.find("7")[0].record.name == ""


def test_the_tasks_of_a_purged_array_lose_their_text_also_when_they_come_later(
    books: Books,
) -> None:
    kept = script(7, 0.4)
    array: dict[str, Any] = {"array_job_id": 7, **PRIVATE}
    books.take(kept, record(7, 0, array_task="1-9", **array), record(8, 0, array_task="1", **array))
    books.take(purge(kept))
    books.take(record(9, 0, array_task="2", **array))
    jobs = Jobs(books.path)
    for name in ("7", "7_1", "7_2"):
        (job,) = jobs.find(name)
        assert (job.record.name, job.purged, job.script_key) == ("", True, "")


def test_another_job_of_the_same_id_keeps_its_text(books: Books) -> None:
    old, new = script(7, 0.4), script(7, 900.4)
    books.take(old, record(7, 0, **PRIVATE), new, record(7, 900, uid=12, **PRIVATE))
    books.take(purge(old))
    newest, oldest = Jobs(books.path).find("7")
    assert (newest.record.name, newest.script_key) == ("confidential-name", new.key)
    assert (oldest.record.name, oldest.purged) == ("", True)


def test_a_purge_of_one_sink_or_of_unknown_scripts_changes_nothing(books: Books) -> None:
    kept = script(7, 0.4)
    books.take(kept, record(7, 0, **PRIVATE))
    books.take(purge(kept, sink="files"), purge(script(99, 1.0)))
    (job,) = Jobs(books.path).find("7")
    assert (job.record.name, job.script_key) == ("confidential-name", kept.key)


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_purge_that_comes_before_its_script_is_remembered(
    books: Books, is_told_first: bool
) -> None:
    kept, facts = script(7, 0.4, claimed_name="confidential-claim"), record(7, 0, **PRIVATE)
    if is_told_first:
        books.take(facts)
    books.take(purge(kept))
    jobs = Jobs(books.path)
    assert jobs.is_purged(kept.cluster, kept.key) is True
    assert books.take(kept, facts) == []
    (job,) = jobs.find("7")
    assert (job.purged, job.record.name, job.script_key) == (True, "", "")
    assert b"confidential" not in bytes_on_disk(books)


def test_a_purge_in_one_batch_before_its_script_counts(books: Books) -> None:
    kept = script(7, 0.4, claimed_name="confidential-claim")
    assert books.take(purge(kept), kept) == []
    assert Jobs(books.path).find("7") == []


def test_an_order_to_purge_what_can_be_no_script_is_harmless(books: Books) -> None:
    kept = script(7, 0.4)
    body = ArchivePurge(script_keys=("", "script:0:1", "script:7", f"script:{2**32}:1", "\0:7:1"))
    books.take(kept, msgspec.structs.replace(purge(kept), body=body))
    assert list(Jobs(books.path).find_by_scripts([kept.key])) == [kept.key]
    assert Jobs(books.path).is_purged(kept.cluster, "script:0:1") is None


def test_a_purge_in_the_batch_of_its_script_counts(books: Books) -> None:
    kept = script(7, 0.4)
    books.take(kept, record(7, 0, **PRIVATE), purge(kept))
    (job,) = Jobs(books.path).find("7")
    assert (job.record.name, job.script_key) == ("", "")


def test_many_scripts_are_purged_at_once(books: Books) -> None:
    kept = [script(number, number + 0.4) for number in range(1, 1203)]
    books.take(*kept)
    books.take(purge(*kept[:-1]))
    jobs = Jobs(books.path)
    assert jobs.find_by_scripts(event.key for event in kept).keys() == {kept[-1].key}
