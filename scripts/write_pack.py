"""Writes the metadata of the StackStorm pack's actions, from how Steward describes them.

Usage: write_pack.py [DIRECTORY]
"""

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from steward.automation.operation import (
    Operation,
    ParameterDescription,
    describe_parameters,
    load_operations,
)
from steward.daemon.registry import get_action

PACK: Final = Path(__file__).resolve().parent.parent / "packs" / "slurm"
_REASONS: Final = {
    "slurm.node.down": "ST2: Downed using slurm.node.down action",
    "slurm.node.drain": "ST2: Drained using slurm.node.drain action",
}
"""The reasons that are given where an action's caller gives none; elsewhere one is required."""
_SWITCHES: Final = ("dry_run", "force")
"""Taken by actions that change something."""
_UNTYPED: Final = ("jobid", "nodes")
"""Taken as text, as lists and as numbers: StackStorm passes on what has no type as it comes."""


def metadata() -> dict[str, str]:
    """Return the text of each action's file, by the file's name."""
    return {f"{name(one)}.yaml": _text(one) for one in load_operations().values()}


def name(one: Operation) -> str:
    """Return the name of an action in the pack, without the pack's own name."""
    return one.ref.removeprefix("slurm.")


def _text(one: Operation) -> str:
    about = {
        "name": name(one),
        "description": one.help,
        "runner_type": "python-script",
        "enabled": True,
        "entry_point": "run_action.py",
        "parameters": _parameters(one),
    }
    return "---\n" + yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=96)


def _parameters(one: Operation) -> dict[str, Any]:
    found = {
        "operation": {
            "type": "string",
            "description": "What Steward calls it.",
            "default": one.ref,
            "immutable": True,
        }
    }
    for position, parameter in enumerate(describe_parameters(one)):
        found[parameter.name] = {**_described(one, parameter), "position": position}
    for parameter in describe_parameters(get_action("automation.run")):
        if parameter.name == "cluster" or (parameter.name in _SWITCHES and not one.only_reads):
            found[parameter.name] = _described(one, parameter)
    return found


def _described(one: Operation, parameter: ParameterDescription) -> dict[str, Any]:
    default = parameter.default
    reason = _REASONS.get(one.ref, "") if parameter.name == "reason" else ""
    found: dict[str, Any] = {
        "type": parameter.type,
        "description": parameter.description,
        "required": parameter.required and not reason,
    }
    if parameter.name in _UNTYPED and parameter.type == "string":
        del found["type"]
    if reason or default is not None:
        found["default"] = reason or default
    if parameter.enum:
        found["enum"] = list(parameter.enum)
    return found


def main() -> None:
    """Write the files, and remove those of actions that no longer exist."""
    directory = (Path(sys.argv[1]) if len(sys.argv) > 1 else PACK) / "actions"
    texts = metadata()
    for path in directory.glob("*.yaml"):
        if path.name not in texts:
            path.unlink()
    for file, text in texts.items():
        (directory / file).write_text(text)


if __name__ == "__main__":
    main()
