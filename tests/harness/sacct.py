"""sacct sources: lines of jobs of every kind in a database, in Parquet and in both."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.events import NOVEMBER
from steward.accounting.sacct.options import parse_sacct_options
from steward.accounting.sacct.output import format_lines
from steward.accounting.sacct.requests import SacctText
from steward.accounting.sacct.selection import build_line_filter, parse_window
from steward.core.access import Caller
from steward.core.records import UsageLine
from steward.extensions.jobacct_plugins.log.parquet import write_parquet
from steward.jobs.line_sources import (
    LineSource,
    MergedSource,
    ParquetSource,
    sort_into_scratch,
)

ROOT = Caller(uid=0, user="root", how="local")
ADA = Caller(uid=1001, user="ada")


def us(text: str) -> int:
    """Return a time of 2026-11-21, or a date and time, in microseconds since the epoch."""
    full = text if "T" in text else f"2026-11-21T{text}"
    return int(datetime.fromisoformat(full).replace(tzinfo=UTC).timestamp()) * 1_000_000


def run(job_id: int, begin: str = "10:00:00", end: str = "10:01:00", **fields: Any) -> UsageLine:
    """Return the line of a run, by default from 10:00 to 10:01; ``end`` is "" if it still runs."""
    times = {
        "submit_us": us(begin),
        "eligible_us": us(begin),
        "start_us": us(begin),
        "end_us": us(end) if end else 0,
    }
    defaults = {
        "cluster": "main",
        "label": str(job_id),
        "uid": 1001,
        "user": "ada",
        "gid": 100,
        "group": "users",
        "account": "phys",
        "partition": "batch",
        "qos": "normal",
        "name": "job",
        "state": "COMPLETED",
        "exit_code": 0,
        "exit_signal": 0,
        "nodes": 1,
        "cpus": 2,
        "nodelist": "n1",
        "requested_cpus": 2,
        "requested_nodes": 1,
        "time_limit_s": 3600,
        "tres_requested": "cpu=2,mem=4G,node=1,billing=2",
        "tres_allocated": "cpu=2,mem=4G,node=1,billing=2",
        "first_submit_us": us(begin),
    }
    return UsageLine(job_id=job_id, **{**defaults, **times, **fields})


def step(of: UsageLine, name: str, **fields: Any) -> UsageLine:
    return msgspec.structs.replace(of, step=name, name=name, tasks=1, **fields)


JOBS = [
    run(1, name="first"),
    step(run(1), "batch", user_us=1_500_000, system_us=250_000, max_rss_bytes=5_365_760),
    step(run(1), "0", max_rss_node="n1", max_rss_task=0, max_rss_bytes=1 << 30),
    step(run(1), "10"),
    step(run(1), "extern"),
    step(run(1), "2"),
    run(2, end="", state="RUNNING", user="bob", uid=1002, account="chem", name="second"),
    run(
        3,
        end="",
        state="PENDING",
        start_us=0,
        nodelist="",
        nodes=0,
        tres_allocated="",
        reason="Resources",
    ),
    run(4, state="CANCELLED", cancelled_by=1002, qos="high", exit_code=0, exit_signal=15),
    run(5, label="7_1", array_job_id=7, array_task="1", state="FAILED", exit_code=3),
    run(6, label="7_2", array_job_id=7, array_task="2"),
    run(
        7,
        end="",
        label="7_[3-9]",
        array_job_id=7,
        array_task="3-9",
        state="PENDING",
        start_us=0,
        nodelist="",
    ),
    run(8, label="8+0", het_job_id=8, het_offset=0),
    run(9, label="8+1", het_job_id=8, het_offset=1, nodelist="n[2-4]", nodes=3),
    run(10, begin="2026-11-19T08:00:00", end="2026-11-19T09:00:00", user="bob", uid=1002),
    # Requeued: the first run, and the second.
    run(11, restarts=0, is_latest=0, state="REQUEUED", first_submit_us=us("10:00:00")),
    run(11, begin="11:00:00", end="11:05:00", restarts=1, first_submit_us=us("10:00:00")),
    # Resized: the piece before, and the piece after.
    run(12, end="10:00:30", state="RESIZING", piece_us=us("10:00:30"), is_latest=0),
    run(12, nodes=2),
    # A reused job id.
    run(13, begin="09:00:00", end="09:30:00", name="old"),
    run(13, name="new"),
    # Held: never eligible.
    run(14, end="", state="PENDING", start_us=0, eligible_us=0, nodelist=""),
    # Known from its end record alone, which has no eligible time.
    run(15, begin="2026-11-18T08:00:00", end="2026-11-18T09:00:00", eligible_us=0),
]


def parquet_of(lines: Sequence[UsageLine], path: Path) -> LineSource:
    write_parquet(lines, str(path))
    return ParquetSource([str(path)])


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> LineSource:
    return parquet_of(JOBS, tmp_path_factory.mktemp("closed") / "2026-11-21.parquet")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> LineSource:
    """Half of the jobs in each source, some in both, with all components of a het job in one."""
    path = tmp_path_factory.mktemp("mixed") / "2026-11-21.parquet"
    in_database = [line for line in JOBS if line.job_id % 2 or line.job_id > 7]
    in_parquet = [
        line for line in JOBS if (not line.job_id % 2 and line.job_id != 8) or line.job_id < 4
    ]
    return MergedSource(sort_into_scratch(in_database, "here"), parquet_of(in_parquet, path))


@pytest.fixture(scope="module", params=["database", "parquet", "both"])
def source(request: pytest.FixtureRequest, closed: LineSource, mixed: LineSource) -> LineSource:
    return {"database": sort_into_scratch(JOBS, "lines"), "parquet": closed, "both": mixed}[
        request.param
    ]


def asked(source: LineSource, line: str, asker: Caller = ROOT) -> str:
    request = parse_sacct_options(line.split(), {}, "UTC").request
    when = parse_window(request, NOVEMBER, UTC)
    selection = build_line_filter(asker, request, when, request.clusters, None)
    items = format_lines(source, selection, request, when, NOVEMBER, {"main": "UTC"})
    return "".join(item.text for item in items if isinstance(item, SacctText))


def ids(source: LineSource, line: str) -> list[str]:
    return asked(source, f"{line} -P -o jobid").split()
