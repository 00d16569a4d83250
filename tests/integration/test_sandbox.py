"""The sandbox, on real Slurm: it runs jobs, keeps to itself, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitting import Submit, state_of, submit_to, wait_until

from steward.sandbox import Sandbox, SandboxError, SandboxSpec
from steward.sandbox.keeping import keepers as keepers_of
from steward.sandbox.spec import start_time

pytestmark = pytest.mark.matrix


def need_users(sandbox: Sandbox) -> None:
    if len(sandbox.users) < 2:
        pytest.skip("without root or namespaces there is one user only")


def need_namespaces(sandbox: Sandbox) -> None:
    if not sandbox.plan.contained:
        pytest.skip("namespaces are not permitted here")


def processes_of(directory: str) -> list[str]:
    """Command lines, on the whole machine, of what belongs to a sandbox."""
    found = []
    needle = os.fsencode(directory)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if needle in words or needle in Path(f"/proc/{name}/environ").read_bytes():
                found.append(words.replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended, or is somebody else's
    return found


@pytest.fixture
def directory() -> Iterator[str]:
    """A path that sandboxes' users can pass to, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        Path(path).chmod(0o755)
        yield f"{path}/sandbox"


@pytest.fixture
def own(directory: str, slurm_version: str) -> Iterator[Sandbox]:
    """A small cluster of the test's own."""
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    with Sandbox.up(spec) as sandbox:
        yield sandbox


def test_a_job_runs_as_the_one_who_submitted_it(
    sandbox: Sandbox, submit: Submit, submitter: str
) -> None:
    user = sandbox.users[submitter]
    inside = user.home.startswith(sandbox.directory)
    where = user.home if inside else f"{sandbox.directory}/home"
    job = submit("#!/bin/sh\nid -un\n", output=f"{where}/who-%j", chdir=where)
    wait_until(lambda: state_of(sandbox, job) == "COMPLETED")
    result = Path(f"{where}/who-{job}")
    assert result.read_text() == f"{submitter}\n"
    assert result.stat().st_uid == user.uid


def test_the_version_is_the_one_asked_for(sandbox: Sandbox, slurm_version: str) -> None:
    said = sandbox.run(["sinfo", "-V"]).stdout.split()[-1]
    assert said == sandbox.plan.slurm_version
    assert said.startswith(slurm_version)


def test_users_cannot_read_each_other(sandbox: Sandbox) -> None:
    need_users(sandbox)
    one, other = list(sandbox.users.values())[:2]
    sandbox.run(["sh", "-c", "echo mine > ~/secret"], user=one.name)
    result = sandbox.run(["cat", f"{one.home}/secret"], user=other.name, check=False)
    assert result.returncode != 0
    assert "mine" not in result.stdout
    for private in (sandbox.spool, f"{sandbox.directory}/etc/munge.key"):
        assert sandbox.run(["ls", "-A", private], user=other.name, check=False).stdout in (
            "",
            f"{private}\n",
        )
    key = sandbox.run(["cat", f"{sandbox.directory}/etc/munge.key"], user=other.name, check=False)
    assert key.returncode != 0


def test_steward_can_be_run_by_every_user(sandbox: Sandbox) -> None:
    for user in sandbox.users:
        result = sandbox.run([sys.executable, "-c", "import steward; print(1)"], user=user)
        assert result.stdout == "1\n"


def test_the_machine_is_left_as_it_was(sandbox: Sandbox) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert sandbox.directory not in mounts
    if len(sandbox.users) > 1:
        passwd = Path("/etc/passwd").read_text()
        assert not [name for name in sandbox.users if f"{sandbox.directory}/home/{name}" in passwd]


def test_run_gives_input_output_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.run(["sh", "-c", "cat; echo no >&2; exit 3"], input="yes", check=False)
    assert (result.stdout, result.stderr, result.returncode) == ("yes", "no\n", 3)
    with pytest.raises(SandboxError, match="ended with 3: no"):
        sandbox.run(["sh", "-c", "echo no >&2; exit 3"])


def test_run_ends_what_takes_too_long(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="did not end"):
        sandbox.run(["sleep", "4321"], timeout_s=0.3)
    assert not [line for line in processes_of(sandbox.directory) if "sleep 4321" in line]


def test_an_unknown_user_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no user 'eve'"):
        sandbox.run(["true"], user="eve")


def test_signals_reach_the_program_inside(sandbox: Sandbox) -> None:
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    with sandbox.popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "got\n"
        assert process.wait(30) == 5


def test_killing_the_caller_side_kills_the_program(sandbox: Sandbox) -> None:
    with sandbox.popen(["sleep", "1234"], stdout=subprocess.DEVNULL) as process:
        inner = process.inner_pid
        assert inner
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: start_time(inner) == 0)


