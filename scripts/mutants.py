"""Counts the mutants that the unit tests kill. A mutant is the code with one change.

First record the lines that each test runs, then draw mutants of packages::

    python scripts/mutants.py --record
    python scripts/mutants.py core bank/gate --seed 15 --count 200

A mutant is killed if a test that runs its line fails, or hangs. A mutant on a line that no test
runs survives. Tests that failed in the recording are not counted. The same seed on the same commit
draws the same mutants. ``--coverage`` prints the branch coverage of each package in place of
mutants.
"""

import argparse
import ast
import compileall
import concurrent.futures
import contextlib
import copy
import json
import multiprocessing
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import coverage
import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "src" / "steward"
MOST_TESTS: Final = 40
"""Most tests run for one mutant: the fastest of those that run its line."""

TIMEOUT_S: Final = 90.0
CPU_S: Final = 20
"""Elapsed and processor time after which the tests of a mutant count as hanging, in seconds."""

INSIDE: Final = "STEWARD_MUTANTS_INSIDE"
"""Environment variable of the program that enter_namespace started."""

PRELOADED: Final = [
    *("pytest", "xdist.plugin", "pytest_timeout", "anyio.pytest_plugin"),
    *("faker.contrib.pytest.plugin", "schemathesis.pytest.plugin"),
    *("hypothesis", "hypothesis.strategies", "msgspec", "sqlalchemy", "litestar", "uvicorn"),
    *("httpx", "jinja2", "click", "rich.table", "yaml", "zstandard", "ClusterShell.NodeSet"),
    *("pysqlite3.dbapi2", "inotify_simple"),
]
"""Modules that the tests of every mutant share, so that each starts in less time."""

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


def read_durations(reports: list[Path]) -> dict[str, float]:
    """Read from pytest's reports how long each test that passed took, in seconds.

    Cases of one function are one test.
    """
    duration_s: dict[str, float] = {}
    failed = set()
    for report in reports:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by record()
            function = case.attrib["name"].partition("[")[0]
            module = case.attrib["classname"].removeprefix("tests.unit.")
            name = test_id(f"{module}.{function}")
            duration_s[name] = duration_s.get(name, 0.0) + float(case.attrib["time"])
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(name)
    return {name: spent for name, spent in duration_s.items() if name not in failed}


def test_id(context: str) -> str:
    """Return the pytest id of a test from its context in coverage."""
    module, *names = context.split(".")
    return "::".join([f"tests/unit/{module}.py", *names])


def record(data_file: Path) -> None:
    """Run the unit tests under coverage, in a process for each processor."""
    files = sorted(
        (ROOT / "tests" / "unit").glob("test_*.py"), key=lambda path: path.stat().st_size
    )
    count = os.cpu_count() or 1
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "coverage", "run", "-p", f"--data-file={data_file}"),
                *("-m", "pytest", "-q", f"--junitxml={data_file}-{part}.xml"),
                *map(str, files[part::count]),
            ],
            cwd=ROOT,
        )
        for part in range(count)
    ]
    codes = {process.wait() for process in running}
    if not codes <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        sys.exit(f"the unit tests were not recorded: pytest ended with {sorted(codes)}")
    parts = coverage.Coverage(data_file=str(data_file))
    parts.combine()
    parts.save()


def copy_code(target: Path) -> None:
    """Copy the code, compiled, so that the tests of a mutant compile its file alone."""
    shutil.copytree(PACKAGE.parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(target, quiet=2)


def enter_namespace() -> None:
    """Start this program again in a PID namespace of its own, if root runs it.

    A mutant may send a signal to any process: root's would end those of the whole machine.
    """
    if os.geteuid() or os.environ.get(INSIDE):
        return
    words = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable]
    os.execvpe("unshare", [*words, *sys.argv], {**os.environ, INSIDE: "1"})  # noqa: S606


def run_pytest(tests: list[str], source: Path) -> None:
    """Run tests on a copy of the code; for a process of its own, which exits with pytest's code."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))
    output = os.open(source.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        # Pytest cannot rewrite the assertions of modules that are preloaded, and warns of each.
        warning = "ignore::pytest.PytestAssertRewriteWarning"
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", warning, *tests]))
    finally:
        os._exit(code)


def run_tests(tests: list[str], source: Path) -> str:
    """Run tests on a copy of the code.

    Returns:
        "passed", "failed", "hung", or "broken" where pytest could not run them.
    """
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_pytest, args=(tests, source), daemon=True)
    process.start()
    process.join(TIMEOUT_S)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if code is None or code in {-signal.SIGXCPU, -signal.SIGKILL}:
        return "hung"
    if code == pytest.ExitCode.OK:
        return "passed"
    # A change may keep a module of tests from being imported: pytest then calls its name wrong use.
    codes = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR
    return "failed" if code in codes else "broken"


def judge_mutant(mutant: Mutant, tests: list[str], source: Path) -> str:
    """Run tests on a copy of the code with one change, and undo the change; see run_tests."""
    target = source / mutant.path.relative_to(PACKAGE.parent)
    write_mutant(mutant, target)
    try:
        return run_tests(tests, source)
    finally:
        shutil.copy2(mutant.path, target)


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


def draw_mutants(package: str, seed: int, count: int) -> list[Mutant]:
    """Draw mutants of a package; every one if it has no more than the count."""
    mutants = list_mutants(PACKAGE / package)
    return random.Random(seed).sample(mutants, min(count, len(mutants)))  # noqa: S311 - no secret


def main() -> None:
    """Print the number of killed mutants and the list of survivors of each package, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="folders of src/steward")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    options = parser.parse_args()
    data = coverage.Coverage()
    data_file = Path(data.config.data_file).absolute()
    if options.record:
        record(data_file)
        return
    data.load()
    if options.coverage:
        print_coverage(data)
        return
    duration_s = read_durations(sorted(data_file.parent.glob(f"{data_file.name}-*.xml")))
    if not duration_s:
        sys.exit(f"{data_file}: no recording of the unit tests; run mutants.py --record first")

    def pick_tests(mutant: Mutant) -> list[str]:
        contexts = data.get_data().contexts_by_lineno(str(mutant.path)).get(mutant.line, [])
        names = {test_id(context) for context in contexts if context} & duration_s.keys()
        return sorted(names, key=lambda name: (duration_s[name], name))[:MOST_TESTS]

    enter_namespace()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as work:
        sources: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(options.jobs):
            source = Path(work) / str(job) / "src"
            copy_code(source)
            sources.put(source)

        def judge(mutant: Mutant, tests: list[str]) -> str:
            source = sources.get()
            try:
                return judge_mutant(mutant, tests, source) if tests else "untested"
            finally:
                sources.put(source)

        for package in options.packages:
            drawn = draw_mutants(package, options.seed, options.count)
            tests = [pick_tests(mutant) for mutant in drawn]
            source = sources.get()
            some = next(filter(None, tests), [])
            unchanged = run_tests(some, source) if some else "passed"
            if unchanged != "passed":
                output = (source.parent / "output").read_text()
                sys.exit(f"{package}: the tests {unchanged} on unchanged code:\n{output}")
            sources.put(source)
            with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
                results = list(pool.map(judge, drawn, tests))
            survivors = [
                f"{result}: {mutant.path.relative_to(PACKAGE)}:{mutant.line} {mutant.change}"
                for mutant, result in zip(drawn, results, strict=True)
                if result not in {"failed", "hung"}
            ]
            figures = {
                "package": package,
                "mutants": len(drawn),
                "killed": len(drawn) - len(survivors),
                "hung": results.count("hung"),
                "survivors": sorted(survivors),
            }
            print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
