"""The daemon's socket: its replies, and hostile peers."""

import contextlib
import errno
import logging
import os
import pwd
import select
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_submission import wait_until

from harness.socket import LIMITS, Done, Question, Step, Told, registry, serving
from steward.client.sockets import ask_socket
from steward.core.access import Caller
from steward.core.actions import Action, Registry
from steward.core.errors import PermissionRefused
from steward.core.rpc import (
    LONGEST_REQUEST,
    DaemonBusy,
    ReplyLine,
    decode_reply_line,
    encode_request_line,
    make_error,
)
from steward.daemon.request_service import PeerLimits
from steward.daemon.socket import SocketError, open_listener


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    os.chmod(tmp_path, 0o755)
    socket_path = str(tmp_path / "s.sock")
    with serving(socket_path):
        yield socket_path


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(path)
    return connection


def read_all(connection: socket.socket) -> list[ReplyLine]:
    replies: list[ReplyLine] = []
    with connection, connection.makefile("rb") as file:
        for line in file:
            replies.append(decode_reply_line(line))
            if not replies[-1].item:
                break  # the last line: where the request was not read, a reset follows
    return replies


def ask_raw(path: str, data: bytes) -> list[ReplyLine]:
    connection = connect(path)
    # It may answer and close before it has read all that is sent.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
    return read_all(connection)


def ask(path: str, action: str, request: Question | None = None) -> list[ReplyLine]:
    return ask_raw(path, encode_request_line(f"test.{action}", request or Question()))


def answer(reply: ReplyLine) -> Told:
    assert reply.ok, reply.error
    return msgspec.json.decode(reply.answer, type=Told)


def works(path: str) -> bool:
    """Return whether the server still answers."""
    return answer(ask(path, "echo", Question(text="here"))[0]).text == "here"


def test_a_request_is_answered_and_the_asker_is_who_the_kernel_says(path: str) -> None:
    (reply,) = ask(path, "echo", Question(text="a\nb\x00\u2028é"))
    told = answer(reply)
    assert told.text == "a\nb\x00\u2028é"
    assert told.uid == os.geteuid()
    assert told.user == pwd.getpwuid(os.geteuid()).pw_name


def test_an_action_that_only_reads_needs_no_place_for_its_key(path: str) -> None:
    # This daemon has none. Its answer, perhaps a script, is stored nowhere.
    for action, is_answered in (("look", True), ("echo", False)):
        (reply,) = ask_raw(path, encode_request_line(f"test.{action}", Question(), key="k"))
        assert reply.ok is is_answered


@pytest.mark.parametrize("scope", ["read", "scripts"])
def test_a_script_that_is_read_under_a_key_is_not_stored(tmp_path: Path, scope: str) -> None:
    def read(_context: object, _asker: Caller, _request: Question) -> Told:
        return Told(text="#!/bin/sh secret", uid=1, user="", pid=1)

    action = Action(
        name="test.read",
        help="",
        request=Question,
        answer=Told,
        run=read,
        scope=scope,  # type: ignore[arg-type] # one of them
    )
    socket_path = str(tmp_path / "s.sock")
    with serving(socket_path, asked=Registry((action,), {"test": lambda: None})):
        (reply,) = ask_raw(socket_path, encode_request_line("test.read", Question(), key="k"))
    assert "secret" in answer(reply).text


def test_who_cannot_be_served_for_want_of_a_process_is_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, fork, tests = tmp_path / "full", os.fork, os.getpid()

    def fails() -> int:
        if os.getpid() != tests and full.exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", fails)
    with serving(str(tmp_path / "s.sock")):
        full.touch()
        (reply,) = ask(str(tmp_path / "s.sock"), "echo")
        assert "try again" in reply.error
        assert isinstance(make_error(reply), DaemonBusy)
        full.unlink()
        assert works(str(tmp_path / "s.sock"))


def test_a_stream_ends_with_its_answer(path: str) -> None:
    *items, last = ask(path, "count", Question(number=500))
    numbers = [msgspec.json.decode(item.item, type=Step).number for item in items if item.item]
    assert numbers == list(range(500))
    assert last.ok
    assert msgspec.json.decode(last.answer, type=Done).steps == 500


