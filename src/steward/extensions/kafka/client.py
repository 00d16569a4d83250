"""Kafka client setup: converts [broker] settings to librdkafka's, and routes its log to Steward's.

:class:`KafkaConnection` makes producers and consumers (``destination`` and ``source`` use it),
masks secrets, limits repeated log messages and adds remedies to errors. :func:`check_settings`
validates the options of every configured broker. Option names are those of librdkafka's
CONFIGURATION.md. Passwords are read from their files when a client is made, so a changed one
applies to the next client.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from steward.core.config import Settings
from steward.core.config.problems import ConfigProblem, KeyPath
from steward.core.drivers import KAFKA
from steward.core.errors import Unavailable
from steward.core.section import TlsSettings
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings

log = logging.getLogger("steward.kafka")

_MAX_SECRET_BYTES: Final = 65_536
"""Most bytes read of a password file."""
_MASK: Final = "***"
BROKER_TIMEOUT_S: Final = 30.0
"""Longest time to wait for a broker's answer, in seconds: a restart of a broker takes less."""
_REPEAT_LOG_AFTER_S: Final = 300.0
"""Interval at which an equal message is logged again, in seconds."""
_MAX_REMEMBERED_MESSAGES: Final = 200
"""Most messages remembered to detect repeats."""
_NUMBER: Final = re.compile(r"\d+")
_SECRET_WORDS: Final = ("password", "secret", "pem", "token", "jaas")
"""Parts of option names whose values are secret."""
_PLUGIN_OPTION: Final = "plugin.library.paths"
"""Option that would load libraries."""
_COMBINATION_ERROR_PREFIX: Final = "Failed to create"
"""Start of librdkafka's error where single settings are right, but not their combination."""
_REMEDIES: Final = {
    "_AUTHENTICATION": "check 'user' and 'password_file'",
    "SASL_AUTHENTICATION_FAILED": "check 'user' and 'password_file'",
    "_SSL": "check 'tls', 'ca_file' and the name in the broker's certificate",
    "_RESOLVE": "check 'servers'",
    "_MSG_TIMED_OUT": "check that enough brokers are up and in sync",
    "TOPIC_AUTHORIZATION_FAILED": "have its administrator allow {user} to use topic {topic}",
    "GROUP_AUTHORIZATION_FAILED": "have its administrator allow {user} to use the group",
    "CLUSTER_AUTHORIZATION_FAILED": "have its administrator allow {user} IdempotentWrite",
    "UNKNOWN_TOPIC_OR_PART": "{make_topic}",
    "_UNKNOWN_TOPIC": "{make_topic}",
    "_UNKNOWN_PARTITION": "{make_topic}",
}
"""Remedies by the name of a KafkaError."""


class KafkaUnavailable(Unavailable):
    """Kafka cluster that is temporarily unreachable or unusable."""


