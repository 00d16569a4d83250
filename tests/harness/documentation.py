"""Code blocks of the page for developers."""

import re
from pathlib import Path
from typing import Any

DEVELOP = Path(__file__).parent.parent.parent / "docs" / "develop.md"


def run_example(heading: str) -> dict[str, Any]:
    """Run the Python block of a section of the page; return the names that it defines."""
    section = DEVELOP.read_text().split(f"## {heading}\n")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names
