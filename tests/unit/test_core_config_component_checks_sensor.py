"""Checks of [sensor], before anything starts."""

from pathlib import Path

import pytest

from steward.capture.sensor.triggers import trigger_command
from steward.capture.settings import SensorSettings
from steward.core.config import Settings
from steward.core.config.reader import ConfigError, load_settings
from steward.daemon.controller import make_controller_workers
from steward.daemon.workers import make_workers
from steward.slurm.settings import ClusterSettings

CLUSTER = "[cluster.c1]\n"
SINK = '[archive.sink.files]\nkind = "files"\npath = "/archive"\n'


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "steward.toml"
    path.write_text(CLUSTER + SINK + text)
    return load_settings(str(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('helper = "libexec/steward-trigger"', "must be an absolute path"),
        ('helper = "/usr/lib exec/steward-trigger"', "contains a blank"),
        ('helper = "/usr/libexec/wake"', "must have the file name steward-trigger"),
        ('secret_file = "/etc/my secret"', "contains a blank"),
        ("interval_s = 0.01", "must be 0.1 or more"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, f"[sensor]\n{line}\n")


def test_a_socket_that_would_be_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text(f'run_dir = "/{"x" * 120}"\n{CLUSTER}{SINK}[sensor]\nenabled = true\n')
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        load_settings(str(path))


def test_a_sensor_needs_a_slurm_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text(f'{CLUSTER}slurm = false\nspool = "/spool"\n{SINK}[sensor]\nenabled = true\n')
    with pytest.raises(ConfigError, match="no cluster to query"):
        load_settings(str(path))


def named(parts: list) -> set[str]:  # type: ignore[type-arg] # parts of any kind
    return {part.name for part in parts if part.name.startswith("sensor.")}


def test_each_cluster_that_is_asked_has_a_sensor(tmp_path: Path) -> None:
    clusters = {
        "c1": ClusterSettings(),
        "c2": ClusterSettings(slurm=False, spool="/spool"),
        "c3": ClusterSettings(remote=True, controllers=("ctl",)),
        "c4": ClusterSettings(),
    }
    settings = Settings(state_dir=str(tmp_path), cluster=clusters)
    assert named(make_workers(settings)) == set()
    sensor = SensorSettings(enabled=True)
    settings = Settings(state_dir=str(tmp_path), cluster=clusters, sensor=sensor)
    assert named(make_workers(settings)) == {"sensor.c1", "sensor.c4"}
    assert settings.wake_socket("c1") == "/run/steward/trigger-c1.sock"
    assert trigger_command(settings, "c4").split()[1:] == [
        *("--socket", "/run/steward/trigger-c4.sock"),
        *("--secret", "/etc/steward/trigger.secret", "c4"),
    ]


def test_a_controller_has_one_too(tmp_path: Path) -> None:
    settings = loaded(tmp_path, '[forward]\nto = "steward:6825"\n[sensor]\nenabled = true\n')
    assert named(make_controller_workers(settings)) == {"sensor.c1"}
    assert settings.wake_socket("c1") == "/run/steward/trigger.sock"
