"""Whose turn it is: in the order of asking, and of a node one connection alone."""

import threading
import time

import pytest

from steward.capture.nodes import turns
from steward.capture.nodes.turns import Turns, TurnUnavailable


class Connection:
    """One that knows whether it was ended."""

    is_shut = False

    def shut(self) -> None:
        self.is_shut = True


def test_a_node_is_heard_on_one_connection() -> None:
    these = Turns()
    first, second = Connection(), Connection()
    these.begin(("c1", "n1"), first)
    these.begin(("c1", "n2"), Connection())
    these.begin(("c2", "n1"), Connection())
    with pytest.raises(TurnUnavailable, match="of node n1 is under way"):
        these.begin(("c1", "n1"), second)
    these.rest(first)
    these.begin(("c1", "n1"), second)
    assert first.is_shut
    these.leave(first)  # its end is none of the second one's
    with pytest.raises(TurnUnavailable):
        these.begin(("c1", "n1"), Connection())
    these.leave(second)
    these.begin(("c1", "n1"), Connection())


def test_one_connection_may_be_several_nodes_in_turn() -> None:
    these = Turns()
    one = Connection()
    for node in ("n1", "n2", "n1"):
        these.begin(("c1", node), one)
        these.rest(one)
    these.begin(("c1", "n2"), Connection())
    assert not one.is_shut


def test_turns_come_in_the_order_of_asking() -> None:
    these, came = Turns(), list[int]()

    def ask(number: int) -> None:
        with these.turn():
            came.append(number)

    threads = []
    with these.turn():
        for number in range(10):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            until = time.monotonic() + 60
            while len(these._queue) < number + 2 and time.monotonic() < until:
                time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert came == list(range(10))


def test_who_waits_too_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    these = Turns()
    with these.turn(), pytest.raises(TurnUnavailable, match="too many"), these.turn():
        pytest.fail("it was two's turn")
    with these.turn():
        pass
