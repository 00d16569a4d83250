"""Entry point of the command ``steward``, and of ``python -m steward``."""

import io
import os
import sys
from typing import Final, NoReturn

_OUTPUT_ENCODING: Final = "steward_output"
"""Name of the -X option that tells a restarted command the encoding of its output."""


def main() -> int:
    """Run the command line and return the exit code."""
    if sys.stdout is None:
        # The caller closed standard output (">&-"): discard it.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end
    encoding = sys._xoptions.get(_OUTPUT_ENCODING)
    if sys.getfilesystemencoding() != "utf-8" and encoding is None:
        _restart_with_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks appear as escapes.
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    return _run(sys.argv[1:])


def _run(args: list[str]) -> int:
    if args[:1] == ["sacct"]:
        # Scripts run sacct for every job: do not import the other commands' options.
        from steward.cli.sacct import execute_sacct as run_sacct

        return run_sacct(args[1:])
    from steward.cli.app import run

    return run(args)


def _restart_with_utf8() -> NoReturn:
    """Execute the same command in Python's UTF-8 mode: archives have UTF-8 names in any locale.

    The output keeps the encoding of the locale.
    """
    options = ["-X", "utf8", "-X", f"{_OUTPUT_ENCODING}={sys.stdout.encoding}"]
    words = [sys.executable, *options, *sys.orig_argv[1:]]
    encoded = [word.encode(errors="surrogateescape") for word in words]
    os.execv(sys.executable, encoded)  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
