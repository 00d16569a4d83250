import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from harness import archive
from harness.archive import DAY
from harness.events import NOON_NS
from harness.site import Site
from steward.archive.errors import NotArchived
from steward.archive.files.batch import PendingBatch
from steward.archive.files.index import FilesRecords
from steward.archive.files.layout import compile_layout
from steward.archive.files.locks import TreeLock
from steward.archive.files.manifest import (
    decode_facts,
    iterate_scripts_in_tree,
    parse_file_name,
)
from steward.archive.files.reader import FilesReader
from steward.archive.files.verify import VerificationProblem, VerificationProgress, verify_sink
from steward.core.sqlite import SqliteUnavailable


def problems(site: Site) -> set[tuple[str, str]]:
    found = verify_sink(site.settings, "files")
    return {(p.kind, str(Path(p.path).relative_to(archive.root_of(site)))) for p in found}


def test_a_sound_archive_has_no_problems(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    scripts = [archive.script(site, number) for number in (1, 2)]
    site.feed(*scripts, *map(archive.identity, scripts), archive.script(site, 3))
    told: list[VerificationProgress] = []
    assert list(verify_sink(site.settings, "files", told.append)) == []
    assert told[-1].files == told[-1].total_files == 4


def test_every_difference_is_told(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    scripts = [archive.script(site, number, b"hostname %d" % number) for number in (1, 2, 3)]
    site.feed(*scripts, *map(archive.identity, scripts))
    day = archive.root_of(site) / DAY
    (day / "1-run.sh").unlink()
    data = (day / "2-run.sh").read_bytes()
    (day / "2-run.sh").write_bytes(data.replace(b"hostname", b"hostnamE"))
    (day / "3-run.env").unlink()
    (day / "3-run.env").symlink_to("/etc/passwd")
    (day / "stray").write_text("x")
    (archive.root_of(site) / "stray.sh").write_text("x")
    assert problems(site) == {
        ("missing", f"{DAY}/1-run.sh"),
        ("changed", f"{DAY}/2-run.sh"),
        ("unreadable", f"{DAY}/3-run.env"),
        ("unknown", f"{DAY}/stray"),
        ("unknown", "stray.sh"),
    }


def test_a_whole_directory_may_be_missing(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 1, environment=None)
    site.feed(script, archive.identity(script))
    (archive.root_of(site) / "alpha").rename(tmp_path / "aside")
    assert problems(site) == {("missing", f"{DAY}/1-run.sh")}


def test_a_directory_that_is_made_meanwhile_is_not_missing(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    first, later = archive.script(site, 1), archive.script(site, 2)
    site.feed(first, archive.identity(first))
    counts: list[int] = []

    def report(checked: VerificationProgress) -> None:
        # Directories before the first one's files are listed by then.
        if checked.files == 2 and 2 not in counts:
            site.feed(later, archive.identity(later, 4002, "bela"))
        counts.append(checked.files)

    assert list(verify_sink(site.settings, "files", report)) == []
    assert counts[-1] == 4
    (archive.root_of(site) / "alpha/bela/2026/03/01/2-run.sh").unlink()
    assert problems(site) == {("missing", "alpha/bela/2026/03/01/2-run.sh")}


@pytest.mark.parametrize("moment", ["finish", "remove_replaced"])
def test_what_is_being_filed_is_not_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    site = archive.make_site(tmp_path, identity_wait_s=0.001)
    script = archive.script(site, 1)
    site.feed(script)
    archive.sink_of(site).file_waiting()
    real = getattr(PendingBatch, moment)
    found: list[VerificationProblem] = []
    looking = Thread(target=lambda: found.extend(verify_sink(site.settings, "files")))

    def looked_at(*arguments: Any) -> None:
        # The files are in their new place and not in the database, or in their old place still.
        looking.start()
        looking.join(0.3)
        real(*arguments)

    monkeypatch.setattr(PendingBatch, moment, looked_at)
    site.feed(archive.identity(script))
    looking.join()
    assert found == []
    (archive.root_of(site) / DAY / "stray").write_text("x")
    assert problems(site) == {("unknown", f"{DAY}/stray")}


def test_the_lock_is_held_for_a_limited_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    scripts = [archive.script(site, number) for number in range(1, 101)]
    site.feed(*scripts, *map(archive.identity, scripts))
    strays = {f"{DAY}/stray{number:04}" for number in range(2500)}
    for stray in strays:
        (archive.root_of(site) / stray).touch()
    held: list[int] = []
    is_locked = False
    real = TreeLock.acquire

    @contextmanager
    def acquire(lock: TreeLock) -> Iterator[None]:
        nonlocal is_locked
        held.append(0)
        with real(lock):
            is_locked = True
            yield
        is_locked = False

    def count_stat(path: str) -> bool:
        held[-1] += is_locked
        return lexists(path)

    def count_rows(sink: FilesRecords, path: str, states: tuple[int, int]) -> Iterator[str]:
        return map(count_name, iterate_names(sink, path, states))

    def count_name(name: str) -> str:
        held[-1] += is_locked
        return name

    lexists, iterate_names = os.path.lexists, FilesRecords.iterate_names
    monkeypatch.setattr(TreeLock, "acquire", acquire)
    monkeypatch.setattr(os.path, "lexists", count_stat)
    monkeypatch.setattr(FilesRecords, "iterate_names", count_rows)
    assert problems(site) == {("unknown", stray) for stray in strays}
    assert held == [1000, 1000, 500]


def test_who_only_reads_makes_no_lock(tmp_path: Path) -> None:
    """A lock that root made would keep out the daemon, which runs as SlurmUser."""
    site = archive.make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))
    (archive.root_of(site) / DAY / "stray").write_text("x")
    (lock,) = tmp_path.rglob("archive-files.lock")
    lock.unlink()
    assert problems(site) == {("unknown", f"{DAY}/stray")}
    assert not lock.exists()


def test_a_reader_follows_a_script(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, identity_wait_s=0.001)
    reader = FilesReader(site.settings, "files")
    script = archive.script(site, 7, b"bytes")
    with pytest.raises(NotArchived):
        reader.read(script.key, "script")
    states = []
    steps: list[Callable[[], object]] = [
        lambda: site.feed(script),
        archive.sink_of(site).file_waiting,
        lambda: site.feed(archive.identity(script)),
    ]
    for step in steps:
        step()
        placed = reader.locate(script.key, "alpha")
        assert placed is not None
        states.append(placed.state)
        assert reader.read(script.key, "script") == b"bytes"
    assert states == ["waiting", "unverified", "placed"]
    assert [entry.script_key for entry in reader.iterate_scripts()] == [script.key]
    assert reader.locate(script.key, "beta") is None
    site.feed(archive.purge(script))
    with pytest.raises(NotArchived):
        reader.read(script.key, "environment")


def test_a_reader_does_not_follow_links(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script))
    path = archive.root_of(site) / DAY / "7-run.sh"
    path.unlink()
    path.symlink_to("/etc/passwd")
    reader = FilesReader(site.settings, "files")
    with pytest.raises(Exception, match="symbolic link"):
        reader.read(script.key, "script")


