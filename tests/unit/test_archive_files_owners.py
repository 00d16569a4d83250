import errno
import itertools
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.site import Site
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.index import FilesRecords
from steward.archive.files.owners import DirectoryOwners, resolve_user_name
from steward.archive.files.permissions import read_acl_readers


def reader(site: Site, path: str) -> int | None:
    fd = os.open(archive.root_of(site) / path, os.O_RDONLY)
    try:
        return read_acl_readers(fd).uid
    finally:
        os.close(fd)


def test_a_name_taken_over_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    old, new = archive.script(site, 1), archive.script(site, 2)
    site.feed(old, archive.identity(old, 4001, "ada"))
    site.reopen()
    site.feed(new, archive.identity(new, 4002, "ada"))
    assert "alpha/ada/2026/03/01/1-run.sh" in archive.files(site)
    assert "alpha/ada.4002/2026/03/01/2-run.sh" in archive.files(site)


def test_a_uid_taken_over_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    old, new = archive.script(site, 1), archive.script(site, 2)
    site.feed(old, archive.identity(old, 4001, "ada"))
    site.feed(new, archive.identity(new, 4001, "bela"))
    assert "alpha/bela/2026/03/01/2-run.sh" in archive.files(site)


def test_a_directory_of_another_uid_is_not_taken_over_without_the_database(
    tmp_path: Path,
) -> None:
    site = archive.make_site(tmp_path)
    if not archive.has_acls(site):
        pytest.skip("the file system has no POSIX ACLs")
    old = archive.script(site, 1)
    site.feed(old, archive.identity(old, 4001, "ada"))
    archive.sink_of(site).close()
    for path in site.state.glob("archive-files.db*"):
        path.unlink()
    site.reopen()
    new = archive.script(site, 2)
    site.feed(new, archive.identity(new, 4002, "ada"))
    assert "alpha/ada.4002/2026/03/01/2-run.sh" in archive.files(site)


def test_an_unresolved_uid_is_kept_under_its_number_and_renamed(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script, 4001, ""))
    assert "alpha/4001/2026/03/01/1-run.sh" in archive.files(site)
    if archive.has_acls(site):
        assert reader(site, "alpha/4001") is None
    site.feed(archive.identity(script, 4001, "ada", why="renamed"))
    assert set(archive.files(site)) == {
        "alpha/ada/2026/03/01/1-run.sh",
        "alpha/ada/2026/03/01/1-run.env",
    }
    assert not (archive.root_of(site) / "alpha/4001").exists()


def test_a_later_name_of_the_job_or_user_moves_nothing(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script, 4001, "ada"))
    site.feed(archive.identity(script, 4001, "ada-new", name="new", why="updated"))
    assert "alpha/ada/2026/03/01/1-run.sh" in archive.files(site)


@pytest.mark.parametrize(
    ("layout", "path"), [("default", "alpha/ada"), ("sarchive", "2026/job.1_script")]
)
def test_a_reused_uid_loses_access_until_it_is_the_same_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, path: str
) -> None:
    site = archive.make_site(tmp_path, layout=layout)
    if not archive.has_acls(site):
        pytest.skip("the file system has no POSIX ACLs")
    caplog.set_level("INFO")
    script = archive.script(site, 1)
    site.feed(script, archive.identity(script, 4001, "ada"))
    site.user_names = {4001: "ada"}
    archive.sink_of(site).tick(site.append)
    assert reader(site, path) == 4001
    for names, expected in (({4001: "mallory"}, None), ({}, None), ({4001: "ada"}, 4001)):
        site.user_names = names
        site.clock.now_s += 60.0
        archive.sink_of(site).tick(site.append)
        assert reader(site, path) == expected
        later = archive.script(site, 100)
        site.feed(later, archive.identity(later, 4001, "ada"))
        assert reader(site, path) == expected
    assert "4001" in caplog.text


def check(site: Site, names: dict[int, str]) -> None:
    site.user_names = names
    site.clock.now_s += 60.0
    while not archive.sink_of(site).tick(site.append):
        pass


def site_of(tmp_path: Path, *uids: int, **sink: Any) -> Site:
    """Make a Site at which each uid is called u<uid> and has the script of one job."""
    site = archive.make_site(tmp_path, **sink)
    if not archive.has_acls(site):
        pytest.skip("the file system has no POSIX ACLs")
    site.user_names = {uid: f"u{uid}" for uid in uids}
    for uid in uids:
        script = archive.script(site, uid)
        site.feed(script, archive.identity(script, uid, f"u{uid}"))
    return site


