r"""Writes the lock files, one a purpose, from one lock of all that pyproject.toml names.

``python scripts/write_locks.py ALL.lock``, where ALL.lock is what `uv pip compile` resolves::

    uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
        --all-extras --group dev --group servers --group site --group build pyproject.toml \
        -o ALL.lock

What is resolved together has one version of each package, whichever files are installed.
"""

import sys

from packages.wheels import LOCKS, ROOT, TESTS, locked, locked_set


def main(path: str) -> None:
    """Split a lock into the files that ``scripts/setup.sh`` installs."""
    every = dict(locked(path))
    sets = {lock: locked_set(lock) for lock in LOCKS}
    # What other systems need is in none of the sets: nothing is installed by it here.
    assigned = {name for names in sets.values() for name in names}
    sets[TESTS] |= every.keys() - assigned
    for lock, names in sets.items():
        lines = [line for name in sorted(names) for line in every[name]]
        (ROOT / lock).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
