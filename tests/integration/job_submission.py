"""Helpers that submit jobs to a sandbox and wait for their results."""

import re
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from steward.sandbox import Sandbox


class Submit(Protocol):
    def __call__(self, script: str | bytes, *, user: str = ..., **options: Any) -> int: ...


def submit_to(
    cluster: Sandbox,
    script: str | bytes,
    *,
    user: str,
    env: dict[str, str] | None = None,
    **options: Any,
) -> int:
    """Submit a batch script; return the job's id.

    Options are sbatch's: ``job_name="x"`` is ``--job-name=x``, ``hold=True`` is ``--hold``.
    """
    words = ["sbatch", "--parsable"]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option}={value}")
    data = script.encode() if isinstance(script, str) else script
    result = cluster.run(words, user=user, input=data, env=env, text=False)
    match = re.match(rb"\d+", result.stdout)
    assert match, (result.stdout, result.stderr)
    return int(match.group())


def state_of(cluster: Sandbox, job: int) -> str:
    """Return the state that squeue shows of a job, "" if it shows none."""
    command = ["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T"]
    return str(cluster.run(command, check=False).stdout).strip()


PATIENCE: Final = 3
"""Factor of time limits for a slow host."""


def wait_until(ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; fail after the time-out."""
    start = time.monotonic()
    deadline = start + PATIENCE * timeout_s
    while True:
        began = time.monotonic()
        if ready():
            return
        now = time.monotonic()
        assert now < deadline, "it did not come about"
        # The awaited work needs a processor, too, as do other tests: the longer, the more seldom.
        time.sleep(max(0.02, 2 * (now - began), min(0.5, (now - start) / 10)))
