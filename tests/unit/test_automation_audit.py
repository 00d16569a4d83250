"""Audit log: its writers, append-only entries, and the state after a kill."""

import os
import signal
import subprocess
import sys
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steward.automation.actions import (
    AuditReply,
    AuditRequest,
    AutomationContext,
    list_audit,
)
from steward.automation.audit import MAX_RESULT_BYTES, AuditLog, AuditRow, AuditStart
from steward.automation.errors import AuditUnavailable
from steward.core.access import Access, Caller
from steward.core.actions import Registry
from steward.core.config import AccessSettings, Settings
from steward.core.sqlite import SqliteError, open_database, translate_errors

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOBODY = 65534


def begun(**changes: Any) -> AuditStart:
    values: dict[str, Any] = {
        "started": NOON, "action": "slurm.node.drain", "cluster": "c1", "uid": 1001, "user": "ada",
        "how": "socket", "speaker": "ada", "force": False, "parameters": {"nodes": "n1"},
    }  # fmt: skip
    return AuditStart(**{**values, **changes})


def test_an_action_is_there_before_it_has_ended(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path))
    number = audit.begin(begun())
    reader = AuditLog(str(tmp_path), read_only=True)
    (row,) = reader.list_entries()
    assert (row.id, row.status, row.ended) == (number, "running", None)
    assert (row.user, row.how, row.parameters) == ("ada", "socket", {"nodes": "n1"})
    audit.end(number, "succeeded", "", {"n1": {"changed": True}}, at=NOON + timedelta(seconds=2))
    (row,) = reader.list_entries()
    assert (row.status, row.result) == ("succeeded", {"n1": {"changed": True}})
    assert row.ended == NOON + timedelta(seconds=2)
    reader.close()
    audit.close()


def test_nothing_in_it_is_ever_changed(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path))
    audit.end(audit.begin(begun()), "succeeded", at=NOON)
    path = str(tmp_path / "audit.db")
    connection = open_database(path, ["", "", ""][:1])
    for statement in (
        "UPDATE begun SET user = 'bela'",
        "DELETE FROM begun",
        "UPDATE ended SET status = 'failed'",
        "DELETE FROM ended",
    ):
        with pytest.raises(SqliteError, match="never changed"), translate_errors(path):
            connection.execute(statement)
    with pytest.raises(SqliteError), translate_errors(path):
        audit.end(1, "failed", at=NOON)
    connection.close()
    assert audit.list_entries()[0].status == "succeeded"
    audit.close()


def test_rows_are_chosen(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path))
    for index in range(5):
        audit.begin(
            begun(
                started=NOON + timedelta(hours=index),
                action=f"op{index % 2}",
                cluster=f"c{index % 2}",
                uid=index,
            )
        )
    assert [row.id for row in audit.list_entries()] == [5, 4, 3, 2, 1]
    assert [row.id for row in audit.list_entries(limit=2)] == [5, 4]
    assert [row.id for row in audit.list_entries(ref="op1")] == [4, 2]
    assert [
        row.id for row in audit.list_entries(cluster="c0", since=NOON + timedelta(hours=1))
    ] == [5, 3]
    assert [row.id for row in audit.list_entries(uid=3)] == [4]
    one = audit.find_entry(3)
    assert one is not None
    assert one.uid == 2
    assert audit.find_entry(9) is None
    audit.close()


def test_a_long_result_is_left_out(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path))
    number = audit.begin(begun())
    audit.end(number, "succeeded", "", "x" * MAX_RESULT_BYTES, at=NOON)
    row = audit.find_entry(number)
    assert row is not None
    assert (row.status, row.result) == ("succeeded", None)
    audit.close()


def test_where_nothing_was_written_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(AuditUnavailable):
        AuditLog(str(tmp_path), read_only=True)
    with pytest.raises(AuditUnavailable):
        AuditLog(str(tmp_path / "nowhere"))


def test_a_log_that_cannot_be_read_is_an_error_and_one_that_is_missing_is_empty(
    tmp_path: Path,
) -> None:
    context = AutomationContext(
        Settings(state_dir=str(tmp_path)),
        access=Access(AccessSettings(), 0, lambda _cluster: None),
        registry=Registry(),
    )
    reply = list_audit(context, Caller(uid=0), AuditRequest())
    assert reply.actions == ()
    assert "No entry" in reply.empty_reason
    (tmp_path / "audit.db").mkdir()
    with pytest.raises(AuditUnavailable, match=r"audit\.db"):
        list_audit(context, Caller(uid=0), AuditRequest())


_BEGIN = """
import sys, signal
from datetime import datetime, UTC
from steward.automation.audit import AuditLog, AuditStart
audit = AuditLog(sys.argv[1])
for _ in range(int(sys.argv[2])):
    number = audit.begin(AuditStart(
        started=datetime.now(UTC), action="x", cluster="", uid=0, user="", how="local", speaker="",
        force=False, parameters={}))
    if sys.argv[3] == "end":
        audit.end(number, "succeeded", at=datetime.now(UTC))
print("begun", flush=True)
if sys.argv[3] == "wait":
    signal.pause()
"""


def test_who_is_killed_leaves_it_without_an_end(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN, str(tmp_path), "1", "wait"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    audit = AuditLog(str(tmp_path), read_only=True)
    assert audit.list_entries()[0].status == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert audit.list_entries()[0].status == "unfinished"
    audit.close()


def _writer(state: str, uid: int) -> int:
    """Write twenty actions in a process of a user; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setgid(uid)
        os.setuid(uid)
        audit = AuditLog(state)
        for _ in range(20):
            audit.end(audit.begin(begun(uid=uid)), "succeeded", at=NOON)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_root_and_stewards_user_both_write_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    for directory in (tmp_path, *tmp_path.parents):
        if directory != Path(directory.anchor) and directory.stat().st_mode & 0o001 == 0:
            directory.chmod(directory.stat().st_mode | 0o011)
    writers = [_writer(str(state), uid) for uid in (0, NOBODY, 0, NOBODY)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in writers] == [0, 0, 0, 0]
    audit = AuditLog(str(state), read_only=True)
    rows = audit.list_entries(limit=1000)
    audit.close()
    assert len(rows) == 80
    assert {row.status for row in rows} == {"succeeded"}
    for path in state.iterdir():
        status = path.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (NOBODY, 0o600), path


def test_people_see_the_beginning_of_a_long_parameter_and_programs_all_of_it() -> None:
    (column,) = [column for column in AuditReply.layout if column.name == "Parameters"]
    start = begun(parameters={"reason": "x" * 100_000})
    row = AuditRow(**msgspec.structs.asdict(start), id=1, status="succeeded")
    assert column.read_value(row) == "reason=" + "x" * 80
    assert column.read_exact_value(row) == "reason=" + "x" * 100_000


def test_whoever_is_given_a_former_users_uid_does_not_see_what_that_user_did(
    tmp_path: Path,
) -> None:
    audit = AuditLog(str(tmp_path))
    number = audit.begin(begun(uid=1001, user="ada"))
    audit.close()
    settings = Settings(state_dir=str(tmp_path))
    access = Access(AccessSettings(), os.geteuid(), lambda _: None)
    context = AutomationContext(settings, access=access, registry=Registry())
    for user, shown in (("ada", [number]), ("bela", [])):
        for request in (AuditRequest(), AuditRequest(id=number)):
            reply = list_audit(context, Caller(uid=1001, user=user), request)
            assert [row.id for row in reply.actions] == shown
