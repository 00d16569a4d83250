"""Events of the golden site: jobs, steps and nodes of Monday, 8 January 2024.

The site appends them to the journal as sources do, and waits for all effects of one before it
appends the next, so that events have the same numbers in each run.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from golden_cluster import CLUSTER, GID, UIDS, GoldenSite, at

from steward.core.events import (
    BANK_THRESHOLD,
    CONTROLLER_STATE,
    HOLD_PLACED,
    JOB_END,
    JOB_MISSED,
    JOB_SEEN,
    JOB_STATE,
    NODE_GAP,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    RULE_EXECUTION,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    ControllerState,
    Event,
    JobFacts,
    MissedJobs,
    NodeState,
    PartitionState,
    ReservationState,
    utc_now,
)
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.usage import ExitedTasks, NodeGap, StepEnd, StepStart, TaskUsage

GIB: Final = 1 << 30
_ENDED: Final[dict[str, Any]] = {
    "exit_code": 0,
    "exit_signal": 0,
    "derived_exit_code": 0,
    "derived_exit_signal": 0,
}
_ALLOCATED: Final[dict[str, Any]] = {
    "nodelist": "n1",
    "tres_allocated": "cpu=4,mem=8G,node=1,billing=4",
}
_GPU_JOB: Final[dict[str, Any]] = {
    "partition": "gpu",
    "cpus": 8,
    "requested_cpus": 8,
    "tres_requested": "cpu=8,mem=32G,node=1,billing=8,gres/gpu=2",
    "tres_per_node": "gres/gpu:2",
    "nodelist": "g1",
    "tres_allocated": "cpu=8,mem=32G,node=1,billing=8,gres/gpu=2",
}
_WIDE_JOB: Final[dict[str, Any]] = {
    "name": "train-long",
    "nodes": 2,
    "requested_nodes": 2,
    "cpus": 8,
    "requested_cpus": 8,
    "tasks": 8,
    "tres_requested": "cpu=8,mem=16G,node=2,billing=8",
    "tres_allocated": "cpu=8,mem=16G,node=2,billing=8",
    "time_limit_s": 14_400,
}
_SMALL_JOB: Final[dict[str, Any]] = {
    "cpus": 1,
    "tasks": 1,
    "requested_cpus": 1,
}
_SCRIPTS: Final = {
    101: ("08:00:00", "ada"),
    102: ("08:05:00", "bela"),
    103: ("09:00:00", "ada"),
    104: ("09:10:00", "cleo"),
    105: ("10:00:00", "bela"),
    106: ("14:20:00", "bela"),
    109: ("13:00:00", "cleo"),
    110: ("9T06:00:00", "ada"),
    111: ("9T07:00:00", "bela"),
}


def feed(site: GoldenSite) -> None:
    """Append all events, and have their scripts captured."""
    site.append([*_states(), *_ended_jobs(), *_requeued_job(), *_array(), *_open_jobs(), *_gaps()])
    site.wait_for_events(BANK_THRESHOLD, 1)
    site.wait_for_events(HOLD_PLACED, 2)
    site.wait_for_notice()
    for news, executions in zip(_news(), (1, 2, 3, 5), strict=True):
        site.append([news])
        site.wait_for_events(RULE_EXECUTION, executions)
    site.append([_unusable()])
    site.wait_for_dead_letter()
    for job_id, (when, user) in _SCRIPTS.items():
        site.capture(job_id, at(when), user)
    (site.directory / "other" / "hash.1").mkdir(parents=True)
    site.submit(201, at("10:00:00"), "ada", "other")


def _event(kind: str, key: str, when: datetime, body: Any, source: str = "sensor") -> Event:
    return Event(
        kind=kind,
        cluster=CLUSTER,
        key=f"{kind}:{key}",
        at=when,
        seen_at=when,
        source=source,
        body=body,
    )


def _states() -> list[Event]:
    gpus: dict[str, Any] = {
        "partitions": ("gpu",),
        "cpus": 32,
        "memory_bytes": 128 * GIB,
        "gpus": 4,
    }
    begin = at("00:00:00")
    up = [PartitionState(partition=name, state="UP") for name in ("main", "gpu")]
    maintenance = ReservationState(
        reservation="maint",
        state="ACTIVE",
        nodes="n4",
        start=at("17:00:00"),
        end=at("9T08:00:00"),
        users=("root",),
        flags=("MAINT",),
    )
    reconfigured = ControllerState(up=True, reconfigured=True)
    silent = "DOWN+NOT_RESPONDING"
    why = "Not responding"
    return [
        _event(CONTROLLER_STATE, "1", begin, ControllerState(up=True)),
        *(_node(name, "00:00:00", "IDLE") for name in ("n1", "n2", "n3", "n4")),
        _node("g1", "00:00:00", "IDLE", **gpus),
        *(_event(PARTITION_STATE, f"{body.partition}:1", begin, body) for body in up),
        _node("n3", "10:15:00", silent, "IDLE", reason=why, failed=True),
        _node("n3", "12:40:00", "IDLE", silent, old_reason=why, recovered=True),
        _node(
            "n4",
            "16:00:00",
            "IDLE+DRAIN",
            "IDLE",
            reason="replace DIMM",
            reason_uid=0,
            reason_user="root",
            reason_at=at("16:00:00"),
        ),
        _event(RESERVATION_STATE, "maint:1", at("17:00:00"), maintenance),
        _event(CONTROLLER_STATE, "2", at("18:00:00"), reconfigured),
    ]


def _node(name: str, when: str, state: str, old: str = "", **fields: Any) -> Event:
    body: dict[str, Any] = {
        "node": name,
        "state": state,
        "old_state": old,
        "partitions": ("main",),
        "cpus": 16,
        "memory_bytes": 64 * GIB,
        **fields,
    }
    return _event(NODE_STATE, f"{name}:{when}", at(when), NodeState(**body))


def _ended_jobs() -> list[Event]:
    return [
        *_run(
            (101, "ada", "physics", "COMPLETED"),
            ("08:00:00", "08:00:10", "09:30:10"),
            name="relax",
            submit_line="sbatch relax.sh",
            stdout="/home/ada/runs/slurm-101.out",
            comment="first try",
            **_ALLOCATED,
            **_ENDED,
        ),
        *_step(
            (101, "batch", "n1", "ada"),
            ("08:00:10", "09:30:10"),
            [_task(0, "09:30:10", 12, 20 << 20)],
        ),
        *_step(
            (101, "0", "n1", "ada"),
            ("08:00:12", "09:30:08"),
            [_task(number, "09:30:08", 5000 + 20 * number, GIB) for number in range(4)],
            program="gmx",
            peak_bytes=5 * GIB,
        ),
        *_run(
            (102, "bela", "chemistry", "FAILED"),
            ("08:05:00", "08:06:00", "08:06:20"),
            name="broken",
            **{**_ALLOCATED, "nodelist": "n2"},
            **{**_ENDED, "exit_code": 3, "derived_exit_code": 3},
        ),
        *_step(
            (102, "batch", "n2", "bela"),
            ("08:06:00", "08:06:20"),
            [_task(0, "08:06:20", 1, 5 << 20, status=3 << 8)],
        ),
        *_run(
            (103, "ada", "physics", "TIMEOUT"),
            ("09:00:00", "09:00:30", "11:00:40"),
            name="endless",
            exit_code=0,
            exit_signal=15,
            **{**_ALLOCATED, "nodelist": "n2"},
        ),
        *_step(
            (103, "batch", "n2", "ada"),
            ("09:00:30", "11:00:40"),
            [_task(0, "11:00:40", 7000, 2 * GIB, status=15)],
            peak_bytes=2 * GIB,
        ),
        *_run(
            (104, "cleo", "chemistry", "CANCELLED"),
            ("09:10:00", "", "09:20:00"),
            name="stop",
            cancelled_by=UIDS["cleo"],
            exit_code=0,
            exit_signal=0,
        ),
        *_run(
            (109, "cleo", "chemistry", "COMPLETED"),
            ("13:00:00", "13:00:05", "14:00:05"),
            name="train",
            **_GPU_JOB,
            **_ENDED,
        ),
        *_step(
            (109, "batch", "g1", "cleo"),
            ("13:00:05", "14:00:05"),
            [_task(0, "14:00:05", 9000, 12 * GIB)],
            peak_bytes=14 * GIB,
            cpus=8,
            memory=32,
            program="train.py",
        ),
        *_run(
            (112, "bela", "chemistry", "COMPLETED"),
            ("15:00:00", "15:00:00", "15:10:00"),
            name='odd|name, "quoted" \x1b[31m',
            batch=False,
            **_ALLOCATED,
            **_ENDED,
        ),
        *_step(
            (112, "interactive", "n1", "bela"),
            ("15:00:01", "15:10:00"),
            [_task(0, "15:10:00", 2, 8 << 20)],
        ),
    ]


def _requeued_job() -> list[Event]:
    whole = [_task(number, "12:16:50", 6000, GIB) for number in range(4)]
    again: dict[str, Any] = {"restarts": 1, "program": "cp2k", "peak_bytes": 4 * GIB}
    return [
        *_run(
            (105, "bela", "physics", "NODE_FAIL"),
            ("10:00:00", "10:00:05", "10:15:00"),
            nodelist="n[2-3]",
            failed_node="n3",
            exit_code=0,
            exit_signal=1,
            **_WIDE_JOB,
        ),
        *_run(
            (105, "bela", "physics", "COMPLETED"),
            ("10:15:00", "10:17:00", "12:17:00"),
            restarts=1,
            nodelist="n[1-2]",
            **_WIDE_JOB,
            **_ENDED,
        ),
        *_step(
            (105, "batch", "n1", "bela"),
            ("10:17:00", "12:17:00"),
            [_task(0, "12:17:00", 3000, GIB)],
            restarts=1,
        ),
        *_step((105, "0", "n1", "bela"), ("10:17:10", "12:16:50"), whole, **again),
        *_step((105, "0", "n2", "bela"), ("10:17:10", "12:16:50"), whole, **again),
    ]


def _array() -> list[Event]:
    """Return the events of an array of three tasks; the last has the array's id, out of memory."""
    found: list[Event] = []
    for number, job_id, state, signal in (
        (1, 107, "COMPLETED", 0),
        (2, 108, "COMPLETED", 0),
        (3, 106, "OUT_OF_MEMORY", 9),
    ):
        begin, end = f"14:{20 + number}:00", f"14:{30 + number}:00"
        found += _run(
            (job_id, "bela", "chemistry", state),
            ("14:20:00", begin, end),
            name="sweep",
            array_job_id=106,
            array_task=str(number),
            nodelist="n1",
            tres_requested="cpu=1,mem=2G,node=1,billing=1",
            tres_allocated="cpu=1,mem=2G,node=1,billing=1",
            exit_code=0,
            exit_signal=125 if signal else 0,
            **_SMALL_JOB,
        )
        found += _step(
            (job_id, "batch", "n1", "bela"),
            (begin, end),
            [_task(0, end, 500, GIB, status=signal)],
            cpus=1,
            memory=2,
            peak_bytes=2 * GIB if signal else GIB,
        )
    return found


