"""Draws sentences from the documentation, for a test of the file names under src/steward.

A reader who sees only the file names names for each sentence the file that implements it::

    python scripts/draw_behaviours.py --seed 15 --count 30
"""

import argparse
import random
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_BEHAVIOUR = frozenset({"develop.md", "install.md", "upgrade.md"})
"""Pages of instructions, and of Steward's architecture."""

NO_PROSE = re.compile(
    r"```.*?^```|<!--.*?-->|^\|.*?\|$|^#.*?$|^    .*?$|^\[.*?\]: .*?$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")


def list_sentences(page: Path) -> list[str]:
    """List the sentences of 10 to 35 words of a page."""
    prose = LINK.sub(r"\1", NO_PROSE.sub("\n\n", page.read_text()))
    sentences = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", prose, flags=re.MULTILINE):
        text = " ".join(paragraph.replace("*", "").split())
        sentences += [
            sentence
            for sentence in SENTENCE_END.split(text)
            if 10 <= len(sentence.split()) <= 35 and sentence.endswith(".")
        ]
    return sentences


def main() -> None:
    """Print the drawn sentences, numbered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=30)
    options = parser.parse_args()
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in NO_BEHAVIOUR]
    sentences = [(page.name, sentence) for page in pages for sentence in list_sentences(page)]
    drawn = random.Random(options.seed).sample(sentences, options.count)  # noqa: S311 - no secret
    for number, (name, sentence) in enumerate(drawn, 1):
        print(f"{number}. [{name}] {sentence}")


if __name__ == "__main__":
    main()
