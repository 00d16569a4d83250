"""Error messages and exit codes of commands: one line on stderr for every error.

Exit codes: 2 for wrong use, 130 for Ctrl-C, 1 for most other errors; a ``StewardError`` carries its
own. :func:`run_command` runs a command and handles its exceptions.
"""

import errno
import os
import sys
from collections.abc import Callable

from steward.core.errors import StewardError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
FAILED = 1
"""Exit code of most errors."""
WRONG_USE = 2
"""Exit code of usage errors."""


def run_command(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command, print its error if it raises one, and return the exit code.

    Args:
        command: The command to run; returns an exit code.
        debug: Whether to print the traceback of an error.
    """
    try:
        return command()
    except StewardError as error:
        return print_error(str(error), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe; without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return _print_unexpected(error, debug)
        # Discard unwritten output; else Python would write it again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return print_error(f"cannot write to stdout: {error.strerror}", FAILED, debug=debug)
    except Exception as error:
        return _print_unexpected(error, debug)


def print_error(message: str, code: int, *, debug: bool) -> int:
    """Print a one-line error message on stderr and return the exit code."""
    from steward.core.printable import escape_line

    if debug:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    print(f"steward: {escape_line(message)}", file=sys.stderr)
    return code


def _print_unexpected(error: Exception, debug: bool) -> int:
    """Print an error that no command expects, with a request to report it."""
    return print_error(
        f"unexpected error, please report it: {type(error).__name__}: {error} (run 'steward "
        "--debug …' for the traceback)",
        FAILED,
        debug=debug,
    )
