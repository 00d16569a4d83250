"""Import of scripts that a real slurmdbd stored."""

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from file_tree import contents_below, files_below
from job_submission import submit_to, wait_until
from sandbox_daemon import STEWARD, Daemon
from sandboxes import need_namespaces, passable_directory
from slurmdbd_failures import failing_queries

from steward.core.events import JOB_END, JOBS_IMPORTED
from steward.core.imported import unpack_event
from steward.core.journal import JournalReader
from steward.sandbox import Sandbox
from steward.slurm import Slurm
from steward.slurm.slurmdbd import StoredScript

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.database,
    pytest.mark.timeout(600),
]

SCRIPTS = {
    "plain": b"#!/bin/sh\necho one\n",
    "endless": b"#!/bin/sh\necho no line end",
    "spacious": b"#!/bin/sh\necho three\n\n\n",
    "heading": b"#!/bin/sh\n# Batch Script for 1\n#" + b"-" * 80 + b"\nNONE\n",
    "latin": b"#!/bin/sh\n# caf\xe9\nexit 0\n",
}
FINISHED = ("COMPLETED", "FAILED", "CANCELLED")


@pytest.fixture(scope="module")
def began() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with passable_directory() as path:
        yield path


@pytest.fixture(scope="module")
def captured(booked_sandbox: Sandbox, home: Path, began: str) -> Iterator[Daemon]:
    daemon = Daemon(booked_sandbox, home / "captured")
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def jobs(booked_sandbox: Sandbox, captured: Daemon) -> dict[str, int]:
    """Run jobs to their end: with different scripts, without one, an array, a het job."""
    user = next(iter(booked_sandbox.users))
    jobs = {
        name: submit_to(booked_sandbox, script, user=user, job_name=name, output="/dev/null")
        for name, script in SCRIPTS.items()
    }
    options: dict[str, Any] = {"array": "1-3", "mem": "2048", "output": "/dev/null"}
    jobs["array"] = submit_to(booked_sandbox, SCRIPTS["plain"], user=user, **options)
    words = ["sbatch", "--parsable", "-o", "/dev/null", "--mem=1536", ":", "--mem=1537"]
    out = booked_sandbox.run(words, user=user, input=SCRIPTS["plain"], text=False).stdout
    jobs["het"] = int(out.split(b";")[0])
    booked_sandbox.run(["srun", "-J", "without", "true"], user=user)
    wait_until(lambda: unfinished(booked_sandbox, jobs) == set(), 90)
    words = ["sacct", "-a", "-X", "-n", "-P", "--name=without", "-o", "State"]
    wait_until(lambda: str(booked_sandbox.run(words).stdout).startswith(FINISHED), 90)
    return jobs


def unfinished(cluster: Sandbox, jobs: dict[str, int]) -> set[str]:
    """Return the jobs without an end in slurmdbd."""
    listed = ",".join(map(str, jobs.values()))
    out = cluster.run(["sacct", "-X", "-n", "-P", "-j", listed, "-o", "JobID,State"]).stdout
    rows = dict(line.split("|", 1) for line in out.splitlines())
    array = {f"{jobs['array']}_{task}" for task in (1, 2, 3)}
    het = {f"{jobs['het']}+{component}" for component in (0, 1)}
    alone = {str(job) for name, job in jobs.items() if name not in ("array", "het")}
    return {
        name
        for name in alone | array | het
        if not rows.get(name, "").split(" ")[0].startswith(FINISHED)
    }


def take_over(daemon: Daemon, since: str) -> dict[str, int]:
    words = ("archive", "import", "slurmdbd", "-M", "box", "-S", since, "--json")
    found: dict[str, int] = json.loads(daemon.ask(*words).stdout)
    return found


def scripts_in(daemon: Daemon, job: int) -> list[bytes]:
    """Return every script of a job in the archive."""
    files = contents_below(daemon.archive)
    return [
        data
        for path, data in files.items()
        if path.suffix == ".sh" and path.name.startswith(f"{job}-")
    ]


def wait_until_filed(daemon: Daemon, jobs: dict[str, int]) -> None:
    """Wait until the archive has every script with its environment and owner."""
    for job_id in jobs.values():
        daemon.wait_for_script(job_id)


def test_captured_scripts_are_not_taken_over_again(
    captured: Daemon, jobs: dict[str, int], began: str
) -> None:
    wait_until_filed(captured, jobs)
    done = take_over(captured, began)
    assert done["scripts"] == 0, done
    assert done["known"] >= len(jobs), done
    assert done["scriptless"] >= 1, done
    assert done["unanswered"] == 0, done
    for name, job in jobs.items():
        assert scripts_in(captured, job) == [SCRIPTS.get(name, SCRIPTS["plain"])]


