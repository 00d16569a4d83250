"""Lines as JSON: a document a job with its steps, shaped after Slurm's own ``sacct --json``.

Slurm's shape differs from version to version; this one is a promise. Keys are
only ever added; a change of meaning raises :data:`VERSION`. Times are seconds
since the epoch (0: not yet), CPU times seconds and microseconds, sizes bytes;
what is not known is null.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.accounting.sacct.sources import Row
from steward.core.lines import FIELDS

VERSION: Final = 1

_encode: Final = msgspec.json.Encoder().encode
_SECOND_US: Final = 1_000_000


def plain_lines(rows: Iterable[Row], offset: int, now: datetime) -> Iterator[str]:  # noqa: ARG001 -- as documents
    """Each line with all its columns, as one JSON object that a Line is read from."""
    for row in rows:
        fields = zip(FIELDS, row[offset:], strict=True)
        known = {field: value for field, value in fields if value is not None}
        yield _encode(known).decode() + "\n"


def documents(rows: Iterable[Row], offset: int, now: datetime) -> Iterator[str]:
    """A JSON object for each job, its steps in it.

    Args:
        rows: Runs, each before its steps.
        offset: How many values stand before the columns in a row.
        now: The present moment: what runs has run until now.
    """
    now_s = int(now.timestamp())
    job: dict[str, Any] | None = None
    for row in rows:
        line = dict(zip(FIELDS, row[offset:], strict=True))
        if line["step"] and job is not None:
            job["steps"].append(_step(line, now_s))
            continue
        if job is not None:
            yield _encode(job).decode() + "\n"
        job = _job(line, now_s)
    if job is not None:
        yield _encode(job).decode() + "\n"


def _job(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    return {
        "account": line["account"] or "",
        "comment": {
            "administrator": line["admin_comment"] or "",
            "job": line["comment"] or "",
            "system": line["system_comment"] or "",
        },
        "allocation_nodes": line["nodes"] if line["nodelist"] else 0,
        "array": {"job_id": line["array_job_id"] or 0, "task": line["array_task"] or ""},
        "cluster": line["cluster"],
        "constraints": line["constraints"] or "",
        "container": line["container"] or "",
        "derived_exit_code": _exit(line["derived_exit_code"], line["derived_exit_signal"]),
        "exit_code": _exit(line["exit_code"], line["exit_signal"]),
        "extra": line["extra"] or "",
        "failed_node": line["failed_node"] or "",
        "flags": [flag for flag in (line["flags"] or "").split(",") if flag],
        "group": line["group"] or "",
        "gid": line["gid"],
        "het": {"job_id": line["het_job_id"] or 0, "job_offset": line["het_offset"] or 0},
        "is_piece": bool(line["piece_us"]),
        "job_id": line["job_id"],
        "label": line["label"],
        "licenses": line["licenses"] or "",
        "name": line["name"] or "",
        "nodes": line["nodelist"] or "",
        "partition": line["partition"] or "",
        "priority": line["priority"],
        "qos": line["qos"] or "",
        "required": {
            "CPUs": line["requested_cpus"] or 0,
            "nodes": line["requested_nodes"] or 0,
        },
        "reservation": {"name": line["reservation"] or ""},
        "restart_cnt": line["restarts"],
        "sluid": line["sluid"] or "",
        "source": line["source"] or "",
        "state": _state(line),
        "stderr": line["stderr"] or "",
        "stdin": line["stdin"] or "",
        "stdout": line["stdout"] or "",
        "submit_line": line["submit_line"] or "",
        "time": {
            **_times(line, now_s),
            "eligible": _seconds(line["eligible_us"]),
            "submission": _seconds(line["submit_us"]),
            "first_submission": _seconds(line["first_submit_us"]),
            "limit_seconds": line["time_limit_s"],
        },
        "tres": {
            "allocated": _tres(line["tres_allocated"]),
            "requested": _tres(line["tres_requested"]),
        },
        "usage": _usage(line),
        "user": line["user"] or "",
        "uid": line["uid"],
        "wckey": {"wckey": line["wckey"] or ""},
        "working_directory": line["work_dir"] or "",
        "doubts": _words(line["doubts"]),
        "steps": [],
    }


def _step(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    return {
        "step": {"id": line["step"], "name": line["name"] or ""},
        "exit_code": _exit(line["exit_code"], line["exit_signal"]),
        "nodes": {"count": line["nodes"] or 0, "list": line["nodelist"] or ""},
        "state": _state(line),
        "tasks": {"count": line["tasks"] or 0},
        "CPU": {"count": line["cpus"] or 0},
        "time": _times(line, now_s),
        "tres": {"allocated": _tres(line["tres_allocated"])},
        "usage": _usage(line),
        "submit_line": line["submit_line"] or "",
        "source": line["source"] or "",
        "doubts": _words(line["doubts"]),
    }


def _times(line: dict[str, Any], now_s: int) -> dict[str, Any]:
    start, end = _seconds(line["start_us"]), _seconds(line["end_us"])
    suspended = line["suspended_s"] or 0
    user, system = line["user_us"], line["system_us"]
    total = None if user is None and system is None else (user or 0) + (system or 0)
    return {
        "elapsed": max(0, (end or now_s) - start - suspended) if start else 0,
        "start": start,
        "end": end,
        "suspended": suspended,
        "user": _cpu(user),
        "system": _cpu(system),
        "total": _cpu(total),
    }


def _usage(line: dict[str, Any]) -> dict[str, Any]:
    """What was measured, under the names of Steward's own lines."""
    names = (
        *("ave_cpu_us", "min_cpu_us", "min_cpu_node", "min_cpu_task"),
        *("cgroup_user_us", "cgroup_system_us"),
        *("max_rss_bytes", "max_rss_node", "max_rss_task", "ave_rss_bytes"),
        *("peak_bytes", "peak_node", "peak_allocated_bytes"),
        *("max_pages", "max_pages_node", "max_pages_task", "ave_pages", "minor_faults"),
        *("max_read_bytes", "max_read_node", "max_read_task", "ave_read_bytes", "read_bytes"),
        *("max_written_bytes", "max_written_node", "max_written_task"),
        *("ave_written_bytes", "written_bytes"),
    )
    return {name: None if line[name] == "" else line[name] for name in names}


def _state(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "current": [line["state"] or "UNKNOWN"],
        "reason": line["reason"] or "None",
        "cancelled_by": line["cancelled_by"],
    }


def _exit(code: int | None, signal: int | None) -> dict[str, Any]:
    if code is None and signal is None:
        return {"status": "PENDING", "return_code": None, "signal": None}
    status = "SIGNALED" if signal else "SUCCESS" if not code else "ERROR"
    return {"status": status, "return_code": code, "signal": signal}


def _tres(text: str | None) -> dict[str, str]:
    parts = (part.partition("=") for part in (text or "").split(",") if part)
    return {name: amount for name, _, amount in parts}


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _cpu(microseconds: int | None) -> dict[str, int] | None:
    if microseconds is None:
        return None
    seconds, rest = divmod(microseconds, _SECOND_US)
    return {"seconds": seconds, "microseconds": rest}


def _seconds(microseconds: int | None) -> int:
    return (microseconds or 0) // _SECOND_US
