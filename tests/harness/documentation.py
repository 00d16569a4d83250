"""Code blocks of the page for developers."""

import re
from pathlib import Path
from typing import Any

DEVELOP = Path(__file__).parent.parent.parent / "docs" / "develop.md"


def read_example(heading: str) -> str:
    """Return the Python block of a section of the page."""
    section = DEVELOP.read_text().split(f"## {heading}\n")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block
    return block[1]


def run_example(heading: str) -> dict[str, Any]:
    """Run the Python block of a section of the page; return the names that it defines."""
    names: dict[str, Any] = {}
    exec(read_example(heading), names)
    return names
