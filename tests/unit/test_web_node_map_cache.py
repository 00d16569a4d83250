"""Cache of the node map: known nodes are not read again until one changes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from harness import history
from harness.site import ADA, Site
from steward.admin.credentials.requests import CallerAnswer
from steward.core.access import Caller
from steward.core.errors import PermissionRefused
from steward.reports.history.requests import NodesReply, NodesRequest
from steward.web.authentication import AuthenticatedRequest
from steward.web.daemon_client import DaemonClient
from steward.web.node_map import NodeCache


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = history.make_site(tmp_path)
    yield made
    made.close()


class Straight:
    """Client that calls an action as a user, and counts the nodes in the replies."""

    def __init__(self, site: Site, asker: Caller) -> None:
        self.site = site
        self.asker = asker
        self.nodes = 0

    async def call_action(self, name: str, request: NodesRequest, *_: Any, **__: Any) -> NodesReply:
        answer: NodesReply = self.site.ask(name, self.asker, **msgspec.structs.asdict(request))
        self.nodes += len(answer.nodes)
        return answer


def states(known: NodeCache, desk: Straight) -> dict[str, str]:
    me = CallerAnswer(
        uid=desk.asker.uid,
        user=desk.asker.user,
        how="session",
        clusters=(),
        bank=False,
        sensor=True,
        rules=False,
    )
    auth = AuthenticatedRequest(how="cookie", secret="", me=me, client=cast("DaemonClient", desk))
    return {one.node: one.state for one in asyncio.run(known.fetch_nodes(auth, "c1")).nodes}


def test_a_tag_stands_for_how_nodes_are(site: Site) -> None:
    assert site.ask("history.nodes", ADA).tag == ""
    site.feed(history.node(0, "n1", "IDLE"), history.node(0, "n2", "IDLE"))
    first = site.ask("history.nodes", ADA)
    assert len(first.nodes) == 2
    assert not first.is_known
    again = site.ask("history.nodes", ADA, known=first.tag)
    assert (again.nodes, again.is_known, again.tag) == ((), True, first.tag)
    assert len(site.ask("history.nodes", ADA, known="1.1").nodes) == 2
    # Of a time that is past there is none, and none is taken.
    past = site.ask("history.nodes", ADA, at="now", known=first.tag)
    assert (past.tag, past.is_known, len(past.nodes)) == ("", False, 2)
    for state in ("DOWN", "IDLE", "REMOVED"):
        before = site.ask("history.nodes", ADA)
        site.feed(history.node(10, "n2", state))
        after = site.ask("history.nodes", ADA, known=before.tag)
        assert not after.is_known, state
        assert len(after.nodes) == (1 if state == "REMOVED" else 2)


def test_pages_show_the_nodes_as_they_are_and_are_told_them_once(site: Site) -> None:
    site.feed(history.node(0, "n1", "IDLE"), history.node(0, "n2", "IDLE"))
    known, desk = NodeCache(), Straight(site, ADA)
    for _ in range(3):
        assert states(known, desk) == {"n1": "IDLE", "n2": "IDLE"}
    assert desk.nodes == 2
    site.feed(history.node(10, "n2", "DOWN"))
    assert states(known, desk) == {"n1": "IDLE", "n2": "DOWN"}
    assert states(known, desk) == {"n1": "IDLE", "n2": "DOWN"}
    assert desk.nodes == 4


def test_what_others_were_told_is_not_shown_to_whom_it_is_refused(tmp_path: Path) -> None:
    site = history.make_site(tmp_path, private=frozenset({"nodes"}))
    site.feed(history.node(0, "n1", "IDLE"))
    known = NodeCache()
    assert states(known, Straight(site, Caller(uid=0, user="root"))) == {"n1": "IDLE"}
    with pytest.raises(PermissionRefused):
        states(known, Straight(site, ADA))
    site.close()
