"""Priority of the gate over other processes of the host; its own child processes lack it."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from harness.gate import running_here, settings_of

_POLICY = "import os; print(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)"
_STRETCH = f"""
import os, resource, subprocess, sys, threading, time
from steward.bank.gate.server import RealTimePriority, set_real_time_priority

def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

one = RealTimePriority(again_s=0)
one.acquire()
one.renew()
said = [policy()]
said.append(int(subprocess.check_output([sys.executable, "-c", {_POLICY!r}])))
for first in (False, True):
    thread = threading.Thread(
        target=lambda: (first and set_real_time_priority(), said.append(policy()))
    )
    thread.start()
    thread.join()
for _ in range(2):
    until = time.thread_time() + 5
    while policy() == os.SCHED_RR and time.thread_time() < until:
        pass
    said.append(policy())
    one.renew()
    said.append(policy())
    time.sleep(0.01)
print(*said, *resource.getrlimit(resource.RLIMIT_RTTIME), os.getsid(0) == os.getpid())
"""


def _may_go_first() -> bool:
    # A thread of this process would keep it.
    code = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not _may_go_first(), reason="needs the right to real-time scheduling")
def test_it_goes_first_but_never_for_long() -> None:
    found = subprocess.check_output([sys.executable, "-c", _STRETCH], text=True, timeout=60)
    *policies, stretch_us, mad_us, leads = found.split()
    first, usual = os.SCHED_RR, os.SCHED_OTHER
    itself, program, thread, one_that_asks = first, usual, usual, first
    after_long, renewed = usual, first
    wanted = [itself, program, thread, one_that_asks, *(after_long, renewed) * 2]
    assert [int(one) for one in policies] == wanted
    assert (int(stretch_us), int(mad_us)) == (200_000, 10_000_000)
    assert leads == "True"


@pytest.mark.skipif(not _may_go_first(), reason="needs the right to real-time scheduling")
def test_the_thread_that_connects_to_another_gate_has_real_time_priority(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    gate = msgspec.structs.replace(settings.gate, ask="127.0.0.1:1")
    with running_here(msgspec.structs.replace(settings, gate=gate)) as asking:

        def has_priority() -> bool:
            """Return True while such a thread waits between two attempts, at that priority."""
            policies = set()
            for thread in threading.enumerate():
                if thread.name == "remote gate" and thread.native_id:
                    with suppress(ProcessLookupError):
                        policies.add(os.sched_getscheduler(thread.native_id))
            return policies == {os.SCHED_RR | os.SCHED_RESET_ON_FORK}

        asking.wait(has_priority)


def test_without_the_right_it_goes_on() -> None:
    code = """
import os, resource
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
from steward.bank.gate.server import RealTimePriority
one = RealTimePriority()
one.acquire()
one.renew()
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
"""
    code = "import steward.bank.gate.server, logging\n" + code
    found = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert found.split() == [str(os.SCHED_OTHER), str(own_niceness)]
