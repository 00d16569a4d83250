"""Removal of the package prints the lines of slurm.conf that still name Steward."""

import subprocess
from pathlib import Path

HOOKS = Path(__file__).parents[2] / "packaging/package-hooks"


def left_in(conf: Path, text: str) -> str:
    conf.write_text(text)
    done = subprocess.run(
        [str(HOOKS), "left-in-slurm"],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_removal_tells_of_mails_and_of_a_file_that_grows(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    said = left_in(conf, "  mailprog = /opt/steward/libexec/steward/mail\n")
    assert f"set MailProg in {conf} as it was before" in said
    assert "JobCompType" not in said
    said = left_in(conf, "JobCompType=jobcomp/lua\n")
    assert f"set JobCompType in {conf} as it was before" in said
    assert "MailProg" not in said
    assert left_in(conf, "#MailProg=/opt/steward/x\nMailProg=/usr/bin/mail\n") == ""
    conf.unlink()
    assert left_in(conf, "") == ""
