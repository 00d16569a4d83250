"""Where the files sink puts scripts, and that a crash, a full disk or a link harms nothing."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from archive_site import DAY, ENVIRONMENT, NOON, SCRIPT, Site, manifest

from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.manifest import facts
from steward.archive.files.pending import Pending
from steward.archive.files.sink import FilesSink
from steward.core.consumers import Rejected


def test_a_known_job_is_filed_by_user_and_day(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7, b"\xff\x00odd bytes\n")
    site.apply(script, site.identity(script, submit_line="sbatch run.sh", work_dir="/home/ada"))
    assert site.files() == {
        f"{DAY}/7-run.sh": b"\xff\x00odd bytes\n",
        f"{DAY}/7-run.env": ENVIRONMENT,
    }
    said = list(facts((site.root / DAY / "MANIFEST.jsonl").read_bytes()))
    assert [fact.fact for fact in said] == ["kept", "identity"]
    assert said[0].script is not None
    assert said[0].script.sha256 == script.body.script.sha256
    assert said[1].record is not None
    assert said[1].record.submit_line == "sbatch run.sh"
    assert site.sink.cursor() == 2


def test_a_script_waits_for_its_job_even_if_the_store_is_trimmed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7)
    site.apply(script)
    assert site.files() == {}
    site.store().unlink([script.body.script.path, script.body.environment.path])
    site.reopen()
    site.apply(site.identity(script))
    assert site.files() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.listdir(site.root / ".waiting") == []


def test_what_waits_too_long_is_unverified_and_moves_when_the_job_is_known(tmp_path: Path) -> None:
    site = Site(tmp_path, identity_wait_s=0.001)
    script = site.script(7, name="claim/ed")
    site.apply(script)
    while not site.files():
        site.tick()
    assert set(site.files()) == {
        "unverified/alpha/2026/03/05/7-claim%2Fed.sh",
        "unverified/alpha/2026/03/05/7-claim%2Fed.env",
    }
    assert os.listdir(site.root / ".waiting") == []
    site.apply(site.identity(script))
    assert set(site.files()) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    assert manifest(site, DAY) == [("kept", script.key), ("identity", script.key)]
    assert not (site.root / "unverified").exists()
    kept = next(facts((site.root / DAY / "MANIFEST.jsonl").read_bytes()))
    assert kept.script is not None
    assert kept.script.name == "7-run.sh"


def test_without_slurm_nothing_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    script = site.script(7, environment=None)
    site.apply(script)
    assert set(site.files()) == {"unverified/alpha/2026/03/05/7-claim.sh"}
    site.apply(site.identity(script))
    assert set(site.files()) == {f"{DAY}/7-run.sh"}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("sarchive", {"2026/job.7_script", "2026/job.7_environment"}),
        ("sliced", {"alpha/07/00/7.sh", "alpha/07/00/7.env"}),
    ],
)
def test_layouts_without_a_user_do_not_wait(tmp_path: Path, layout: str, names: set[str]) -> None:
    site = Site(tmp_path, layout=layout)
    script = site.script(7)
    site.apply(script)
    assert set(site.files()) == names
    site.apply(site.identity(script))
    assert set(site.files()) == names
    assert not list(site.root.rglob("MANIFEST.jsonl"))


def test_a_reused_id_with_the_same_name_keeps_both(tmp_path: Path) -> None:
    site = Site(tmp_path)
    first = site.script(7, b"one")
    second = site.script(7, b"two", mtime_ns=NOON + 1)
    third = site.script(7, b"two", mtime_ns=NOON + 2)
    site.apply(first, site.identity(first))
    site.apply(second, third, site.identity(second), site.identity(third))
    assert {name: data for name, data in site.files().items() if name.endswith(".sh")} == {
        f"{DAY}/7-run.sh": b"one",
        f"{DAY}/7-run~2.sh": b"two",
        f"{DAY}/7-run~3.sh": b"two",
    }


@pytest.mark.parametrize("store", ["archive.files", "state"])
def test_a_batch_may_come_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    site = Site(tmp_path)
    script = site.script(7, store=store)
    events = [script, site.identity(script)]

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    # After the files and manifests, before the database.
    monkeypatch.setattr(Pending, "write", crash)
    with pytest.raises(Crash):
        site.apply(*events)
    monkeypatch.undo()
    assert site.sink.cursor() == 0
    site.reopen()
    site.apply(*events)
    site.apply(*events)
    assert site.files() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}


def test_a_crash_after_a_move_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, slurm=False)
    script = site.script(7)
    site.apply(script)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(Pending, "write", crash)
    with pytest.raises(Crash):
        site.apply(site.identity(script))
    monkeypatch.undo()
    site.reopen()
    site.apply(site.identity(script))
    assert site.files() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}


def test_bytes_from_the_state_directory_are_copied(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.sink.prepare()
    script = site.script(7, store="state")
    site.apply(script, site.identity(script))
    assert site.files() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.stat(site.root / DAY / "7-run.sh").st_nlink == 1


def test_lost_bytes_reject_their_event_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    lost, good = site.script(7), site.script(8)
    site.store().unlink([lost.body.script.path])
    with pytest.raises(Rejected, match="gone") as caught:
        site.apply(good, lost)
    assert caught.value.event is lost
    site.apply(good)
    assert "unverified/alpha/2026/03/05/8-claim.sh" in site.files()


def test_a_symbolic_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (site.root / "alpha").mkdir()
    (site.root / "alpha" / "ada").symlink_to(elsewhere)
    with pytest.raises(Rejected, match="alpha/ada"):
        site.apply(script, site.identity(script))
    assert list(elsewhere.iterdir()) == []
    (site.root / "alpha" / "ada").unlink()
    site.apply(script, site.identity(script))
    assert len(site.files()) == 2


def test_a_file_name_taken_by_a_link_is_left_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    script = site.script(7)
    target = tmp_path / "secret"
    target.write_bytes(b"secret")
    (site.root / DAY).mkdir(parents=True)
    (site.root / DAY / "7-run.sh").symlink_to(target)
    site.apply(script, site.identity(script))
    assert (site.root / DAY / "7-run~2.sh").read_bytes() == SCRIPT
    assert target.read_bytes() == b"secret"


def test_a_vanished_mount_is_never_written_to(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    site.apply(site.script(7))
    waiting = site.script(8)
    site.root.rename(tmp_path / "unmounted")
    site.root.mkdir()
    with pytest.raises(ArchiveUnavailable, match="mounted"):
        site.apply(waiting)
    assert list(site.root.iterdir()) == []
    assert site.sink.cursor() == 1
    site.root.rmdir()
    with pytest.raises(ArchiveUnavailable):
        site.apply(waiting)
    (tmp_path / "unmounted").rename(site.root)
    site.apply(waiting)
    assert len(site.files()) == 4


def test_another_archives_tree_is_not_written_to(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    script = site.script(7)
    (site.root / ".steward-archive").write_text("somebody-elses\n")
    with pytest.raises(ArchiveUnavailable, match="another"):
        site.apply(script)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_disk_refuses_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    site = Site(tmp_path, slurm=False)
    script = site.script(7)
    real = os.link

    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number), "7-claim.sh")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ArchiveUnavailable) as caught:
        site.apply(script)
    assert str(site.root) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert site.sink.cursor() == 0
    monkeypatch.setattr(os, "link", real)
    site.apply(script)
    assert len(site.files()) == 2


def test_a_directory_removed_under_it_is_made_again(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm=False)
    site.apply(site.script(7))
    waiting = site.script(8)
    (site.root / "unverified").rename(tmp_path / "aside")
    site.apply(waiting)
    assert "unverified/alpha/2026/03/05/8-claim.sh" in site.files()


def test_environments_can_be_left_out(tmp_path: Path) -> None:
    import msgspec

    site = Site(tmp_path, slurm=False)
    archive = msgspec.structs.replace(site.settings.archive, environments=False)
    site.settings = msgspec.structs.replace(site.settings, archive=archive)
    site.sink = FilesSink(site.settings, "files", site.stores)
    site.apply(site.script(7))
    assert set(site.files()) == {"unverified/alpha/2026/03/05/7-claim.sh"}


def test_a_torn_manifest_is_healed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    one, two = site.script(1), site.script(2)
    site.apply(one, site.identity(one))
    path = site.root / DAY / "MANIFEST.jsonl"
    path.write_bytes(path.read_bytes() + b'{"fact":"kept","key":"script:9')
    site.apply(two, site.identity(two))
    assert [key for _, key in manifest(site, DAY)] == [one.key, one.key, two.key, two.key]


def test_hostile_names_stay_in_their_place(tmp_path: Path) -> None:
    site = Site(tmp_path)
    events = []
    for number, name in enumerate(("../../etc/passwd", "a\nb", "-rf", "x" * 4000, "é\u202e", "")):
        script = site.script(number + 1)
        events += [script, site.identity(script, user=f"u{name}", uid=5000 + number, name=name)]
    site.apply(*events)
    files = site.files()
    assert len(files) == 12
    assert all(path.startswith("alpha/u") and path.count("/") == 5 for path in files)


def test_numbers_in_batches_of_many_directories(tmp_path: Path) -> None:
    site = Site(tmp_path, layout="sliced")
    scripts = [site.script(number * 101) for number in range(1, 300)]
    site.apply(*scripts)
    assert len(site.files()) == 2 * 299


def test_a_run_that_ends_files_what_waits(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.apply(*[site.script(number, environment=None) for number in range(1, 600)])
    site.sink.file_waiting()
    assert len(site.files()) == 599
