import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.archive import DAY
from harness.events import NOON_NS
from harness.site import Site
from steward.archive.errors import ArchiveError, ArchiveUnavailable, NotArchived
from steward.archive.files.index import FilesRecords
from steward.archive.files.manifest import decode_facts
from steward.archive.files.mover import ArchiveMover
from steward.archive.files.reader import FilesReader, PlacedScript
from steward.archive.files.tree import ArchiveTree
from steward.archive.files.verify import VerificationProblem, verify_sink
from steward.core.waits import Stop


@pytest.fixture
def stop() -> Stop:
    return Stop()


def make_site(directory: Path, **sink: Any) -> Site:
    """Make a Site whose files move to the second tree, at once by default."""
    moves = {"move_to": str(directory / "common"), "move_after_s": 0.0}
    return archive.make_site(directory, **{**moves, **sink})


def common_of(site: Site) -> Path:
    return site.directory / "common"


def moved_files(site: Site) -> dict[str, bytes]:
    common = common_of(site)
    return {
        str(path.relative_to(common)): path.read_bytes()
        for path in common.rglob("*")
        if path.is_file() and path.name not in {"MANIFEST.jsonl", ".steward-archive"}
    }


def test_files_and_what_is_known_of_them_move_on(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path)
    scripts = [archive.script(site, number) for number in (1, 2)]
    site.feed(*scripts, *map(archive.identity, scripts))
    before = archive.files(site)
    assert len(before) == 4
    manifest = (archive.root_of(site) / DAY / "MANIFEST.jsonl").read_bytes()
    ArchiveMover(site.settings, "files").run_once(stop)
    assert moved_files(site) == before
    assert archive.files(site) == {}
    assert not (archive.root_of(site) / "alpha").exists()
    moved = (common_of(site) / DAY / "MANIFEST.jsonl").read_bytes()
    assert sorted(moved.splitlines()) == sorted(manifest.splitlines())
    placed = FilesReader(site.settings, "files").locate(scripts[0].key)
    assert placed is not None
    assert placed.state == "moved"
    assert (
        FilesReader(site.settings, "files").read(scripts[0].key, "script")
        == before[f"{DAY}/1-run.sh"]
    )
    assert list(verify_sink(site.settings, "files")) == []


def test_what_is_being_moved_is_not_unknown(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))
    sync = ArchiveTree.sync
    found: list[list[VerificationProblem]] = []

    def looked_at(tree: ArchiveTree) -> None:
        sync(tree)
        if tree.root == str(common_of(site)):
            # The files are in both trees.
            found.append(list(verify_sink(site.settings, "files")))

    monkeypatch.setattr(ArchiveTree, "sync", looked_at)
    ArchiveMover(site.settings, "files").run_once(stop)
    assert found == [[]]
    (common_of(site) / DAY / "stray").write_text("x")
    assert [problem.kind for problem in verify_sink(site.settings, "files")] == ["unknown"]


def test_what_is_young_or_unverified_stays(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path, move_after_s=3600.0, slurm=True)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))
    ArchiveMover(site.settings, "files").run_once(stop)
    assert moved_files(site) == {}
    assert len(archive.files(site)) == 2


def test_the_owner_reads_there_too(tmp_path: Path, stop: Stop) -> None:
    from steward.archive.files.permissions import read_acl_readers

    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))
    if not archive.has_acls(site):
        pytest.skip("the file system has no POSIX ACLs")
    ArchiveMover(site.settings, "files").run_once(stop)
    for path in ("alpha/ada", f"{DAY}/1-run.sh", f"{DAY}/1-run.env"):
        fd = os.open(common_of(site) / path, os.O_RDONLY)
        assert read_acl_readers(fd).uid == 4001
        os.close(fd)
    site.user_names = {4001: "mallory"}
    archive.sink_of(site).tick(site.append)
    ArchiveMover(site.settings, "files").run_once(stop)
    fd = os.open(common_of(site) / "alpha/ada", os.O_RDONLY)
    assert read_acl_readers(fd).uid is None
    os.close(fd)


