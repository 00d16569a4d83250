import os
import time
from pathlib import Path

import pytest

from steward.core.errors import PermissionRefused, Unavailable
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import (
    SlurmDown,
    SlurmError,
    SlurmMissing,
    SlurmRefused,
    SlurmUnavailable,
    UnknownJob,
)
from steward.slurm.settings import ClusterSettings


def commands(
    tmp_path: Path, script: str, timeout_s: float = COMMAND_TIMEOUT_S, **settings: object
) -> CommandRunner:
    """Return commands whose ``squeue`` is a shell script."""
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    values = {"slurm_bin": str(tmp_path), **settings}
    cluster = ClusterSettings(**values)  # type: ignore[arg-type] # checked by its users
    return CommandRunner("c1", cluster, timeout_s)


def test_the_environment_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SACCT_FORMAT", "SLURM_CLUSTERS", "LANG"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    asked = commands(tmp_path, "env", slurm_conf="/srv/c1.conf")
    lines = set(asked.run("squeue", variables={"SQUEUE_FORMAT2": "JobID"}).decode().split("\n"))
    names = {line.partition("=")[0] for line in lines}
    assert {"TZ=UTC", "LC_ALL=C", "SLURM_CONF=/srv/c1.conf", "SQUEUE_FORMAT2=JobID"} <= lines
    assert {name for name in names if name.startswith(("SQUEUE_", "SLURM_", "SACCT_"))} == {
        "SQUEUE_FORMAT2",
        "SLURM_CONF",
        "SLURM_BITSTR_LEN",
    }
    assert "LANG" not in names


def test_our_own_slurm_conf_holds_where_none_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    assert commands(tmp_path, "echo $SLURM_CONF").run("squeue") == b"/etc/other.conf\n"


def test_a_prefix_goes_before(tmp_path: Path) -> None:
    asked = commands(tmp_path, 'echo "$MARK $1"', slurm_prefix=("env", "MARK=there"))
    assert asked.run("squeue", "-a b") == b"there -a b\n"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Invalid job id specified", UnknownJob),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            SlurmDown,
        ),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SlurmUnavailable),
        ("squeue: error: Munge encode failed: Failed to access", SlurmUnavailable),
        ("squeue: fatal: Could not establish a configuration source", SlurmUnavailable),
        ("squeue: error: ClusterName needs to be specified\nsqueue: fatal: x", SlurmError),
        ("slurm_update error: Access/permission denied", SlurmRefused),
        ("slurm_update error: Invalid user id", SlurmRefused),
        ("", SlurmError),
    ],
)
def test_errors_carry_the_command_and_what_slurm_said(
    tmp_path: Path, said: str, kind: type[SlurmError]
) -> None:
    (tmp_path / "said").write_text(said)
    asked = commands(tmp_path, f"cat {tmp_path}/said >&2; exit 1")
    with pytest.raises(SlurmError) as caught:
        asked.run("squeue", "-a")
    assert type(caught.value) is kind
    assert caught.value.command == (f"{tmp_path}/squeue", "-a")
    assert caught.value.output == "; ".join(said.split("\n"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("cluster c1: ")


def test_families() -> None:
    assert issubclass(SlurmUnavailable, Unavailable)
    assert issubclass(SlurmMissing, Unavailable)
    assert issubclass(SlurmRefused, PermissionRefused)


def test_a_missing_command_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(SlurmMissing, match="slurm_bin"):
        commands(tmp_path, "").run("sacct")
    with pytest.raises(SlurmMissing):
        commands(tmp_path, "", slurm_prefix=("env",)).run("sacct")


def test_a_command_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    asked = commands(tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid; wait", timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match=r"longer than 0\.5 s"):
        asked.run("squeue")
    assert time.monotonic() - began < 30
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, "the child of a command given up still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return b" Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_is_bytes_and_stdin_is_empty(tmp_path: Path) -> None:
    assert commands(tmp_path, "cat; printf 'caf\\351'").run("squeue") == b"caf\xe9"
    assert os.getcwd()  # commands run elsewhere: ours stays


def test_a_command_killed_by_a_signal_is_tried_again_later(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailable, match="signal 9"):
        commands(tmp_path, "kill -9 $$").run("squeue")
