"""Configuration checks of components: controllers, nodes, web, bank, gate, actions, rules, sensor.

One function for each area yields the problems of its sections: ``forwarding_problems``,
``node_problems``, ``web_problems``, ``bank_problems``, ``action_problems``, ``rule_problems``,
``sensor_problems``, ``sink_problems`` and ``broker_problems``. ``checks.py`` calls them all.
"""

import ipaddress
import os
import pwd
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from steward.archive.settings import FilesSinkSettings, LimitSettings, SinkSettings
from steward.bank.settings import GateSettings
from steward.capture.settings import HELPER_NAME, NodesSettings
from steward.core.config import Settings
from steward.core.config.problems import KeyPath, Problem
from steward.core.listeners import host_and_port
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.extensions.mybrc.settings import MybrcSettings
from steward.extensions.search_servers.settings import SearchSinkSettings
from steward.web.settings import WebSettings

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


def forwarding_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [receive], [forward], and clusters with remote controllers."""
    yield from _receive(settings)
    yield from _forward(settings)
    for name, cluster in settings.cluster.items():
        key = ("cluster", name)
        if cluster.remote and not settings.receive.listen:
            yield Problem(
                key, f"cluster {name!r} is remote, and nothing listens: set [receive] listen"
            )
        if cluster.remote and not cluster.controllers:
            yield Problem(
                key, f"cluster {name!r} is remote: name the hosts that may report, 'controllers'"
            )
        for host in cluster.controllers:
            if _HOST.fullmatch(host) is None:
                yield Problem(
                    (*key, "controllers"), f"{host!r} is neither a host's name nor an address"
                )


def _receive(settings: Settings) -> Iterator[Problem]:
    """Check [receive]."""
    receive = settings.receive
    key = ("receive",)
    if receive.listen and host_and_port(receive.listen) is None:
        yield Problem(
            (*key, "listen"),
            f"'receive.listen' must be an address and a port, '0.0.0.0:6825', "
            f"not {receive.listen!r}",
        )
    yield from file_problems("receive", receive)
    if receive.client_ca_file and not receive.certificate_file:
        yield Problem(
            (*key, "client_ca_file"),
            "'receive.client_ca_file' is for TLS: set 'certificate_file' and 'key_file', too",
        )


def _forward(settings: Settings) -> Iterator[Problem]:
    """Check [forward]."""
    forward = settings.forward
    key = ("forward",)
    if forward.to and host_and_port(forward.to) is None:
        yield Problem(
            (*key, "to"),
            f"'forward.to' must be a host and a port, 'steward.example.org:6825', "
            f"not {forward.to!r}",
        )
    yield from file_problems("forward", forward)
    if not forward.tls:
        for field in ("ca_file", "certificate_file"):
            if getattr(forward, field):
                yield Problem((*key, field), f"'forward.{field}' is for TLS: set 'tls = true', too")
    for name, cluster in settings.cluster.items():
        if forward.to and cluster.remote:
            yield Problem(
                ("cluster", name, "remote"),
                f"cluster {name!r} cannot be remote where [forward] sends away what is captured",
            )
    if forward.to and settings.receive.listen:
        yield Problem(
            (*key, "to"), "[forward] is for 'steward controller', [receive] for 'steward serve'"
        )


def file_problems(
    name: str,
    section: (
        ReceiveSettings
        | ForwardSettings
        | NodesSettings
        | GateSettings
        | MybrcSettings
        | WebSettings
    ),
) -> Iterator[Problem]:
    """Check a section's certificate and key files: absolute paths, and both or neither."""
    fields = [field for field in section.__struct_fields__ if field.endswith("_file")]
    for field in fields:
        path = getattr(section, field)
        if path and not os.path.isabs(path):
            yield Problem((name, field), f"'{name}.{field}' must be an absolute path, not {path!r}")
    if bool(section.certificate_file) != bool(section.key_file):
        yield Problem(
            (name, "certificate_file" if section.certificate_file else "key_file"),
            f"[{name}] needs both 'certificate_file' and 'key_file', or neither",
        )


_MOST_CONNECTIONS: Final = 1024
"""Largest most_connections: each connection is a thread, and may hold a megabyte."""


