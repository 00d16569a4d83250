"""File of lines and its source: renames, truncation, partial lines and restarts."""

import json
import os
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steward.capture.jobcomp import JobcompSource, ReadPositions
from steward.capture.log_follower import LogFollower, ReadPosition
from steward.core.errors import Unavailable
from steward.core.events import JOB_END, NODE_GAP, Event
from steward.core.waits import Stop

_opened: list[LogFollower | JobcompSource | ReadPositions] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the sources that a test opened, because descriptors are few."""
    yield
    while _opened:
        _opened.pop().close()


class Reader:
    """Follows a file as the source does, and records the lines."""

    def __init__(self, path: Path, place: ReadPosition | None = None, quiet_s: float = 0.0) -> None:
        self.following = LogFollower(str(path), place, quiet_s=quiet_s, reattach_s=0.0)
        _opened.append(self.following)
        self.place = place
        self.lines: list[bytes] = []
        self.garbled = 0

    def look(self, at_most: int = -1) -> list[bytes]:
        """Return the lines of the next poll, or only its first batches, as if killed then."""
        self.following.process_events()
        new: list[bytes] = []
        for batch in self.following.read_batches():
            if not at_most:
                break
            at_most -= 1
            new += batch.lines
            self.garbled += batch.garbled
            self.place = batch.position
        self.lines += new
        return new


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def write(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))


def test_lines_are_taken_when_they_are_whole(file: Path) -> None:
    reader = Reader(file)
    assert reader.look() == []
    write(file, b"one", b"", b"two")
    with file.open("ab") as raw:
        raw.write(b"thr")
    assert reader.look() == [b"one", b"two"]
    with file.open("ab") as raw:
        raw.write(b"ee\nfour")
    assert reader.look() == [b"three"]
    assert reader.place is not None
    again = Reader(file, reader.place)
    write(file, b"!")
    assert again.look() == [b"four!"]


def test_a_directory_that_comes_late(tmp_path: Path) -> None:
    file = tmp_path / "later" / "lines"
    reader = Reader(file)
    reader.look()
    assert "later" in reader.following.problem
    file.parent.mkdir()
    write(file, b"one")
    assert reader.look() == [b"one"]
    assert reader.following.problem == ""


def test_a_renamed_file_is_read_to_its_end(file: Path) -> None:
    reader = Reader(file, quiet_s=60.0)
    write(file, b"one")
    assert reader.look() == [b"one"]
    with file.open("ab") as late:
        file.rename(file.with_name("lines.1"))
        write(file, b"three")
        assert reader.look() == [b"three"]
        late.write(b"two\n")
    assert reader.look() == [b"two"]
    assert reader.place is not None
    again = Reader(file, reader.place)
    assert again.look() == [b"three"], "there is nothing more in the former"
    write(file, b"four")
    assert again.look() == [b"four"]
    assert again.place is not None
    assert again.place.inode == file.stat().st_ino


def test_a_last_line_before_a_rotation_is_read_however_old_the_one_before(file: Path) -> None:
    reader = Reader(file)
    write(file, b"one")
    reader.look()
    write(file, b"two")
    file.rename(file.with_name("lines.1"))
    write(file, b"three")
    assert reader.look() == [b"two", b"three"]


def test_as_long_as_a_renamed_file_may_grow_the_place_stays_in_it(file: Path) -> None:
    reader = Reader(file, quiet_s=60.0)
    write(file, b"one")
    reader.look()
    with file.open("ab") as late:
        file.rename(file.with_name("lines.1"))
        write(file, b"three")
        reader.look()
        again = Reader(file, reader.place)
        late.write(b"two\n")
    assert sorted(again.look()) == [b"three", b"two"], "what was read of the other comes again"


def test_files_that_were_rotated_while_nobody_looked(file: Path) -> None:
    reader = Reader(file)
    write(file, b"1", b"2")
    reader.look()
    write(file, b"3")
    for number in (1, 2):
        for old in (2, 1):
            if file.with_name(f"lines.{old}").exists():
                file.with_name(f"lines.{old}").rename(file.with_name(f"lines.{old + 1}"))
        file.rename(file.with_name("lines.1"))
        write(file, f"after {number}".encode())
    (file.parent / "lines.other.gz").write_bytes(b"packed\n")
    (file.parent / "linesman").write_bytes(b"another's\n")
    again = Reader(file, reader.place)
    assert again.look() == [b"3", b"after 1", b"after 2"]


def test_a_file_that_was_copied_and_truncated(file: Path) -> None:
    reader = Reader(file)
    write(file, b"one", b"two")
    reader.look()
    write(file, b"three")
    shutil.copyfile(file, file.with_name("lines.1"))
    os.truncate(file, 0)
    write(file, b"four, which is longer than all that was before")
    assert reader.look() == [b"three", b"four, which is longer than all that was before"]
    shutil.copyfile(file, file.with_name("lines.2"))
    os.truncate(file, 0)
    write(file, b"five")
    again = Reader(file, reader.place)
    assert again.look()[-1:] == [b"five"]


def test_what_cannot_be_lines_is_counted_and_passed(file: Path) -> None:
    reader = Reader(file)
    write(file, b"one")
    with file.open("ab") as raw:
        raw.write(b"\xff" * 900_000)
    assert reader.look() == [b"one"]
    assert reader.garbled == 1
    write(file, b"the rest of it", b"two")
    assert reader.look() == [b"two"]
    assert reader.garbled == 1


def test_neither_links_nor_pipes_are_read(file: Path) -> None:
    secret = file.with_name("secret")
    write(secret, b"root's own")
    file.symlink_to(secret)
    reader = Reader(file)
    assert reader.look() == []
    assert "cannot read" in reader.following.problem
    file.unlink()
    os.mkfifo(file)
    assert reader.look() == []


def test_no_line_is_missed_whatever_happens(tmp_path: Path) -> None:
    """Lines arrive while the file is renamed and the reader is killed: none is lost."""
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    file, written, taken = tmp_path / "lines", 0, set[bytes]()
    reader = Reader(file)
    write(file, b"the first")
    reader.look()
    for turn in range(400):
        for _ in range(chance.randrange(4)):
            write(file, b"line %d " % written + b"x" * chance.randrange(2000))
            written += 1
        what = chance.randrange(10)
        if what < 2 and file.exists():
            file.rename(tmp_path / f"lines-{turn:04}")
        if what < 7:
            at_most = chance.choice([-1, -1, 0, 1])
            taken.update(line.split()[1] for line in reader.look(at_most))
            if at_most >= 0:
                reader.following.close()
                reader = Reader(file, reader.place)
    for _ in range(3):
        taken.update(line.split()[1] for line in reader.look())
    assert len(taken) == written, f"seed {seed}"


# --- the source


LINE = {"v": 1, "k": "job", "t": 1795296917, "job_state": 3, "submit_time": 1795296913}


def source(tmp_path: Path, journal: list[Event], **options: object) -> JobcompSource:
    append = options.pop("append", journal.extend)
    places = ReadPositions(str(tmp_path), "c1")
    lines = JobcompSource("c1", str(tmp_path / "jobcomp"), places, append)  # type: ignore[arg-type]
    _opened.extend([places, lines])
    return lines


def job(number: int, **more: object) -> bytes:
    return json.dumps({**LINE, "job_id": number, **more}).encode()


def test_lines_become_events_and_the_place_is_kept(tmp_path: Path) -> None:
    journal: list[Event] = []
    file = tmp_path / "jobcomp"
    write(file, job(1), b"garbage", job(2, lost=3), b"{}")
    source(tmp_path, journal).append_new_events(Stop())
    assert [event.kind for event in journal] == [JOB_END, JOB_END, NODE_GAP, NODE_GAP]
    gaps = [(e.body.node, e.body.why, e.body.lines) for e in journal if e.kind == NODE_GAP]
    assert gaps == [("slurmctld", "lost", 3), ("slurmctld", "garbled", 2)]
    journal.clear()
    write(file, job(3))
    source(tmp_path, journal).append_new_events(Stop())
    assert [event.body.record.job_id for event in journal] == [3]


def test_a_line_behind_a_torn_one_is_taken(tmp_path: Path) -> None:
    journal: list[Event] = []
    torn = job(1, name='{"v":1 "')[:-30]
    write(tmp_path / "jobcomp", torn + job(2), torn + torn, b'x{"v":1}', job(3))
    source(tmp_path, journal).append_new_events(Stop())
    assert [e.body.record.job_id for e in journal if e.kind == JOB_END] == [2, 3]
    assert [e.body.lines for e in journal if e.kind == NODE_GAP] == [3]


def test_the_place_moves_only_after_the_journal_has_the_events(tmp_path: Path) -> None:
    def refuse(events: Sequence[Event]) -> None:
        raise Unavailable("the journal is away", len(events))

    journal: list[Event] = []
    write(tmp_path / "jobcomp", job(1))
    with pytest.raises(Unavailable):
        source(tmp_path, journal, append=refuse).append_new_events(Stop())
    source(tmp_path, journal).append_new_events(Stop())
    assert [event.body.record.job_id for event in journal] == [1]


def test_a_line_wakes_the_source(tmp_path: Path) -> None:
    journal: list[Event] = []
    came, stop = threading.Event(), Stop()

    def append(events: Sequence[Event]) -> None:
        journal.extend(events)
        came.set()

    running = source(tmp_path, journal, append=append)
    thread = threading.Thread(target=running.run, args=(stop, lambda: None))
    thread.start()
    write(tmp_path / "jobcomp", job(1))
    assert came.wait(20)
    came.clear()
    (tmp_path / "jobcomp").rename(tmp_path / "jobcomp.1")
    write(tmp_path / "jobcomp", job(2))
    assert came.wait(20)
    stop.set()
    thread.join(20)
    assert {event.body.record.job_id for event in journal} == {1, 2}


def test_what_everybody_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    write(tmp_path / "jobcomp", job(1))
    (tmp_path / "jobcomp").chmod(0o644)
    source(tmp_path, []).append_new_events(Stop())
    assert "all users can read" in caplog.text
