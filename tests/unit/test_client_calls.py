"""Client calls over a real socket, and the choice of the target."""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.socket import LIMITS, Done, Question, Step, Told, registry, serving
from steward.cli.options import Archive, Config, Socket
from steward.cli.parameters import wrap_function
from steward.client import ClientError, DaemonAway, calls, places
from steward.client.calls import choose_transport
from steward.client.places import ClientPlace, run_locally
from steward.client.sockets import ask_socket
from steward.core.errors import NotFound, PermissionRefused, StewardError, UsageError
from steward.core.rpc import LONGEST_REQUEST, encode_request_line

REGISTRY = registry()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # Longer than a socket's address may be.
    directory = tmp_path_factory.mktemp("d" * 120)
    socket_path = str(directory / "s.sock")
    with serving(socket_path, LIMITS):
        yield socket_path


def test_an_answer_comes_back_as_its_type(path: str) -> None:
    (told,) = ask_socket(path, REGISTRY.get("test.echo"), Question(text="é\n"))
    assert isinstance(told, Told)
    assert (told.text, told.uid) == ("é\n", os.geteuid())


def test_a_stream_comes_back_item_by_item(path: str) -> None:
    *steps, done = ask_socket(path, REGISTRY.get("test.count"), Question(number=3))
    assert [step.number for step in steps if isinstance(step, Step)] == [0, 1, 2]
    assert done == Done(steps=3)


def test_an_error_is_raised_as_the_family_it_was(path: str) -> None:
    with pytest.raises(PermissionRefused, match="'x' is not yours"):
        list(ask_socket(path, REGISTRY.get("test.refuse"), Question(text="x")))


def test_only_the_daemon_of_the_named_state_directory_answers(tmp_path: Path) -> None:
    socket_path, echo = str(tmp_path / "s.sock"), REGISTRY.get("test.echo")
    with serving(socket_path, LIMITS, state_dir="/var/lib/steward"):
        assert list(ask_socket(socket_path, echo, Question(), state_dir="/var/lib/steward"))
        with pytest.raises(NotFound, match="does not have the state directory /tmp/copy"):
            list(ask_socket(socket_path, echo, Question(), state_dir="/tmp/copy"))


@pytest.mark.parametrize("place", ["/nowhere.sock", places.RemoteApi(url="https://nowhere")])
def test_a_request_that_is_too_large_is_refused_before_it_is_sent(
    path: str, place: str | places.RemoteApi
) -> None:
    echo, room = REGISTRY.get("test.echo"), LONGEST_REQUEST
    with pytest.raises(UsageError, match=rf"at most {room}\. Run the command as root"):
        calls.ask_daemon(place, echo, Question(text="x" * room))
    room -= len(encode_request_line("test.echo", Question(text="x"))) - 1
    (told,) = calls.ask_daemon(path, echo, Question(text="x" * room))
    assert len(told.text) == room


def test_an_error_within_a_stream_is_raised_after_its_items(path: str) -> None:
    items = ask_socket(path, REGISTRY.get("test.late"), Question())
    assert next(items) == Step(number=0)
    with pytest.raises(PermissionRefused, match="in the middle"):
        next(items)


def test_a_daemon_that_breaks_off_is_told_so(path: str) -> None:
    with pytest.raises(DaemonAway, match="see its log"):
        list(ask_socket(path, REGISTRY.get("test.crash"), Question()))


def test_the_same_action_runs_here_as_well() -> None:
    (told,) = run_locally(REGISTRY, REGISTRY.get("test.echo"), Question(text="here"))
    assert isinstance(told, Told)
    assert (told.text, told.pid, told.uid) == ("here", os.getpid(), os.geteuid())
    assert len(list(run_locally(REGISTRY, REGISTRY.get("test.count"), Question(number=2)))) == 3