def node_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [nodes]."""
    nodes = settings.nodes
    key = ("nodes",)
    if nodes.listen and host_and_port(nodes.listen) is None:
        yield Problem(
            (*key, "listen"),
            f"'nodes.listen' must be an address and a port, '0.0.0.0:6826', not {nodes.listen!r}",
        )
    if nodes.listen and nodes.listen == settings.forward.to:
        yield Problem(
            (*key, "listen"),
            "[nodes] needs a port of its own: agents speak HTTP, controllers do not",
        )
    yield from file_problems("nodes", nodes)
    if nodes.client_ca_file and not nodes.certificate_file:
        yield Problem(
            (*key, "client_ca_file"),
            "'nodes.client_ca_file' is for TLS: set 'certificate_file' and 'key_file', too",
        )
    if nodes.listener and nodes.client_ca_file:
        yield Problem(
            (*key, "listener"),
            "'nodes.listener' cannot be set with 'client_ca_file': the daemon itself checks the "
            "certificates of nodes, so take one of both out",
        )
    if nodes.listener and not nodes.listen:
        yield Problem((*key, "listener"), "'nodes.listener' has no address: set 'listen'")
    if not 0 < nodes.most_connections <= _MOST_CONNECTIONS:
        yield Problem(
            (*key, "most_connections"),
            f"'nodes.most_connections' must be between 1 and {_MOST_CONNECTIONS}",
        )
    for network in nodes.shared_from:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            what = f"'nodes.shared_from' holds {network!r}, which is no network: '10.1.2.0/24'"
            yield Problem((*key, "shared_from"), what)
    if nodes.listen and not any(of.scheduler == "slurm" for of in settings.cluster.values()):
        yield Problem((*key, "listen"), "[nodes] is for clusters of Slurm, and none is named")


_HEADER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_OUR_HEADERS: Final = frozenset(
    {"authorization", "cookie", "host", "x-csrf-token", "idempotency-key"}
)
"""Headers with a meaning of their own, which any client may send."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_LONGEST_SESSION_S: Final = 30 * 86400.0
"""Longest session, in seconds."""
_LONGEST_PROXY_SESSION_S: Final = 3600.0
"""Longest session opened by a proxy, in seconds."""
_LONGEST_LOGIN_S: Final = 3600.0
"""Longest validity of a login link, in seconds."""
_LONGEST_TOKEN_DAYS: Final = 3660


def web_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [web]."""
    web = settings.web
    if web.listen and host_and_port(web.listen) is None:
        yield _problem("listen", f"must be an address and a port, '127.0.0.1:8290': {web.listen!r}")
    yield from _user(settings)
    yield from _check_url(web)
    yield from file_problems("web", web)
    yield from _proxy(web)
    yield from _addresses(web)
    yield from _networks(web)
    yield from _bounds(web)


def _problem(field: str, what: str) -> Problem:
    return Problem(("web", field), f"'web.{field}' {what}")


def _user(settings: Settings) -> Iterator[Problem]:
    """Check that the web process has a user of its own, without rights."""
    user = settings.web.user
    if not user:
        yield _problem("user", "is empty: name the user that 'steward web' runs as")
        return
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        return  # made by the package, or not yet: the doctor says so
    try:
        daemons = os.stat(settings.state_dir).st_uid
    except OSError:
        daemons = 0
    if uid in (0, daemons):
        whose = "root" if uid == 0 else "the daemon's own user"
        yield _problem(
            "user", f"is {whose}: pages are served by a user of their own, who has no rights"
        )


def _check_url(web: WebSettings) -> Iterator[Problem]:
    """Check the URL of the web pages."""
    if not web.url:
        return
    try:
        found = urlsplit(web.url)
        is_good = found.scheme in ("http", "https") and bool(found.hostname)
        is_good = is_good and not (found.query or found.fragment or found.username)
        is_good = is_good and (found.port is None or found.port > 0)
    except ValueError:
        is_good = False
    if not is_good:
        yield _problem(
            "url", f"must be what browsers type, 'https://HOST/steward', not {web.url!r}"
        )
    elif not _PREFIX.fullmatch(found.path):
        yield _problem("url", f"has a path of other than plain letters: {found.path!r}")


def _proxy(web: WebSettings) -> Iterator[Problem]:
    """Check the header by which a trusted proxy names the user."""
    header = web.proxy_header
    if not header:
        return
    if not _HEADER.fullmatch(header):
        yield _problem("proxy_header", f"is no header's name: {header!r}")
    elif header.lower() in _OUR_HEADERS:
        yield _problem("proxy_header", f"cannot be {header!r}, which any client sends")
    if not web.trusted_proxies:
        yield _problem("proxy_header", "is believed from no address: set 'trusted_proxies', too")


def _addresses(web: WebSettings) -> Iterator[Problem]:
    for field, addresses in (
        ("trusted_proxies", web.trusted_proxies),
        ("metrics_from", web.metrics_from),
    ):
        for address in addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                yield _problem(field, f"holds {address!r}, which is no address")


def _networks(web: WebSettings) -> Iterator[Problem]:
    """Check the networks of [web]; MUNGE reports IPv4 addresses only."""
    for network in web.shared_from:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _problem("shared_from", f"holds {network!r}, which is no network: '10.1.2.0/24'")
    for network in web.munge_from:
        try:
            found = ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _problem("munge_from", f"holds {network!r}, which is no network: '10.1.2.0/24'")
            continue
        if found.version != 4:
            what = f"holds {network!r}: MUNGE names the IPv4 address of a host, and no other"
            yield _problem("munge_from", what)


def _bounds(web: WebSettings) -> Iterator[Problem]:
    """Check durations and rate limits of [web]."""
    for field, value, most in (
        ("session_s", web.session_s, _LONGEST_SESSION_S),
        ("proxy_session_s", web.proxy_session_s, _LONGEST_PROXY_SESSION_S),
        ("login_s", web.login_s, _LONGEST_LOGIN_S),
        ("token_days", web.token_days, _LONGEST_TOKEN_DAYS),
        ("munge_token_days", web.munge_token_days, _LONGEST_TOKEN_DAYS),
    ):
        if not 0 < value <= most:
            yield _problem(field, f"must be above 0 and at most {most:g}, not {value:g}")
    if web.requests_per_minute < 1:
        yield _problem("requests_per_minute", "must be 1 or more: nobody could ask")


_MOST_DECIMALS: Final = 6
"""Most decimals of an SU: amounts are integer micro-SU."""
_DATABASES: Final = ("sqlite", "postgresql", "postgresql+psycopg")
_LEAST_BALANCE_AGE_S: Final = 60
"""Shortest age limit of balances from a remote server, in seconds."""
_LONGEST_TIMEOUT_MS: Final = 1000
"""Longest gate time-out, in ms: slurmctld holds locks while the plugin waits."""


def bank_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [bank], [gate] and [mybrc]."""
    yield from _bank(settings)
    yield from _database(settings)
    yield from _gate(settings)
    yield from _mybrc(settings)
    yield from _notices(settings)
    for name in ("gate", "mybrc"):
        yield from file_problems(name, getattr(settings, name))


