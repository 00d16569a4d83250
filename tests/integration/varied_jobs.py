"""A hundred jobs, as different from one another as a small cluster allows."""

import time
from pathlib import Path
from typing import Any

from accounting_cluster import BookedSite
from job_submission import state_of, wait_until

SHELL = "#!/bin/sh\n"


def submit_all(site: BookedSite) -> int:
    """Submit the jobs, change some of them, and wait for the last; return their number."""
    # It runs into its time limit of a minute while all others come and go.
    limited = site.submit(f"{SHELL}srun sleep 300\n", time="1", job_name="limited")
    count = 1
    for group in (_plain, _odd, _arrays, _steps, _het, _waiting, _disturbed, _asking):
        count += group(site)
        # So that none is pending for long: the test compares records, not queues.
        wait_until(lambda: _is_idle(site, limited), 300)
    wait_until(lambda: state_of(site.cluster, limited) in ("TIMEOUT", ""), 180)
    site.until_idle(300)
    return count


def _is_idle(site: BookedSite, but: int) -> bool:
    """Return whether no job but one is pending or running."""
    words = ["squeue", "-h", "-t", "PD,R,S,CG,CF", "-o", "%A"]
    return {*site.cluster.run(words, check=False).stdout.split()} <= {str(but)}


def _plain(site: BookedSite) -> int:
    for code in (0, 1, 2, 3, 42, 126, 127, 137, 255):
        site.submit(f"{SHELL}exit {code}\n", job_name=f"code{code}")
    for signal in (1, 2, 6, 9, 11, 15):
        site.submit(f"{SHELL}kill -{signal} $$\nsleep 1\n", job_name=f"signal{signal}")
    for cpus in (1, 2, 4):
        site.submit(f"{SHELL}true\n", cpus_per_task=cpus, account="chemistry")
    for nodes in (2, 3):
        site.submit(f"{SHELL}srun true\n", nodes=nodes, partition="debug")
    site.submit(f"{SHELL}true\n", time="5", comment="a comment", qos="normal")
    site.submit(f"{SHELL}true\n", time="1-02:03:04", mem="100M")
    site.submit(f"{SHELL}true\n", mem_per_cpu="50M", ntasks=3)
    return 23


def _odd(site: BookedSite) -> int:
    names = ["a b", "ünï", "x" * 200, "semi;colon", "star*", "'quote", '"double"', "back\\slash"]
    names += ["batch", "%j", "$HOME", "-dash", "tab\there", "comma,name", "1", "extern"]
    for name in names:
        site.submit(f"{SHELL}true\n", job_name=name, comment=f"of {name}")
    site.submit(f"{SHELL}true\n", user="bela", chdir="/tmp", job_name="belas")
    return len(names) + 1


def _arrays(site: BookedSite) -> int:
    site.submit(f"{SHELL}exit $SLURM_ARRAY_TASK_ID\n", array="0-4")
    site.submit(f"{SHELL}sleep 0.2\n", array="1-9:3%2")
    held = site.submit(f"{SHELL}true\n", array="1-3", hold=True)
    _as_user(site, "scancel", f"{held}_2")
    _as_user(site, "scontrol", "release", str(held))
    gone = site.submit(f"{SHELL}true\n", array="1-5%1", hold=True)
    _as_user(site, "scancel", str(gone))
    return 5 + 3 + 3 + 5


def _steps(site: BookedSite) -> int:
    site.submit(f"{SHELL}srun true\nsrun false\nsrun sh -c 'exit 7'\ntrue\n")
    site.submit(f"{SHELL}srun -n2 -N2 hostname\n", nodes=2, ntasks=2)
    site.submit(f"{SHELL}srun -n4 sh -c 'exit $SLURM_PROCID'\n", ntasks=4)
    site.submit(f"{SHELL}srun sh -c 'kill -9 $$'\n")
    site.submit(f"{SHELL}srun -J other sleep 0.3 &\nsrun --overlap sleep 0.2 &\nwait\n", ntasks=2)
    site.submit(f"{SHELL}srun /no/such/program\n")
    for _ in range(5):
        site.cluster.run(["srun", "-n2", "true"], user=site.user, check=False)
    site.cluster.run(["srun", "sh", "-c", "exit 9"], user=site.user, check=False)
    site.cluster.run(["salloc", "-n2", "srun", "true"], user=site.user, check=False)
    return 13


