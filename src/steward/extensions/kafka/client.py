"""How a Kafka cluster is reached: from our settings to librdkafka's, and its log to ours.

The names are those of librdkafka's CONFIGURATION.md. Passwords are read from
their files when a client is made, so that a changed one is taken up by the next.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from steward.core.config import Settings
from steward.core.config.problems import KeyPath, Problem
from steward.core.drivers import KAFKA
from steward.core.errors import Unavailable
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings

log = logging.getLogger("steward.kafka")

_LARGEST_SECRET: Final = 65_536
_HIDDEN: Final = "***"
_SAME_AGAIN_S: Final = 300.0
_MOST_REMEMBERED: Final = 200
_NUMBER: Final = re.compile(r"\d+")
_SECRET_WORDS: Final = ("password", "secret", "pem", "token", "jaas")
_PLUGINS: Final = "plugin.library.paths"
_TOGETHER: Final = "Failed to create"
"""How librdkafka begins where single settings are right, but not so together."""
_REMEDIES: Final = {
    "_AUTHENTICATION": "check 'user' and 'password_file'",
    "SASL_AUTHENTICATION_FAILED": "check 'user' and 'password_file'",
    "_SSL": "check 'tls', 'ca_file' and the name in the broker's certificate",
    "_RESOLVE": "check 'servers'",
    "_MSG_TIMED_OUT": "the brokers are away, too slow, or too few of them are in step",
    "TOPIC_AUTHORIZATION_FAILED": "have its administrator allow {user} to use topic {topic}",
    "GROUP_AUTHORIZATION_FAILED": "have its administrator allow {user} to use the group",
    "CLUSTER_AUTHORIZATION_FAILED": "have its administrator allow {user} IdempotentWrite",
    "UNKNOWN_TOPIC_OR_PART": "{make_topic}",
    "_UNKNOWN_TOPIC": "{make_topic}",
    "_UNKNOWN_PARTITION": "{make_topic}",
}


class KafkaUnavailable(Unavailable):
    """A Kafka cluster cannot be reached, or not be used, now."""


class Reached:
    """What clients of one Kafka cluster have in common: settings, log, and words for errors.

    Args:
        settings: How it is reached.
        name: Of what uses it, for the log: ``archive.NAME``, ``consume.NAME``.

    Raises:
        KafkaUnavailable: A file cannot be read now, or the package confluent-kafka is not there.
    """

    def __init__(self, settings: KafkaSettings, name: str) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise KafkaUnavailable(KAFKA.missing, KAFKA.part) from error
        self.lib: Any = confluent_kafka
        self.settings = settings
        self._name = name
        self._secrets = [
            value
            for option, value in settings.options.items()
            if value and any(word in option for word in _SECRET_WORDS)
        ]
        self._last = ""
        self._logged: dict[str, float] = {}
        self.config = self._config()

    def _config(self) -> dict[str, Any]:
        of = self.settings
        security = ("SASL_" if of.sasl else "") + ("SSL" if of.tls else "PLAINTEXT")
        config: dict[str, Any] = {
            "bootstrap.servers": ",".join(of.servers),
            "client.id": f"steward-{self._name}",
            "security.protocol": security,
            "socket.timeout.ms": _ms(of.timeout_s),
            # Brokers close idle connections, which is no news.
            "log.connection.close": False,
            "reconnect.backoff.max.ms": 2000,
            "error_cb": self._on_error,
            "logger": self._logger(),
        }
        if of.sasl:
            config["sasl.mechanism"] = of.sasl
            config["sasl.username"] = of.user
            config["sasl.password"] = self._secret(of.password_file)
        files = {
            "ssl.ca.location": of.ca_file,
            "ssl.certificate.location": of.certificate_file,
            "ssl.key.location": of.key_file,
        }
        return config | {option: path for option, path in files.items() if path}

    def configured(self, role: dict[str, Any]) -> dict[str, Any]:
        """The settings of a client: what all have, what this role needs, and the site's options."""
        return {**self.config, **role, **self.settings.options}

    def make(self, kind: str, role: dict[str, Any]) -> Any:
        """A client (``Producer`` or ``Consumer``).

        Raises:
            KafkaUnavailable: librdkafka does not take the settings, a file among them.
        """
        try:
            return getattr(self.lib, kind)(self.configured(role))
        except self.lib.KafkaException as error:
            raise KafkaUnavailable(
                f"no Kafka client can be made: {self.hidden(error.args[0].str())}"
            ) from error

    def _secret(self, path: str) -> str:
        try:
            with open(path, "rb") as file:
                secret = file.read(_LARGEST_SECRET).decode().strip("\r\n")
        except OSError as error:
            raise KafkaUnavailable(f"cannot read {path}: {error.strerror}", path) from error
        except UnicodeDecodeError as error:
            raise KafkaUnavailable(f"{path} is not UTF-8 text", path) from error
        self._secrets.append(secret)
        return secret

    def hidden(self, text: str) -> str:
        """A text of librdkafka's without our secrets."""
        for secret in self._secrets:
            if secret:
                text = text.replace(secret, _HIDDEN)
        return text

    def _on_error(self, error: Any) -> None:
        # Told from within poll and flush. The client goes on by itself; what it is asked to do
        # fails by its own time-out, which then says too little.
        if error.code() != self.lib.KafkaError._ALL_BROKERS_DOWN or not self._last:
            self._last = self.told(error)

    def take_last(self) -> str:
        """What went wrong since this was last asked; "" for nothing."""
        last, self._last = self._last, ""
        return last

    def told(self, error: Any) -> str:
        """A KafkaError in words, with what to do about it where that can be said."""
        of = self.settings
        text = self.hidden(error.str())
        name = error.name()
        if name not in _REMEDIES and "SSL" in text:
            # A failed handshake is at times told of as a connection that was lost.
            name = "_SSL"
        remedy = _REMEDIES.get(name, "").format(
            user=repr(of.user) if of.user else "us", topic=of.topic, make_topic=make_topic(of)
        )
        return f"{text}; {remedy}" if remedy else text

    def where(self) -> str:
        """The cluster's brokers and the topic, for messages."""
        return f"topic {self.settings.topic} at {', '.join(self.settings.servers)}"

    def _logger(self) -> logging.Logger:
        logger = log.getChild(self._name)
        logger.filters = [self._hide]
        return logger

    def _hide(self, record: logging.LogRecord) -> bool:
        """Make a record fit for our log; whether it is to be in it."""
        record.msg, record.args = self.hidden(record.getMessage()), ()
        # An outage is told of at every try to connect, for hours: the numbers alone differ.
        what = _NUMBER.sub("", record.msg)
        if record.created - self._logged.get(what, 0.0) < _SAME_AGAIN_S:
            return False
        if len(self._logged) >= _MOST_REMEMBERED:
            self._logged.clear()
        self._logged[what] = record.created
        # Lost connections are restored by themselves; what is not is said by who waits for it.
        record.levelno = min(record.levelno, logging.WARNING)
        record.levelname = logging.getLevelName(record.levelno)
        return True