def test_no_daemon_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DaemonAway) as caught:
        list(ask_socket(str(tmp_path / "none"), REGISTRY.get("test.echo"), Question()))
    message = str(caught.value)
    assert "no daemon answers" in message
    assert "steward serve" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "answer", [b"garbage\n", b"{}\n", b'{"ok":true,"answer":{"x":1}}\n', b'{"item":{}}\n', b"\xff"]
)
def test_an_answer_that_makes_no_sense_is_an_error_of_ours(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises((ClientError, DaemonAway)):
            list(ask_socket(path, REGISTRY.get("test.count"), Question()))
        thread.join()


def test_only_one_place_can_be_named() -> None:
    with pytest.raises(UsageError, match="--socket and --archive"):
        choose_transport(ClientPlace(socket="/a", archive="/b"))


def test_a_daemon_may_be_named_twice(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'run_dir = "/s"\nstate_dir = "{tmp_path}"\n[cluster.c]\nspool = "/spool"\n')
    choose_transport(ClientPlace(config=str(path), socket="/s/steward.sock"))
    with pytest.raises(UsageError, match="--config and --socket exclude each other"):
        choose_transport(ClientPlace(config=str(path), socket="/t"))


def test_a_controller_says_that_it_keeps_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'state_dir = "{tmp_path}"\n[cluster.c]\nspool = "/spool"\n[forward]\nto = "elsewhere:1"\n'
    )
    for name in ("archive.list", "archive.sinks"):
        asked = calls.get_action(name)
        with pytest.raises(UsageError, match="a controller has no archive"):
            calls.call_action(ClientPlace(config=str(path)), asked, asked.request())


def test_an_archive_without_settings_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is it an archive"):
        choose_transport(ClientPlace(archive=str(tmp_path)))


def test_a_configuration_that_is_wrong_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("clutser = 1\n")
    with pytest.raises(StewardError, match=r"c\.toml:1: unknown key 'clutser'"):
        choose_transport(ClientPlace(config=str(path)))


@pytest.fixture
def no_host_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory that all users can read; it holds all configuration of this host."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        monkeypatch.setattr(places, "DEFAULT_PATH", f"{directory}/steward.toml")
        monkeypatch.setattr(places, "CLIENT_PATH", f"{directory}/client.toml")
        yield Path(directory)


def test_the_hosts_client_file_names_the_socket(no_host_files: Path, path: str) -> None:
    (no_host_files / "client.toml").write_text(f'socket = "{path}"\n')
    asked = choose_transport(ClientPlace())
    (told,) = asked(REGISTRY.get("test.echo"), Question(text="by file"))
    assert isinstance(told, Told)
    assert told.text == "by file"


@pytest.mark.parametrize("text", ["socket = 3\n", "socket = \n", "\x00"])
def test_a_broken_client_file_is_named(no_host_files: Path, text: str) -> None:
    (no_host_files / "client.toml").write_text(text)
    with pytest.raises(UsageError, match=r"client\.toml"):
        choose_transport(ClientPlace())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_else_is_sent_to_the_configured_socket(no_host_files: Path) -> None:
    state = no_host_files / "state"
    state.mkdir(mode=0o700)
    (no_host_files / "steward.toml").write_text(
        f'state_dir = "{state}"\nrun_dir = "{no_host_files}/none"\n[cluster.c]\nspool = "/s"\n'
    )
    os.seteuid(54321)
    try:
        with pytest.raises(DaemonAway, match=f"{no_host_files}/none"):
            list(choose_transport(ClientPlace())(REGISTRY.get("test.echo"), Question()))
    finally:
        os.seteuid(0)


PLACES = {"config": "STEWARD_CONFIG", "socket": "STEWARD_SOCKET", "archive": "STEWARD_ARCHIVE"}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClientPlace]:
    """Return the socket and configuration of a command, from options and environment."""

    def named(*words: str, **exported: str) -> ClientPlace:
        told: list[ClientPlace] = []

        def ask(config: Config = "", socket: Socket = "", archive: Archive = "") -> None:
            told.append(ClientPlace(config=config, socket=socket, archive=archive))

        for place, variable in PLACES.items():
            monkeypatch.delenv(variable, raising=False)
            if place in exported:
                monkeypatch.setenv(variable, exported[place])
        wrap_function(ask).main(args=list(words), standalone_mode=False)
        return told[0]

    return named


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("exported", PLACES)
def test_a_place_on_the_command_line_wins_over_exported_ones(
    named: Callable[..., ClientPlace], place: str, exported: str
) -> None:
    assert named(f"--{place}", "/asked", **{exported: "/exported"}) == ClientPlace(
        **{place: "/asked"}
    )
    assert named(**{exported: "/exported"}) == ClientPlace(**{exported: "/exported"})


def test_two_places_of_the_same_rank_still_contradict_each_other(
    named: Callable[..., ClientPlace],
) -> None:
    for place in (
        named("--config", "/a", "--archive", "/b", socket="/c"),
        named(config="/a", archive="/b"),
    ):
        with pytest.raises(UsageError, match="--config and --archive"):
            choose_transport(place)
