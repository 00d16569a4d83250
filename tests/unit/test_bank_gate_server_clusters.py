"""Questions without a cluster: they concern the only one; among several the gate rejects them."""

import logging
from pathlib import Path

import pytest

from harness.gate import CLUSTER, account, job, running, settings_of
from steward.bank.gate.requests import PluginRequest
from steward.bank.gate.server import ClusterNames

ASK = PluginRequest(v=1, op="submit", cluster="", job=job(9))


def test_a_job_of_no_cluster_is_refused_as_the_only_ones(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 30))
        assert not gate.ask(job(99), cluster="")["ok"]
        assert "steward=1." in gate.ask(job(9), cluster="")["admin_comment"]
        assert [hold.cluster for hold in gate.link.list_holds()] == [CLUSTER]


def test_of_several_it_is_said_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    clusters = ClusterNames(["two", "one"])
    with caplog.at_level(logging.ERROR):
        assert clusters.add_name(ASK) is ASK
        assert clusters.add_name(ASK) is ASK
    (line,) = [record.getMessage() for record in caplog.records]
    assert "one, two" in line
    assert 'steward_gate_cluster = "NAME"' in line
    assert ClusterNames(["one"]).add_name(ASK).cluster == "one"
