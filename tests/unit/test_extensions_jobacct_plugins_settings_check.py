"""Checks of [accounting] name the line."""

from pathlib import Path

import pytest

from steward.core.config import Settings
from steward.core.config.reader import ConfigError, load_settings
from steward.daemon.consumer_workers import make_accounting_workers

BASE = '[cluster.main]\nspool = "/var/spool/slurmctld"\n[accounting]\n'


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "steward.toml"
    path.write_text(BASE + text)
    return load_settings(str(path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('type = ""', "'accounting.type' is empty"),
        ('type = "log"', "invalid plugin 'log'"),
        ('type = "jobacct/../x"', "invalid plugin"),
        ('type = "jobacct/log,jobacct/nowhere"', "no installed package provides 'jobacct/nowhere'"),
        ('parameters = "Frequency"', "write name=value"),
        ('parameters = "MaxSendRetries=often"', "whole number"),
        ('parameters = "maxsendretrydelay=-1"', "whole number"),
        ('location = "log"', "absolute path"),
        ('location = "/var/spool/slurmctld/log"', "lies in /var/spool/slurmctld"),
        ('location = "/var/lib/steward/archive"', "lies in /var/lib/steward/archive"),
        ("hook_timeout_s = 0", "above 0"),
        ("close_after_days = -1", "0 or more"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"steward\.toml:4: ") as raised:
        loaded(tmp_path, text)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["accounting.log"]),
        ('type = "jobacct/none"', []),
        ('type = "jobacct/none, jobacct/log"\nlocation = "/srv/joblog"', ["accounting.log"]),
    ],
)
def test_what_is_configured_runs(tmp_path: Path, text: str, parts: list[str]) -> None:
    assert [part.name for part in make_accounting_workers(loaded(tmp_path, text))] == parts