@pytest.mark.parametrize("spool", ["there", "empty"])
def test_stored_scripts_are_taken_over_to_the_byte(
    booked_sandbox: Sandbox, home: Path, jobs: dict[str, int], began: str, spool: str
) -> None:
    changes: dict[str, str] = {}
    if spool == "empty":
        (home / "no-spool").mkdir(mode=0o755)
        changes = {"spool": str(home / "no-spool")}
    daemon = Daemon(booked_sandbox, home / spool, slurm=changes)
    daemon.state.mkdir(mode=0o700)
    try:
        done = take_over(daemon, began)
        assert done["scripts"] >= len(jobs)
        assert done["owned"] == done["scripts"]
        assert done["scriptless"] >= 1
        assert take_over(daemon, began)["known"] == done["scripts"]
        daemon.start()
        wait_until_filed(daemon, jobs)
        again = take_over(daemon, began)
        assert (again["scripts"], again["known"]) == (0, done["scripts"])
        for name, job in jobs.items():
            script = SCRIPTS.get(name, SCRIPTS["plain"])
            if spool == "empty":
                # slurmdbd's own text: its database takes only UTF-8.
                script = script.replace(b"\xe9", b"?")
            assert scripts_in(daemon, job) == [script], name
        texts = [path.read_bytes() for path in files_below(daemon.archive, "*.sh")]
        assert not any(text.startswith((b"NONE", b"Batch Script")) for text in texts)
        environment = next(iter(files_below(daemon.archive, f"{jobs['plain']}-*.env")))
        assert b"Environment used for" not in environment.read_bytes()
    finally:
        daemon.close()


def test_an_import_without_an_answer_fails(
    booked_sandbox: Sandbox, captured: Daemon, home: Path, jobs: dict[str, int], began: str
) -> None:
    wait_until_filed(captured, jobs)
    words = ("archive", "import", "slurmdbd", "-M", "box", "-S", began, "--json")
    history = ("accounting", "import", "--from", "sacct", "-M", "box", "-S", began, "--json")
    new = Daemon(booked_sandbox, home / "new")
    new.state.mkdir(mode=0o700)
    with failing_queries(booked_sandbox):
        known = captured.ask(*words, check=False)
        unknown = new.ask(*words, check=False)
        known_history = captured.ask(*history, check=False)
        unknown_history = new.ask(*history, check=False)
    assert (known_history.returncode, unknown_history.returncode) == (1, 1)
    assert json.loads(known_history.stdout)["unanswered"] >= len(jobs)
    assert "slurmdbd did not list" in known_history.stderr
    assert "slurmdbd lists no job of cluster box" in unknown_history.stderr
    assert (known.returncode, unknown.returncode) == (1, 1)
    assert json.loads(known.stdout)["unanswered"] >= len(jobs)
    assert "slurmdbd did not list" in known.stderr
    assert "slurmdbd lists no job of cluster box" in unknown.stderr


def test_an_import_of_a_period_without_jobs_succeeds(
    booked_sandbox: Sandbox, home: Path, jobs: dict[str, int]
) -> None:
    assert jobs, "jobs of other days show that slurmdbd answers"
    daemon = Daemon(booked_sandbox, home / "idle")
    daemon.state.mkdir(mode=0o700)
    words = ("accounting", "import", "--from", "sacct", "-M", "box", "-S", "now-3days")
    idle = daemon.ask(*words, "-E", "now-2days", check=False)
    assert (idle.returncode, idle.stderr) == (0, "")
    assert idle.stdout.startswith("Imported 0 runs of jobs and 0 steps.")


def test_a_script_without_an_answer_is_not_scriptless(
    booked_sandbox: Sandbox, jobs: dict[str, int]
) -> None:
    slurm = Slurm("box", booked_sandbox.make_cluster_settings())
    (record,) = slurm.query_accounting(jobs["plain"])
    assert slurm.read_stored_script(record).script == SCRIPTS["plain"]
    with failing_queries(booked_sandbox):
        assert slurm.read_stored_script(record) == StoredScript(is_unanswered=True)


def test_imported_jobs_of_a_user_who_left_keep_the_name(
    booked_sandbox: Sandbox, home: Path, jobs: dict[str, int], began: str
) -> None:
    need_namespaces(booked_sandbox)
    user = next(iter(booked_sandbox.users))
    daemon = Daemon(booked_sandbox, home / "left")
    daemon.state.mkdir(mode=0o700)
    passwd = home / "passwd"
    words = f"accounting import --from sacct --cluster box -S {began} --config {daemon.config}"
    text = (
        f"grep -v ^{user}: /etc/passwd > {passwd} && mount --bind {passwd} /etc/passwd && "
        f"! id {user} 2>&1 && exec {STEWARD} {words}"
    )
    booked_sandbox.run(["unshare", "-m", "sh", "-c", text])
    with closing(JournalReader(daemon.settings.state_dir)) as journal:
        events, _ = journal.read(0, {JOBS_IMPORTED}, 100_000)
    parts = [part for event in events for part in unpack_event(event)]
    records = {part.body.record.job_id: part.body.record for part in parts if part.kind == JOB_END}
    listed = ",".join(map(str, jobs.values()))
    columns = "JobIDRaw,UID,User,ReqTRES,AllocTRES"
    out = booked_sandbox.run(["sacct", "-X", "-n", "-P", "-j", listed, "-o", columns]).stdout
    rows = [tuple(line.split("|")) for line in out.splitlines()]
    assert [
        (str(job_id), str(one.uid), one.user, one.tres_requested, one.tres_allocated)
        for job_id, one in ((int(row[0]), records[int(row[0])]) for row in rows)
    ] == rows
    assert {row[2] for row in rows} == {user}
    assert {part for row in rows for part in row[3].split(",")} >= {"mem=1.50G", "mem=2G"}
