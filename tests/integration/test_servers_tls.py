"""TLS and authentication of test servers: unauthenticated clients get nothing."""

import http.client
import json
import ssl
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.authority import Authority
from servers.kafka import Kafka
from servers.search import SearchServer
from servers.tls_proxy import TlsProxy

KEY = "a2V5OnNlY3JldA=="


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("kafka"), secured=True) as broker:
        broker.create_topic("t")
        yield broker


def asked(
    proxy: TlsProxy, ca_file: str, authorization: str = "", own: tuple[str, str] | None = None
) -> int:
    """Return the status of a request for the root."""
    context = ssl.create_default_context(cafile=ca_file)
    if own:
        context.load_cert_chain(*own)
    where = proxy.url.removeprefix("https://")
    connection = http.client.HTTPSConnection(where, context=context, timeout=20)
    try:
        connection.request("GET", "/", headers={"Authorization": authorization})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert ("version" in answer) == (response.status == 200)
        return response.status
    finally:
        connection.close()


def test_the_proxy_asks_for_password_or_key(
    search_server: SearchServer, authority: Authority
) -> None:
    with TlsProxy(search_server, authority, basic=("steward", "right"), api_key=KEY) as proxy:
        ca_file = authority.file
        right, wrong = (b64encode(f"steward:{of}".encode()).decode() for of in ("right", "wrong"))
        assert asked(proxy, ca_file) == 401
        assert asked(proxy, ca_file, f"Basic {wrong}") == 401
        assert asked(proxy, ca_file, f"ApiKey {wrong}") == 401
        assert asked(proxy, ca_file, f"Basic {right}") == 200
        assert asked(proxy, ca_file, f"ApiKey {KEY}") == 200
        assert proxy.answered == [401, 401, 401, 200, 200]


def test_the_proxy_asks_for_a_certificate_of_its_authority(
    search_server: SearchServer, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    with TlsProxy(search_server, authority, client_certificate=True) as proxy:
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(proxy, stranger.file)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asked(proxy, authority.file)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asked(proxy, authority.file, own=stranger.certificate("DNS:client"))
        assert proxy.answered == []
        assert asked(proxy, authority.file, own=authority.certificate("DNS:client")) == 200


def sent(kafka: Kafka, bootstrap: str, **settings: str) -> str:
    """Send a message; return the first error if it fails."""
    from confluent_kafka import KafkaError, Producer

    failures: list[str] = []
    arrived: list[bool] = []

    def failed(error: KafkaError) -> None:
        failures.append(str(error.name()))

    options = {key.replace("_", "."): value for key, value in settings.items()}
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "ssl.ca.location": kafka.authority.file,
            "message.timeout.ms": 20_000,
            "error_cb": failed,
            **options,
        }
    )
    producer.produce("t", b"x", on_delivery=lambda error, _: arrived.append(error is None))
    while not arrived and not failures:
        producer.poll(0.1)
    producer.purge()
    producer.flush(10)
    return "" if arrived and arrived[0] else failures[0]


@pytest.mark.servers
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_kafka_asks_for_a_password(secured: Kafka, mechanism: str) -> None:
    settings = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": mechanism,
        "sasl_username": secured.user,
    }
    assert sent(secured, secured.secured, **settings, sasl_password="wrong") == "_AUTHENTICATION"
    assert sent(secured, secured.secured, **settings, sasl_password=secured.password) == ""


@pytest.mark.servers
def test_kafka_asks_for_a_certificate(secured: Kafka) -> None:
    assert sent(secured, secured.mutual, security_protocol="SSL") != ""
    certificate, key = secured.authority.certificate("DNS:client")
    assert (
        sent(
            secured,
            secured.mutual,
            security_protocol="SSL",
            ssl_certificate_location=certificate,
            ssl_key_location=key,
        )
        == ""
    )
