"""Scale of all measurements: STEWARD_BENCH_SCALE, from 0 (the smallest size) to 1 (the default)."""

import os

SCALE = float(os.environ.get("STEWARD_BENCH_SCALE", "1"))


def scaled(full: int, least: int = 1) -> int:
    """Scale a count or a number of seconds, down to the least with which a measurement ends."""
    return max(least, round(full * SCALE))
