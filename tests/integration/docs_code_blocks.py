"""Code blocks in docs that readers run."""

import re
from pathlib import Path


def code(page: str, language: str) -> list[str]:
    """Return the code blocks of a documentation page in a language."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
