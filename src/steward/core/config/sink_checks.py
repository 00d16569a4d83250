"""What is wrong with the settings of one sink: addresses, names, credentials, limits."""

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from steward.archive.settings import FilesSinkSettings, LimitSettings, SinkSettings
from steward.core.config.problem import Problem
from steward.core.config.toml_lines import KeyPath
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.extensions.search_servers.settings import SearchSinkSettings

_INDEX = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
_SECRET = re.compile(r"password|secret|ssl\.key\.pem|oauthbearer\.config")
_OURS = {
    "bootstrap.servers": "servers",
    "metadata.broker.list": "servers",
    "security.protocol": "tls",
    "sasl.mechanism": "sasl",
    "sasl.mechanisms": "sasl",
    "sasl.username": "user",
    "sasl.password": "password_file",
    "ssl.ca.location": "ca_file",
    "ssl.certificate.location": "certificate_file",
    "ssl.key.location": "key_file",
    "compression.type": "compression",
    "compression.codec": "compression",
    "message.max.bytes": "max_message_bytes",
    "group.id": "group",
}
"""Settings of librdkafka that have a key of their own."""
_FIXED = frozenset(
    {
        "acks",
        "request.required.acks",
        "enable.idempotence",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "auto.offset.reset",
    }
)
"""What nothing would be kept for sure without."""


def sink_problems(key: KeyPath, sink: SinkSettings) -> Iterator[Problem]:
    """All that is wrong with a sink by itself; paths of trees are looked at elsewhere."""
    if isinstance(sink, SearchSinkSettings):
        yield from _search_problems(key, sink)
    elif isinstance(sink, KafkaSinkSettings):
        yield from broker_problems((*key, "broker"), sink.broker)
    else:
        assert isinstance(sink, FilesSinkSettings), "there are three sorts of sinks"
        for name, limit in sink.limit.items():
            yield from _limit_problems((*key, "limit", name), limit)


def _limit_problems(key: KeyPath, limit: LimitSettings) -> Iterator[Problem]:
    name = ".".join(key)
    if not limit.days and not limit.max_bytes:
        yield Problem(key, f"'{name}' limits nothing: give 'days' or 'max_bytes'")
    for field, names in (("users", limit.users), ("accounts", limit.accounts)):
        if "" in names:
            yield Problem((*key, field), f"'{name}.{field}' holds an empty name: take it out")


def broker_problems(key: KeyPath, broker: KafkaSettings) -> Iterator[Problem]:
    """All that is wrong with how a Kafka cluster is reached."""
    name = ".".join(key)
    if not broker.servers:
        yield Problem(key, f"'{name}' names no broker: add servers = [\"kafka1:9092\"]")
    for server in broker.servers:
        if _SERVER.fullmatch(server) is None:
            yield Problem((*key, "servers"), f"{server!r} is no broker: write host:port")
    if _TOPIC.fullmatch(broker.topic) is None or broker.topic in {".", ".."}:
        yield Problem(
            (*key, "topic"),
            f"{broker.topic!r} is no topic: use up to 249 letters, digits, '.', '_' and '-'",
        )
    if broker.sasl and not (broker.user and broker.password_file):
        yield Problem((*key, "sasl"), f"'{name}.sasl' needs a 'user' and a 'password_file'")
    if broker.user and not broker.sasl:
        yield Problem((*key, "user"), f"'{name}.user' is used with 'sasl' only: give both")
    yield from _key_pair(key, broker.certificate_file, broker.key_file)
    yield from _absolute(key, broker, ("ca_file", "certificate_file", "key_file", "password_file"))
    for option in broker.options:
        here = (*key, "options", option)
        if option in _OURS:
            yield Problem(here, f"{option!r} has a key of its own: {_OURS[option]!r}")
        elif option in _FIXED:
            yield Problem(here, f"{option!r} cannot be set: without it messages would be lost")
        elif _SECRET.search(option) is not None:
            yield Problem(
                here,
                f"{option!r} would be a secret in this file, which is shown: keep secrets in files "
                "of their own, such as 'key_file' and 'password_file'",
            )


def _search_problems(key: KeyPath, sink: SearchSinkSettings) -> Iterator[Problem]:
    name = ".".join(key)
    if not sink.urls:
        yield Problem(key, f"'{name}' names no server: add urls = [\"https://search1:9200\"]")
    for url in sink.urls:
        yield from _url((*key, "urls"), url)
    if _INDEX.fullmatch(sink.index) is None:
        yield Problem(
            (*key, "index"),
            f"{sink.index!r} cannot begin an index's name: use small letters, digits, '_' and '-'",
        )
    if bool(sink.user) != bool(sink.password_file):
        yield Problem(key, f"'{name}' needs both 'user' and 'password_file', or neither")
    if sink.user and sink.api_key_file:
        yield Problem((*key, "api_key_file"), f"'{name}' has a user and an API key: leave one out")
    if sink.shards < 1:
        yield Problem((*key, "shards"), f"'{name}.shards' must be 1 or more, not {sink.shards}")
    if sink.batch_bytes < 1 << 16:
        yield Problem(
            (*key, "batch_bytes"), f"'{name}.batch_bytes' must be 65536 or more: a script is larger"
        )
    yield from _key_pair(key, sink.certificate_file, sink.key_file)
    files = ("ca_file", "certificate_file", "key_file", "password_file", "api_key_file")
    yield from _absolute(key, sink, files)


def _url(key: KeyPath, url: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_right = urlsplit(""), False
    if not port_is_right or parts.scheme not in {"http", "https"} or not parts.hostname:
        yield Problem(key, f"{url!r} is no address of a server: write https://host:9200")
    elif parts.username is not None or parts.password is not None:
        # Not repeated in the message, which may be logged.
        yield Problem(key, "an address in 'urls' holds a password: give user and password_file")
    elif parts.query or parts.fragment:
        yield Problem(key, f"{url!r} holds more than an address: leave out what follows '?' or '#'")


def _key_pair(key: KeyPath, certificate: str, private: str) -> Iterator[Problem]:
    if bool(certificate) != bool(private):
        yield Problem(key, f"'{'.'.join(key)}' needs both 'certificate_file' and 'key_file'")


def _absolute(key: KeyPath, section: object, fields: tuple[str, ...]) -> Iterator[Problem]:
    for field in fields:
        path = getattr(section, field)
        if path and not os.path.isabs(path):
            yield Problem(
                (*key, field), f"{'.'.join((*key, field))!r} must be an absolute path, not {path!r}"
            )
