"""Jobs submitted again by ``archive show --sbatch``: Slurm allocates the same resources."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_submission import wait_until
from sandbox_daemon import Daemon
from sandboxes import need_users, passable_directory

from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.database,
    pytest.mark.timeout(900),
]

HOSTILE = "q'uo\"te $(touch owned) `touch owned`; touch owned"
DIRECTIVES = "#!/bin/sh\n#SBATCH -n 3 --mem=200\n#SBATCH --comment='of the script'\ntrue\n"
LINES = [
    "",
    "-t 5 --mem=300 -c 1 -J optmem",
    "-n 2",
    "-n3 -c1",
    "-N2",
    "-N2 --ntasks-per-node=2",
    "-c 4",
    "-c 2 -n 2",
    "--mem-per-cpu=50M -n 2",
    "--mem=1G",
    "--exclusive",
    "--exclusive=user",
    "-s",
    "-On 4",
    "-N 2 -n 4 --mem=100M",
    "--mincpus=2",
    "-A chemistry",
    "--accou=chemistry --partition debug",
    "-q normal --time=1-02:03:04",
    "-t 7:30",
    "-a 1-2",
    "--array=1-3%2 -n 2",
    "-C fast",
    "--nice=5 --requeue",
    "--no-requeue --hint=nomultithread",
    "--threads-per-core=1 -n 2",
    "--export=ALL,A=1,B=2 -n2",
    "-D /tmp -J elsewhere",
    "--signal=B:USR1@10 -n2 -o /dev/null",
    "--begin=now --wait-all-nodes=1",
    "-n1 : -n2",
    "-n1 --comment=first : -n 2 --mem=100",
]
WORDS = [
    ["--comment=a b; touch /tmp/x", "-n2"],
    ["--comment", "a -n 4 b", "-n", "2"],
    ["-J", "two  words", "--mem=400"],
    ["-J", "--odd -n 3"],
    ["-J", HOSTILE, "-n", "2"],
    ["--wrap", f"echo {HOSTILE}; true", "-n", "2"],
    ["-n2", "--wrap=true", "--comment=of the wrap"],
    ["--mail-type", "NONE", "--export", "ALL,A=x y", "-n", "2", "job.sh"],
]
SCRIPTS = [
    ["-n", "2", "job.sh", "arg one", "-n", "4"],
    ["-J", "a name", "job.sh", "--mem=1"],
    ["job.sh"],
    ["-n", "2", "directives.sh"],
]
COLUMNS = (
    "JobName,Account,Partition,QOS,TimelimitRaw,ReqCPUS,ReqMem,ReqTRES,NCPUS,Constraints,WorkDir"
)
ASK = """
import sys
from steward.archive.requests import ShowRequest
from steward.cli.options import ClientPlace
from steward.client.calls import get_action, call_action
for job in sys.argv[2:]:
    request = ShowRequest(job=job, sbatch=True)
    answer = call_action(ClientPlace(socket=sys.argv[1]), get_action("archive.show"), request)
    with open(f"{job}.again", "w") as file:
        file.write(answer.sbatch)
"""
VARIABLES = {"SBATCH_ACCOUNT": "chemistry", "SBATCH_MEM_PER_NODE": "250"}


@pytest.fixture(scope="module")
def home(booked_sandbox: Sandbox) -> Iterator[Path]:
    need_users(booked_sandbox)
    with passable_directory() as path:
        yield path


@pytest.fixture(scope="module")
def daemon(booked_sandbox: Sandbox, home: Path) -> Iterator[Daemon]:
    daemon = Daemon(booked_sandbox, home / "steward")
    daemon.start()
    yield daemon
    daemon.close()


def given(cluster: Sandbox, jobs: list[int]) -> dict[int, list[str]]:
    """Return what Slurm allocated to each ended job, by task or component."""
    listed = ",".join(map(str, jobs))
    words = ["sacct", "-X", "-n", "-P", "-j", listed, "-o", f"JobID,State,{COLUMNS}"]
    rows: dict[int, list[str]] = {}
    running = set()
    for line in cluster.run(words).stdout.splitlines():
        name, state, rest = line.split("|", 2)
        job = int(name.partition("_")[0].partition("+")[0])
        rows.setdefault(job, []).append(rest)
        # slurmdbd may hear of a job's end before its start: it has no partition until then.
        if not state.startswith(("COMPLETED", "FAILED")) or not rest.split("|")[2]:
            running.add(job)
    return {job: sorted(found) for job, found in rows.items() if job not in running}


def test_jobs_submitted_again_are_given_the_same(
    booked_sandbox: Sandbox, home: Path, daemon: Daemon
) -> None:
    user = next(iter(booked_sandbox.users))
    work = home / "work"
    booked_sandbox.run(["mkdir", "-m", "777", str(work)])
    nodes = booked_sandbox.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split()
    for node in set(nodes):
        booked_sandbox.run(["scontrol", "update", f"node={node}", "availablefeatures=fast"])
    cases = [*map(shlex.split, LINES), *WORDS, *SCRIPTS, ["job.sh"]]
    assert len(cases) >= 40
    (work / "job.sh").write_text("#!/bin/sh\ntrue\n")
    (work / "directives.sh").write_text(DIRECTIVES)
    # Without a limit, some versions show a year, or none, depending on how the job was started.
    lines = [f"cd {work}", "export SBATCH_TIMELIMIT=9"]
    for case in cases:
        words = " ".join(map(shlex.quote, case))
        source = " < job.sh" if ".sh" not in words and "--wrap" not in words else ""
        lines.append(f"sbatch --parsable {words}{source}")
    assignments = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    lines[-1] = f"{assignments} {lines[-1]}"
    out = booked_sandbox.run(["sh", "-ec", "\n".join(lines)], user=user, timeout_s=300).stdout
    jobs = [int(line.partition(";")[0]) for line in out.split()]
    wait_until(lambda: set(given(booked_sandbox, jobs)) == set(jobs), 120)
    for job in jobs:
        daemon.wait_for_script(job)
    listed = " ".join(map(str, jobs))
    again = [
        "export SBATCH_TIMELIMIT=3",
        f"cd {work}",
        f"{sys.executable} -c {shlex.quote(ASK)} {daemon.settings.socket} {listed}",
        f"for job in {listed}; do sh $job.again; done",
    ]
    out = booked_sandbox.run(["sh", "-ec", "\n".join(again)], user=user, timeout_s=500).stdout
    repeated = [int(line.split()[-1]) for line in out.splitlines()]
    assert len(repeated) == len(jobs)
    wait_until(lambda: set(given(booked_sandbox, repeated)) == set(repeated), 120)
    before, after = given(booked_sandbox, jobs), given(booked_sandbox, repeated)
    for case, first, second in zip(cases, jobs, repeated, strict=True):
        text = (work / f"{first}.again").read_text()
        assert after[second] == before[first], (case, text)
        assert "It was submitted by: sbatch" in text
    assert not (work / "owned").exists()
    doubtful = (work / f"{jobs[cases.index(WORDS[-1])]}.again").read_text()
    assert "without quotes: check --export" in doubtful
