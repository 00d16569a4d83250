"""Turns of connections: in the order of arrival, with one connection for each node."""

import threading

import pytest

from steward.capture.nodes.receiver import NodeTurns, TurnUnavailable


class Connection:
    """Connection that records whether it was ended."""

    is_shut = False

    def shut_down(self) -> None:
        self.is_shut = True


def test_a_node_is_heard_on_one_connection() -> None:
    these = NodeTurns()
    first, second = Connection(), Connection()
    these.begin(("c1", "n1"), first)
    these.begin(("c1", "n2"), Connection())
    these.begin(("c2", "n1"), Connection())
    with pytest.raises(TurnUnavailable, match="of node n1 is in progress"):
        these.begin(("c1", "n1"), second)
    these.finish_batch(first)
    these.begin(("c1", "n1"), second)
    assert first.is_shut
    these.remove(first)  # its end does not end the second one
    with pytest.raises(TurnUnavailable):
        these.begin(("c1", "n1"), Connection())
    these.remove(second)
    these.begin(("c1", "n1"), Connection())


def test_one_connection_may_be_several_nodes_in_turn() -> None:
    these = NodeTurns()
    one = Connection()
    for node in ("n1", "n2", "n1"):
        these.begin(("c1", node), one)
        these.finish_batch(one)
    these.begin(("c1", "n2"), Connection())
    assert not one.is_shut


def test_turns_come_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    these, came, waits = NodeTurns(), list[int](), threading.Semaphore(0)

    class Watched(threading.Event):
        """Connection that reports whether another one waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waits.release()
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Event", Watched)

    def ask(number: int) -> None:
        with these.wait_turn():
            came.append(number)

    threads = []
    with these.wait_turn():
        assert waits.acquire(timeout=60)
        for number in range(10):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            assert waits.acquire(timeout=60)
    for thread in threads:
        thread.join(60)
    assert came == list(range(10))


def test_who_waits_too_long_holds_up_nobody() -> None:
    these = NodeTurns(patience_s=0.05)
    with these.wait_turn(), pytest.raises(TurnUnavailable, match="too many"), these.wait_turn():
        pytest.fail("it was two's turn")
    with these.wait_turn():
        pass
