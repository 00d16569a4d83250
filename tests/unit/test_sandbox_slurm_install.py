"""Plugin directory of the Slurm that a sandbox uses."""

from pathlib import Path

import pytest

from steward.sandbox.slurm_install import DAEMONS, find_plugin_directory


def test_plugins_lie_beside_the_daemons_of_a_slurm_in_a_prefix_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*DAEMONS, "sbatch"):
        path = tmp_path / "sbin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\necho slurm 25.11.7\n")
        path.chmod(0o755)
    plugins = tmp_path / "lib" / "slurm"
    plugins.mkdir(parents=True)
    (plugins / "select_cons_tres.so").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}/sbin")
    assert find_plugin_directory() == str(plugins)