def test_a_program_killed_inside_is_seen_as_killed(sandbox: Sandbox) -> None:
    with sandbox.popen(["sleep", "1234"]) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_two_sandboxes_side_by_side(own: Sandbox, sandbox: Sandbox, submitter: str) -> None:
    assert own.directory != sandbox.directory
    assert not set(own.plan.ports) & set(sandbox.plan.ports)
    first = submit_to(own, "#!/bin/sh\nsleep 100\n", user=submitter, job_name="only-here")
    assert str(first) in own.run(["squeue", "-h", "-o", "%i"]).stdout.split()
    assert "only-here" not in sandbox.run(["squeue", "-h", "-o", "%j"]).stdout
    munge = own.run(["sh", "-c", f"munge -n -S {own.plan.munge_socket}"]).stdout
    other = ["unmunge", "-S", sandbox.plan.munge_socket]
    assert sandbox.run(other, input=munge, check=False).returncode != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users to let in")
def test_users_get_into_a_sandbox_below_closed_directories(
    directory: str, slurm_version: str
) -> None:
    closed = Path(directory) / "closed" / "more"
    closed.mkdir(parents=True)
    closed.chmod(0o700)
    closed.parent.chmod(0o700)
    spec = SandboxSpec(directory=str(closed / "sandbox"), nodes=1, slurm=slurm_version)
    with Sandbox.up(spec) as below:
        name, user = next(iter(below.users.items()))
        below.run(["touch", "mine"], user=name)
        assert (Path(user.home) / "mine").exists()
        listed = below.run(["ls", str(closed.parent)], user=name, check=False)
        assert listed.returncode != 0


def test_a_directory_in_use_or_of_others_is_refused(own: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"up in .* already"):
        Sandbox.up(own.plan.spec)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SandboxError, match="other things"):
        Sandbox.up(SandboxSpec(directory=str(tmp_path)))
    assert (tmp_path / "thesis.tex").exists()
    assert own.is_up()


def test_down_is_idempotent_and_removes_everything(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    Sandbox.up(spec, detached=True)
    sandbox = Sandbox.load(directory)
    user = next(iter(sandbox.users))
    submit_to(sandbox, "#!/bin/sh\nsetsid sleep 2345 &\nsleep 100\n", user=user)
    wait_until(lambda: any("sleep 2345" in line for line in processes_of(directory)))
    sandbox.down()
    sandbox.down()
    assert processes_of(directory) == []
    assert not os.path.exists(directory)
    with pytest.raises(SandboxError, match="no sandbox"):
        Sandbox.load(directory)


def test_down_can_keep_the_logs_and_up_begins_anew(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    sandbox = Sandbox.up(spec)
    sandbox.down(keep=True)
    assert os.path.exists(f"{directory}/log/slurmctld.log")
    assert processes_of(directory) == []
    with Sandbox.up(spec) as again:
        assert again.is_up()


@pytest.mark.parametrize("contained", [True, False])
@pytest.mark.parametrize("victim", ["keeper", "init"])
def test_killing_a_keeper_leaves_no_process(
    directory: str, slurm_version: str, victim: str, contained: bool
) -> None:
    if slurm_version and not contained:
        pytest.skip("another version needs namespaces")
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version, contained=contained)
    Sandbox.up(spec, detached=True)
    sandbox = Sandbox.load(directory)
    user = next(iter(sandbox.users))
    submit_to(sandbox, "#!/bin/sh\nsetsid sleep 3456 &\nsleep 100\n", user=user)
    wait_until(lambda: any("sleep 3456" in line for line in processes_of(directory)))
    keepers = keepers_of(sandbox.directory)
    assert keepers is not None
    os.kill(getattr(keepers, victim).pid, signal.SIGKILL)
    wait_until(lambda: processes_of(directory) == [])
    wait_until(lambda: not sandbox.is_up())
    sandbox.down()


@pytest.mark.parametrize("contained", [True, False])
def test_killing_the_caller_leaves_nothing(
    directory: str, slurm_version: str, contained: bool
) -> None:
    if slurm_version and not contained:
        pytest.skip("another version needs namespaces")
    program = (
        "import sys, time\n"
        "from steward.sandbox import Sandbox, SandboxSpec\n"
        "spec = SandboxSpec(directory=sys.argv[1], nodes=1, slurm=sys.argv[2], "
        f"contained={contained})\n"
        "Sandbox.up(spec)\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)\n"
    )
    argv = [sys.executable, "-c", program, directory, slurm_version]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "up\n"
        assert processes_of(directory) != []
        caller.kill()
    wait_until(lambda: processes_of(directory) == [])
    wait_until(lambda: not os.path.exists(directory))


def test_it_cannot_be_removed_from_inside(own: Sandbox) -> None:
    need_namespaces(own)
    program = "import sys; from steward.sandbox import Sandbox; Sandbox.load(sys.argv[1]).down()"
    result = own.run([sys.executable, "-c", program, own.directory], check=False)
    assert "from outside" in result.stderr
    assert own.is_up()
    assert own.run(["sinfo", "-h"]).stdout


def test_a_daemon_that_cannot_start_is_named(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(
        directory=directory, nodes=1, slurm=slurm_version, extra=("SelectType=select/none_such",)
    )
    with pytest.raises(SandboxError, match="slurmctld has ended") as caught:
        Sandbox.up(spec)
    assert "\n" not in str(caught.value)
    assert processes_of(directory) == []
    assert os.path.exists(f"{directory}/log")


def test_the_controller_can_crash_come_back_and_forget(own: Sandbox, submitter: str) -> None:
    job = submit_to(own, "#!/bin/sh\nsleep 100\n", user=submitter, hold=True)
    own.restart_controller()  # ended in order, it saves its jobs
    own.kill_controller()
    assert own.status()["slurmctld"] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own.plan.ports[0]))
    own.restart_controller()
    assert state_of(own, job) == "PENDING"
    own.restart_controller("-c")
    assert own.run(["squeue", "-h"]).stdout == ""


