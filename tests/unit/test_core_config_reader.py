"""Configuration file: its keys and values, and one line about each error."""

import contextlib
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.settings import FilesSinkSettings
from steward.core.config import (
    AccessSettings,
    ArchiveSettings,
    Settings,
    convert_to_builtins,
)
from steward.core.config.problems import find_key_lines
from steward.core.config.reader import (
    ConfigError,
    LoadedConfig,
    load_settings,
    load_with_lines,
    render_config,
)
from steward.extensions.kafka.settings import KafkaSinkSettings
from steward.slurm.settings import ClusterSettings

GOOD = """\
# A comment with [brackets] and = signs.
state_dir = "/srv/steward"
log_level = "debug"

[cluster.main]
spool = "/var/spool/slurmctld"
timezone = "Europe/Paris"

[cluster.'second']
spool = "/var/spool/second"
slurm_prefix = [
  "chroot",  # a comment inside
  "/srv/root",
]

[archive.sink.files]
path = "/srv/archive"
layout = "{cluster}/{user}/{job_id}-{name}"
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> str:
        path = tmp_path / "steward.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_a_good_file_with_two_clusters(write: Any) -> None:
    settings = load_settings(write(GOOD))
    assert list(settings.cluster) == ["main", "second"]
    assert settings.cluster["second"].slurm_prefix == ("chroot", "/srv/root")
    assert settings.sink_path("files") == "/srv/archive"
    assert settings.history_days == Settings().history_days


BASE = '[cluster.main]\nspool = "/s"\n'

MISTAKES = [
    # text of the file, line of the mistake, and words of the message
    ('state_dirr = "/x"\n' + BASE, 1, ["state_dirr", "state_dir'?"]),
    ('[cluster.main]\n\nspol = "/s"\n', 3, ["cluster.main.spol", "'spool'?"]),
    ("[cluster.main]\nspool = 3\n", 2, ["cluster.main.spool", "text", "whole number"]),
    ('history_days = "two"\n' + BASE, 1, ["history_days", "whole number", "text"]),
    ("history_days = true\n" + BASE, 1, ["history_days", "true or false"]),
    ("history_days = 0\n" + BASE, 1, ["history_days", "above 0"]),
    ("history_days = -1\n" + BASE, 1, ["history_days", "above 0"]),
    ('log_level = "inf"\n' + BASE, 1, ["log_level", "'info'?"]),
    (BASE + "[access]\noperators = ['a', 2]\n", 4, ["access.operators", "list", "2"]),
    (BASE + "[access]\noperators = 'a'\n", 4, ["access.operators", "list"]),
    (BASE + "cluster = 1\n", 3, ["cluster.main.cluster"]),
    ("cluster = 1\n", 1, ["cluster", "[cluster.NAME]"]),
    ("[cluster]\nmain = 1\n", 2, ["cluster.main", "table"]),
    (BASE + "[archive.sink.a]\nkind = 'elastic'\n", 4, ["archive.sink.a.kind", "'files'"]),
    (
        BASE
        + "[tls.t]\nca_file = '/ca'\n[archive.sink.a]\nkind = 'opensearch'\ntls = 't'\n"
        + "urls = ['http://h:9200']\n",
        7,
        ["'archive.sink.a' has 'tls'", "nothing is encrypted"],
    ),
    (BASE + "timezone = 'Mars/Olympus'\n", 3, ["Mars/Olympus", "IANA"]),
    (BASE + "timezone = '../../etc/passwd'\n", 3, ["timezone", "IANA"]),
    (BASE + "snapshot_interval_s = nan\n", 3, ["snapshot_interval_s", "finite"]),
    (BASE + "snapshot_interval_s = -1\n", 3, ["snapshot_interval_s", "above 0"]),
    (BASE + "[archive.sink.a]\nlayout = '{jobid}'\n", 4, ["{jobid}", "job_id"]),
    (BASE + "[archive.sink.a]\npath = 'archive'\n", 4, ["archive.sink.a.path", "absolute"]),
    (BASE + "[archive.sink.a]\n[archive.sink.b]\n", 4, ["'a'", "'b'", "overlaps"]),
    (
        BASE + "[archive.sink.a]\npath='/x'\n[archive.sink.b]\npath='/y'\nmove_to='/x/z'\n",
        7,
        ["'a'", "'b' (move_to)", "overlaps"],
    ),
    (BASE + "[archive.sink.a]\npath='/s/archive'\n", 4, ["/s/archive", "spool", "'main'"]),
    (BASE + "[archive.sink.a]\npath='/var/lib'\n", 4, ["/var/lib", "state_dir"]),
    (BASE + "[redact]\nnames = ['a', '(']\n", 4, ["names", "'('"]),
    (BASE + "[redact]\nnames = ['']\n", 4, ["redact.names", "empty"]),
    (BASE + "[redact]\nvalues = ['a', '']\n", 4, ["redact.values", "empty"]),
    (BASE + "[access]\noperators = ['ada', '']\n", 4, ["access.operators", "empty"]),
    (BASE + '[cluster.two]\nspool = "/s/"\n', 4, ["'main'", "'two'", "same spool"]),
    (BASE + '[cluster."a/b"]\nspool = "/t"\n', 3, ["'a/b'", "name"]),
    ('state_dir = "/x\\ny"\n' + BASE, 1, ["state_dir", "control character"]),
    ('state_dir = ""\n' + BASE, 1, ["state_dir", "absolute"]),
    ('run_dir = ""\n' + BASE, 1, ["run_dir", "absolute"]),
    ('run_dir = "run"\n' + BASE, 1, ["run_dir", "absolute"]),
    ('run_dir = "/a b"\n' + BASE + "[bank]\nenabled = true\n", 1, ["run_dir", "blank"]),
    ('log_file = "steward.log"\n' + BASE, 1, ["log_file", "absolute"]),
    ("[cluster.main]\nslurm = false\n", 1, ["slurm = false", "spool"]),
    (BASE + "spool = '/t'\n", 3, ["TOML", "overwrite"]),
    ("[cluster.main\n", 1, ["TOML"]),
    ('x = "', 1, ["TOML"]),
    ("", 0, ["[cluster.NAME]"]),
    (b"[cluster.main]\nspool = '\xff'\n", 2, ["UTF-8"]),
    ("a = " + "[" * 5000, 0, ["deep"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), MISTAKES, ids=lambda value: str(value)[:24])
def test_a_mistake_is_one_line_that_names_file_line_and_key(
    write: Any, text: str | bytes, line: int, parts: list[str]
) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
    for part in parts:
        assert part in message
    assert caught.value.exit_code == 2


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(str(tmp_path / "none.toml"))


def test_a_directory_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_settings(str(tmp_path))


def test_a_huge_file_is_not_read(write: Any) -> None:
    with pytest.raises(ConfigError, match="is larger"):
        load_settings(write("#" * (2 << 20)))


def test_what_is_shown_says_where_each_value_is_from(write: Any) -> None:
    shown = render_config(load_with_lines(write(GOOD)))
    assert 'state_dir = "/srv/steward"  # steward.toml:2' in shown
    assert re.search(r"^history_days = \d+  # default$", shown, re.MULTILINE)
    assert 'timezone = "Europe/Paris"  # steward.toml:7' in shown


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp", "Zs", "Co", "Cn"])
)
names = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)


@given(
    names,
    st.lists(texts.filter(str.isprintable), max_size=3),
    st.floats(0.1, 1e6),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_what_is_shown_is_a_configuration_again(
    name: str, operators: list[str], timeout_s: float, yes: bool, days: int
) -> None:
    settings = Settings(
        cluster={name: ClusterSettings(spool="/s", snapshot_interval_s=timeout_s)},
        access=AccessSettings(operators=tuple(operators), coordinators_read_scripts=yes),
        archive=ArchiveSettings(sink={name: FilesSinkSettings(retention_days=days)}),
    )
    assert (
        msgspec.convert(tomllib.loads(render_config(LoadedConfig(settings))), Settings) == settings
    )


# ------------------------------------------------------------- lines

SCALARS = (
    "1",
    '"text # no comment"',
    "'it = \"x\"'",
    '"a \\" b"',
    '"""\nlong = 1\n[no.table]\n"""',
    "'''\nx = '' 2\n'''",
    '[1, # one\n  [2, "]"],\n]',
    "{ inner = 1, other = [1, 2] }",
    "2026-11-21T08:00:00Z",
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["plain", '"quoted.key"', "'lit eral'", '"a\\"b"', "a.b", 'c . "d"']),
            st.sampled_from(SCALARS),
            st.sampled_from(["", "\n", "# comment = 1\n", "  \n\t"]),
        ),
        max_size=8,
    )
)
def test_each_key_is_found_on_its_line(pairs: list[tuple[str, str, str]]) -> None:
    text = ""
    expected = {}
    for number, (key, value, gap) in enumerate(pairs):
        text += gap + f"[table{number}]\n"
        expected[number] = text.count("\n") + 1
        text += f"{key} = {value}\n"
    tomllib.loads(text)
    lines = find_key_lines(text)
    for number in expected:
        found = [
            line for path, line in lines.items() if path[0] == f"table{number}" and len(path) > 1
        ]
        assert min(found) == expected[number]
        assert lines[(f"table{number}",)] == expected[number] - 1


@given(st.text(max_size=200))
def test_no_text_keeps_the_scan_from_ending(text: str) -> None:
    # Only text that tomllib accepts has lines; the rest may be refused, not looped over.
    with contextlib.suppress(tomllib.TOMLDecodeError):
        find_key_lines(text)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_file_is_an_error_other_than_ours(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(ConfigError) as caught:
            load_settings(file.name)
    assert "\n" not in str(caught.value)


ELSEWHERE = """\
[archive.sink.files]

