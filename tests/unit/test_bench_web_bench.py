"""CPU time of a page as the benchmark reports it."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from web_bench import _taken_s

PARENT = r"""
import subprocess, sys
child = "import time\nwhile time.process_time() < 0.6: pass"
subprocess.run([sys.executable, "-c", child], check=True)
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_ended_between_two_looks_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"\n"
        taken_s = _taken_s((parent.pid,))
    assert taken_s >= 0.5
