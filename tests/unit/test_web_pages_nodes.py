"""Node operations on pages, and their results."""

from datetime import UTC, datetime

import pytest

from steward.admin.credentials.requests import ClusterRole
from steward.admin.status.requests import ConsumerLine, DiskLine, StatusShowAnswer
from steward.automation.operation import load_operations, parse_operation_parameters
from steward.core.errors import UsageError
from steward.web.formats import format_json_html
from steward.web.pages.nodes import NODE_VERBS, build_run_request, list_result_lines, list_verbs
from steward.web.pages.status import list_problems

GIVEN = {
    "nodes": "n[1-2]",
    "reason": "bad DIMM",
    "reservation_name": "maint",
    "start_time": "",
    "duration": "60",
    "users": "",
    "flags": "",
}


def role(*, operator: bool, administrator: bool) -> ClusterRole:
    return ClusterRole(
        cluster="c1",
        zone="",
        operator=operator,
        administrator=administrator,
        sees_nodes=True,
        sees_jobs=True,
        coordinates=(),
    )


@pytest.mark.parametrize("name", sorted(NODE_VERBS))
def test_every_form_fills_in_what_its_operation_takes(name: str) -> None:
    verb = NODE_VERBS[name]
    known = load_operations()[verb.operation]
    assert known.role == verb.required_role
    asked = build_run_request(verb, "c1", GIVEN, dry_run=True)
    # Whatever it does not know, or misses, it refuses.
    parse_operation_parameters(known, asked.parameters)
    assert (asked.cluster, asked.dry_run, asked.force) == ("c1", True, False)


def test_who_is_offered_what() -> None:
    assert list_verbs(role(operator=False, administrator=False)) == ()
    offered = list_verbs(role(operator=True, administrator=False))
    assert {verb.name for verb in offered} == {"reserve", "unreserve"}
    assert len(list_verbs(role(operator=True, administrator=True))) == len(NODE_VERBS)


def test_what_is_missing_or_too_long_is_said() -> None:
    for name, value in (("reason", " "), ("nodes", ""), ("reason", "x" * 5000)):
        with pytest.raises(UsageError, match=r"missing|longer than"):
            build_run_request(NODE_VERBS["drain"], "c1", {**GIVEN, name: value}, dry_run=True)
    empty = build_run_request(NODE_VERBS["reserve"], "c1", {**GIVEN, "duration": ""}, dry_run=False)
    assert "props" not in empty.parameters


def test_a_result_is_told_line_by_line() -> None:
    lines = list_result_lines(
        {
            "n1": {"old_state": "IDLE", "state": "IDLE+DRAIN", "reason": "x", "changed": True},
            "n2": {"state": "IDLE+DRAIN", "old_state": "IDLE+DRAIN", "would_change": False},
            "n3": {"state": "IDLE", "changed": False, "message": "it is not there"},
            "n4": {"state": "IDLE", "changed": False, "would_change": True},
        }
    )
    assert [(one.name, one.changes, one.error) for one in lines] == [
        ("n1", True, ""),
        ("n2", False, ""),
        ("n3", False, "it is not there"),
        ("n4", True, ""),
    ]
    assert lines[0].details == "IDLE \N{RIGHTWARDS ARROW} IDLE+DRAIN; reason: x"
    assert lines[1].details == "IDLE+DRAIN"
    (one,) = list_result_lines(
        {"reservation_name": "r", "nodes": "n1", "created": True, "changed": True}
    )
    assert (one.name, one.changes, one.details) == ("r", True, "nodes: n1; created")
    assert list_result_lines(None) == list_result_lines("text") == list_result_lines([]) == []


def test_long_results_are_cut() -> None:
    assert format_json_html(None) == format_json_html({}) == ""
    assert format_json_html({"a": 1}) == '{\n  "a": 1\n}'
    assert len(format_json_html(["x" * 100] * 1000)) < 21_000


def test_what_is_wrong_with_steward_begins_with_the_worst() -> None:
    answer = StatusShowAnswer(
        steward="1",
        python="3",
        now=datetime.now(UTC),
        running=True,
        consumers=(
            ConsumerLine(name="jobs", state="running", lag=3, lag_s=1.0),
            ConsumerLine(name="bank", state="waiting", detail="PostgreSQL is away"),
        ),
        dead_letters=2,
        disks=(DiskLine(purpose="state", path="/var", total=100, free=1),),
    )
    found = list_problems(answer)
    assert [(one.rank, one.component) for one in found] == [
        ("wrong", "dead letters"),
        ("warning", "consumer bank"),
        ("warning", "disk /var"),
    ]
    assert found[1].message == "PostgreSQL is away"
