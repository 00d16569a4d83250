"""Configuration checks of components: controllers, nodes, web, bank, actions, rules, sensor, sinks.

One function for each area yields the problems of its sections: ``check_forwarding``,
``check_nodes``, ``check_web``, ``check_bank`` (with the gate and myBRC), ``check_actions``,
``check_rules``, ``check_sensor``, ``check_sink`` and ``check_broker``. ``checks.py`` calls them
all. They look at the settings alone, except for users and the owner of the state directory.
"""

import ipaddress
import os
import pwd
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from steward.archive.settings import FilesSinkSettings, LimitSettings, SinkSettings
from steward.automation.settings import SHIPPED
from steward.bank.settings import MAX_GATE_TIMEOUT_MS
from steward.capture.settings import HELPER_NAME
from steward.core.config import Settings
from steward.core.config.problems import ConfigProblem, KeyPath
from steward.core.listeners import split_host_port
from steward.core.section import TlsReference, TlsSettings
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.extensions.search_servers.settings import SearchSinkSettings
from steward.web.settings import WebSettings

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


def check_forwarding(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [receive], [forward], and clusters with remote controllers."""
    yield from _check_receive(settings)
    yield from _check_forward(settings)
    for name, cluster in settings.cluster.items():
        key = ("cluster", name)
        if cluster.remote and not settings.receive.listen:
            yield ConfigProblem(
                key,
                f"cluster {name!r} is remote, but Steward receives no events: set "
                "'listen' in [receive]",
            )
        if cluster.remote and not cluster.controllers:
            yield ConfigProblem(
                key,
                f"cluster {name!r} is remote: set its 'controllers' to the hosts that may "
                "forward events",
            )
        for host in cluster.controllers:
            if _HOST.fullmatch(host) is None:
                yield ConfigProblem(
                    (*key, "controllers"), f"invalid host {host!r}: give a host name or an address"
                )


def _check_receive(settings: Settings) -> Iterator[ConfigProblem]:
    """Check [receive]."""
    receive = settings.receive
    key = ("receive",)
    if receive.listen and split_host_port(receive.listen) is None:
        yield ConfigProblem(
            (*key, "listen"),
            f"'receive.listen' must be an address and a port such as '0.0.0.0:6825', "
            f"not {receive.listen!r}",
        )


def _check_forward(settings: Settings) -> Iterator[ConfigProblem]:
    """Check [forward]."""
    forward = settings.forward
    key = ("forward",)
    if forward.to and split_host_port(forward.to) is None:
        yield ConfigProblem(
            (*key, "to"),
            f"'forward.to' must be a host and a port such as 'steward.example.org:6825', "
            f"not {forward.to!r}",
        )
    for name, cluster in settings.cluster.items():
        if forward.to and cluster.remote:
            yield ConfigProblem(
                ("cluster", name, "remote"),
                f"cluster {name!r} cannot be remote here: [forward] sends this host's events "
                "to another Steward",
            )
    if forward.to and settings.receive.listen:
        yield ConfigProblem(
            (*key, "to"),
            "[forward] and [receive] exclude each other: 'steward controller' uses the first, "
            "'steward serve' the second. Remove one",
        )


_SERVERS: Final = ("receive", "nodes", "gate", "mybrc", "web")
"""Sections of servers, which have a key ``listen``."""


def check_tls(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [tls.NAME], and servers that refer to one without a certificate."""
    for name, tls in settings.tls.items():
        key = ("tls", name)
        yield from _check_absolute(key, tls, tls.__struct_fields__)
        if bool(tls.certificate_file) != bool(tls.key_file):
            yield ConfigProblem(
                (*key, "certificate_file" if tls.certificate_file else "key_file"),
                f"'tls.{name}' needs both 'certificate_file' and 'key_file', or neither",
            )
        if tls.client_ca_file and not tls.certificate_file:
            yield ConfigProblem(
                (*key, "client_ca_file"),
                f"'tls.{name}.client_ca_file' is for a server, which needs a certificate: set "
                "'certificate_file' and 'key_file'",
            )
    for section in _SERVERS:
        tls_reference: TlsReference = getattr(settings, section).tls
        is_client = section == "gate" and not settings.gate.listen
        if tls_reference and not tls_reference.certificate_file and not is_client:
            yield ConfigProblem(
                (section, "tls"),
                f"[{section}] listens with TLS but without a certificate: set "
                "'certificate_file' and 'key_file' in its [tls] table",
            )


def check_nodes(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [nodes]."""
    nodes = settings.nodes
    key = ("nodes",)
    if nodes.listen and split_host_port(nodes.listen) is None:
        yield ConfigProblem(
            (*key, "listen"),
            f"'nodes.listen' must be an address and a port such as '0.0.0.0:6826', "
            f"not {nodes.listen!r}",
        )
    if nodes.listen and nodes.listen == settings.forward.to:
        yield ConfigProblem(
            (*key, "listen"),
            "'nodes.listen' and 'forward.to' are the same address: give [nodes] another port, "
            "since agents speak HTTP and controllers do not",
        )
    if nodes.listener and nodes.tls and nodes.tls.client_ca_file:
        yield ConfigProblem(
            (*key, "listener"),
            "'nodes.listener' and 'client_ca_file' exclude each other, since the daemon "
            "itself checks certificates of nodes: remove one of them",
        )
    if nodes.listener and not nodes.listen:
        yield ConfigProblem(
            (*key, "listener"), "'nodes.listener' needs an address: set 'nodes.listen'"
        )
    for network in nodes.behind_nat:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            message = (
                f"'nodes.behind_nat' contains {network!r}, which is not a network: write it "
                "as '10.1.2.0/24'"
            )
            yield ConfigProblem((*key, "behind_nat"), message)
    if nodes.listen and not any(
        cluster_settings.scheduler == "slurm" for cluster_settings in settings.cluster.values()
    ):
        yield ConfigProblem(
            (*key, "listen"), "[nodes] needs a Slurm cluster: add a table [cluster.NAME]"
        )


_HEADER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_OUR_HEADERS: Final = frozenset(
    {"authorization", "cookie", "host", "x-csrf-token", "idempotency-key"}
)
"""Headers that any client may send, so that none of them can be the proxy's."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_LONGEST_TOKEN_DAYS: Final = 3660


def check_web(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [web]."""
    web = settings.web
    if web.listen and split_host_port(web.listen) is None:
        yield _make_web_problem(
            "listen", f"must be an address and a port such as '127.0.0.1:8290', not {web.listen!r}"
        )
    yield from _check_web_user(settings)
    yield from _check_url(web)
    yield from _check_proxy(web)
    yield from _check_addresses(web)
    yield from _check_networks(web)
    yield from _check_durations(web)


def _make_web_problem(field: str, message: str) -> ConfigProblem:
    return ConfigProblem(("web", field), f"'web.{field}' {message}")


def _check_web_user(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that the web process has a user of its own, without rights."""
    user = settings.web.user
    if not user:
        yield _make_web_problem("user", "is empty: name the user that runs 'steward web'")
        return
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        return  # the package creates the user; the doctor reports a missing one
    try:
        daemon_uid = os.stat(settings.state_dir).st_uid
    except OSError:
        daemon_uid = 0
    if uid in (0, daemon_uid):
        owner = "root" if uid == 0 else "the daemon's own user"
        yield _make_web_problem(
            "user", f"is {owner}: name a user without other rights, since pages face the network"
        )


def _check_url(web: WebSettings) -> Iterator[ConfigProblem]:
    """Check the URL of the web pages."""
    if not web.url:
        return
    try:
        url = urlsplit(web.url)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname)
        is_valid = is_valid and not (url.query or url.fragment or url.username)
        is_valid = is_valid and (url.port is None or url.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        yield _make_web_problem(
            "url",
            f"must be the URL that browsers use, such as 'https://HOST/steward', not {web.url!r}",
        )
    elif not _PREFIX.fullmatch(url.path):
        yield _make_web_problem(
            "url", f"has the path {url.path!r}: use letters, digits and '/._~-' only"
        )


def _check_proxy(web: WebSettings) -> Iterator[ConfigProblem]:
    """Check the header by which a trusted proxy names the user."""
    header = web.proxy_header
    if not header:
        return
    if not _HEADER.fullmatch(header):
        yield _make_web_problem("proxy_header", f"is not a header name: {header!r}")
    elif header.lower() in _OUR_HEADERS:
        yield _make_web_problem(
            "proxy_header", f"cannot be {header!r}, because any client can send this header"
        )
    if not web.trusted_proxies:
        yield _make_web_problem(
            "proxy_header",
            "needs 'trusted_proxies': the addresses of the proxies that set the header",
        )


def _check_addresses(web: WebSettings) -> Iterator[ConfigProblem]:
    for field, addresses in (
        ("trusted_proxies", web.trusted_proxies),
        ("metrics_from", web.metrics_from),
    ):
        for address in addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                yield _make_web_problem(field, f"contains {address!r}, which is not an IP address")


def _check_networks(web: WebSettings) -> Iterator[ConfigProblem]:
    """Check the networks of [web]; MUNGE reports IPv4 addresses only."""
    for network in web.shared_from:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _make_web_problem(
                "shared_from",
                f"contains {network!r}, which is not a network: write it as '10.1.2.0/24'",
            )
    for network in web.munge_from:
        try:
            parsed = ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _make_web_problem(
                "munge_from",
                f"contains {network!r}, which is not a network: write it as '10.1.2.0/24'",
            )
            continue
        if parsed.version != 4:
            message = (
                f"contains {network!r}: use an IPv4 network, since MUNGE names IPv4 addresses only"
            )
            yield _make_web_problem("munge_from", message)


def _check_durations(web: WebSettings) -> Iterator[ConfigProblem]:
    """Check durations and rate limits of [web]."""
    if not 0 < web.token_days <= _LONGEST_TOKEN_DAYS:
        yield _make_web_problem(
            "token_days",
            f"must be above 0 and at most {_LONGEST_TOKEN_DAYS}, not {web.token_days}",
        )
    if web.requests_per_minute < 1:
        yield _make_web_problem(
            "requests_per_minute", "must be 1 or more: 0 would reject every request"
        )


_MOST_DECIMALS: Final = 6
"""Most decimals of an SU: amounts are integer micro-SU."""
_DATABASES: Final = ("sqlite", "postgresql", "postgresql+psycopg")
_LEAST_BALANCE_AGE_S: Final = 60
"""Shortest age limit of balances from a remote server, in seconds."""


def check_bank(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [bank], [gate] and [mybrc]."""
    yield from _check_bank_section(settings)
    yield from _check_database(settings)
    yield from _check_gate(settings)
    yield from _check_mybrc(settings)
    yield from _check_urls(settings)


def _check_bank_section(settings: Settings) -> Iterator[ConfigProblem]:
    """Check [bank]: shares, periods, unit, and actions for rejected jobs."""
    bank = settings.bank
    if bank.decimals > _MOST_DECIMALS:
        yield ConfigProblem(
            ("bank", "decimals"), f"'bank.decimals' must be at most {_MOST_DECIMALS}"
        )
    if not 0 < bank.hold_share <= 1:
        yield ConfigProblem(
            ("bank", "hold_share"), "'bank.hold_share' must be above 0 and at most 1"
        )
    for percent in bank.warn_percent:
        if percent < 1:
            yield ConfigProblem(
                ("bank", "warn_percent"),
                f"'bank.warn_percent' contains {percent}: use percentages of 1 or more",
            )
    for name in ("reconcile_s", "without_ledger_s"):
        if not getattr(bank, name):
            yield ConfigProblem(("bank", name), f"'bank.{name}' must be above 0")
    if not bank.unit.strip():
        yield ConfigProblem(("bank", "unit"), "'bank.unit' is empty: name the unit, such as 'SU'")
    if bank.enabled and not settings.cluster:
        yield ConfigProblem(
            ("bank", "enabled"), "the bank needs a cluster: add a table [cluster.NAME]"
        )
    for name, rejection in bank.rejection.items():
        if not rejection.qos and not rejection.partition:
            yield ConfigProblem(
                ("bank", "rejection", name),
                f"[bank.rejection.{name}] has no effect: set 'qos' or 'partition', or remove it",
            )


def _check_database(settings: Settings) -> Iterator[ConfigProblem]:
    """Check the ledger's database and the remote myBRC server."""
    bank = settings.bank
    key = ("bank", "database")
    if bank.database:
        url = urlsplit(bank.database)
        if url.scheme not in _DATABASES:
            # The value is not shown: it may contain a password.
            yield ConfigProblem(
                key,
                "'bank.database' must begin with 'postgresql+psycopg://' or 'sqlite:///'",
            )
        elif url.password:
            yield ConfigProblem(
                key,
                "'bank.database' contains a password: move it to a file and set 'password_file'",
            )
    elif bank.password_file:
        yield ConfigProblem(
            ("bank", "password_file"),
            "'bank.password_file' has no effect without 'database': set 'database' to a "
            "PostgreSQL URL",
        )
    if bank.remote.balances and not bank.remote.url:
        yield ConfigProblem(
            ("bank", "remote", "balance_age_s"),
            "'bank.remote.balance_age_s' needs a myBRC server: set 'bank.remote.url'",
        )
    if bank.remote.balances and bank.remote.balance_age_s < _LEAST_BALANCE_AGE_S:
        yield ConfigProblem(
            ("bank", "remote", "balance_age_s"),
            f"'bank.remote.balance_age_s' must be 0, or {_LEAST_BALANCE_AGE_S} or more",
        )
    for field in (bank.password_file, bank.remote.token_file):
        if field and not os.path.isabs(field):
            yield ConfigProblem(("bank",), f"{field!r} in [bank] must be an absolute path")


def _check_gate(settings: Settings) -> Iterator[ConfigProblem]:
    """Check [gate]: time-out, addresses, certificates."""
    gate = settings.gate
    if not 1 <= gate.timeout_ms <= MAX_GATE_TIMEOUT_MS:
        yield ConfigProblem(
            ("gate", "timeout_ms"), f"'gate.timeout_ms' must be 1 to {MAX_GATE_TIMEOUT_MS}"
        )
    tls = gate.tls or TlsSettings()
    for name, ca in (("listen", "client_ca_file"), ("ask", "ca_file")):
        address = getattr(gate, name)
        if address and split_host_port(address) is None:
            yield ConfigProblem(
                ("gate", name),
                f"'gate.{name}' must be a host and a port such as 'bank.example.org:6826', "
                f"not {address!r}",
            )
        if address and not (tls.certificate_file and getattr(tls, ca)):
            yield ConfigProblem(
                ("gate", name),
                f"'gate.{name}' requires TLS: set 'tls' to a table [tls.NAME] with "
                f"'certificate_file', 'key_file' and '{ca}'",
            )
    if gate.listen and not any(cluster.controllers for cluster in settings.cluster.values()):
        yield ConfigProblem(
            ("gate", "listen"),
            "'gate.listen' has no effect, since no host may connect: list the slurmctld hosts as "
            "'controllers' of [cluster.NAME]",
        )
    if gate.listen and gate.ask:
        yield ConfigProblem(
            ("gate", "ask"),
            "'gate.ask' and 'gate.listen' exclude each other: a gate that asks another "
            "does not decide. Remove one",
        )


def _check_mybrc(settings: Settings) -> Iterator[ConfigProblem]:
    """Check [mybrc]."""
    mybrc = settings.mybrc
    if mybrc.listen and split_host_port(mybrc.listen) is None:
        yield ConfigProblem(
            ("mybrc", "listen"),
            "'mybrc.listen' must be an address and a port such as '127.0.0.1:8000', not "
            f"{mybrc.listen!r}",
        )
    if mybrc.listen and not settings.bank.enabled:
        yield ConfigProblem(
            ("mybrc", "listen"), "[mybrc] needs the bank: set 'enabled = true' in [bank]"
        )
    if mybrc.cluster and mybrc.cluster not in settings.cluster:
        yield ConfigProblem(
            ("mybrc", "cluster"),
            f"unknown cluster {mybrc.cluster!r}: name one of the tables [cluster.NAME]",
        )


def _check_urls(settings: Settings) -> Iterator[ConfigProblem]:
    """Check the URLs of the bank's webhook and remote server."""
    for key, address in (
        (("bank", "notify", "webhook"), settings.bank.notify.webhook),
        (("bank", "remote", "url"), settings.bank.remote.url),
    ):
        if not address:
            continue
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield ConfigProblem(key, f"{'.'.join(key)!r} must be a URL such as 'https://host/path'")
        elif key == ("bank", "remote", "url") and not url.path.strip("/"):
            yield ConfigProblem(
                key, f"{'.'.join(key)!r} has no path: add the API's, '/mybrc-rest' or '/api'"
            )


_LONGEST_S: Final = 240.0
"""Longest time-out of operations, in seconds: the daemon waits no longer."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_actions(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [actions] and in [access] administrators."""
    actions = settings.actions
    if not os.path.isabs(actions.programs_file):
        yield ConfigProblem(
            ("actions", "programs_file"),
            f"'actions.programs_file' must be an absolute path, not {actions.programs_file!r}",
        )
    if actions.timeout_s > _LONGEST_S:
        yield ConfigProblem(
            ("actions", "timeout_s"),
            f"'actions.timeout_s' must be at most {_LONGEST_S:g}, the longest that the daemon "
            "waits",
        )
    for name, address in actions.webhooks.items():
        key = ("actions", "webhooks", name)
        if _NAME.fullmatch(name) is None:
            yield ConfigProblem(
                key,
                f"invalid webhook name {name!r}: use up to 64 letters, digits, '_' and '-'",
            )
        try:
            url = urlsplit(address)
            is_url = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            is_url = False
        if not is_url:
            # The address is not shown: it may contain a secret.
            yield ConfigProblem(key, f"'{'.'.join(key)}' must be a URL such as 'https://host/path'")
    if "" in settings.access.administrators:
        yield ConfigProblem(
            ("access", "administrators"),
            "'access.administrators' contains an empty name: remove it",
        )


def check_rules(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [rules]; 'steward rules check' checks the rules themselves."""
    rules = settings.rules
    for directory in rules.directories:
        if directory != SHIPPED and not os.path.isabs(directory):
            yield ConfigProblem(
                ("rules", "directories"),
                f"'rules.directories' must list absolute paths or '{SHIPPED}', not {directory!r}",
            )
    if rules.most_nodes_percent > 100:
        yield ConfigProblem(
            ("rules", "most_nodes_percent"), "'rules.most_nodes_percent' must be at most 100"
        )
    if rules.is_enabled and not settings.cluster:
        yield ConfigProblem(("rules", "mode"), "rules need a cluster: add a table [cluster.NAME]")
    if rules.is_enabled and settings.forward.to:
        yield ConfigProblem(
            ("rules", "mode"),
            "a controller runs no rules: set 'rules.mode' in the configuration of the Steward "
            f"at {settings.forward.to}",
        )
    if rules.is_enabled and not rules.directories:
        yield ConfigProblem(
            ("rules", "directories"),
            f"'rules.directories' is empty: name a directory, or '{SHIPPED}'",
        )


_LEAST_INTERVAL_S: Final = 0.1
"""Shortest poll interval of the sensor, in seconds."""
_LONGEST_ADDRESS: Final = 107
"""Longest path of a Unix socket, in bytes, see unix(7)."""


def check_sensor(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors in [sensor]."""
    sensor = settings.sensor
    if sensor.interval_s < _LEAST_INTERVAL_S:
        yield ConfigProblem(
            ("sensor", "interval_s"), f"'sensor.interval_s' must be {_LEAST_INTERVAL_S} or more"
        )
    for name in ("helper", "secret_file"):
        path = getattr(sensor, name)
        if name == "helper" and not path:
            continue
        if not os.path.isabs(path):
            yield ConfigProblem(
                ("sensor", name), f"'sensor.{name}' must be an absolute path, not {path!r}"
            )
        elif any(character.isspace() for character in path):
            # slurmctld splits a trigger's program at blanks and knows no quotes.
            yield ConfigProblem(
                ("sensor", name), f"'sensor.{name}' contains a blank: choose another path"
            )
    if sensor.helper and os.path.basename(sensor.helper) != HELPER_NAME:
        yield ConfigProblem(
            ("sensor", "helper"),
            f"'sensor.helper' must have the file name {HELPER_NAME}, by which Steward "
            "recognizes its own triggers",
        )
    for cluster in settings.cluster:
        path = settings.wake_socket(cluster)
        if len(os.fsencode(path)) > _LONGEST_ADDRESS:
            yield ConfigProblem(
                ("run_dir",),
                f"'run_dir': the socket path {path} is longer than {_LONGEST_ADDRESS} bytes, "
                "the maximum: choose a shorter directory",
            )
            return
    if sensor.enabled and not any(
        cluster_settings.asks_slurm and not cluster_settings.remote
        for cluster_settings in settings.cluster.values()
    ):
        yield ConfigProblem(
            ("sensor", "enabled"),
            "[sensor] has no cluster to query: every cluster is remote. Set [sensor] in the "
            "controllers' configurations",
        )


_INDEX = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
_SECRET = re.compile(r"password|secret|ssl\.key\.pem|oauthbearer\.config")
_OUR_OPTIONS = {
    "bootstrap.servers": "servers",
    "metadata.broker.list": "servers",
    "security.protocol": "tls",
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.username": "user",
    "sasl.password": "password_file",
    "ssl.ca.location": "tls",
    "ssl.certificate.location": "tls",
    "ssl.key.location": "tls",
}
"""Options of librdkafka that have a key of their own, with that key."""
_RESERVED_OPTIONS = frozenset(
    {
        "acks",
        "request.required.acks",
        "enable.idempotence",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "auto.offset.reset",
    }
)
"""Options of librdkafka that Steward sets so that no message is lost."""


def check_sink(key: KeyPath, sink: SinkSettings) -> Iterator[ConfigProblem]:
    """Yield errors of one sink; ``checks.py`` checks the paths of files sinks."""
    if isinstance(sink, SearchSinkSettings):
        yield from _check_search_sink(key, sink)
    elif isinstance(sink, KafkaSinkSettings):
        yield from check_broker((*key, "broker"), sink.broker)
    else:
        assert isinstance(sink, FilesSinkSettings), "unknown kind of sink"
        for name, limit in sink.limit.items():
            yield from _check_limit((*key, "limit", name), limit)


def _check_limit(key: KeyPath, limit: LimitSettings) -> Iterator[ConfigProblem]:
    name = ".".join(key)
    if not limit.days and not limit.max_bytes:
        yield ConfigProblem(key, f"'{name}' sets no limit: give 'days' or 'max_bytes'")
    for field, names in (("users", limit.users), ("accounts", limit.accounts)):
        if "" in names:
            yield ConfigProblem(
                (*key, field), f"'{name}.{field}' contains an empty name: remove it"
            )


def check_broker(key: KeyPath, broker: KafkaSettings) -> Iterator[ConfigProblem]:
    """Yield errors in the connection settings of a Kafka cluster."""
    name = ".".join(key)
    if not broker.servers:
        yield ConfigProblem(key, f"'{name}' has no brokers: set servers = [\"kafka1:9092\"]")
    for server in broker.servers:
        if _SERVER.fullmatch(server) is None:
            yield ConfigProblem((*key, "servers"), f"invalid broker {server!r}: write host:port")
    if _TOPIC.fullmatch(broker.topic) is None or broker.topic in {".", ".."}:
        yield ConfigProblem(
            (*key, "topic"),
            f"invalid topic {broker.topic!r}: use up to 249 letters, digits, '.', '_' and '-'",
        )
    if bool(broker.user) != bool(broker.password_file):
        yield ConfigProblem(
            (*key, "user" if broker.user else "password_file"),
            f"'{name}' needs both 'user' and 'password_file', or neither",
        )
    if "sasl.mechanism" in broker.options and not broker.user:
        yield ConfigProblem(
            (*key, "options", "sasl.mechanism"),
            f"'{name}.options.sasl.mechanism' has no effect without 'user' and 'password_file': "
            "set them",
        )
    yield from _check_absolute(key, broker, ("password_file",))
    for option in broker.options:
        option_key = (*key, "options", option)
        if option in _OUR_OPTIONS:
            yield ConfigProblem(
                option_key,
                f"{option!r} cannot be set in 'options': use the key {_OUR_OPTIONS[option]!r}",
            )
        elif option in _RESERVED_OPTIONS:
            yield ConfigProblem(
                option_key, f"{option!r} cannot be set in 'options': messages could be lost"
            )
        elif _SECRET.search(option) is not None:
            yield ConfigProblem(
                option_key,
                f"{option!r} would put a secret into the configuration, which 'steward config' "
                "prints: use 'password_file' or the 'key_file' of [tls.NAME]",
            )


def _check_search_sink(key: KeyPath, sink: SearchSinkSettings) -> Iterator[ConfigProblem]:
    """Check a sink of a search server."""
    name = ".".join(key)
    if not sink.urls:
        yield ConfigProblem(key, f"'{name}' has no servers: set urls = [\"https://search1:9200\"]")
    for url in sink.urls:
        yield from _check_address((*key, "urls"), url)
    if sink.tls and sink.urls and not any(url.startswith("https:") for url in sink.urls):
        yield ConfigProblem(
            (*key, "tls"),
            f"'{name}' has 'tls', but no URL begins with https://, so nothing is "
            "encrypted: write https://, or remove 'tls'",
        )
    if _INDEX.fullmatch(sink.index) is None:
        yield ConfigProblem(
            (*key, "index"),
            f"invalid index name {sink.index!r}: use lower-case letters, digits, '_' and '-'",
        )
    if sink.user and not sink.password_file:
        yield ConfigProblem(key, f"'{name}' has a 'user' without a password: set 'password_file'")
    yield from _check_absolute(key, sink, ("password_file",))


def _check_address(key: KeyPath, url: str) -> Iterator[ConfigProblem]:
    """Check the URL of a search server."""
    try:
        parts = urlsplit(url)
        is_port_valid = parts.port is None or parts.port > 0
    except ValueError:
        parts, is_port_valid = urlsplit(""), False
    if not is_port_valid or parts.scheme not in {"http", "https"} or not parts.hostname:
        yield ConfigProblem(key, f"invalid server URL {url!r}: write https://host:9200")
    elif parts.username is not None or parts.password is not None:
        # Not repeated in the message, which may be logged.
        yield ConfigProblem(
            key, "a URL in 'urls' contains a password: set 'user' and 'password_file' instead"
        )
    elif parts.query or parts.fragment:
        yield ConfigProblem(
            key, f"invalid server URL {url!r}: remove everything from '?' or '#' on"
        )


def _check_absolute(
    key: KeyPath, section: object, fields: tuple[str, ...]
) -> Iterator[ConfigProblem]:
    for field in fields:
        path = getattr(section, field)
        if path and not os.path.isabs(path):
            yield ConfigProblem(
                (*key, field), f"{'.'.join((*key, field))!r} must be an absolute path, not {path!r}"
            )
