"""Search servers behind TLS: passwords, API keys and certificates in the settings of a sink."""

import base64
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_sinks import document, sink_on

from servers.authority import Authority
from servers.search import SearchServer
from servers.tls_proxy import TlsProxy
from steward.archive.errors import ArchiveUnavailable
from steward.core.section import TlsSettings
from steward.extensions.search_servers.destination import SearchDestination

KEY = base64.b64encode(b"id:key").decode()
Send = Callable[..., None]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def send(search_server: SearchServer, authority: Authority) -> Send:
    """Send a document through a proxy, with a sink of these settings."""

    def call(proxy: TlsProxy, *, certificate: tuple[str, str] = ("", ""), **changes: Any) -> None:
        ca_file = changes.pop("ca_file", authority.file)
        tls = TlsSettings(ca_file=ca_file, certificate_file=certificate[0], key_file=certificate[1])
        given = {"urls": (proxy.url,), "tls": tls, **changes}
        destination = SearchDestination(sink_on(search_server, **given))
        try:
            assert destination.send([document(1)]) == []
        finally:
            destination.close()

    return call


def secret(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_password_is_read_again_when_it_was_changed(
    search_server: SearchServer, authority: Authority, tmp_path: Path
) -> None:
    path = secret(tmp_path, "old\n")
    with TlsProxy(search_server, authority, basic=("steward", "new")) as proxy:
        sink = sink_on(search_server, urls=(proxy.url,), tls=TlsSettings(ca_file=authority.file))
        sink = msgspec.structs.replace(sink, user="steward", password_file=path)
        destination = SearchDestination(sink)
        with pytest.raises(ArchiveUnavailable, match=rf"401.*check the credentials in {path}"):
            destination.send([document(1)])
        secret(tmp_path, "new\n")
        assert destination.send([document(1)]) == []
        destination.close()


@pytest.mark.parametrize("text", ["id:key", KEY, f"{KEY}\n"])
def test_an_api_key_is_taken_in_both_forms(
    search_server: SearchServer, authority: Authority, tmp_path: Path, send: Send, text: str
) -> None:
    with TlsProxy(search_server, authority, api_key=KEY) as proxy:
        send(proxy, password_file=secret(tmp_path, text))
        with pytest.raises(ArchiveUnavailable, match=r"401.*set 'password_file' and 'user'"):
            send(proxy)


def test_a_certificate_of_ours_lets_us_in(
    search_server: SearchServer, authority: Authority, tmp_path: Path, send: Send
) -> None:
    certificate, key = authority.certificate("DNS:client")
    stranger, its_key = Authority(tmp_path / "other").certificate("DNS:client")
    with TlsProxy(search_server, authority, client_certificate=True) as proxy:
        send(proxy, certificate=(certificate, key))
        with pytest.raises(ArchiveUnavailable, match="cannot reach"):
            send(proxy, certificate=(stranger, its_key))
        with pytest.raises(ArchiveUnavailable, match="cannot reach"):
            send(proxy)
        with pytest.raises(ArchiveUnavailable, match="cannot load the certificate"):
            send(proxy, certificate=(certificate, its_key))


def test_a_server_that_nobody_vouches_for_is_told_nothing(
    search_server: SearchServer, authority: Authority, tmp_path: Path, send: Send
) -> None:
    stranger = Authority(tmp_path)
    with TlsProxy(search_server, authority) as proxy:
        for ca_file in (stranger.file, ""):
            with pytest.raises(ArchiveUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*set ca_file"):
                send(proxy, ca_file=ca_file)
        elsewhere = proxy.url.replace("127.0.0.1", "127.0.0.2")
        assert proxy.answered == []
        with pytest.raises(ArchiveUnavailable, match="cannot reach"):
            send(proxy, urls=(elsewhere,))
        with pytest.raises(ArchiveUnavailable, match="does not speak TLS"):
            send(proxy, urls=(search_server.url.replace("http:", "https:"),))


def test_a_secret_that_all_may_read_is_warned_about(
    search_server: SearchServer,
    authority: Authority,
    tmp_path: Path,
    send: Send,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TlsProxy(search_server, authority, basic=("steward", "pw")) as proxy:
        for mode, is_told in ((0o640, False), (0o644, True)):
            caplog.clear()
            path = secret(tmp_path, "pw", mode)
            send(proxy, user="steward", password_file=path)
            warned = [of.getMessage() for of in caplog.records if of.levelno == logging.WARNING]
            assert any(path in text for text in warned) == is_told
        os.unlink(path)
        with pytest.raises(ArchiveUnavailable, match=r"cannot read .*: No such file"):
            send(proxy, user="steward", password_file=path)
