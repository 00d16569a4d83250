"""Job operations on a real cluster, run by owners and by operators."""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from action_cluster import SLEEP, USERS, ActingSite, site
from job_submission import state_of, submit_to, wait_until

from steward.automation.runner import OperationRunner
from steward.core.access import Access, Caller
from steward.core.actions import Registry
from steward.slurm.job_changes import JobChanges

__all__ = ["site"]

# A test has a hundred commands run, each of which takes a second on a busy machine.
pytestmark = [pytest.mark.matrix, pytest.mark.wide, pytest.mark.timeout(900)]


@pytest.fixture
def empty(site: ActingSite) -> Iterator[ActingSite]:
    yield site
    for name in USERS:
        site.said("scancel", "-u", name)
    wait_until(lambda: not site.said("squeue", "-h", "-u", ",".join(USERS)))


def reason_of(site: ActingSite, job: object) -> str:
    return site.said("squeue", "-h", "-a", "-j", str(job), "-o", "%r").strip()


def is_waiting(site: ActingSite, job: int) -> bool:
    # Not so while the run that was ended still is cleared away.
    return "JobState=PENDING" in site.said("scontrol", "show", "job", str(job))


def test_jobs_are_found_and_shown(site: ActingSite) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada", hold=True, job_name="found")
    other = submit_to(
        site.cluster, SLEEP, user="bela", hold=True, job_name="found", exclude=site.nodes[0]
    )
    ids = site.result("slurm.job.find", by="bela", criterias={"name": "found"})
    assert sorted(ids) == [job, other]
    criterias = {"name": "found", "user_id": site.cluster.users["ada"].uid}
    assert site.result("slurm.job.find", by="ada", criterias=criterias) == [job]
    assert "nosuch" in site.refused("slurm.job.find", criterias={"nosuch": 1})
    # Those of all jobs would be read to that length.
    assert "2047" in site.refused("slurm.job.find", criterias={"dependency": "a" * 2048})
    shown = site.result("slurm.job.get", by="bela", jobids=f"{job},{other}")
    assert [shown[str(one)][0]["name"] for one in (job, other)] == ["found", "found"]
    assert site.result("slurm.job.step.get", by="ada", jobids=[job]) == {str(job): {}}
    # Only scontrol shows a job's excluded nodes.
    only = {"name": "found", "exc_nodes": site.nodes[0]}
    assert site.result("slurm.job.find", criterias=only) == [other]
    assert site.result("slurm.job.get", jobids="999999") == {"999999": []}
    assert "1;2" in site.refused("slurm.job.get", jobids="1;2")
    site.result("slurm.job.cancel", by="root", jobids=[job, other])


def test_a_job_is_found_by_every_field_that_is_shown_of_it(site: ActingSite) -> None:
    def submit(script: str, **options: Any) -> int:
        return submit_to(site.cluster, script, user="ada", **options)

    running = submit(SLEEP, comment="a=b JobId=7 ", nice=5, job_name="of many", output="/dev/null")
    held = submit(SLEEP, hold=True, array="2-5%2", error="e-%A-%a", time="7")
    # More than a poll of the whole queue reads of it.
    awaited = submit(SLEEP, hold=True, array="1-60")
    tasks = ":".join(f"{awaited}_{task}" for task in range(1, 61))
    waiting = submit(SLEEP, dependency=f"afterany:{tasks}", output="/dev/null")
    ended = submit("#!/bin/sh\nexit 3\n", output="o-%j-%x", constraint="")
    begun = submit(SLEEP, array="1-2", job_name="tasks", output="o-%A_%a-%j")
    wait_until(lambda: state_of(site.cluster, running) == "RUNNING")
    wait_until(lambda: state_of(site.cluster, ended) == "FAILED", 60)
    wait_until(lambda: len(shown_of(site, begun)) == 2 and is_running(site, begun), 60)

    def is_found(record: dict[str, Any]) -> bool:
        (again,) = (one for one in shown_of(site, record["job_id"]) if alike(one, record))
        if again["job_state"] == "RUNNING":
            del again["run_time_str"]  # it changes every second
        if site.result("slurm.job.find", criterias=again) == [again["job_id"]]:
            return True
        print([name for name in again if not found_by(site, name, again)])
        return False

    for job in (running, held, waiting, ended, begun):
        records = shown_of(site, job)
        assert records
        for record in records:
            # Some fields change meanwhile, as how long it has run.
            wait_until(partial(is_found, record), 60)
    dependency = shown_of(site, waiting)[0]["dependency"]
    assert len(dependency) > 1000
    assert site.result("slurm.job.find", criterias={"dependency": dependency[:-1]}) == []
    shown = shown_of(site, running)[0]
    for name in ("batch_host", "priority", "std_out", "alloc_sid"):
        assert shown[name] is not None, name
        assert running in site.result("slurm.job.find", criterias={name: shown[name]})
    for record in shown_of(site, begun):
        ids = site.result("slurm.job.find", criterias={"std_out": record["std_out"]})
        assert ids == [record["job_id"]]
    site.result("slurm.job.cancel", by="root", jobids=[running, held, awaited, waiting, begun])


