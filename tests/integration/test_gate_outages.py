"""Outages of the gate: absent, hanging, broken replies, kills, lost files; and of the ledger."""

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from bank_cluster import ACCOUNTS, SHELL, BankSite, bank_site
from bank_storms import Storm
from job_submission import wait_until
from spool_daemon import chance_of

from servers.gate import AskedGate, hangs
from servers.postgresql import PostgreSQL
from steward.bank.gate.plugin_conf import QUIET_S
from steward.bank.money import MICRO
from steward.bank.settings import BankPartitionSettings, GateSettings

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

PHYSICS, RICH = ACCOUNTS[:2]
PLENTY = 1_000_000 * MICRO
LASTING = f"{SHELL}sleep 1000\n"
"""Script of jobs that end in no test: an ended job has no SU hold."""
AS_SHIPPED = {"timeout_ms": GateSettings().timeout_ms}
RUBBISH = (
    b"",
    b"\n",
    b"}{\n",
    b"\x00\xff\xfe" * 50 + b"\n",
    b'{"v":99,"ok":false}\n',
    b'{"v":1,"ok":"perhaps"}\n',
    b'{"v":1,' + b" " * 200_000,
    b"HTTP/1.1 200 OK\r\n\r\n",
)


def _rave(says: bytes, _question: object, _sock: object) -> bytes:
    return says


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BankSite]:
    bank = {"partition": {"debug": BankPartitionSettings(policy="deny")}}
    with bank_site(slurm_version, bank=bank, gate=AS_SHIPPED, min_job_age_s=600) as site:
        site.open({PHYSICS: PLENTY})
        site.start()
        yield site


@pytest.fixture
def running(site: BankSite) -> BankSite:
    """Return a running daemon with an empty queue, whatever the previous test left."""
    site.as_root("scancel", "--user", site.user)
    site.until_idle()
    if not site.processes("gate"):
        site.daemon.close()
        site.start()
    site.until_gate()
    # The plugin may still be in the quiet that followed a time-out in the test before.
    wait_until(lambda: is_asked(site), 60)
    return site


def is_asked(site: BankSite) -> bool:
    """Return whether slurmctld asks the gate: an admitted job then has a token."""
    job = waits(site)
    has_token = is_asked_for(site, job)
    site.as_root("scancel", str(job))
    return has_token


def is_asked_for(site: BankSite, job: int) -> bool:
    """Return whether the gate admitted a job, as its token shows, not the outage policy."""
    return "steward=1." in site.cluster.run(["scontrol", "show", "job", str(job)]).stdout


def held(site: BankSite) -> dict[int, int]:
    """Return the SU holds by job."""
    return {hold.job_id: hold.remaining for hold in site.holds()}


def held_of(site: BankSite, jobs: set[int]) -> dict[str, int]:
    """Return the SU holds of these jobs by hold id."""
    return {hold.id: hold.remaining for hold in site.holds() if hold.job_id in jobs}


def waits(site: BankSite) -> int:
    """Submit a job that stays in the queue with an SU hold; return its id."""
    return site.submit(LASTING, time="20")


def set_policy(site: BankSite, policy: str) -> None:
    """Set the outage policy in the plugin's file, which it reads for each request."""
    path = Path(site.settings.gate_conf)
    text = re.sub(r"(?m)^policy .*$", f"policy {policy}", path.read_text())
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.mark.matrix
def test_with_the_daemon_dead_it_is_the_policy_that_decides(running: BankSite) -> None:
    running.kill_daemon()
    try:
        first = waits(running)
        set_policy(running, "deny")
        denied = running.tries(f"{SHELL}true\n")
        assert denied.returncode != 0
        off = Path(running.settings.gate_off)
        off.touch()
        second = waits(running)
        off.unlink()
    finally:
        running.start()
    # Jobs that the outage policy admitted get a hold from the queue.
    wait_until(lambda: {first, second} <= set(held(running)), 60)


@pytest.mark.matrix
def test_without_a_gate_jobs_of_a_partition_that_only_observes_are_let_in(
    running: BankSite,
) -> None:
    conf = Path(running.settings.gate_conf)

    def submits() -> bool:
        return running.tries(f"{SHELL}true\n", "-p", "debug", "-t", "1").returncode == 0

    assert {"default_partition main", "partition debug deny"} <= set(conf.read_text().splitlines())
    running.kill_daemon()
    try:
        assert not submits()
    finally:
        running.start()
    running.bank("mode", "observe", "--cluster", running.name, "--partition", "debug")
    try:
        wait_until(lambda: "partition debug observe" in conf.read_text().splitlines())
        running.kill_daemon()
        assert submits()
    finally:
        running.start()
        running.bank("mode", "default", "--cluster", running.name, "--partition", "debug")


@pytest.mark.matrix
def test_one_that_hangs_is_asked_once(running: BankSite) -> None:
    running.kill_daemon()
    path = Path(running.settings.gate_socket)
    path.unlink(missing_ok=True)
    begun = time.monotonic()
    with AskedGate(path, hangs) as silent:
        jobs = [waits(running) for _ in range(6)]
        # After a few slow requests the gate may be asked again.
        most = 2 + (time.monotonic() - begun) // QUIET_S
        assert 1 <= silent.connections <= most, "it was asked although it had not answered"
        found = running.storm(32, LASTING, "--time=20", at_once=32)
        assert len(found) == 32
        assert running.cluster.run(["scontrol", "ping"]).returncode == 0
    running.start()
    wait_until(lambda: {*jobs, *found} <= set(held(running)), 90)


