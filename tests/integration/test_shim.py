"""SPANK plugin in real slurmstepds: its reports equal the tasks' own measurements."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from job_submission import PATIENCE, state_of, submit_to, wait_until

from steward.admin.plugins.build import PluginBuild, SlurmVersion, build_plugins, find_build
from steward.admin.plugins.installation import install_shim
from steward.admin.plugins.spank import check_shim
from steward.sandbox import Sandbox, SandboxSpec

TASK_USAGE_SOURCE = Path(__file__).parents[1] / "native" / "task_usage.c"
PAGE = os.sysconf("SC_PAGE_SIZE")
WITHIN_US = 1000
KILLED_FOR_MEMORY = 1
"""Exit code of srun."""
USER = "ada"

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    # Above what a test waits for at most.
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not shutil.which("cc") or not Path("/usr/include/slurm/spank.h").exists(),
        reason="needs a C compiler and Slurm's headers",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root"),
]

P = ParamSpec("P")
Line = dict[str, Any]


class OtherFigures(AssertionError):
    """Error: the plugin reported more than a task measured."""


def in_three_tries(test: Callable[P, None]) -> Callable[P, None]:
    """Repeat a test with differing measurements, up to two times.

    Between its last measurement and its end a task uses next to nothing, but the kernel charges it
    for time that the host takes from the processor meanwhile. A wrong report is wrong each time.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(2):
            with contextlib.suppress(OtherFigures):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return run


class ShimSite:
    """Cluster whose nodes have the plugin, installed as on a real one."""

    def __init__(self, cluster: Sandbox) -> None:
        self.cluster = cluster
        self.etc = f"{cluster.directory}/etc"
        self.spool = f"{cluster.directory}/shim"
        self.used = f"{self.etc}/used"
        self.said = f"{cluster.users[USER].home}/used"
        self.plugstack = f"{self.etc}/plugstack.conf"
        self.begins_us = 0
        words = ["cc", "-O1", "-static", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*words, "-o", self.used, str(TASK_USAGE_SOURCE)], check=True, timeout=100)

    def install(self, *, prolog: bool = True) -> PluginBuild:
        """Build and install by the documented steps."""
        libdir = f"{self.cluster.directory}/lib"
        built = build_plugins(f"{self.cluster.plan.root}/usr/include", libdir)
        done = install_shim(
            built, libdir=libdir, plugstack=self.plugstack, spool=self.spool, with_prolog=prolog
        )
        assert all(sentence.startswith("restart slurmd") for sentence in done.remaining)
        self.restart_nodes()
        return built

    def restart_nodes(self) -> None:
        """Make slurmds load the plugin; return when each has run a job, whose lines are dropped."""
        nodes = [name for name in self.cluster.get_status() if name.startswith("slurmd.")]
        for name in nodes:
            self.cluster.restart_service(name)

        def run_everywhere() -> bool:
            words = ["srun", "-Q", f"-N{len(nodes)}", "true"]
            return self.cluster.run(words, user=USER, check=False).returncode == 0

        wait_until(run_everywhere, 60)
        last = max(line["j"] for line in self.lines())
        wait_until(lambda: len(self.lines(k="epilog", j=last)) == len(nodes))
        self.begins_us = max(line["t"] for line in self.lines()) + 1

    def command(self, cpu_ms: int = 0, mib: int = 0, how: str = "0") -> list[str]:
        """Return the words of a program that uses this much."""
        return [self.used, self.said, str(cpu_ms), str(mib), how]

    def script(self, *commands: list[str]) -> str:
        """Return a batch script of programs; the last is the batch task itself."""
        *first, last = [" ".join(words) for words in commands]
        return "\n".join(["#!/bin/sh", *first, f"exec {last}", ""])

    def submit(self, script: str, **options: Any) -> int:
        return submit_to(self.cluster, script, user=USER, output="/dev/null", **options)

    def srun(self, *words: str, code: int = 0, timeout_s: float = 60) -> None:
        limit_s = PATIENCE * timeout_s
        result = self.cluster.run(["srun", *words], user=USER, check=False, timeout_s=limit_s)
        assert result.returncode == code, result.stderr

    def lines(self, **wanted: Any) -> list[Line]:
        """Return lines of all nodes with these members, in the order of their times."""
        found = []
        for path in Path(self.spool).glob("*.log"):
            for text in path.read_bytes().splitlines():
                line: Line = json.loads(text)
                assert line["n"] == path.stem
                if line["t"] >= self.begins_us and line.items() >= wanted.items():
                    found.append(line)
        return sorted(found, key=lambda line: line["t"])

    def ends(self, number: int, timeout_s: float = 60, **wanted: Any) -> list[Line]:
        """Wait for this many lines of ends of steps."""
        wait_until(lambda: len(self.lines(k="end", **wanted)) >= number, timeout_s)
        return self.lines(k="end", **wanted)

    def own_words(self) -> dict[int, list[int]]:
        """Return user and system time in µs and peak bytes that each process measured."""
        files = Path(self.said).parent.glob("used.*")
        rows = [path.read_bytes().split(b"\n")[0].split() for path in files]
        return {int(row[3]): [int(word) for word in row[4:]] for row in rows if len(row) == 7}

    def compare(self, tasks: list[Line], *, alone: bool = True) -> None:
        """Compare the reports of tasks with their own measurements."""
        own = self.own_words()
        for task in tasks:
            user, system, peak = own[task["pid"]]
            if max(abs(task["ut"] - user), abs(task["sy"] - system)) > WITHIN_US:
                raise OtherFigures(f"{task} told for {own[task['pid']]}")
            if alone:
                assert abs(task["rss"] - peak) <= PAGE, (task, own[task["pid"]])


