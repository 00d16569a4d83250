"""strigger reports: content, authentication, and abuse by other users."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steward.admin.plugins.errors import PluginInstallError
from steward.admin.plugins.trigger import check_trigger, install_trigger
from steward.capture.sensor import trigger_helper
from steward.capture.sensor.trigger_helper import HelperRefused
from steward.capture.sensor.triggers import WakeupListener

SECRET = "s" * 43
ACCEPTED = b'{"ok":true,"answer":{}}\n'


def wake_line(secret: str = SECRET, **args: str) -> bytes:
    """Return a request of the trigger helper."""
    args = {"cluster": "c1", "event": "down", **args}
    request = {"v": 1, "action": "sensor.wake", "args": args, "auth": secret}
    return json.dumps(request).encode() + b"\n"


def error_of(reply: bytes) -> str:
    """Return the error in a reply; "" if it accepts."""
    return str(json.loads(reply).get("error", ""))


class Place:
    """Socket, secret and installed trigger helper."""

    def __init__(self, directory: Path) -> None:
        self.socket = str(directory / "trigger.sock")
        self.secret = directory / "trigger.secret"
        self.helper = directory / "libexec" / "steward-trigger"
        self.write(SECRET)

    def write(self, secret: str, mode: int = 0o600) -> None:
        self.secret.touch(mode=mode)
        self.secret.chmod(mode)
        self.secret.write_text(secret + "\n")

    def words(self, event: str = "down", cluster: str = "c1") -> list[str]:
        return ["--socket", self.socket, "--secret", str(self.secret), cluster, event, "n[1-3]"]


@pytest.fixture
def place() -> Iterator[Place]:
    # Not pytest's own directory, which is closed to other users.
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        os.chmod(path, 0o755)
        yield Place(Path(path))


@pytest.fixture
def wakeups(place: Place) -> Iterator[WakeupListener]:
    wakeups = WakeupListener(place.socket, str(place.secret), "c1")
    wakeups.start()
    yield wakeups
    wakeups.close()


def test_what_there_is_no_room_for_is_told(
    wakeups: WakeupListener, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    # Those of n1 are told, so that between two that are not one is.
    for number in (*range(4097), 1, 4098):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(place.socket)
            connection.sendall(wake_line(nodes=f"n{number}"))
            assert connection.recv(64) == ACCEPTED
    assert caplog.text.count("4096 strigger reports wait for a poll") == 1
    assert len(wakeups.take_fired()) == 4096


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_helper, "PAUSES_S", (0.01,))
    monkeypatch.setattr(trigger_helper, "ATTEMPT_TIMEOUT_S", 1.0)


def heard(wakeups: WakeupListener) -> set[str]:
    """Return the reports, once there is one."""
    deadline = time.monotonic() + 20
    found: set[str] = set()
    while not found and time.monotonic() < deadline:
        found |= {" ".join(wake).strip() for wake in wakeups.take_fired()}
        time.sleep(0.01)
    return found


def call(place: Place, event: str = "down", cluster: str = "c1") -> str:
    """Return the error output of the strigger program."""
    try:
        trigger_helper.send_wakeup(place.socket, str(place.secret), cluster, event, "n1")
    except (HelperRefused, OSError) as error:
        return str(error)
    return ""


def say(place: Place, data: bytes) -> bytes:
    """Return the sensor's reply to arbitrary bytes."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(place.socket)
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        return peer.recv(4096)


def test_the_helper_wakes(place: Place, wakeups: WakeupListener) -> None:
    assert call(place, "down") == ""
    assert call(place, "up") == ""
    assert heard(wakeups) == {"down n1", "up n1"}
    assert wakeups.take_fired() == set()


