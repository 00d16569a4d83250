"""MUNGE authenticates nobody over IPv6, because its credentials name only IPv4 addresses."""

from collections.abc import Callable
from typing import Any

import pytest

from steward.admin.credentials.munge_authentication import verify_munge_request
from steward.admin.credentials.requests import TicketRequest
from steward.capture.nodes.senders import BatchHeader, SenderAuthenticator
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.errors import PermissionRefused, Unavailable
from steward.core.munge import hash_body
from steward.core.section import TlsSettings
from steward.extensions.controllers.admission import ControllerPeers, TlsAuthenticator
from steward.extensions.controllers.settings import ReceiveSettings
from steward.slurm.settings import ClusterSettings
from steward.web.settings import WebSettings

NOBODY: frozenset[str] = frozenset()


def settings(**more: Any) -> Settings:
    cluster = ClusterSettings(
        remote=True, controllers=("localhost",), munge_socket="/nowhere/munge"
    )
    return Settings(cluster={"box": cluster}, **more)


def node(address: str, **more: Any) -> object:
    head = BatchHeader(v=1, node="localhost", sequence=1, place="p", boot="b")
    behind = settings(nodes=NodesSettings(behind_nat=("0.0.0.0/0", "::/0"), **more))
    return SenderAuthenticator(behind).authenticate(head, b"MUNGE:AwQDAAA:", NOBODY, address)


def controller(address: str, **more: Any) -> object:
    return ControllerPeers(settings(receive=ReceiveSettings(**more))).get_authenticator(
        "box", NOBODY, address
    )


def program(address: str) -> object:
    shown = TicketRequest(
        credential="MUNGE:AwQDAAA:",
        method="GET",
        target="/api/v1/me",
        digest=hash_body(b""),
        peer=address,
    )
    return verify_munge_request(
        WebSettings(munge_socket="/nowhere/munge", trusted_proxies=()), shown
    )


@pytest.mark.parametrize("ask", [node, controller, program])
@pytest.mark.parametrize("address", ["::1", "2001:db8::7", "fe80::1%eth0"])
def test_munge_is_not_believed_over_ipv6(ask: Callable[[str], object], address: str) -> None:
    with pytest.raises(PermissionRefused, match=r"IPv4 addresses only"):
        ask(address)


@pytest.mark.parametrize("ask", [node, program])
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_munge_is_asked_over_ipv4(ask: Callable[[str], object], address: str) -> None:
    with pytest.raises(Unavailable):
        ask(address)


def test_a_certificate_is_enough_over_ipv6() -> None:
    names = frozenset({"localhost"})
    tls = TlsSettings(client_ca_file="/ca")
    by_certificate = settings(nodes=NodesSettings(tls=tls), receive=ReceiveSettings(tls=tls))
    head = BatchHeader(v=1, node="localhost", sequence=1, place="p", boot="b")
    assert (
        SenderAuthenticator(by_certificate).authenticate(head, b"", names, "2001:db8::7").cluster
        == "box"
    )
    witness = ControllerPeers(by_certificate).get_authenticator("box", names, "2001:db8::7")
    assert isinstance(witness, TlsAuthenticator)
