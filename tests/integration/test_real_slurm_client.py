"""Client and snapshot source on a real Slurm, run inside where its users resolve."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import Submit, state_of, wait_until

from steward.core.records import JobRecord
from steward.sandbox import Sandbox
from steward.slurm.commands import COMMAND_TIMEOUT_S

pytestmark = [pytest.mark.matrix, pytest.mark.interface]

INSIDE = str(Path(__file__).parent / "slurm_calls.py")
HOSTILE = "evil\nJobId=1 JobName=x UserId=root(0) GroupId=root(0)\x1f\x1e|x"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have further users")

Ask = Callable[..., Any]


@pytest.fixture
def ask(sandbox: Sandbox) -> Ask:
    """Query the sandbox's Slurm through Steward's client."""

    def call(
        question: str,
        argument: object = "0",
        timeout_s: float = COMMAND_TIMEOUT_S,
        **changes: Any,
    ) -> Any:
        settings = msgspec.structs.replace(sandbox.make_cluster_settings(), **changes)
        words = [sys.executable, INSIDE, msgspec.json.encode(settings).decode()]
        result = sandbox.run([*words, question, str(argument), str(timeout_s)], text=False)
        return msgspec.json.decode(result.stdout)

    return call


def records(answer: Any) -> list[JobRecord]:
    return msgspec.convert(answer, list[JobRecord])


def test_version_and_configuration(ask: Ask, sandbox: Sandbox, slurm_version: str) -> None:
    version = ask("version")
    assert len(version) == 3
    assert f"{version[0]}.{version[1]:02}".startswith(slurm_version[:5])
    config = ask("config")
    assert config["StateSaveLocation"] == sandbox.spool
    assert config["ClusterName"] == "sandbox"
    assert config["MinJobAge"].endswith(" sec")
    assert ask("standing") == []


def test_an_ordinary_job(ask: Ask, sandbox: Sandbox, submit: Submit, submitter: str) -> None:
    user = sandbox.users[submitter]
    job = submit(
        "#!/bin/sh\nexit 3\n", job_name="three", output="/dev/null", time="2:00", comment="a=b c"
    )
    wait_until(lambda: state_of(sandbox, job) == "FAILED")
    (record,) = records(ask("job", job))
    assert (record.job_id, record.name, record.state) == (job, "three", "FAILED")
    assert (record.uid, record.user, record.gid) == (user.uid, user.name, user.gid)
    assert (record.exit_code, record.exit_signal) == (3, 0)
    assert (record.time_limit_s, record.comment, record.batch) == (120, "a=b c", True)
    assert record.submit
    assert record.start
    assert record.end
    assert record.submit <= record.start <= record.end
    if ask("version") >= [25, 11, 0]:
        assert record.submit_line.startswith("sbatch --parsable ")
    if ask("version") >= [26, 5, 0]:
        assert record.sluid
    assert record.batch_host.startswith("node")
    assert record.priority is not None
    assert (record.suspended_at, record.suspended_s, record.resized_at) == (None, None, None)
    # The queue shows the same, as far as it shows it.
    (queued,) = [one for one in records(ask("queue")) if one.job_id == job]
    told = {field: getattr(queued, field) for field in queued.__struct_fields__}
    default = JobRecord(job_id=0)
    said = {field: value for field, value in told.items() if value != getattr(default, field)}
    assert said == {field: getattr(record, field) for field in said}


def test_no_job_can_forge_another(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    job = submit(
        "#!/bin/sh\nexit 0\n",
        job_name=HOSTILE,
        comment=f"{HOSTILE} WorkDir=/ StdErr=/etc/passwd",
        output="/dev/null",
        hold=True,
    )
    queue = {record.job_id: record for record in records(ask("queue"))}
    (alone,) = records(ask("job", job))
    for record in (queue[job], alone):
        assert record.name == HOSTILE
        assert record.comment == f"{HOSTILE} WorkDir=/ StdErr=/etc/passwd"
        assert record.uid == next(iter(sandbox.users.values())).uid
        assert record.state == "PENDING"
        assert (record.start, record.end, record.exit_code) == (None, None, None)
    assert alone.stdout == "/dev/null"
    assert all(record.uid != 0 for record in queue.values())
    sandbox.run(["scancel", str(job)])


def test_names_that_are_not_utf_8(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    name = os.fsdecode(b"caf\xe9")
    job = submit("#!/bin/sh\n", job_name=name, output="/tmp/o u\nt", hold=True)
    (record,) = records(ask("job", job))
    assert (record.name, record.stdout) == ("caf\\xe9", "/tmp/o u\nt")
    sandbox.run(["scancel", str(job)])


def test_arrays(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    job = submit("#!/bin/sh\nsleep 60\n", array="1-9%2", output="/dev/null")
    wait_until(lambda: len(records(ask("job", job))) == 3)
    shown = {record.array_task: record for record in records(ask("job", job))}
    assert set(shown) == {"1", "2", "3-9%2"}
    assert shown["3-9%2"].job_id == job
    assert {record.array_job_id for record in shown.values()} == {job}
    assert len({record.job_id for record in shown.values()}) == 3
    sandbox.run(["scancel", str(job)])


def test_heterogeneous_jobs(ask: Ask, sandbox: Sandbox, submitter: str) -> None:
    words = ["sbatch", "--parsable", "-o", "/dev/null", "-n1", ":", "-n2", "--wrap", "sleep 60"]
    job = int(sandbox.run(words, user=submitter).stdout)
    leader, other = sorted(records(ask("job", job)), key=lambda record: record.het_offset)
    assert (leader.job_id, leader.het_job_id, other.het_job_id) == (job, job, job)
    assert (leader.het_offset, other.het_offset, other.job_id) == (0, 1, job + 1)
    sandbox.run(["scancel", str(job)])


def test_a_requeued_job_is_another_run(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    job = submit("#!/bin/sh\nsleep 60\n", output="/dev/null")
    wait_until(lambda: state_of(sandbox, job) == "RUNNING")
    (before,) = records(ask("job", job))
    sandbox.run(["scontrol", "requeue", str(job)])
    wait_until(lambda: records(ask("job", job))[0].restarts == 1)
    (after,) = records(ask("job", job))
    assert before.restarts == 0
    assert after.uid == before.uid
    sandbox.run(["scancel", str(job)])


def test_no_version_lets_anybody_set_the_system_comment(sandbox: Sandbox, submit: Submit) -> None:
    job = submit("#!/bin/sh\n", hold=True, output="/dev/null")
    for option in ("SystemComment", "AdminComment"):
        done = sandbox.run(["scontrol", "update", f"JobId={job}", f"{option}=x"], check=False)
        assert (done.returncode == 0) == (option == "AdminComment"), done
    sandbox.run(["scancel", str(job)])


def test_fields_are_those_that_slurm_offers(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    job = submit("#!/bin/sh\n", output="/dev/null", time="2:00")
    wait_until(lambda: state_of(sandbox, job) == "COMPLETED")
    shown = sandbox.run(["squeue", "--helpFormat"], check=False).stdout.lower().split()
    (record,) = records(ask("job", job))
    assert bool(record.sluid) == ("sluid" in shown)
    assert set(ask("offered", "squeue")) == set(shown)


def test_a_job_that_slurm_does_not_know(ask: Ask) -> None:
    assert ask("job", 4_000_000) == []


def test_slurmctld_being_away(ask: Ask, sandbox: Sandbox, tmp_path: Path) -> None:
    conf = Path(sandbox.directory) / "nobody-listens.conf"
    text = Path(sandbox.slurm_conf).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("SlurmctldPort")]
    conf.write_text("\n".join([*lines, "SlurmctldPort=1"]) + "\n")
    answer = ask("queue", slurm_conf=str(conf), timeout_s=60.0)
    assert answer["error"] == "SlurmDown"
    slow = ask("queue", slurm_conf=str(conf), timeout_s=0.2)
    assert slow["error"] == "SlurmUnavailable"


@as_root
def test_users_resolve_inside_only(ask: Ask, sandbox: Sandbox, submit: Submit) -> None:
    jobs = {
        name: submit("#!/bin/sh\n", user=name, hold=True, output="/dev/null")
        for name in sandbox.users
    }
    queue = {record.job_id: record for record in records(ask("queue"))}
    for name, job in jobs.items():
        assert (queue[job].user, queue[job].uid) == (name, sandbox.users[name].uid)
    sandbox.run(["scancel", *map(str, jobs.values())])
