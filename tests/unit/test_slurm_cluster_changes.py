"""Changes sent to scontrol, on stand-ins; integration tests change real clusters."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.slurm import LINE, Stage
from steward.slurm import (
    ClusterChanges,
    SlurmError,
    SlurmRefused,
    SlurmUnavailable,
    UnknownNode,
    UnknownPartition,
    UnknownReservation,
    WrongUpdate,
)
from steward.slurm.cluster_changes import clean_reason, extract_message, normalize_node_changes
from steward.slurm.settings import ClusterSettings

STATE = "State=DOWN+DRAIN+NOT_RESPONDING"


class Place(Stage):
    """Stand-ins of a cluster of three idle nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.show(n1="IDLE", n2="IDLE", n3="IDLE")
        self.changing = ClusterChanges("c1", ClusterSettings(slurm_bin=str(root)))

    def show(self, **states: str) -> None:
        lines = [LINE.format(name=name).replace(STATE, f"State={s}") for name, s in states.items()]
        self.nodes(*lines)
        for name, line in zip(states, lines, strict=True):
            self.answer(f"scontrol -a -o show node {name}", line + "\n")

    def refuse(self, command: str, words: str) -> None:
        (self.root / command.replace("/", "_")).write_text(f"echo '{words}' >&2; exit 1\n")

    def changes(self) -> list[str]:
        return [line for line in self.asked() if line.split()[1] in ("update", "create", "delete")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_all_at_once_where_slurm_takes_it(place: Place) -> None:
    place.answer("scontrol update NodeName=n[1-2] State=DRAIN Reason=bad DIMM", "")
    told = place.changing.set_state(["n2", "n1", "n2"], "DRAIN", "bad DIMM")
    assert told == {"n1": "", "n2": ""}
    assert len(place.changes()) == 1


def test_node_by_node_where_it_does_not(place: Place) -> None:
    place.refuse(
        "scontrol update NodeName=n[1-3] State=DRAIN Reason=x",
        "slurm_update error: Invalid node state specified",
    )
    drained = LINE.format(name="n1").replace(STATE, "State=IDLE+DRAIN")
    place.answer("scontrol update NodeName=n2 State=DRAIN Reason=x", "")
    place.refuse(
        "scontrol update NodeName=n3 State=DRAIN Reason=x",
        "slurm_update error: Invalid node state specified",
    )
    place.nodes(
        drained + " Reason=x [root@2026-11-22T06:18:05]",
        *(LINE.format(name=name).replace(STATE, "State=IDLE") for name in ("n2", "n3")),
    )
    told = place.changing.set_state(["n1", "n2", "n3"], "DRAIN", "x")
    assert told == {"n1": "", "n2": "", "n3": "Invalid node state specified"}
    assert [line.split()[2] for line in place.changes()] == [
        "NodeName=n[1-3]",
        "NodeName=n2",
        "NodeName=n3",
    ]


def test_one_that_is_as_it_should_be_is_done(place: Place) -> None:
    place.refuse(
        "scontrol update NodeName=n1 State=RESUME", "slurm_update error: Invalid node state"
    )
    assert place.changing.set_state(["n1"], "RESUME") == {"n1": ""}
    place.show(n1="DOWN", n2="IDLE", n3="IDLE")
    assert place.changing.set_state(["n1"], "RESUME") == {"n1": "Invalid node state"}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("slurm_update error: Invalid user id", SlurmRefused),
        ("slurm_update error: Access/permission denied", SlurmRefused),
        ("slurm_update error: Unable to contact slurm controller", SlurmUnavailable),
    ],
)
def test_what_ends_it_for_all(place: Place, words: str, kind: type[SlurmError]) -> None:
    place.refuse("scontrol update NodeName=n[1-2] State=RESUME", words)
    with pytest.raises(kind):
        place.changing.set_state(["n1", "n2"], "RESUME")
    assert len(place.changes()) == 1


def test_nothing_is_changed_where_one_is_unknown(place: Place) -> None:
    with pytest.raises(UnknownNode) as unknown:
        place.changing.set_state(["n1", "n9"], "DOWN", "x")
    assert unknown.value.nodes == ("n9",)
    with pytest.raises(UnknownNode):
        place.changing.update_nodes(["n1", "n9"], {"weight": 1})
    with pytest.raises(UnknownNode):
        place.changing.create_reservation("r", ["n1", "n9"], users=["root"])
    assert place.changes() == []


@pytest.mark.parametrize("reason", ["", "  ", "\n", '""', "\x00"])
def test_no_drain_without_a_reason(place: Place, reason: str) -> None:
    for state in ("DOWN", "DRAIN", "FAIL"):
        if reason == '""':
            continue
        with pytest.raises(WrongUpdate, match="reason"):
            place.changing.set_state(["n1"], state, reason)
    with pytest.raises(WrongUpdate, match="cannot set the state"):
        place.changing.set_state(["n1"], "DRAIN Reason=x", "y")  # type: ignore[arg-type]
    assert place.changes() == []


