"""The command ``steward``: ``python -m steward`` is the same."""

import io
import os
import sys
from typing import Final, NoReturn

_BEGUN_ANEW: Final = "steward_output"
"""The option of Python by which a command that has begun anew knows its output's encoding."""


def main() -> int:
    """Run the command line; the exit code."""
    if sys.stdout is None:
        # Whoever started it has closed it (">&-"): what is printed is wanted by nobody.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end
    encoding = sys._xoptions.get(_BEGUN_ANEW)
    if sys.getfilesystemencoding() != "utf-8" and encoding is None:
        _begin_anew()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A letter that the terminal's encoding lacks is shown as an escape.
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    return _run(sys.argv[1:])


def _run(args: list[str]) -> int:
    if args[:1] == ["sacct"]:
        # Scripts call it for every job: it comes without what reads other commands' options.
        from steward.cli.sacct import execute_sacct as run_sacct

        return run_sacct(args[1:])
    from steward.cli.app import run

    return run(args)


def _begin_anew() -> NoReturn:
    """Become the same command with file names in UTF-8, as every archive's are in any locale.

    The output keeps the encoding of the locale.
    """
    told = ["-X", "utf8", "-X", f"{_BEGUN_ANEW}={sys.stdout.encoding}"]
    words = [sys.executable, *told, *sys.orig_argv[1:]]
    encoded = [word.encode(errors="surrogateescape") for word in words]
    os.execv(sys.executable, encoded)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(main())
