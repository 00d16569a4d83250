"""Files sink: placement of scripts, crashes, full disks and links."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.archive import DAY, ENVIRONMENT, SCRIPT
from harness.events import NOON_NS
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.batch import PendingBatch
from steward.archive.files.manifest import decode_facts
from steward.archive.files.reader import FilesReader, PlacedScript
from steward.core.consumers import Rejected


def test_a_known_job_is_filed_by_user_and_day(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, b"\xff\x00odd bytes\n")
    site.feed(script, archive.identity(script, submit_line="sbatch run.sh", work_dir="/home/ada"))
    assert archive.files(site) == {
        f"{DAY}/7-run.sh": b"\xff\x00odd bytes\n",
        f"{DAY}/7-run.env": ENVIRONMENT,
    }
    said = list(decode_facts((archive.root_of(site) / DAY / "MANIFEST.jsonl").read_bytes()))
    assert [fact.fact for fact in said] == ["kept", "identity"]
    assert said[0].script is not None
    assert said[0].script.sha256 == script.body.script.sha256
    assert said[1].record is not None
    assert said[1].record.submit_line == "sbatch run.sh"
    assert archive.sink_of(site).cursor() == 2


def test_a_script_waits_for_its_job_even_if_the_store_is_trimmed(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    site.feed(script)
    assert archive.files(site) == {}
    archive.store_of(site).unlink([script.body.script.path, script.body.environment.path])
    site.reopen()
    site.feed(archive.identity(script))
    assert archive.files(site) == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.listdir(archive.root_of(site) / ".waiting") == []


def test_what_waits_too_long_is_unverified_and_moves_when_the_job_is_known(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, identity_wait_s=0.001)
    script = archive.script(site, 7, name="claim/ed")
    site.feed(script)
    while not archive.files(site):
        archive.sink_of(site).tick(site.append)
    assert set(archive.files(site)) == {
        "unverified/alpha/2026/03/01/7-claim%2Fed.sh",
        "unverified/alpha/2026/03/01/7-claim%2Fed.env",
    }
    assert os.listdir(archive.root_of(site) / ".waiting") == []
    site.feed(archive.identity(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    assert archive.manifest(site, DAY) == [("kept", script.key), ("identity", script.key)]
    assert not (archive.root_of(site) / "unverified").exists()
    kept = next(decode_facts((archive.root_of(site) / DAY / "MANIFEST.jsonl").read_bytes()))
    assert kept.script is not None
    assert kept.script.name == "7-run.sh"


def test_without_slurm_nothing_waits(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    script = archive.script(site, 7, environment=None)
    site.feed(script)
    assert set(archive.files(site)) == {"unverified/alpha/2026/03/01/7-claim.sh"}
    site.feed(archive.identity(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh"}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("sarchive", {"2026/job.7_script", "2026/job.7_environment"}),
        ("sliced", {"alpha/07/00/7.sh", "alpha/07/00/7.env"}),
    ],
)
def test_layouts_without_a_user_do_not_wait(tmp_path: Path, layout: str, names: set[str]) -> None:
    site = archive.make_site(tmp_path, layout=layout)
    script = archive.script(site, 7)
    site.feed(script)
    assert set(archive.files(site)) == names
    site.feed(archive.identity(script))
    assert set(archive.files(site)) == names
    assert not list(archive.root_of(site).rglob("MANIFEST.jsonl"))


def test_a_reused_id_with_the_same_name_keeps_both(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    first = archive.script(site, 7, b"one")
    second = archive.script(site, 7, b"two", mtime_ns=NOON_NS + 1)
    third = archive.script(site, 7, b"two", mtime_ns=NOON_NS + 2)
    site.feed(first, archive.identity(first))
    site.feed(second, third, archive.identity(second), archive.identity(third))
    assert {name: data for name, data in archive.files(site).items() if name.endswith(".sh")} == {
        f"{DAY}/7-run.sh": b"one",
        f"{DAY}/7-run~2.sh": b"two",
        f"{DAY}/7-run~3.sh": b"two",
    }


@pytest.mark.parametrize("store", ["archive.files", "state"])
def test_a_batch_may_come_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7, store=store)
    events = [script, archive.identity(script)]

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    # After the files and manifests, before the database.
    monkeypatch.setattr(PendingBatch, "write", crash)
    with pytest.raises(Crash):
        site.feed(*events)
    monkeypatch.undo()
    assert archive.sink_of(site).cursor() == 0
    site.reopen()
    site.feed(*events)
    site.feed(*events)
    assert archive.files(site) == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}


def test_a_crash_after_a_move_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    script = archive.script(site, 7)
    site.feed(script)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(PendingBatch, "write", crash)
    with pytest.raises(Crash):
        site.feed(archive.identity(script))
    monkeypatch.undo()
    site.reopen()
    site.feed(archive.identity(script))
    assert archive.files(site) == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}


def test_bytes_from_the_state_directory_are_copied(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    archive.sink_of(site).prepare()
    script = archive.script(site, 7, store="state")
    site.feed(script, archive.identity(script))
    assert archive.files(site) == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.stat(archive.root_of(site) / DAY / "7-run.sh").st_nlink == 1


def test_lost_bytes_reject_their_event_alone(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    lost, good = archive.script(site, 7), archive.script(site, 8)
    archive.store_of(site).unlink([lost.body.script.path])
    with pytest.raises(Rejected, match=r"the content of .* is missing") as caught:
        site.feed(good, lost)
    assert caught.value.event.body is lost.body
    site.feed(good)
    assert "unverified/alpha/2026/03/01/8-claim.sh" in archive.files(site)


def test_a_symbolic_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (archive.root_of(site) / "alpha").mkdir()
    (archive.root_of(site) / "alpha" / "ada").symlink_to(elsewhere)
    with pytest.raises(Rejected, match="alpha/ada"):
        site.feed(script, archive.identity(script))
    assert list(elsewhere.iterdir()) == []
    (archive.root_of(site) / "alpha" / "ada").unlink()
    site.feed(script, archive.identity(script))
    assert len(archive.files(site)) == 2


def test_a_file_name_taken_by_a_link_is_left_alone(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    target = tmp_path / "secret"
    target.write_bytes(b"secret")
    (archive.root_of(site) / DAY).mkdir(parents=True)
    (archive.root_of(site) / DAY / "7-run.sh").symlink_to(target)
    site.feed(script, archive.identity(script))
    assert (archive.root_of(site) / DAY / "7-run~2.sh").read_bytes() == SCRIPT
    assert target.read_bytes() == b"secret"


def test_a_vanished_mount_is_never_written_to(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    site.feed(archive.script(site, 7))
    waiting = archive.script(site, 8)
    archive.root_of(site).rename(tmp_path / "unmounted")
    archive.root_of(site).mkdir()
    with pytest.raises(ArchiveUnavailable, match="mounted"):
        site.feed(waiting)
    assert list(archive.root_of(site).iterdir()) == []
    assert archive.sink_of(site).cursor() == 1
    archive.root_of(site).rmdir()
    with pytest.raises(ArchiveUnavailable):
        site.feed(waiting)
    (tmp_path / "unmounted").rename(archive.root_of(site))
    site.feed(waiting)
    assert len(archive.files(site)) == 4


def test_another_archives_tree_is_not_written_to(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    script = archive.script(site, 7)
    (archive.root_of(site) / ".steward-archive").write_text("somebody-elses\n")
    with pytest.raises(ArchiveUnavailable, match="another"):
        site.feed(script)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_disk_refuses_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    script = archive.script(site, 7)
    real = os.link

    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number), "7-claim.sh")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ArchiveUnavailable) as caught:
        site.feed(script)
    assert str(archive.root_of(site)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert archive.sink_of(site).cursor() == 0
    monkeypatch.setattr(os, "link", real)
    site.feed(script)
    assert len(archive.files(site)) == 2


def test_a_directory_removed_under_it_is_made_again(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    site.feed(archive.script(site, 7))
    waiting = archive.script(site, 8)
    (archive.root_of(site) / "unverified").rename(tmp_path / "aside")
    site.feed(waiting)
    assert "unverified/alpha/2026/03/01/8-claim.sh" in archive.files(site)


def test_environments_can_be_left_out(tmp_path: Path) -> None:
    import msgspec

    site = archive.make_site(tmp_path, slurm=False)
    site.reopen(archive=msgspec.structs.replace(site.settings.archive, environments=False))
    site.feed(archive.script(site, 7))
    assert set(archive.files(site)) == {"unverified/alpha/2026/03/01/7-claim.sh"}


def test_a_torn_manifest_is_healed(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    one, two = archive.script(site, 1), archive.script(site, 2)
    site.feed(one, archive.identity(one))
    path = archive.root_of(site) / DAY / "MANIFEST.jsonl"
    path.write_bytes(path.read_bytes() + b'{"fact":"kept","key":"script:9')
    site.feed(two, archive.identity(two))
    assert [key for _, key in archive.manifest(site, DAY)] == [one.key, one.key, two.key, two.key]


def test_hostile_names_stay_in_their_place(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    events = []
    for number, name in enumerate(("../../etc/passwd", "a\nb", "-rf", "x" * 4000, "é\u202e", "")):
        script = archive.script(site, number + 1)
        events += [script, archive.identity(script, user=f"u{name}", uid=5000 + number, name=name)]
    site.feed(*events)
    files = archive.files(site)
    assert len(files) == 12
    assert all(path.startswith("alpha/u") and path.count("/") == 5 for path in files)


def test_numbers_in_batches_of_many_directories(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, layout="sliced")
    scripts = [archive.script(site, number * 101) for number in range(1, 300)]
    site.feed(*scripts)
    assert len(archive.files(site)) == 2 * 299


def test_a_run_that_ends_files_what_waits(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    site.feed(*[archive.script(site, number, environment=None) for number in range(1, 600)])
    archive.sink_of(site).file_waiting()
    assert len(archive.files(site)) == 599


def test_a_closed_sink_has_no_file_open(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    site.feed(script, archive.identity(script))
    sink = archive.sink_of(site)
    assert archive.list_open_files(site.state)
    sink.close()
    assert archive.list_open_files(site.state) == []


def test_a_script_that_is_filed_while_it_is_read_is_read_from_its_new_place(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    script = archive.script(site, 7)
    site.feed(script)

    class SlowReader(FilesReader):
        """Reader that the sink overtakes after the reader has located a file."""

        def locate(self, script_key: str, cluster: str = "") -> PlacedScript | None:
            placed = super().locate(script_key, cluster)
            if not archive.files(site):
                site.feed(archive.identity(script))
            return placed

    assert SlowReader(site.settings, "files").read(script.key, "script") == SCRIPT
    assert os.listdir(archive.root_of(site) / ".waiting") == []
