"""Registry of actions: one request does not import the packages of the others."""

import subprocess
import sys
from pathlib import Path

import pytest

from steward.core.actions import Answer, Registry
from steward.daemon.action_index import ACTION_INDEX
from steward.daemon.registry import ACTIONS, get_action, import_actions
from steward.daemon.request_service import RequestService

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


def test_a_registry_imports_an_action_when_it_is_needed() -> None:
    lines = (
        "import sys",
        "from steward.core.config import Settings",
        "from steward.daemon.contexts import make_registry",
        "from steward.daemon.request_service import RequestService",
        "service = RequestService(make_registry(Settings(state_dir='/nonexistent')))",
        "print(*sys.modules)",
        'service.preload(b\'{"v": 1, "action": "archive.list", "args": {}}\')',
        "print(*sys.modules)",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    modules = {entry.module for entry in ACTION_INDEX.values()}
    assert not modules & before
    assert modules & after == {"steward.archive.lookup"}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"[1]",
        b"[" * 100_000,
        b'{"v": 9, "action": "archive.list"}',
        b'{"v": 1, "action": "nothing"}',
    ],
)
def test_preloading_leaves_bad_requests_to_the_process_that_answers(line: bytes) -> None:
    RequestService(Registry(declared=ACTIONS)).preload(line)


@pytest.mark.parametrize(
    "name", [name for name, action in import_actions().items() if action.rows and action.only_reads]
)
def test_a_list_says_why_it_is_empty_and_in_which_unit_it_is(name: str) -> None:
    action = get_action(name)
    if name not in ("automation.list", "bank.explain"):  # which are never empty
        explanations = ("empty_reason", "list_lines", "list_warnings")
        assert any(
            getattr(action.answer, each) is not getattr(Answer, each) for each in explanations
        )
    assert issubclass(action.answer, Answer)
    if any(column.format == "money" for column in action.answer.get_layout(action.rows)):
        assert "unit" in action.answer.__struct_fields__