class KafkaConnection:
    """Access to one Kafka cluster, shared by its clients: settings, log, and error texts.

    Args:
        settings: The broker settings.
        name: Name of the user of the cluster, for the log: ``archive.NAME``, ``consume.NAME``.
        timeout_s: Longest time to wait for a broker's answer, in seconds.

    Raises:
        KafkaUnavailable: A file cannot be read now, or the package confluent-kafka is missing.
    """

    def __init__(
        self, settings: KafkaSettings, name: str, timeout_s: float = BROKER_TIMEOUT_S
    ) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise KafkaUnavailable(KAFKA.missing_error, KAFKA.part) from error
        self.lib: Any = confluent_kafka
        self.settings = settings
        self._name = name
        self._secrets = [
            value
            for option, value in settings.options.items()
            if value and any(word in option for word in _SECRET_WORDS)
        ]
        self._last_error = ""
        self._logged_at: dict[str, float] = {}
        self.config = self._build_shared_config(timeout_s)

    def _build_shared_config(self, timeout_s: float) -> dict[str, Any]:
        """Build the settings that all clients of the cluster share."""
        settings = self.settings
        security = ("SASL_" if settings.user else "") + ("SSL" if settings.tls else "PLAINTEXT")
        config: dict[str, Any] = {
            "bootstrap.servers": ",".join(settings.servers),
            "client.id": f"steward-{self._name}",
            "security.protocol": security,
            "socket.timeout.ms": int(timeout_s * 1000),
            # Brokers close idle connections, which needs no log message.
            "log.connection.close": False,
            "reconnect.backoff.max.ms": 2000,
            "error_cb": self._on_error,
            "logger": self._build_logger(),
        }
        if settings.user:
            config["sasl.mechanism"] = "SCRAM-SHA-512"
            config["sasl.username"] = settings.user
            config["sasl.password"] = self._read_secret(settings.password_file)
        tls = settings.tls or TlsSettings()
        files = {
            "ssl.ca.location": tls.ca_file,
            "ssl.certificate.location": tls.certificate_file,
            "ssl.key.location": tls.key_file,
        }
        return config | {option: path for option, path in files.items() if path}

    def build_client_config(self, client_options: dict[str, Any]) -> dict[str, Any]:
        """Return a client's settings: common ones, those of its role, and the site's options."""
        return {**self.config, **client_options, **self.settings.options}

    def create_client(self, client_type: str, client_options: dict[str, Any]) -> Any:
        """Create a client (``Producer`` or ``Consumer``).

        Raises:
            KafkaUnavailable: librdkafka rejects the settings, or a file they name.
        """
        try:
            return getattr(self.lib, client_type)(self.build_client_config(client_options))
        except self.lib.KafkaException as error:
            raise KafkaUnavailable(
                f"cannot create a Kafka client: {self.mask_secrets(error.args[0].str())}"
            ) from error

    def _read_secret(self, path: str) -> str:
        """Read a password file, and remember the password for masking."""
        try:
            with open(path, "rb") as file:
                secret = file.read(_MAX_SECRET_BYTES).decode().strip("\r\n")
        except OSError as error:
            raise KafkaUnavailable(f"cannot read {path}: {error.strerror}", path) from error
        except UnicodeDecodeError as error:
            raise KafkaUnavailable(f"{path} is not UTF-8 text", path) from error
        self._secrets.append(secret)
        return secret

    def mask_secrets(self, text: str) -> str:
        """Mask the secrets in a text of librdkafka."""
        for secret in self._secrets:
            if secret:
                text = text.replace(secret, _MASK)
        return text

    def _on_error(self, error: Any) -> None:
        # Called from within poll and flush. The client recovers alone; a request fails by its own
        # time-out, whose error says too little, so this one is kept.
        if error.code() != self.lib.KafkaError._ALL_BROKERS_DOWN or not self._last_error:
            self._last_error = self.describe_error(error)

    def take_last_error(self) -> str:
        """Return and clear the last error; "" if there was none."""
        error, self._last_error = self._last_error, ""
        return error

    def describe_error(self, error: Any) -> str:
        """Describe a KafkaError, with a remedy where one is known."""
        settings = self.settings
        text = self.mask_secrets(error.str())
        name = error.name()
        if name not in _REMEDIES and "SSL" in text:
            # librdkafka sometimes reports a failed TLS handshake as a lost connection.
            name = "_SSL"
        remedy = _REMEDIES.get(name, "").format(
            user=repr(settings.user) if settings.user else "us",
            topic=settings.topic,
            make_topic=create_topic_hint(settings),
        )
        return f"{text}; {remedy}" if remedy else text

    def describe_topic(self) -> str:
        """Return the topic and the brokers as text for messages."""
        return f"topic {self.settings.topic} at {', '.join(self.settings.servers)}"

    def _build_logger(self) -> logging.Logger:
        logger = log.getChild(self._name)
        logger.filters = [self._filter_record]
        return logger

    def _filter_record(self, record: logging.LogRecord) -> bool:
        """Mask secrets in a log record and limit its level; return False to drop a repeated one."""
        record.msg, record.args = self.mask_secrets(record.getMessage()), ()
        # librdkafka logs an outage at every reconnect, for hours; those messages differ in numbers
        # only.
        message = _NUMBER.sub("", record.msg)
        if record.created - self._logged_at.get(message, 0.0) < _REPEAT_LOG_AFTER_S:
            return False
        if len(self._logged_at) >= _MAX_REMEMBERED_MESSAGES:
            self._logged_at.clear()
        self._logged_at[message] = record.created
        # librdkafka restores lost connections; the waiting caller reports errors that last.
        record.levelno = min(record.levelno, logging.WARNING)
        record.levelname = logging.getLevelName(record.levelno)
        return True


def explain_invalid_option(client_type: str, option: str, value: str) -> str:
    """Return why librdkafka rejects one of a site's options; "" if it accepts the option.

    Problems that depend on other settings are ignored, and so is every option while the package
    confluent-kafka is missing.

    Args:
        client_type: Kind of client: ``Producer`` or ``Consumer``.
        option: The option, as CONFIGURATION.md of librdkafka names it.
        value: Its value.
    """
    try:
        import confluent_kafka as lib
    except ImportError:
        return ""
    if option == _PLUGIN_OPTION:
        return ""  # checking would load the plugins
    # The configuration names no broker, so no connection is made.
    config = {"log_level": "0", option: value}
    try:
        getattr(lib, client_type)(
            config | ({"group.id": "steward"} if client_type == "Consumer" else {})
        )
    except lib.KafkaException as error:
        text = str(error.args[0].str()).strip()
        return "" if text.startswith(_COMBINATION_ERROR_PREFIX) else text
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def create_topic_hint(settings: KafkaSettings) -> str:
    """Return the command that creates the topic, with a size limit that fits every script."""
    return (
        f"create it: kafka-topics.sh --bootstrap-server {settings.servers[0]} --create "
        f"--topic {settings.topic} --config max.message.bytes=16777216"
    )


def check_settings(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield a problem for each broker option that librdkafka rejects."""
    for name, sink in settings.archive.sink.items():
        if isinstance(sink, KafkaSinkSettings):
            yield from _check_broker_options(
                ("archive", "sink", name, "broker"), sink.broker, "Producer"
            )
    for name, source in settings.consume.items():
        yield from _check_broker_options(("consume", name, "broker"), source.broker, "Consumer")


def _check_broker_options(
    key: KeyPath, broker: KafkaSettings, client_type: str
) -> Iterator[ConfigProblem]:
    """Yield a problem for each option that librdkafka rejects."""
    for option, value in broker.options.items():
        reason = explain_invalid_option(client_type, option, value)
        if reason:
            yield ConfigProblem(
                (*key, "options", option), f"librdkafka rejects {option!r}: {reason}"
            )
