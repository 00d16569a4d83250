from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.slurm import Stage
from steward.slurm import (
    EventNeverFires,
    SlurmError,
    TriggerRecord,
    Triggers,
    UnknownEvent,
    UnknownJob,
    UnknownNode,
    UnknownTrigger,
    WrongUpdate,
)
from steward.slurm.settings import ClusterSettings
from steward.slurm.triggers import parse_triggers

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
CONFIG = """AccountingStorageType   = {storage}
StateSaveLocation       = /state
SlurmUser               = nobody-we-know(64030)
SlurmctldHost[0]        = a
"""
GET = "strigger --get --noheader"


class Place(Stage):
    """Stand-ins with strigger among them."""

    def __init__(self, root: Path, version: str) -> None:
        super().__init__(root)
        (root / "strigger").write_text((root / "sinfo").read_text().replace("sinfo", "strigger"))
        (root / "strigger").chmod(0o755)
        self.answer("squeue --version", f"slurm-wlm {version}\n")
        self.answer("scontrol show config", CONFIG.format(storage="(null)"))
        help_text = FIXTURES / f"strigger-help-{'.'.join(version.split('.')[:2])}.txt"
        self.answer("strigger --help", help_text.read_text())
        self.answer(GET, "")
        self.triggers = Triggers("c1", ClusterSettings(slurm_bin=str(root)))

    def refuse(self, command: str, said: str) -> None:
        (self.root / command.replace("/", "_")).write_text(f"echo '{said}' >&2; exit 1\n")

    def take(self, command: str) -> None:
        self.answer(command.replace("/", "_"), "")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "24.11.5")


@pytest.mark.parametrize("version", ["22.05", "24.11", "25.11", "26.05"])
def test_triggers_of_four_versions(version: str) -> None:
    found = parse_triggers((FIXTURES / f"strigger-{version}.txt").read_bytes())
    drained = TriggerRecord(
        id=2 if version in ("22.05", "25.11") else 1,
        resource="node",
        resource_id="n1",
        event="drained",
        offset_s=10,
        user="root",
        program="/bin/true x",
    )
    assert drained in found
    (other,) = [one for one in found if one != drained]
    assert (other.offset_s, other.user, other.permanent) == (0, "root", False)
    assert (other.resource, other.event, other.program) in (
        ("node", "down", "/bin/true"),
        ("job", "fini", "/bin/true"),
    )
    assert other.resource_id == ("" if other.resource == "node" else "3")


def test_rows_of_every_width() -> None:
    out = b"""     12 node      node[2-3,5-99] up                     0 slurm    PERM  /a b
      2 slurmctld       * primary_slurmctld_resumed_operation    -30 someone-with-a-name PERM  /x
    110 other      (null) burst_buffer                             0 slurm          /bin/echo PERM
garbage
      1 node            * down                                     0 slurm          relative
"""
    found = {one.id: one for one in parse_triggers(out)}
    assert sorted(found) == [2, 12, 110]
    assert (found[12].resource_id, found[12].permanent) == ("node[2-3,5-99]", True)
    assert (found[2].offset_s, found[2].user, found[2].permanent) == (
        -30,
        "someone-with-a-name",
        True,
    )
    assert (found[110].resource_id, found[110].permanent) == ("", False)
    assert found[110].program == "/bin/echo PERM"


@given(st.binary(max_size=200))
def test_any_bytes_are_read(data: bytes) -> None:
    parse_triggers(data)
    parse_triggers(b"      1 node            * down                0 slurm    PERM  /" + data)


def test_a_trigger_is_set_and_found_again(place: Place) -> None:
    place.take("strigger --set --drained --program=/usr/bin/x a --node=n[1-2] --flags=PERM")
    place.answer(
        GET,
        "      7 node       n[1-2] drained    0 nobody-we-know    PERM  /usr/bin/x a\n"
        "      8 node       n[1-2] drained    0 nobody-we-know          /usr/bin/x a\n"
        "      9 node       n[1-2] drained    0 somebody-else     PERM  /usr/bin/x a\n"
        "     10 node            * drained    0 nobody-we-know    PERM  /usr/bin/x a\n",
    )
    found = place.triggers.set("/usr/bin/x a", "drain", nodes="n1,n2", permanent=True)
    assert found == 7


def test_a_duplicate_is_the_one_that_is_there(place: Place) -> None:
    place.refuse(
        "strigger --set --down --program=/usr/bin/x --node",
        "slurm_set_trigger: Duplicate event trigger",
    )
    place.answer(GET, "      3 node     * down    0 nobody-we-know          /usr/bin/x\n")
    assert place.triggers.set("/usr/bin/x", "down") == 3


