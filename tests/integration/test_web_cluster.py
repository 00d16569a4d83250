"""Pages of a real cluster, its nodes and events: content, changes, permissions."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from job_submission import state_of, submit_to, wait_until
from web_site import ADMINISTRATOR, OPERATOR, USERS, Visitor, WebSite

from steward.capture.settings import SensorSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.timeout(900)

HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    with Sandbox.up(SandboxSpec(slurm=slurm_version, user_names=USERS), report=print) as box:
        yield box


@pytest.fixture(scope="module")
def site(cluster: Sandbox) -> Iterator[WebSite]:
    sensor = SensorSettings(enabled=True, interval_s=0.3, helper="", usage=True)
    with WebSite(cluster, Path(cluster.directory) / "steward", settings={"sensor": sensor}) as site:
        visitor = site.visitor("ada")
        wait_until(lambda: node(1) in visitor.page("/cluster"))
        yield site


@pytest.fixture(scope="module")
def ada(site: WebSite) -> Visitor:
    return site.visitor("ada")


@pytest.fixture(scope="module")
def olga(site: WebSite) -> Visitor:
    return site.visitor(OPERATOR)


@pytest.fixture(scope="module")
def carl(site: WebSite) -> Visitor:
    return site.visitor(ADMINISTRATOR)


def node(number: int) -> str:
    return f"node{number}"


def page_of(name: str) -> str:
    return f"/nodes/box/{name}"


def has(visitor: Visitor, path: str, *texts: str) -> bool:
    text = visitor.page(path)
    return all(one in text for one in texts)


def plain(text: str) -> str:
    """Return the text of a page."""
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def change(visitor: Visitor, verb: str, **fields: str) -> httpx.Response:
    """Submit the form and confirm the preview; return the reply."""
    asked = visitor.submit("/cluster/box/change", verb=verb, **fields)
    assert asked.status_code == 200, plain(asked.text)
    assert "Preview of the changes" in asked.text
    return visitor.submit("/cluster/box/change", verb=verb, sure="yes", **fields)


def test_every_page_is_there(site: WebSite, ada: Visitor, olga: Visitor) -> None:
    for path in ("/", "/cluster", "/cluster/box", page_of(node(1)), "/events", "/actions"):
        for visitor in (ada, olga):
            text = visitor.page(path)
            assert text.count("<h1>") == 1, path
            assert "style=" not in text
            assert "<script>" not in text
    for path in ("/rules", "/status", "/status/gaps"):
        assert olga.page(path).count("<h1>") == 1
        assert ada.get(path).status_code == 403, path
    assert "Status of Steward" in olga.page("/")
    assert "Status of Steward" not in ada.page("/")
    for path in (
        "/cluster/nope",
        "/nodes/box/nope",
        "/nodes/nope/node1",
        "/actions/1",
        "/actions/-1",
    ):
        assert ada.get(path).status_code == 404, path
    for path in (
        *("/events?kinds=nonsense", "/events?before=x", "/events?nodes=n%5b", "/events?nodes=@all"),
        *("/events?since=yesterdayish", "/cluster?at=x", "/cluster?offset=-1", "/nodes/box/n%5b"),
        *("/nodes/box/node1?at=x", "/events/stream?nodes=n%5b", "/cluster?at=" + "x" * 5000),
        *("/events?clusters=nope", "/actions?before=x"),
    ):
        answer = ada.get(path)
        assert answer.status_code == 400, (path, plain(answer.text))
        assert 'role="alert"' in answer.text


@pytest.mark.wide
def test_a_node_is_drained_with_a_reason_seen_by_all_and_resumed(
    site: WebSite, ada: Visitor, carl: Visitor
) -> None:
    one = node(1)
    page = carl.page(page_of(one))
    assert "/cluster/box/change?verb=drain" in page
    form = carl.page(f"/cluster/box/change?verb=drain&nodes={one}")
    assert f'value="{one}"' in form
    # The change was not confirmed, so nothing is changed.
    sure = carl.submit("/cluster/box/change", verb="drain", nodes=one, reason=HOSTILE.strip())
    assert "<script>alert" not in sure.text
    assert re.search(rf"{one} yes IDLE .*Drain {one}", plain(sure.text))
    assert "DRAIN" not in site.daemon.ask("action", "run", "slurm.node.get", f"nodes={one}").stdout
    done = change(carl, "drain", nodes=one, reason="<b>bad</b> DIMM")
    assert done.status_code == 303
    where = done.headers["location"]
    assert re.fullmatch(r"/actions/\d+", where)
    told = carl.page(where)
    assert "succeeded" in told
    assert "&lt;b&gt;bad&lt;/b&gt; DIMM" in told
    assert one in plain(told)
    # A second click gets the answer that the node is drained already.
    again = change(carl, "drain", nodes=one, reason="<b>bad</b> DIMM")
    assert "no: already in this state" in carl.page(again.headers["location"])
    wait_until(lambda: has(ada, page_of(one), "IDLE+DRAIN", "&lt;b&gt;bad&lt;/b&gt; DIMM"))
    assert has(ada, "/cluster", "drained", "&lt;b&gt;bad&lt;/b&gt; DIMM")
    assert has(ada, "/cluster?state=drained", one)
    assert f">{node(2)}</a></th>" not in ada.page("/cluster?state=drained")
    # Others see neither that action nor its form's way in.
    assert ada.get(where).status_code == 404
    assert "/change" not in ada.page(page_of(one))
    back = change(carl, "resume", nodes=one)
    assert "succeeded" in carl.page(back.headers["location"])
    wait_until(lambda: has(ada, page_of(one), '"state state-idle" title="idle">IDLE<'))
    text = plain(ada.page(page_of(one)))
    assert "IDLE -&gt; IDLE+DRAIN" in text
    events = plain(ada.page(f"/events?nodes={one}&kinds=node.state"))
    assert "IDLE -&gt; IDLE+DRAIN" in events
    assert plain(ada.page(f"/events?nodes={node(2)}")).count("DRAIN") == 0


@pytest.mark.wide
def test_who_may_not_is_told_so_by_the_daemon(site: WebSite, ada: Visitor, olga: Visitor) -> None:
    one = node(2)
    for visitor, verb, more in (
        (ada, "drain", {"reason": "x"}),
        (ada, "resume", {}),
        (ada, "down", {"reason": "x"}),
        (ada, "reserve", {"reservation_name": "r"}),
        (olga, "drain", {"reason": "x"}),
        (olga, "down", {"reason": "x"}),
    ):
        for sure in ({}, {"sure": "yes"}):
            answer = visitor.submit("/cluster/box/change", verb=verb, nodes=one, **more, **sure)
            assert answer.status_code == 400, (visitor.user, verb, plain(answer.text))
            assert 'role="alert"' in answer.text
    shown = site.daemon.ask("action", "run", "slurm.node.get", f"nodes={one}").stdout
    assert "DRAIN" not in shown
    assert "DOWN" not in shown
    page = olga.page(page_of(one))
    assert "verb=reserve" in page
    assert "verb=drain" not in page
    # Without the token of a page of theirs not even an administrator.
    bare = olga.post("/cluster/box/change", data={"verb": "reserve", "nodes": one, "sure": "yes"})
    assert bare.status_code == 403


@pytest.mark.wide
def test_what_is_wrong_in_a_form_is_said_and_nothing_is_lost(carl: Visitor) -> None:
    for fields in (
        {"nodes": "node1,nope", "reason": "why not"},
        {"nodes": "n[", "reason": "why not"},
        {"nodes": "", "reason": "why not"},
        {"nodes": "node1", "reason": "  "},
        {"nodes": "node1", "reason": "x" * 3000},
    ):
        answer = carl.submit("/cluster/box/change", verb="drain", **fields)
        assert answer.status_code == 400, fields
        assert 'role="alert"' in answer.text
        if fields["reason"] == "why not":
            assert 'value="why not"' in answer.text
    assert carl.submit("/cluster/box/change", verb="explode", nodes="node1").status_code == 404
    assert carl.get("/cluster/box/change?verb=").status_code == 404


@pytest.mark.wide
def test_nodes_are_reserved_and_shown_so(ada: Visitor, olga: Visitor) -> None:
    fields = {"nodes": node(3), "reservation_name": "maint1", "duration": "60"}
    done = change(olga, "reserve", **fields)
    assert "succeeded" in olga.page(done.headers["location"])
    wait_until(lambda: has(ada, "/cluster", "maint1"))
    row = re.search(r"<tr><th scope=\"row\">maint1.*?</tr>", ada.page("/cluster"), re.DOTALL)
    assert row
    assert node(3) in row[0]
    assert "ACTIVE" in row[0]
    done = change(olga, "unreserve", nodes=node(3), reservation_name="maint1")
    assert "succeeded" in olga.page(done.headers["location"])
    wait_until(lambda: not has(ada, "/cluster", ">maint1<"))


@pytest.mark.wide
def test_jobs_of_a_node_are_shown_to_who_may_see_them(
    site: WebSite, ada: Visitor, olga: Visitor
) -> None:
    job = submit_to(
        site.cluster, "#!/bin/sh\nsleep 600\n", user="ada", nodelist=node(4), job_name="<i>mine"
    )
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING", 60)
    grace = site.visitor("grace")
    link = f'href="/jobs/box/{job}"'
    wait_until(lambda: has(ada, page_of(node(4)), link, "&lt;i&gt;mine"))
    assert link in olga.page(page_of(node(4)))
    assert link not in ada.page(page_of(node(1)))
    # Slurm's PrivateData has nothing in it here: everybody sees every job.
    assert link in grace.page(page_of(node(4)))
    wait_until(lambda: has(ada, "/", link))
    assert link not in grace.page("/")
    now = datetime.now(UTC)
    during = now.isoformat()
    # Slurm records ends by the second, and none before its beginning.
    wait_until(lambda: datetime.now(UTC) > now + timedelta(seconds=2))
    site.cluster.run(["scancel", str(job)])
    wait_until(lambda: link not in ada.page(page_of(node(4))))
    assert link in ada.page(page_of(node(4)), at=during)
    assert link in grace.page(page_of(node(4)), at=during)
    assert link not in ada.page(page_of(node(1)), at=during)
    # Each state of the past leads to how it was then.
    past = re.findall(r'href="([^"]+)"><time', ada.page(page_of(node(4))))
    assert past
    for one in past[:3]:
        assert f"Node {node(4)} at" in plain(ada.page(one.replace("&amp;", "&")))


def rows(lines: Iterator[str]) -> Iterator[str]:
    """Yield the rows that a stream sends."""
    event = ""
    for line in lines:
        if line.startswith("event:"):
            event = line.removeprefix("event:").strip()
        elif line.startswith("data:") and event == "row":
            yield line.removeprefix("data:").strip()
        elif not line:
            event = ""


@pytest.mark.wide
def test_events_come_live_and_end_with_the_session(site: WebSite, carl: Visitor) -> None:
    watcher = site.visitor("grace")
    page = watcher.page("/events?kinds=node.state")
    address = re.search(r'data-live="([^"]+)"', page)
    assert address
    where = address[1].replace("&amp;", "&")
    with watcher.stream("GET", where) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers
        change(carl, "drain", nodes=node(2), reason=f"live {HOSTILE}".replace("\x1b[2J", ""))
        lines = stream.iter_lines()
        found: Any = next(one for one in rows(lines) if "live" in one)
        assert "&lt;script&gt;" in found
        assert f"/nodes/box/{node(2)}" in found
        watcher.submit("/logout")
        assert any("event: over" in line for line in lines)
    change(carl, "resume", nodes=node(2))
    with site.stranger() as stranger:
        assert stranger.get("/events/stream").status_code == 401


@pytest.mark.wide
def test_nobody_watches_in_too_many_windows(site: WebSite) -> None:
    visitor = site.visitor("grace")
    with ExitStack() as windows:
        # The lines are kept, too: closing the page closes the stream.
        kept = [
            windows.enter_context(visitor.stream("GET", "/events/stream")).iter_lines()
            for _ in range(4)
        ]
        assert all(next(lines).startswith((":", "retry", "event")) for lines in kept)
        with visitor.stream("GET", "/events/stream") as refused:
            assert refused.status_code == 429
    # Closed streams free their places.
    wait_until(lambda: _may_watch(visitor))


@pytest.mark.wide
@pytest.mark.parametrize("path", ["/events/stream", "/api/v1/events/stream"])
def test_who_asks_for_a_streams_head_keeps_no_place(site: WebSite, path: str) -> None:
    visitor = site.visitor("grace")
    for _ in range(9):
        wait_until(lambda: visitor.head(path).status_code == 200)
    assert visitor.head(path).headers["content-type"].startswith("text/event-stream")


def _may_watch(visitor: Visitor) -> bool:
    with visitor.stream("GET", "/events/stream") as stream:
        return stream.status_code == 200


@pytest.mark.wide
def test_figures_are_for_certain_addresses_alone(site: WebSite) -> None:
    with site.stranger() as stranger:
        answer = stranger.get("/metrics")
        # A proxy on this host asks for everybody.
        passed_on = stranger.get("/metrics", headers={"X-Forwarded-For": "192.0.2.7"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert "steward_" in answer.text
    assert passed_on.status_code == 403


@pytest.mark.wide
def test_steward_itself(site: WebSite, olga: Visitor, ada: Visitor) -> None:
    text = plain(olga.page("/status"))
    for word in ("history", "files", "running", "Dead letters", "box"):
        assert word in text, word
    assert "Health checks (<code>steward doctor</code>)" in olga.page("/status/doctor")
    part = olga.get("/status/doctor", headers={"HX-Request": "true"}).text
    assert "<h1>" not in part
    assert "spool" in part
    for path in ("/status/doctor", "/rules", "/status"):
        assert ada.get(path).status_code == 403, path
    assert ada.submit("/status/retry", consumer="files").status_code == 403
    assert olga.submit("/status/retry", consumer="").status_code == 400


def test_states_that_slurmctld_tells_no_more_are_shown_with_their_time(
    cluster: Sandbox, ada: Visitor
) -> None:
    def told(*, silent: bool) -> bool:
        pages = [ada.page(path) for path in ("/", "/cluster/box", page_of(node(1)))]
        return all(("slurmctld does not answer" in page) == silent for page in pages)

    assert told(silent=False)
    cluster.kill_controller()
    wait_until(lambda: told(silent=True))
    cluster.restart_controller()
    wait_until(lambda: told(silent=False))