def prepared(slurm_version: str, **options: Any) -> SandboxSpec:
    stack = ("include {directory}/etc/plugstack.conf.d/*.conf",)
    return SandboxSpec(**{"slurm": slurm_version, "nodes": 3, "plugstack": stack, **options})


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[ShimSite]:
    with Sandbox.up(prepared(slurm_version), report=print) as cluster:
        site = ShimSite(cluster)
        site.install()
        yield site


def test_it_is_built_for_this_slurm_and_found_good(site: ShimSite) -> None:
    version = SlurmVersion.parse(site.cluster.plan.slurm_version.split("-")[0])
    libdir = f"{site.cluster.directory}/lib"
    built = find_build(libdir, version)
    assert built
    assert built.version.is_loadable_by(version)
    assert check_shim(version, libdir=libdir, plugstack=site.plugstack) == []


@pytest.mark.parametrize(
    ("cpu_ms", "mib", "how", "status"),
    [(50, 5, "0", 0), (100, 525, "3", 3 << 8), (1000, 60, "255", 255 << 8), (200, 0, "-10", 10)],
)
@in_three_tries
def test_a_task_of_its_own(site: ShimSite, cpu_ms: int, mib: int, how: str, status: int) -> None:
    code = status >> 8 if status > 127 else 128 + status
    before = len(site.lines(k="end", s="0"))
    site.srun("-n1", *site.command(cpu_ms, mib, how), code=code if status else 0)
    end = site.ends(before + 1, s="0")[-1]
    (start,) = site.lines(k="start", l=end["l"])
    (task,) = site.lines(k="task", l=end["l"])
    assert start.items() >= {"u": 70001, "g": 70001, "tasks": 1, "cpus": 1, "name": "used"}.items()
    assert task["st"] == status
    assert task["ut"] + task["sy"] >= cpu_ms * 1000
    assert task["rss"] >= mib << 20
    assert end["rss"] == task["rss"]
    site.compare([task])


@in_three_tries
def test_a_batch_script(site: ShimSite) -> None:
    job = site.submit(site.script(["srun", *site.command(60, 30, "4")], site.command(150, 20, "7")))
    site.ends(2, j=job)
    step, batch = site.lines(k="task", j=job)
    assert (step["s"], step["st"], batch["s"], batch["st"]) == ("0", 4 << 8, "batch", 7 << 8)
    site.compare([step])
    own = site.own_words()[batch["pid"]]
    # srun is the script's child, and is booked to it.
    assert batch["ut"] >= own[0] - WITHIN_US
    assert "name" not in site.lines(k="start", j=job, s="batch")[0]


