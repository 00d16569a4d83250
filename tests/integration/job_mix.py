"""Random jobs with requeues, suspensions, cancels and failures, on a cluster with kills."""

import random
import re
import time
from collections.abc import Callable, Generator
from typing import Any, Final

import scrontab_jobs
from bank_cluster import ACCOUNTS, SHELL, BankSite
from job_submission import PATIENCE

from steward.sandbox import SandboxError

States = dict[str, str]
"""States that squeue shows, by job or task."""

Life = Generator[None, States, None]
"""Life of a job: receives squeue's states, and changes its job when a change is due."""

PARTITIONS: Final = (
    "PartitionName=low Nodes=node5,node6 PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE",
    "PartitionName=lowest Nodes=node5,node6 PriorityTier=1 PreemptMode=CANCEL MaxTime=INFINITE",
    "PartitionName=high Nodes=node5,node6 PriorityTier=10 MaxTime=INFINITE",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    scrontab_jobs.ENABLED,
)
"""Further lines of slurm.conf that the mix needs."""

ROOM: Final[dict[str, Any]] = {"nodes": 6, "cpus": 16}
"""Nodes and CPUs of the cluster: jobs seldom wait, and preempted jobs have nodes almost alone."""

_EPOCH: Final = {"TZ": "UTC", "SLURM_TIME_FORMAT": "%s"}
_WAITS_S: Final = 60.0
_LOST_S: Final = 25.0
_LASTING_TIMES: Final = 2
_CRON_MINUTES: Final = 2
_CRON_LATE_S: Final = 8.0
_MOST_RELEASES: Final = 60
"""Releases of a job that stays held, after which an operator would cancel it."""
_ENDED: Final = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Mix:
    """Submits jobs, and changes each of them during its life.

    Args:
        site: Site of the jobs.
        chance: Random generator that decides which job and which change.

    Attributes:
        suspensions: Times at which jobs were suspended and resumed, in seconds since the epoch.
    """

    def __init__(self, site: BankSite, chance: random.Random) -> None:
        self.site = site
        self.chance = chance
        self.submitted: list[int] = []
        self.lives: list[Life] = []
        self.suspensions: dict[int, tuple[int, int]] = {}
        self._hurried: set[str] = set()
        self._releases: dict[str, int] = {}
        self._helped = time.monotonic()
        self._lasting: dict[str, int] = {}

    def begin(self, kind: Callable[["Mix"], Life]) -> None:
        """Start the life of one job; ignore jobs that cannot be submitted."""
        life = kind(self)
        try:
            next(life)
        except StopIteration:
            return
        self.lives.append(life)

    def go_on(self) -> int:
        """Poll the queue once and advance every job; return the number of unfinished ones."""
        states = self.look()
        if states is not None:
            for life in list(self.lives):
                try:
                    life.send(states)
                except StopIteration:
                    self.lives.remove(life)
        return len(self.lives)

    def go_to_the_end(self, between: Callable[[], object] = lambda: None) -> None:
        """Advance every job until no more changes are due."""
        deadline = time.monotonic() + PATIENCE * 120
        while self.go_on():
            assert time.monotonic() < deadline, self.lives
            between()
            time.sleep(0.3)  # each look is work for a machine that has enough of it

    def look(self) -> States | None:
        """Return the states of all jobs; None if slurmctld does not answer."""
        words = ["squeue", "-a", "-r", "-h", "-t", "all", "-o", "%i|%T|%r|%j"]
        found = self.site.cluster.run(words, check=False)
        if found.returncode:
            return None
        rows = [line.split("|") for line in found.stdout.splitlines()]
        for job, _, reason, name in rows:
            # Slurm starts a requeued job after two minutes. Not at once: a node rejects a job whose
            # former run it has just been told to end.
            if (
                reason == "BeginTime"
                and name not in ("never", scrontab_jobs.NAME)
                and job not in self._hurried
            ):
                update = ["scontrol", "update", f"jobid={job}", "starttime=now+4"]
                if self.site.as_root(*update):
                    self._hurried.add(job)
        return {job: state for job, state, *_ in rows}

    def finish(self) -> None:
        """Advance every job until none is pending or running."""
        self.go_to_the_end()
        over = {*_ENDED, "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
        deadline = time.monotonic() + PATIENCE * 150
        self._helped = time.monotonic()
        while (states := self.look()) is None or not set(states.values()) <= over:
            assert time.monotonic() < deadline, f"{states}\n{self._queue()}"
            self._help()
            time.sleep(0.5)

    def _queue(self) -> str:
        words = ["squeue", "-a", "-h", "-o", "%i %T %r %S %E"]
        return str(self.site.cluster.run(words, check=False).stdout)

    def _help(self) -> None:
        """Repeat changes that a killed slurmctld forgot, as an operator would."""
        words = ["squeue", "-a", "-h", "-t", "PD", "-o", "%i|%r|%j"]
        for line in self.site.cluster.run(words, check=False).stdout.splitlines():
            job, reason, name = line.split("|")
            if name == "never":
                self.site.as_root("scancel", job)
            elif "held" in reason.lower():
                self._release(job)
        if time.monotonic() - self._helped > _LOST_S:
            self._helped = time.monotonic()
            # slurmctld keeps jobs whose end it forgot until their node registers again.
            for name in self.site.cluster.get_status():
                if name.startswith("slurmd."):
                    self.site.cluster.restart_service(name)
            self._cancel_lasting()
        words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%N %t"]
        for line in self.site.cluster.run(words, check=False).stdout.splitlines():
            node, state = line.split()
            if state.startswith(("drain", "drng", "down")):
                self.site.as_root("scontrol", "update", f"nodename={node}", "state=resume")

    def _release(self, job: str) -> None:
        """Release a held job; cancel one that slurmctld keeps held without Steward's doing."""
        found = self.site.cluster.run(["scontrol", "release", job], check=False)
        answer = f"{found.stdout}{found.stderr}"
        assert "Steward" not in answer, f"job {job}: {answer}"
        self._releases[job] = self._releases.get(job, 0) + 1
        if self._releases[job] >= _MOST_RELEASES:
            words = ["scontrol", "-o", "show", "job", job]
            shown = self.site.cluster.run(words, check=False).stdout
            print(f"cancelled, because {_MOST_RELEASES} releases left it held: {answer} {shown}")
            self.site.as_root("scancel", job)

    def _cancel_lasting(self) -> None:
        """Cancel jobs that exceed the longest run time here: their nodes do not know them."""
        words = ["squeue", "-a", "-r", "-h", "-t", "R,S", "-o", "%i"]
        jobs = self.site.cluster.run(words, check=False).stdout.split()
        self._lasting = {job: self._lasting.get(job, 0) + 1 for job in jobs}
        for job, times in self._lasting.items():
            if times > _LASTING_TIMES:
                self.site.as_root("scancel", job)

    def submit(self, script: str, **options: Any) -> int:
        """Submit a job, again while slurmctld is down; return its id."""
        while True:
            try:
                job = self.site.submit(SHELL + script, **options)
            except (SandboxError, AssertionError) as error:
                if "Invalid" in str(error) or "refused" in str(error):
                    raise
                time.sleep(0.5)
                continue
            self.submitted.append(job)
            return job

    def read_suspend_time(self, job: int) -> int:
        """Return the time of a job's last suspension or resume in Slurm; 0 if unknown."""
        words = ["scontrol", "-o", "show", "job", str(job)]
        text = self.site.cluster.run(words, check=False, env=_EPOCH).stdout
        found = re.search(r" SuspendTime=(\d+)", text)
        return int(found[1]) if found else 0

    def nap(self) -> str:
        """Return a script that runs for a moment."""
        return f"sleep 0.{self.chance.randrange(10)}\n"


def _until(job: str, *wanted: str) -> Generator[None, States, bool]:
    """Wait until a job is in one of these states; return False if it cannot reach one."""
    deadline = time.monotonic() + _WAITS_S
    while True:
        state = (yield).get(job, "")
        if state in wanted:
            return True
        if state in _ENDED or time.monotonic() > deadline:
            return False


def _pause(seconds: float) -> Life:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def _insist(does: Callable[[], bool]) -> Life:
    """Run a change that a dead slurmctld may miss, until it succeeds or the job is gone."""
    deadline = time.monotonic() + _WAITS_S
    while not does() and time.monotonic() < deadline:
        yield


def plain(mix: Mix) -> Life:
    """Submit a plain job of random size."""
    cpus = mix.chance.choice((1, 1, 1, 2, 3))
    mix.submit(mix.nap(), ntasks=cpus, time=str(mix.chance.randrange(1, 30)))
    yield from ()


def failing(mix: Mix) -> Life:
    """Submit a job that fails."""
    mix.submit(f"{mix.nap()}exit {mix.chance.randrange(1, 200)}\n", time="5")
    yield from ()


def array(mix: Mix) -> Life:
    """Submit an array, sometimes with a limit of running tasks."""
    last = mix.chance.randrange(2, 6)
    mix.submit(mix.nap(), array=f"0-{last}{mix.chance.choice(('', '%2'))}", time="5")
    yield from ()


def het(mix: Mix) -> Life:
    """Submit a heterogeneous job."""
    mix.submit(f"#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\n{mix.nap()}", time="5")
    yield from ()


def requeued(mix: Mix) -> Life:
    """Submit a job that is requeued while it runs."""
    job = mix.submit("[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] || sleep 60\n", requeue=True, time="5")
    if (yield from _until(str(job), "RUNNING")):
        yield from _pause(1.5)
        mix.site.as_root("scontrol", "requeue", str(job))


def run_again(mix: Mix) -> Life:
    """Submit a job that is requeued after its end."""
    job = mix.submit(mix.nap(), requeue=True, time="5")
    if (yield from _until(str(job), "COMPLETED")):
        yield from _pause(2.5)
        mix.site.as_user("scontrol", "requeue", str(job))


def resized(mix: Mix) -> Life:
    """Submit a job that releases one of its nodes."""
    job = mix.submit("sleep 6\n", nodes=2, ntasks_per_node=2, time="5")
    if (yield from _until(str(job), "RUNNING")):
        yield from _pause(2)
        mix.site.as_user("scontrol", "update", f"jobid={job}", "numnodes=1")


def suspended(mix: Mix) -> Life:
    """Submit a job that is suspended for a time."""
    job = mix.submit("sleep 3\n", time="5")
    if (yield from _until(str(job), "RUNNING")):
        yield from _pause(1)
        mix.site.as_root("scontrol", "suspend", str(job))
        suspended_at = mix.read_suspend_time(job)
        yield from _pause(2.5)
        yield from _insist(lambda: mix.site.as_root("scontrol", "resume", str(job)))
        resumed_at = mix.read_suspend_time(job)
        if suspended_at and resumed_at > suspended_at:
            mix.suspensions[job] = suspended_at, resumed_at


def cancelled(mix: Mix) -> Life:
    """Submit a job that is cancelled while it runs."""
    job = mix.submit("sleep 60\n", time="10")
    if (yield from _until(str(job), "RUNNING")):
        yield from _pause(1.2)
        mix.site.as_user("scancel", str(job))


def whittled(mix: Mix) -> Life:
    """Submit an array whose tasks are cancelled one by one before their start, except one."""
    job = mix.submit("sleep 0.2\n", array="1-4", hold=True, time="5")
    yield
    for task in (2, 4, 1):
        mix.site.as_user("scancel", f"{job}_{task}")
        yield
    yield from _insist(lambda: mix.site.as_user("scontrol", "release", str(job)))


def updated(mix: Mix) -> Life:
    """Submit a job that is enlarged and extended while pending, and shortened while running."""
    job = mix.submit("sleep 2\n", hold=True, time="2")
    yield
    mix.site.as_root("scontrol", "update", f"jobid={job}", "timelimit=9", "numcpus=2")
    mix.site.as_user("scontrol", "update", f"jobid={job}", "comment=larger")
    yield from _insist(lambda: mix.site.as_user("scontrol", "release", str(job)))
    if (yield from _until(str(job), "RUNNING")):
        mix.site.as_user("scontrol", "update", f"jobid={job}", "timelimit=4")


def limited(mix: Mix) -> Life:
    """Submit a job that runs into its time limit."""
    mix.submit("sleep 300\n", time="1")
    yield from ()


def never(mix: Mix) -> Life:
    """Submit a job that is cancelled before it starts."""
    job = mix.submit("true\n", begin="now+1hour", time="5", job_name="never")
    yield
    yield from _insist(lambda: mix.site.as_user("scancel", str(job)))


def preempted(mix: Mix) -> Life:
    """Submit a job that is preempted by a job of a higher partition."""
    low = mix.submit(
        "[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] || sleep 60\n",
        partition=mix.chance.choice(("low", "lowest")),
        nodes=2,
        exclusive=True,
        time="5",
    )
    if (yield from _until(str(low), "RUNNING")):
        yield from _pause(1.2)
        mix.submit("sleep 1\n", partition="high", nodes=2, exclusive=True, time="5")
        yield from _pause(20)
    # One that waited for the others for too long is not to hold up all behind it.
    mix.site.as_user("scancel", str(low))


def let_through(mix: Mix) -> Life:
    """Submit a job while gate.off lets the plugin admit every job."""
    off = mix.site.run_dir / "gate.off"
    off.touch()
    try:
        mix.submit(mix.nap(), ntasks=2, time="5")
    finally:
        off.unlink()
    yield from ()


def scrontab(mix: Mix) -> Life:
    """Run scrontab jobs each minute, until no other job runs, and at least two."""
    site = mix.site
    mix.submitted += scrontab_jobs.each_minute(
        site.cluster, site.user, "sleep 0.5", account=ACCOUNTS[0], count=3
    )
    begun = time.time()
    while len(mix.lives) > 1 or time.time() // 60 - begun // 60 < _CRON_MINUTES:
        yield
    yield from _pause(_CRON_LATE_S)
    yield from _insist(lambda: scrontab_jobs.never_again(site.cluster, site.user))


def node_failed(mix: Mix) -> Life:
    """Submit a job that loses its node, which returns only after Slurm has noticed."""
    node = "node4"
    job = mix.submit("sleep 60\n", nodelist=node, no_requeue=True, time="10")
    if (yield from _until(str(job), "RUNNING")):
        yield from _pause(1.2)
        down = ["scontrol", "update", f"nodename={node}", "state=down", "reason=lost"]
        mix.site.as_root(*down)
        yield from _pause(2)
        up = ["scontrol", "update", f"nodename={node}", "state=resume"]
        yield from _insist(lambda: mix.site.as_root(*up))


COMMON: Final = (plain, plain, plain, plain, failing, array, array, het, never, whittled, cancelled)
"""Jobs that cost the host little."""

RARE: Final = (
    *(requeued, run_again, resized, suspended, updated, let_through, limited, preempted),
    node_failed,
)
"""Jobs with many changes."""
