"""Job fields as a flat dictionary, under the names of Slurm's API and of pyslurm.

:func:`build_job_details` builds it from a JobRecord, plus fields that only ``scontrol show job``
prints (:func:`split_segments` splits that output by job, :func:`read_extras` reads one job's part).
The job operations of automation return it.

Names (``job_state``, ``num_nodes``, ``std_out``) are the same in every Slurm version. Times are
seconds since the epoch, ``time_limit`` is in minutes, and None means that Slurm shows no value.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from steward.core.records import JobRecord
from steward.slurm.values import parse_moment, to_epoch

_HEAD: Final = re.compile(r"^JobId=([0-9]{1,10}) ", re.MULTILINE)
_FIELD: Final = re.compile(r" ([A-Za-z][A-Za-z/:]*)=(\S*)")
_ID: Final = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,10})|\+([0-9]{1,10}))?")

_AFTER_NAME: Final = ("UserId=", "HetJobIdSet=")

# Fields of scontrol that a JobRecord lacks. None of them is text that users write.
_SCONTROL_NAMES: Final = {
    "AccrueTime": "accrue_time",
    "AllocNode:Sid": "alloc_sid",
    "ArrayTaskThrottle": "array_max_tasks",
    "CPUs/Task": "cpus_per_task",
    "Contiguous": "contiguous",
    "CoreSpec": "core_spec",
    "Deadline": "deadline",
    "DelayBoot": "delay_boot",
    "ExcNodeList": "exc_nodes",
    "HetJobIdSet": "het_job_id_set",
    "LastSchedEval": "last_sched_eval",
    "MinCPUsNode": "pn_min_cpus",
    "MinMemoryCPU": "min_memory_cpu",
    "MinMemoryNode": "min_memory_node",
    "MinTmpDiskNode": "pn_min_tmp_disk",
    "Nice": "nice",
    "PreemptEligibleTime": "preempt_eligible_time",
    "PreemptTime": "preempt_time",
    "Reboot": "reboot",
    "ReqNodeList": "req_nodes",
    "Requeue": "requeue",
    "RunTime": "run_time_str",
    "SchedNodeList": "sched_nodes",
    "TimeLimit": "time_limit_str",
    "TimeMin": "time_min_str",
}
_COMPLETED: Final = (
    *("std_in", "std_out", "std_err", "submit_line", "tres_req_str", "failed_node", "extra"),
    *("suspend_time", "resize_time"),
)
SCONTROL_FIELDS: Final = frozenset((*_SCONTROL_NAMES.values(), *_COMPLETED))
"""Fields that squeue does not show, or shows differently."""
_TIMES: Final = frozenset(
    {"AccrueTime", "Deadline", "LastSchedEval", "PreemptEligibleTime", "PreemptTime"}
)
_FLAGS: Final = frozenset({"Contiguous", "Reboot", "Requeue"})
_NOTHING: Final = frozenset({"", "(null)", "N/A", "None", "Unknown", "*"})


def build_job_details(job: JobRecord, extras: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fields of a job.

    Args:
        job: The record from squeue, completed by scontrol if it was queried alone.
        extras: Further fields from :func:`read_extras`; None omits them.
    """
    is_array = bool(job.array_job_id)
    is_task = is_array and job.array_task.isdigit()
    fields: dict[str, Any] = {
        "job_id": job.job_id,
        "name": job.name,
        "user_id": job.uid,
        "user_name": job.user,
        "group_id": job.gid,
        "group_name": job.group,
        "account": job.account,
        "partition": job.partition,
        "qos": job.qos,
        "job_state": job.state,
        "state_reason": job.reason or "None",
        "batch_flag": job.batch,
        "array_job_id": job.array_job_id or None,
        "array_task_id": int(job.array_task) if is_task else None,
        "array_task_str": job.array_task if is_array and not is_task else None,
        "het_job_id": job.het_job_id or None,
        "het_job_offset": job.het_offset if job.het_job_id else None,
        "sluid": job.sluid,
        "original_sluid": job.original_sluid,
        "restart_cnt": job.restarts,
        "submit_time": to_epoch(job.submit),
        "eligible_time": to_epoch(job.eligible),
        "start_time": to_epoch(job.start),
        "end_time": to_epoch(job.end),
        "time_limit": None if job.time_limit_s is None else job.time_limit_s // 60,
        "suspend_time": to_epoch(job.suspended_at),
        "resize_time": to_epoch(job.resized_at),
        "priority": job.priority,
    }
    fields |= _build_resources(job) | _build_texts(job)
    return {name: None if value == "" else value for name, value in fields.items()} | {
        name: _parse_extra(key, (extras or {}).get(key, ""))
        for key, name in _SCONTROL_NAMES.items()
        if extras
    }


