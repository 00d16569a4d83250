"""Hooks of the documentation site (mkdocs.yml): its navigation, and files outside of docs.

The navigation is the list of pages in docs/index.md, with the decision records below "Explanation".
A file of the repository that a page links to becomes a file of the site.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ENTRY: Final = re.compile(
    r"^## (?P<kind>.+)$|^(?P<part>\w+):$|\[(?P<title>[^]]+)\]\((?P<page>\S+\.md)\)"
)
_LINK: Final = re.compile(r"(?<=\]\()\.\./[^)#]+")


def read_navigation(docs: Path) -> list[dict[str, Any]]:
    """Return the navigation that docs/index.md lists: kinds, parts of a kind, pages.

    Args:
        docs: The directory of the pages.
    """
    kinds: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for line in (docs / "index.md").read_text(encoding="utf-8").splitlines():
        for found in _ENTRY.finditer(line):
            if found["kind"]:
                entries = []
                kinds.append({found["kind"]: entries})
            elif found["part"]:
                kind = next(iter(kinds[-1].values()))
                entries = []
                kind.append({found["part"]: entries})
            else:
                entries.append({found["title"].replace("`", ""): found["page"]})
    records = sorted(path.relative_to(docs).as_posix() for path in docs.glob("decisions/*.md"))
    explanation = next(kind["Explanation"] for kind in kinds if "Explanation" in kind)
    explanation.append({"Decision records": records})
    return [{"Documentation": "index.md"}, *kinds]


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Set the navigation."""
    config.nav = read_navigation(Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Copy files outside of docs that a page links to, and link to the copies."""
    from mkdocs.structure.files import File

    docs = Path(config.docs_dir)
    directory = docs / os.path.dirname(page.file.src_uri)

    def copy(link: re.Match[str]) -> str:
        path = (directory / link[0]).resolve()
        if path.is_relative_to(docs):
            return link[0]
        name = f"repository/{path.relative_to(docs.parent).as_posix().removesuffix('.md')}.txt"
        if name not in files.src_uris:
            files.append(File.generated(config, name, content=path.read_bytes()))
        return os.path.relpath(docs / name, directory)

    return _LINK.sub(copy, markdown)
