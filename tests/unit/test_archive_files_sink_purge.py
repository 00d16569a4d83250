"""Purge in the files sink: on request, from its store, and by retention."""

import errno
import os
import time
from pathlib import Path

import pytest

from harness import archive
from harness.archive import DAY, ENVIRONMENT, SCRIPT
from harness.events import NOON_NS
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.tree import ArchiveTree


def test_purge_forgets_files_and_lines(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    one, two, three = (
        archive.script(site, 1),
        archive.script(site, 2),
        archive.script(site, 3, name="other"),
    )
    site.feed(one, two, three)
    site.feed(archive.identity(one, name="private"), archive.identity(two))
    site.feed(archive.purge(one))
    assert f"{DAY}/1-private.sh" not in archive.files(site)
    everything = b"".join(p.read_bytes() for p in archive.root_of(site).rglob("MANIFEST.jsonl"))
    assert b"private" not in everything
    assert archive.manifest(site, DAY)[-1] == ("purged", one.key)
    site.feed(archive.purge(two), archive.purge(three))
    assert archive.files(site) == {}
    assert not (archive.root_of(site) / "alpha").exists()
    assert not (archive.root_of(site) / "unverified").exists()
    site.feed(archive.identity(one))
    assert archive.files(site) == {}


def test_purge_of_what_waits_and_of_another_sink(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    one, two = archive.script(site, 1), archive.script(site, 2)
    site.feed(one, two)
    site.feed(archive.purge(one), archive.purge(two, sink="other"))
    site.feed(archive.identity(one), archive.identity(two))
    assert set(archive.files(site)) == {f"{DAY}/2-run.sh", f"{DAY}/2-run.env"}


@pytest.mark.parametrize("store", ["archive.files", "state"])
@pytest.mark.parametrize("state", ["fresh", "waiting", "placed"])
def test_a_purge_empties_the_store_too(tmp_path: Path, store: str, state: str) -> None:
    site = archive.make_site(tmp_path)
    script, other = archive.script(site, 7, store=store), archive.script(site, 8, store=store)
    kept = {f"alpha.8.{NOON_NS}.{len(SCRIPT)}.script", f"alpha.8.{NOON_NS}.{len(ENVIRONMENT)}.env"}
    directory = archive.store_of(site, store).directory
    if state == "fresh":
        site.feed(script, other, archive.purge(script))
    else:
        site.feed(script, other, *([archive.identity(script)] if state == "placed" else []))
        assert len(os.listdir(directory)) == 4
        site.feed(archive.purge(script, sink="files"), archive.purge(other, sink="elsewhere"))
        assert len(os.listdir(directory)) == 4
        site.feed(script)
        site.feed(archive.purge(script))
    assert set(os.listdir(directory)) == kept
    site.feed(archive.purge(script))


def test_a_batch_that_comes_again_finds_what_it_purges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path, layout="sarchive")
    script = archive.script(site, 7)
    batch = (script, archive.purge(script))

    def full(_: ArchiveTree) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArchiveTree, "sync", full)
    with pytest.raises(ArchiveUnavailable):
        site.feed(*batch)
    monkeypatch.undo()
    site.feed(*batch)
    assert archive.files(site) == {}
    assert os.listdir(archive.store_of(site).directory) == []


def test_a_script_may_come_and_be_purged_in_one_batch(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    script = archive.script(site, 1)
    site.feed(script, archive.purge(script))
    assert archive.files(site) == {}
    site.feed(archive.script(site, 1))
    assert len(archive.files(site)) == 2


def test_retention_asks_once_and_acts_on_the_answer(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False, retention_days=1)
    site.feed(archive.script(site, 1), archive.script(site, 2))
    asked = [*site.tick(), *site.tick()]
    assert [event.body.asked_by for event in asked] == ["retention"]
    assert asked[0].body.sink == "files"
    site.feed()
    assert archive.files(site) == {}


def test_retention_asks_for_each_directory_by_itself_and_again_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path, slurm=False, retention_days=1)
    site.feed(archive.script(site, 1), archive.script(site, 2, mtime_ns=NOON_NS - 86400 * 10**9))
    first = site.tick()
    assert [len(event.body.script_keys) for event in first] == [1, 1]
    # They were set aside; what stopped them is mended.
    now_s, ns = time.time() + 3600, time.time_ns() + 3600 * 10**9
    monkeypatch.setattr("steward.archive.files.retention.time.time", lambda: now_s)
    monkeypatch.setattr("steward.archive.files.retention.time.time_ns", lambda: ns)
    assert len({event.key for event in site.tick()} - {event.key for event in first}) == 2


def test_a_purge_of_a_waiting_script_removes_its_waiting_files(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script, other = archive.script(site, 1), archive.script(site, 2)
    site.feed(script, other)
    waiting = archive.root_of(site) / ".waiting"
    assert len(os.listdir(waiting)) == 4
    site.feed(archive.purge(script))
    assert sorted(os.listdir(waiting)) == sorted(
        [other.body.script.path, other.body.environment.path]
    )


def test_a_purge_in_the_batch_of_the_script_leaves_no_manifest_line(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script, other = archive.script(site, 1), archive.script(site, 2)
    site.feed(
        *(script, archive.identity(script, name="private")),
        *(other, archive.identity(other)),
        archive.purge(script),
    )
    text = (archive.root_of(site) / DAY / "MANIFEST.jsonl").read_text()
    assert "private" not in text
    assert [fact for fact, key in archive.manifest(site, DAY) if key == other.key] == [
        "kept",
        "identity",
    ]