def test_a_reader_of_no_database_says_so(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    assert FilesReader(site.settings, "files").locate("script:1:1") is None
    for path in site.state.glob("*.db*"):
        path.unlink()
    with pytest.raises(SqliteUnavailable):
        FilesReader(site.settings, "files").locate("script:1:1")


def test_manifests_tell_everything(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    known, unknown = archive.script(site, 7, name="claim"), archive.script(site, 8)
    site.feed(known, unknown, archive.identity(known, account="physics"))
    found = {
        script.job_id: script
        for script in iterate_scripts_in_tree(str(archive.root_of(site)), compile_layout("default"))
    }
    assert found[7].key == known.key
    assert found[7].spool_mtime_ns == NOON_NS
    assert found[7].record is not None
    assert found[7].record.account == "physics"
    assert found[7].script is not None
    assert found[7].script.path == f"{DAY}/7-run.sh"
    assert found[7].script.sha256 == known.body.script.sha256
    assert found[8].record is None
    assert found[8].cluster == "alpha"
    manifests = archive.root_of(site).rglob("MANIFEST.jsonl")
    kinds = sorted(fact.fact for path in manifests for fact in decode_facts(path.read_bytes()))
    assert kinds == ["identity", "kept", "kept", "kept", "moved"]


@pytest.mark.parametrize("layout", ["job_archive", "sarchive", "sliced"])
def test_names_tell_what_they_can(tmp_path: Path, layout: str) -> None:
    site = archive.make_site(tmp_path, layout=layout)
    one, again = archive.script(site, 7), archive.script(site, 7, b"two", mtime_ns=NOON_NS + 1)
    for script in (one, again):
        site.feed(script, archive.identity(script, user="a/da", name="my~job"))
    found = list(iterate_scripts_in_tree(str(archive.root_of(site)), compile_layout(layout)))
    assert [script.job_id for script in found] == [7, 7]
    assert all(script.script and script.environment for script in found)
    if layout == "job_archive":
        assert {script.user_directory for script in found} == {"a/da"}
        assert {script.name for script in found} == {"my~job"}
    if layout == "sliced":
        assert {script.cluster for script in found} == {"alpha"}


def test_foreign_names_say_nothing() -> None:
    for name in ("README", "7.txt", "x-7.sh", "job.x_script", "MANIFEST.jsonl"):
        assert parse_file_name(name) is None


def test_a_script_with_a_strange_key_has_the_time_of_its_manifest(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script))
    path = archive.root_of(site) / DAY / "MANIFEST.jsonl"
    path.write_text(path.read_text().replace(script.key, "script:7:noon"))
    layout = compile_layout("default")
    (found,) = iterate_scripts_in_tree(str(archive.root_of(site)), layout)
    assert (found.key, found.spool_mtime_ns) == ("script:7:noon", NOON_NS)