def _bank(settings: Settings) -> Iterator[Problem]:
    """Check [bank]: shares, periods, unit, and actions for rejected jobs."""
    bank = settings.bank
    if bank.decimals > _MOST_DECIMALS:
        yield Problem(("bank", "decimals"), f"'bank.decimals' is above {_MOST_DECIMALS}")
    for name in ("hold_share", "unseen_share"):
        if not 0 < getattr(bank, name) <= 1:
            yield Problem(("bank", name), f"'bank.{name}' must be above 0, and 1 at the most")
    for percent in bank.warn_percent:
        if percent < 1:
            yield Problem(
                ("bank", "warn_percent"), f"'bank.warn_percent': {percent} is no share in percent"
            )
    for name in ("reconcile_s", "without_ledger_s", "default_time_s"):
        if not getattr(bank, name):
            yield Problem(("bank", name), f"'bank.{name}' must be above 0")
    if not bank.unit.strip():
        yield Problem(("bank", "unit"), "'bank.unit' is empty: say what one unit is called")
    if bank.enabled and not settings.cluster:
        yield Problem(("bank", "enabled"), "a bank needs jobs: add a table [cluster.NAME]")
    for name, refusal in bank.refusal.items():
        if not refusal.qos and not refusal.partition:
            yield Problem(
                ("bank", "refusal", name),
                f"[bank.refusal.{name}] says nothing: set 'qos' or 'partition', or take it out",
            )


def _database(settings: Settings) -> Iterator[Problem]:
    """Check the ledger's database and the remote myBRC server."""
    bank = settings.bank
    key = ("bank", "database")
    if bank.database:
        url = urlsplit(bank.database)
        if url.scheme not in _DATABASES:
            # The value is not shown: it may contain a password.
            yield Problem(
                key,
                "'bank.database' must begin with 'postgresql+psycopg://' or 'sqlite:///'",
            )
        elif url.password:
            yield Problem(
                key, "'bank.database' holds a password: put it into a file, 'password_file'"
            )
    elif bank.password_file:
        yield Problem(
            ("bank", "password_file"), "'bank.password_file' is for a database: set 'database'"
        )
    if bank.remote.balances and not bank.remote.url:
        yield Problem(
            ("bank", "remote", "balances"),
            "'bank.remote.balances' are a myBRC server's: set 'url'",
        )
    if bank.remote.balance_age_s < _LEAST_BALANCE_AGE_S:
        yield Problem(
            ("bank", "remote", "balance_age_s"),
            f"'bank.remote.balance_age_s' must be {_LEAST_BALANCE_AGE_S} or more",
        )
    for field in (bank.password_file, bank.remote.token_file, bank.remote.ca_file):
        if field and not os.path.isabs(field):
            yield Problem(("bank",), f"{field!r} in [bank] must be an absolute path")


