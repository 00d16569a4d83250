"""A configuration whose Slurm is played by stand-ins, for the doctor to look at."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.slurm import LINE, Stage
from steward.admin.doctor.findings import Finding
from steward.admin.doctor.ground import Ground, ground_of
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Asker
from steward.core.actions import Registry
from steward.core.config import ArchiveSettings, Settings
from steward.slurm.settings import ClusterSettings

ROOT = Asker(uid=0, user="root", how="local")
HERE = os.uname().nodename.partition(".")[0]


class Site:
    """A configuration whose Slurm is played by stand-ins."""

    def __init__(self, root: Path) -> None:
        (root / "slurm").mkdir()
        (root / "spool").mkdir()
        self.root = root
        self.stage = Stage(root / "slurm")
        self.shown = {
            "BOOT_TIME": "2026-11-22T02:09:42",
            "ClusterName": "c1",
            "JobAcctGatherType": "jobacct_gather/cgroup",
            "JobCompType": "(null)",
            "JobSubmitPlugins": "(null)",
            "MaxJobCount": "10000",
            "MinJobAge": "300 sec",
            "PlugStackConfig": f"{root}/slurm/plugstack.conf",
            "ProctrackType": "proctrack/cgroup",
            "SLURM_CONF": f"{root}/slurm/slurm.conf",
            "SLURM_VERSION": "24.11.5",
            "SlurmctldHost[0]": f"{HERE}(127.0.0.1)",
            "SlurmUser": "root(0)",
            "StateSaveLocation": str(root / "spool"),
            "TaskEpilog": "(null)",
        }
        self.settings = Settings(
            state_dir=str(root / "state"),
            socket=str(root / "state" / "sock"),
            cluster={"c1": ClusterSettings(slurm_bin=str(root / "slurm"), command_timeout_s=10.0)},
            archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(root / "archive"))}),
        )
        self.stage.answer("scontrol ping", f"Slurmctld(primary) at {HERE} is UP\n")
        self.stage.nodes(LINE.format(name="n1"))

    def change(self, **of_slurm: str) -> None:
        self.shown |= of_slurm

    def set(self, **of_settings: object) -> None:
        self.settings = msgspec.structs.replace(self.settings, **of_settings)

    def ground(self, skew_s: float = 0.0) -> Ground:
        """What the checks look at; slurmctld's clock is so far from ours."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + skew_s))
        lines = [f"Configuration data as of {now}"]
        lines += [f"{name:<23} = {value}" for name, value in self.shown.items()]
        self.stage.answer("scontrol show config", "\n".join(lines) + "\n")
        return ground_of(self.settings, Registry, ROOT)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def only(found: Iterator[Finding]) -> Finding:
    (one,) = found
    return one
