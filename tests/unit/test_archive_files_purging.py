"""What the files sink forgets: what is purged from it, from its store, and by retention."""

import errno
import os
import time
from pathlib import Path

import pytest
from archive_site import DAY, ENVIRONMENT, NOON, SCRIPT, Site, manifest

from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.tree import Tree


def test_purge_forgets_files_and_lines(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    one, two, three = site.script(1), site.script(2), site.script(3, name="other")
    site.apply(one, two, three)
    site.apply(site.identity(one, name="private"), site.identity(two))
    site.apply(site.purge(one))
    assert f"{DAY}/1-private.sh" not in site.files()
    everything = b"".join(p.read_bytes() for p in site.root.rglob("MANIFEST.jsonl"))
    assert b"private" not in everything
    assert manifest(site, DAY)[-1] == ("purged", one.key)
    site.apply(site.purge(two), site.purge(three))
    assert site.files() == {}
    assert not (site.root / "alpha").exists()
    assert not (site.root / "unverified").exists()
    site.apply(site.identity(one))
    assert site.files() == {}


def test_purge_of_what_waits_and_of_another_sink(tmp_path: Path) -> None:
    site = Site(tmp_path)
    one, two = site.script(1), site.script(2)
    site.apply(one, two)
    site.apply(site.purge(one), site.purge(two, sink="other"))
    site.apply(site.identity(one), site.identity(two))
    assert set(site.files()) == {f"{DAY}/2-run.sh", f"{DAY}/2-run.env"}


@pytest.mark.parametrize("store", ["archive.files", "state"])
@pytest.mark.parametrize("state", ["fresh", "waiting", "placed"])
def test_a_purge_empties_the_store_too(tmp_path: Path, store: str, state: str) -> None:
    site = Site(tmp_path)
    script, other = site.script(7, store=store), site.script(8, store=store)
    kept = {f"alpha.8.{NOON}.{len(SCRIPT)}.script", f"alpha.8.{NOON}.{len(ENVIRONMENT)}.env"}
    directory = site.store(store).directory
    if state == "fresh":
        site.apply(script, other, site.purge(script))
    else:
        site.apply(script, other, *([site.identity(script)] if state == "placed" else []))
        assert len(os.listdir(directory)) == 4
        site.apply(site.purge(script, sink="files"), site.purge(other, sink="elsewhere"))
        assert len(os.listdir(directory)) == 4
        site.apply(script)
        site.apply(site.purge(script))
    assert set(os.listdir(directory)) == kept
    site.apply(site.purge(script))


def test_a_batch_that_comes_again_finds_what_it_purges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, layout="sarchive")
    script = site.script(7)
    batch = (script, site.purge(script))

    def full(_: Tree) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Tree, "sync", full)
    with pytest.raises(ArchiveUnavailable):
        site.apply(*batch)
    monkeypatch.undo()
    site.apply(*batch)
    assert site.files() == {}
    assert os.listdir(site.store().directory) == []


def test_a_script_may_come_and_be_purged_in_one_batch(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    script = site.script(1)
    site.apply(script, site.purge(script))
    assert site.files() == {}
    site.apply(site.script(1))
    assert len(site.files()) == 2


def test_retention_asks_once_and_acts_on_the_answer(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False, retention_days=1)
    site.apply(site.script(1), site.script(2))
    site.tick()
    site.tick()
    assert [event.body.asked_by for event in site.appended] == ["retention"]
    assert site.appended[0].body.sink == "files"
    site.apply(*site.appended)
    assert site.files() == {}


def test_retention_asks_for_each_directory_by_itself_and_again_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, slurm=False, retention_days=1)
    site.apply(site.script(1), site.script(2, mtime_ns=NOON - 86400 * 10**9))
    site.tick()
    first = {event.key for event in site.appended}
    assert [len(event.body.script_keys) for event in site.appended] == [1, 1]
    # They were set aside; what stopped them is mended.
    now_s, ns = time.time() + 3600, time.time_ns() + 3600 * 10**9
    monkeypatch.setattr("steward.archive.files.retention.time.time", lambda: now_s)
    monkeypatch.setattr("steward.archive.files.retention.time.time_ns", lambda: ns)
    site.tick()
    assert len({event.key for event in site.appended} - first) == 2