def test_an_error_keeps_its_family_and_exit_code(path: str) -> None:
    (reply,) = ask(path, "refuse", Question(text="x"))
    error = make_error(reply)
    assert isinstance(error, PermissionRefused)
    assert "is not yours" in str(error)
    assert error.exit_code == 1


def test_an_error_in_a_stream_is_its_last_line(path: str) -> None:
    item, last = ask(path, "late")
    assert item.item
    assert last.error == "in the middle"


def test_a_failure_of_ours_tells_the_peer_nothing_of_the_inside(path: str) -> None:
    (reply,) = ask(path, "fail")
    assert "see its log" in reply.error
    assert "secret" not in reply.error
    assert works(path)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"garbage\n", "cannot decode the request"),
        (b'{"v":1}\n', "cannot decode the request"),
        (b'{"v":2,"action":"test.echo"}\n', "version 1"),
        (b'{"v":1,"action":"test.nothing"}\n', "unknown action 'test.nothing'"),
        (b'{"v":1,"action":"test.echo","args":{"text":3}}\n', "text"),
        (b'{"v":1,"action":"test.echo","args":{"odd":3}}\n', "odd"),
        (b'{"v":1,"action":"test.echo","args":null}\n', "test.echo"),
        (b"[" * 200_000 + b"\n", "cannot decode the request"),
        (b"\xff\xfe\x00\n", "cannot decode the request"),
        (b"\n", "cannot decode the request"),
        (b"x" * (LONGEST_REQUEST + 2), "longer than"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_request_is_answered_with_an_error(path: str, data: bytes, part: str) -> None:
    (reply,) = ask_raw(path, data)
    assert part in reply.error
    assert not reply.ok


@hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=5))
def test_no_bytes_stop_it(path: str, requests: list[bytes]) -> None:
    for data in requests:
        connection = connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert all(not reply.ok for reply in read_all(connection))
    assert works(path)


def test_a_silent_peer_is_told_and_let_go(path: str) -> None:
    (reply,) = read_all(connect(path))
    assert "the request was not complete" in reply.error


def test_a_dripping_peer_gets_no_more_time_for_it(path: str) -> None:
    connection = connect(path)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100):
            connection.send(b"{")
            time.sleep(0.05)
    (reply,) = read_all(connection)
    assert "the request was not complete" in reply.error


def test_a_peer_that_leaves_harms_nobody(path: str) -> None:
    for data in (b"", b'{"v":1', encode_request_line("test.count", Question(number=10**6))):
        connection = connect(path)
        connection.sendall(data)
        connection.close()
    assert works(path)


def test_a_peer_that_does_not_read_is_given_up(path: str) -> None:
    connection = connect(path)
    connection.sendall(encode_request_line("test.count", Question(number=10**6, text="x" * 1000)))
    assert works(path)
    # Reading before it gives up, on a busy machine, would last minutes.
    hangup = select.poll()
    hangup.register(connection, 0)
    assert hangup.poll(60_000), "the peer was not given up"
    replies = 0
    with contextlib.suppress(msgspec.DecodeError, ConnectionResetError):
        replies = len(read_all(connection))
    assert replies < 10**6


def test_a_crash_ends_its_own_connection_alone(path: str) -> None:
    waiting = connect(path)
    assert ask(path, "crash") == []
    waiting.sendall(encode_request_line("test.echo", Question(text="still")))
    assert answer(read_all(waiting)[0]).text == "still"


def test_an_action_that_hangs_is_ended(path: str) -> None:
    assert ask(path, "hang") == []
    assert works(path)


def test_an_answer_takes_no_more_memory_than_one_may(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "s.sock")
    with serving(socket_path, PeerLimits(silence_s=60.0, memory_bytes=256 << 20)):
        (reply,) = ask(socket_path, "swell")
        assert "too much memory" in reply.error
        assert works(socket_path)


