"""Rejected agents appear in doctor and status with the reason, not only in the log."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.doctor import DoctorSite, only, site
from harness.nodes import HearingSite, line
from harness.site import ROOT
from servers.authority import Authority
from steward.admin.doctor import data_checks
from steward.admin.status.requests import StatusShowRequest
from steward.capture.nodes.node_reports import AgentRefusals, read_refusals
from steward.capture.settings import NodesSettings
from steward.daemon.contexts import make_registry
from steward.web.pages.status import StatusProblem, list_problems

__all__ = ["site"]


@pytest.fixture
def hearing(tmp_path: Path) -> Iterator[HearingSite]:
    hearing = HearingSite(tmp_path, Authority(tmp_path / "authority"))
    yield hearing
    hearing.close()


def test_a_refusal_is_noted_until_that_host_is_heard(hearing: HearingSite, tmp_path: Path) -> None:
    state = hearing.settings.state_dir
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "n1.log").write_bytes(line("start") + line("end"))

    def wait_for(count: int) -> None:
        end = time.monotonic() + 60
        while len(read_refusals(state)) != count:
            assert time.monotonic() < end, read_refusals(state)
            time.sleep(0.05)

    assert hearing.run_agent(spool, name="n2") == 1
    wait_for(1)
    (refusal,) = read_refusals(state)
    assert refusal.address == "127.0.0.1"
    assert "the certificate is for n2, not for n1" in refusal.why
    assert hearing.run_agent(spool) == 0
    wait_for(0)


def test_doctor_and_status_tell_refusals(site: DoctorSite) -> None:
    state = site.directory / "state"
    state.mkdir(mode=0o700)
    site.reopen(nodes=NodesSettings(listen="127.0.0.1:6826"))
    refusals = AgentRefusals(str(state))
    refusals.add(
        "10.0.0.7", "the MUNGE credential was made on 127.0.1.1, but node n7 is at 10.0.0.7"
    )
    refusals.add("10.0.0.8", "cluster c1 has no node 'n8'")
    refusals.write()
    found = {one.object: one for one in data_checks.check_agents(site.ground())}
    assert {one.status for one in found.values()} == {"warning"}
    assert "was made on 127.0.1.1" in found["10.0.0.7"].finding
    assert any("--origin" in line for line in found["10.0.0.7"].fix)
    assert any("docs/nodes.md" in line for line in found["10.0.0.8"].fix)
    assert set(found) == {"10.0.0.7", "10.0.0.8"}, "not that the timer should be enabled"
    room = make_registry(site.settings)
    shown = room.call("status.show", ROOT, StatusShowRequest())
    assert shown.rejected.keys() == {"10.0.0.7", "10.0.0.8"}
    assert StatusProblem(
        "warning", "agent 10.0.0.8", "rejected: cluster c1 has no node 'n8'"
    ) in list_problems(shown)
    # Another daemon continues with the reports of the one before.
    again = AgentRefusals(str(state))
    again.drop("10.0.0.7")
    again.write()
    assert [one.address for one in read_refusals(str(state))] == ["10.0.0.8"]


def test_addresses_without_end_are_not_kept(tmp_path: Path) -> None:
    refusals = AgentRefusals(str(tmp_path))
    for number in range(200):
        refusals.add(f"10.0.0.{number}", "no")
    refusals.write()
    kept = [one.address for one in read_refusals(str(tmp_path))]
    assert len(kept) == 64
    assert kept[-1] == "10.0.0.199"


def test_a_listener_that_is_away_is_a_finding(site: DoctorSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        nodes = NodesSettings(listen=listen, listener="steward-listen")
        site.reopen(nodes=nodes)
        assert "no node has ever reported" in only(data_checks.check_agents(site.ground())).finding
    found = only(data_checks.check_agents(site.ground()))
    assert (found.status, found.object) == ("wrong", "listener")
    assert "systemctl enable --now steward-listen" in found.fix
