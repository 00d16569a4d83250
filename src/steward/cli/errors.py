"""How any command ends: an error is one line on stderr, and the exit code says what kind.

It is 2 for wrong use, 130 for Ctrl-C, else what the error says, which is mostly 1.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from steward.core.errors import StewardError

INTERRUPTED = 130
FAILED = 1
WRONG_USE = 2

_WRONG_VALUES: Final = {
    "int_parsing": "{value} is no whole number",
    "int_parsing_size": "{value} is too large a number",
    "float_parsing": "{value} is no number",
    "finite_number": "{value} is no number",
    "greater_than_equal": "{value} is too small: give {ge} or more",
    "less_than_equal": "{value} is too large: give {le} or less",
}
"""What is wrong with a value, by the name that Pydantic has for it, which checks for Typer."""
_MOST_SHOWN: Final = 60


def ended(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; its exit code.

    Args:
        command: What to run; what it raises is told.
        debug: Whether to show where in the program an error came from.
    """
    try:
        return command()
    except StewardError as error:
        return tell(str(error), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return _unexpected(error, debug)
        # What could not be written would be tried again, and complained about, at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return tell(f"cannot write the output: {error.strerror}", FAILED, debug=debug)
    except Exception as error:
        return _unexpected(error, debug)


def tell(message: str, code: int, *, debug: bool) -> int:
    """Say in one line how a command ended; its exit code."""
    from steward.core.printable import safe

    if debug:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    print(f"steward: {safe(message)}", file=sys.stderr)
    return code


def wrong_value(error: Exception) -> str:
    """What is wrong with a value that Typer refused; "" where its own words say it."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    words = _WRONG_VALUES.get(found[0]["type"]) if found else None
    if words is None:
        return ""
    value = str(found[0]["input"])
    shown = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}…"
    bounds = found[0].get("ctx", {}).items()
    told = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in bounds}
    return words.format(value=repr(shown), **told)


def _unexpected(error: Exception, debug: bool) -> int:
    return tell(
        f"unexpected error, please report it: {type(error).__name__}: {error} "
        "(steward --debug … tells more)",
        FAILED,
        debug=debug,
    )
