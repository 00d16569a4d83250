import functools
import os
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON_NS
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.permissions import FileReaders, grant_read_access
from steward.archive.imports import (
    StoredSubmission,
    convert_job_archive_environment,
    convert_lines,
    convert_sarchive_environment,
    encode_spool_environment,
    import_stored,
    import_tree,
)
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, RedactSettings, Settings
from steward.core.events import Event, decode_event
from steward.core.files import find_network_type
from steward.core.journal.store import encode_rows
from steward.core.records import JobRecord
from steward.core.redaction import Redactor
from steward.core.script_stores import IncomingStore
from steward.daemon.imports import import_archive_tree
from steward.slurm.environment import read_environment, split_entries
from steward.slurm.settings import ClusterSettings

SECRET = b"hunter2hunter2"
ENTRIES = [b"HOME=/home/ada", b"SLURM_JOB_NAME=run", b"DB_PASSWORD=" + SECRET, b"A=b=c"]
redact = functools.partial(read_environment, redactor=Redactor(RedactSettings()))


@pytest.fixture
def store(tmp_path: Path) -> IncomingStore:
    return IncomingStore("state", str(tmp_path / "incoming"))


def as_job_archive(entries: Sequence[bytes]) -> bytes:
    """Return text as job_archive writes it: without white space, and with newlines for NULs."""
    raw = encode_spool_environment(entries)
    for space in b" \t\n\v\f\r":
        raw = raw.replace(bytes((space,)), b"")
    return raw.replace(b"\0", b"\n")


def old_tree(root: Path) -> Path:
    for user, job_id in (("root", 7), ("nobody-knows", 8)):
        month = root / user / "2026" / "03"
        month.mkdir(parents=True)
        (month / f"{job_id}-run.sh").write_bytes(b"#!/bin/sh\nhostname\n\0")
        (month / f"{job_id}-run.env").write_bytes(as_job_archive(ENTRIES))
        for name in os.listdir(month):
            os.utime(month / name, ns=(NOON_NS, NOON_NS))
    return root


def everything_in(directory: str) -> bytes:
    return b"".join(Path(directory, name).read_bytes() for name in os.listdir(directory))


def test_a_tree_of_job_archive_is_taken_over(tmp_path: Path, store: IncomingStore) -> None:
    events: list[Event] = []
    tree = old_tree(tmp_path / "old")
    done = import_tree(str(tree), "job_archive", "alpha", store, redact, events.extend)
    assert (done.scripts, done.owned, done.unknown_users) == (2, 1, ("nobody-knows",))
    assert {event.key for event in events} == {
        f"script:7:{NOON_NS}",
        f"script:8:{NOON_NS}",
        f"import:7:{NOON_NS}",
    }
    script = next(event for event in events if event.key == f"script:7:{NOON_NS}")
    assert script.source == "import"
    assert store.read(script.body.script) == b"#!/bin/sh\nhostname\n"
    assert script.body.redacted == ("DB_PASSWORD",)
    assert script.body.claimed_name == "run"
    assert dict(split_entries(store.read(script.body.environment)))[b"HOME"] == b"/home/ada"
    assert SECRET not in everything_in(store.directory)
    seen = next(event for event in events if event.kind == "job.seen")
    assert (seen.body.record.uid, seen.body.record.user) == (0, "root")
    assert seen.body.record.submit == datetime.fromtimestamp(NOON_NS / 1e9, UTC)


def test_a_tree_is_imported_into_an_archive_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "archive"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"40 27 0:50 / {root} rw shared:7 - nfs4 server:/x rw,hard\n"
    )
    listed = functools.partial(find_network_type, mounts=str(mounts))
    monkeypatch.setattr("steward.core.script_stores.find_network_type", listed)
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        cluster={"alpha": ClusterSettings(slurm=False)},
        archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(root))}),
    )
    (tmp_path / "state").mkdir(mode=0o700)
    tree = old_tree(tmp_path / "old")
    done = import_archive_tree(settings, "alpha", "job_archive", str(tree), lambda _: None)
    assert done.scripts == 2
    assert not root.exists()