def test_one_that_has_fired_is_waited_for_until_slurmctld_forgets_it(place: Place) -> None:
    # The third time it is new; only what waits is shown.
    row = "      9 node     * down    0 nobody-we-know          /usr/bin/x"
    (place.root / "strigger --set --down --program=_usr_bin_x --node").write_text(
        f"""cd {place.root}
echo >> tries
if [ "$(wc -l < tries)" -lt 3 ]; then
    echo 'slurm_set_trigger: Duplicate event trigger' >&2; exit 1
fi
echo "echo '{row}'" > '{GET}'
"""
    )
    assert place.triggers.set("/usr/bin/x", "down") == 9
    assert len((place.root / "tries").read_text().splitlines()) == 3


def test_one_that_slurmctld_does_not_forget_in_time(place: Place) -> None:
    place.refuse(
        "strigger --set --down --program=/usr/bin/x --node",
        "slurm_set_trigger: Duplicate event trigger",
    )
    with pytest.raises(SlurmError, match="has just fired, and slurmctld still keeps it"):
        place.triggers.set("/usr/bin/x", "down", patience_s=0.6)
    assert len([line for line in place.asked() if "--set" in line]) > 1


def test_one_that_was_set_and_is_not_there(place: Place) -> None:
    place.take("strigger --set --reconfig --program=/usr/bin/x")
    with pytest.raises(SlurmError, match="disappeared after it was set"):
        place.triggers.set("/usr/bin/x", "reconfig")


@pytest.mark.parametrize(
    ("program", "event", "options"),
    [
        ("x", "down", {}),
        ("", "down", {}),
        ("/x\n2 node * down 0 root /y", "down", {}),
        (" /x", "down", {}),
        ("/" + "x" * 2000, "down", {}),
        ("/x", "down", {"offset_s": 40000}),
        ("/x", "fini", {}),
        ("/x", "fini", {"nodes": "n1"}),
        ("/x", "down", {"job": "12_3"}),
        ("/x", "down", {"job": "1", "nodes": "n1"}),
        ("/x", "reconfig", {"nodes": "n1"}),
        ("/x", "idle", {"job": "1"}),
    ],
)
def test_what_makes_no_trigger(
    place: Place, program: str, event: str, options: dict[str, object]
) -> None:
    with pytest.raises(WrongUpdate):
        place.triggers.set(program, event, **options)  # type: ignore[arg-type] # of each its own
    assert not [line for line in place.asked() if "--set" in line]


@pytest.mark.parametrize("offset_s", [-40000, 32768])
def test_an_offset_that_slurm_rejects(place: Place, offset_s: int) -> None:
    message = f"invalid offset {offset_s} s: give -32767 to 32767"
    with pytest.raises(WrongUpdate, match=message):
        place.triggers.set("/x", "down", offset_s=offset_s)


def test_refusals(place: Place) -> None:
    place.refuse(
        "strigger --set --fini --program=/x --jobid=9",
        "slurm_set_trigger: Invalid job id specified",
    )
    with pytest.raises(UnknownJob):
        place.triggers.set("/x", "fini", job="9")
    place.refuse(
        "strigger --set --up --program=/x --node=n9",
        "slurm_set_trigger: Invalid node name specified",
    )
    with pytest.raises(UnknownNode):
        place.triggers.set("/x", "up", nodes="n9")
    place.refuse("strigger --clear --id=9", "slurm_clear_trigger: No such process")
    with pytest.raises(UnknownTrigger):
        place.triggers.clear(9)
    place.refuse("strigger --clear --id=9 --user slurm", "slurm_clear_trigger: No such process")
    with pytest.raises(UnknownTrigger, match="of user slurm"):
        place.triggers.clear(9, "slurm")


def test_events_of_each_version(tmp_path: Path) -> None:
    known = {}
    for version in ("22.05.8", "24.11.5", "26.05.5"):
        root = tmp_path / version
        root.mkdir()
        known[version] = Place(root, version).triggers.list_events()
    assert {"draining", "resume"}.isdisjoint(known["22.05.8"])
    assert known["24.11.5"]["draining"] == known["24.11.5"]["resume"] == ""
    assert "drained" in known["22.05.8"]["fail"]
    assert "drained" in known["24.11.5"]["fail"]
    assert known["26.05.5"]["fail"] == ""
    for events in known.values():
        assert events["down"] == events["up"] == events["drained"] == events["fini"] == ""
        assert "burst buffer" in events["burst_buffer"]
        assert "slurmdbd" in events["primary_slurmdbd_failure"]
        assert "backup" in events["backup_slurmctld_failure"]


def test_events_that_never_are(place: Place) -> None:
    with pytest.raises(EventNeverFires, match="drained"):
        place.triggers.set("/x", "fail")
    with pytest.raises(UnknownEvent, match="one of down"):
        place.triggers.set("/x", "explosion")
    place.answer(
        "scontrol show config",
        CONFIG.format(storage="accounting_storage/slurmdbd") + "SlurmctldHost[1]        = b\n"
        "BurstBufferType         = burst_buffer/lua\n",
    )
    events = place.triggers.list_events()
    assert [event for event, why in events.items() if why] == ["fail"]
