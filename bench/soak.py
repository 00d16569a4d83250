"""``make soak``: a storm that lasts, to see what grows: memory, databases, delays.

SOAK_MINUTES says how long (10), BENCH_DIR where. Jobs come in bursts and leave
the spool a minute later. At the end every job is compared byte for byte; one
that is missing or different makes the exit code 1.
"""

import os
import subprocess
import sys
import time

from run import fresh_directory, is_whole, play
from scale import scaled
from watching import Watch

RATE, BURST, LIFE_S = 100, 200, scaled(60)
_EVERY_S = 60.0


def main() -> int:
    """Play, tell once a minute, compare; the exit code."""
    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    seconds = scaled(int(minutes * 60))
    jobs = RATE * seconds
    print(f"{jobs} jobs in {seconds / 60:g} minutes, {BURST} at once")
    print(" minute  archived  behind  PSS MB  CPU us/job  state MB")
    with fresh_directory() as where, Watch(where) as watch:
        arguments = (f"--jobs={jobs}", f"--rate={RATE}", f"--burst={BURST}", f"--live={LIFE_S}")
        finish = play(where, watch.spool, *arguments)
        began = time.monotonic()
        until = began + seconds + LIFE_S
        while time.monotonic() < until:
            time.sleep(min(_EVERY_S, max(0.1, until - time.monotonic())))
            _tell(watch, (time.monotonic() - began) / 60)
        finish()
        complete = watch.wait_archived(jobs, 60.0)
        _tell(watch, (time.monotonic() - began) / 60)
        archived = watch.archived()
        wrong = [job for job in range(1, jobs + 1) if not is_whole(job, archived.get(job, {}))]
        complaints = [line for line in watch.log.read_text().splitlines() if " error " in line]
    print("\n".join(complaints[:20]))
    print(f"{jobs - len(wrong)} of {jobs} jobs are whole, {len(complaints)} errors were logged")
    return 1 if wrong or not complete else 0


def _tell(watch: Watch, minute: float) -> None:
    head, passed = watch.progress()
    used_s = sum(sum(cost) for cost in watch.cpu().values())
    size = subprocess.run(["du", "-sk", str(watch.state)], capture_output=True, check=True)
    state_mb = int(size.stdout.split()[0]) / 1024
    print(
        f"{minute:7.1f} {passed:9} {head - passed:7} {watch.pss_bytes() / 1e6:7.1f} "
        f"{used_s / max(1, passed) * 1e6:11.0f} {state_mb:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
