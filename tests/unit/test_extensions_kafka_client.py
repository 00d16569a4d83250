"""Kafka client: settings of librdkafka, and error messages without secrets."""

import logging
from pathlib import Path
from typing import Any

import pytest

from steward.core.section import TlsSettings
from steward.extensions.kafka.client import KafkaConnection, KafkaUnavailable
from steward.extensions.kafka.settings import KafkaSettings

PASSWORD = "correct horse"


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return str(path)


def reached(**settings: Any) -> KafkaConnection:
    return KafkaConnection(KafkaSettings(servers=("k1:9092", "k2:9092"), **settings), "archive.k")


def test_plain() -> None:
    config = reached().build_client_config({"acks": "all"})
    assert config["bootstrap.servers"] == "k1:9092,k2:9092"
    assert config["security.protocol"] == "PLAINTEXT"
    assert config["acks"] == "all"
    assert not any(key.startswith(("ssl.", "sasl.")) for key in config)


@pytest.mark.parametrize(
    ("ca_file", "sasl", "protocol"),
    [
        ("/ca", "", "SSL"),
        ("", "PLAIN", "SASL_PLAINTEXT"),
        ("/ca", "SCRAM-SHA-512", "SASL_SSL"),
    ],
)
def test_security(ca_file: str, sasl: Any, protocol: str, password_file: str) -> None:
    tls = TlsSettings(ca_file=ca_file) if ca_file else None
    if sasl:
        of = reached(
            tls=tls, user="u", password_file=password_file, options={"sasl.mechanism": sasl}
        )
    else:
        of = reached(tls=tls)
    config = of.build_client_config({})
    assert config["security.protocol"] == protocol
    assert config.get("ssl.ca.location", "") == ca_file
    assert config.get("sasl.password", PASSWORD) == PASSWORD
    assert config.get("sasl.mechanism", "") == sasl


def test_the_sites_options_are_the_last_word() -> None:
    config = reached(options={"session.timeout.ms": "7000"}).build_client_config(
        {"session.timeout.ms": 10_000}
    )
    assert config["session.timeout.ms"] == "7000"


def test_what_librdkafka_does_not_take_is_told_without_secrets(password_file: str) -> None:
    options = {"no.such": "x", "ssl.key.password": "open sesame"}
    of = reached(user="u", password_file=password_file, options=options)
    with pytest.raises(KafkaUnavailable, match=r"no\.such") as raised:
        of.create_client("Producer", {})
    assert PASSWORD not in str(raised.value)
    assert of.mask_secrets(f"a {PASSWORD}, an open sesame") == "a ***, an ***"


def test_its_log_is_ours_without_secrets(
    password_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    of = reached(user="u", password_file=password_file)
    logger: logging.Logger = of.config["logger"]
    logger.critical("%s [%s] failed with %s", "FAIL", "thread", PASSWORD)
    (record,) = caplog.records
    assert record.getMessage() == "FAIL [thread] failed with ***"
    assert record.levelname == "WARNING"


def test_an_outage_is_not_told_of_at_every_try(caplog: pytest.LogCaptureFixture) -> None:
    logger: logging.Logger = reached().config["logger"]
    for tried in range(50):
        logger.error("%s failed (after %dms)", "connect", tried)
    logger.error("another thing")
    assert [record.getMessage() for record in caplog.records] == [
        "connect failed (after 0ms)",
        "another thing",
    ]


def test_a_passwords_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KafkaUnavailable, match=r"cannot read .*none"):
        reached(user="u", password_file=str(tmp_path / "none"))


def test_errors_say_what_to_do(password_file: str) -> None:
    from confluent_kafka import KafkaError

    of = reached(user="steward", password_file=password_file, topic="jobs")
    told = of.describe_error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert "allow 'steward' to use topic jobs" in told
    told = of.describe_error(KafkaError(KafkaError._UNKNOWN_TOPIC))
    assert "--create --topic jobs --config max.message.bytes=16777216" in told
