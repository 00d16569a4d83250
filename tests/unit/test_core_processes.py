"""Steward's processes dump no core, and load no module of another version."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import steward
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


def test_a_process_loads_no_module_of_another_version(tmp_path: Path) -> None:
    package, source = tmp_path / "steward", Path(steward.__file__).parent
    shutil.copytree(source / "core", package / "core")
    shutil.copy(source / "__init__.py", package)
    program = """
import os, sys
import steward.core.errors
from steward.core.processes import reject_imports_after_upgrade
reject_imports_after_upgrade()
import steward.core.printable
assert steward.core.printable.__file__.startswith(sys.argv[1]), "the copy is in use"
path = steward.__file__
with open(path + ".new", "w") as file:
    file.write("__version__ = '99'")
os.replace(path + ".new", path)
import steward.core.printable, wave
for name in ("steward.core.usage", "ClusterShell.NodeSet"):
    try:
        __import__(name)
    except steward.core.errors.Unavailable as error:
        print(error)
"""
    output = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
        text=True,
    ).stdout
    assert output.splitlines() == [
        f"cannot load {name}: Steward was upgraded on disk, and this process still runs "
        f"{steward.__version__}: restart the daemon (systemctl restart steward)"
        for name in ("steward.core.usage", "ClusterShell")
    ]
