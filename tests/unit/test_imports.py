"""The arrows between the rooms: an import may point down, never up, and never into an inside."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import steward

ROOT = Path(steward.__file__).parent

LEVELS = [
    {"cli", "__main__"},
    {"demo"},
    {"web"},
    {"client", "daemon", "sandbox", "serving"},
    {"settings", "doctor", "setup"},
    {
        *("archive", "accounting", "bank", "automation", "capture", "native", "agent"),
        *("status", "backup", "history", "reports"),
    },
    {"slurm", "journal", "jobs", "access", "consumers", "actions", "standings", "credentials"},
    {
        *("incoming", "redact", "sqlite", "events", "records", "lines", "usage", "config"),
        *("config_section", "config_accounting", "config_bank", "config_automation"),
        *("config_web", "config_history"),
        *("bank_facts", "state_facts", "drivers"),
        *("errors", "filesystems", "environment", "waiting", "logs", "messages", "offered"),
        *(
            "printable",
            "posting",
            "moments",
            "webhooks",
            "leaving",
            "ending",
            "looks",
            "listening",
            "ratelimit",
            "processes",
            "files",
            "munge",
        ),
        "__init__",
    },
]
"""From what nobody may import down to what everybody may; a level's own rooms may meet."""

HEAVY = {
    *("asyncio", "logging.config", "rich", "typer", "json", "http", "ssl", "pydantic"),
    *("sqlalchemy", "alembic", "psycopg", "litestar", "uvicorn", "httpx"),
    *(
        "confluent_kafka",
        "elasticsearch",
        "opensearchpy",
        "urllib3",
        "zstandard",
        "prometheus_client",
    ),
}
"""What no process imports that does not need it, so never at the top: memory is counted."""

LATE = {
    *(f"steward.bank.mybrc.{name}" for name in ("application", "described")),
    "steward.bank.gate.secure",
    "steward.serving",
    *(
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "web").rglob("*.py")
    ),
    *(
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for path in (ROOT / "bank" / "ledger").rglob("*.py")
        if path.stem not in {"__init__", "records", "asides", "drawing"}
    ),
}
"""Modules that are heavy all over: only functions import them, and they each other."""

LONGEST = 800
"""Lines of a file that is one concept; more are two."""

FOR_PEOPLE = {"cli", "demo"}
"""The rooms that a daemon's processes never load."""


def rooms() -> dict[str, int]:
    return {room: number for number, level in enumerate(LEVELS) for room in level}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The part of a module's name that stands for its room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Each import of a file: the module, the names taken from it, the line."""
    yield from found_in(ast.walk(tree_of(path)), path)


def at_load(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Those imports of a file that are done when it is loaded, not when a function is called."""

    def outside(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef):
                yield child
                yield from outside(child)

    yield from found_in(outside(tree_of(path)), path)


def is_for_typing(path: Path, line: int) -> bool:
    """Whether a line is in a block that only type checkers read."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree_of(path))
    )


def found_in(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, (), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module or "", tuple(alias.name for alias in node.names), node.lineno


def ours(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for module, names, line in imports(path):
        if module == "steward":
            # Either a module, or what the package itself offers.
            for name in names:
                is_module = (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()
                yield (f"steward.{name}" if is_module else "steward"), (), line
        elif module.startswith("steward."):
            yield module, names, line


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_point_down(path: Path) -> None:
    level = rooms()
    room = room_of(module_of(path))
    assert room in level, f"{room} has no place in the levels yet: give it one"
    for module, _, line in ours(path):
        other = room_of(module)
        assert level[other] >= level[room], f"{path}:{line}: {room} may not import {module}"
        if level[other] == level[room] == 0 and other != room:
            assert (room, other) == ("__main__", "cli"), f"{path}:{line}"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_no_room_reaches_into_anothers_inside(path: Path) -> None:
    for module, names, line in ours(path):
        inside = [part for part in (*module.split("."), *names) if part.startswith("_")]
        own = [part for part in inside if part.startswith("__")]
        assert inside == own, f"{path}:{line}: {module} {names}"


@pytest.mark.parametrize(
    "path", [path for path in files() if room_of(module_of(path)) not in FOR_PEOPLE], ids=module_of
)
def test_a_daemons_modules_are_light(path: Path) -> None:
    if module_of(path) in LATE:
        return
    for module, names, line in at_load(path):
        late = {module, *(f"{module}.{name}" for name in names)} & LATE
        assert not late or is_for_typing(path, line), f"{path}:{line}: {late}"
        top = {module, module.split(".")[0]}
        assert not top & HEAVY or is_for_typing(path, line), f"{path}:{line}: {module}"


def test_every_file_says_why_it_exists_and_is_short() -> None:
    for path in files():
        text = path.read_text()
        assert ast.get_docstring(tree_of(path)), f"{path} does not begin by saying why it exists"
        assert text.count("\n") <= LONGEST, f"{path} has {text.count(chr(10))} lines"


PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace", "_UNKNOWN_TOPIC"}
"""Names of Python, and of a library, that have an underscore and are for everybody."""
TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_tests_use_public_members_alone(path: Path) -> None:
    private = [
        f"{path}:{getattr(node, 'lineno', 0)}: {name}"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in named_by(node)
        if name.startswith("_") and not name.startswith("__") and name not in PUBLIC
    ]
    assert not private


def named_by(node: ast.AST) -> Iterator[str]:
    """The members of others that a node names: read, imported, or replaced by monkeypatch."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            pass
        case ast.Attribute(attr=name):
            yield name
        case ast.ImportFrom(module=str(module), names=aliases) if module.startswith("steward"):
            yield from module.split(".")
            yield from (alias.name for alias in aliases)
        case ast.Call(
            func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]
        ):
            yield name
        case ast.Constant(value=str(text)) if text.startswith("steward.") and " " not in text:
            yield from text.split(".")
