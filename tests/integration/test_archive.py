"""Archive on a real cluster: submitted scripts are kept, found, and shown to their owners."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_submission import Submit, state_of, submit_to, wait_until
from sandbox_daemon import Daemon

from steward.sandbox import Sandbox, SandboxSpec
from steward.slurm.environment import split_entries

pytestmark = pytest.mark.matrix

SECRET = "tr0ub4dor-and-3"


@pytest.fixture(scope="module")
def home(sandbox: Sandbox) -> Path:
    return Path(sandbox.directory) / "steward-archive"


@pytest.fixture(scope="module")
def daemon(sandbox: Sandbox, home: Path) -> Iterator[Daemon]:
    running = Daemon(sandbox, home)
    running.start()
    yield running
    running.close()


@pytest.fixture(scope="module")
def others(sandbox: Sandbox) -> tuple[str, str]:
    users = list(sandbox.users)
    if len(users) < 2:
        pytest.skip("only root can have a second user in the sandbox")
    return users[0], users[1]


def test_a_script_is_kept_byte_for_byte(daemon: Daemon, submit: Submit, submitter: str) -> None:
    script = b"#!/bin/bash\n# \xff\xfe not UTF-8\n#SBATCH -J 'odd/../name'\nexit 0\n"
    job = submit(script, output="/dev/null")
    path = daemon.wait_for_script(job)
    assert path.read_bytes() == script
    assert submitter in path.parts
    assert "/../" not in str(path)


def test_a_large_script_is_kept_whole(daemon: Daemon, submit: Submit) -> None:
    script = b"#!/bin/bash\n" + b"# 0123456789abcdef\n" * 60_000 + b"exit 0\n"
    job = submit(script, output="/dev/null")
    assert daemon.wait_for_script(job).read_bytes() == script


def test_an_environment_is_kept_without_its_secret(
    daemon: Daemon, sandbox: Sandbox, submitter: str
) -> None:
    script = b"#!/bin/bash\nexit 0\n"
    job = submit_to(
        sandbox,
        script,
        user=submitter,
        env={
            "MULTI": "one\ntwo=three\n",
            "BYTES": b"\xff\xfe".decode("utf-8", "surrogateescape"),
            "MY_API_TOKEN": SECRET,
            "URL": f"https://ada:{SECRET}@example.org/",
        },
        output="/dev/null",
    )
    path = daemon.wait_for_script(job).with_suffix(".env")
    variables = dict(split_entries(path.read_bytes()))
    assert variables[b"MULTI"] == b"one\ntwo=three\n"
    assert variables[b"BYTES"] == b"\xff\xfe"
    assert variables[b"MY_API_TOKEN"] == variables[b"URL"] == b"[redacted by steward]"
    shown = daemon.ask("archive", "env", str(job)).stdout
    assert "two=three" in shown
    assert SECRET not in shown
    assert daemon.bytes_anywhere(SECRET.encode()) == []


def test_each_may_read_only_their_own(
    daemon: Daemon, sandbox: Sandbox, others: tuple[str, str]
) -> None:
    owner, other = others
    word = "zyzzyva-module"
    job = submit_to(sandbox, f"#!/bin/bash\n# {word}\n", user=owner, output="/dev/null")
    mine = submit_to(sandbox, "#!/bin/bash\n# mine\n", user=other, output="/dev/null")
    path = daemon.wait_for_script(job)
    daemon.wait_for_script(mine)
    assert daemon.owner_access(path, owner)
    assert not daemon.owner_access(path, other)
    assert not daemon.owner_access(path.with_suffix(".env"), other)
    assert word in daemon.ask("archive", "show", str(job), user=owner).stdout
    prying: list[tuple[str, ...]] = [
        ("show", str(job)),
        ("show", str(job), "--sbatch"),
        ("env", str(job)),
        ("diff", str(mine), str(job)),
        ("diff", str(job), str(mine)),
    ]
    for words in prying:
        refused = daemon.ask("archive", *words, user=other, check=False)
        assert refused.returncode == (2 if words[0] == "diff" else 1), words
        assert word not in refused.stdout + refused.stderr
        assert refused.stderr.startswith("steward: ")
        assert refused.stderr.count("\n") == 1
    wait_until(lambda: str(job) in daemon.ask("archive", "search", word, user=owner).stdout)
    assert str(job) not in daemon.ask("archive", "search", word, user=other).stdout
    assert daemon.ask_json("archive", "search", "--count", word, user=other)["count"] == 0
    ruling: list[tuple[str, ...]] = [
        ("erase", "-j", str(job), "--yes"),
        ("verify",),
        ("reindex",),
    ]
    for words in ruling:
        refused = daemon.ask("archive", *words, user=other, check=False)
        assert refused.returncode in (1, 2), (words, refused.stdout)
    assert path.exists()


def test_search_finds_words_and_paths(daemon: Daemon, submit: Submit) -> None:
    job = submit("#!/bin/bash\nmodule load GROMACS/2023.1-foss\n/opt/apps/x-y/bin/run\n",
                 output="/dev/null")  # fmt: skip
    daemon.wait_for_script(job)
    for text in ("GROMACS/2023.1", "/opt/apps/x-y", "gromacs"):
        wait_until(lambda text=text: any(  # type: ignore[misc] # bound now
            hit["job"]["job"] == str(job)
            for hit in daemon.ask_json("archive", "search", text)["hits"]
        ))  # fmt: skip


def test_an_array_has_one_script_for_all_its_tasks(daemon: Daemon, submit: Submit) -> None:
    job = submit("#!/bin/bash\n# the array's\nsleep 0.2\n", array="1-3", output="/dev/null")
    daemon.wait_for_script(job)
    wait_until(lambda: daemon.ask("archive", "show", f"{job}_2", check=False).returncode == 0)
    assert "# the array's" in daemon.ask("archive", "show", f"{job}_2").stdout
    wait_until(lambda: len(daemon.files(f"{job}-*.sh")) == 1)


def test_a_failed_job_is_listed_as_failed(daemon: Daemon, submit: Submit) -> None:
    job = submit("#!/bin/bash\nexit 3\n", output="/dev/null", job_name="fails")
    daemon.wait_for_script(job)

    def failed() -> bool:
        jobs = daemon.ask_json("archive", "list", "-j", str(job))["jobs"]
        return bool(jobs) and jobs[0]["state"] == "FAILED"

    wait_until(failed, 30)
    listed = daemon.ask("archive", "list", "--state", "FAILED", "--name", "fai*").stdout
    assert str(job) in listed


def test_a_job_without_a_script_is_listed_as_such(
    daemon: Daemon, sandbox: Sandbox, submitter: str
) -> None:
    sandbox.run(["srun", "-J", "interactive", "sleep", "2"], user=submitter, cwd="/tmp")

    def listed() -> bool:
        jobs = daemon.ask_json("archive", "list", "--name", "interactive")["jobs"]
        return bool(jobs) and not jobs[0].get("script")

    wait_until(listed, 30)


def test_a_requeued_job_is_one_job_with_two_runs(
    daemon: Daemon, sandbox: Sandbox, submit: Submit
) -> None:
    job = submit("#!/bin/bash\nsleep 300\n", requeue=True, output="/dev/null")
    daemon.wait_for_script(job)
    wait_until(lambda: state_of(sandbox, job) == "RUNNING")
    wait_until(lambda: bool(daemon.ask_json("archive", "show", str(job)).get("runs")))
    sandbox.run(["scontrol", "requeue", str(job)])
    wait_until(lambda: len(daemon.ask_json("archive", "show", str(job))["runs"]) == 2, 60)
    assert len(daemon.files(f"{job}-*.sh")) == 1
    assert daemon.ask_json("archive", "show", str(job)).get("others", []) == []
    sandbox.run(["scancel", str(job)])


def test_what_was_submitted_while_steward_was_down_is_found(daemon: Daemon, submit: Submit) -> None:
    assert daemon.stop() == 0
    jobs = [submit(f"#!/bin/bash\n# {n}\n", output="/dev/null") for n in range(5)]
    daemon.start()
    for number, job in enumerate(jobs):
        assert daemon.wait_for_script(job).read_text() == f"#!/bin/bash\n# {number}\n"


def test_a_restart_keeps_nothing_twice(daemon: Daemon, submit: Submit) -> None:
    job = submit("#!/bin/bash\n# once\n", output="/dev/null")
    daemon.wait_for_script(job)
    assert daemon.stop() == 0
    before = daemon.files("*.sh")
    daemon.start()
    later = submit("#!/bin/bash\n# later\n", output="/dev/null")
    daemon.wait_for_script(later)
    # The unverified file is removed a moment after the script is filed under its owner.
    wait_until(lambda: len(daemon.files("*.sh")) == len(before) + 1)


def test_verify_finds_nothing_wrong_and_then_what_was_changed(
    daemon: Daemon, submit: Submit
) -> None:
    job = submit("#!/bin/bash\n# to be changed\n", output="/dev/null")
    path = daemon.wait_for_script(job)
    assert daemon.ask("archive", "verify").returncode == 0
    before = path.read_bytes()
    path.write_bytes(b"forged\n")
    found = daemon.ask("archive", "verify", check=False)
    assert found.returncode == 1
    assert path.name in found.stdout + found.stderr
    path.write_bytes(before)


def test_a_purged_job_is_gone_everywhere(daemon: Daemon, submit: Submit) -> None:
    word = "quokka-plutonium"
    job = submit(f"#!/bin/bash\n# {word}\n", output="/dev/null")
    path = daemon.wait_for_script(job)
    daemon.ask("archive", "erase", "-j", str(job), "--yes")
    wait_until(lambda: not path.exists(), 30)
    wait_until(lambda: str(job) not in daemon.ask("archive", "search", word).stdout, 30)
    assert daemon.ask("archive", "show", str(job), check=False).returncode == 1 or (
        word not in daemon.ask("archive", "show", str(job)).stdout
    )


# The tests below need separate clusters.


@pytest.fixture
def own_cluster(slurm_version: str) -> Iterator[Callable[..., Sandbox]]:
    clusters = []

    def up(**spec: object) -> Sandbox:
        clusters.append(Sandbox.up(SandboxSpec(slurm=slurm_version, **spec)))  # type: ignore[arg-type]  # the test's own
        return clusters[-1]

    yield up
    for cluster in clusters:
        cluster.down()


def test_both_scripts_of_a_reused_id_are_kept(own_cluster: Callable[..., Sandbox]) -> None:
    cluster = own_cluster(first_job_id=100)
    daemon = Daemon(cluster, Path(cluster.directory) / "steward")
    user = next(iter(cluster.users))
    try:
        daemon.start()
        first = submit_to(cluster, "#!/bin/bash\n# first\n", user=user, output="/dev/null")
        path = daemon.wait_for_script(first)
        assert path.read_text() == "#!/bin/bash\n# first\n"
        wait_until(lambda: state_of(cluster, first) in ("COMPLETED", ""), 30)
        # A script whose job no poll showed, seconds before the next one's, could be of either.
        wait_until(lambda: daemon.ask_json("archive", "show", str(first))["record"], 30)
        # slurmctld forgets everything, and begins with the same ids again.
        cluster.stop_service("slurmctld")
        for entry in Path(cluster.spool).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        cluster.restart_controller("-c")
        second = submit_to(cluster, "#!/bin/bash\n# second\n", user=user, output="/dev/null")
        assert second == first
        wait_until(lambda: len(daemon.files(f"{first}-*.sh")) == 2, 30)
        texts = {path.read_text() for path in daemon.files(f"{first}-*.sh")}
        assert texts == {"#!/bin/bash\n# first\n", "#!/bin/bash\n# second\n"}
        wait_until(lambda: "# second" in daemon.ask("archive", "show", str(first)).stdout, 30)
        # The second script is the first job's until a poll shows the second job.
        wait_until(lambda: len(daemon.ask_json("archive", "show", str(first))["others"]) == 1, 30)
    finally:
        daemon.close()


def test_a_script_is_kept_while_slurm_does_not_answer(
    own_cluster: Callable[..., Sandbox],
) -> None:
    cluster = own_cluster()
    user = next(iter(cluster.users))
    name = "kept-meanwhile"
    script = "#!/bin/bash\nsleep 300\n"
    job = submit_to(cluster, script, user=user, output="/dev/null", job_name=name)
    # slurmctld saves its jobs later, and forgets unsaved ones for good.
    state = Path(cluster.spool) / "job_state"
    wait_until(lambda: state.exists() and name.encode() in state.read_bytes())
    cluster.kill_controller()
    daemon = Daemon(cluster, Path(cluster.directory) / "steward", slurm={"spool": cluster.spool})
    try:
        daemon.start()
        wait_until(lambda: any("unverified" in p.parts for p in daemon.files(f"{job}*.sh")), 60)
        cluster.restart_controller()
        path = daemon.wait_for_script(job)
        assert path.read_text() == "#!/bin/bash\nsleep 300\n"
        wait_until(lambda: len(daemon.files(f"{job}*.sh")) == 1)
    finally:
        daemon.close()


def test_it_runs_as_slurm_user_without_root(own_cluster: Callable[..., Sandbox]) -> None:
    cluster = own_cluster()
    if len(cluster.users) < 2:
        pytest.skip("without root the sandbox's SlurmUser is the caller anyway")
    home = Path(cluster.directory) / "steward"
    home.mkdir()
    subprocess.run(["chown", "-R", "slurm", str(home)], check=True)
    daemon = Daemon(cluster, home, user="slurm")
    user = next(iter(cluster.users))
    try:
        daemon.start()
        job = submit_to(cluster, "#!/bin/bash\n# plain\n", user=user, output="/dev/null")
        path = daemon.wait_for_script(job)
        assert path.read_text() == "#!/bin/bash\n# plain\n"
        assert path.owner() == "slurm" or path.stat().st_uid != 0
        assert daemon.owner_access(path, user)
        assert daemon.ask("archive", "show", str(job), user=user).returncode == 0
    finally:
        daemon.close()
