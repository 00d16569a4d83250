"""Blocks of docs/install.md, and the hosts on which a reader runs them."""

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "install.md"
BLOCK: Final = re.compile(r"^(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOST: Final = ("on slurmctld's host", "on each node")


def blocks() -> list[tuple[str, str, str]]:
    """List each block's place, its language, and its text."""
    return [(place, kind, text) for place, kind, text in BLOCK.findall(PAGE.read_text())]


def exit_code(place: str) -> int:
    """Read the exit code that the last line of a block ends with."""
    return int(next((word[5:] for word in place.split(", ") if word.startswith("exit ")), "0"))
