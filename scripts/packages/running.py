"""Runs the programs that make packages."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_TIMEOUT_S = 1800.0


class PackagingError(Exception):
    """Error: a package cannot be built, for the reason in the message."""


def run(
    words: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program; return its output.

    Args:
        words: The program and its arguments.
        cwd: Working directory.
        env: Further environment variables.

    Raises:
        PackagingError: The program is missing, or failed.
    """
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise PackagingError(f"{words[0]} is not here: run scripts/setup.sh dist") from error
    except subprocess.TimeoutExpired as error:
        raise PackagingError(f"{words[0]} took longer than {_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise PackagingError(f"{' '.join(map(str, words))} ended with {done.returncode}: {said}")
    return done.stdout