def _het(site: BookedSite) -> int:
    text = "#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\n"
    site.submit(f"{text}srun --het-group=0,1 true\n")
    site.submit(f"{text}exit 4\n")
    return 4


def _waiting(site: BookedSite) -> int:
    failed = site.submit(f"{SHELL}exit 1\n")
    never = site.submit(f"{SHELL}true\n", dependency=f"afterok:{failed}")
    dropped = site.submit(
        f"{SHELL}true\n", dependency=f"afterok:{failed}", kill_on_invalid_dep="yes"
    )
    late = site.submit(f"{SHELL}true\n", begin="now+1hour")
    held = site.submit(f"{SHELL}true\n", hold=True)
    wait_until(lambda: state_of(site.cluster, dropped) in ("CANCELLED", ""))
    _as_user(site, "scancel", str(never), str(late))
    site.cluster.run(["scancel", str(held)])
    return 5


def _disturbed(site: BookedSite) -> int:
    there = f"{site.cluster.users[site.user].home}/there"
    begin = f"touch {there}.$SLURM_JOB_ID"
    long = f"{SHELL}{begin}\nsleep 100\n"
    by_user, by_root, killed, requeued, held, suspended = (site.submit(long) for _ in range(6))
    steps = site.submit(f"{SHELL}srun sh -c '{begin}; exec sleep 100'\n")
    jobs = (by_user, by_root, killed, requeued, held, suspended, steps)
    # RUNNING is one that has not been launched, too: the books need not have a step of it.
    wait_until(lambda: all(Path(f"{there}.{job}").exists() for job in jobs), 60)
    wait_until(lambda: all(state_of(site.cluster, job) == "RUNNING" for job in jobs), 60)
    time.sleep(1.2)  # a second of run time each: sacct counts in seconds
    _as_user(site, "scancel", str(by_user), str(steps))
    site.cluster.run(["scancel", str(by_root)])
    _as_user(site, "scancel", "--signal=KILL", "--full", str(killed))
    site.cluster.run(["scontrol", "requeue", str(requeued)])
    site.cluster.run(["scontrol", "requeuehold", str(held)])
    site.cluster.run(["scontrol", "suspend", str(suspended)])
    time.sleep(2.2)
    site.cluster.run(["scontrol", "resume", str(suspended)])
    wait_until(lambda: state_of(site.cluster, held) == "PENDING", 60)
    _until(site, requeued, "RUNNING", "PENDING")
    site.cluster.run(["scancel", str(requeued), str(held), str(suspended)])
    return 7


def _asking(site: BookedSite) -> int:
    """Return further options of sbatch."""
    options: list[dict[str, Any]] = [
        {"nice": 10},
        {"exclusive": True},
        {"nodelist": "node2"},
        {"exclude": "node1"},
        {"dependency": "singleton"},
        {"ntasks_per_node": 2, "nodes": 2},
        {"mem": "1G", "cpus_per_task": 2},
        {"time_min": "1", "time": "10"},
        {"no_requeue": True},
        {"requeue": True},
        {"open_mode": "append"},
        {"error": "/dev/zero"},
        {"input": "/dev/zero"},
        {"signal": "USR1@10"},
    ]
    for number, option in enumerate(options):
        site.submit(f"{SHELL}srun true\n", job_name=f"option{number}", **option)
    return len(options)


def _until(site: BookedSite, job: int, *states: str) -> None:
    wait_until(lambda: state_of(site.cluster, job) in states, 60)


def _as_user(site: BookedSite, *words: str) -> None:
    site.cluster.run(list(words), user=site.user, check=False)