def refused_option(kind: str, option: str, value: str) -> str:
    """Why librdkafka does not take one of a site's options; "" where it does.

    What depends on other settings, or cannot be known since the package confluent-kafka is not
    there, is no reason.

    Args:
        kind: Of the client: ``Producer`` or ``Consumer``.
        option: The option, as CONFIGURATION.md of librdkafka names it.
        value: Its value.
    """
    try:
        import confluent_kafka as lib
    except ImportError:
        return ""
    if option == _PLUGINS:
        return ""  # they would be loaded here
    # No broker is named, so nobody is asked.
    config = {"log_level": "0", option: value}
    try:
        getattr(lib, kind)(config | ({"group.id": "steward"} if kind == "Consumer" else {}))
    except lib.KafkaException as error:
        text = str(error.args[0].str()).strip()
        return "" if text.startswith(_TOGETHER) else text
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def make_topic(settings: KafkaSettings) -> str:
    """The command that makes the topic, with a limit that lets every script through."""
    return (
        f"make it: kafka-topics.sh --bootstrap-server {settings.servers[0]} --create "
        f"--topic {settings.topic} --config max.message.bytes=16777216"
    )


def _ms(seconds: float) -> int:
    # What librdkafka takes for socket.timeout.ms.
    return max(10, min(300_000, int(seconds * 1000)))


def check_settings(settings: Settings) -> Iterator[Problem]:
    """Yield the options of brokers that librdkafka does not take."""
    for name, sink in settings.archive.sink.items():
        if isinstance(sink, KafkaSinkSettings):
            yield from _refused_options(
                ("archive", "sink", name, "broker"), sink.broker, "Producer"
            )
    for name, source in settings.consume.items():
        yield from _refused_options(("consume", name, "broker"), source.broker, "Consumer")


def _refused_options(key: KeyPath, broker: KafkaSettings, kind: str) -> Iterator[Problem]:
    for option, value in broker.options.items():
        why = refused_option(kind, option, value)
        if why:
            yield Problem((*key, "options", option), f"librdkafka refuses {option!r}: {why}")
