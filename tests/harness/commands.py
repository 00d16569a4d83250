"""Command runs: in this process, in a subprocess and on a terminal, and an archive for them."""

import io
import os
import pty
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from steward.cli import app

HOSTILE = "evil\x1b[31m\n999|root"

SCRIPTS = {
    101: b"#!/bin/bash\n#SBATCH -n 1\nmodule load GROMACS/2023\nsrun gmx mdrun -s a.tpr\n",
    102: b"#!/bin/bash\n#SBATCH -n 2\nmodule load GROMACS/2024\nsrun gmx mdrun -s a.tpr\n",
    103: b"#!/usr/bin/env python3\nprint('\x1b]0;owned\x07 \xff')\n",
    104: b"#!/bin/bash\nexport API_TOKEN=glpat-aaaaaaaaaaaaaaaaaaaaa\n",
}
ENVIRONMENTS = {
    101: [b"SLURM_JOB_NAME=first", b"API_TOKEN=hunter2hunter2", b"MULTI=a\nb=c", b"RAW=\xff\xfe"],
    102: [b"SLURM_JOB_NAME=" + HOSTILE.encode(), b"USER=ada"],
    103: [b"SLURM_JOB_NAME=third"],
    104: [b"SLURM_JOB_NAME=fourth"],
}


def fill_spool(spool: Path) -> None:
    """Write the spool entries of four jobs, as slurmctld does."""
    for job, script in SCRIPTS.items():
        directory = spool / f"hash.{job % 10}" / f"job.{job}"
        directory.mkdir(parents=True)
        entries = ENVIRONMENTS[job]
        block = struct.pack("=I", len(entries)) + b"".join(entry + b"\0" for entry in entries)
        (directory / "environment").write_bytes(block)
        path = directory / "script"
        path.write_bytes(script + b"\0")
        # Times a minute apart, so that lists have the order of job ids.
        spooled = path.stat().st_mtime - 60 * (110 - job)
        os.utime(path, (spooled, spooled))


def steward(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command in a subprocess, with pipes for its output."""
    return subprocess.run(
        [sys.executable, "-m", "steward", *words],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env=_environment(),
    )


def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command line in this process; return its exit code, stdout and stderr."""

    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    err = io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = app.run(list(words))
    finally:
        sys.stdin = before
    out.flush()
    return code, written.getvalue().decode(), err.getvalue()


def on_terminal(*words: str, lines: int = 500) -> str:
    """Run a command on a terminal; return its stdout and stderr."""
    environment = _environment() | {"COLUMNS": "100", "LINES": str(lines), "TERM": "xterm-256color"}
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "steward", *words],
        stdin=other,
        stdout=other,
        stderr=other,
        env=environment,
        start_new_session=True,
    )
    os.close(other)
    output = b""
    try:
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:
                break  # every process with the terminal open has ended
            if not piece:
                break
            output += piece
    finally:
        os.close(main)
        process.wait(60)
    return output.decode().replace("\r\n", "\n")


def _environment() -> dict[str, str]:
    dropped = ("STEWARD_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"TZ": "UTC", "PAGER": "cat"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Archive of four jobs, shared by all tests of a module; do not change it."""
    home = tmp_path_factory.mktemp("site")
    return keep(home)


def keep(home: Path) -> str:
    fill_spool(home / "spool")
    root = str(home / "archive")
    words = ["--cluster", "c", "--spool", str(home / "spool"), "--archive", root, "--no-slurm"]
    done = steward("archive", "watch", *words, "--once")
    assert done.returncode == 0, done.stderr
    assert b"Archived 4 new scripts of c" in done.stdout
    return root


@pytest.fixture
def look(
    archive: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Function that runs ``steward archive`` in this process and returns its output."""
    monkeypatch.setenv("TZ", "UTC")

    def look(*words: str, code: int = 0) -> str:
        assert app.run(["archive", *words, "--archive", archive]) == code
        captured = capfdbinary.readouterr()
        look.raw = captured.out  # type: ignore[attr-defined] # for tests of raw bytes
        return (captured.out if code == 0 else captured.out + captured.err).decode(
            "utf-8", "backslashreplace"
        )

    return look
