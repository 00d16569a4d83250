from pathlib import Path

import pytest

from steward.core.config.reader import ConfigError, load_settings

GOOD = """
state_dir = "/var/lib/steward"
[cluster.c1]
[archive.sink.files]
path = "/archive"
[bank]
enabled = true
"""

LISTENING_GATE = """
[gate]
listen = "0.0.0.0:6826"
tls = "gate"
[tls.gate]
certificate_file = "/c"
key_file = "/k"
client_ca_file = "/a"
"""


def read(tmp_path: Path, more: str) -> str:
    """Return the error about a configuration; "" if it is valid."""
    path = tmp_path / "steward.toml"
    path.write_text(GOOD + more)
    try:
        load_settings(str(path))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_bank_needs_only_to_be_enabled(tmp_path: Path) -> None:
    assert read(tmp_path, "") == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("decimals = 7", "bank.decimals"),
        ("hold_share = 0.0", "bank.hold_share"),
        ("warn_percent = [0]", "warn_percent"),
        ("reconcile_s = 0.0", "bank.reconcile_s"),
        ('unit = " "', "bank.unit"),
        ('database = "mysql://db/steward"', "postgresql+psycopg"),
        ('database = "postgresql+psycopg://steward:secret@db/steward"', "password_file"),
        ('password_file = "/etc/steward/password"', "set 'database'"),
        ("[bank.rejection.physics]", "[bank.rejection.physics]"),
        ('[bank.notify]\nwebhook = "chat.example.org"', "bank.notify.webhook"),
        ('[bank.remote]\nurl = "ftp://host/"', "bank.remote.url"),
        ("[bank.remote]\nbalance_age_s = 90.0", "set 'bank.remote.url'"),
        (
            '[bank.remote]\nurl = "https://host/api"\nbalance_age_s = 30.0',
            "must be 0, or 60 or more",
        ),
        ('[bank.remote]\nurl = "https://host/"', "add the API's, '/mybrc-rest' or '/api'"),
        ("[gate]\ntimeout_ms = 2000", "gate.timeout_ms"),
        ('[gate]\nlisten = "0.0.0.0:6826"', "requires TLS"),
        (
            LISTENING_GATE,
            "'controllers' of [cluster.NAME]",
        ),
        ('[gate]\nask = "nowhere"', "gate.ask"),
        ('[mybrc]\nlisten = "8000"', "mybrc.listen"),
        ('[mybrc]\ncluster = "other"', "unknown cluster 'other'"),
    ],
)
def test_what_is_wrong_names_its_key(tmp_path: Path, more: str, said: str) -> None:
    assert said in read(tmp_path, more)


def test_a_password_in_a_url_is_not_shown(tmp_path: Path) -> None:
    said = read(tmp_path, 'database = "postgresql+psycopg://steward:geheim@db/steward"')
    assert "geheim" not in said
