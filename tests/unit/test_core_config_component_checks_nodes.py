"""Checks of [nodes], and the processes it starts."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from steward.agent import agent
from steward.core.config import Settings
from steward.core.config.reader import ConfigError, load_settings
from steward.daemon.controller import make_controller_workers
from steward.daemon.workers import make_workers

LOCAL = '[cluster.c1]\nslurm = false\nspool = "/spool"\n'
NODES = '[nodes]\nlisten = "0.0.0.0:6826"\n'
TLS = 'tls = "t"\n[tls.t]\n'
PACKAGING = Path(__file__).parents[2] / "packaging" / "systemd"


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "steward.toml"
    path.write_text(text)
    return load_settings(str(path))


MISTAKES = [
    (LOCAL + '[nodes]\nlisten = "6826"\n', "an address and a port"),
    (LOCAL + NODES + '[receive]\nlisten = "0.0.0.0:6826"\n', "give [nodes] another port"),
    (LOCAL + NODES + TLS + 'certificate_file = "/c"\n', "needs both"),
    (LOCAL + NODES + TLS + 'certificate_file = "c"\nkey_file = "/k"\n', "must be an absolute path"),
    (
        LOCAL + NODES + TLS + 'client_ca_file = "/ca"\n',
        "is for a server, which needs a certificate: set 'certificate_file'",
    ),
    (
        LOCAL
        + NODES
        + 'listener = "x"\n'
        + TLS
        + 'certificate_file = "/c"\nkey_file = "/k"\nclient_ca_file = "/ca"\n',
        "'nodes.listener' and 'client_ca_file' exclude each other",
    ),
    (LOCAL + '[nodes]\nlistener = "x"\n', "needs an address"),
    (LOCAL + NODES + 'behind_nat = ["gateway"]\n', "'gateway', which is not a network"),
    ('[cluster.c1]\nscheduler = "torque"\nspool = "/t"\n' + NODES, "needs a Slurm cluster"),
]


@pytest.mark.parametrize(("text", "what"), MISTAKES, ids=[what for _, what in MISTAKES])
def test_a_mistake_is_said(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        loaded(tmp_path, text)


def test_both_daemons_hear_nodes_where_they_are_told_to(tmp_path: Path) -> None:
    assert "nodes" in [part.name for part in make_workers(loaded(tmp_path, LOCAL + NODES))]
    assert "nodes" not in [part.name for part in make_workers(loaded(tmp_path, LOCAL))]
    forward = '[forward]\nto = "steward:6825"\n'
    parts = make_controller_workers(loaded(tmp_path, LOCAL + NODES + forward))
    assert "nodes" in [part.name for part in parts]


def test_the_agents_unit_starts_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = (PACKAGING / "steward-agent.service").read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    given = re.search(r'^# STEWARD_AGENT="(.*)"$', unit, re.MULTILINE)
    assert given is not None
    words = shlex.split(line.removeprefix("ExecStart=").replace("$STEWARD_AGENT", given[1]))
    assert words[:4] == ["/usr/bin/python3", "-I", "-S", "/usr/local/sbin/steward-agent"]
    started: list[Any] = []
    monkeypatch.setattr(agent, "run_once", started.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert agent.main(words[4:]) == 0
    (arguments,) = started
    assert arguments.user == ["slurm"]
    assert f"ReadWritePaths={arguments.spool}\n" in unit
