"""Processes of Steward write no core dumps, which would contain secrets."""

import ctypes
import os
import resource

from steward.core.processes import refuse_core_dumps

_PR_GET_DUMPABLE = 3


def test_no_process_leaves_a_core() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            refuse_core_dumps()
            is_dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
            code = int(is_dumpable != 0 or resource.getrlimit(resource.RLIMIT_CORE)[0] != 0)
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