@pytest.mark.database
def test_jobs_are_in_slurms_own_books(booked_sandbox: Sandbox) -> None:
    user = next(iter(booked_sandbox.users))
    job = submit_to(booked_sandbox, "#!/bin/sh\nsrun true\nexit 3\n", user=user)
    words = ["sacct", "-n", "-P", "-j", str(job), "-o", "jobid,user,account,state,exitcode"]

    def ended() -> bool:
        lines = booked_sandbox.run(words, user=user).stdout.splitlines()
        return bool(lines) and all("FAILED" in line or "COMPLETED" in line for line in lines)

    wait_until(ended)
    lines = booked_sandbox.run(words, user=user).stdout.splitlines()
    assert lines[0] == f"{job}|{user}|physics|FAILED|3:0"
    assert f"{job}.0||physics|COMPLETED|0:0" in lines
    coordinators = ["sacctmgr", "-n", "-P", "show", "account", "withcoord", "format=account,coord"]
    assert f"physics|{user}" in booked_sandbox.run(coordinators).stdout.splitlines()


@pytest.mark.long
def test_a_cluster_goes_on_with_another_slurm(directory: str, slurm_version: str) -> None:
    if slurm_version:
        pytest.skip("begins with the installed Slurm")
    with Sandbox.up(SandboxSpec(directory=directory, nodes=1)) as own:
        need_users(own)
        user = next(iter(own.users))
        own.run(["srun", "true"], user=user)
        own.upgrade("24.11")
        # Slurm reads what three releases before it wrote, and these are further apart.
        own.restart_controller("-i")
        own.restart_service("slurmd.node1")
        wait_until(lambda: "idle" in own.run(["sinfo", "-h", "-o", "%t"]).stdout.split())
        assert "24.11" in own.run(["srun", "--version"], user=user).stdout
        held = submit_to(own, "#!/bin/sh\ntrue\n", user=user, hold=True)
        own.upgrade("26.05")
        own.restart_controller()
        own.restart_service("slurmd.node1")
        wait_until(lambda: "idle" in own.run(["sinfo", "-h", "-o", "%t"]).stdout.split())
        assert own.plan.slurm_version.startswith("26.05.")
        assert state_of(own, held) == "PENDING"
        own.run(["srun", "true"], user=user)


JOBCOMP = """
function slurm_jobcomp_log_record(job)
    local file = io.open("DIRECTORY/log/ended", "a")
    file:write("ended ", job.user_id, "\\n")
    file:close()
    return slurm.SUCCESS
end
"""


