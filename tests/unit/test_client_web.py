"""Tokens of the client: their sources, and the servers that receive them."""

import os
from pathlib import Path

import pytest

from steward.client import Client, places
from steward.client.calls import find_place
from steward.client.places import ClientPlace, RemoteApi
from steward.client.web import ask_https, find_token
from steward.core.errors import UsageError
from steward.daemon.registry import get_action

URL = "https://steward.example.org"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STEWARD_URL", "STEWARD_TOKEN", "STEWARD_MUNGE_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(places, "CLIENT_PATH", str(tmp_path / "client.toml"))
    monkeypatch.setattr(places, "DEFAULT_PATH", str(tmp_path / "steward.toml"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / ".config" / "steward" / "token"
    path.parent.mkdir(parents=True)
    path.write_text("stt_kept\n")
    path.chmod(0o600)
    return path


def test_a_token_is_what_was_given_or_said_or_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_token(RemoteApi(url=URL)) == "stt_kept"
    monkeypatch.setenv("STEWARD_TOKEN", "stt_said")
    assert find_token(RemoteApi(url=URL)) == "stt_said"
    assert find_token(RemoteApi(url=URL, token="stt_given")) == "stt_given"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o620])
def test_a_token_that_others_can_read_is_not_used(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        find_token(RemoteApi(url=URL))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_token_of_somebody_elses_is_not_used(kept: Path) -> None:
    os.chown(kept, 12345, 12345)
    with pytest.raises(UsageError, match="must belong to you, with mode 0600"):
        find_token(RemoteApi(url=URL))


@pytest.mark.parametrize("text", ["", "two words", "stt_\x00", "stt_é", "x" * 600])
def test_what_is_no_token_is_not_sent(kept: Path, text: str) -> None:
    kept.write_text(text)
    with pytest.raises(UsageError, match="contains no valid token"):
        find_token(RemoteApi(url=URL))


def test_what_is_no_file_is_not_waited_for(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept, 0o600)
    with pytest.raises(UsageError, match="is not a regular file"):
        find_token(RemoteApi(url=URL))


def test_without_token_and_munge_it_is_said_how_to_get_one(tmp_path: Path) -> None:
    me, there = (
        get_action("credentials.me"),
        RemoteApi(url=URL, munge_socket=str(tmp_path / "none")),
    )
    assert find_token(there) == ""
    with pytest.raises(UsageError, match=r"MUNGE failed here.*steward token create"):
        next(ask_https(there, me, me.request()))


@pytest.mark.parametrize(
    "url",
    [
        "http://steward.example.org",
        "http://127.0.0.1.example.org",
        "http://localhost@example.org",
        "ftp://localhost",
        "https://",
        "https://host:port",
        "https://host?x=1",
        "steward.example.org",
    ],
)
def test_a_token_is_sent_over_https_alone(url: str) -> None:
    me = get_action("credentials.me")
    with pytest.raises(UsageError, match=r"use https|invalid URL"):
        next(ask_https(RemoteApi(url=url, token="stt_x"), me, me.request()))


def test_who_is_asked_is_what_was_named_or_said_or_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "client.toml"
    file.write_text(f'url = "{URL}/one"\nca_file = "/ca"\n')
    assert find_place(ClientPlace()) == RemoteApi(url=f"{URL}/one", ca_file="/ca")
    monkeypatch.setenv("STEWARD_URL", f"{URL}/two")
    assert find_place(ClientPlace()) == RemoteApi(url=f"{URL}/two", ca_file="/ca")
    assert find_place(ClientPlace(socket="/s")) == "/s"
    file.write_text('munge_socket = "/run/munge"\n')
    assert find_place(ClientPlace()) == RemoteApi(url=f"{URL}/two", munge_socket="/run/munge")
    monkeypatch.setenv("STEWARD_MUNGE_SOCKET", "/run/other")
    assert find_place(ClientPlace()) == RemoteApi(url=f"{URL}/two", munge_socket="/run/other")
    file.write_text(f'url = "{URL}"\nsocket = "/s"\n')
    monkeypatch.delenv("STEWARD_URL")
    with pytest.raises(UsageError, match="remove one of them"):
        find_place(ClientPlace())
    file.write_text(f'ulr = "{URL}"\n')
    with pytest.raises(UsageError, match="ulr"):
        find_place(ClientPlace())


def test_a_client_is_of_one_place() -> None:
    with pytest.raises(UsageError, match="one of them"):
        Client(url=URL, socket="/s")
    with pytest.raises(UsageError, match="need a url"):
        Client(token="stt_x")


def test_what_is_asked_has_to_be_there() -> None:
    client = Client(socket="/nowhere")
    with pytest.raises(UsageError, match=r"unknown action 'bank\.rob'"):
        client.ask("bank.rob")
    with pytest.raises(UsageError, match="unknown field"):
        client.ask("bank.balance", acounts=["x"])