# The serving process, and a command that it started, directly or through the doctor.
@pytest.mark.parametrize("action", ["dally", "command", "check", "starve"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_listing_ends_when_its_reader_has_gone(
    tmp_path: Path, action: str, *, keeps: bool
) -> None:
    socket_path, told = str(tmp_path / "s.sock"), tmp_path / "pid"
    with serving(socket_path, PeerLimits(silence_s=300.0), keeps=keeps):
        connection = connect(socket_path)
        connection.sendall(
            encode_request_line(f"test.{action}", Question(text=str(told)), keep=keeps)
        )
        assert connection.recv(1)
        process = os.pidfd_open(pid_in(told))
        connection.close()
        assert has_ended(process)


@pytest.mark.parametrize("action", ["command", "check"])
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGKILL])
def test_what_is_broken_off_leaves_no_command(
    tmp_path: Path, action: str, number: signal.Signals
) -> None:
    socket_path, told, other = str(tmp_path / "s.sock"), tmp_path / "pid", tmp_path / "other"
    with (
        serving(socket_path, PeerLimits(silence_s=300.0), keeps=True),
        connect(socket_path) as connection,
        connect(socket_path) as staying,
    ):
        connection.sendall(encode_request_line("test.look", Question(), keep=True))
        with connection.makefile("rb") as file:
            server = answer(decode_reply_line(file.readline())).pid
        connection.sendall(
            encode_request_line(f"test.{action}", Question(text=str(told)), keep=True)
        )
        staying.sendall(encode_request_line("test.command", Question(text=str(other)), keep=True))
        process, untouched = os.pidfd_open(pid_in(told)), pid_in(other)
        os.kill(server, number)
        assert has_ended(process)
        assert works(socket_path)
        # Parallel requests continue, with their own processes.
        assert " Z " not in Path(f"/proc/{untouched}/stat").read_text()


@pytest.mark.parametrize("action", ["command", "check"])
def test_stopping_ends_the_commands(tmp_path: Path, action: str) -> None:
    socket_path, told = str(tmp_path / "s.sock"), tmp_path / "pid"
    with (
        serving(socket_path, PeerLimits(silence_s=300.0)) as pid,
        connect(socket_path) as connection,
    ):
        connection.sendall(encode_request_line(f"test.{action}", Question(text=str(told))))
        process = os.pidfd_open(pid_in(told))
        os.kill(pid, signal.SIGTERM)
        assert has_ended(process)


def pid_in(path: Path) -> int:
    """Return the process id that a process writes to a file."""
    wait_until(lambda: path.exists() and bool(path.read_text()))
    return int(path.read_text())


def has_ended(process: int) -> bool:
    """Return whether a process, given by a descriptor, ends soon."""
    poller = select.poll()  # select(2) cannot watch the descriptors of a busy pytest
    poller.register(process, select.POLLIN)
    ended = poller.poll(30_000)
    os.close(process)
    return bool(ended)


def test_what_changes_something_is_finished_without_who_asked_for_it(tmp_path: Path) -> None:
    socket_path, asked = str(tmp_path / "s.sock"), Question(text=str(tmp_path))
    with serving(socket_path, PeerLimits(silence_s=300.0), keeps=True):
        connection = connect(socket_path)
        connection.sendall(encode_request_line("test.look", Question(), keep=True))
        with connection.makefile("rb") as file:
            server = os.pidfd_open(answer(decode_reply_line(file.readline())).pid)
        connection.sendall(encode_request_line("test.finish", asked, keep=True))
        wait_until((tmp_path / "begun").exists)
        connection.close()
        # Another is asked meanwhile: time enough to end a process that would.
        assert works(socket_path)
        (tmp_path / "go on").touch()
        assert has_ended(server)
        assert (tmp_path / "done").exists()


def test_the_socket_is_everyones_and_goes_with_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "made" / "s.sock")
    before = os.umask(0o077)
    try:
        with serving(path):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
            assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o755
        assert not os.path.exists(path)
    finally:
        os.umask(before)


def test_a_left_over_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with serving(path) as pid:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        assert os.path.exists(path)
    with serving(path):
        assert works(path)


def test_a_second_daemon_does_not_take_the_place(path: str) -> None:
    with pytest.raises(SocketError, match="another daemon"), open_listener(path):
        pass
    assert works(path)


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("kept")
    with pytest.raises(SocketError, match="is not a socket"), open_listener(str(path)):
        pass
    assert path.read_text() == "kept"


