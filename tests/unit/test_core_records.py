"""Run record and run line: their common fields, and conversion from one to the other."""

from datetime import UTC, datetime
from typing import Any, get_type_hints

import msgspec

from steward.core.records import RUN_TIMES, USAGE_LINE_FIELDS, JobRecord, RunFields, UsageLine
from steward.core.usage import RunEvent
from steward.jobs.usage import build_run_line

MOMENT = datetime(2026, 11, 21, tzinfo=UTC)
COUNTS = {"nodes", "cpus", "requested_cpus", "requested_nodes", "suspended_s"}
"""Fields whose unknown value is None in a record and 0 in a line."""


def test_fields_of_one_name_have_one_type() -> None:
    record, line = get_type_hints(JobRecord), get_type_hints(UsageLine)
    same = {name for name in record.keys() & line.keys() if record[name] == line[name]}
    assert set(RunFields.__struct_fields__) == same
    # A line counts the tasks that ended, a record those that were requested.
    assert record.keys() & line.keys() - same == {*COUNTS, "tasks"}
    assert {f"{name}_us" for name in RUN_TIMES} <= set(USAGE_LINE_FIELDS)


def test_a_line_has_every_field_of_its_record() -> None:
    values: dict[Any, Any] = {str: "7", int: 7, datetime: MOMENT, bool: True}
    fields = {
        field.name: values[getattr(field.type, "__args__", (field.type,))[0]]
        for field in msgspec.structs.fields(JobRecord)
    }
    record = JobRecord(**fields)
    line = build_run_line(
        "main", RunEvent(job_id=7, first_submit=MOMENT, restarts=7, record=record)
    )
    for name in (*RunFields.__struct_fields__, *COUNTS):
        assert getattr(line, name) == getattr(record, name), name
    assert {getattr(line, f"{name}_us") for name in RUN_TIMES} == {line.first_submit_us}
