"""Recovery of a batch after a kill, also with changed settings."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import archive
from harness.archive import DAY, ENVIRONMENT
from harness.events import NOON_NS
from harness.site import Site
from steward.archive.files import batch
from steward.archive.files.batch import PendingBatch
from steward.archive.files.layout import compile_layout
from steward.archive.files.manifest import iterate_scripts_in_tree
from steward.archive.files.reader import FilesReader
from steward.archive.files.verify import verify_sink
from steward.core.events import Event

SCRIPT = b"#!/bin/sh\n" + b"hostname\n" * 50


class Killed(BaseException):
    """Simulated SIGKILL, which no handler catches."""


def killed(monkeypatch: pytest.MonkeyPatch, site: Site, where: str, *events: Event) -> None:
    """Apply events, with a kill just before (``write_bytes``) or just after the commit."""

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PendingBatch, where, kill)
        with pytest.raises(Killed):
            site.feed(*events) if events else archive.sink_of(site).file_waiting()


def nothing_is_amiss(site: Site) -> bool:
    found = list(iterate_scripts_in_tree(str(archive.root_of(site)), compile_layout("default")))
    paths = [file.path for one in found for file in (one.script, one.environment) if file]
    waiting = archive.root_of(site) / ".waiting"
    return (
        list(verify_sink(site.settings, "files")) == []
        and sorted(paths) == sorted(archive.files(site))
        and (not waiting.exists() or not os.listdir(waiting))
        and archive.rows(site, "SELECT * FROM leaving") == []
    )


@pytest.mark.parametrize("before", ["none", "zstd"])
@pytest.mark.parametrize("after", ["none", "zstd"])
@pytest.mark.parametrize("where", ["write", "remove_replaced"])
@pytest.mark.parametrize("in_one", [False, True])
def test_a_kill_at_the_commit_and_another_setting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    where: str,
    in_one: bool,
) -> None:
    site = archive.make_site(tmp_path, compress=before)
    script = archive.script(site, 7, SCRIPT)
    identity = archive.identity(script)
    events = (script, identity) if in_one else (identity,)
    if not in_one:
        site.feed(script)
        archive.store_of(site).unlink([script.body.script.path, script.body.environment.path])
    killed(monkeypatch, site, where, *events)
    archive.reopen(site, compress=after)
    site.feed(*events)
    end = ".zst" if before == "zstd" else ""
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh{end}", f"{DAY}/7-run.env{end}"}
    assert nothing_is_amiss(site)
    reader = FilesReader(site.settings, "files")
    assert reader.read(script.key, "script") == SCRIPT
    site.feed(archive.purge(script))
    assert archive.files(site) == {}
    assert nothing_is_amiss(site)


def test_what_has_another_name_for_its_job_id_came_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    first, second = (
        archive.script(site, 7, b"first"),
        archive.script(site, 7, b"second", mtime_ns=NOON_NS + 10**9),
    )
    site.feed(first, archive.identity(first), second)
    killed(monkeypatch, site, "write", archive.identity(second))
    archive.reopen(site, compress="zstd")
    site.feed(archive.identity(second))
    assert {path: data for path, data in archive.files(site).items() if ".sh" in path} == {
        f"{DAY}/7-run.sh": b"first",
        f"{DAY}/7-run~2.sh": b"second",
    }
    assert nothing_is_amiss(site)


@pytest.mark.parametrize("where", ["write", "remove_replaced"])
@pytest.mark.parametrize("before", ["none", "zstd"])
@pytest.mark.parametrize("after", ["none", "zstd"])
def test_a_job_that_is_known_after_a_kill_lies_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, before: str, after: str
) -> None:
    site = archive.make_site(tmp_path, compress=before)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script)
    killed(monkeypatch, site, where)
    archive.reopen(site, compress=after)
    site.feed(archive.identity(script))
    assert {path.rpartition(".sh")[0] for path in archive.files(site) if ".sh" in path} == {
        f"{DAY}/7-run"
    }
    assert len(archive.files(site)) == 2
    assert nothing_is_amiss(site)


@pytest.mark.parametrize("where", ["write", "remove_replaced"])
def test_a_kill_while_a_job_gets_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script, archive.identity(script))
    other = archive.identity(script, uid=4002, user="bela", why="updated")
    killed(monkeypatch, site, where, other)
    archive.reopen(site, compress="zstd")
    site.feed(other)
    theirs = DAY.replace("ada", "bela")
    assert set(archive.files(site)) == {f"{theirs}/7-run.sh", f"{theirs}/7-run.env"}
    assert not (archive.root_of(site) / DAY).exists()
    assert nothing_is_amiss(site)


def test_a_start_after_a_kill_removes_directories_that_became_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script, archive.identity(script))
    other = archive.identity(script, uid=4002, user="bela", why="updated")
    killed(monkeypatch, site, "remove_replaced", other)
    assert (archive.root_of(site) / DAY).exists()
    archive.reopen(site)
    site.feed(archive.script(site, 8, SCRIPT))
    assert not (archive.root_of(site) / DAY).exists()


def test_who_gets_back_what_was_another_owners_in_one_batch_keeps_it(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script, archive.identity(script))
    site.feed(
        archive.identity(script, uid=4002, user="bela", why="updated"),
        archive.identity(script, why="again"),
    )
    assert archive.files(site) == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert nothing_is_amiss(site)


def test_a_purge_removes_what_another_setting_left(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script, archive.identity(script))
    (tmp_path / "other").mkdir()
    other = archive.make_site(tmp_path / "other", compress="zstd")
    theirs = archive.script(other, 7, SCRIPT)
    other.feed(theirs, archive.identity(theirs))
    for path, data in archive.files(other).items():
        (archive.root_of(site) / path).write_bytes(data)
    strange = archive.root_of(site) / DAY / "7-run~2.sh"
    strange.write_bytes(b"nobody's")
    site.feed(archive.purge(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run~2.sh"}


def test_what_is_lost_keeps_its_row_and_can_be_had_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, SCRIPT)
    site.feed(script)
    kept = archive.root_of(site) / ".waiting" / script.body.script.path
    data = kept.read_bytes()
    kept.unlink()
    archive.sink_of(site).file_waiting()
    archive.sink_of(site).file_waiting()
    assert caplog.text.count("cannot archive") == 1
    assert FilesReader(site.settings, "files").locate(script.key) is None
    kept.write_bytes(data)
    archive.reopen(site)
    site.feed(archive.identity(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    ((since_ns,),) = archive.rows(site, "SELECT since_ns FROM script")
    assert since_ns < 2**62
    assert nothing_is_amiss(site)


def test_a_script_that_could_not_be_unpacked_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_PLAIN_BYTES", len(SCRIPT) - 1)
    site = archive.make_site(tmp_path, compress="zstd")
    script = archive.script(site, 7, SCRIPT)
    site.feed(script, archive.identity(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env.zst"}
    assert FilesReader(site.settings, "files").read(script.key, "script") == SCRIPT
    assert nothing_is_amiss(site)


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("compress", ["none", "zstd"])
@pytest.mark.parametrize("knows_noreplace", [True, False])
def test_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str, knows_noreplace: bool
) -> None:
    no_links(monkeypatch)
    if not knows_noreplace:
        monkeypatch.setattr("steward.core.files.RENAME_NOREPLACE", 1 << 20)
    site = archive.make_site(tmp_path, compress=compress)
    first, second = (
        archive.script(site, 7, b"first"),
        archive.script(site, 7, b"second", mtime_ns=NOON_NS + 10**9),
    )
    site.feed(first, second)
    killed(monkeypatch, site, "write", archive.identity(first), archive.identity(second))
    archive.reopen(site, compress="none")
    site.feed(archive.identity(first), archive.identity(second))
    end = ".zst" if compress == "zstd" else ""
    assert {path for path in archive.files(site) if ".sh" in path} == {
        f"{DAY}/7-run.sh{end}",
        f"{DAY}/7-run~2.sh{end}",
    }
    assert nothing_is_amiss(site)
    names = os.listdir(archive.root_of(site) / DAY)
    assert not [name for name in names if name.startswith(".")]


def waits(site: Site) -> bool:
    return bool(archive.rows(site, "SELECT 1 FROM script WHERE state = 0"))


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["script", "known", "other", "overdue", "purge"]),
        st.integers(1, 3),
        st.sampled_from(["none", "none", "finish", "write", "remove_replaced"]),
        st.sampled_from(["none", "zstd"]),
    ),
    max_size=10,
)


@given(steps=_STEPS)
@settings(max_examples=60, deadline=None)
def test_no_kill_leaves_anything_astray(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str, str]]
) -> None:
    site = archive.make_site(tmp_path_factory.mktemp("site"))
    archive.sink_of(site).prepare()
    known: dict[int, Event] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for what, number, kill, compress in steps:
            events: tuple[Event, ...] = ()
            if what == "script":
                if number in known:
                    continue
                known[number] = archive.script(site, number, b"%d" % number * 20)
                events = (known[number],)
            elif number not in known:
                continue
            elif what == "known":
                events = (archive.identity(known[number]),)
            elif what == "other":
                events = (archive.identity(known[number], uid=4002, user="bela", why="updated"),)
            elif what == "purge":
                events = (archive.purge(known.pop(number)),)
            if kill != "none":
                if events or waits(site):
                    killed(monkeypatch, site, kill, *events)
                archive.reopen(site, compress=compress)
            if events:
                site.feed(*events)
            else:
                archive.sink_of(site).file_waiting()
    archive.sink_of(site).file_waiting()
    assert nothing_is_amiss(site)
    scripts = FilesReader(site.settings, "files")
    for number, script in known.items():
        assert scripts.read(script.key, "script") == b"%d" % number * 20
    assert len(archive.files(site)) == 2 * len(known)
