"""Counts the mutants that the unit tests kill. A mutant is the code with one change.

First record the lines that each test runs, then draw mutants of one package::

    coverage run -m pytest tests/unit
    python scripts/mutants.py bank --seed 15 --count 200

A mutant is killed if a test that runs its line fails, or hangs. A mutant on a line that no test
runs survives. Tests that fail on an unchanged copy of the code are not counted. The same seed on
the same commit draws the same mutants. ``--coverage`` prints the branch coverage of each package
in place of mutants.
"""

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import coverage

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "src" / "steward"
MOST_TESTS: Final = 40
"""Most tests run for one mutant, drawn from the tests that run its line."""

TIMEOUT_S: Final = 180.0
"""Time after which the tests of a mutant count as hanging, in seconds."""

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


class Mutant(NamedTuple):
    """One change: file, line, number of the node in the file, and description."""

    path: Path
    line: int
    node: int
    change: str


def describe_change(node: ast.AST) -> str:
    """Describe the change to a node; empty if the node is not changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            return f"{type(operator).__name__} to {COMPARISONS[type(operator)].__name__}"
        case ast.BoolOp(op=operator):
            return "and to or" if isinstance(operator, ast.And) else "or to and"
        case ast.BinOp(op=operator, left=left) if type(operator) in OPERATIONS:
            if isinstance(left, ast.Constant | ast.JoinedStr) and not _is_number(left):
                return ""
            return f"{type(operator).__name__} to {OPERATIONS[type(operator)].__name__}"
        case ast.UnaryOp(op=ast.Not()):
            return "not removed"
        case ast.Constant(value=bool()):
            return "constant inverted"
        case ast.Constant() if _is_number(node):
            return "number increased by one"
        case ast.If() | ast.IfExp() | ast.While():
            return "condition inverted"
        case ast.Expr(value=ast.Call()):
            return "call removed"
        case ast.Return(value=ast.AST()):
            return "return value removed"
    return ""


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def change_node(node: ast.AST) -> None:
    """Make the change that ``describe_change`` describes."""
    match node:
        case ast.Compare():
            node.ops = [COMPARISONS[type(node.ops[0])]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.BinOp():
            node.op = OPERATIONS[type(node.op)]()
        case ast.UnaryOp():
            node.op = ast.UAdd()
            node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float() as number):
            node.value = number + 1
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr():
            node.value = ast.Constant(None)
        case ast.Return():
            node.value = None


def walk_code(tree: ast.Module) -> Iterator[tuple[int, ast.AST]]:
    """Yield the nodes inside functions with their numbers, without type annotations."""
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, is_inside = pending.pop()
        if is_inside:
            yield numbers[id(node)], node
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "args"}:
                continue
            children = value if isinstance(value, list) else [value]
            pending += [
                (child, is_inside or is_function)
                for child in children
                if isinstance(child, ast.AST)
            ]


def list_mutants(package: Path) -> list[Mutant]:
    """List every mutant of the files of a package."""
    mutants = []
    for path in sorted(package.rglob("*.py")):
        for number, node in walk_code(ast.parse(path.read_text())):
            change = describe_change(node)
            if change:
                mutants.append(Mutant(path, getattr(node, "lineno", 0), number, change))
    return sorted(mutants)


def write_mutant(mutant: Mutant, target: Path) -> None:
    """Write the changed file."""
    tree = copy.deepcopy(ast.parse(mutant.path.read_text()))
    change_node(list(ast.walk(tree))[mutant.node])
    target.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def run_tests(tests: list[str], mutant: Mutant | None = None) -> str:
    """Run tests on a copy of the code, with a change or without.

    Returns:
        "passed", "failed", "hung", or "broken" where pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "src"
        shutil.copytree(PACKAGE.parent, source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            write_mutant(mutant, source / mutant.path.relative_to(PACKAGE.parent))
        words = ["pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hung"
    return {0: "passed", 1: "failed"}.get(done.returncode, "broken")


def list_failing(tests: list[str]) -> set[str]:
    """List the tests that fail on an unchanged copy of the code."""
    if not tests or run_tests(tests) == "passed":
        return set()
    if len(tests) == 1:
        return set(tests)
    half = len(tests) // 2
    return list_failing(tests[:half]) | list_failing(tests[half:])


def test_id(context: str) -> str:
    """Return the pytest id of a test from its context in coverage."""
    module, *names = context.split(".")
    return "::".join([f"tests/unit/{module}.py", *names])


def print_coverage(data: coverage.Coverage) -> None:
    """Print the percentage of lines and branches that the tests run, by package, as JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        data.json_report(outfile=out.name)
        files = json.loads(Path(out.name).read_text())["files"]
    sums: dict[str, list[int]] = {}
    for name, figures in files.items():
        words = Path(name).parts[2:]
        package = words[0] if len(words) > 1 else "(root)"
        summary = figures["summary"]
        counts = sums.setdefault(package, [0, 0])
        counts[0] += summary["covered_lines"] + summary["covered_branches"]
        counts[1] += summary["num_statements"] + summary["num_branches"]
    shares = {
        name: round(100 * done / every, 1) for name, (done, every) in sorted(sums.items()) if every
    }
    print(json.dumps(shares, indent=2))


def main() -> None:
    """Print the number of killed mutants and the list of survivors, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", default="", help="a folder of src/steward")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--coverage", action="store_true")
    options = parser.parse_args()
    data = coverage.Coverage()
    data.load()
    if options.coverage:
        print_coverage(data)
        return
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    mutants = list_mutants(PACKAGE / options.package)
    drawn = draw.sample(mutants, min(options.count, len(mutants)))
    tests = []
    for mutant in drawn:
        lines = data.get_data().contexts_by_lineno(str(mutant.path))
        names = {test_id(context) for context in lines.get(mutant.line, ()) if context}
        tests.append(draw.sample(sorted(names), min(MOST_TESTS, len(names))))
    failing = list_failing(sorted({name for few in tests for name in few}))
    tests = [[name for name in few if name not in failing] for few in tests]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(
            pool.map(
                lambda mutant, few: run_tests(few, mutant) if few else "untested", drawn, tests
            )
        )
    described = [
        f"{result}: {mutant.path.relative_to(PACKAGE)}:{mutant.line} {mutant.change}"
        for mutant, result in zip(drawn, results, strict=True)
        if result not in {"failed", "hung"}
    ]
    figures = {
        "mutants": len(drawn),
        "killed": len(drawn) - len(described),
        "hung": results.count("hung"),
        "failing without a change": sorted(failing),
        "survivors": sorted(described),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