def list_job_fields() -> frozenset[str]:
    """Return the names of all fields."""
    empty_job = JobRecord(job_id=0)
    return frozenset(build_job_details(empty_job, dict.fromkeys(_SCONTROL_NAMES, "")))


def read_extras(job: JobRecord, texts: Mapping[int, str]) -> dict[str, str]:
    """Return a job's further fields from scontrol; {} if they cannot be read with certainty.

    Args:
        job: The job. Its name tells where Slurm's own fields continue.
        texts: Output of scontrol by job id, from :func:`split_segments`.
    """
    segment = texts.get(job.job_id, "")
    name_field = f" JobName={job.name} "
    begin = segment.find(name_field)
    if begin < 0 or not segment.startswith(_AFTER_NAME, begin + len(name_field)):
        return {}
    head = segment[:begin]
    extras: dict[str, str] = {}
    repeated: set[str] = set()
    for key, value in _FIELD.findall(head + " " + segment[begin + len(name_field) :]):
        if key in extras:
            repeated.add(key)
        extras[key] = value
    # Drop fields that occur twice: one may be forged by text of the user's.
    return {
        key: value
        for key, value in extras.items()
        if key in _SCONTROL_NAMES and key not in repeated
    }


def split_segments(out: bytes) -> dict[int, str]:
    """Split ``scontrol -o show job`` by job id, without ids that occur twice.

    Text that a user writes may contain a line that looks like another job's record.
    """
    text = out.decode("utf-8", "backslashreplace")
    heads = list(_HEAD.finditer(text))
    segments: dict[int, str] = {}
    repeated: set[int] = set()
    for index, head in enumerate(heads):
        job_id = int(head[1])
        if job_id in segments:
            repeated.add(job_id)
        end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
        segments[job_id] = text[head.end() - 1 : end]
    return {job_id: segment for job_id, segment in segments.items() if job_id not in repeated}


def parse_job_target(job: str) -> tuple[int, int | None, int | None] | None:
    """Parse a job name into raw id, array task and het component: ``12_3``, ``12+1``; else None."""
    match = _ID.fullmatch(job)
    if match is None:
        return None
    number, task, het_offset = match.groups()
    return (
        int(number),
        None if task is None else int(task),
        None if het_offset is None else int(het_offset),
    )


def _build_resources(job: JobRecord) -> dict[str, Any]:
    """Return the fields on resources and exit codes."""
    return {
        "num_nodes": job.nodes,
        "num_cpus": job.cpus,
        "num_tasks": job.tasks,
        "nodes": job.nodelist,
        "batch_host": job.batch_host,
        "failed_node": job.failed_node,
        "tres_req_str": job.tres_requested,
        "tres_alloc_str": job.tres_allocated,
        "tres_per_job": job.tres_per_job,
        "tres_per_node": job.tres_per_node,
        "tres_per_socket": job.tres_per_socket,
        "tres_per_task": job.tres_per_task,
        "cpus_per_tres": job.cpus_per_tres,
        "mem_per_tres": job.mem_per_tres,
        "features": job.constraints,
        "licenses": job.licenses,
        "shared": job.oversubscribe,
        "resv_name": job.reservation,
        "exit_code": _format_exit_status(job.exit_code, job.exit_signal),
        "derived_ec": _format_exit_status(job.derived_exit_code, job.derived_exit_signal),
    }


def _build_texts(job: JobRecord) -> dict[str, Any]:
    """Return the text fields."""
    return {
        "dependency": job.dependency,
        "alloc_node": job.submit_host,
        "submit_line": job.submit_line,
        "command": job.command,
        "work_dir": job.work_dir,
        "std_in": job.stdin,
        "std_out": job.stdout,
        "std_err": job.stderr,
        "comment": job.comment,
        "admin_comment": job.admin_comment,
        "system_comment": job.system_comment,
        "extra": job.extra,
        "wckey": job.wckey,
        "container": job.container,
        "fed_origin_str": job.federation_origin,
        "fed_siblings_active_str": job.federation_siblings,
    }


def _parse_extra(key: str, text: str) -> Any:
    """Convert a field of scontrol to None, bool, int, seconds since the epoch, or text."""
    if key in _FLAGS:
        return None if text == "" else text not in ("0", "NO")
    if text in _NOTHING:
        return None
    if key in _TIMES:
        return to_epoch(parse_moment(text))
    if key == "AllocNode:Sid":
        text = text.rpartition(":")[2]
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _format_exit_status(code: int | None, signal: int | None) -> str | None:
    """Format an exit code and signal: "3:0"; None if unknown."""
    return None if code is None else f"{code}:{signal or 0}"
