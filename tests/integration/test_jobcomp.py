"""jobcomp.lua in real slurmctlds: its records equal scontrol's."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import state_of, submit_to, wait_until
from sandbox_daemon import Daemon
from sandboxes import passable_directory
from spool_daemon import ask

import steward
from steward.capture.jobcomp import JobcompRecord, parse_line
from steward.core.events import JobFacts
from steward.core.records import JobRecord
from steward.sandbox import Sandbox, SandboxSpec
from steward.slurm.users import NameResolver

# Above what a test waits for at most.
pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(1200)]

SCRIPT = Path(steward.__file__).parent / "native" / "jobcomp.lua"
INSIDE = str(Path(__file__).parent / "slurm_calls.py")
ENDED = {"CANCELLED", "COMPLETED", "FAILED", "TIMEOUT"}


class JobcompSite:
    """Cluster whose slurmctld runs jobcomp.lua, and the written lines."""

    def __init__(self, cluster: Sandbox, lines: Path) -> None:
        self.cluster = cluster
        self.lines = lines
        self.user = next(iter(cluster.users))
        self._settings = msgspec.json.encode(cluster.make_cluster_settings()).decode()

    def submit(self, script: str, **options: Any) -> int:
        return submit_to(self.cluster, script, user=self.user, output="/dev/null", **options)

    def until_told(self, name: str) -> tuple[str, Path]:
        """Return a script that runs until a file exists, and the file."""
        go = self.lines.parent.with_name("go") / name
        return f"#!/bin/sh\nuntil [ -e {go} ]; do sleep 0.1; done\n", go

    def until(self, job: int, *states: str) -> None:
        wait_until(lambda: state_of(self.cluster, job) in states, 40)

    def told(self) -> list[JobcompRecord]:
        if not self.lines.exists():
            return []
        return [parse_line(line, NameResolver()) for line in self.lines.read_bytes().splitlines()]

    def of(self, job: int, count: int = 1) -> list[JobRecord]:
        """Return the records of a job, when there are enough."""
        found: list[JobRecord] = []

        def look() -> bool:
            found[:] = [one.record for one in self.told() if one.record.job_id == job]
            return len(found) >= count

        wait_until(look, 40)
        return found

    def whole(self, job: int) -> list[JobRecord]:
        """Return what squeue and scontrol show of a job now."""
        words = [sys.executable, INSIDE, self._settings, "job", str(job)]
        out = self.cluster.run(words, text=False).stdout
        return msgspec.json.decode(out, type=list[JobRecord])

    def agrees(self, record: JobRecord, *but: str) -> None:
        """Check that a record agrees with Slurm in each of its fields."""
        found: list[JobRecord] = []

        def look() -> bool:
            found[:] = [one for one in self.whole(record.job_id) if one.job_id == record.job_id]
            # jobcomp runs before the nodes have cleaned up.
            return [one.state for one in found] != ["COMPLETING"]

        wait_until(look, 40)
        (shown,) = found
        default = JobRecord(job_id=0)
        for field in record.__struct_fields__:
            mine, theirs = getattr(record, field), getattr(shown, field)
            # The name of a user who lives in the sandbox resolves there alone.
            if field in {"user", "group", "submit_host", *but} or mine == getattr(default, field):
                continue
            # Slurm 22.05 shows requested resources of pending jobs only.
            if theirs == getattr(default, field) and field.startswith(("tres_req", "requested")):
                continue
            assert mine == theirs, f"{field} of job {record.job_id}"


def up(tmp: Path, slurm: str, script: str) -> Sandbox:
    lines = tmp / "jobcomp"
    lines.mkdir(mode=0o770)
    go = tmp / "go"
    go.mkdir()
    go.chmod(0o777)
    (tmp / "steward.lua").write_text(SCRIPT.read_text())
    spec = SandboxSpec(
        nodes=2,
        slurm=slurm,
        jobcomp_lua=script.replace("{tmp}", str(tmp)),
    )
    cluster = Sandbox.up(spec)
    # Its owner is SlurmUser, as whom slurmctld writes there.
    owner = os.stat(f"{cluster.directory}/state")
    os.chown(lines, owner.st_uid, owner.st_gid)
    return cluster


OURS = 'steward_jobcomp_file = "{tmp}/jobcomp/lines"\n'


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[JobcompSite]:
    with (
        passable_directory() as path,
        # The script itself is slurmctld's, as it is without a site's own.
        up(path, slurm_version, OURS + SCRIPT.read_text()) as cluster,
    ):
        yield JobcompSite(cluster, path / "jobcomp" / "lines")


def test_the_check_asks_slurmctld(site: JobcompSite, sandbox: Sandbox) -> None:
    def check(cluster: Sandbox) -> tuple[int, str]:
        words = [sys.executable, "-m", "steward", "plugins", "check", "--jobcomp"]
        done = cluster.run([*words, f"{cluster.directory}/etc"], check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = check(site.cluster)
    assert (code, "JobCompType is jobcomp/lua, and" in said) == (0, True), said
    code, said = check(sandbox)
    assert (code, "JobCompType is jobcomp/none, not jobcomp/lua" in said) == (1, True), said


def test_finished_and_failed(site: JobcompSite) -> None:
    # slurmctld may hear of a step's end after srun does.
    gone = "while [ $(squeue -h -s $SLURM_JOB_ID.0 | wc -l) != 0 ]; do sleep 0.1; done"
    script = f'#!/bin/sh\nsrun sh -c "exit 7"\n{gone}\nsleep 1\nexit 3\n'
    job = site.submit(script, job_name='a "name"\\x', comment="c\nd", time="0:30", cpus_per_task=2)
    (record,) = site.of(job)
    assert (record.state, record.exit_code, record.exit_signal) == ("FAILED", 3, 0)
    assert (record.derived_exit_code, record.name) == (7, 'a "name"\\x')
    assert (record.cpus, record.requested_cpus, record.requested_nodes) == (2, 2, 1)
    assert (record.time_limit_s, record.restarts, record.comment) == (60, 0, "")
    assert record.start is not None
    assert record.end is not None
    assert record.end > record.start
    site.agrees(record)
    job = site.submit("#!/bin/sh\nkill -9 $$\n")
    (record,) = site.of(job)
    assert (record.state, record.exit_code, record.exit_signal) == ("FAILED", 0, 9)
    site.agrees(record)
    job = site.submit("#!/bin/sh\n")
    (record,) = site.of(job)
    assert (record.state, record.exit_code, record.exit_signal) == ("COMPLETED", 0, 0)
    site.agrees(record)


def test_cancelled(site: JobcompSite) -> None:
    job, held = site.submit("#!/bin/sh\nsleep 60\n"), site.submit("#!/bin/sh\n", hold=True)
    site.until(job, "RUNNING")
    site.cluster.run(["scancel", str(job), str(held)], user=site.user)
    (record,) = site.of(job)
    assert (record.state, record.exit_code, record.exit_signal) == ("CANCELLED", 0, 0)
    # Slurm calls jobcomp before it knows the signal that ended the script.
    site.agrees(record, "exit_code", "exit_signal")
    (record,) = site.of(held)
    assert (record.state, record.nodelist) == ("CANCELLED", "")
    site.agrees(record)


def test_an_array_and_a_heterogeneous_job(site: JobcompSite) -> None:
    array = site.submit("#!/bin/sh\nexit $SLURM_ARRAY_TASK_ID\n", array="1-3")
    wait_until(lambda: sum(r.record.array_job_id == array for r in site.told()) == 3, 40)
    tasks = {r.record.array_task: r.record for r in site.told() if r.record.array_job_id == array}
    assert {task: record.exit_code for task, record in tasks.items()} == {"1": 1, "2": 2, "3": 3}
    for record in tasks.values():
        site.agrees(record)
    text = "#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1 -n2\nsrun true\n"
    leader = site.submit(text)
    (first,), (second,) = site.of(leader), site.of(leader + 1)
    assert (first.het_job_id, first.het_offset) == (leader, 0)
    assert (second.het_job_id, second.het_offset) == (leader, 1)


def test_requeued_while_running_and_after_the_end(site: JobcompSite) -> None:
    job = site.submit("#!/bin/sh\nsleep 60\n")
    site.until(job, "RUNNING")
    site.cluster.run(["scontrol", "requeuehold", str(job)])
    (former,) = site.of(job)
    assert (former.state, former.restarts) == ("REQUEUED", 0)
    assert former.submit is not None
    assert former.end is not None
    site.until(job, "PENDING")
    site.cluster.run(["scancel", str(job)])
    later = site.of(job, 2)[1]
    assert (later.state, later.restarts) == ("CANCELLED", 1)
    assert later.submit is not None
    assert later.submit >= former.submit

    job = site.submit("#!/bin/sh\nexit 3\n")
    (ended,) = site.of(job)
    site.until(job, "FAILED")
    site.cluster.run(["scontrol", "requeuehold", str(job)])
    site.until(job, "PENDING")
    runs = [one for one in site.of(job) if one.restarts == 0]
    # Before 25.11 Slurm ends it once more, at the requeue; what counts is the earliest end.
    assert ended.end == min(one.end for one in runs if one.end)
    assert {one.state for one in runs} <= {"FAILED", "REQUEUED"}
    site.cluster.run(["scancel", str(job)])


def test_resized(site: JobcompSite) -> None:
    script, go = site.until_told("resized")
    job = site.submit(script, nodes="2")
    site.until(job, "RUNNING")
    site.cluster.run(["scontrol", "update", f"JobId={job}", "NumNodes=1"], user=site.user)
    go.touch()
    piece, last = site.of(job, 2)
    assert (piece.state, piece.nodes, piece.nodelist) == ("RESIZING", 2, "node[1-2]")
    assert piece.start is not None
    assert piece.end is not None
    assert last.end is not None
    assert piece.start <= piece.end <= last.end, "not the end that the job was expected to have"
    assert (last.state, last.nodes, last.nodelist) == ("COMPLETED", 1, "node1")
    # Slurm 24.11 and later omit memory from the requested resources after a resize. In 26.05 each
    # size has a SLUID; squeue keeps showing the first.
    site.agrees(last, "tres_requested", "requested_cpus", "requested_nodes", "sluid")
    (whole,) = site.whole(job)
    assert whole.resized_at is not None
    assert abs((whole.resized_at - piece.end).total_seconds()) <= 1


@pytest.mark.long
def test_suspended(site: JobcompSite) -> None:
    script, go = site.until_told("suspended")
    job = site.submit(script)
    site.until(job, "RUNNING")
    site.cluster.run(["scontrol", "suspend", str(job)])
    site.until(job, "SUSPENDED")
    (whole,) = site.whole(job)
    assert whole.suspended_at is not None
    assert whole.suspended_s == 0
    wait_until(lambda: _seconds_on(site) > whole.suspended_at.timestamp() + 2, 20)  # type: ignore[union-attr]
    site.cluster.run(["scontrol", "resume", str(job)])
    site.until(job, "RUNNING")
    (resumed,) = site.whole(job)
    assert resumed.suspended_at is not None
    suspended_s = (resumed.suspended_at - whole.suspended_at).total_seconds()
    assert resumed.suspended_s == suspended_s >= 2
    go.touch()
    (record,) = site.of(job)
    site.agrees(record)
    (over,) = site.whole(job)
    assert over.suspended_s == suspended_s


def _seconds_on(site: JobcompSite) -> float:
    return float(site.cluster.run(["date", "+%s"]).stdout)


def test_no_field_is_asked_that_slurm_does_not_know(site: JobcompSite) -> None:
    job = site.submit("#!/bin/sh\n")
    site.of(job)
    log = Path(site.cluster.directory, "log", "slurmctld.log").read_text(errors="replace")
    assert "unrecognized field" not in log
    assert "jobcomp/lua" not in log.replace("Job completion logging LUA plugin", "")


def test_a_line_that_cannot_be_written_is_counted(site: JobcompSite) -> None:
    lines = site.lines
    away = lines.with_name("away")
    lines.parent.rename(away.parent.with_name("gone"))
    try:
        job = site.submit("#!/bin/sh\n")
        site.until(job, "COMPLETED")
    finally:
        away.parent.with_name("gone").rename(lines.parent)
    other = site.submit("#!/bin/sh\n")
    site.of(other)
    assert [one.lost for one in site.told() if one.record.job_id == other] == [1]
    assert all(one.record.job_id != job for one in site.told())


SITES_OWN = (
    OURS
    + """
