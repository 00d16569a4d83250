from pathlib import Path

import pytest

from steward.core.config.reader import ConfigError, load_settings

GOOD = """
state_dir = "/var/lib/steward"
[cluster.c1]
[archive.sink.files]
path = "/archive"
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


@pytest.mark.parametrize(
    "more",
    [
        "",
        '[actions]\nprograms_file = "/srv/programs"\ntimeout_s = 5',
        '[actions.webhooks]\nchat = "https://chat.example.org/hook?key=1"',
        '[access]\nadministrators = ["carl"]',
    ],
)
def test_what_is_right(tmp_path: Path, more: str) -> None:
    assert read(tmp_path, more) == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('[actions]\nprograms_file = "programs"', "actions.programs_file"),
        ("[actions]\ntimeout_s = 0", "actions.timeout_s"),
        ("[actions]\ntimeout_s = 600", "actions.timeout_s"),
        ('[actions.webhooks]\nchat = "chat.example.org"', "actions.webhooks.chat"),
        ('[actions.webhooks]\n"a b" = "https://chat.example.org"', "invalid webhook name 'a b'"),
        ('[actions.webhooks]\nchat = "https://[nowhere"', "must be a URL"),
        ('[access]\nadministrators = [""]', "access.administrators"),
    ],
)
def test_what_is_wrong_names_its_key(tmp_path: Path, more: str, said: str) -> None:
    assert said in read(tmp_path, more)


def test_a_webhooks_address_is_not_shown(tmp_path: Path) -> None:
    said = read(tmp_path, '[actions.webhooks]\nchat = "ftp://host/secret"')
    assert "secret" not in said
    assert "chat" in said
