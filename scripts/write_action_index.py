"""Writes ``daemon/action_index.py``: where each action is declared, and its command.

It imports every module that declares an action or prints a reply. ``--check`` fails if the file in
the tree differs from what would be written.
"""

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "src" / "steward" / "daemon" / "action_index.py"

HEAD = '''"""Index of actions: where each is declared, and its command.

Help pages read it, and a command imports only the module of its action.

``make index`` writes this file from the declarations; do not edit it.
"""

from typing import Final, NamedTuple


class IndexEntry(NamedTuple):
    """One action.

    Attributes:
        module: Module that declares it.
        command: Words of its command; "" if it has none or one written by hand.
        role: Audience of the command.
        help: One line for people.
        printer: Module of the command line that prints its reply; "" for a table.
    """

    module: str
    command: str
    role: str
    help: str
    printer: str = ""


ACTION_INDEX: Final[dict[str, IndexEntry]] = {
'''


def find_modules(mark: str) -> list[str]:
    """Return the modules of Steward in whose text ``mark`` begins a line."""
    source = ROOT / "src"
    return [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(source.rglob("*.py"))
        if f"\n{mark}" in path.read_text()
    ]


def render_index() -> str:
    """Return the text of the index."""
    from steward.cli.commands import PRINTERS
    from steward.core.actions import DECLARED

    for module in (*find_modules("@action("), *find_modules("@prints(")):
        importlib.import_module(module)
    lines = [HEAD]
    for name, action in sorted(DECLARED.items()):
        printer = PRINTERS.get(name)
        fields = [action.run.__module__, action.command, action.role, action.help]
        fields += [printer.__module__] if printer else []
        lines.append(f"    {name!r}: IndexEntry({', '.join(map(repr, fields))}),\n")
    text = "".join([*lines, "}\n"])
    ruff = Path(sys.executable).with_name("ruff")
    return subprocess.run(
        [ruff, "format", "--stdin-filename", INDEX, "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def main() -> int:
    """Write the index, or compare it with the tree."""
    text = render_index()
    if "--check" not in sys.argv[1:]:
        INDEX.write_text(text)
        return 0
    if INDEX.read_text() == text:
        return 0
    print(f"{INDEX} is not what the declarations say: run 'make index'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