def test_a_missing_target_stops_the_mover_not_the_sink(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path)
    mover = ArchiveMover(site.settings, "files")
    first, second = archive.script(site, 1), archive.script(site, 2)
    site.feed(first, archive.identity(first))
    mover.run_once(stop)
    common_of(site).rename(tmp_path / "unmounted")
    common_of(site).mkdir()
    site.feed(second, archive.identity(second))
    with pytest.raises(ArchiveUnavailable, match="mounted"):
        mover.run_once(stop)
    assert f"{DAY}/2-run.sh" in archive.files(site)
    assert list(common_of(site).iterdir()) == []
    common_of(site).rmdir()
    (tmp_path / "unmounted").rename(common_of(site))
    mover.run_once(stop)
    assert len(moved_files(site)) == 4


class Crash(Exception):
    """Simulated crash: nothing runs after it."""


def crash_at(step: str, site: Site, patch: pytest.MonkeyPatch) -> None:
    """Make a move end where files are ``copied``, ``synced``, ``removed`` here or ``gone``."""
    sync, writing = ArchiveTree.sync, FilesRecords.writing

    def crashing_sync(tree: ArchiveTree) -> None:
        there = tree.root == str(common_of(site))
        if step == ("copied" if there else "removed"):
            raise Crash
        sync(tree)
        if there and step == "synced":
            raise Crash

    def crashing_writing(records: FilesRecords) -> Any:
        # Only the last transaction: the files are gone here by then.
        if step == "gone" and not archive.files(site):
            raise Crash
        return writing(records)

    patch.setattr(ArchiveTree, "sync", crashing_sync)
    patch.setattr(FilesRecords, "writing", crashing_writing)


@pytest.mark.parametrize("step", ["copied", "synced", "removed", "gone"])
def test_a_crash_is_completed_by_the_next_run(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))
    before = archive.files(site)
    with monkeypatch.context() as patch:
        crash_at(step, site, patch)
        with pytest.raises(Crash):
            ArchiveMover(site.settings, "files").run_once(stop)
    # At every moment in between it can be read.
    assert FilesReader(site.settings, "files").read(script.key, "script")
    mover = ArchiveMover(site.settings, "files")
    mover.run_once(stop)
    mover.run_once(stop)
    assert moved_files(site) == before
    assert archive.files(site) == {}
    assert list(verify_sink(site.settings, "files")) == []


def test_what_is_purged_while_it_is_copied_is_gone_everywhere(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    script, other = archive.script(site, 1), archive.script(site, 2)
    site.feed(script, other, archive.identity(script, name="private"), archive.identity(other))
    sync = ArchiveTree.sync
    purged: list[bool] = []

    def purge_meanwhile(tree: ArchiveTree) -> None:
        sync(tree)
        if tree.root == str(common_of(site)) and not purged:
            purged.append(True)
            site.feed(archive.purge(script))

    monkeypatch.setattr(ArchiveTree, "sync", purge_meanwhile)
    ArchiveMover(site.settings, "files").run_once(stop)
    assert set(moved_files(site)) == {f"{DAY}/2-run.sh", f"{DAY}/2-run.env"}
    assert archive.files(site) == {}
    for manifest in tmp_path.rglob("MANIFEST.jsonl"):
        assert b"private" not in manifest.read_bytes()


def test_what_is_purged_after_a_crash_is_gone_everywhere(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script, name="private"))
    with monkeypatch.context() as patch:
        crash_at("synced", site, patch)
        with pytest.raises(Crash):
            ArchiveMover(site.settings, "files").run_once(stop)
    assert len(moved_files(site)) == 2
    site.feed(archive.purge(script))
    ArchiveMover(site.settings, "files").run_once(stop)
    assert moved_files(site) == {}
    for manifest in tmp_path.rglob("MANIFEST.jsonl"):
        assert b"private" not in manifest.read_bytes()


