"""Measures the size of the code base and the wording of its names, as a table or as JSON.

``python scripts/measure.py`` prints a Markdown table, ``--json`` prints JSON. Every figure depends
on the tree alone, so figures of two commits can be compared.
"""

import argparse
import ast
import collections
import io
import itertools
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "steward"

ESTABLISHED = frozenset({"accounting", "billing", "pricing"})
"""Established nouns that end like participles."""

NO_PARTICIPLE = frozenset({"feed", "need", "seed", "speed", "shed", "string", "setting", "ring"})
"""Words that end in -ed or -ing but are no participles."""

IRREGULAR = re.compile(
    "begun|bought|built|drawn|found|given|gone|got|held|kept|known|laid|led|left|lost|made|meant"
    "|met|named|paid|said|seen|sent|shown|spent|stood|taken|told|thought|understood|written"
)
"""Irregular past participles, except those that are also verbs, such as "put" and "read"."""

DATABASE = re.compile(r"(?:^|/)([a-z_]+\.db)$")
GENERATED = re.compile(
    r"```.*?^```$|<!-- (settings|actions|endpoints) -->.*?<!-- end of \1 -->|<!--.*?-->|^\|.*?\|$",
    re.MULTILINE | re.DOTALL,
)
"""Parts of a page that are not hand-written: output blocks, commands and generated tables."""


def source_files() -> list[Path]:
    """List the Python files of the package."""
    return sorted(SOURCE.rglob("*.py"))


def count_code_lines(text: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def is_participle(word: str) -> bool:
    """Return True if a word is a participle and no established noun."""
    if word in ESTABLISHED or word in NO_PARTICIPLE:
        return False
    return bool(IRREGULAR.fullmatch(word)) or (len(word) > 4 and word.endswith(("ing", "ed")))


def is_past_participle(name: str) -> bool:
    """Return True if a function's name begins with a past participle instead of a verb."""
    word = name.lstrip("_").partition("_")[0]
    if word in NO_PARTICIPLE:
        return False
    return bool(IRREGULAR.fullmatch(word)) or (len(word) > 4 and word.endswith("ed"))


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if a function is a property, whose name is a noun or an adjective."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def walk_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a module, without properties."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            yield node


def only_copies(function: ast.AST) -> bool:
    """Return True if a function only builds one value from fields of its arguments."""
    body = [one for one in getattr(function, "body", []) if not _is_docstring(one)]
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return False
    call = body[0].value
    if not isinstance(call, ast.Call) or len(call.keywords) < 3:
        return False
    copied = [keyword for keyword in call.keywords if isinstance(keyword.value, ast.Attribute)]
    return len(copied) >= 3 and len(copied) * 2 > len(call.keywords)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def count_tables_of_actions(trees: Iterable[ast.Module]) -> int:
    """Count the assignments outside functions that name ten actions or more."""
    from steward.automation.operation import load_operations
    from steward.daemon.action_index import ACTION_INDEX

    names = set(ACTION_INDEX) | set(load_operations())
    statements = itertools.chain.from_iterable(tree.body for tree in trees)
    return sum(
        isinstance(statement, ast.Assign | ast.AnnAssign)
        and len(names & {getattr(node, "value", None) for node in _constants(statement)}) >= 10
        for statement in statements
    )


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner


def count_settings() -> int:
    """Count the keys that a site can write into the configuration file.

    A table heading, such as ``[bank]`` or ``[archive.sink.NAME]``, is no setting that anybody sets;
    its keys count once, however many tables of that sort there may be. The key ``kind`` of a sink
    counts, though it is not a field.
    """
    import msgspec

    import steward.core.config  # noqa: F401 - declares every section
    from steward.core.section import Section, TlsReference

    pending, keys = [Section], 0
    tags: set[str | None] = set()
    while pending:
        section = pending.pop()
        own = getattr(section, "__annotations__", {})
        for field in msgspec.structs.fields(section):
            is_table = "Section" in str(field.type) or "Settings" in str(field.type)
            keys += field.name in own and (not is_table or field.type == TlsReference)
        tags.add(section.__struct_config__.tag_field)
        pending += section.__subclasses__()
    return keys + len(tags - {None})


def count_words_of_docs() -> int:
    """Count the hand-written words of README and docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return sum(len(GENERATED.sub(" ", page.read_text()).split()) for page in pages)


def measure() -> dict[str, int]:
    """Measure the tree and return the figures by name."""
    texts = {path: path.read_text() for path in source_files()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = collections.Counter(node.name for node in classes)
    functions = [function for tree in trees.values() for function in walk_functions(tree)]
    modules = [path.stem if path.stem != "__init__" else path.parent.name for path in texts]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
    databases = {
        match.group(1)
        for value in strings
        if isinstance(value, str) and (match := DATABASE.search(value))
    }
    inserts = [
        value for value in strings if isinstance(value, str) and value.lstrip().startswith("INSERT")
    ]
    private = [function for function in functions if function.name.startswith("_")]
    return {
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code lines": sum(count_code_lines(text) for text in texts.values()),
        "files": len(texts),
        "files under 100 lines": sum(len(text.splitlines()) < 100 for text in texts.values()),
        "classes": len(classes),
        "class names used twice": sum(count > 1 for count in names.values()),
        "fields of classes": sum(
            isinstance(node, ast.AnnAssign)
            for node in itertools.chain.from_iterable(one.body for one in classes)
        ),
        "modules named by a participle": sum(
            any(is_participle(word) for word in module.split("_")) for module in modules
        ),
        "functions": len(functions),
        "functions named by a past participle": sum(
            is_past_participle(function.name) for function in functions
        ),
        "functions that only copy fields": sum(only_copies(function) for function in functions),
        "private functions": sum(not one.name.startswith("__") for one in private),
        "protocols (typing)": sum(
            any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes
        ),
        "tables that list actions by name": count_tables_of_actions(trees.values()),
        "INSERT statements": len(inserts),
        "databases": len(databases),
        "settings": count_settings(),
        "hand-written words of docs": count_words_of_docs(),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
        return
    print("| figure | count |\n|---|---|")
    for name, count in figures.items():
        print(f"| {name} | {count:,} |")


if __name__ == "__main__":
    main()