def _open_jobs() -> list[Event]:
    return [
        *_run(
            (110, "ada", "physics", "RUNNING"),
            ("9T06:00:00", "9T06:00:05", ""),
            name="production",
            **_ALLOCATED,
        ),
        *_step((110, "batch", "n1", "ada"), ("9T06:00:05", "")),
        *_run(
            (111, "bela", "chemistry", "PENDING"),
            ("9T07:00:00", "", ""),
            name="small",
            reason="Resources",
            tres_requested="cpu=1,mem=1G,node=1,billing=1",
            time_limit_s=1800,
            **_SMALL_JOB,
        ),
    ]


def _run(
    whose: tuple[int, str, str, str], times: tuple[str, str, str], **fields: Any
) -> list[Event]:
    """Return the events of one run of a job: submit, start and end.

    Args:
        whose: The job's id, user, account and last state.
        times: Times of submit, start and end; "" for never.
        fields: Further fields of its records.
    """
    job_id, user, account, state = whose
    submit, start, end = times
    known: dict[str, Any] = {
        "job_id": job_id,
        "uid": UIDS[user],
        "user": user,
        "gid": GID,
        "group": "research",
        "account": account,
        "partition": "main",
        "qos": "normal",
        "batch": True,
        "submit": at(submit),
        "eligible": at(submit),
        "time_limit_s": 7200,
        "nodes": 1,
        "cpus": 4,
        "tasks": 4,
        "requested_cpus": 4,
        "requested_nodes": 1,
        "tres_requested": "cpu=4,mem=8G,node=1,billing=4",
        "work_dir": f"/home/{user}/runs",
        "submit_host": "login1",
        "priority": 1000,
        **fields,
    }
    unknown = {"exit_code": None, "exit_signal": None}
    waits = {**known, **unknown, "nodelist": "", "tres_allocated": ""}
    found = [_seen(JOB_SEEN, submit, {**waits, "state": "PENDING"})]
    if start:
        known["start"] = at(start)
        found.append(_seen(JOB_STATE, start, {**known, **unknown, "state": "RUNNING"}))
    if end:
        found.append(_seen(JOB_END, end, {**known, "end": at(end), "state": state}))
    return found


