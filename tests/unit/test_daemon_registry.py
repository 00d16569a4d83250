"""The table of what can be asked for, and that one question does not import all rooms."""

import subprocess
import sys
from pathlib import Path

import pytest

from steward.daemon.action_index import ACTION_INDEX
from steward.daemon.contexts import ACTIONS
from steward.daemon.registry import get_action, import_actions

ROOT = Path(__file__).parents[2]


def test_each_is_found_by_its_name() -> None:
    names = list(import_actions())
    assert len(names) == len(ACTIONS)
    for name in names:
        assert get_action(name) is ACTIONS[name]


@pytest.mark.parametrize("name", ["", "archive", "archive.", "archive.lists", "os.system", "."])
def test_what_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(KeyError):
        get_action(name)


def test_the_index_is_what_the_declarations_say() -> None:
    script = ROOT / "scripts" / "write_action_index.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_who_asks_for_one_thing_imports_no_other_room() -> None:
    lines = (
        "import sys",
        "from steward.client.calls import get_action",
        "get_action('archive.list')",
        "print(*sys.modules)",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert "steward.archive.lookup" in found
    others = {entry.module for entry in ACTION_INDEX.values()} - {"steward.archive.lookup"}
    assert others.isdisjoint(found)