def shown_of(site: ActingSite, job: int) -> list[dict[str, Any]]:
    (records,) = site.result("slurm.job.get", jobids=[job]).values()
    return list(records)


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["job_id"], one["array_task_str"]) == (other["job_id"], other["array_task_str"])


def is_running(site: ActingSite, job: int) -> bool:
    return all(record["job_state"] == "RUNNING" for record in shown_of(site, job))


def found_by(site: ActingSite, name: str, record: dict[str, Any]) -> bool:
    return record["job_id"] in site.result("slurm.job.find", criterias={name: record[name]})


def test_steps(site: ActingSite) -> None:
    script = "#!/bin/sh\nsrun --overlap sleep 300\n"
    job = submit_to(site.cluster, script, user="ada")

    def steps() -> Any:
        return site.result("slurm.job.step.get", by="ada", jobids=[job])[str(job)]

    wait_until(lambda: len(steps()) >= 2)
    assert {name.rpartition(".")[2] for name in steps()} >= {"0"} or "0" in steps()
    site.result("slurm.job.cancel", by="ada", jobids=job)


def test_owners_and_their_jobs(site: ActingSite) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada", begin="now+1hour")
    for ref in ("cancel", "hold", "release", "requeue", "suspend", "resume"):
        why = site.refused(f"slurm.job.{ref}", by="bela", jobids=job)
        assert "operators" in why, ref
    held = site.result("slurm.job.hold", by="ada", jobids=job, reason="not yet")
    assert held[str(job)]["changed"] is True
    assert "JobHeldUser" in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    assert site.result("slurm.job.hold", by="ada", jobids=job)[str(job)]["changed"] is False
    assert site.result("slurm.job.release", by="ada", jobids=job)[str(job)]["changed"] is True
    site.result("slurm.job.hold", by="olga", jobids=job, reason="quota")
    assert "JobHeldAdmin" in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
    site.result("slurm.job.release", by="olga", jobids=job)
    for ref in ("suspend", "resume"):
        assert "operators" in site.refused(f"slurm.job.{ref}", by="ada", jobids=job)
    assert site.result("slurm.job.cancel", by="ada", jobids=job)[str(job)]["changed"] is True
    wait_until(lambda: state_of(site.cluster, job) == "CANCELLED")
    over = site.result("slurm.job.cancel", by="ada", jobids=job)
    assert over[str(job)]["changed"] is False
    assert "999999" in site.refused("slurm.job.cancel", by="root", jobids="999999")
    assert "999999" in site.refused("slurm.job.hold", by="root", jobids=[job, 999999])


