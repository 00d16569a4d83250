"""Forked child processes of tests, which never return into the test runner."""

import os
import traceback
from collections.abc import Callable


def fork_child(work: Callable[[], object]) -> int:
    """Fork a child that runs ``work`` and exits; return its process id.

    It exits with 0, or with 1 after printing the traceback if ``work`` raises.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
