"""Rules on a real Slurm: a node fails, a rule acts, the history records it; also in a storm."""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_submission import wait_until
from rules_daemon import Ruling, Storm
from sandboxes import passable_directory

from steward.automation.rules.store import RulesStore
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

FLAPPING = 97
"""Number of nodes that exist only in the configuration, beside three real ones."""

EXTRA = (
    # On a busy machine a slurmd may be silent for some seconds; that would be one failure more.
    "SlurmdTimeout=10",
    # A node that an administrator sets down stays down, though its slurmd answers.
    "ReturnToService=1",
    f"NodeName=made[1-{FLAPPING}] NodeAddr=127.0.0.1 Port=9 CPUs=1 RealMemory=100 State=DOWN",
)

MAILS = 200
"""Number of mails that the storm's rule may send, at a tenth of a second each."""

DRAIN = """
name: drain_failed
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed: {type: equals, pattern: true}
action:
  ref: slurm.node.drain
  parameters:
    nodes: "{{ trigger.node }}"
    reason: "failed, look at it"
context:
  steward:
    retries: 2
    backoff: 1s
    most_nodes_percent: 5
    rate_limit: RATE
"""

MAIL = """
name: mail_failed
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.failed: {type: equals, pattern: true}
action:
  ref: notify.email
  parameters:
    to: [root]
    subject: "{{ trigger.node }} failed"
    body: "why: {{ trigger.reason }}, event {{ trigger.at }}"
context:
  steward:
    rate_limit: RATE
"""


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a cluster for this module, with many nodes that have no slurmd."""
    with Sandbox.up(SandboxSpec(nodes=3, slurm=slurm_version, extra=EXTRA)) as box:
        yield box


@pytest.fixture
def home() -> Iterator[Path]:
    with passable_directory() as path:
        yield path


def heal(cluster: Sandbox) -> None:
    """Undo the drains of rules, and start killed slurmds."""
    for name, pid in cluster.get_status().items():
        if name.startswith("slurmd.") and not pid:
            cluster.start_service(name)
    for nodes in ("node[1-3]", f"made[1-{FLAPPING}]"):
        for state in ("resume", "undrain"):
            cluster.run(["scontrol", "update", f"nodename={nodes}", f"state={state}"], check=False)


def test_a_node_goes_down_and_a_rule_acts(cluster: Sandbox, home: Path) -> None:
    drain, mail = (text.replace("RATE", "100/1h") for text in (DRAIN, MAIL))
    daemon = Ruling(cluster, home / "home", drain, mail)
    try:
        daemon.start()
        wait_until(lambda: "node1" in daemon.replayed(), 60)
        cluster.stop_service("slurmd.node1", signal.SIGKILL)
        wait_until(lambda: len(daemon.history("--status", "ended")) == 2, 90)
        by_rule = {one["rule"]: one for one in daemon.history()}
        assert by_rule["drain_failed"]["status"] == "succeeded"
        assert by_rule["drain_failed"]["parameters"]["nodes"] == "node1"
        assert by_rule["drain_failed"]["audit"] > 0
        assert by_rule["mail_failed"]["status"] == "succeeded"
        assert daemon.drained_by_rules() == {"node1"}
        shown = str(cluster.run(["scontrol", "-o", "show", "node", "node1"]).stdout)
        reason = shown.split("Reason=", 1)[1]
        assert reason.startswith("failed, look at it")
        assert "(steward: rule drain_failed)" in reason
        # The same state with another reason is no failure once more.
        wait_until(lambda: "DRAIN" in daemon.replayed()["node1"], 60)
        assert len(daemon.history()) == 2
        wait_until(lambda: len(daemon.told()) >= 2)
        assert [event.body.status for event in daemon.told()] == ["succeeded", "succeeded"]
        # Reasons of others are hostile text, and their drains stay theirs.
        said = "{{ 7 * 7 }} {% raw %} $(id) `id`; |"
        down = ["scontrol", "update", "nodename=node2", "state=down", f"reason={said}"]
        cluster.run(down)
        wait_until(lambda: len(daemon.history("--status", "ended")) == 4, 90)
        refused, mailed = (
            next(one for one in daemon.history("--rule", rule) if one["id"] > 2)
            for rule in ("drain_failed", "mail_failed")
        )
        assert refused["status"] == "failed"
        assert "--force" in refused["message"]
        assert mailed["status"] == "succeeded"
        assert any(f"why: {said}, event" in mail for mail in daemon.mailed())
        shown = str(cluster.run(["scontrol", "-o", "show", "node", "node2"]).stdout)
        assert f"Reason={said}" in shown
        # Switched off, a rule does nothing more.
        daemon.ask("rules", "disable", "mail_failed")
        listed = {one["rule"]: one for one in daemon.ask_json("rules", "list")["rules"]}
        assert listed["mail_failed"]["enabled"] is False
        assert listed["mail_failed"]["executions"] == 2
    finally:
        daemon.close()
        heal(cluster)


def test_what_a_kill_left_open_is_looked_up_once(cluster: Sandbox, home: Path) -> None:
    drain, mail = (text.replace("RATE", "100/1h") for text in (DRAIN, MAIL))
    again = mail.replace("mail_failed", "mail_again").replace('failed"', 'failed again"')
    again = f"{again}    on_unknown: repeat\n"
    store = home / "sensor"
    store.mkdir()
    daemon = Ruling(cluster, home / "home", drain, mail, again, sensor=False, timeout_s=60.0)
    try:
        daemon.start()
        wait_until(lambda: "rules loaded, 3 enabled" in daemon.log(), 60)
        daemon.hang.touch()
        cluster.stop_service("slurmctld", signal.SIGSTOP)
        storm = Storm(daemon, store, ["made1"])
        assert list(storm.rage(1)) == [1, 2]
        # Both mails are sent, and that is not recorded; the drain waits for slurmctld.
        wait_until(lambda: len(daemon.mailed()) == 2, 60)
        assert {one["phase"] for one in daemon.history("--rule", "mail_failed")} == {"started"}
        daemon.stop(signal.SIGKILL)
        daemon.hang.unlink()
        cluster.stop_service("slurmctld", signal.SIGCONT)
        daemon.start()
        wait_until(lambda: len(daemon.history("--status", "ended")) == 3, 120)
        by_rule = {one["rule"]: one for one in daemon.history()}
        assert {rule: one["status"] for rule, one in by_rule.items()} == {
            "drain_failed": "succeeded",
            "mail_failed": "unknown",
            "mail_again": "succeeded",
        }
        subjects = Counter("again" in mail for mail in daemon.mailed())
        assert subjects == {False: 1, True: 2}
        assert daemon.drained_by_rules() == {"made1"}
        wait_until(lambda: len(daemon.told()) == 3)
    finally:
        cluster.stop_service("slurmctld", signal.SIGCONT)
        daemon.close()
        heal(cluster)


TAKING = {
    "reserve": (
        "slurm.node.reserve",
        '{nodes: "{{ trigger.node }}", reservation_name: "r_{{ trigger.node }}"}',
    ),
    "update": (
        "slurm.node.update",
        '{nodes: "{{ trigger.node }}", infos: {node_state: DRAIN, reason: looks bad}}',
    ),
}
"""Actions that take nodes out of service other than by a drain."""


@pytest.mark.parametrize("how", TAKING)
def test_a_cap_holds_however_nodes_are_taken(cluster: Sandbox, home: Path, how: str) -> None:
    action, parameters = TAKING[how]
    rule = DRAIN.replace("RATE", "100/1h").replace("most_nodes_percent: 5", "most_nodes_percent: 2")
    rule = rule.replace("slurm.node.drain", action)
    head, _, tail = rule.partition("  parameters:")
    rule = f"{head}  parameters: {parameters}\ncontext:{tail.partition('context:')[2]}"
    store = home / "sensor"
    store.mkdir()
    daemon = Ruling(cluster, home / "home", rule, sensor=False)
    nodes = ["made1", "made2", "made3", "made4", "made5"]
    try:
        daemon.start()
        wait_until(lambda: "rules loaded, 1 enabled" in daemon.log(), 60)
        for _ in Storm(daemon, store, nodes).rage(3):
            time.sleep(1)
        wait_until(lambda: len(daemon.history("--status", "ended")) == 10, 90)
        done = [one for one in daemon.history() if one["status"] == "succeeded"]
        assert len({one["parameters"]["nodes"] for one in done}) == 2, daemon.history()
        held = [one["message"] for one in daemon.history() if one["status"] == "held-back"]
        assert all("the limit of 2 % allows 2" in message for message in held)
        assert len(held) == 10 - len(done)
    finally:
        daemon.close()
        for node in nodes:
            cluster.run(["scontrol", "delete", f"reservationname=r_{node}"], check=False)
        heal(cluster)


def until_busy(daemon: Ruling) -> None:
    """Wait until an action runs, if one does."""
    store = RulesStore(str(daemon.state), read_only=True)
    until = time.monotonic() + 2
    while not store.list_by_phase("started") and time.monotonic() < until:
        time.sleep(0.001)
    store.close()


@pytest.mark.wide
@pytest.mark.parametrize("kills", [0, 6])
def test_a_storm_of_node_events(cluster: Sandbox, home: Path, kills: int) -> None:
    """5,000 events in a minute: each rule decides once on each failure, within its limits."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    drain, mail = DRAIN.replace("RATE", "150/1h"), MAIL.replace("RATE", f"{MAILS}/1h")
    store = home / "sensor"
    store.mkdir()
    daemon = Ruling(cluster, home / "home", drain, mail, sensor=False, most_nodes_percent=4)
    nodes = [f"node{number}" for number in range(1, 4)]
    nodes += [f"made{number}" for number in range(1, FLAPPING + 1)]
    looks = 50
    dying = set(chance.sample(range(1, looks), kills))
    began = time.monotonic()
    try:
        daemon.start()
        wait_until(lambda: "rules loaded, 2 enabled" in daemon.log(), 60)
        storm = Storm(daemon, store, nodes)
        for look, _ in enumerate(storm.rage(looks)):
            if look in dying:
                until_busy(daemon)
                time.sleep(chance.random() / 20)
                daemon.stop(signal.SIGKILL)
                daemon.start()
        took_s = time.monotonic() - began
        assert storm.told.total() >= 5000
        failures = storm.told[True]
        assert failures == len(nodes) * looks // 2
        wait_until(lambda: len(daemon.history("--status", "ended")) == 2 * failures, 240)
        history = daemon.history()
        # Once each: a rule, and an event that it is about.
        assert len({(one["rule"], one["event"]) for one in history}) == len(history) == 2 * failures
        wait_until(lambda: len(daemon.told()) == len(history), 60)
        told = Counter((e.body.rule, e.body.event, e.body.status) for e in daemon.told())
        assert told == Counter((one["rule"], one["event"], one["status"]) for one in history)
        # Limits: four of a hundred nodes, and so many mails in an hour, despite kills.
        assert 0 < len(daemon.drained_by_rules()) <= 4
        acted = Counter(one["rule"] for one in history if one["status"] != "held-back")
        assert acted["mail_failed"] == MAILS
        statuses = Counter((one["rule"], one["status"]) for one in history)
        print(f"{storm.told.total()} events in {took_s:.1f} s, {kills} kills: {dict(statuses)}")
        print({one["message"] for one in history if one["status"] == "failed"})
        # No mail was sent twice, and of none but those it says so is it unknown.
        sent = Counter(daemon.mailed())
        assert sent.most_common(1)[0][1] == 1
        sure, unsure = (statuses["mail_failed", word] for word in ("succeeded", "unknown"))
        assert sure + unsure == MAILS
        assert sure <= sent.total() <= sure + unsure
        assert bool(unsure) <= bool(kills)
        assert unsure <= kills
    finally:
        daemon.close()
        heal(cluster)
