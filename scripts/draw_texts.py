"""Draw texts for a reading: pages, help texts, error messages and web page titles.

Usage: scripts/draw_texts.py SEED. The same seed draws the same texts from the same tree.
"""

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "steward"
HELP_CALLS = frozenset({"described", "Entry", "Option", "Argument"})
"""Functions that take a help text as an argument."""
TITLE = re.compile(r"{%\s*block title\s*%}(.*?){%\s*endblock", re.DOTALL)
"""Title of a page in its template."""
MIN_WORDS = 3
"""Fewest words of a text; shorter strings are names."""


def render_text(node: ast.expr) -> str:
    """Return the text of a string or f-string, with expressions in braces; "" for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else render_text(part)
            for part in node.values
        )
    return ""


def list_texts(path: Path) -> Iterator[tuple[str, str]]:
    """List the help texts and error messages of a module, each with its kind."""
    place = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, arguments = "error", node.exc.args
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HELP_CALLS:
            kind, arguments = "help", [*node.args, *(word.value for word in node.keywords)]
        else:
            continue
        for argument in arguments:
            text = render_text(argument)
            if len(text.split()) >= MIN_WORDS:
                yield kind, f"{place}:{argument.lineno}: {text}"


def list_titles() -> list[str]:
    """List the titles of the web pages, each with its template."""
    return [
        f"{path.relative_to(ROOT)}: {' '.join(match[1].split())}"
        for path in sorted(SOURCE.rglob("*.html"))
        if (match := TITLE.search(path.read_text()))
    ]


def main() -> None:
    """Print the texts that a seed draws."""
    if len(sys.argv) != 2:
        sys.exit("seed missing: run scripts/draw_texts.py SEED")
    generator = random.Random(sys.argv[1])  # noqa: S311 - a sample for readers
    texts = [text for path in sorted(SOURCE.rglob("*.py")) for text in list_texts(path)]
    pages = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    drawn = (
        ("Pages", pages, 20),
        ("Help texts", [text for kind, text in texts if kind == "help"], 30),
        ("Error messages", [text for kind, text in texts if kind == "error"], 30),
        ("Web page titles", list_titles(), 10),
    )
    for heading, population, count in drawn:
        print(f"{heading}:")
        for text in generator.sample(population, min(count, len(population))):
            print(f"  {text}")


if __name__ == "__main__":
    main()