def test_importing_twice_says_the_same(tmp_path: Path, store: IncomingStore) -> None:
    tree = old_tree(tmp_path / "old")
    told: list[list[tuple[str, object]]] = []
    for _ in range(2):
        events: list[Event] = []
        import_tree(str(tree), "job_archive", "alpha", store, redact, events.extend)
        told.append([(event.key, event.body) for event in events])
    assert told[0] == told[1]


@pytest.mark.parametrize("form", ["spool", "lines"])
def test_a_tree_of_sarchive_is_taken_over(tmp_path: Path, store: IncomingStore, form: str) -> None:
    year = tmp_path / "old" / "2026"
    year.mkdir(parents=True)
    (year / "job.7_script").write_bytes(b"#!/bin/sh\n")
    data = encode_spool_environment(ENTRIES) if form == "spool" else b"\n".join(ENTRIES)
    (year / "job.7_environment").write_bytes(data)
    (tmp_path / "old" / "job.8_script").write_bytes(b"at the root, period none")
    events: list[Event] = []
    done = import_tree(str(tmp_path / "old"), "sarchive", "alpha", store, redact, events.extend)
    assert (done.scripts, done.owned) == (2, 0)
    first = next(event for event in events if event.body.job_id == 7)
    assert len(split_entries(store.read(first.body.environment))) == len(ENTRIES)
    assert SECRET not in everything_in(store.directory)


def test_a_hostile_tree_is_passed_over(tmp_path: Path, store: IncomingStore) -> None:
    tree = old_tree(tmp_path / "old")
    month = tree / "root" / "2026" / "03"
    (month / "9-link.sh").symlink_to("/etc/passwd")
    os.mkfifo(month / "10-pipe.sh")
    (month / "11-dir.sh").mkdir()
    (month / "README").write_text("no job")
    (tree / "linked").symlink_to(month)
    events: list[Event] = []
    done = import_tree(str(tree), "job_archive", "alpha", store, redact, events.extend)
    assert (done.scripts, done.skipped) == (2, 2)
    assert b"root:x" not in everything_in(store.directory)


def test_environments_may_be_left_where_they_are(tmp_path: Path, store: IncomingStore) -> None:
    events: list[Event] = []
    tree = old_tree(tmp_path / "old")
    import_tree(str(tree), "job_archive", "alpha", store, redact, events.extend, environments=False)
    assert all(event.body.environment is None for event in events if event.kind == "job.script")


def given_to(path: Path, how: str, uid: int) -> None:
    if how == "uid":
        os.chown(path, uid, -1)
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        if not grant_read_access(fd, FileReaders(uid)):
            pytest.skip("the file system has no POSIX ACLs")
    finally:
        os.close(fd)


@pytest.mark.parametrize("suffix", ["sh", "env"])
@pytest.mark.parametrize(
    ("how", "uid", "owned"),
    [("acl", 4001, True), ("acl", 4002, False), ("uid", 4001, True), ("uid", 4002, False)],
)
def test_files_of_another_uid_are_not_given_to_who_has_the_name_now(
    tmp_path: Path, store: IncomingStore, suffix: str, how: str, uid: int, owned: bool
) -> None:
    tree = old_tree(tmp_path / "old")
    given_to(tree / "root" / "2026" / "03" / f"7-run.{suffix}", how, uid)
    events: list[Event] = []
    users = {"root": 4001}
    done = import_tree(
        str(tree), "job_archive", "alpha", store, redact, events.extend, resolve=users.get
    )
    assert (done.scripts, done.owned, done.doubtful) == (2, int(owned), int(not owned))
    assert [event.body.record.uid for event in events if event.kind == "job.seen"] == [4001] * owned


def test_an_acl_counts_for_more_than_who_wrote_the_file(
    tmp_path: Path, store: IncomingStore
) -> None:
    tree = old_tree(tmp_path / "old")
    for suffix in ("sh", "env"):
        path = tree / "root" / "2026" / "03" / f"7-run.{suffix}"
        # As a job_archive that ran as Slurm's user left it.
        given_to(path, "uid", 64030)
        given_to(path, "acl", 4001)
    events: list[Event] = []
    done = import_tree(
        str(tree), "job_archive", "alpha", store, redact, events.extend, resolve={"root": 4001}.get
    )
    assert (done.owned, done.doubtful) == (1, 0)


