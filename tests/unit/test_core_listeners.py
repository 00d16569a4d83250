"""Addresses of listeners in a configuration, and the sockets that listen there."""

import socket

import pytest

from steward.core.listeners import ListenUnavailable, open_tcp_listener, split_host_port


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("steward.example.org:6825", ("steward.example.org", 6825)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[::]:6825", ("::", 6825)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("::1:6825", None),
        ("host", None),
        ("host:", None),
        ("host:65536", None),
        (":6825", None),
        ("a b:1", None),
        ("host:1\n", None),
        ("https://host:1", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, found: tuple[str, int] | None) -> None:
    assert split_host_port(text) == found


def test_a_listener_takes_who_comes_and_does_not_wait() -> None:
    with open_tcp_listener("127.0.0.1:0", 1) as listener:
        assert listener.getblocking() is False
        with socket.create_connection(listener.getsockname()[:2], 10) as client:
            assert client.getpeername() == listener.getsockname()


def test_an_address_that_is_taken_is_named() -> None:
    with open_tcp_listener("127.0.0.1:0", 1) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ListenUnavailable, match=where):
            open_tcp_listener(where, 1)