def _gate(settings: Settings) -> Iterator[Problem]:
    """Check [gate]: paths without blanks, time-out, addresses, certificates."""
    gate = settings.gate
    for name in ("socket", "off_switch", "plugin_conf"):
        path = getattr(gate, name)
        if not os.path.isabs(path):
            yield Problem(("gate", name), f"'gate.{name}' must be an absolute path, not {path!r}")
        elif any(character.isspace() for character in path):
            # The plugin splits its lines at blanks.
            yield Problem(("gate", name), f"'gate.{name}' holds a blank: choose another path")
    if not 1 <= gate.timeout_ms <= _LONGEST_TIMEOUT_MS:
        yield Problem(
            ("gate", "timeout_ms"), f"'gate.timeout_ms' must be 1 to {_LONGEST_TIMEOUT_MS}"
        )
    for name in ("listen", "ask"):
        address = getattr(gate, name)
        if address and host_and_port(address) is None:
            yield Problem(
                ("gate", name),
                f"'gate.{name}' must be a host and a port, 'bank.example.org:6826', "
                f"not {address!r}",
            )
        if address and not (gate.certificate_file and gate.ca_file):
            yield Problem(
                ("gate", name),
                f"'gate.{name}' is encrypted: set 'certificate_file', 'key_file' and 'ca_file'",
            )
    if gate.listen and gate.ask:
        yield Problem(
            ("gate", "ask"), "'gate.ask' is for a gate that does not decide: take 'listen' out"
        )


def _mybrc(settings: Settings) -> Iterator[Problem]:
    """Check [mybrc]."""
    mybrc = settings.mybrc
    if mybrc.listen and host_and_port(mybrc.listen) is None:
        yield Problem(
            ("mybrc", "listen"),
            f"'mybrc.listen' must be an address and a port, '127.0.0.1:8000', not {mybrc.listen!r}",
        )
    if mybrc.listen and not settings.bank.enabled:
        yield Problem(("mybrc", "listen"), "[mybrc] is part of the bank: set [bank] enabled = true")
    if mybrc.cluster and mybrc.cluster not in settings.cluster:
        yield Problem(("mybrc", "cluster"), f"there is no cluster {mybrc.cluster!r}")


def _notices(settings: Settings) -> Iterator[Problem]:
    """Check the URLs of the bank's webhook and remote server."""
    for key, address in (
        (("bank", "notify", "webhook"), settings.bank.notify.webhook),
        (("bank", "remote", "url"), settings.bank.remote.url),
    ):
        if not address:
            continue
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield Problem(key, f"{'.'.join(key)!r} must be a URL: 'https://host/path'")
        elif key == ("bank", "remote", "url") and not url.path.strip("/"):
            yield Problem(
                key, f"{'.'.join(key)!r} has no path: the API is at '/mybrc-rest' or '/api'"
            )


_LONGEST_S: Final = 240.0
"""Longest time-out of operations, in seconds: the daemon waits no longer."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def action_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [actions] and in [access] administrators."""
    actions = settings.actions
    if not os.path.isabs(actions.programs_file):
        yield Problem(
            ("actions", "programs_file"),
            f"'actions.programs_file' must be an absolute path, not {actions.programs_file!r}",
        )
    if actions.timeout_s > _LONGEST_S:
        yield Problem(
            ("actions", "timeout_s"),
            f"'actions.timeout_s' is above {_LONGEST_S:g}: the daemon waits no longer",
        )
    for name, address in actions.webhooks.items():
        key = ("actions", "webhooks", name)
        if _NAME.fullmatch(name) is None:
            yield Problem(
                key,
                f"{name!r} cannot be a webhook's name: use up to 64 letters, digits, '_' and '-'",
            )
        try:
            url = urlsplit(address)
            is_url = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            is_url = False
        if not is_url:
            # The address is not shown: it may contain a secret.
            yield Problem(key, f"'{'.'.join(key)}' must be a URL: 'https://host/path'")
    if "" in settings.access.administrators:
        yield Problem(
            ("access", "administrators"),
            "'access.administrators' holds an empty name: take it out",
        )


