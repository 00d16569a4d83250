"""Redacted secrets appear in none of Steward's files."""

import base64
import os
import re
import signal
import struct
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from file_tree import contents_below
from job_submission import submit_to, wait_until
from sandbox_daemon import Daemon as ClusterDaemon
from spool_daemon import Daemon, archived, ask, children_of, journalled, settings_in

from steward.core.config import Settings
from steward.core.redaction import REDACTED
from steward.sandbox import Sandbox
from steward.slurm.environment import split_entries
from steward.slurm.settings import ClusterSettings

MARK = b"hush7f3a"
"""Mark in each line of every secret, and nowhere else."""

SCRIPT = "#!/bin/sh\n# an ordinary script\nexit 0\n"
DIGEST = re.compile(r"\[redacted by steward:[0-9a-f]{8}\]")
"""Replacement of a job's name that contained a secret."""

SECRETS: dict[bytes, bytes] = {
    b"API_TOKEN": MARK,
    b"PGPASSWORD": b"  " + MARK + b" with = and blanks ",
    b"AWS_SESSION": MARK * 300,
    b"DEPLOY_KEY": b"-----BEGIN RSA PRIVATE KEY-----\n" + (MARK + b"\n") * 20,
    b"INDEX": b"https://ada:" + MARK + b"@example.org/simple",
    b"FORGE": b"ghp_" + MARK + b"0123456789abcdefghij",
    b"CLAIMS": b"eyJhbGciOiJI.eyJzdWIiOiIx." + MARK,
    b"NOT_UTF8_SECRET": b"\xff\xfe" + MARK,
    b"SLURM_JWT": MARK,
}


@pytest.fixture
def home(fast: Path) -> Path:
    """Make a directory that contains only Steward's files; the spool is outside."""
    return fast


def environment(job_id: int) -> bytes:
    """Return environments as slurmctld writes them, some truncated or with a wrong count."""
    entries = [b"HOME=/home/ada", b"JOB=%d" % job_id]
    entries += [name + b"=" + value for name, value in SECRETS.items()]
    entries += [b"LAST=1"]
    block = b"".join(entry + b"\0" for entry in entries)
    if job_id % 7 == 0:
        # In the middle of a secret.
        block = block[: block.index(b"PGPASSWORD=") + len(b"PGPASSWORD=") + 8]
    count = 3 if job_id % 11 == 0 else block.count(b"\0")
    return struct.pack("=I", count) + block


def submit(spool: Path, jobs: range) -> None:
    for job_id in jobs:
        directory = spool / f"hash.{job_id % 10}" / f"job.{job_id}"
        directory.mkdir(parents=True)
        (directory / "environment").write_bytes(environment(job_id))
        (directory / "script").write_bytes(b"#!/bin/sh\n# %d\n\0" % job_id)


def holders(directory: Path) -> list[str]:
    """Return every file, except sockets and links, that contains the mark in any encoding."""
    forms = (MARK, MARK.hex().encode(), MARK.decode().encode("utf-16-le"), *_base64(MARK))
    found = []
    for where, directories, files in os.walk(directory):
        paths = [os.path.join(where, name) for name in (*directories, *files)]
        found += [path for path in paths if any(form in path.encode() for form in forms)]
    for path, data in contents_below(directory).items():
        found += [str(path) for form in forms if form in data]
    return found


def _base64(data: bytes) -> list[bytes]:
    """Return the part of the base64 form that does not depend on its position."""
    return [
        base64.b64encode(bytes(shift) + data)[4 if shift else 0 : -4].strip(b"=")
        for shift in range(3)
    ]


def part(daemon: Daemon, name: str) -> int:
    for pid in children_of(daemon.pid):
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return pid
    raise AssertionError(f"no part is called {name}")


def assert_dead_letters(daemon: Daemon, settings: Settings, jobs: range) -> None:
    """Make the sink reject events: their bytes are removed while it is stopped."""
    spool = Path(settings.cluster["c1"].spool)
    known = len(journalled(settings))
    sink = part(daemon, "steward archive")
    os.kill(sink, signal.SIGSTOP)
    submit(spool, jobs)
    daemon.wait(lambda: len(journalled(settings)) == known + len(jobs))
    for job_id in jobs:
        for path in Path(settings.sink_path("files"), ".incoming").glob(f"c1.{job_id}.*"):
            path.unlink()
    os.kill(sink, signal.SIGCONT)
    count = "SELECT count(*) FROM dead WHERE consumer = 'archive.files'"
    daemon.wait(lambda: ask(settings, "journal.db", count) == [(len(jobs),)])


