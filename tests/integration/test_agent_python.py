"""Agent on the oldest supported Python, in a system without other parts of Steward."""

import shutil
from pathlib import Path

import pytest
from bare_roots import Bare

from steward.agent import agent

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]
LINES = b'{"v":1}\n' * 40_000


def test_it_runs_on_python_3_9(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    shutil.copy(agent.__file__, packages / "steward-agent")
    (packages / "n1.log").write_bytes(LINES)
    bare = Bare("bullseye", tmp_path_factory.mktemp("bullseye"), packages)
    bare.sh("mkdir -m 700 /srv/spool && cp /packages/n1.log /srv/spool/")
    # It looks at what there is, begins another file, and cannot say who it is: there is no MUNGE.
    said = bare.sh(
        "python3.9 /packages/steward-agent --spool /srv/spool --to 127.0.0.1:1 --limit 0 "
        "--rotate-bytes 4096",
        code=1,
    )
    assert said.startswith("steward-agent: node n1: ")
    assert "cannot run munge" in said
    assert "Traceback" not in said
    assert bare.path("/srv/spool/n1.log.1").read_bytes() == LINES
