import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.slurm import LINE
from steward.slurm import cluster_records
from steward.slurm.cluster_records import NodeRecord, ParsedNode, parse_sinfo_reason
from steward.slurm.users import NameResolver
from steward.slurm.values import to_snake_case

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
VERSIONS = ["22.05", "24.11", "25.11", "26.05"]
ROOTS = NameResolver()


def read(*texts: str) -> list[ParsedNode]:
    """Return the parsed records of nodes n1, n2 and so on, with these texts appended."""
    lines = [LINE.format(name=f"n{number}") + text for number, text in enumerate(texts, 1)]
    return cluster_records.parse_nodes(("\n".join(lines) + "\n").encode(), ROOTS)


def recorded(kind: str, version: str) -> bytes:
    return (FIXTURES / f"scontrol-{kind}-{version}.txt").read_bytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_of_four_versions(version: str) -> None:
    shown = cluster_records.parse_nodes(recorded("node", version), ROOTS)
    assert all(one.is_sure and one.has_sure_reason for one in shown)
    nodes = {one.node.name: one.node for one in shown}
    assert {name: node.state for name, node in nodes.items()} == {
        "n1": "MIXED",
        "n2": "ALLOCATED",
        "n3": "ALLOCATED+DRAIN",
        "n4": "DOWN",
    }
    assert (nodes["n1"].reason, nodes["n1"].reason_user, nodes["n1"].reason_at) == ("", "", None)
    n3, n4 = nodes["n3"], nodes["n4"]
    assert n3.reason in ("bad DIMM; ticket=42", "bad DIMM; slot=A1 check")
    assert n4.reason in ("power supply", "fan failed = hot; call")
    assert {n3.reason_user, n4.reason_user} == {"root"}
    assert {n3.reason_uid, n4.reason_uid} == {0}
    assert n3.reason_at is not None
    assert n3.reason_at.tzinfo is UTC
    assert (n3.base, n3.flags) == ("ALLOCATED", ("DRAIN",))
    assert "main" in n3.partitions
    assert (n3.cpus, n3.cpus_allocated) == (8, 8)
    assert n3.memory_bytes in (2000 * 2**20, 16000 * 2**20)
    assert (n3.features, n3.gres) == ((), "")
    assert n3.version.startswith(version)
    assert n3.slurmd_started_at is not None
    assert n3.address == "127.0.0.1"
    details = n3.details
    assert (details["name"], details["state"]) == ("n3", "ALLOCATED+DRAIN")
    assert details["reason"] == n3.reason
    assert details["reason_time"] == int(n3.reason_at.timestamp())
    assert details["os"].endswith("PREEMPT_DYNAMIC @0")
    assert isinstance(details["boot_time"], int)
    assert 0 < details["cpu_load"] < 100
    assert details["cores"] == 1
    assert details["core_spec_cnt"] is details["cpu_spec_list"] is None
    assert details["tres_fmt_str"].startswith("cpu=8,")
    assert details["owner"] is None
    json.dumps(details)


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_and_reservations_of_four_versions(version: str) -> None:
    main = cluster_records.parse_partitions(recorded("partition", version))["main"]
    assert (main.name, main.state, main.nodes) == ("main", "UP", "n[1-4]")
    assert main.details["default"] == "YES"
    assert main.details["max_cpus_per_node"] == "UNLIMITED"
    assert main.details["total_cpus"] == 32
    (maint,) = cluster_records.parse_reservations(recorded("reservation", version)).values()
    assert (maint.name, maint.state, maint.nodes) == ("maint", "INACTIVE", "n[3-4]")
    assert maint.users == ("root",)
    assert maint.flags == ("MAINT", "OVERLAP", "IGNORE_JOBS", "SPEC_NODES")
    assert (maint.accounts, maint.partition) == ((), "")
    assert maint.start is not None
    assert maint.end is not None
    assert (maint.end - maint.start).days == 365
    assert maint.details["node_cnt"] == 2
    assert maint.details["start_time"] == int(maint.start.timestamp())


def test_no_reservations() -> None:
    assert cluster_records.parse_reservations(b"No reservations in the system\n") == {}


@pytest.mark.parametrize(
    ("text", "reason", "user", "sure"),
    [
        (" Reason=x [root@2026-11-22T06:18:05]", "x", "root", True),
        ("  Reason=x [root@2026-11-22T06:18:05]", "x", "root", True),  # 24.11 has two blanks
        (" Reason=x", "x", "", True),
        (" Reason=x Comment=[root@2026-11-22T06:18:05]", "x Comment=", "root", False),
        (" Reason=x [1234@2026-11-22T06:18:05]", "x", "1234", True),
        (" Reason=x [root@2026-11-22T06:18:05] Comment=hello Extra=x", "x", "root", True),
        (" Comment=Reason=y [root@2026-11-22T06:18:05]", "", "", True),
        (
            " Reason=State=IDLE CPUTot=0 ; = [a] [root@2026-11-22T06:18:05]",
            "State=IDLE CPUTot=0 ; = [a]",
            "root",
            True,
        ),
        (
            " Reason=x [bob@2026-01-01T00:00:00] [root@2026-11-22T06:18:05]",
            "x [bob@2026-01-01T00:00:00]",
            "root",
            True,
        ),
        (" Reason=two [root@2026-11-22T06:18:05]        lines", "two lines", "root", False),
        (" Reason=a Comment=b [root@2026-11-22T06:18:05]", "a Comment=b", "root", False),
        (
            " Reason=a [x@2026-01-01T00:00:00] Comment=b [root@2026-11-22T06:18:05]",
            "a",
            "x",
            False,
        ),
    ],
)
def test_where_a_reason_ends(text: str, reason: str, user: str, sure: bool) -> None:
    (shown,) = read(text)
    assert (shown.node.reason, shown.node.reason_user) == (reason, user)
    assert shown.has_sure_reason is sure
    assert shown.node.state == "DOWN+DRAIN+NOT_RESPONDING"
    assert shown.node.cpus == 4


