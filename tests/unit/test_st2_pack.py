"""StackStorm pack: its metadata has StackStorm's form and matches Steward's actions."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import write_pack
from packages import stackstorm
from steward import __version__
from steward.automation.operation import load_operations
from steward.automation.rules.triggers import TRIGGER_TYPES

ROOT = Path(__file__).resolve().parent.parent.parent
PACK = ROOT / "packs" / "slurm"
SCHEMAS = Path(__file__).parent / "fixtures" / "stackstorm"
METADATA = sorted(PACK.glob("*/*.yaml"))


_NAMED = ("properties", "patternProperties", "definitions")


def of_draft_4(schema: Any) -> Any:
    """Convert StackStorm's ``required: true`` on a property to the list of later drafts."""
    if isinstance(schema, list):
        return [of_draft_4(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: of_draft_4(one) for name, one in value.items()}
        if key in _NAMED
        else of_draft_4(value)
        for key, value in schema.items()
        if key != "required"
    }
    inside = schema.get("properties", {})
    needed = [name for name, one in inside.items() if one.get("required") is True]
    return {**made, "required": needed} if needed else made


def check(data: Any, kind: str) -> None:
    schema = of_draft_4(json.loads((SCHEMAS / f"{kind}.json").read_text()))
    formats = jsonschema.Draft4Validator.FORMAT_CHECKER
    jsonschema.Draft4Validator(schema, format_checker=formats).validate(data)


def test_the_check_refuses_what_stackstorm_would() -> None:
    """A test that cannot fail proves nothing."""
    good = yaml.safe_load((PACK / "actions" / "node.drain.yaml").read_text())
    for change in ({"runner_type": None}, {"parameters": {"a": {"type": "text"}}}, {"extra": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check({**good, **change}, "action")
    without = {name: value for name, value in good.items() if name != "name"}
    with pytest.raises(jsonschema.ValidationError):
        check(without, "action")


@pytest.mark.parametrize("path", METADATA, ids=lambda path: path.name)
def test_metadata_is_of_stackstorms_shape(path: Path) -> None:
    kind = {"actions": "action", "sensors": "sensor", "rules": "rule"}[path.parent.name]
    about = yaml.safe_load(path.read_text())
    check(about, kind)
    if kind != "rule":
        assert (path.parent / about["entry_point"]).is_file()


def test_the_pack_is_of_stackstorms_shape() -> None:
    about = yaml.safe_load((PACK / "pack.yaml").read_text())
    check(about, "pack")
    # Registration reads these without a default, whatever the schema calls optional.
    for field in ("ref", "name", "description", "version", "author", "email"):
        assert about[field], field
    for name, one in yaml.safe_load((PACK / "config.schema.yaml").read_text()).items():
        assert set(one) <= {"description", "type", "required", "default", "secret"}, name


def test_a_payloads_fields_say_each_for_itself_that_they_must_be_there() -> None:
    """StackStorm would silently drop every event if ``required`` were a list."""
    about = yaml.safe_load((PACK / "sensors" / "trigger_sensor.yaml").read_text())
    for trigger in about["trigger_types"]:
        schema = trigger["payload_schema"]
        assert "required" not in schema
        assert all(one["required"] is True for one in schema["properties"].values())


def test_every_action_is_in_it_as_steward_describes_it() -> None:
    texts = {path.name: path.read_text() for path in (PACK / "actions").glob("*.yaml")}
    assert texts == write_pack.metadata(), "run scripts/write_pack.py"
    assert len(texts) == len(load_operations())


@pytest.mark.parametrize("path", sorted((PACK / "rules").iterdir()), ids=lambda path: path.stem)
def test_rules_are_about_what_the_sensor_dispatches(path: Path) -> None:
    rule = yaml.safe_load(path.read_text())
    sensor = yaml.safe_load((PACK / "sensors" / "trigger_sensor.yaml").read_text())
    fields = {
        f"slurm.{one['name']}": set(one["payload_schema"]["properties"])
        for one in sensor["trigger_types"]
    }
    given = rule["action"]["parameters"]
    what = "down" if "node_down" in path.name else "drain"
    assert given == {
        "event": what,
        "program": f"{{{{ trigger.program }}}} {{{{ trigger.url }}}}/node/{what}",
    }
    assert {"program", "url"} <= fields[rule["trigger"]["type"]]
    if path.stem.endswith("reset"):
        assert {of: one["pattern"] for of, one in rule["criteria"].items()} == {
            "trigger.class": "node",
            "trigger.type": what,
        }
    assert f"{path.stem}" == rule["name"]


def test_its_own_tests_pass() -> None:
    """The pack's tests run in a separate process, with the pack's directories in the path."""
    path = [ROOT / "tests" / "stackstorm", PACK / "actions", PACK / "sensors", ROOT / "src"]
    ran = subprocess.run(
        [sys.executable, "-m", "unittest", "discover", "-s", str(PACK / "tests")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Ran 12 tests" in ran.stderr


def test_the_program_for_triggers_ends_soon_where_nobody_listens() -> None:
    program = PACK / "bin" / "slurm-trigger-notify"
    for arguments, code in (([], 2), (["file:///etc/passwd"], 2), (["http://127.0.0.1:9/x"], 1)):
        ran = subprocess.run(
            [sys.executable, str(program), *arguments], capture_output=True, timeout=60, check=False
        )
        assert ran.returncode == code


def test_the_archive_installs_steward_from_the_wheel_in_it(tmp_path: Path) -> None:
    wheel = tmp_path / f"slurm_steward-{__version__}-py3-none-any.whl"
    info = f"slurm_steward-{__version__}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = f"Metadata-Version: 2.1\nName: slurm-steward\nVersion: {__version__}\n"
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    made = stackstorm.build(wheel, tmp_path, version=__version__, epoch=1)
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path / "packs", filter="data")
    pack = tmp_path / "packs" / "slurm"
    assert (pack / "pack.yaml").read_text() == (PACK / "pack.yaml").read_text()
    assert os.access(pack / "bin" / "slurm-trigger-notify", os.X_OK)
    target = tmp_path / "installed"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target"),
            *(str(target), "-r", str(pack / "requirements.txt")),
        ],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert (target / info).is_dir()


def test_what_rules_check_says_of_the_packs_triggers_is_so() -> None:
    sensor = yaml.safe_load((PACK / "sensors" / "trigger_sensor.yaml").read_text())
    fields = {
        f"slurm.{one['name']}": set(one["payload_schema"]["properties"])
        for one in sensor["trigger_types"]
    }
    assert {name: fields.get(name, set()) for name in TRIGGER_TYPES} == {
        name: one.dispatched for name, one in TRIGGER_TYPES.items()
    }
