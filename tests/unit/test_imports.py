"""Imports between packages follow the order of the design, and never name private members."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import steward
from steward.core.extensions import list_offers, load_offer

ROOT = Path(steward.__file__).parent

ORDER = (
    *("__main__", "cli", "demo", "sandbox", "web", "client"),
    *("daemon", "admin", "extensions", "reports", "automation", "bank", "accounting"),
    *("archive", "telemetry", "capture", "jobs", "slurm", "core"),
)
"""Packages in order: each imports only later ones."""

ALONE = ("agent", "native")
"""Packages that run on compute nodes or in Slurm: they import nothing of Steward."""

ASSEMBLY = "steward.core.config"
"""Package that assembles all settings: it may import the modules ``settings`` of all packages, as
may ``admin``. Those modules import only each other."""

HEAVY = {
    *("asyncio", "logging.config", "rich", "click", "json", "http", "ssl"),
    *("sqlalchemy", "alembic", "psycopg", "litestar", "uvicorn", "httpx"),
    *("httpcore", "confluent_kafka", "zstandard", "prometheus_client"),
}
"""Modules that are never imported at the top of a file, because they take memory."""

LATE = {
    *(f"steward.extensions.mybrc.{name}" for name in ("application", "described")),
    "steward.bank.gate.server",
    *(f"steward.bank.gate.http_{side}" for side in ("client", "server")),
    "steward.core.http_server",
    "steward.core.sqlalchemy_tables",
    *(f"steward.extensions.controllers.{side}" for side in ("forwarder", "receiver")),
    *(f"steward.capture.nodes.{name}" for name in ("listener", "receiver", "senders")),
    *(
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "web").rglob("*.py")
        if path.stem != "settings"
    ),
    *(
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for path in (ROOT / "bank" / "ledger").rglob("*.py")
        if path.stem not in {"__init__", "records", "asides", "drawing"}
    ),
}
"""Modules whose imports are all heavy: only functions import them, and they each other."""

LONGEST = 800
"""Maximum number of lines in a file."""

FOR_PEOPLE = {"cli", "demo"}
"""Packages that no process of the daemon loads."""


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the package part of a module's name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield each import of a file: the module, the imported names, the line."""
    yield from found_in(ast.walk(tree_of(path)), path)


def at_load(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield the imports of a file that run when it is loaded, outside functions."""

    def outside(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
                yield from outside(child)

    yield from found_in(outside(tree_of(path)), path)


def is_for_typing(path: Path, line: int) -> bool:
    """Return whether a line is in a block for type checkers only."""
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


def is_assembly(module: str) -> bool:
    return f"{module}.".startswith(f"{ASSEMBLY}.")


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_point_down(path: Path) -> None:
    module, package = module_of(path), room_of(module_of(path))
    assert package in (*ORDER, *ALONE, "__init__"), f"{package} has no place in ORDER yet"
    for other, _names, line in ours(path):
        imported = room_of(other)
        if imported in (package, "__init__", *ALONE):
            continue
        assert package not in ALONE, f"{path}:{line}: {package} imports {other}"
        if other.endswith(".settings") and (is_assembly(module) or package == "admin"):
            continue
        assert ORDER.index(package) < ORDER.index(imported), f"{path}:{line}: {module} -> {other}"


def test_settings_import_nothing_but_settings() -> None:
    for path in ROOT.rglob("settings.py"):
        for other, _names, line in ours(path):
            assert other.split(".")[-1] in ("section", "settings"), f"{path}:{line}: {other}"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_extensions_are_used_by_their_public_module_alone(path: Path) -> None:
    module = module_of(path)
    for other, _names, line in ours(path):
        parts = other.split(".")
        if parts[:2] != ["steward", "extensions"] or module.split(".")[:3] == parts[:3]:
            continue
        if is_assembly(module) and parts[3:] == ["settings"]:
            continue
        assert len(parts) == 3, f"{path}:{line}: {module} -> {other}"


def test_only_the_command_imports_the_insides_of_sacct() -> None:
    """Other packages query ``jobs``: ``queries``, ``line_queries``, ``line_sources``."""
    inside = "steward.accounting.sacct"
    importers = {
        module_of(path)
        for path in files()
        for other, names, _line in ours(path)
        if any(
            f"{name}.".startswith(f"{inside}.")
            for name in (other, *(f"{other}.{n}" for n in names))
        )
    }
    outside = {module for module in importers if not f"{module}.".startswith(f"{inside}.")}
    assert outside == {"steward.cli.sacct"}


def test_what_extensions_offer_can_be_loaded() -> None:
    groups = (
        *("steward.job_log", "steward.jobacct", "steward.remote_bank", "steward.scheduler"),
        *("steward.settings_check", "steward.sink"),
    )
    for group in groups:
        offers = list_offers(group)
        assert offers, group
        for name in offers:
            assert load_offer(group, name) is not None


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
"""Public names of Python and of libraries that begin with an underscore."""
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
    """Yield the members of others that a node names: read, imported, or replaced by monkeypatch."""
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