def test_prolog_and_epilog_of_each_node(site: ShimSite) -> None:
    job = site.submit(site.script(["srun", *site.command()], site.command()), nodes=3)
    wait_until(lambda: len(site.lines(k="epilog", j=job)) == 3, 60)
    assert {line["n"] for line in site.lines(k="prolog", j=job)} == {"node1", "node2", "node3"}
    owners = {(line["u"], line["g"]) for line in site.lines(j=job) if "log" in line["k"]}
    assert owners == {(70001, 70001)}


@in_three_tries
def test_an_array(site: ShimSite) -> None:
    job = site.submit(site.script(site.command(120, 10)), array="3,5,9-11")
    wait_until(lambda: len(site.lines(k="start", aj=job)) == 5, 60)
    starts = site.lines(k="start", aj=job, s="batch")
    assert {line["at"] for line in starts} == {"3", "5", "9", "10", "11"}
    for start in starts:
        site.ends(1, j=start["j"])
        site.compare(site.lines(k="task", l=start["l"]))


@in_three_tries
def test_a_step_on_several_nodes(site: ShimSite) -> None:
    before = {line["l"] for line in site.lines(k="end")}
    site.srun("-N3", "-n6", *site.command(200, 30))
    ends = [line for line in site.ends(3 + len(before)) if line["l"] not in before]
    launches = {line["l"] for line in ends}
    tasks = [line for line in site.lines(k="task") if line["l"] in launches]
    assert sorted(line["id"] for line in tasks) == list(range(6))
    assert {line["n"] for line in tasks} == {"node1", "node2", "node3"}
    site.compare(tasks, alone=False)
    own = site.own_words()
    for end in ends:
        peaks = [own[task["pid"]][2] for task in tasks if task["n"] == end["n"]]
        assert end["tasks"] == len(peaks)
        assert abs(end["rss"] - max(peaks)) <= PAGE


@in_three_tries
def test_components_of_one_step(site: ShimSite, slurm_version: str) -> None:
    site.srun("-n1", *site.command(50, 0, "0"), ":", "-n1", *site.command(50, 0, "0"))
    tasks = site.lines(k="task")[-2:]
    site.compare(tasks)


@in_three_tries
def test_a_suspended_job(site: ShimSite) -> None:
    # The task computes itself until then: a child's time would count as its own.
    go = Path(site.said).with_name("go-on")
    go.unlink(missing_ok=True)
    command = " ".join(site.command(300, 10))
    job = site.submit(f"#!/bin/sh\nuntil [ -e {go} ]; do :; done\nexec {command}\n")
    wait_until(lambda: bool(site.lines(k="smgr", j=job)))
    site.cluster.run(["scontrol", "suspend", str(job)])
    wait_until(lambda: state_of(site.cluster, job) == "SUSPENDED")
    site.cluster.run(["scontrol", "resume", str(job)])
    go.touch()
    (end,) = site.ends(1, j=job, s="batch")
    (task,) = site.lines(k="task", l=end["l"])
    assert task["st"] == 0
    site.compare([task])


def requeue(site: ShimSite, job: int) -> None:
    """Requeue a job, and start it without Slurm's delay of two minutes."""
    launches = len(site.lines(k="start", j=job, s="batch"))
    site.cluster.run(["scontrol", "requeue", str(job)])

    def is_started() -> bool:
        return len(site.lines(k="start", j=job, s="batch")) > launches

    def started() -> bool:
        # A node rejects a job in the second in which it ended the former run.
        later = ["scontrol", "update", f"jobid={job}", "StartTime=now+3"]
        site.cluster.run(later, check=False)
        # Again and again at once would keep Slurm from looking at its queue.
        with contextlib.suppress(AssertionError):
            wait_until(is_started, 5)
        return is_started()

    wait_until(lambda: state_of(site.cluster, job) == "PENDING")
    wait_until(started, 60)


