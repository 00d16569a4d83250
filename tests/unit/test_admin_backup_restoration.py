"""Restoration: files that it writes or leaves, their owners, and rejections."""

import os
import pwd
import resource
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from harness.events import NOON, script_event
from steward.accounting.settings import AccountingSettings
from steward.admin.backup.archive import (
    BackupError,
    BackupManifest,
    BackupUnavailable,
    create_backup_file,
    read_member,
    verify_backup,
)
from steward.admin.backup.creation import make_backup
from steward.admin.backup.restoration import RestoreResult, restore_backup
from steward.admin.credentials.store import CredentialStore
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.script_stores import MARKER, make_stores
from steward.extensions.mybrc.settings import MybrcSettings
from steward.slurm.settings import ClusterSettings

SCRIPTS = {1: b"#!/bin/sh\nhostname\n", 2: b"#!/bin/sh\ndate\n"}
NOBODY = pwd.getpwnam("nobody")

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def settings_in(directory: Path, *, sink: str = "files") -> Settings:
    return Settings(
        state_dir=str(directory / "state"),
        cluster={"c1": ClusterSettings(slurm=False)},
        archive=ArchiveSettings(sink={sink: FilesSinkSettings(path=str(directory / "archive"))}),
        accounting=AccountingSettings(location=str(directory / "joblog")),
    )


