import signal

import pytest

from steward.sandbox import cluster
from steward.sandbox.cluster import Inside


def test_what_has_not_begun_ends_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_BEGINS_WITHIN_S", 0.05)
    with Inside(["sleep", "1000"]) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        process.kill()
