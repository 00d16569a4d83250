"""What Steward's own processes are given and kept from."""

import ctypes
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4


def refuse_core_dumps() -> None:
    """Have this process and those it forks leave no core: environments are in their memory.

    A limit of 0 does not keep the kernel from piping a core to a program; not being dumpable does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