def test_no_tree_is_told(tmp_path: Path, store: IncomingStore) -> None:
    with pytest.raises(ArchiveUnavailable, match="nothing-here"):
        import_tree(
            str(tmp_path / "nothing-here"), "sarchive", "alpha", store, redact, lambda _: None
        )


def test_what_slurmdbd_stored_is_taken_over(store: IncomingStore) -> None:
    submit = datetime(2026, 3, 5, 12, 0, tzinfo=UTC)
    lines = b"HOME=/home/ada\nDB_PASSWORD=" + SECRET + b"\nA=1\n2\n"
    whole = StoredSubmission(
        record=JobRecord(job_id=7, uid=4001, user="ada", submit=submit, state="COMPLETED"),
        script=b"#!/bin/sh\n",
        environment=lines,
        mtime_ns=NOON_NS,
    )
    task = JobRecord(job_id=12, array_job_id=11, uid=4001, submit=submit)
    events: list[Event] = []
    done = import_stored(
        [
            whole,
            msgspec.structs.replace(whole, record=task),
            StoredSubmission(record=JobRecord(job_id=8, submit=submit)),
            StoredSubmission(record=JobRecord(job_id=9, submit=submit), is_known=True),
            StoredSubmission(record=JobRecord(job_id=10, submit=submit), is_unanswered=True),
        ],
        "alpha",
        store,
        redact,
        events.extend,
    )
    assert (done.scripts, done.scriptless, done.known, done.skipped) == (2, 1, 1, 0)
    assert (done.unanswered, done.exit_code) == (1, 1)
    assert [event.key for event in events] == [
        f"script:7:{NOON_NS}",
        f"import:7:{NOON_NS}",
        f"script:11:{NOON_NS}",
        f"import:12:{NOON_NS}",
    ]
    environment = dict(split_entries(store.read(events[0].body.environment)))
    assert environment[b"A"] == b"1\n2"
    assert SECRET not in everything_in(store.directory)


names = st.from_regex(rb"\A[A-Z_][A-Z0-9_]{0,10}\Z")
values = st.binary(max_size=20).map(lambda value: value.translate(None, b"\0 \t\n\v\f\r"))
entries = st.lists(st.tuples(names, values).map(b"=".join), min_size=1, max_size=300)


@given(entries)
def test_job_archives_mangling_is_undone(wanted: list[bytes]) -> None:
    assert convert_job_archive_environment(as_job_archive(wanted)) == encode_spool_environment(
        wanted
    )


@given(entries)
def test_lines_come_back(wanted: list[bytes]) -> None:
    assert convert_lines(b"\n".join(wanted)) == encode_spool_environment(wanted)
    assert convert_sarchive_environment(b"\n".join(wanted)) == encode_spool_environment(wanted)


@given(st.binary(max_size=200))
def test_any_bytes_give_some_environment(data: bytes) -> None:
    for convert in (convert_lines, convert_job_archive_environment):
        packed = convert(data)
        assert struct.unpack_from("=I", packed)[0] == packed[4:].count(b"\0")


@pytest.mark.parametrize(
    ("name", "job_id", "shown"),
    [
        (b"1-caf\xe9.sh", 1, "caf\\xe9"),
        (b"2-a\nb.sh", 2, "a\nb"),
        (b"99999999999999999999999-x.sh", None, ""),
    ],
)
def test_a_strange_file_name_stops_nothing(
    tmp_path: Path, store: IncomingStore, name: bytes, job_id: int | None, shown: str
) -> None:
    tree = old_tree(tmp_path / "old")
    strange = os.path.join(os.fsencode(tree), b"root/2026/03", name)
    Path(os.fsdecode(strange)).write_bytes(b"#!/bin/sh\n")
    os.utime(strange, ns=(-NOON_NS, -NOON_NS))
    rows: list[tuple[str, str, str, bytes]] = []
    import_tree(
        str(tree), "job_archive", "alpha", store, redact, lambda new: rows.extend(encode_rows(new))
    )
    found = [decode_event(0, *row) for row in rows]
    names = {e.body.record.job_id: e.body.record.name for e in found if e.kind == "job.seen"}
    assert names == {7: "run"} | ({job_id: shown} if job_id else {})
    for event in found:
        if event.kind == "job.script":
            assert store.read(event.body.script)