def rule_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [rules]; 'steward rules check' checks the rules themselves."""
    rules = settings.rules
    for directory in rules.directories:
        if not os.path.isabs(directory):
            yield Problem(
                ("rules", "directories"),
                f"'rules.directories' must hold absolute paths, not {directory!r}",
            )
    if rules.most_nodes_percent > 100:
        yield Problem(
            ("rules", "most_nodes_percent"), "'rules.most_nodes_percent' is above 100 percent"
        )
    if not rules.history_days:
        yield Problem(("rules", "history_days"), "'rules.history_days' must be above 0")
    if rules.enabled and not settings.cluster:
        yield Problem(("rules", "enabled"), "rules need events: add a table [cluster.NAME]")
    if rules.enabled and settings.forward.to:
        yield Problem(
            ("rules", "enabled"),
            f"a controller runs no rules: set it in the Steward at {settings.forward.to}",
        )
    if rules.enabled and not rules.shipped and not rules.directories:
        yield Problem(
            ("rules", "directories"), "there is no rule: name a directory, or set shipped = true"
        )


_LEAST_INTERVAL_S: Final = 0.1
"""Shortest poll interval of the sensor, in seconds."""
_LONGEST_ADDRESS: Final = 107
"""Longest path of a Unix socket, in bytes, see unix(7)."""


def sensor_problems(settings: Settings) -> Iterator[Problem]:
    """Yield errors in [sensor]."""
    sensor = settings.sensor
    if sensor.interval_s < _LEAST_INTERVAL_S:
        yield Problem(
            ("sensor", "interval_s"), f"'sensor.interval_s' must be {_LEAST_INTERVAL_S} or more"
        )
    for name in ("helper", "socket", "secret_file"):
        path = getattr(sensor, name)
        if not os.path.isabs(path):
            yield Problem(
                ("sensor", name), f"'sensor.{name}' must be an absolute path, not {path!r}"
            )
        elif any(character.isspace() for character in path):
            # slurmctld splits a trigger's program at blanks and knows no quotes.
            yield Problem(("sensor", name), f"'sensor.{name}' holds a blank: choose another path")
    if os.path.basename(sensor.helper) != HELPER_NAME:
        yield Problem(
            ("sensor", "helper"),
            f"'sensor.helper' must be called {HELPER_NAME}: so Steward knows its triggers again",
        )
    for cluster in settings.cluster:
        path = settings.wake_socket(cluster)
        if len(os.fsencode(path)) > _LONGEST_ADDRESS:
            yield Problem(
                ("sensor", "socket"),
                f"'sensor.socket': {path} is longer than the {_LONGEST_ADDRESS} bytes that a "
                "socket's path may have",
            )
            return
    if sensor.enabled and not any(
        of.asks_slurm and not of.remote for of in settings.cluster.values()
    ):
        yield Problem(
            ("sensor", "enabled"),
            "[sensor] asks Slurm, and no cluster here is asked: of one with remote = true "
            "the controller's own configuration has it",
        )


_INDEX = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
_SECRET = re.compile(r"password|secret|ssl\.key\.pem|oauthbearer\.config")
_OUR_OPTIONS = {
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
"""Options of librdkafka that have a key of their own, with that key."""
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
"""Options of librdkafka that Steward sets so that no message is lost."""


def sink_problems(key: KeyPath, sink: SinkSettings) -> Iterator[Problem]:
    """Yield errors of one sink; ``checks.py`` checks the paths of files sinks."""
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
    """Yield errors in the connection settings of a Kafka cluster."""
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
        if option in _OUR_OPTIONS:
            yield Problem(here, f"{option!r} has a key of its own: {_OUR_OPTIONS[option]!r}")
        elif option in _FIXED:
            yield Problem(here, f"{option!r} cannot be set: without it messages would be lost")
        elif _SECRET.search(option) is not None:
            yield Problem(
                here,
                f"{option!r} would be a secret in this file, which is shown: keep secrets in files "
                "of their own, such as 'key_file' and 'password_file'",
            )


def _search_problems(key: KeyPath, sink: SearchSinkSettings) -> Iterator[Problem]:
    """Check a sink of a search server."""
    name = ".".join(key)
    if not sink.urls:
        yield Problem(key, f"'{name}' names no server: add urls = [\"https://search1:9200\"]")
    for url in sink.urls:
        yield from _check_address((*key, "urls"), url)
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


def _check_address(key: KeyPath, url: str) -> Iterator[Problem]:
    """Check the URL of a search server."""
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