def test_running_jobs(site: ActingSite) -> None:
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.result("slurm.job.suspend", by="olga", jobids=job)
    assert state_of(site.cluster, job) == "SUSPENDED"
    site.result("slurm.job.resume", by="olga", jobids=job)
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    node = site.said("squeue", "-h", "-j", str(job), "-o", "%N").strip()
    site.result("slurm.job.requeue", by="ada", jobids=job, exclude=node)
    # Slurm lets a requeued job wait for two minutes.
    wait_until(lambda: state_of(site.cluster, job) == "PENDING")
    shown = site.result("slurm.job.get", jobids=job)[str(job)][0]
    assert node in json.dumps(shown)
    assert "ExcNodeList=" + node in site.said("scontrol", "show", "job", str(job))
    assert "JobHeld" not in site.said("squeue", "-h", "-j", str(job), "-o", "%r")
    dry = site.result("slurm.job.cancel", "--dry-run", by="ada", jobids=job)
    assert dry[str(job)]["would_change"] is True
    assert state_of(site.cluster, job) == "PENDING"
    site.result("slurm.job.cancel", by="ada", jobids=job)


def test_a_requeue_ends_nobodys_hold(empty: ActingSite) -> None:
    """An owner gets no further with Steward's rights than with Slurm's own commands."""
    site = empty
    one = site.nodes[0]
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.said("scontrol", "hold", str(job))
    assert reason_of(site, job) == "JobHeldAdmin"
    # Nor may it become a hold of the owner.
    held = site.result("slurm.job.hold", by="ada", jobids=job)
    assert held[str(job)]["changed"] is False
    assert reason_of(site, job) == "JobHeldAdmin"
    done = site.result("slurm.job.requeue", by="ada", jobids=job, exclude=one)
    assert done[str(job)]["changed"] is True
    wait_until(lambda: is_waiting(site, job))
    for _ in range(2):
        assert reason_of(site, job) == "JobHeldAdmin"
        assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
        assert "administrator" in site.refused("slurm.job.release", "--force", by="ada", jobids=job)
        # Waiting now, and an operator's requeue is no release either.
        site.result("slurm.job.requeue", by="olga", jobids=job, exclude=f"{one},{site.nodes[1]}")
    assert f"ExcNodeList={one[:-1]}" in site.said("scontrol", "show", "job", str(job))
    site.result("slurm.job.release", by="olga", jobids=job)
    assert "Held" not in reason_of(site, job)


def test_a_requeue_leaves_what_the_bank_says(empty: ActingSite) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    changing = JobChanges("box", site.daemon.settings.cluster["box"])
    assert changing.hold(str(job), "steward: the account is empty")
    site.result("slurm.job.requeue", by="ada", jobids=job, exclude=site.nodes[0])
    wait_until(lambda: is_waiting(site, job))
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "the account is empty" in site.said("scontrol", "show", "job", str(job))
    assert "is empty" in site.refused("slurm.job.release", by="olga", jobids=job)


def test_a_hold_of_what_runs_is_ended(empty: ActingSite) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.result("slurm.job.hold", by="olga", jobids=job)
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)
    site.result("slurm.job.release", by="olga", jobids=job)
    assert "Held" not in reason_of(site, job)


def test_an_operators_hold_takes_an_owners_place(empty: ActingSite) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada", begin="now+1hour")
    site.result("slurm.job.hold", by="ada", jobids=job)
    assert reason_of(site, job) == "JobHeldUser"
    site.result("slurm.job.hold", by="olga", jobids=job)
    assert reason_of(site, job) == "JobHeldAdmin"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=job)


@pytest.mark.parametrize("by", ["ada", "olga"])
def test_what_is_held_after_a_requeue_is_released(empty: ActingSite, by: str) -> None:
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    site.said("scontrol", "requeuehold", str(job))
    wait_until(lambda: is_waiting(site, job))
    assert "held" in reason_of(site, job)
    assert site.result("slurm.job.hold", by="ada", jobids=job)[str(job)]["changed"] is False
    done = site.result("slurm.job.release", by=by, jobids=job)
    assert done[str(job)]["changed"] is True
    assert "held" not in reason_of(site, job).lower()
    assert "Priority=0" not in site.said("scontrol", "show", "job", str(job))