def test_no_byte_of_a_secret_is_in_any_file(tmp_path: Path, home: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    cluster = ClusterSettings(slurm=False, spool=str(spool))
    settings = settings_in(home, log_level="debug", cluster={"c1": cluster})
    with Daemon(settings, home) as daemon:
        submit(spool, range(1, 101))
        daemon.wait(lambda: daemon.is_quiet(100))
        assert holders(home) == []
        # Killed in the middle of it, again and again.
        for first in range(101, 401, 50):
            submit(spool, range(first, first + 50))
            time.sleep(0.02 * (first % 4))
            daemon.kill()
            assert holders(home) == []
            daemon.start()
        daemon.wait(lambda: daemon.is_quiet(400))
        assert_dead_letters(daemon, settings, range(401, 411))
        assert holders(home) == []
        daemon.kill()
    assert holders(home) == []
    # The test would find them, and they were there to be found.
    assert len(holders(spool)) >= 400
    found = archived(settings)
    assert sorted(found) == list(range(1, 401))
    variables = dict(split_entries(found[1]["env"]))
    assert {name for name, value in variables.items() if value == REDACTED} == set(SECRETS)
    assert variables[b"HOME"] == b"/home/ada"


@pytest.mark.matrix
def test_no_byte_of_a_real_jobs_secret_is_in_any_file(sandbox: Sandbox, submitter: str) -> None:
    daemon = ClusterDaemon(sandbox, Path(sandbox.directory) / "steward-secrets")
    try:
        daemon.start()
        mark = MARK.decode()
        job = submit_to(
            sandbox,
            SCRIPT,
            user=submitter,
            env={"API_TOKEN": mark, "REGISTRY": f"https://ada:{mark}@example.org/"},
            export=f"ALL,DEPLOY_SECRET={mark}",
            comment=f"token={mark}",
            output="/dev/null",
        )
        path = daemon.wait_for_script(job)
        variables = dict(split_entries(path.with_suffix(".env").read_bytes()))
        for name in (b"API_TOKEN", b"REGISTRY", b"DEPLOY_SECRET"):
            assert variables[name] == REDACTED

        texts: list[dict[str, Any]] = [
            {"comment": f'{{"password": "{mark}"}}'},
            {"comment": f"password: {mark}"},
            {"job_name": f"ghp_{mark}0123456789abcdefghij"},
            {"job_name": f"API_TOKEN={mark}"},
            {"output": f"/nonexistent/token={mark}.out"},
            {"comment": f"curl -u ada:{mark} -H 'Authorization: Basic {mark}'"},
        ]
        job_name = str(uuid.uuid4())
        others = [
            submit_to(sandbox, SCRIPT, user=submitter, **({"output": "/dev/null"} | one))
            for one in (*texts, {"job_name": job_name})
        ]
        for other in others:
            daemon.wait_for_script(other)

        # 26.05 wants a login shell's environment for --export=ALL,NAME=VALUE, and holds the
        # job where "su" gives it none, as here; to the end it comes either way.
        sandbox.run(["scancel", str(job)], check=False)

        def has_ended() -> bool:
            ended = "SELECT count(*) FROM job WHERE job_id BETWEEN ? AND ? AND ended"
            return ask(daemon.settings, "jobs.db", ended, job, others[-1]) == [(1 + len(others),)]

        wait_until(has_ended, 30.0)
        assert holders(daemon.home) == []
        words = ("sacct", "-X", "-n", "-P", "-o", "JobID,JobName")
        shown = daemon.ask(*words, "--name", job_name).stdout.splitlines()
        assert shown == [f"{others[-1]}|{job_name}"]
        of_texts = daemon.ask(*words, "-j", ",".join(map(str, others[:-1]))).stdout.splitlines()
        assert sum(bool(DIGEST.search(line)) for line in of_texts) == 2
        daemon.stop(signal.SIGKILL)
        assert holders(daemon.home) == []
    finally:
        daemon.close()
