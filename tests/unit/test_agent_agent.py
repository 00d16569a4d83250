"""Agent of compute nodes: it loses no line of its files, and its code is one file."""

import ast
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random

import pytest

from steward.agent import agent
from steward.agent.agent import Place, Spool
from steward.cli import agent as command
from steward.cli.app import run
from steward.cli.parameters import wrap_function

SOURCE = Path(agent.__file__)


def spool_in(
    directory: Path,
    rotate_bytes: int = 1 << 20,
    most_bytes: int = 64 << 20,
    grace_s: float = 60.0,
) -> Spool:
    return Spool(str(directory), "n1", rotate_bytes, most_bytes, grace_s=grace_s)


def write(directory: Path, *lines: str) -> None:
    with (directory / "n1.log").open("a") as file:
        file.writelines(line + "\n" for line in lines)


def take(spool: Spool) -> list[str]:
    """Return all waiting lines, as if the agent had sent them."""
    found = []
    while (batch := spool.read_batch()) is not None:
        number, offset, body = batch
        found += body.decode().splitlines()
        spool.record_sent(number, offset, time.time(), "boot")
    return found


def age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file old enough to be removed."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1000.0)


def test_it_is_python_3_9() -> None:
    text = SOURCE.read_text()
    ast.parse(text, feature_version=(3, 9))
    modules = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert modules <= set(sys.stdlib_module_names)