def _seen(kind: str, when: str, fields: dict[str, Any]) -> Event:
    record = JobRecord(**fields)
    name = f"{record.job_id}:{record.restarts}:{record.state}"
    return _event(kind, name, at(when), JobFacts(record=record, whole=True), "snapshot")


def _step(
    name: tuple[int, str, str, str],
    times: tuple[str, str],
    tasks: Sequence[TaskUsage] = (),
    *,
    program: str = "bash",
    cpus: int = 4,
    memory: int = 8,
    restarts: int = 0,
    peak_bytes: int | None = None,
) -> list[Event]:
    """Return the events of a step on one node: launch, exits of tasks, end.

    Args:
        name: The job's id, the step, the node and the user.
        times: Times of launch and end; "" for not yet.
        tasks: Usage of its tasks.
        program: Name of its program.
        cpus: CPUs that it had on the node.
        memory: Memory that it had on the node, in GiB.
        restarts: Restart count of the run.
        peak_bytes: Peak memory of its cgroup.
    """
    job_id, step, node, user = name
    begin, end = times
    launched_us = to_micros(at(begin))
    launch: dict[str, Any] = {
        "job_id": job_id,
        "step": step,
        "node": node,
        "launched_us": launched_us,
    }
    key = f"{job_id}.{step}:{node}:{launched_us}"
    started = StepStart(
        **launch,
        uid=UIDS[user],
        gid=GID,
        tasks=max(1, len(tasks)),
        cpus=cpus,
        memory_bytes=memory * GIB,
        name=program,
        restarts=restarts,
    )
    found = [_event(STEP_START, key, at(begin), started, "node")]
    if end:
        exited = ExitedTasks(**launch, tasks=tuple(tasks))
        largest = max(task.max_rss_bytes or 0 for task in tasks)
        over = StepEnd(**launch, tasks=len(tasks), max_rss_bytes=largest, peak_bytes=peak_bytes)
        found.append(_event(TASK_EXIT, key, at(end), exited, "node"))
        found.append(_event(STEP_END, key, at(end), over, "node"))
    return found