@pytest.mark.matrix
def test_rubbish_is_no_answer(running: BankSite) -> None:
    running.kill_daemon()
    try:
        path = Path(running.settings.gate_socket)
        path.unlink(missing_ok=True)
        with AskedGate(path) as raving:
            for says in RUBBISH:
                raving.answers = partial(_rave, says)
                assert running.tries(f"{SHELL}true\n").returncode == 0, says
        assert running.cluster.run(["scontrol", "ping"]).returncode == 0
    finally:
        running.start()


@pytest.mark.matrix
def test_a_gate_that_is_killed_has_its_holds_again(running: BankSite) -> None:
    chance = chance_of("STEWARD_GATE_SEED")
    stop = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        # The first at once: some hosts take 64 jobs in less time than lies between two.
        pause_s = 0.0
        while not stop.wait(pause_s):
            for pid in running.processes("gate"):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            pause_s = chance.uniform(0.05, 1.5)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        jobs = running.storm(64, LASTING, "--time=20", at_once=16)
    finally:
        stop.set()
        killer.join(20)
    assert len(jobs) == 64
    assert killed
    running.until_gate()
    wait_until(lambda: set(jobs) <= set(held(running)), 90)
    amounts = {hold.amount for hold in running.holds() if hold.job_id in jobs}
    assert len(amounts) == 1
    assert sum(1 for hold in running.holds() if hold.job_id in jobs) == 64


@pytest.mark.matrix
def test_without_its_file_it_has_them_from_the_tokens(running: BankSite) -> None:
    jobs: set[int] = set()

    def are_eight() -> bool:
        # On a busy host the policy lets one in now and then, and those behind it: they have none.
        job = waits(running)
        if is_asked_for(running, job):
            jobs.add(job)
        return len(jobs) == 8

    wait_until(are_eight)
    wait_until(lambda: jobs <= set(held(running)))
    before = held_of(running, jobs)
    assert len(before) == len(jobs), f"a job has a second hold: {before}"
    running.kill_daemon()
    state = Path(running.settings.state_dir)
    files = list(state.glob("gate.db*"))
    assert files
    for path in files:
        path.unlink()
    running.start()
    # Ended jobs show their tokens, too: their holds expire.
    try:
        wait_until(lambda: held_of(running, jobs) == before, 60)
    finally:
        print(f"before: {before}\nnow: {held_of(running, jobs)}")


@pytest.mark.matrix
def test_a_daemon_that_stands_still_stalls_nobody(running: BankSite) -> None:
    pids = running.processes("gate")
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        jobs = running.storm(32, LASTING, "--time=20", at_once=32)
        assert len(jobs) == 32
        assert running.cluster.run(["squeue", "-h"], timeout_s=20).stdout
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: set(jobs) <= set(held(running)), 90)


@pytest.mark.database
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_ledger_is_away_while_64_submit(slurm_version: str, postgresql: PostgreSQL) -> None:
    with bank_site(
        slurm_version,
        bank={"database": postgresql.url(postgresql.new_database())},
    ) as site:
        site.open({PHYSICS: 0, RICH: PLENTY})
        site.start()
        storm = Storm(site, 40)
        postgresql.kill()
        try:
            admitted = storm.submit(128)
        finally:
            postgresql.start()
        assert len(admitted) == 40
        storm.end(set(admitted))


@pytest.mark.matrix
@pytest.mark.wide
@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_one_users_worst_texts_make_nobody_elses_job_late(running: BankSite, policy: str) -> None:
    site = running
    conf = Path(site.settings.gate_conf)
    shipped = conf.read_text()
    # A busy host is slow, too: with a second, only a long computation of the gate is too late.
    conf.write_text(re.sub(r"(?m)^timeout_ms .*$", "timeout_ms 1000", shipped))
    set_policy(site, policy)
    other = list(site.cluster.users)[1]
    array = ",".join(["1"] * 2000)  # Slurm takes 4096 bytes
    partitions = ",".join(["main"] * 200)
    one = f"sbatch -H -o /dev/null --account={PHYSICS} --array={array} -p {partitions} -t 5"
    stop = site.run_dir / "stop"
    # More tasks than anybody can pay, in a longer text than Slurm takes.
    endless = f"sbatch --account={PHYSICS} -N2 --exclusive -t 20:00:00 --wrap x"
    endless += " --array=" + ",".join(map(str, range(0, 30_000, 2)))
    loop = f"while [ ! -e {stop} ]; do {one} --wrap x; {endless}; done"
    late = sum("does not answer" in line for line in slurmctld_log(site))
    allowed = site.link.get_status().tally.admitted

    def submit_again_and_again() -> None:
        site.cluster.run(["sh", "-c", loop], user=site.user, check=False, timeout_s=300)

    try:
        with ThreadPoolExecutor(8) as loops:
            for _ in range(8):
                loops.submit(submit_again_and_again)
            try:
                jobs = [
                    site.submit(f"{SHELL}true\n", user=other, time="5", hold=True)
                    for _ in range(20)
                ]
            finally:
                stop.touch()
        assert all(is_asked_for(site, job) for job in jobs)
        assert sum("does not answer" in line for line in slurmctld_log(site)) == late
        tally = site.link.get_status().tally
        print(f"{tally.admitted - allowed} let in; slowest answer {tally.slowest_us / 1e3:.1f} ms")
        assert tally.admitted - allowed > 20, "the loops' jobs are let in"
    finally:
        stop.unlink(missing_ok=True)
        conf.write_text(shipped)
        site.as_root("scancel", "--user", other)
        site.as_root("scancel", "--user", site.user)


def slurmctld_log(site: BankSite) -> list[str]:
    """Return slurmctld's log."""
    path = Path(site.cluster.directory) / "log" / "slurmctld.log"
    return path.read_text(errors="replace").splitlines()