def test_stopping_ends_what_is_being_answered(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with serving(path, PeerLimits()) as pid:
        connection = connect(path)
        connection.sendall(encode_request_line("test.hang", Question()))
        assert works(path)
        os.kill(pid, signal.SIGTERM)
        try:
            left = read_all(connection)
        except ConnectionResetError:
            left = []  # it was ended before it had read the question
        assert left == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as somebody else")


def start_as_user(uid: int, work: Callable[[], bool]) -> int:
    """Start a function as another user; return the process."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return pid


def ended_well(pid: int) -> bool:
    """Return whether the process exited with 0."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def as_user(uid: int, work: Callable[[], bool]) -> bool:
    """Return whether ``work`` is true as another user."""
    return ended_well(start_as_user(uid, work))


@pytest.fixture
def place() -> Iterator[str]:
    """Return a path for a socket, in a directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield f"{directory}/s.sock"


@pytest.fixture
def open_path(place: str) -> Iterator[str]:
    """Serve a socket that every user can reach."""
    with serving(place, PeerLimits(connections=6, per_user=4, request_s=5.0)):
        yield place


@needs_root
def test_another_user_is_known_as_such(open_path: str) -> None:
    def work() -> bool:
        told = answer(ask(open_path, "echo")[0])
        return told.uid == 54321 and told.user == ""

    assert as_user(54321, work)


@needs_root
def test_one_user_cannot_take_all_the_places(open_path: str) -> None:
    holds, tell = os.pipe()
    release, let_go = os.pipe()

    def flood() -> bool:
        try:
            held = [connect(open_path) for _ in range(LIMITS.per_user)]
            is_turned_away = "too many requests" in ask(open_path, "echo")[0].error
        finally:
            os.write(tell, b"!")
        os.read(release, 1)
        return is_turned_away and len(held) == LIMITS.per_user

    flooding = start_as_user(54321, flood)
    assert os.read(holds, 1) == b"!"
    assert as_user(54322, lambda: works(open_path))
    assert works(open_path)
    os.write(let_go, b"!")
    assert ended_well(flooding)
    for fd in (holds, tell, release, let_go):
        os.close(fd)


@needs_root
def test_who_connects_and_asks_nothing_starts_no_process_and_starves_nobody(
    place: str,
) -> None:
    begun, tell = os.pipe()
    with serving(place, PeerLimits(request_s=60.0)) as server:

        def flood() -> bool:
            for count in range(10**9):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                    connection.setblocking(False)
                    connection.connect(place)
                if count == 1000:
                    os.write(tell, b"!")
            return True

        flooding = [start_as_user(54321, flood) for _ in range(2)]
        try:
            for _ in flooding:
                assert os.read(begun, 1) == b"!"
            assert as_user(54322, lambda: all(is_answered(place) for _ in range(20)))
            wait_until(lambda: children_of(server) == [])
        finally:
            for pid in flooding:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for fd in (begun, tell):
        os.close(fd)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_answered(path: str) -> bool:
    """Return whether a client that retries gets a reply."""
    (told,) = ask_socket(path, registry().get("test.echo"), Question(text="here"))
    return bool(told.text == "here")


@needs_root
def test_a_user_who_asks_too_often_is_turned_away_and_tries_again(place: str) -> None:
    with serving(place, PeerLimits(per_second=0.5, burst=3)):

        def work() -> bool:
            errors = [ask(place, "echo")[0].error for _ in range(20)]
            is_turned_away = any("in a short time" in error for error in errors)
            return is_turned_away and is_answered(place)

        assert as_user(54321, work)
        assert all(works(place) for _ in range(20))


@needs_root
def test_requests_that_never_end_make_room_for_others(place: str) -> None:
    with serving(place, PeerLimits(request_s=60.0, waiting=4, per_user=100)) as server:
        held = [connect(place) for _ in range(20)]
        for connection in held:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"{")
        assert as_user(54322, lambda: works(place))
        wait_until(lambda: children_of(server) == [])
        for connection in held:
            connection.close()


def test_who_is_turned_away_does_not_fill_the_log(
    tmp_path: Path,
) -> None:
    path, uids = str(tmp_path / "s.sock"), iter([54321] * 99 + [54322])
    log = logging.FileHandler(tmp_path / "log")
    logging.getLogger("steward").addHandler(log)
    try:
        with serving(path, PeerLimits(per_user=0), uid_of=lambda _connection: next(uids)):
            for _ in range(100):
                (reply,) = ask(path, "echo")
                assert "too many requests" in reply.error
    finally:
        logging.getLogger("steward").removeHandler(log)
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    said = [line for line in lines if line.startswith("rejected a connection")]
    assert len(said) == 2, said
    assert "54321" in said[0]
    assert "54322" in said[1]
