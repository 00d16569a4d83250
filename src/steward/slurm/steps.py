"""Steps of jobs that slurmctld knows, as ``scontrol -o show step JOB`` writes them.

``squeue -s --json`` of 22.05 prints jobs, so the text is read, in every version. Of a job
asked for singly it holds no steps but its own: the name of one, which is its user's to
choose, can at the worst say nonsense of that user's own job.
"""

import re
from typing import Any, Final

from steward.slurm import values
from steward.slurm.shown import snake

Steps = dict[str, dict[str, Any]]
"""Of a job, by the step's name: ``batch``, ``extern``, ``interactive``, ``0`` and so on."""

_HEAD: Final = re.compile(
    r"^StepId=(\d{1,10})(?:_(\d{1,10})|\+(\d{1,10}))?\.(\w{1,20}) (UserId=\d+ .*? Name=)",
    re.MULTILINE,
)
_FIELD: Final = re.compile(r"(?:^| )([A-Za-z:]+)=(\S*)")
_NAMES: Final = {
    "NodeList": "nodes",
    "Nodes": "num_nodes",
    "CPUs": "num_cpus",
    "Tasks": "num_tasks",
    "TRES": "tres_alloc_str",
    "CPUFreqReq": "cpu_freq",
    "Dist": "task_dist",
    "SrunHost:Pid": "srun_host_pid",
}
_NOTHING: Final = frozenset({"", "(null)", "(null):0", "N/A", "None", "Unknown"})


def parse(
    out: bytes, job_id: int, task: int | None = None, offset: int | None = None
) -> dict[str, Steps]:
    """The steps of one answer, by the job's name (an array's tasks each have theirs).

    Args:
        out: What ``scontrol -o show step`` wrote.
        job_id: The id that was asked for; steps of others are none of it.
        task: Only this array task's.
        offset: Only this het component's.
    """
    text = out.decode("utf-8", "backslashreplace")
    heads = [
        head
        for head in _HEAD.finditer(text)
        if int(head[1]) == job_id
        and (task is None or head[2] == str(task))
        and (offset is None or head[3] == str(offset))
    ]
    found: dict[str, Steps] = {}
    for head, following in zip(heads, [*heads[1:], None], strict=False):
        rest = text[head.end() : following.start() if following else None].rstrip("\n")
        # 22.05 to 24.11 misspell one that waits for its number.
        step = "TBD" if head[4] == "TDB" else head[4]
        job = head[1] + (f"_{head[2]}" if head[2] else f"+{head[3]}" if head[3] else "")
        # The first of a name is Slurm's own; a second is a text of the one before it.
        found.setdefault(job, {}).setdefault(step, _step(step, head[5], rest))
    return found


def _step(step: str, head: str, rest: str) -> dict[str, Any]:
    name, _, tail = rest.rpartition(" Network=")
    network, _, after = tail.partition(" TRES=")
    fields: dict[str, Any] = {
        "step_id": step,
        "name": _nothing(name),
        "network": _nothing(network),
    }
    for word, value in _FIELD.findall(f"{head.removesuffix('Name=')} TRES={after}"):
        fields.setdefault(_NAMES.get(word, snake(word)), _value(word, value))
    return fields


def _value(word: str, text: str) -> Any:
    if text in _NOTHING:
        return None
    if word == "StartTime":
        at = values.moment(text)
        return None if at is None else int(at.timestamp())
    return int(text) if re.fullmatch(r"\d{1,18}", text) else text


def _nothing(text: str) -> str | None:
    return None if text in _NOTHING else text