local steward = dofile("{tmp}/steward.lua")
function slurm_jobcomp_log_record(job)
    steward.log_record(job)
    local own = io.open("{tmp}/jobcomp/own", "a")
    own:write(job.job_id, "\\n")
    own:close()
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
)


def test_the_daemon_on_a_site_with_a_script_of_its_own(slurm_version: str) -> None:
    with passable_directory() as path, up(path, slurm_version, SITES_OWN) as cluster:
        site = JobcompSite(cluster, path / "jobcomp" / "lines")
        first = site.submit("#!/bin/sh\nexit 4\n")
        site.of(first)
        # One poll of the queue, at the start: later changes come from lines.
        slurm = {"jobcomp_lines": str(site.lines), "snapshot_interval_s": 3600.0}
        daemon = Daemon(cluster, path / "steward", slurm=slurm)
        daemon.start()
        try:
            jobs = [site.submit(f"#!/bin/sh\nexit {code}\n") for code in (0, 5, 6)]
            wait_until(lambda: len(ends(daemon, [first, *jobs])) == 4, 60)
            assert [code for _job, code, _ in ends(daemon, [first, *jobs])] == [4, 0, 5, 6]
            wait_until(lambda: all(whole for _, _, whole in ends(daemon, jobs)), 60)
        finally:
            daemon.close()
        own = {int(line) for line in (path / "jobcomp" / "own").read_text().split()}
        assert own == {first, *jobs}


def ends(daemon: Daemon, jobs: list[int]) -> list[tuple[int, int | None, bool]]:
    """Return job, exit code and whether its whole record followed, for jobcomp's ends."""
    rows = ask(
        daemon.settings, "journal.db", "SELECT kind, data FROM event WHERE kind LIKE 'job.%'"
    )
    found: dict[int, list[Any]] = {}
    for kind, data in rows:
        envelope = msgspec.json.decode(data)
        if kind == "job.script":
            continue
        body = msgspec.convert(envelope["body"], JobFacts)
        record = body.record
        if record.job_id not in jobs:
            continue
        if envelope["source"] == "jobcomp":
            found.setdefault(record.job_id, [record.exit_code, False])
        elif body.whole and record.state in ENDED and record.job_id in found:
            found[record.job_id][1] = True
    return [(job, code, whole) for job, (code, whole) in sorted(found.items())]
