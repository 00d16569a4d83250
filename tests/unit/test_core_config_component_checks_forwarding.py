"""Checks of a controller's settings, and of the Steward that it reports to."""

import re
from pathlib import Path

import pytest

from steward.core.config import Settings
from steward.core.config.reader import ConfigError, load_settings
from steward.core.errors import UsageError
from steward.daemon.controller import make_controller_workers
from steward.daemon.workers import make_workers

REMOTE = '[cluster.c1]\nremote = true\ncontrollers = ["ctl1"]\n'
LISTEN = '[receive]\nlisten = "0.0.0.0:6825"\n'
TLS = 'tls = "t"\n[tls.t]\n'
LOCAL = '[cluster.c1]\nslurm = false\nspool = "/spool"\n'
TO = '[forward]\nto = "steward:6825"\n'


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "steward.toml"
    path.write_text(text)
    return load_settings(str(path))


MISTAKES = [
    (REMOTE, "receives no events"),
    ("[cluster.c1]\nremote = true\n" + LISTEN, "the hosts that may forward events"),
    (REMOTE.replace("ctl1", "ctl1 ctl2") + LISTEN, "give a host name or an address"),
    (REMOTE.replace("ctl1", "") + LISTEN, "give a host name or an address"),
    (REMOTE + '[receive]\nlisten = "6825"\n', "an address and a port"),
    (REMOTE + LISTEN + TLS + 'certificate_file = "/c"\n', "needs both"),
    (REMOTE + LISTEN + TLS + 'key_file = "/c"\n', "needs both"),
    (
        REMOTE + LISTEN + TLS + 'certificate_file = "c"\nkey_file = "/k"\n',
        "must be an absolute path",
    ),
    (
        REMOTE + LISTEN + TLS + 'client_ca_file = "/ca"\n',
        "is for a server, which needs a certificate: set 'certificate_file'",
    ),
    (
        REMOTE + LISTEN + TLS + 'ca_file = "/ca"\n',
        "[receive] listens with TLS but without a certificate",
    ),
    (REMOTE + 'munge_socket = "s"\n' + LISTEN, "must be an absolute path"),
    (LOCAL + '[forward]\nto = "steward"\n', "a host and a port"),
    (LOCAL + TO + 'tls = "t"\n', "unknown table [tls.t]: add it"),
    (LOCAL + TO + TLS.replace('"t"', "true"), "'forward.tls' must be text in quotes"),
    (LOCAL + TO + LISTEN, "[forward] and [receive] exclude each other"),
    (REMOTE + TO, "cannot be remote"),
]


@pytest.mark.parametrize(("text", "what"), MISTAKES, ids=[what for _, what in MISTAKES])
def test_a_mistake_is_said(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        loaded(tmp_path, text)


def test_a_remote_cluster_is_neither_watched_nor_asked(tmp_path: Path) -> None:
    names = [part.name for part in make_workers(loaded(tmp_path, REMOTE + LISTEN))]
    assert "receive" in names
    assert not [name for name in names if name.startswith(("capture.", "slurm."))]


def test_a_cluster_that_is_watched_here_may_be_reported_for_as_well(tmp_path: Path) -> None:
    both = loaded(tmp_path, LOCAL + 'controllers = ["ctl2"]\n' + LISTEN)
    names = [part.name for part in make_workers(both)]
    assert {"receive", "capture.c1.0"} <= set(names)


def test_a_controller_runs_sources_and_nothing_else(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[cluster.c1]\n" + TO)
    names = [part.name for part in make_controller_workers(settings)]
    assert names == [
        *("journal", "forward.c1", "runs.c1", "slurm.c1"),
        *("capture.c1.0", "capture.c1.1"),
    ]
    settings = loaded(tmp_path, LOCAL + TO)
    assert [part.name for part in make_controller_workers(settings)] == [
        "journal",
        "forward.c1",
        "capture.c1.0",
        "capture.c1.1",
    ]


def test_each_daemon_wants_its_own_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set 'to' in"):
        make_controller_workers(loaded(tmp_path, LOCAL))
    with pytest.raises(UsageError, match="run 'steward controller'"):
        make_workers(loaded(tmp_path, LOCAL + TO))