def test_who_gave_a_reason() -> None:
    shown = read(
        " Reason=x [root@2026-11-22T06:18:05]",
        " Reason=x [4294967290@2026-11-22T06:18:05]",
        " Reason=x [no-such-user@2026-11-22T06:18:05]",
        # 22.05 writes this for whoever it does not know.
        " Reason=x [nobody@2026-11-22T06:18:05]",
        " Reason=x [root@Unknown]",
    )
    assert [one.node.reason_uid for one in shown] == [0, 4294967290, None, None, 0]
    assert shown[0].node.reason_at == datetime(2026, 11, 22, 6, 18, 5, tzinfo=UTC)
    assert shown[4].node.reason_at is None


def test_a_line_in_a_comment_is_doubted() -> None:
    forged = " Comment=x\n" + LINE.format(name="n9") + "\nand more"
    shown = read("", forged, "")
    assert [one.node.name for one in shown] == ["n1", "n2", "n9", "n3"]
    assert [one.is_sure for one in shown] == [True, True, False, False]
    # The text may speak of several, so that all behind it are doubted.
    assert not any(one.is_sure for one in read(" Extra=x", "", "")[1:])


def test_a_line_that_a_node_says_it_runs_on_is_doubted() -> None:
    text = LINE.format(name="n1").replace("OS=Linux", "OS=x\n" + LINE.format(name="n2"))
    shown = cluster_records.parse_nodes(text.encode(), ROOTS)
    assert [(one.node.name, one.is_sure) for one in shown] == [("n1", True), ("n2", False)]
    assert shown[0].node.base == "UNKNOWN"


reasons = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\x85"),
    min_size=1,
    max_size=60,
).map(str.strip)


@given(reasons, st.sampled_from(["", " Comment=hello", " Extra=world"]))
@example("Reason=x State=IDLE CfgTRES=", "")
@example("x [root@2026-11-22T06:18:05]", " Comment=y")
@example("[root@2026-11-22T06:18:05] Extra=", "")
@example("]", "")
@example("Comment=", "")
def test_no_reason_changes_what_else_is_said(reason: str, behind: str) -> None:
    if not reason:
        return
    (shown,) = read(f" Reason={reason} [root@2026-01-02T03:04:05]{behind}")
    plain = read(f" Reason=plain [root@2026-01-02T03:04:05]{behind}")[0].node
    changed = {
        field
        for field in NodeRecord.__struct_fields__
        if getattr(shown.node, field) != getattr(plain, field)
    }
    if shown.has_sure_reason:
        assert shown.node.reason == reason
        assert shown.node.reason_uid == 0
        assert changed <= {"reason", "details"}
    else:
        assert changed <= {"reason", "details", "reason_user", "reason_uid", "reason_at"}


@given(st.binary(max_size=300))
def test_any_bytes_are_read(data: bytes) -> None:
    cluster_records.parse_nodes(b"NodeName=n1 " + data, ROOTS)
    cluster_records.parse_nodes(data, ROOTS)
    cluster_records.parse_partitions(b"PartitionName=p " + data)
    cluster_records.parse_reservations(b"ReservationName=r " + data)


def test_what_sinfo_says_of_reasons() -> None:
    reason = parse_sinfo_reason("root(0)", "2026-11-22T06:18:05", "a\nb  c")
    assert (reason.text, reason.user, reason.uid) == ("a b  c", "root", 0)
    assert reason.at == datetime(2026, 11, 22, 6, 18, 5, tzinfo=UTC)
    assert parse_sinfo_reason("Unknown", "Unknown", "none").text == ""
    assert parse_sinfo_reason("root(0)", "2026-11-22T06:18:05", "none").text == "none"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("MinJobAge", "min_job_age"),
        ("MCSPlugin", "mcs_plugin"),
        ("MaxCPUsPerNode", "max_cpus_per_node"),
        ("BOOT_TIME", "boot_time"),
        ("TmpFS", "tmp_fs"),
        ("VSizeFactor", "v_size_factor"),
        ("X11Parameters", "x11_parameters"),
        ("PrEpPlugins", "prep_plugins"),
        ("TCPTimeout", "tcp_timeout"),
        ("CPUs/Task", "cpus_task"),
    ],
)
def test_names(name: str, shown: str) -> None:
    assert to_snake_case(name) == shown
