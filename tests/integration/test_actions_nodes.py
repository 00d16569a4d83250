"""Operations on nodes, reservations and partitions of a real cluster."""

from typing import Any

import pytest
from action_cluster import ActingSite, healthy, site
from job_submission import wait_until

__all__ = ["healthy", "site"]

# A test has a hundred commands run, each of which takes a second on a busy machine.
pytestmark = [pytest.mark.matrix, pytest.mark.wide, pytest.mark.timeout(900)]


def test_drain_and_resume(healthy: ActingSite) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    both = f"{one},{two}"
    answer = site.run("slurm.node.drain", nodes=both, reason="bad DIMM")
    assert answer["status"] == "succeeded"
    assert answer["parameters"] == {"nodes": both, "reason": "bad DIMM"}
    for name in (one, two):
        assert answer["result"][name] == {
            "old_state": "IDLE",
            "state": "IDLE+DRAIN",
            "reason": "bad DIMM (steward: carl)",
            "changed": True,
        }
        assert site.node(name)["reason"] == "bad DIMM (steward: carl)"
    again = site.result("slurm.node.drain", nodes=one, reason="bad DIMM")
    assert again[one]["changed"] is False
    back = site.result("slurm.node.resume", nodes=both)
    # Slurm asks its slurmd whether it is there before it is used.
    assert all("DRAIN" not in back[name]["state"] for name in (one, two))
    wait_until(lambda: site.node(one)["state"] == "IDLE")
    nothing = site.result("slurm.node.resume", nodes=both)
    assert not any(line["changed"] for line in nothing.values())


