"""The table of what can be asked for, and that one question does not import all rooms."""

import subprocess
import sys

import pytest

from steward.daemon.contexts import ACTIONS
from steward.daemon.registry import get_action, iterate_actions


def test_each_is_found_by_its_name() -> None:
    names = [one.name for one in iterate_actions()]
    assert len(names) == len(set(names)) == len(ACTIONS)
    for name in names:
        assert get_action(name) is ACTIONS[name]


@pytest.mark.parametrize("name", ["", "archive", "archive.", "archive.lists", "os.system", "."])
def test_what_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(KeyError):
        get_action(name)


def test_who_asks_for_one_thing_imports_no_other_room() -> None:
    lines = (
        "import sys",
        "from steward.client.calls import get_action",
        "get_action('archive.list')",
        "print(*sys.modules)",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert "steward.archive.actions" in found
    for room in ("accounting", "bank", "automation", "doctor", "history", "reports", "status"):
        assert f"steward.{room}.actions" not in found