def test_it_runs_without_steward(tmp_path: Path) -> None:
    # -I: no package of this environment's is found; tests/integration has it on Python 3.9.
    words = [sys.executable, "-I", "-S", str(SOURCE), "--spool", str(tmp_path)]
    done = subprocess.run(
        [*words, "--to", "127.0.0.1:1", "--limit", "0", "--node", "n1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("steward-agent: node n1: ")


def test_the_command_has_the_same_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = {name for option in wrap_function(command.app).params for name in option.opts}
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        agent.main(["--help"])
    own = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", capsys.readouterr().out))
    assert typed - {"--write"} == own - {
        "-h",
        "--help",
    }


def test_it_can_be_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "steward-agent"
    target.write_text("the one before")
    planted, victim = tmp_path / "steward-agent.new", tmp_path / "victim"
    victim.write_text("precious")
    planted.symlink_to(victim)
    assert run(["agent", "--write", str(target)]) == 0
    assert target.read_bytes() == SOURCE.read_bytes()
    assert os.access(target, os.X_OK)
    assert victim.read_text() == "precious"
    assert run(["agent", "--write", str(tmp_path / "none" / "x")]) == 1
    assert run(["agent", "--spool", str(tmp_path)]) == 2
    assert run(["agent", "--spool", str(tmp_path), "--to", "x", "--node=a", "--node=b"]) == 2
    assert "give host and port" in capsys.readouterr().err


def test_what_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    assert take(spool_in(tmp_path)) == ["a", "b"]
    assert take(spool_in(tmp_path)) == []
    write(tmp_path, "c")
    assert take(spool_in(tmp_path)) == ["c"]
    assert spool_in(tmp_path).place.sequence == 2


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    with (tmp_path / "n1.log").open("a", buffering=1) as file:
        file.write("a\nb")
        file.flush()
        assert take(spool_in(tmp_path)) == ["a"]
        file.write("c\n")
        assert take(spool_in(tmp_path)) == ["bc"]


def test_a_large_file_is_renamed_and_removed_when_nobody_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *("x" * 100 for _ in range(100)))
    writer = (tmp_path / "n1.log").open("a")
    spool = spool_in(tmp_path, rotate_bytes=1000)
    spool.rotate_and_clean()
    write(tmp_path, "new")
    writer.write("late\n")
    writer.flush()
    assert take(spool)[-2:] == ["late", "new"]
    age(monkeypatch)
    spool.rotate_and_clean()
    assert (tmp_path / "n1.log.1").exists()  # its writer may go on
    writer.write("later\ntorn")
    writer.flush()
    assert take(spool) == ["later"]
    writer.close()
    assert take(spool) == ["torn"]  # no more will come of it
    spool.rotate_and_clean()
    assert not (tmp_path / "n1.log.1").exists()
    assert spool.place.offsets == {2: 4}
    write(tmp_path, "newer")
    assert take(spool_in(tmp_path)) == ["newer"]


def test_a_file_is_not_removed_at_once(tmp_path: Path) -> None:
    """A writer that found the old name may open the file a moment later."""
    write(tmp_path, "x" * 1000)
    spool = spool_in(tmp_path, rotate_bytes=1000)
    spool.rotate_and_clean()
    take(spool)
    spool.rotate_and_clean()
    assert (tmp_path / "n1.log.1").exists()


def test_a_kill_between_renaming_and_writing_that_down(tmp_path: Path) -> None:
    write(tmp_path, "a")
    assert take(spool_in(tmp_path)) == ["a"]
    os.rename(tmp_path / "n1.log", tmp_path / "n1.log.1")
    write(tmp_path, "b")
    assert spool_in(tmp_path).place.number == 2
    (tmp_path / "n1.log.1").unlink()
    assert take(spool_in(tmp_path)) == ["b"]


def nodes_in(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the nodes whose lines an agent without --node would send, if it could send."""
    words = ["--spool", str(directory), "--to", "127.0.0.1:1", "--tls", "--limit", "0"]
    assert agent.main([*words, "--certificate", str(directory / "none")]) == 1
    return re.findall(r"node (\S+): 127", capsys.readouterr().err)


def test_a_node_whose_file_was_just_renamed_is_not_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a")
    os.rename(tmp_path / "n1.log", tmp_path / "n1.log.1")
    (tmp_path / "n2.place").touch()
    (tmp_path / "n3.lock").touch()
    assert nodes_in(tmp_path, capsys) == ["n1", "n2"]


def test_a_hosts_own_name_that_is_no_nodes_is_tried_no_more_once_a_file_names_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = os.uname().nodename.partition(".")[0]
    for _ in range(2):
        assert nodes_in(tmp_path, capsys) == [own]
    write(tmp_path, "a")
    assert nodes_in(tmp_path, capsys) == ["n1"]
    place = Place(str(tmp_path / f"{own}.place"))
    place.heard = 1.0
    place.save()
    assert nodes_in(tmp_path, capsys) == sorted(["n1", own])


def test_what_is_too_much_is_given_up_from_the_oldest_on_and_counted(tmp_path: Path) -> None:
    write(tmp_path, *(f"{number:099d}" for number in range(100)))
    spool = spool_in(tmp_path, rotate_bytes=5000, most_bytes=5000)
    spool.rotate_and_clean()
    write(tmp_path, "new")
    spool.drop_excess()
    assert (spool.place.dropped, spool.place.dropped_ever) == (100, 100)
    assert take(spool_in(tmp_path)) == ["new"]
    assert spool_in(tmp_path).place.dropped == 0  # it has received it
    assert spool_in(tmp_path).place.dropped_ever == 100


def test_without_its_place_all_is_sent_again_under_another_name(tmp_path: Path) -> None:
    write(tmp_path, "x" * 1000)
    spool = spool_in(tmp_path, rotate_bytes=1000)
    spool.rotate_and_clean()
    write(tmp_path, "a")
    assert len(take(spool)) == 2
    (tmp_path / "n1.place").write_text('{"offsets": ')
    again = spool_in(tmp_path)
    assert again.place.id != spool.place.id
    assert len(take(again)) == 2
    assert Place(str(tmp_path / "n1.place")).id == again.place.id


def test_a_file_that_somebody_emptied_is_read_from_its_begin(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    assert len(take(spool_in(tmp_path))) == 3
    os.truncate(tmp_path / "n1.log", 0)
    write(tmp_path, "d")
    assert take(spool_in(tmp_path)) == ["d"]


def test_a_flood_without_newlines_passes(tmp_path: Path) -> None:
    with (tmp_path / "n1.log").open("w") as file:
        file.write("x" * (3 << 20) + "\n")
    write(tmp_path, "a")
    found = take(spool_in(tmp_path))
    assert found[-1] == "a"
    assert sum(map(len, found)) < 2 << 20


def test_what_was_sent_is_noted_in_place(tmp_path: Path) -> None:
    """The agent overwrites the position in place, half by half; a torn half leaves the other."""
    write(tmp_path, "a")
    take(spool_in(tmp_path))
    size = (tmp_path / "n1.place").stat().st_size
    inode = (tmp_path / "n1.place").stat().st_ino
    for letter in "bcd":
        write(tmp_path, letter)
        assert take(spool_in(tmp_path)) == [letter]
    after = (tmp_path / "n1.place").stat()
    assert (after.st_size, after.st_ino) == (size, inode)
    kept = spool_in(tmp_path).place
    with (tmp_path / "n1.place").open("r+b") as file:
        file.seek(kept.written % 2 * (size // 2) + 40)
        file.write(b"torn")
    assert spool_in(tmp_path).place.id == kept.id
    assert take(spool_in(tmp_path)) == ["d"]


def test_lines_that_came_after_a_power_failure_are_sent(tmp_path: Path) -> None:
    """After the failure the file is shorter than the sent part, and then grows beyond it."""
    write(tmp_path, *(f"{number:050d}" for number in range(100)))
    assert len(take(spool_in(tmp_path))) == 100
    os.truncate(tmp_path / "n1.log", 51 * 20)
    new = [f"new {number:050d}" for number in range(90)]
    write(tmp_path, *new)
    assert take(spool_in(tmp_path))[20:] == new


def test_nothing_is_sent_that_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fdatasync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    write(tmp_path, "a")
    assert spool_in(tmp_path).read_batch() is not None
    assert flushed == [str(tmp_path / "n1.log")]


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a\n")
    (tmp_path / "n1.log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        spool_in(tmp_path).read_batch()


def write_steadily(
    directory: Path, name: int, lines: int, is_enough: Event, end: Connection
) -> None:
    """Write as the plugin does in many steps: some open the file for each line, some keep it open.

    Write at least ``lines`` lines, then more until ``is_enough``, up to a limit.
    """
    chance = Random(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    held = -1
    number = 0
    while number < lines or (number < 50 * lines and not is_enough.is_set()):
        if held >= 0 and chance.random() < 0.1:
            os.close(held)
            held = -1
        if held < 0:
            held = os.open(directory / "n1.log", flags, 0o600)
        os.write(held, f"{name}.{number} {'x' * chance.randrange(200)}\n".encode())
        number += 1
        if chance.random() < 0.05:
            time.sleep(0.001)
    os.close(held)
    end.send(number)


def test_no_line_is_lost_by_rotation_under_writers(tmp_path: Path) -> None:
    """The agent rotates every few kilobytes, and removes files as soon as nobody holds a lease."""
    context = multiprocessing.get_context("fork")
    is_enough = context.Event()
    ends = [context.Pipe(duplex=False) for _ in range(3)]
    writers = [
        context.Process(target=write_steadily, args=(tmp_path, name, 4000, is_enough, end))
        for name, (_, end) in enumerate(ends)
    ]
    for writer in writers:
        writer.start()
    found: list[str] = []
    while True:
        over = not any(writer.is_alive() for writer in writers)
        spool = spool_in(tmp_path, rotate_bytes=8000, grace_s=0.2)
        spool.rotate_and_clean()
        found += take(spool)
        if spool.place.number > 20:
            is_enough.set()
        if over:
            break
    names = [line.partition(" ")[0] for line in found]
    written = [
        f"{name}.{number}"
        for name, (said, _) in enumerate(ends)
        for number in range(said.recv() if said.poll() else 0)
    ]
    assert len(written) >= 12_000
    assert sorted(names) == sorted(written)
    assert spool_in(tmp_path).place.number > 20


def test_two_runs_never_work_at_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a")
    with (tmp_path / "n1.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert agent.main(["--spool", str(tmp_path), "--to", "127.0.0.1:1", "--limit", "0"]) == 0
    assert not (tmp_path / "n1.place").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--to", "steward"], "give host and port"),
        (["--to", "steward:99999"], "give host and port"),
        (["--to", "a:1", "--node", "../n1"], "invalid node name"),
        (["--to", "a:1", "--user", "nobody-of-that-name"], "unknown user"),
        (["--to", "a:1", "--certificate", "/c"], "need --tls"),
    ],
)
def test_wrong_use_is_two(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.main(["--spool", str(tmp_path), *words]) == 2
    assert what in capsys.readouterr().err
    assert signal.alarm(0) == 0, "the time limit ends with the run"


def test_a_directory_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.main(["--spool", str(tmp_path / "none"), "--to", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