def append_script(settings: Settings, job_id: int, *, store: str) -> None:
    stores = make_stores(settings)
    name = f"c1.{job_id}.1772366400000000000.{len(SCRIPTS[job_id])}.script"
    script = stores.get(store).write(name, SCRIPTS[job_id])
    journal = Journal(settings.state_dir)
    journal.append(encode_rows([script_event(job_id, script=script, store=store)]))
    journal.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return settings of a Steward with a script in each store, an archive and a job log."""
    home = tmp_path / "first"
    for name in ("state", "archive/2026", "joblog"):
        (home / name).mkdir(parents=True)
    settings = settings_in(home)
    (home / "archive" / MARKER).touch()
    append_script(settings, 1, store="state")
    append_script(settings, 2, store="archive.files")
    CredentialStore(settings.state_dir).close()
    (home / "state" / "catalog" / "g1").mkdir(parents=True)
    (home / "state" / "catalog" / "current").symlink_to("g1")
    (home / "state" / "gate.key").write_text("key")
    (home / "archive" / "2026" / "7.sh").write_text("seven")
    (home / "archive" / "2026" / "7.sh").chmod(0o640)
    (home / "archive" / "2026").chmod(0o750)
    (home / "joblog" / "2026-03-01.jsonl").write_text("{}\n")
    return settings


def back_up(
    settings: Settings, tmp_path: Path, config: str = "", *, with_archive: bool = False
) -> tuple[str, BackupManifest]:
    path = str(tmp_path / "backup.tar.zst")
    make_backup(settings, config, path, with_archive=with_archive)
    return path, verify_backup(path)


def restore(
    backup: tuple[str, BackupManifest], settings: Settings, *, force: bool = False
) -> RestoreResult:
    return restore_backup(*backup, settings, force=force, now=NOON)


def incoming_in(directory: Path) -> dict[str, bytes]:
    return {path.name.split(".")[1]: path.read_bytes() for path in directory.iterdir()}


def test_a_restore_with_the_archive_gives_back_every_file(
    tmp_path: Path, settings: Settings
) -> None:
    backup = back_up(settings, tmp_path, with_archive=True)
    home = tmp_path / "second"
    progress: list[tuple[int, int | None, str]] = []
    result = restore_backup(
        *backup,
        settings_in(home),
        force=False,
        now=NOON,
        show_progress=lambda *step: progress.append(step),
    )
    reader = JournalReader(str(home / "state"))
    assert reader.head() == 2
    reader.close()
    assert incoming_in(home / "state" / "incoming") == {"1": SCRIPTS[1]}
    assert incoming_in(home / "archive" / ".incoming") == {"2": SCRIPTS[2]}
    assert os.readlink(home / "state" / "catalog" / "current") == "g1"
    assert (home / "state" / "gate.key").read_text() == "key"
    assert (home / "archive" / "2026" / "7.sh").read_text() == "seven"
    assert (home / "archive" / "2026" / "7.sh").stat().st_mode & 0o777 == 0o640
    assert (home / "archive" / "2026").stat().st_mode & 0o777 == 0o750
    assert (home / "joblog" / "2026-03-01.jsonl").read_text() == "{}\n"
    assert not list((home / "state").glob(".restoring*"))
    assert (home / "state").stat().st_mode & 0o777 == 0o700
    assert (result.aside, result.files) == ("", len(backup[1].members))
    assert progress[-1] == (result.files, result.files, "files")


def test_a_restore_removes_what_an_interrupted_one_left(tmp_path: Path, settings: Settings) -> None:
    home = tmp_path / "second"
    (home / "state" / ".restoring").mkdir(parents=True)
    (home / "state" / ".restoring" / "half.db").touch()
    (home / "archive").mkdir()
    (home / "archive" / MARKER).touch()
    restore(back_up(settings, tmp_path), settings_in(home))
    assert not (home / "state" / "half.db").exists()
    assert (home / "state" / "journal.db").exists()


def test_an_archive_without_its_marker_is_not_mounted(tmp_path: Path, settings: Settings) -> None:
    backup = back_up(settings, tmp_path)
    home = tmp_path / "second"
    (home / "archive").mkdir(parents=True)
    with pytest.raises(BackupError, match="is missing: mount it or restore it first"):
        restore(backup, settings_in(home))
    assert not (home / "state" / "journal.db").exists()
    (home / "archive" / MARKER).touch()
    restore(backup, settings_in(home))
    assert incoming_in(home / "archive" / ".incoming") == {"2": SCRIPTS[2]}


def test_scripts_of_a_sink_that_is_not_configured_are_refused(
    tmp_path: Path, settings: Settings
) -> None:
    backup = back_up(settings, tmp_path)
    with pytest.raises(BackupError, match="the configuration lacks the sink files"):
        restore(backup, settings_in(tmp_path / "second", sink="other"))


def test_files_of_an_archive_that_survived_are_kept(tmp_path: Path, settings: Settings) -> None:
    backup = back_up(settings, tmp_path, with_archive=True)
    archive = tmp_path / "first" / "archive"
    (archive / "2026" / "7.sh").write_text("newer")
    (archive / "2026" / "8.sh").write_text("eight")
    shutil.rmtree(settings.state_dir)
    restore(backup, settings)
    assert (archive / "2026" / "7.sh").read_text() == "newer"
    assert (archive / "2026" / "8.sh").read_text() == "eight"
    assert incoming_in(archive / ".incoming") == {"2": SCRIPTS[2]}


def test_a_state_that_is_there_is_moved_aside_by_force_alone(
    tmp_path: Path, settings: Settings
) -> None:
    backup = back_up(settings, tmp_path)
    (tmp_path / "first" / "state" / "later.json").touch()
    with pytest.raises(BackupError, match="is not empty: give --force"):
        restore(backup, settings)
    assert (tmp_path / "first" / "state" / "later.json").exists()
    result = restore(backup, settings, force=True)
    aside = tmp_path / "first" / "state" / "before-restore-20260301T120000Z"
    assert result.aside == str(aside)
    assert {path.name for path in aside.iterdir()} >= {"journal.db", "later.json", "incoming"}
    assert aside.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "first" / "state" / "later.json").exists()
    assert (tmp_path / "first" / "state" / "journal.db").exists()


def test_only_configuration_files_that_are_gone_are_written(
    tmp_path: Path, settings: Settings
) -> None:
    config = tmp_path / "etc" / "steward.toml"
    users = tmp_path / "etc" / "mybrc-users"
    config.parent.mkdir()
    config.write_text("# before\n")
    users.write_text("api:hash\n")
    settings = msgspec.structs.replace(settings, mybrc=MybrcSettings(users_file=str(users)))
    backup = back_up(settings, tmp_path, str(config))
    config.write_text("# after\n")
    users.unlink()
    result = restore(backup, settings, force=True)
    assert result.unchanged == (str(config),)
    assert result.written == (str(users),)
    assert config.read_text() == "# after\n"
    assert users.read_text() == "api:hash\n"


@only_root
def test_a_restore_gives_the_state_to_its_user_and_archived_files_to_theirs(
    tmp_path: Path, settings: Settings
) -> None:
    first, home = tmp_path / "first", tmp_path / "second"
    os.chown(first / "state", NOBODY.pw_uid, NOBODY.pw_gid)
    os.chown(first / "archive" / "2026" / "7.sh", 4000, 4001)
    backup = back_up(settings, tmp_path, with_archive=True)
    assert backup[1].owner == "nobody"
    restore(backup, settings_in(home))
    state = home / "state"
    for path in (state, *state.rglob("*"), *(home / "archive" / ".incoming").iterdir()):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (NOBODY.pw_uid, NOBODY.pw_gid), path
    status = (home / "archive" / "2026" / "7.sh").stat()
    assert (status.st_uid, status.st_gid) == (4000, 4001)


@pytest.mark.parametrize("member", ["state/large", "archive/2026/large"])
def test_a_restore_names_the_file_that_a_full_disk_has_no_space_for(
    tmp_path: Path, settings: Settings, member: str
) -> None:
    (tmp_path / "first" / member).write_bytes(os.urandom(2_000_000))
    backup = back_up(settings, tmp_path, with_archive=True)
    home = tmp_path / "second"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(BackupUnavailable) as error:
            restore(backup, settings_in(home))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    path = home / member.replace("state/", "state/.restoring/")
    assert str(error.value) == f"cannot write {path}: File too large"


def test_a_backup_that_is_a_directory_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BackupUnavailable, match=f"cannot read {tmp_path}: Is a directory"):
        verify_backup(str(tmp_path))


def test_a_backup_names_the_directory_that_cannot_be_read(
    tmp_path: Path, settings: Settings
) -> None:
    fd = os.open(tmp_path / "first" / "state", os.O_RDONLY)
    # Deeper than the longest path of the kernel.
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=fd)
        child = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)
    with pytest.raises(BackupUnavailable, match=r"cannot read \S*/dd+: File name too long"):
        back_up(settings, tmp_path)


def test_a_state_of_a_user_who_is_not_here_is_refused(tmp_path: Path, settings: Settings) -> None:
    path, manifest = back_up(settings, tmp_path)
    manifest = msgspec.structs.replace(manifest, owner="nobody-here")
    with pytest.raises(BackupError, match="unknown user nobody-here"):
        restore((path, manifest), settings_in(tmp_path / "second"))
    assert not (tmp_path / "second").exists()


def test_scripts_that_are_gone_from_their_store_are_counted(
    tmp_path: Path, settings: Settings
) -> None:
    (waiting,) = (tmp_path / "first" / "state" / "incoming").iterdir()
    waiting.unlink()
    _, manifest = back_up(settings, tmp_path)
    assert manifest.missing == 1
    scripts = [item.name for item in manifest.members if item.name.endswith(".script")]
    assert [name.split("/")[1] for name in scripts] == ["archive.files"]


def test_a_backup_tells_how_many_files_of_the_archive_it_has(
    tmp_path: Path, settings: Settings
) -> None:
    progress: list[tuple[int, int | None, str]] = []
    make_backup(
        settings,
        "",
        str(tmp_path / "backup.tar.zst"),
        with_archive=True,
        show_progress=lambda *step: progress.append(step),
    )
    assert [step for step in progress if step[2] == "waiting scripts"][-1][0] == 2
    # The marker of the archive, a script and a day of the job log.
    assert [step for step in progress if step[2] == "files of the archive"] == [
        (number, None, "files of the archive") for number in (1, 2, 3)
    ]


def test_one_member_of_a_backup_is_read(tmp_path: Path, settings: Settings) -> None:
    path, _ = back_up(settings, tmp_path)
    assert read_member(path, "state/gate.key") == b"key"
    with pytest.raises(BackupError, match="lacks state/other"):
        read_member(path, "state/other")


def test_a_file_that_appears_while_a_backup_is_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "backup.tar.zst"

    def write() -> None:
        with create_backup_file(str(path), {os.geteuid()}):
            path.write_text("another backup")

    with pytest.raises(BackupError, match="exists already"):
        write()
    assert path.read_text() == "another backup"
    assert os.listdir(tmp_path) == ["backup.tar.zst"]
