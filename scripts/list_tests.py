"""Lists the tests by file, with the number of cases if there are several.

``python scripts/list_tests.py`` prints the list. ``--compare FILE`` prints a unified diff from
an earlier list, and exits with 1 if the lists differ.
"""

import argparse
import collections
import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def list_tests() -> list[str]:
    """List the test files, each followed by its tests."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    out = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    cases: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in out.splitlines():
        path, separator, test = line.partition("::")
        if separator:
            cases[path][test.partition("[")[0]] += 1
    lines = []
    for path, tests in sorted(cases.items()):
        lines.append(path)
        lines += [f"  {test} {n}" if n > 1 else f"  {test}" for test, n in sorted(tests.items())]
    return lines


def main() -> None:
    """Print the list, or its diff from an earlier list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", metavar="FILE", type=Path)
    earlier = parser.parse_args().compare
    lines = list_tests()
    if earlier is None:
        print("\n".join(lines))
        return
    diff = list(difflib.unified_diff(earlier.read_text().splitlines(), lines, lineterm=""))
    print("\n".join(diff))
    sys.exit(1 if diff else 0)


if __name__ == "__main__":
    main()
