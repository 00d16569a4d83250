"""TLS contexts: one policy for every server and client, and errors that name the file."""

import re
import ssl
from pathlib import Path

import pytest

from servers.authority import Authority
from steward.core.section import TlsSettings
from steward.core.tls import TlsUnavailable, make_client_context, make_server_context

SOURCE = Path(__file__).parents[2] / "src" / "steward"
OWN_CONTEXTS = {
    "core/tls.py",
    "agent/agent.py",  # one file without imports of Steward
    "admin/doctor/host_checks.py",  # verifies nothing: looks whether this host answers
    "extensions/search_servers/client.py",  # trusts nobody where no URL is https
}


def test_other_modules_make_no_tls_contexts() -> None:
    pattern = re.compile(r"SSLContext\(|create_default_context\(|ssl_(certfile|keyfile|ca_certs)=")
    assert {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if pattern.search(path.read_text())
    } == OWN_CONTEXTS


def test_servers_and_clients_have_the_same_versions_and_ciphers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate_file, key_file = authority.certificate("DNS:x")
    tls = TlsSettings(certificate_file=certificate_file, key_file=key_file, ca_file=authority.file)
    server, client = make_server_context(tls), make_client_context(tls)
    assert server.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_2
    names = [cipher["name"] for cipher in server.get_ciphers()]
    assert names == [cipher["name"] for cipher in client.get_ciphers()]
    assert not [name for name in names if name.startswith(("AES", "DES", "RC4"))], "no PFS"


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "certificate.pem"
    if text is not None:
        path.write_text(text)
    for make in (make_server_context, make_client_context):
        tls = TlsSettings(certificate_file=str(path), key_file=str(path))
        with pytest.raises(
            TlsUnavailable, match=rf"^cannot load the certificate {path} .*give PEM files"
        ):
            make(tls)
