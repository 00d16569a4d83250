import grp
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import archive
from harness.archive import DAY
from steward.archive.errors import ArchiveError
from steward.archive.files import permissions
from steward.archive.files.permissions import FileReaders, read_acl_readers

ADA, BELA, STAFF = 54001, 54002, 54100


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Make a directory that every user can pass through: pytest's own belong to root alone."""
    if os.getuid() != 0:
        pytest.skip("reading as another user needs root")
    path = Path(tempfile.mkdtemp(prefix="steward-acl-"))
    path.chmod(0o755)
    fd = os.open(path, os.O_RDONLY)
    has_acls = permissions.supports_acls(fd)
    os.close(fd)
    if not has_acls:
        pytest.skip("the file system of the temporary directory has no POSIX ACLs")
    yield path
    shutil.rmtree(path)


def as_user(uid: int, gids: tuple[int, ...], work: Callable[[], object]) -> bool:
    """Return whether ``work`` succeeds as a user, in a separate process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(list(gids))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, 13}
    return code == 0


def can_read(path: Path, uid: int, *gids: int) -> bool:
    return as_user(uid, gids, path.read_bytes)


def can_list(path: Path, uid: int, *gids: int) -> bool:
    return as_user(uid, gids, lambda: os.listdir(path))


def test_only_the_owner_reads(open_path: Path) -> None:
    site = archive.make_site(open_path)
    script = archive.script(site, 7)
    other = archive.script(site, 8)
    site.feed(script, other, archive.identity(script, ADA), archive.identity(other, BELA, "bela"))
    for suffix in ("sh", "env"):
        path = archive.root_of(site) / DAY / f"7-run.{suffix}"
        assert can_read(path, ADA)
        assert not can_read(path, BELA)
        assert path.stat().st_mode & 0o007 == 0
    assert can_read(archive.root_of(site) / DAY / "MANIFEST.jsonl", ADA)
    assert can_list(archive.root_of(site) / DAY, ADA)
    assert not can_list(archive.root_of(site) / "alpha/ada", BELA)
    assert not can_list(archive.root_of(site) / "alpha", ADA)
    assert not can_list(archive.root_of(site), ADA)
    assert not as_user(ADA, (), lambda: (archive.root_of(site) / DAY / "new").write_text("x"))
    assert not as_user(ADA, (), lambda: (archive.root_of(site) / DAY / "7-run.sh").write_text("x"))
    assert not can_list(archive.root_of(site) / ".incoming", ADA)


def test_groups_read_everything(
    open_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = grp.getgrnam

    def getgrnam(name: str) -> object:
        if name == "hpc-staff":
            return grp.struct_group(("hpc-staff", "x", STAFF, []))
        return real(name)

    monkeypatch.setattr(grp, "getgrnam", getgrnam)
    site = archive.make_site(open_path, groups=("hpc-staff", "no-such-group"))
    known, unknown = archive.script(site, 7), archive.script(site, 8)
    site.feed(known, unknown, archive.identity(known, ADA), archive.identity(unknown, None, ""))
    path = archive.root_of(site) / DAY / "7-run.sh"
    assert can_read(path, BELA, STAFF)
    assert can_list(archive.root_of(site) / DAY, BELA, STAFF)
    assert can_list(archive.root_of(site) / "alpha", BELA, STAFF)
    assert can_read(path, ADA)
    assert not can_read(path, BELA)
    assert "no-such-group" in caplog.text


def test_nobody_but_groups_reads_what_is_unverified(open_path: Path) -> None:
    site = archive.make_site(open_path, slurm=False)
    script = archive.script(site, 7)
    site.feed(script)
    path = archive.root_of(site) / "unverified/alpha/2026/03/01/7-claim.sh"
    assert not can_read(path, ADA)
    assert not can_list(archive.root_of(site) / "unverified", ADA)
    site.feed(archive.identity(script, ADA))
    assert can_read(archive.root_of(site) / DAY / "7-run.sh", ADA)


@pytest.mark.parametrize(("layout", "path"), [("sarchive", "2026/job.7_script")])
def test_in_shared_directories_each_file_is_its_owners(
    open_path: Path, layout: str, path: str
) -> None:
    site = archive.make_site(open_path, layout=layout)
    script = archive.script(site, 7)
    site.feed(script)
    assert not can_read(archive.root_of(site) / path, ADA)
    site.feed(archive.identity(script, ADA))
    assert can_read(archive.root_of(site) / path, ADA)
    assert not can_read(archive.root_of(site) / path, BELA)
    assert not can_list(archive.root_of(site) / "2026", ADA)
    site.feed(archive.identity(script, BELA, "bela"))
    assert not can_read(archive.root_of(site) / path, ADA)


def test_a_corrected_owner_takes_the_access_with_it(open_path: Path) -> None:
    site = archive.make_site(open_path)
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script, ADA))
    site.feed(archive.identity(script, BELA, "bela"))
    path = archive.root_of(site) / "alpha/bela/2026/03/01/7-run.sh"
    assert can_read(path, BELA)
    assert not can_read(path, ADA)
    assert read_acl_readers(os.open(path, os.O_RDONLY)) == FileReaders(BELA)


def test_where_there_are_no_acls_files_are_stewards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permissions, "supports_acls", lambda fd: False)
    site = archive.make_site(tmp_path, groups=("root",))
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script))
    for path in archive.root_of(site).rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert archive.root_of(site).stat().st_mode & 0o077 == 0


@given(
    st.one_of(st.none(), st.integers(0, 2**32 - 2)),
    st.lists(st.integers(0, 2**32 - 2), max_size=5),
)
def test_an_acl_comes_back(uid: int | None, gids: list[int]) -> None:
    wanted = FileReaders(uid, tuple(sorted(set(gids))))
    assert permissions.decode_acl(permissions.encode_acl(wanted, 6, 4)) == wanted


@given(st.binary(max_size=64))
def test_a_strange_acl_names_readers_or_is_an_error(value: bytes) -> None:
    try:
        found = permissions.decode_acl(value)
    except ArchiveError:
        return
    assert value[:4] == b"\x02\0\0\0"
    assert len(found.gids) <= len(value) // 8


def test_a_file_system_without_acls_is_recognized() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert not permissions.supports_acls(fd)
        assert read_acl_readers(fd) == FileReaders()
    finally:
        os.close(fd)


@pytest.mark.parametrize(("others_pass", "mode"), [(False, 0o700), (True, 0o711)])
def test_a_directory_without_readers_gives_new_files_none(
    open_path: Path, others_pass: bool, mode: int
) -> None:
    directory = open_path / "directory"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    try:
        assert permissions.grant_directory_access(fd, FileReaders(ADA), others_pass=True)
        (directory / "before").write_text("x")
        assert can_read(directory / "before", ADA)
        assert permissions.grant_directory_access(fd, FileReaders(), others_pass=others_pass)
    finally:
        os.close(fd)
    (directory / "after").write_text("x")
    (directory / "after").chmod(0o640)
    fd = os.open(directory / "after", os.O_RDONLY)
    try:
        assert read_acl_readers(fd) == FileReaders()
    finally:
        os.close(fd)
    assert directory.stat().st_mode & 0o777 == mode
    assert not can_list(directory, ADA)


def test_access_to_a_file_is_granted_and_withdrawn(open_path: Path) -> None:
    path = open_path / "file"
    path.write_text("x")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert permissions.grant_read_access(fd, FileReaders(ADA))
        assert can_read(path, ADA)
        assert permissions.grant_read_access(fd, FileReaders())
        assert not can_read(path, ADA)
    finally:
        os.close(fd)
