"""Kafka with TLS and passwords or client certificates: sink, consumer, and error messages."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kafka_jobs import Topic, document, ended

from servers.kafka import Kafka
from steward.core.section import TlsSettings
from steward.extensions.kafka.client import KafkaUnavailable

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("kafka"), secured=True) as broker:
        yield broker


@pytest.fixture
def password_file(secured: Kafka, tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{secured.password}\n")
    return path


def sasl(secured: Kafka, mechanism: str, password_file: Path) -> dict[str, Any]:
    return {
        "servers": (secured.secured,),
        "tls": TlsSettings(ca_file=secured.authority.file),
        "options": {"sasl.mechanism": mechanism},
        "user": secured.user,
        "password_file": str(password_file),
    }


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_both_ends_with_a_password(
    secured: Kafka, mechanism: str, password_file: Path, tmp_path: Path
) -> None:
    topic = Topic(secured)
    to = topic.destination(broker=sasl(secured, mechanism, password_file), timeout_s=10.0)
    assert to.send([document(1, b"one", identity=ended(1))]) == []
    to.close()
    archive = str(tmp_path / "archive")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "steward", "archive", "consume", "--from", "kafka", "--once"),
            *("--server", secured.secured, "--topic", topic.name, "--archive", archive),
            *("--tls", "--ca-file", secured.authority.file, "--sasl", mechanism),
            *("--sasl-user", secured.user, "--password-file", str(password_file)),
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "steward", "archive", "show", "1", "--archive", archive, "--json"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(listed.stdout)["content"]["text"] == "one"


def test_a_password_that_is_mended_is_taken_up(
    secured: Kafka, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Topic(secured)
    password_file.write_text("wrong and never told")
    to = topic.destination(broker=sasl(secured, "SCRAM-SHA-512", password_file), timeout_s=10.0)
    with pytest.raises(KafkaUnavailable, match="check 'user' and 'password_file'") as raised:
        to.send([document(1, b"one")])
    assert "never told" not in str(raised.value) + caplog.text
    password_file.write_text(secured.password)
    assert to.send([document(1, b"one")]) == []
    to.close()


def test_a_certificate_is_shown_and_the_brokers_looked_at(secured: Kafka) -> None:
    topic = Topic(secured)
    certificate, key = secured.authority.certificate("DNS:client")
    broker = {"servers": (secured.mutual,)}
    own = TlsSettings(certificate_file=certificate, key_file=key)
    trusting = msgspec.structs.replace(own, ca_file=secured.authority.file)
    to = topic.destination(broker=broker | {"tls": trusting}, timeout_s=10.0)
    assert to.send([document(1, b"one")]) == []
    to.close()
    # Signed by an authority that the system does not know.
    to = topic.destination(broker=broker | {"tls": own}, timeout_s=10.0)
    with pytest.raises(KafkaUnavailable, match="check 'tls', 'ca_file'"):
        to.send([document(2, b"two")])
    to.close()


def test_a_listener_that_wants_tls_is_named_where_we_use_none(secured: Kafka) -> None:
    topic = Topic(secured)
    to = topic.destination(broker={"servers": (secured.secured,)}, timeout_s=3.0)
    with pytest.raises(KafkaUnavailable, match=secured.secured):
        to.send([document(1, b"one")])
    to.close()