@pytest.mark.parametrize(
    "infos",
    [
        {},
        {"NodeName": "n2"},
        {"node_name": "n2"},
        {"Weight=1 NodeName": "n2"},
        {"comment": "a\nNodeName=n2"},
        {"comment": 'a"b'},
        {"comment": "x" * 5000},
        {"weight": 1, "Weight": 2},
        {"state": "IDLE", "node_state": "DOWN"},
    ],
)
def test_what_cannot_be_changed(place: Place, infos: dict[str, object]) -> None:
    with pytest.raises(WrongUpdate):
        place.changing.update_nodes(["n1"], infos)
    assert place.changes() == []


def test_names_and_values_of_updates(place: Place) -> None:
    place.answer(
        "scontrol update NodeName=n1 Weight=5 AvailableFeatures=a,b Comment=c d Extra=", ""
    )
    infos = {"weight": 5, "features": ["a", "b"], "Comment": "c d", "extra": None}
    assert place.changing.update_nodes(["n1"], infos) == {"n1": ""}
    place.answer("scontrol update PartitionName=main State=DRAIN MaxTime=1:00 RootOnly=YES", "")
    place.changing.update_partition(
        "main", {"state": "DRAIN", "max_time": "1:00", "root_only": True}
    )
    place.refuse(
        "scontrol update PartitionName=nope State=UP",
        "slurm_update error: Invalid partition name specified",
    )
    with pytest.raises(UnknownPartition):
        place.changing.update_partition("nope", {"state": "UP"})
    for name in ("", "a b", "a,b", "a=b", "-a", "a\n", "x" * 200):
        with pytest.raises(WrongUpdate):
            place.changing.update_partition(name, {"state": "UP"})


def test_reservations(place: Place) -> None:
    start = datetime(2026, 3, 1, 13, 0, tzinfo=timezone(timedelta(hours=1)))
    place.answer(
        "scontrol create reservation ReservationName=r StartTime=2026-03-01T12:00:00 "
        "EndTime=2026-03-02T12:00:00 Nodes=n[1-2] Users=root Accounts=physics Flags=MAINT,OVERLAP",
        "Reservation created: r\n",
    )
    place.changing.create_reservation(
        "r",
        ["n1", "n2"],
        start=start,
        end=datetime(2026, 3, 2, 12, 0, tzinfo=UTC),
        users=["root"],
        accounts=["physics"],
        flags=["MAINT", "OVERLAP"],
    )
    with pytest.raises(WrongUpdate, match="unknown user"):
        place.changing.create_reservation("r", ["n1"], users=["no-such-user"])
    with pytest.raises(WrongUpdate, match="unknown user"):
        place.changing.update_reservation("r", {"users": "root,no-such-user"})
    place.answer("scontrol update ReservationName=r Nodes=n[1-3]", "")
    place.changing.set_reservation_nodes("r", ["n1", "n2", "n3"])
    missing = "Requested reservation is invalid"
    place.refuse("scontrol delete ReservationName=x", f"delete_reservation x: {missing}")
    place.refuse("scontrol update ReservationName=x Duration=5", f"slurm_update error: {missing}")
    with pytest.raises(UnknownReservation):
        place.changing.delete_reservation("x")
    with pytest.raises(UnknownReservation):
        place.changing.update_reservation("x", {"duration": 5})
    place.refuse(
        "scontrol create reservation ReservationName=r StartTime=now Duration=infinite Nodes=n1 "
        "Users=root",
        "Error creating the reservation: Duplicate reservation name",
    )
    with pytest.raises(WrongUpdate, match="Duplicate"):
        place.changing.create_reservation("r", ["n1"], users=["root"])


@given(st.text(max_size=500))
def test_a_reason_is_one_line_of_bounded_length(text: str) -> None:
    line = clean_reason(text)
    assert line.isprintable()
    assert '"' not in line
    assert line == line.strip()
    assert "  " not in line
    assert len(line) <= 400
    assert clean_reason(line) == line


def test_what_slurm_said() -> None:
    def error(text: str) -> SlurmError:
        return SlurmError("what", ("scontrol",), text)

    assert extract_message(error("slurm_update error: Invalid user id")) == "Invalid user id"
    assert (
        extract_message(error("scontrol: error: Invalid input: x; slurm_update error: No error"))
        == "Invalid input: x"
    )
    assert extract_message(error("")) == "what"


@pytest.mark.parametrize(
    "name", ["State", "state", "node_state", "NodeState", "state_up", "st_ate"]
)
def test_a_state_in_whatever_spelling(name: str) -> None:
    assert normalize_node_changes({name: "RESUME", "features_act": "a"}) == {
        "State": "RESUME",
        "ActiveFeatures": "a",
    }
    with pytest.raises(WrongUpdate, match="given twice"):
        normalize_node_changes({name: "RESUME", "STATE_": "DRAIN"})