def test_an_array_in_several_states(empty: ActingSite) -> None:
    """Running tasks are requeued, pending tasks stay, and no task stays held."""
    site = empty
    full = submit_to(site.cluster, SLEEP, user="ada", array="0-5%2")
    wait_until(lambda: site.said("squeue", "-h", "-t", "R", "-o", "%A").count("\n") == 2)
    done = site.result("slurm.job.requeue", by="ada", jobids=full, exclude=site.nodes[0])
    assert done[str(full)]["changed"] is True
    shown = site.said("scontrol", "-o", "show", "job", str(full)).splitlines()
    assert len(shown) >= 2
    assert all(f"ExcNodeList={site.nodes[0]} " in line for line in shown), shown
    assert not any("Priority=0 " in line for line in shown), shown
    # Of the pending tasks, those that are not held.
    site.said("scontrol", "hold", f"{full}_5")
    site.result("slurm.job.hold", by="ada", jobids=full)
    assert reason_of(site, f"{full}_5") == "JobHeldAdmin"
    assert reason_of(site, f"{full}_4") == "JobHeldUser"
    assert "administrator" in site.refused("slurm.job.release", by="ada", jobids=full)
    site.result("slurm.job.release", by="ada", jobids=f"{full}_4")
    assert " Priority=0 " not in site.said("scontrol", "-o", "show", "job", f"{full}_4")
    again = site.result("slurm.job.release", by="olga", jobids=full)
    assert again[str(full)]["changed"] is True
    assert " Priority=0 " not in site.said("scontrol", "-o", "show", "job", str(full))


def test_a_requeue_that_was_killed_is_ended_by_the_next(empty: ActingSite) -> None:
    """The job is left as after ``requeuehold`` without a release."""
    site = empty
    job = submit_to(site.cluster, SLEEP, user="ada")
    wait_until(lambda: state_of(site.cluster, job) == "RUNNING")
    settings = site.daemon.settings.cluster["box"]
    changing = JobChanges("box", settings)
    one = site.nodes[0]
    said = f"steward: requeued away from {one} (steward: olga)"
    assert changing.comment(str(job), said)
    assert changing.requeue(str(job), hold=True)
    wait_until(lambda: is_waiting(site, job))
    access = Access(site.daemon.settings.access, os.getuid(), lambda _cluster: None)
    runner = OperationRunner(site.daemon.settings, access, Registry((), {}))
    asked = ("slurm.job.requeue", {"jobids": [job], "exclude": one}, Caller(uid=0, user="root"))
    # This tells the next process that the work has to be repeated.
    assert runner.check(*asked, speaker="olga") is False
    done = site.result("slurm.job.requeue", by="olga", jobids=job, exclude=one)
    assert done[str(job)]["changed"] is True
    assert runner.check(*asked, speaker="olga") is True
    shown = site.said("scontrol", "-o", "show", "job", str(job))
    assert f"ExcNodeList={one} " in shown
    assert "requeued away" not in shown
    assert "held" not in shown


def test_what_ran_last_on_a_node(site: ActingSite) -> None:
    job = submit_to(site.cluster, "#!/bin/sh\nexit 3\n", user="ada", nodelist=site.nodes[0])

    def last() -> Any:
        return site.result("slurm.node.jobs", by="olga", nodes=site.nodes[0], limit=5)

    wait_until(lambda: any(row["job_id"] == str(job) for row in last()[site.nodes[0]]))
    wait_until(lambda: last()[site.nodes[0]][0]["exit_code"] == 3)
    assert "operators" in site.refused("slurm.node.jobs", by="ada", nodes=site.nodes[0])


def test_script_from_the_archive(site: ActingSite) -> None:
    job = submit_to(site.cluster, "#!/bin/sh\n# for slurm.script.get\n", user="ada")
    wait_until(
        lambda: (
            site.daemon.ask("archive", "show", str(job), user="ada", check=False).returncode == 0
        )
    )
    shown = site.result("slurm.script.get", by="ada", jobid=str(job))
    assert shown["script"] == "#!/bin/sh\n# for slurm.script.get\n"
    assert str(job) in site.refused("slurm.script.get", by="bela", jobid=str(job)) or (
        site.result("slurm.script.get", by="bela", jobid=str(job))["script"] is None
    )