@in_three_tries
def test_a_requeued_job(site: ShimSite) -> None:
    script = (
        '#!/bin/sh\n[ -n "$SLURM_RESTART_COUNT" ] && how=0 || how=term\n'
        f"exec {site.used} {site.said} 100 20 $how\n"
    )
    job = site.submit(script, requeue=True, open_mode="append")
    # It is made by the program once it is ready for SIGTERM.
    wait_until(lambda: bool(list(Path(site.said).parent.glob(f"used.{job}.*"))), 60)
    requeue(site, job)
    site.ends(2, j=job, s="batch")
    # A run that begins before the last one's slurmstepd is gone fails.
    wait_until(lambda: len(site.lines(k="epilog", j=job)) == 2)
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED")
    requeue(site, job)
    ends = site.ends(3, j=job, s="batch")
    assert len({line["l"] for line in ends}) == 3
    tasks = site.lines(k="task", j=job, s="batch")
    assert [line["st"] for line in tasks] == [15, 0, 0]
    site.compare(tasks)
    # Slurm assigns a step to no run, or to the right one; never to a wrong one.
    for number, start in enumerate(site.lines(k="start", j=job, s="batch")):
        assert start.get("r", number) == number


@in_three_tries
def test_a_resized_job(site: ShimSite) -> None:
    step = " ".join(site.command(100, 10))
    script = (
        f"#!/bin/sh\nsrun -N2 -n2 {step}\nscontrol update JobId=$SLURM_JOB_ID NumNodes=1\n"
        f". ./slurm_job_${{SLURM_JOB_ID}}_resize.sh\nsrun -N1 -n1 {step}\n"
    )
    job = site.submit(script, nodes=2)
    site.ends(1, j=job, s="batch")
    assert len(site.ends(2, j=job, s="0")) == 2
    assert len(site.ends(1, j=job, s="1")) == 1
    site.compare([*site.lines(k="task", j=job, s="0"), *site.lines(k="task", j=job, s="1")])


def test_no_command_prints_a_line_of_ours(site: ShimSite) -> None:
    for words in (
        ["srun", "-n1", "true"],
        ["sbatch", "--wrap", "true", "-o", "/dev/null"],
        ["salloc", "-n1", "-Q", "srun", "-Q", "true"],
    ):
        result = site.cluster.run(words, user=USER)
        said = (result.stdout + result.stderr).lower()
        assert "spank" not in said
        assert "steward" not in said.replace(site.cluster.directory, "")