[archive.sink.search]
kind = "elasticsearch"
urls = ["https://search1:9200", "https://search2:9200"]
user = "steward"
password_file = "/etc/steward/search.password"

[archive.sink.events]
kind = "kafka"
retention_days = 3
[archive.sink.events.broker]
servers = ["kafka1:9092", "[2001:db8::1]:9092"]
[archive.sink.events.broker.options]
"socket.keepalive.enable" = "true"

[consume.central]
clusters = ["hpc1"]
[consume.central.broker]
servers = ["kafka1:9092"]
tls = "kafka"

[tls.kafka]
ca_file = "/etc/steward/kafka-ca.pem"
"""


def test_sinks_on_other_machines_and_back(write: Any) -> None:
    settings = load_settings(write(ELSEWHERE))
    sinks = settings.archive.sink
    assert {name: sink.kind for name, sink in sinks.items()} == {
        "files": "files",
        "search": "elasticsearch",
        "events": "kafka",
    }
    assert list(settings.files_sinks()) == ["files"]
    events = sinks["events"]
    assert isinstance(events, KafkaSinkSettings)
    assert events.broker.options == {"socket.keepalive.enable": "true"}
    assert events.retention_days == 3
    assert events.broker.tls is None
    assert settings.consume["central"].broker.tls == settings.tls["kafka"]
    plain = convert_to_builtins(settings)
    assert plain["consume"]["central"]["broker"]["tls"] == "kafka"
    assert load_settings(write(render_config(LoadedConfig(settings)))) == settings


SINK = BASE + "[archive.sink.a]\n"
SEARCH = SINK + 'kind = "opensearch"\n'
TLS = 'urls = ["https://h"]\ntls = "one"\n'
KAFKA = SINK + 'kind = "kafka"\n[archive.sink.a.broker]\n'
KAFKA_1 = KAFKA + 'servers = ["k:1"]\n'

MISTAKES_ELSEWHERE = [
    (SINK + 'kind = "kafak"\n', 4, ["archive.sink.a.kind", "'kafka'?"]),
    (SINK + "kind = 3\n", 4, ["archive.sink.a.kind", "whole number"]),
    (SEARCH, 3, ["archive.sink.a", "urls"]),
    (SEARCH + 'urls = ["search1:9200"]\n', 5, ["search1:9200", "https://"]),
    (SEARCH + 'urls = ["http://h:99999"]\n', 5, ["http://h:99999"]),
    (SEARCH + 'urls = ["http://h:1/?x"]\n', 5, ["'?'"]),
    (SEARCH + 'urls = ["http://h"]\nindex = "A*"\n', 6, ["'A*'"]),
    (SEARCH + 'urls = ["http://h"]\nuser = "me"\n', 3, ["password_file"]),
    (SEARCH + 'urls = ["http://h"]\npath = "/x"\n', 6, ["archive.sink.a.path"]),
    (SEARCH + TLS + '[tls.one]\nca_file = "x"\n', 8, ["tls.one.ca_file", "absolute"]),
    (SEARCH + TLS + '[tls.one]\nkey_file = "/x"\n', 8, ["certificate_file"]),
    (SEARCH + TLS, 6, ["archive.sink.a.tls", "unknown table [tls.one]", "add it"]),
    (SEARCH + TLS + "[tls.onr]\n", 6, ["archive.sink.a.tls", "[tls.one]", "did you mean 'onr'?"]),
    (SEARCH + TLS + "[tls.one]\nca_fil = ''\n", 8, ["tls.one.ca_fil", "did you mean 'ca_file'?"]),
    (SEARCH + TLS + "[tls]\none = ''\n", 8, ["'tls.one'", "must be a table"]),
    ("tls = 3\n" + SEARCH, 1, ["'tls'", "must contain tables"]),
    (SEARCH + "tls = true\n", 5, ["archive.sink.a.tls", "text in quotes"]),
    (KAFKA, 5, ["archive.sink.a.broker", "servers"]),
    (KAFKA + 'servers = ["k1"]\n', 6, ["'k1'", "host:port"]),
    (KAFKA_1 + 'topic = "a/b"\n', 7, ["'a/b'"]),
    (
        KAFKA_1 + "[archive.sink.a.broker.options]\n'sasl.mechanism' = 'PLAIN'\n",
        8,
        ["sasl.mechanism", "'user'", "'password_file'"],
    ),
    (
        KAFKA_1 + "[archive.sink.a.broker.options]\n'sasl.mechanisms' = 'PLAIN'\n",
        8,
        ["cannot be set in 'options'", "'sasl.mechanism'"],
    ),
    (KAFKA_1 + 'user = "me"\n', 7, ["both", "'password_file'"]),
    (KAFKA_1 + "[archive.sink.a.broker.options]\nacks = 1\n", 8, ["options.acks", "text"]),
    (KAFKA_1 + "[archive.sink.a.broker.options]\nacks = '1'\n", 8, ["'acks'", "lost"]),
    (
        KAFKA_1 + "[archive.sink.a.broker.options]\n'sasl.password' = 'x'\n",
        8,
        ["sasl.password", "password_file"],
    ),
    (
        KAFKA_1 + "[archive.sink.a.broker.options]\n'ssl.key.password' = 'x'\n",
        8,
        ["ssl.key.password", "would put a secret"],
    ),
]


@pytest.mark.parametrize(("text", "line", "told"), MISTAKES_ELSEWHERE)
def test_a_mistake_in_a_sink_elsewhere(write: Any, text: str, line: int, told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(text))
    assert caught.value.line == line
    for part in told:
        assert part in str(caught.value)


def test_an_address_with_a_password_is_refused_without_repeating_it(write: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(SEARCH + 'urls = ["https://me:hunter2@h:9200"]\n'))
    assert "hunter2" not in str(caught.value)
    assert "password_file" in str(caught.value)
