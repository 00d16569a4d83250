"""Directory of the gate's socket: slurmctld runs as another user and must be able to enter it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.gate import CLUSTER, account, rules, running, settings_of
from steward.bank.gate import plugin_conf
from steward.bank.gate.policy import GateRules
from steward.bank.records import ModeRule
from steward.bank.settings import BankPartitionSettings


@pytest.fixture
def private() -> Iterator[None]:
    """Make a directory as root's daemon creates it, private to root."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private")
def test_what_is_made_is_open_whatever_the_umask(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), run_dir=f"{tmp_path}/run")
    with running(settings) as running_gate:
        running_gate.tell(account("chem", 9))
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_one_that_is_closed_is_left_so_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        plugin_conf.make_shared_directory(str(tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert f"chmod o+x {tmp_path}" in caplog.text


def test_a_job_of_an_unknown_partition_is_denied_only_if_every_partition_is(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    denying = msgspec.structs.replace(
        settings, gate=msgspec.structs.replace(settings.gate, policy="deny")
    )
    assert not plugin_conf.is_denied_everywhere(settings)
    assert plugin_conf.is_denied_everywhere(denying)
    ground = GateRules(denying)
    for mode, more, is_denied in (
        ("enforce", (), True),
        ("enforce", (ModeRule(mode="observe", cluster=CLUSTER, partition="main"),), False),
        ("observe", (), False),
        ("off", (ModeRule(mode="enforce", account="chem"),), True),
    ):
        ground.put_rules(rules(mode, *more))
        assert plugin_conf.write_plugin_conf(ground)
        assert plugin_conf.is_denied_everywhere(denying) == is_denied, mode
    allowing = GateRules(
        settings_of(tmp_path / "other", partition={"main": BankPartitionSettings(policy="deny")})
    )
    assert plugin_conf.write_plugin_conf(allowing)
    assert not plugin_conf.is_denied_everywhere(allowing.settings)


def test_a_partition_that_would_be_more_than_a_word_is_not_written(tmp_path: Path) -> None:
    ground = GateRules(settings_of(tmp_path))
    names = ("main", "a b", "x\noff_file /", "y#", "")
    more = [ModeRule(mode="off", partition=name) for name in names]
    ground.put_rules(rules("enforce", *more))
    lines = plugin_conf.format_plugin_conf(ground).splitlines()
    assert [line for line in lines if line.startswith("partition")] == ["partition main observe"]
    assert sum(line.startswith("off_file") for line in lines) == 1