def test_a_spool_that_is_away_costs_lines_and_no_job(site: ShimSite) -> None:
    away = f"{site.spool}.away"
    go = Path(site.said).with_name("go")
    job = site.submit(f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.1; done\n")
    wait_until(lambda: bool(site.lines(k="start", j=job, s="batch")))
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    os.rename(site.spool, away)
    try:
        site.srun("-n1", "true")
    finally:
        os.rename(away, site.spool)
    go.touch()
    assert site.ends(1, j=job, s="batch")[0]["tasks"] == 1
    wait_until(lambda: state_of(site.cluster, job) == "COMPLETED")


@in_three_tries
def test_what_epilogs_use_is_no_tasks(slurm_version: str) -> None:
    burn = "i=0\nwhile [ $i -lt 300000 ]; do i=$((i+1)); done\n"
    with Sandbox.up(prepared(slurm_version, nodes=1), report=print) as cluster:
        site = ShimSite(cluster)
        for name in ("everybodys", "users"):
            epilog = Path(f"{site.etc}/{name}")
            epilog.write_text(f"#!/bin/sh\n{burn}echo {name} >> {site.said}.epilogs\n")
            epilog.chmod(0o755)
        cluster.configure(f"TaskEpilog={site.etc}/everybodys")
        cluster.restart_controller()
        site.install()
        # Two at once: one may end, and be reported, while the other's epilog runs.
        site.srun("-n2", "-O", f"--task-epilog={site.etc}/users", *site.command(100, 30))
        site.ends(1, s="0")
        tasks = site.lines(k="task", s="0")
        # Those of the job that the installation was tried with are among them.
        said = Path(f"{site.said}.epilogs").read_text().split()
        assert (said.count("users"), said.count("everybodys") >= 2) == (2, True)
        assert len(tasks) == 2
        site.compare(tasks, alone=False)
        assert not any("ep" in task for task in tasks)
        assert abs(tasks[0]["rss"] - site.own_words()[tasks[0]["pid"]][2]) <= PAGE


def test_hooks_that_are_run_inside_a_jobs_namespace(slurm_version: str) -> None:
    if not slurm_version:
        pytest.skip("Slurm 22.05 does not contain SPANK")
    plugin = {
        "24.11": "JobContainerType=job_container/tmpfs",
        "26.05": "NamespaceType=namespace/tmpfs",
    }[slurm_version]
    with Sandbox.up(prepared(slurm_version, nodes=1), report=print) as cluster:
        site = ShimSite(cluster)
        base = f"{cluster.directory}/jc/%n"
        os.makedirs(f"{cluster.directory}/jc/node1")
        Path(f"{site.etc}/job_container.conf").write_text(
            f"AutoBasePath=true\nBasePath={base}\nDirs={cluster.directory}/nothing\n"
        )
        Path(f"{cluster.directory}/nothing").mkdir()
        # The plugin wants / to be a mount point.
        cluster.run(["mount", "--rbind", cluster.plan.root, cluster.plan.root])
        cluster.configure(
            *(plugin, "PrologFlags=contain", "SlurmdParameters=config_overrides,contain_spank")
        )
        cluster.restart_controller()
        site.install()
        words = ["srun", "-n1", *site.command(500, 100)]
        # Slurm 24.11 fails now and then to make the namespace, where / is a bind mount.
        wait_until(lambda: cluster.run(words, user=USER, check=False).returncode == 0, 60)
        (end,) = site.ends(1, s="0")
        (task,) = site.lines(k="task", s="0")
        user, system, peak = site.own_words()[task["pid"]]
        # In clock ticks, and with what the hooks themselves used.
        tick_us = 1_000_000 // os.sysconf("SC_CLK_TCK")
        assert abs(task["ut"] + task["sy"] - user - system) <= 4 * tick_us
        assert "rss" not in task
        assert abs(end["rss"] - peak) <= PAGE


def test_a_step_that_is_killed_for_its_memory(slurm_version: str) -> None:
    if not os.path.isdir("/sys/fs/cgroup/memory"):
        pytest.skip("needs cgroups of version 1")
    with Sandbox.up(prepared(slurm_version, nodes=1), report=print) as cluster:
        site = ShimSite(cluster)
        Path(f"{site.etc}/cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
        )
        cluster.configure(
            *("ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup"),
            *("JobAcctGatherType=jobacct_gather/cgroup", "SelectTypeParameters=CR_CPU_Memory"),
        )
        cluster.restart_controller()
        site.install()
        limit = 50 << 20
        site.srun("-n1", "--mem=50", *site.command(0, 200), code=KILLED_FOR_MEMORY)
        (end,) = site.ends(1, s="0")
        (start,) = site.lines(k="start", s="0")
        (task,) = site.lines(k="task", s="0")
        assert start["mem"] == limit
        assert task["st"] & 0x7F == 9
        assert limit * 0.9 <= end["rss"] <= limit * 1.1
        assert limit * 0.9 <= end["peak"] <= limit * 1.1
        # Processes that outlive their task still count for the step.
        daemon, over = " ".join(site.command(600)), f"{site.said}-over"
        site.srun(
            *("-n1", "--mem=100", "sh", "-c"),
            f"(setsid sh -c '{daemon}; touch {over}' &); until [ -e {over} ]; do sleep 0.2; done",
        )
        end = site.ends(2, s="0")[-1]
        (task,) = site.lines(k="task", l=end["l"])
        assert end["cut"] + end["csy"] - task["ut"] - task["sy"] > 500_000


@pytest.mark.long
@pytest.mark.parametrize(("cpu_ms", "mib"), [(10_000, 300), (40_000, 100)])
@in_three_tries
def test_a_long_task(site: ShimSite, cpu_ms: int, mib: int) -> None:
    before = len(site.lines(k="end", s="0"))
    site.srun("-n1", *site.command(cpu_ms, mib), timeout_s=250)
    end = site.ends(before + 1, s="0")[-1]
    site.compare(site.lines(k="task", l=end["l"]))


@pytest.mark.long
@in_three_tries
def test_a_job_that_is_stopped_at_its_time_limit(site: ShimSite) -> None:
    job = site.submit(site.script(site.command(0, 40, "term")), time="1")
    (end,) = site.ends(1, j=job, s="batch", timeout_s=200)
    (task,) = site.lines(k="task", l=end["l"])
    assert task["st"] == 15
    wait_until(lambda: state_of(site.cluster, job) == "TIMEOUT")
    site.compare([task])
