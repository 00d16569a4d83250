"""Pages of rules and of Steward's status, with private nodes and two clusters."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_submission import wait_until
from web_site import ADMINISTRATOR, OPERATOR, USERS, Visitor, WebSite

from steward.automation.settings import RulesSettings
from steward.capture.settings import SensorSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]

RULE = """
name: tell_of_drains
description: "Says <b>what</b> it would do."
enabled: true
trigger:
  type: slurm.node.state
criteria:
  trigger.state: {type: contains, pattern: DRAIN}
action:
  ref: slurm.node.get
  parameters:
    nodes: "{{ trigger.node }}"
context:
  steward:
    dry_run: true
"""


OWN_PATH = {"url": "http://127.0.0.1/steward", "own_host": True}


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    spec = SandboxSpec(slurm=slurm_version, user_names=USERS, private_data="nodes,reservations")
    with Sandbox.up(spec, report=print) as box:
        yield box


@pytest.fixture(scope="module")
def site(cluster: Sandbox) -> Iterator[WebSite]:
    rules = Path(cluster.directory) / "rules.d"
    rules.mkdir(mode=0o755)
    (rules / "tell.yaml").write_text(RULE)
    (rules / "wrong.yaml").write_text("name: [oops\n")
    settings = {
        "sensor": SensorSettings(enabled=True, interval_s=0.3, helper=""),
        "rules": RulesSettings(mode="on", directories=(str(rules),)),
    }
    home = Path(cluster.directory) / "steward"
    with WebSite(cluster, home, settings=settings, web=OWN_PATH) as site:
        yield site


def below(site: WebSite, user: str) -> Visitor:
    """Return a user of the pages at the address in [web] url."""
    visitor = site.visitor(user)
    visitor.base_url = f"{site.url}/steward"
    return visitor


@pytest.fixture(scope="module")
def ada(site: WebSite) -> Visitor:
    return below(site, "ada")


@pytest.fixture(scope="module")
def olga(site: WebSite) -> Visitor:
    return below(site, OPERATOR)


@pytest.fixture(scope="module")
def carl(site: WebSite) -> Visitor:
    return below(site, ADMINISTRATOR)


def test_nodes_that_are_private_are_shown_to_operators_alone(
    site: WebSite, ada: Visitor, olga: Visitor
) -> None:
    wait_until(lambda: "node1" in olga.page("/cluster"))
    for path in ("/cluster", "/cluster/box", "/nodes/box/node1", "/nodes/box/node1?at=now-1hour"):
        text = ada.page(path)
        assert "Only operators see the nodes" in text, path
        assert not re.search(r"node[2-4]|IDLE", text), path
    for path in ("/", "/events", "/events?nodes=node1"):
        assert "node1</a>" not in ada.page(path)
    assert "node1</a>" in olga.page("/events")


def test_a_rule_that_acted_is_shown_with_what_it_did(
    site: WebSite, ada: Visitor, olga: Visitor, carl: Visitor
) -> None:
    assert "Says &lt;b&gt;what&lt;/b&gt; it would do." in olga.page("/rules")
    assert "wrong.yaml" in olga.page("/rules")
    site.daemon.ask("action", "run", "slurm.node.drain", "nodes=node3", "reason=look")
    wait_until(lambda: "node3" in olga.page("/rules?rule=tell_of_drains&status=dry-run"))
    found = re.search(
        r'href="/steward(/rules/executions/\d+)"', olga.page("/rules?rule=tell_of_drains")
    )
    assert found
    text = olga.page(found[1])
    for one in ("slurm.node.get", "node3", "dry-run", "slurm.node.state"):
        assert one in text, one
    wait_until(lambda: "rule tell_of_drains" in olga.page("/events?kinds=rule.execution"))
    # Operators find drains of others in the audit log, other users only their own actions.
    assert "reason=look" in carl.page("/actions?action=slurm.node.drain")
    assert "reason=look" not in ada.page("/actions")


def test_administrators_switch_rules(ada: Visitor, olga: Visitor, carl: Visitor) -> None:
    fields = {"rule": "tell_of_drains", "to": "off"}
    assert "/rules/switch" not in olga.page("/rules")
    for visitor in (ada, olga):
        assert visitor.submit("/rules/switch", **fields).status_code == 403
    for _ in range(2):
        answer = carl.submit("/rules/switch", **fields)
        assert (answer.status_code, answer.headers["location"]) == (303, "/steward/rules")
    assert "<td>carl</td>" in olga.page("/rules")
    assert carl.submit("/rules/switch", rule="tell_of_drains", to="on").status_code == 303
    assert carl.submit("/rules/switch", rule="nope", to="on").status_code in (400, 404)
    assert carl.submit("/rules/switch", rule="tell_of_drains", to="x").status_code == 400


def test_all_links_have_the_prefix(olga: Visitor) -> None:
    for path in ("/", "/cluster", "/nodes/box/node1", "/events", "/rules", "/actions", "/status"):
        text = olga.page(path)
        for link in re.findall(r'(?:href|action|src|hx-get|data-live)="?([^" >]+)', text):
            assert link.startswith(("/steward/", "#")), (path, link)


def test_the_daemon_away_is_one_line_and_watching_goes_on(site: WebSite, olga: Visitor) -> None:
    page = olga.page("/events")
    where = re.search(r'data-live="/steward([^"]+)"', page)
    assert where
    with olga.stream("GET", where[1].replace("&amp;", "&")) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        site.daemon.stop()
        wait_until(lambda: olga.get("/cluster").status_code == 503)
        assert "does not answer" in olga.get("/status").text
        site.daemon.start()
        site.daemon.ask("action", "run", "slurm.node.drain", "nodes=node4", "reason=again")
        assert any("again" in line for line in lines)
    wait_until(lambda: olga.get("/status").status_code == 200)


def test_figures_come_without_a_login(site: WebSite) -> None:
    with site.stranger() as stranger:
        assert "steward_" in stranger.get("/metrics").text
        for name in ("Forwarded", "Via", "X-Real-IP"):
            assert stranger.get("/metrics", headers={name: "x"}).status_code == 403