def test_the_helper_as_it_is_installed(place: Place, wakeups: WakeupListener) -> None:
    installed = install_trigger(str(place.helper), str(place.secret))
    assert installed.written_paths == (str(place.helper),)
    assert stat.S_IMODE(place.helper.stat().st_mode) == 0o755
    # slurmctld closes all descriptors before it starts it.
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', str(place.helper), *place.words("fail")],
        env={"PYTHONPATH": "/nonsense", "PYTHONSTARTUP": "/nonsense"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert heard(wakeups) == {"fail n[1-3]"}


def test_who_does_not_know_the_secret_is_refused(
    place: Place, wakeups: WakeupListener, caplog: pytest.LogCaptureFixture
) -> None:
    assert "lacks the secret" in error_of(say(place, wake_line("t" * 43)))
    assert wakeups.take_fired() == set()
    assert "lacks the secret" in caplog.text
    assert "ttt" not in caplog.text
    assert SECRET not in caplog.text


def test_another_clusters_trigger_is_refused(place: Place, wakeups: WakeupListener) -> None:
    assert "rejected the report: 'sensor.wake' of cluster 'c2'" in call(place, cluster="c2")
    assert wakeups.take_fired() == set()


def test_a_secret_that_is_open_to_others_is_none(place: Place, wakeups: WakeupListener) -> None:
    place.write(SECRET, 0o640)
    assert "must be a file of mode 0600" in call(place)
    assert "must be a file of mode 0600" in error_of(say(place, wake_line()))
    place.write(SECRET)
    assert call(place) == ""


@pytest.mark.parametrize("secret", ["", "short"])
def test_an_empty_secret_lets_nobody_in(place: Place, wakeups: WakeupListener, secret: str) -> None:
    place.write(secret)
    assert "rejected the report" in call(place)
    assert "is shorter than" in error_of(say(place, wake_line(secret)))
    place.secret.unlink()
    assert "No such file" in call(place)
    assert "No such file" in error_of(say(place, wake_line("")))


def test_a_changed_secret_holds_at_once(place: Place, wakeups: WakeupListener) -> None:
    place.write("n" * 40)
    assert call(place) == ""


@pytest.mark.parametrize(
    "junk",
    [b"\n", b"{}\n", b"[" * 5000 + b"\n", b"\xff\xfe\n", b"x" * 100_000, b'{"v":1e999}\n'],
)
def test_junk_is_refused_and_the_next_is_heard(
    place: Place, wakeups: WakeupListener, junk: bytes
) -> None:
    try:
        answer = say(place, junk)
    except OSError:
        answer = b""
    assert not answer or error_of(answer)
    assert call(place) == ""
    assert heard(wakeups) == {"down n1"}


def test_peers_that_say_nothing_hold_up_nobody(place: Place, wakeups: WakeupListener) -> None:
    silent = []
    for _ in range(100):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(place.socket)
        silent.append(peer)
        peer.send(b"{")
    assert call(place) == ""
    for peer in silent:
        peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_is_not_heard(place: Place, wakeups: WakeupListener) -> None:
    program = (
        "import os,socket,sys\nos.setuid(65534)\ns=socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1])\ns.sendall(sys.argv[2].encode())\nprint(s.recv(9))\n"
    )
    words = [sys.executable, "-I", "-c", program, place.socket, wake_line().decode()]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert b"ok" not in done.stdout
    assert b"Permission denied" in done.stderr
    assert wakeups.take_fired() == set()


def test_nobody_listens(place: Place) -> None:
    assert "cannot reach the sensor" in call(place)


def test_somebody_listens_and_never_answers(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place.socket)
        listener.listen(1)
        began = time.monotonic()
        assert "cannot reach the sensor" in call(place)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("answer", [b"[]\n", b"null\n", b"[" * 4000 + b"\n", b'"ok"\n'])
def test_an_answer_that_is_no_object_is_none(place: Place, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place.socket)
        listener.listen(1)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(OSError, match="no reply"):
            trigger_helper.send_message(place.socket, b"{}\n")
        thread.join(30)


def test_a_socket_of_a_process_that_was_killed_is_taken_over(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(place.socket)
    wakeups = WakeupListener(place.socket, str(place.secret), "c1")
    wakeups.start()
    assert call(place) == ""
    wakeups.close()
    assert not os.path.exists(place.socket)


def test_an_alarm_ends_it_though_slurmctld_blocks_that(place: Place) -> None:
    """slurmctld's child processes inherit its signal mask and ignored signals."""
    program = (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "from steward.capture.sensor import trigger_helper\ntrigger_helper.RUN_LIMIT_S = 1\n"
        "trigger_helper.send_wakeup = lambda *words: signal.pause()\n"
        "trigger_helper.main(['--socket', 'a', '--secret',"
        " 'b', 'c1', 'down'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=100, check=False)
    assert done.returncode == -signal.SIGALRM


def test_a_secret_is_made_once_and_for_one_user(place: Place) -> None:
    place.secret.unlink()
    installed = install_trigger(str(place.helper), str(place.secret))
    assert str(place.secret) in installed.written_paths
    first = place.secret.read_bytes()
    assert len(first) > 40
    assert stat.S_IMODE(place.secret.stat().st_mode) == 0o600
    install_trigger(str(place.helper), str(place.secret))
    assert place.secret.read_bytes() == first
    with pytest.raises(PluginInstallError, match="unknown user"):
        install_trigger(str(place.helper), str(place.secret), user="no such user")
    with pytest.raises(PluginInstallError, match="absolute path of plain characters"):
        install_trigger("/usr/lib exec/x", str(place.secret))


def test_what_keeps_slurmctld_from_waking_is_said(place: Place) -> None:
    user = f"me({os.geteuid()})"

    def wrong() -> str:
        found = check_trigger(
            {"SlurmUser": user}, str(place.helper), str(place.secret), place.socket
        )
        return "; ".join(found)

    assert "does not exist: run steward plugins install --trigger" in wrong()
    install_trigger(str(place.helper), str(place.secret))
    assert wrong() == ""
    place.helper.write_text(place.helper.read_text() + "\n# changed\n")
    assert "is of another version of Steward" in wrong()
    place.helper.chmod(0o600)
    assert f"cannot run {place.helper}" in wrong()
    place.secret.chmod(0o644)
    assert "is accessible to other users" in wrong()
    user = "other(4000000)"
    place.secret.chmod(0o600)
    assert "does not belong to SlurmUser" in wrong()
