"""What squeue would print: rows made from the format that it was asked for."""

import re

from steward.slurm.queue import QueueFormat

DEFAULTS = {
    "JobID": "1",
    "ArrayTaskID": "N/A",
    "HetJobID": "N/A",
    "HetJobOffset": "N/A",
    "UserID": "0",
    "GroupID": "0",
    "State": "RUNNING",
    "BatchFlag": "1",
    "RestartCnt": "0",
    "SubmitTime": "2026-03-01T12:00:00",
    "EligibleTime": "2026-03-01T12:00:00",
    "StartTime": "2026-03-01T12:00:05",
    "EndTime": "2026-03-01T13:00:05",
    "TimeLimit": "1:00:00",
    "NumNodes": "1",
    "NumCPUs": "1",
    "NumTasks": "1",
    "exit_code": "0",
    "DerivedEC": "0",
    "TimeUsed": "0:00",
    "PriorityLong": "1",
    "BatchHost": "n/a",
    "Origin": "NA",
    "SiblingsActive": "NA",
    "NodeList": "n1",
    "tres-alloc": "cpu=1,node=1,billing=1",
    "OverSubscribe": "OK",
    "Exclusive": "NO",
    "SLUID": "",
    "Reason": "None",
}


def squeue_row(form: QueueFormat, **shown: str | bytes) -> bytes:
    """One line of ``squeue``, its end included; ``shown`` sets fields by squeue's names."""
    shown.setdefault("ArrayJobID", shown.get("JobID", DEFAULTS["JobID"]))
    line = b""
    for field in re.split(",(?=[A-Za-z_-]+:)", form.variable):
        name, _, suffix = field.partition(":")
        value = shown.get(name, shown.get(name.replace("-", "_"), DEFAULTS.get(name, "(null)")))
        width = re.match(r"\d*", suffix)
        assert width is not None
        text = value if isinstance(value, bytes) else value.encode()
        if width[0]:
            text = text[: int(width[0])].ljust(int(width[0]))
        line += text + suffix[width.end() :].encode()
    return line + b"\n"
