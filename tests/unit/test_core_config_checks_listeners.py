"""Two listeners on one port are reported before the second one fails repeatedly."""

from pathlib import Path

import pytest

from steward.core.config.reader import ConfigError, load_settings

HEAD = '[cluster.c1]\nslurm = false\nspool = "/spool"\n[archive.sink.files]\npath = "/archive"\n'


def told(root: Path, text: str) -> str:
    path = root / "steward.toml"
    path.write_text(HEAD + text)
    try:
        load_settings(str(path))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("nodes", "web"),
    [
        ("0.0.0.0:6826", "0.0.0.0:6826"),
        ("0.0.0.0:6826", "127.0.0.1:6826"),
        ("127.0.0.1:6826", "localhost:6826"),
        ("[::]:6826", "10.0.0.1:6826"),
        ("0.0.0.0:06826", "steward.example.org:6826"),
    ],
)
def test_two_listeners_at_one_port(tmp_path: Path, nodes: str, web: str) -> None:
    said = told(tmp_path, f'[nodes]\nlisten = "{nodes}"\n[web]\nlisten = "{web}"\n')
    assert "steward.toml:9: 'web.listen' and 'nodes.listen' both use port 6826" in said


@pytest.mark.parametrize(
    ("nodes", "web"),
    [
        ("0.0.0.0:6826", "0.0.0.0:8290"),
        ("10.0.0.1:6826", "10.0.0.2:6826"),
        ("127.0.0.1:0", "127.0.0.1:0"),
    ],
)
def test_listeners_that_are_apart(tmp_path: Path, nodes: str, web: str) -> None:
    assert told(tmp_path, f'[nodes]\nlisten = "{nodes}"\n[web]\nlisten = "{web}"\n') == ""


def test_every_listener_is_looked_at(tmp_path: Path) -> None:
    gate = '[bank]\nenabled = true\n[gate]\nlisten = "0.0.0.0:6827"\n'
    text = f'{gate}[mybrc]\nlisten = "127.0.0.1:6827"\nusers_file = "/u"\n'
    assert "'mybrc.listen' and 'gate.listen' both use port 6827" in told(tmp_path, text)
    text = '[receive]\nlisten = "0.0.0.0:6825"\n[web]\nlisten = "0.0.0.0:6825"\n'
    assert "'web.listen' and 'receive.listen' both use port 6825" in told(tmp_path, text)