def _task(number: int, end: str, cpu_s: int, rss: int, status: int = 0) -> TaskUsage:
    """Return the usage of one task."""
    return TaskUsage(
        task=number,
        pid=20_000 + number,
        status=status,
        ended_us=to_micros(at(end)),
        user_us=cpu_s * 900_000,
        system_us=cpu_s * 100_000,
        max_rss_bytes=rss,
        minor_faults=1200,
        read_bytes=50 << 20,
        written_bytes=10 << 20,
        voluntary_switches=300,
        involuntary_switches=12,
    )


def _gaps() -> list[Event]:
    lost = NodeGap(node="n2", why="lost", lines=7, since=at("11:00:00"))
    missed = MissedJobs(job_ids=(99,))
    return [
        _event(NODE_GAP, "n2:1", at("11:30:00"), lost, "node"),
        _event(JOB_MISSED, "99", at("19:00:00"), missed, "spool"),
    ]


def _news() -> list[Event]:
    """Return present states, on which rules act."""
    upgrade = ReservationState(reservation="upgrade", state="INACTIVE", users=("root", "cleo"))
    bodies = [
        (PARTITION_STATE, PartitionState(partition="gpu", state="DOWN", old_state="UP")),
        (PARTITION_STATE, PartitionState(partition="main", state="DOWN", old_state="UP")),
        (PARTITION_STATE, PartitionState(partition="main", state="UP", old_state="DOWN")),
        (RESERVATION_STATE, upgrade),
    ]
    now = utc_now()
    return [
        _event(kind, f"news:{number}", now + timedelta(milliseconds=number), body)
        for number, (kind, body) in enumerate(bodies)
    ]


def _unusable() -> Event:
    """Return an event that the consumer of jobs rejects."""
    record = JobRecord(job_id=98, name="nameless", state="RUNNING")
    return _event(JOB_STATE, "98", at("19:30:00"), JobFacts(record=record), "snapshot")