def test_a_dry_run_changes_nothing(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    before = site.audited()
    answer = site.run("slurm.node.drain", "--dry-run", nodes=one, reason="bad DIMM")
    assert (answer["dry_run"], answer["id"]) == (True, 0)
    assert answer["result"][one]["would_change"] is True
    assert site.node(one)["state"] == "IDLE"
    assert site.audited() == before


def test_down(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    done = site.result("slurm.node.down", by="root", nodes=one, reason="no power")
    assert done[one]["state"].startswith("DOWN")
    assert done[one]["reason"] == "no power (steward: root)"
    assert site.node(one)["state"].startswith("DOWN")
    refused = site.refused("slurm.node.drain", nodes=one, reason="x")
    assert "has the reason 'no power (steward: root)' by root: nothing changed" in refused


def test_unknown_nodes_are_refused_before_anything_changes(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    for ref, more in (
        ("slurm.node.down", {"reason": "x"}),
        ("slurm.node.drain", {"reason": "x"}),
        ("slurm.node.resume", {}),
        ("slurm.node.update", {"infos": {"weight": 3}}),
        ("slurm.node.reserve", {}),
        ("slurm.node.unreserve", {"reservation_name": "r"}),
        ("slurm.node.get", {}),
        ("slurm.node.jobs", {}),
    ):
        assert "nope" in site.refused(ref, nodes=f"{one},nope", **more), ref
    assert site.node(one)["state"] == "IDLE"


def test_a_reason_that_somebody_else_gave_stays(healthy: ActingSite) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    site.said("scontrol", "update", f"nodename={one}", "state=drain", "reason=I look at it = ada")
    for by in ("carl", "root"):
        why = site.refused("slurm.node.drain", by=by, nodes=f"{one},{two}", reason="mine")
        assert "I look at it = ada" in why
        assert "--force" in why
        assert "I look" in site.refused("slurm.node.resume", by=by, nodes=one)
        assert "I look" in site.refused("slurm.node.down", by=by, nodes=one, reason="mine")
        for name in ("state", "STATE", "node_state", "NodeState", "state_up", "st_ate"):
            infos = {name: "RESUME"}
            assert "I look" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
        infos = {"state_up": "RESUME", "state": "DRAIN", "reason": "x"}
        assert "given twice" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
        infos = {"reason": "mine"}
        assert "I look" in site.refused("slurm.node.update", by=by, nodes=one, infos=infos)
    assert site.node(two)["state"] == "IDLE"
    done = site.result("slurm.node.drain", "--force", nodes=one, reason="mine")
    assert done[one]["reason"] == "mine (steward: carl)"
    # carl's now, which root's is not.
    assert "mine" in site.refused("slurm.node.resume", by="root", nodes=one)
    assert "DRAIN" not in site.result("slurm.node.resume", nodes=one)[one]["state"]


def test_a_reason_that_a_resume_left_is_nobodys(healthy: ActingSite) -> None:
    """Slurm 24.11 leaves the reason; if it removes the reason, nothing is kept."""
    site, one = healthy, healthy.nodes[0]
    site.said("scontrol", "update", f"nodename={one}", "state=drain", "reason=fan")
    site.said("scontrol", "update", f"nodename={one}", "state=resume")
    is_left = site.node(one)["reason"] is not None
    done = site.result("slurm.node.drain", nodes=one, reason="disk")
    behind = "; was: fan" if is_left else ""
    assert done[one]["reason"] == f"disk{behind} (steward: carl)"


def test_slurmctlds_own_reason_is_kept_behind(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    words = ["scontrol", "update", f"nodename={one}", "state=down", "reason=Not responding"]
    site.cluster.run(words, user="slurm")
    done = site.result("slurm.node.drain", nodes=one, reason="cable")
    assert done[one]["reason"] == "cable; was: Not responding (steward: carl)"


def test_update_of_nodes(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    done = site.result("slurm.node.update", nodes=one, infos={"weight": 7, "comment": "on loan"})
    assert done[one]["changed"] is True
    assert site.node(one)["weight"] == 7
    site.result("slurm.node.update", nodes=one, infos={"state": "drain", "reason": "by update"})
    assert site.node(one)["reason"] == "by update (steward: carl)"
    site.result("slurm.node.resume", nodes=one)
    assert "reason" in site.refused("slurm.node.update", nodes=one, infos={"state": "drain"})
    assert "nodename" in site.refused("slurm.node.update", nodes=one, infos={"nodename": "node2"})
    assert site.node(one)["weight"] == 7
    site.result("slurm.node.update", nodes=one, infos={"weight": 1, "comment": ""})


def test_reserve_and_unreserve(healthy: ActingSite) -> None:
    site, (one, two, *_) = healthy, healthy.nodes
    assert site.result("slurm.node.reserve", nodes=one)["reservation_name"] == "steward"
    assert site.result("slurm.node.unreserve", nodes=one)["deleted"]
    made = site.result("slurm.node.reserve", by="olga", nodes=one, reservation_name="repair")
    assert (made["created"], made["nodes"]) == (True, one)
    shown = site.said("scontrol", "-o", "show", "reservation", "repair")
    assert "Users=root" in shown
    for flag in ("MAINT", "IGNORE_JOBS", "OVERLAP"):
        assert flag in shown
    more = site.result("slurm.node.reserve", nodes=f"{one},{two}", reservation_name="repair")
    assert (more["created"], more["changed"]) == (False, True)
    assert site.cluster.run(["scontrol", "show", "reservation"]).stdout.count("repair") == 1
    same = site.result("slurm.node.reserve", nodes=two, reservation_name="repair")
    assert same["changed"] is False
    less = site.result("slurm.node.unreserve", nodes=one, reservation_name="repair")
    assert (less["nodes"], less["deleted"]) == (two, False)
    gone = site.result("slurm.node.unreserve", nodes=two, reservation_name="repair")
    assert gone["deleted"] is True
    assert "repair" not in site.cluster.run(["scontrol", "show", "reservation"]).stdout
    assert "repair" in site.refused("slurm.node.unreserve", nodes=two, reservation_name="repair")


def test_a_reservation_with_props(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    props = {"start_time": "now+1hour", "duration": 60, "users": ["ada"], "flags": "OVERLAP"}
    site.result("slurm.node.reserve", nodes=one, reservation_name="class", props=props)
    shown = site.said("scontrol", "-o", "show", "reservation", "class")
    assert "Users=ada" in shown
    assert "Duration=01:00:00" in shown
    assert "MAINT" not in shown
    site.result("slurm.node.unreserve", nodes=one, reservation_name="class")
    wrong: dict[str, Any] = {"nodes": one, "reservation_name": "x", "props": {"until": "never"}}
    assert "until" in site.refused("slurm.node.reserve", **wrong)
    failed = site.run("slurm.node.reserve", **{**wrong, "props": {"users": "nosuchuser"}})
    assert failed["status"] == "failed"


def test_partition(healthy: ActingSite) -> None:
    site = healthy
    done = site.result("slurm.partition.update", partition="debug", infos={"state": "DOWN"})
    assert (done["old_state"], done["state"]) == ("UP", "DOWN")
    site.result("slurm.partition.update", partition="debug", infos={"state": "UP"})
    wrong: dict[str, Any] = {"partition": "nope", "infos": {"state": "UP"}}
    assert "nope" in site.refused("slurm.partition.update", **wrong)
    bad = {"nodename": "x"}
    assert "nodename" in site.refused("slurm.partition.update", partition="debug", infos=bad)