def test_a_script_runs_for_each_job_that_ends(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(
        directory=directory,
        nodes=1,
        slurm=slurm_version,
        jobcomp_lua=JOBCOMP.replace("DIRECTORY", directory),
    )
    with Sandbox.up(spec) as cluster:
        name, user = next(iter(cluster.users.items()))
        uid = user.uid
        cluster.run(["srun", "true"], user=name)
        ended = Path(f"{directory}/log/ended")
        wait_until(lambda: ended.exists() and ended.read_text() == f"ended {uid}\n")


def test_plugins_are_loaded_from_where_they_are_said_to_be(own: Sandbox, submitter: str) -> None:
    assert own.run(["srun", "true"], user=submitter).returncode == 0
    stack = Path(f"{own.directory}/etc/plugstack.conf")
    stack.write_text(f"required {own.directory}/run/none_such.so\n")
    failed = own.run(["srun", "true"], user=submitter, check=False)
    assert failed.returncode
    assert "none_such.so" in failed.stderr


def test_configuration_can_be_changed_under_way(own: Sandbox) -> None:
    own.configure("MinJobAge=17", "DebugFlags=Steps")
    own.configure("DebugFlags=NO_CONF_HASH", "Licenses=x:3")
    own.restart_controller()
    own.restart_service("slurmd.node1")
    shown = own.run(["scontrol", "show", "config"]).stdout
    assert {line.split()[-2] for line in shown.splitlines() if "MinJobAge" in line} == {"17"}
    assert Path(own.slurm_conf).read_text().count("DebugFlags") == 1
    with pytest.raises(SandboxError, match="cannot be one line"):
        own.configure("A=1\nB=2")


def test_options_reach_slurm(directory: str, slurm_version: str, submitter: str) -> None:
    spec = SandboxSpec(
        directory=directory,
        nodes=2,
        slurm=slurm_version,
        first_job_id=100,
        max_job_id=101,
        min_job_age_s=2,
        private_data="jobs",
        job_requeue=False,
        extra=("DefMemPerNode=17",),
    )
    with Sandbox.up(spec) as sandbox:
        config = sandbox.run(["scontrol", "show", "config"]).stdout
        facts = dict(line.split("=", 1) for line in config.splitlines() if "=" in line)
        shown = {key.strip(): value.strip() for key, value in facts.items()}
        assert shown["PrivateData"].startswith("jobs")
        assert shown["JobRequeue"] == "0"
        assert shown["MinJobAge"].startswith("2 ")
        assert shown["DefMemPerNode"] == "17"
        assert shown["StateSaveLocation"] == sandbox.spool
        assert len(sandbox.run(["sinfo", "-h", "-N", "-p", "main"]).stdout.splitlines()) == 2
        assert submit_to(sandbox, "#!/bin/sh\n", user=submitter) == 100


def test_held_ports_are_for_the_daemons_alone(own: Sandbox) -> None:
    for port in own.plan.ports:
        with socket.socket() as sock, pytest.raises(OSError, match="in use"):
            sock.bind(("0.0.0.0", port))


def test_settings_name_what_steward_needs(sandbox: Sandbox) -> None:
    settings = sandbox.cluster_settings()
    assert os.path.isdir(settings.spool)
    squeue = [f"{settings.slurm_bin}/squeue", "-h"]
    env = {"SLURM_CONF": settings.slurm_conf, "PATH": "/usr/bin:/bin"}
    assert sandbox.run(squeue, env=env).returncode == 0


def steward(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "steward", "sandbox", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line(directory: str, slurm_version: str, tmp_path: Path) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    script = tmp_path / "jobcomp.lua"
    script.write_text("function slurm_jobcomp_log_record(job)\nend\nreturn slurm.SUCCESS\n")
    loaded = ["--plugstack", "include {directory}/etc/more/*", "--jobcomp", str(script)]
    try:
        up = steward("up", "--dir", directory, "--nodes", "1", *loaded, *version)
        assert up.returncode == 0, up.stderr
        etc = Path(directory, "etc")
        assert (etc / "plugstack.conf").read_text() == f"include {etc}/more/*\n"
        assert (etc / "jobcomp.lua").read_text() == script.read_text()
        assert "JobCompType=jobcomp/lua" in (etc / "slurm.conf").read_text()
        assert f"in {directory}: 1 node," in up.stdout
        again = steward("up", "--dir", directory)
        assert again.returncode == 1
        assert again.stderr.startswith("steward: a sandbox is up in")
        assert again.stderr.count("\n") == 1
        assert steward("status", "--dir", directory).returncode == 0
        inside = ["run", "--dir", directory, "--"]
        assert steward(*inside, "sinfo", "-h", "-o", "%D").stdout == "1\n"
        assert steward(*inside, "sh", "-c", "exit 7").returncode == 7
        assert steward(*inside, "no-such-program").returncode == 127
        assert steward("run", "--dir", directory, "--user", "eve", "--", "id").returncode == 1
    finally:
        down = steward("down", "--dir", directory)
    assert down.returncode == 0, down.stderr
    assert processes_of(directory) == []
    assert steward("down", "--dir", directory).returncode == 0
    assert steward("status", "--dir", directory).returncode == 1


def test_in_the_foreground_it_ends_at_ctrl_c(directory: str, slurm_version: str) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    words = ["sandbox", "up", "--foreground", "--dir", directory, "--nodes", "1", *version]
    argv = [sys.executable, "-m", "steward", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert directory in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert processes_of(directory) == []
    assert not os.path.exists(directory)


def test_an_interrupted_start_leaves_nothing(directory: str, slurm_version: str) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    argv = [sys.executable, "-m", "steward", "sandbox", "up", "--dir", directory, *version]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: os.path.exists(f"{directory}/sandbox.json"))
        process.send_signal(signal.SIGINT)
        process.wait(60)
    wait_until(lambda: processes_of(directory) == [])
    assert not os.path.exists(directory)
