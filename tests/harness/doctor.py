"""Doctor Sites: a configuration with stand-ins for Slurm's commands, for health checks."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.archive import sink_settings
from harness.site import ROOT, Site
from harness.slurm import LINE, Stage
from steward.admin.doctor.context import CheckContext, make_check_context
from steward.admin.doctor.findings import CheckFinding
from steward.core.actions import Registry
from steward.slurm.settings import ClusterSettings

HERE = os.uname().nodename.partition(".")[0]


class DoctorSite(Site):
    """A Site without a state directory, with stand-ins for Slurm's commands.

    Attributes:
        stage: The stand-ins.
        shown: Output of ``scontrol show config``, by key.
    """

    def __init__(self, directory: Path) -> None:
        slurm = directory / "slurm"
        slurm.mkdir()
        (directory / "spool").mkdir()
        super().__init__(
            directory,
            clusters={"c1": ClusterSettings(slurm_bin=str(slurm))},
            archive=sink_settings(directory),
        )
        self.state.rmdir()
        self.stage = Stage(slurm)
        self.shown = {
            "BOOT_TIME": "2026-11-22T02:09:42",
            "ClusterName": "c1",
            "JobAcctGatherType": "jobacct_gather/cgroup",
            "JobCompType": "(null)",
            "JobSubmitPlugins": "(null)",
            "MaxJobCount": "10000",
            "MinJobAge": "300 sec",
            "PlugStackConfig": f"{slurm}/plugstack.conf",
            "ProctrackType": "proctrack/cgroup",
            "SLURM_CONF": f"{slurm}/slurm.conf",
            "SLURM_VERSION": "24.11.5",
            "SlurmctldHost[0]": f"{HERE}(127.0.0.1)",
            "SlurmUser": "root(0)",
            "StateSaveLocation": str(directory / "spool"),
            "TaskEpilog": "(null)",
        }
        self.stage.answer("scontrol ping", f"Slurmctld(primary) at {HERE} is UP\n")
        self.stage.nodes(LINE.format(name="n1"))

    def ground(self, skew_s: float = 0.0) -> CheckContext:
        """Return the context of the checks; slurmctld's clock is ahead by ``skew_s`` seconds."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + skew_s))
        lines = [f"Configuration data as of {now}"]
        lines += [f"{name:<23} = {value}" for name, value in self.shown.items()]
        self.stage.answer("scontrol show config", "\n".join(lines) + "\n")
        return make_check_context(self.settings, Registry, ROOT)


@pytest.fixture
def site(tmp_path: Path) -> DoctorSite:
    return DoctorSite(tmp_path)


def only(findings: Iterator[CheckFinding]) -> CheckFinding:
    (finding,) = findings
    return finding
