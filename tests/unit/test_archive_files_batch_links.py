"""Identical scripts of one holder share one file; a change of one does not reach the other."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import archive
from harness.archive import DAY, ENVIRONMENT, SCRIPT
from harness.events import NOON_NS
from harness.site import Site
from steward.archive.files.batch import PendingBatch
from steward.archive.files.mover import ArchiveMover
from steward.archive.files.permissions import read_acl_readers
from steward.archive.files.tree import LINK_ERRORS
from steward.archive.files.verify import verify_sink
from steward.core.events import Event
from steward.core.waits import Stop


def inode(site: Site, path: str) -> int:
    return (archive.root_of(site) / path).stat().st_ino


def keep(site: Site, job_id: int, data: bytes = SCRIPT, **job: Any) -> Event:
    mtime_ns = job.pop("mtime_ns", NOON_NS)
    script = archive.script(site, job_id, data, mtime_ns=mtime_ns)
    site.feed(script, archive.identity(script, **job))
    archive.store_of(site).unlink([script.body.script.path, script.body.environment.path])
    return script


def sizes(site: Site) -> dict[tuple[str, str], int]:
    rows = archive.rows(site, "SELECT user, account, bytes FROM holder")
    return {(user, account): size for user, account, size in rows}


def true_sizes(site: Site) -> dict[tuple[str, str], int]:
    """Return the sizes, counted from scratch."""
    found: dict[tuple[str, str], int] = {}
    met = set()
    rows = archive.rows(
        site,
        "SELECT script.user, account, holder, state = 3, shared, script_sha, script_length, "
        "env_sha, env_length FROM script JOIN holder ON holder.number = script.holder",
    )
    for user, account, holder, moved, shared, *files in rows:
        for what, (sha, length) in enumerate(zip(files[::2], files[1::2], strict=True)):
            content = (holder, moved, what, sha)
            if not shared or content not in met:
                found[user, account] = found.get((user, account), 0) + length
            met.add(content)
    return found


def test_the_next_of_the_same_is_a_link(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    keep(site, 8)
    site.reopen()
    keep(site, 9, b"another")
    assert inode(site, f"{DAY}/7-run.sh") == inode(site, f"{DAY}/8-run.sh")
    assert inode(site, f"{DAY}/7-run.env") == inode(site, f"{DAY}/9-run.env")
    assert inode(site, f"{DAY}/7-run.sh") != inode(site, f"{DAY}/9-run.sh")
    assert (archive.root_of(site) / f"{DAY}/7-run.sh").stat().st_nlink == 2
    assert list(verify_sink(site.settings, "files")) == []
    assert sizes(site) == {("ada", ""): len(SCRIPT + b"another" + ENVIRONMENT)}


def test_one_batch_shares_too(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    scripts = [archive.script(site, number) for number in (1, 2, 3)]
    site.feed(*scripts, *map(archive.identity, scripts))
    for end in ("sh", "env"):
        assert len({inode(site, f"{DAY}/{number}-run.{end}") for number in (1, 2, 3)}) == 1


@pytest.mark.parametrize("other", [{"uid": 4002, "user": "bela"}, {"account": "physics"}])
def test_another_user_or_account_has_a_file_of_its_own(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    keep(site, 8, **other)
    assert {os.stat(archive.root_of(site) / path).st_nlink for path in archive.files(site)} == {1}


@pytest.mark.parametrize("layout", ["job_archive", "sarchive", "sliced", "{account}/{job_id}"])
def test_without_manifest_or_directory_of_the_user_nothing_is_shared(
    tmp_path: Path, layout: str
) -> None:
    site = archive.make_site(tmp_path, layout=layout)
    keep(site, 7)
    keep(site, 8)
    assert {os.stat(archive.root_of(site) / path).st_nlink for path in archive.files(site)} == {1}
    assert sizes(site) == {("ada", ""): 2 * len(SCRIPT + ENVIRONMENT)}


def test_a_purge_leaves_what_others_share(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    first, second = keep(site, 7), keep(site, 8)
    site.feed(archive.purge(first))
    assert archive.files(site) == {f"{DAY}/8-run.sh": SCRIPT, f"{DAY}/8-run.env": ENVIRONMENT}
    assert sizes(site) == {("ada", ""): len(SCRIPT + ENVIRONMENT)}
    keep(site, 9)
    assert inode(site, f"{DAY}/9-run.sh") == inode(site, f"{DAY}/8-run.sh")
    site.feed(archive.purge(second))
    site.feed(archive.purge(archive.script(site, 9)))
    assert archive.files(site) == {}
    assert sizes(site) == {("ada", ""): 0}
    assert archive.rows(site, "SELECT * FROM content") == []


def test_damage_does_not_spread_to_the_next_job(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    (archive.root_of(site) / f"{DAY}/7-run.sh").write_bytes(b"#!/bin/sh\nhostnamE\n")
    (archive.root_of(site) / f"{DAY}/7-run.env").unlink()
    keep(site, 8)
    assert archive.files(site)[f"{DAY}/8-run.sh"] == SCRIPT
    assert archive.files(site)[f"{DAY}/8-run.env"] == ENVIRONMENT


@pytest.mark.parametrize("error", sorted(LINK_ERRORS))
def test_where_there_can_be_no_link_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    link = os.link

    def refuse(source: str, name: str, **of: Any) -> None:
        if source.startswith("7-run"):
            raise OSError(error, os.strerror(error))
        link(source, name, **of)

    monkeypatch.setattr(os, "link", refuse)
    keep(site, 8)
    assert inode(site, f"{DAY}/8-run.sh") != inode(site, f"{DAY}/7-run.sh")
    keep(site, 9)
    assert inode(site, f"{DAY}/9-run.sh") == inode(site, f"{DAY}/8-run.sh")
    assert set(archive.files(site).values()) == {SCRIPT, ENVIRONMENT}


def test_who_gets_another_owner_gets_bytes_of_its_own(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    script = keep(site, 8)
    site.feed(archive.identity(script, uid=4002, user="bela", why="updated"))
    theirs = "alpha/bela/2026/03/01/8-run.sh"
    assert archive.files(site)[theirs] == SCRIPT
    assert inode(site, theirs) != inode(site, f"{DAY}/7-run.sh")
    for path, uid in ((theirs, 4002), (f"{DAY}/7-run.sh", 4001)):
        with open(archive.root_of(site) / path, "rb") as file:
            assert read_acl_readers(file.fileno()).uid in {
                uid,
                None if not archive.has_acls(site) else uid,
            }
    assert sizes(site) == true_sizes(site)


def test_an_account_that_is_known_late_is_counted(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = keep(site, 7)
    site.feed(archive.identity(script, why="ended", account="physics"))
    assert sizes(site) == {("ada", ""): 0, ("ada", "physics"): len(SCRIPT + ENVIRONMENT)}


def test_a_crash_between_link_and_database_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    keep(site, 7)
    script = archive.script(site, 8)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(PendingBatch, "write", crash)
    with pytest.raises(Crash):
        site.feed(script, archive.identity(script))
    monkeypatch.undo()
    site.reopen()
    site.feed(script, archive.identity(script))
    assert set(archive.files(site)) == {
        f"{DAY}/{name}" for name in ("7-run.sh", "7-run.env", "8-run.sh", "8-run.env")
    }
    assert sizes(site) == true_sizes(site) == {("ada", ""): len(SCRIPT + ENVIRONMENT)}


def test_what_is_moved_on_is_shared_there(tmp_path: Path) -> None:
    there = tmp_path / "there"
    site = archive.make_site(tmp_path, move_to=str(there), move_after_s=0.0)
    for number in (7, 8):
        keep(site, number)
    mover = ArchiveMover(site.settings, "files")
    mover.run_once(Stop())
    keep(site, 9)
    mover.run_once(Stop())
    assert archive.files(site) == {}
    scripts = [there / f"{DAY}/{number}-run.sh" for number in (7, 8, 9)]
    assert [path.read_bytes() for path in scripts] == [SCRIPT] * 3
    assert len({path.stat().st_ino for path in scripts}) == 1
    assert sizes(site) == true_sizes(site) == {("ada", ""): len(SCRIPT + ENVIRONMENT)}
    assert list(verify_sink(site.settings, "files")) == []


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "purge", "again", "owner"]),
        st.integers(1, 5),
        st.sampled_from([b"one", b"two"]),
        st.sampled_from(["ada", "bela"]),
    ),
    max_size=12,
)


@given(steps=_STEPS)
@settings(max_examples=40, deadline=None)
def test_sums_are_right_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bytes, str]]
) -> None:
    site = archive.make_site(tmp_path_factory.mktemp("site"))
    known: dict[int, tuple[Event, bytes]] = {}
    for what, number, data, user in steps:
        uid = {"ada": 4001, "bela": 4002}[user]
        if what == "keep" and number not in known:
            known[number] = (keep(site, number, data, uid=uid, user=user), data)
        elif what == "purge" and number in known:
            site.feed(archive.purge(known.pop(number)[0]))
        elif what in {"again", "owner"} and number in known:
            site.feed(archive.identity(known[number][0], uid=uid, user=user, why="updated"))
    true = true_sizes(site)
    assert {holder: size for holder, size in sizes(site).items() if size} == true
    kept = [data for path, data in archive.files(site).items() if path.endswith(".sh")]
    assert sorted(kept) == sorted(data for _, data in known.values())