def test_later_facts_and_purges_reach_what_was_moved(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path)
    unresolved, purged = archive.script(site, 1), archive.script(site, 2)
    site.feed(unresolved, purged, archive.identity(unresolved, 4001, ""), archive.identity(purged))
    mover = ArchiveMover(site.settings, "files")
    mover.run_once(stop)
    assert "alpha/4001/2026/03/01/1-run.sh" in moved_files(site)
    site.feed(archive.identity(unresolved, 4001, "ada", why="renamed"), archive.purge(purged))
    mover.run_once(stop)
    assert set(moved_files(site)) == {f"{DAY}/1-run.sh", f"{DAY}/1-run.env"}
    reader = FilesReader(site.settings, "files")
    assert reader.read(unresolved.key, "script") == b"#!/bin/sh\nhostname\n"
    assert reader.locate(purged.key) is None
    assert not (common_of(site) / "alpha/4001").exists()
    assert list(verify_sink(site.settings, "files")) == []


def test_a_later_owner_of_a_moved_script_is_in_the_manifest_of_the_second_tree(
    tmp_path: Path, stop: Stop
) -> None:
    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script, 4001, ""))
    ArchiveMover(site.settings, "files").run_once(stop)
    site.feed(archive.identity(script, 4001, "ada", why="renamed"))
    ArchiveMover(site.settings, "files").run_once(stop)
    assert f"{DAY}/1-run.sh" in moved_files(site)
    data = (common_of(site) / DAY / "MANIFEST.jsonl").read_bytes()
    users = [fact.record.user for fact in decode_facts(data) if fact.record]
    assert users[-1] == "ada"


