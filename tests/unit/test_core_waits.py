import os

from steward.core.waits import Backoff, Stop


def test_stop_ends_every_wait() -> None:
    stop = Stop()
    assert not stop.is_set()
    stop.set()
    stop.set()
    assert stop.is_set()
    assert stop.wait(60.0) is False
    assert stop.wait(60.0) is False


def test_a_readable_descriptor_ends_the_wait() -> None:
    stop = Stop()
    read, write = os.pipe()
    assert stop.wait(0.0, read) is False
    os.write(write, b"x")
    assert stop.wait(60.0, read) is True
    os.close(read)
    os.close(write)


def test_backing_off_doubles_up_to_a_bound() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0
