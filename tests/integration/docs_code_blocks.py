"""Code blocks in docs that readers run."""

import re
from pathlib import Path


def code(page: str, language: str) -> list[str]:
    """The blocks of a page of docs that are of a language."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