@pytest.mark.parametrize("where", ["1-run.sh", "MANIFEST.jsonl", ""])
def test_a_purge_that_meets_something_in_the_way_is_not_forgotten(
    tmp_path: Path,
    stop: Stop,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    site = make_site(tmp_path)
    script, other = archive.script(site, 1), archive.script(site, 2)
    site.feed(script, other, archive.identity(script, name="run"), archive.identity(other))
    mover = ArchiveMover(site.settings, "files")
    mover.run_once(stop)
    there, aside = common_of(site) / DAY / where, tmp_path / "aside"
    there.rename(aside)
    if where:
        there.mkdir()
    else:
        there.write_text("in the way")
    site.feed(archive.purge(script))
    now_s = time.time()
    monkeypatch.setattr("steward.archive.files.mover.time.time", lambda: now_s)
    for _ in range(3):
        mover.run_once(stop)
        now_s += 3600
    assert caplog.text.count("cannot finish") == 1
    assert FilesReader(site.settings, "files").locate(script.key) is not None
    # It is left alone for a while.
    for _ in range(2):
        mover.run_once(stop)
        assert archive.rows(site, "SELECT tries FROM later") == [(4,)]
    if where:
        there.rmdir()
    else:
        there.unlink()
    aside.rename(there)
    now_s += 3600
    mover.run_once(stop)
    assert set(moved_files(site)) == {f"{DAY}/2-run.sh", f"{DAY}/2-run.env"}
    assert FilesReader(site.settings, "files").locate(script.key) is None
    lines = (common_of(site) / DAY / "MANIFEST.jsonl").read_text().splitlines()
    assert sum(script.key in each for each in lines) == 1
    assert archive.rows(site, "SELECT count(*) FROM later") == [(0,)]


def test_a_name_that_is_taken_there_keeps_both(tmp_path: Path, stop: Stop) -> None:

    site = make_site(tmp_path)
    mover = ArchiveMover(site.settings, "files")
    for number, data in enumerate((b"one", b"two", b"two")):
        script = archive.script(site, 1, data, environment=None, mtime_ns=NOON_NS + number)
        site.feed(script, archive.identity(script))
        mover.run_once(stop)
    assert sorted(moved_files(site).items()) == [
        (f"{DAY}/1-run.sh", b"one"),
        (f"{DAY}/1-run~2.sh", b"two"),
        (f"{DAY}/1-run~3.sh", b"two"),
    ]
    assert list(verify_sink(site.settings, "files")) == []


@pytest.mark.parametrize("damaged", ["sh", "env"])
def test_damaged_bytes_are_not_moved(
    tmp_path: Path, stop: Stop, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(tmp_path)
    script, good = archive.script(site, 1), archive.script(site, 2)
    site.feed(script, good, archive.identity(script), archive.identity(good))
    path = archive.root_of(site) / DAY / f"1-run.{damaged}"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"#")
    ArchiveMover(site.settings, "files").run_once(stop)
    assert script.key in caplog.text
    assert set(moved_files(site)) == {f"{DAY}/2-run.sh", f"{DAY}/2-run.env"}
    assert set(archive.files(site)) == {f"{DAY}/1-run.sh", f"{DAY}/1-run.env"}


def test_a_tree_on_another_file_system(tmp_path: Path, stop: Stop) -> None:
    here = tmp_path.stat().st_dev
    others = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    other = next((path for path in others if path.is_dir() and path.stat().st_dev != here), None)
    if other is None:
        pytest.skip("there is no second file system")
    common = other / f"steward-test-{os.getpid()}"
    try:
        site = archive.make_site(tmp_path, move_to=str(common), move_after_s=0.0)
        script = archive.script(site, 1)
        site.feed(script, archive.identity(script))
        ArchiveMover(site.settings, "files").run_once(stop)
        assert (common / DAY / "1-run.sh").read_bytes() == b"#!/bin/sh\nhostname\n"
    finally:
        shutil.rmtree(common, ignore_errors=True)


def test_a_sink_without_a_second_tree_has_no_mover(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="move_to"):
        ArchiveMover(archive.make_site(tmp_path).settings, "files")


def test_a_purge_after_a_crash_leaves_other_moved_files(
    tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    moved, script = archive.script(site, 2), archive.script(site, 1)
    site.feed(moved, archive.identity(moved))
    ArchiveMover(site.settings, "files").run_once(stop)
    before = moved_files(site)
    site.feed(script, archive.identity(script))
    with monkeypatch.context() as patch:
        crash_at("synced", site, patch)
        with pytest.raises(Crash):
            ArchiveMover(site.settings, "files").run_once(stop)
    assert len(moved_files(site)) == 4
    site.feed(archive.purge(script))
    ArchiveMover(site.settings, "files").run_once(stop)
    assert moved_files(site) == before


def test_the_manifest_of_the_first_tree_names_moved_scripts(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path)
    script, damaged = archive.script(site, 1), archive.script(site, 2, b"damaged")
    site.feed(script, damaged, archive.identity(script), archive.identity(damaged))
    (archive.root_of(site) / DAY / "2-run.sh").write_bytes(b"changed")
    ArchiveMover(site.settings, "files").run_once(stop)
    assert f"{DAY}/1-run.sh" in moved_files(site)
    assert ("moved", script.key) in archive.manifest(site, DAY)


def test_identical_scripts_are_one_file_in_the_second_tree(tmp_path: Path, stop: Stop) -> None:
    site = make_site(tmp_path)
    for number in (1, 2):
        script = archive.script(site, number)
        site.feed(script, archive.identity(script))
        ArchiveMover(site.settings, "files").run_once(stop)
    scripts = [archive.script(site, number) for number in (3, 4)]
    site.feed(*scripts, *map(archive.identity, scripts))
    ArchiveMover(site.settings, "files").run_once(stop)
    for end in ("sh", "env"):
        inodes = {
            (common_of(site) / DAY / f"{number}-run.{end}").stat().st_ino for number in range(1, 5)
        }
        assert len(inodes) == 1


def test_a_script_that_moves_while_it_is_read_is_read_from_the_second_tree(
    tmp_path: Path, stop: Stop
) -> None:
    site = make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script))

    class SlowReader(FilesReader):
        """Reader that the mover overtakes after the reader has located a file."""

        def locate(self, script_key: str, cluster: str = "") -> PlacedScript | None:
            placed = super().locate(script_key, cluster)
            ArchiveMover(site.settings, "files").run_once(stop)
            return placed

    assert SlowReader(site.settings, "files").read(script.key, "script") == archive.SCRIPT
    assert archive.files(site) == {}
    (common_of(site) / DAY / "1-run.sh").unlink()
    with pytest.raises(NotArchived, match=r"1-run\.sh is missing"):
        SlowReader(site.settings, "files").read(script.key, "script")