def test_an_absent_name_service_closes_nobodys_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uids = (4001, 4002, 4003)
    site = site_of(tmp_path, *uids)
    for _ in range(4):
        check(site, {4003: "u4003"})
        assert [reader(site, f"alpha/u{uid}") for uid in uids] == list(uids)
    assert caplog.text.count("name service") == 1
    check(site, {uid: f"u{uid}" for uid in uids})
    check(site, {4001: "mallory"})
    assert [reader(site, f"alpha/u{uid}") for uid in uids] == [None, 4002, 4003]


def test_who_has_no_name_is_shut_out_when_missed_twice_in_a_row(tmp_path: Path) -> None:
    uids = (4001, 4002, 4003)
    site = site_of(tmp_path, *uids)
    everybody = {uid: f"u{uid}" for uid in uids}
    without = {4002: "u4002", 4003: "u4003"}
    for names, expected in (
        (without, 4001),
        (everybody, 4001),
        (without, 4001),
        (without, None),
        (without, None),
        (everybody, 4001),
    ):
        check(site, names)
        assert reader(site, "alpha/u4001") == expected
        assert reader(site, "alpha/u4002") == 4002


def test_a_slow_name_service_is_asked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path, 4001, 4002, 4003)
    names = {4001: "mallory", 4002: "u4002", 4003: "u4003"}
    ticking = itertools.count()
    monkeypatch.setattr("steward.archive.files.owners.time.monotonic", lambda: next(ticking))
    with closing(FilesRecords(site.settings, "files", read_only=True)) as records:
        owners = DirectoryOwners(records, names.__getitem__)
        found = [owners.check() for _ in range(3)]
    assert found == [None, None, [(4001, "u4001", True)]]


@pytest.mark.parametrize(
    ("layout", "path"), [("default", "alpha/u4001"), ("sarchive", "2026/job.4001_script")]
)
def test_a_job_of_a_uid_under_another_name_shuts_the_other_out_at_once(
    tmp_path: Path, layout: str, path: str
) -> None:
    site = site_of(tmp_path, 4001, layout=layout)
    site.user_names = {4001: "new"}
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script, 4001, "new"))
    assert reader(site, path) is None
    mine = {"default": "alpha/new", "sarchive": "2026/job.7_script"}[layout]
    assert reader(site, mine) == 4001
    late = archive.script(site, 8)
    # A late event about the former owner of the uid.
    site.feed(late, archive.identity(late, 4001, "older"))
    theirs = {"default": "alpha/older", "sarchive": "2026/job.8_script"}[layout]
    assert reader(site, theirs) is None
    site.reopen()
    check(site, {4001: "new"})
    assert [reader(site, each) for each in (path, mine, theirs)] == [None, 4001, None]


def test_many_files_are_closed_page_by_page_and_after_a_restart(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, layout="sarchive", page_rows=2)
    if not archive.has_acls(site):
        pytest.skip("the file system has no POSIX ACLs")
    scripts = [archive.script(site, number) for number in range(1, 6)]
    site.feed(*scripts, *[archive.identity(script) for script in scripts])
    (archive.root_of(site) / "2026/job.2_script").unlink()
    (archive.root_of(site) / "2026/job.3_script").unlink()
    (archive.root_of(site) / "2026/job.3_script").symlink_to("/etc/passwd")
    numbers = (1, 4, 5)

    def open_files() -> int:
        return sum(reader(site, f"2026/job.{each}_script") is not None for each in numbers)

    site.user_names = {4001: "mallory"}
    left = [open_files()]
    waits_s = []
    while left[-1]:
        waits_s.append(archive.sink_of(site).tick(site.append))
        left.append(open_files())
        # As after a crash: only the disk shows which steps are done.
        site.reopen()
    assert left == [3, 2, 1, 0]
    assert waits_s[0] == 0.0
    assert reader(site, "2026/job.5_environment") is None
    assert archive.sink_of(site).tick(site.append) > 0.0, "nothing is left to do"


def test_uids_resolve_to_names_or_nothing() -> None:
    assert resolve_user_name(0) == "root"
    assert resolve_user_name(2**31 - 7) == ""
    assert resolve_user_name(2**40) == ""


def test_the_only_owner_without_a_name_is_shut_out(tmp_path: Path) -> None:
    site = site_of(tmp_path, 4001)
    check(site, {})
    assert reader(site, "alpha/u4001") == 4001
    check(site, {})
    assert reader(site, "alpha/u4001") is None


def test_owners_of_a_failed_batch_are_recorded_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(ArchiveUnavailable):
            site.feed(script, archive.identity(script, 4001, "ada"))
    site.feed(script, archive.identity(script, 4001, "ada"))
    assert archive.rows(site, "SELECT uid, user, directory FROM owner") == [(4001, "ada", "ada")]
