"""What a kill leaves of a batch is completed by the next start, whatever was set since."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from archive_site import ENVIRONMENT, Site
from hypothesis import given, settings
from hypothesis import strategies as st

from steward.archive.files import pending
from steward.archive.files.found import iter_files
from steward.archive.files.layout import compile_layout
from steward.archive.files.pending import Pending
from steward.archive.files.places import FilesReader
from steward.archive.files.verify import verify
from steward.core.events import Event

DAY = "alpha/ada/2026/03/05"
SCRIPT = b"#!/bin/sh\n" + b"hostname\n" * 50


class Killed(BaseException):
    """Stands for SIGKILL: nobody handles it."""


def killed(monkeypatch: pytest.MonkeyPatch, site: Site, where: str, *events: Event) -> None:
    """Apply events, and be killed just before (``write``) or just after the commit."""

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Pending, where, kill)
        with pytest.raises(Killed):
            site.apply(*events) if events else site.sink.file_waiting()


def restarted(site: Site, **sink: Any) -> Site:
    other = Site(site.directory, **sink)
    other.position = site.position
    other.sink.prepare()
    return other


def nothing_is_amiss(site: Site) -> bool:
    found = list(iter_files(str(site.root), compile_layout("default")))
    paths = [file.path for one in found for file in (one.script, one.environment) if file]
    waiting = site.root / ".waiting"
    return (
        list(verify(site.settings, "files")) == []
        and sorted(paths) == sorted(site.files())
        and (not waiting.exists() or not os.listdir(waiting))
        and site.rows("SELECT * FROM leaving") == []
    )


@pytest.mark.parametrize("before", ["none", "zstd"])
@pytest.mark.parametrize("after", ["none", "zstd"])
@pytest.mark.parametrize("where", ["write", "written"])
@pytest.mark.parametrize("in_one", [False, True])
def test_a_kill_at_the_commit_and_another_setting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    where: str,
    in_one: bool,
) -> None:
    site = Site(tmp_path, compress=before)
    script = site.script(7, SCRIPT)
    identity = site.identity(script)
    events = (script, identity) if in_one else (identity,)
    if not in_one:
        site.apply(script)
        site.store().unlink([script.body.script.path, script.body.environment.path])
    killed(monkeypatch, site, where, *events)
    site = restarted(site, compress=after)
    site.apply(*events)
    end = ".zst" if before == "zstd" else ""
    assert set(site.files()) == {f"{DAY}/7-run.sh{end}", f"{DAY}/7-run.env{end}"}
    assert nothing_is_amiss(site)
    reader = FilesReader(site.settings, "files")
    assert reader.read(script.key, "script") == SCRIPT
    site.apply(site.purge(script))
    assert site.files() == {}
    assert nothing_is_amiss(site)


def test_what_has_another_name_for_its_job_id_came_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    first, second = site.script(7, b"first"), site.script(7, b"second", mtime_ns=1772712001 * 10**9)
    site.apply(first, site.identity(first), second)
    killed(monkeypatch, site, "write", site.identity(second))
    site = restarted(site, compress="zstd")
    site.apply(site.identity(second))
    assert {path: data for path, data in site.files().items() if ".sh" in path} == {
        f"{DAY}/7-run.sh": b"first",
        f"{DAY}/7-run~2.sh": b"second",
    }
    assert nothing_is_amiss(site)


@pytest.mark.parametrize("where", ["write", "written"])
@pytest.mark.parametrize("after", ["none", "zstd"])
def test_a_job_that_is_known_after_a_kill_lies_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, after: str
) -> None:
    site = Site(tmp_path)
    script = site.script(7, SCRIPT)
    site.apply(script)
    killed(monkeypatch, site, where)
    site = restarted(site, compress=after)
    site.apply(site.identity(script))
    assert {path.rpartition(".sh")[0] for path in site.files() if ".sh" in path} == {f"{DAY}/7-run"}
    assert len(site.files()) == 2
    assert nothing_is_amiss(site)


@pytest.mark.parametrize("where", ["write", "written"])
def test_a_kill_while_a_job_gets_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    site = Site(tmp_path)
    script = site.script(7, SCRIPT)
    site.apply(script, site.identity(script))
    other = site.identity(script, uid=4002, user="bela", why="updated")
    killed(monkeypatch, site, where, other)
    site = restarted(site, compress="zstd")
    site.apply(other)
    theirs = DAY.replace("ada", "bela")
    assert set(site.files()) == {f"{theirs}/7-run.sh", f"{theirs}/7-run.env"}
    assert not (site.root / DAY).exists()
    assert nothing_is_amiss(site)


def test_who_gets_back_what_was_another_owners_in_one_batch_keeps_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7, SCRIPT)
    site.apply(script, site.identity(script))
    site.apply(
        site.identity(script, uid=4002, user="bela", why="updated"),
        site.identity(script, why="again"),
    )
    assert site.files() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert nothing_is_amiss(site)


def test_a_purge_removes_what_another_setting_left(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7, SCRIPT)
    site.apply(script, site.identity(script))
    (tmp_path / "other").mkdir()
    other = Site(tmp_path / "other", compress="zstd")
    theirs = other.script(7, SCRIPT)
    other.apply(theirs, other.identity(theirs))
    for path, data in other.files().items():
        (site.root / path).write_bytes(data)
    strange = site.root / DAY / "7-run~2.sh"
    strange.write_bytes(b"nobody's")
    site.apply(site.purge(script))
    assert set(site.files()) == {f"{DAY}/7-run~2.sh"}


def test_what_is_lost_keeps_its_row_and_can_be_had_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    script = site.script(7, SCRIPT)
    site.apply(script)
    kept = site.root / ".waiting" / script.body.script.path
    data = kept.read_bytes()
    kept.unlink()
    site.sink.file_waiting()
    site.sink.file_waiting()
    assert caplog.text.count("cannot file") == 1
    assert FilesReader(site.settings, "files").locate(script.key) is None
    kept.write_bytes(data)
    site = restarted(site)
    site.apply(site.identity(script))
    assert set(site.files()) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    ((since_ns,),) = site.rows("SELECT since_ns FROM script")
    assert since_ns < 2**62
    assert nothing_is_amiss(site)


def test_a_script_that_could_not_be_unpacked_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LONGEST", len(SCRIPT) - 1)
    site = Site(tmp_path, compress="zstd")
    script = site.script(7, SCRIPT)
    site.apply(script, site.identity(script))
    assert set(site.files()) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env.zst"}
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
        monkeypatch.setattr("steward.core.filesystems.RENAME_NOREPLACE", 1 << 20)
    site = Site(tmp_path, compress=compress)
    first, second = site.script(7, b"first"), site.script(7, b"second", mtime_ns=1772712001 * 10**9)
    site.apply(first, second)
    killed(monkeypatch, site, "write", site.identity(first), site.identity(second))
    site = restarted(site, compress="none")
    site.apply(site.identity(first), site.identity(second))
    end = ".zst" if compress == "zstd" else ""
    assert {path for path in site.files() if ".sh" in path} == {
        f"{DAY}/7-run.sh{end}",
        f"{DAY}/7-run~2.sh{end}",
    }
    assert nothing_is_amiss(site)
    names = os.listdir(site.root / DAY)
    assert not [name for name in names if name.startswith(".")]


def waits(site: Site) -> bool:
    return bool(site.rows("SELECT 1 FROM script WHERE state = 0"))


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["script", "known", "other", "overdue", "purge"]),
        st.integers(1, 3),
        st.sampled_from(["none", "none", "finish", "write", "written"]),
        st.sampled_from(["none", "zstd"]),
    ),
    max_size=10,
)


@given(steps=_STEPS)
@settings(max_examples=60, deadline=None)
def test_no_kill_leaves_anything_astray(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str, str]]
) -> None:
    site = Site(tmp_path_factory.mktemp("site"))
    site.sink.prepare()
    known: dict[int, Event] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for what, number, kill, compress in steps:
            events: tuple[Event, ...] = ()
            if what == "script":
                if number in known:
                    continue
                known[number] = site.script(number, b"%d" % number * 20)
                events = (known[number],)
            elif number not in known:
                continue
            elif what == "known":
                events = (site.identity(known[number]),)
            elif what == "other":
                events = (site.identity(known[number], uid=4002, user="bela", why="updated"),)
            elif what == "purge":
                events = (site.purge(known.pop(number)),)
            if kill != "none":
                if events or waits(site):
                    killed(monkeypatch, site, kill, *events)
                site = restarted(site, compress=compress)
            if events:
                site.apply(*events)
            else:
                site.sink.file_waiting()
    site.sink.file_waiting()
    assert nothing_is_amiss(site)
    scripts = FilesReader(site.settings, "files")
    for number, script in known.items():
        assert scripts.read(script.key, "script") == b"%d" % number * 20
    assert len(site.files()) == 2 * len(known)
