"""Submit plugin in real slurmctlds, in C and in Lua: admissions, rejections, outages."""

import threading
import time
from collections.abc import Iterator

import pytest
from gate_cluster import QUIET_S, AskingSite, asking
from job_submission import wait_until
from sandboxes import passable_directory

from servers.gate import AskedGate, hangs, says

pytestmark = [pytest.mark.matrix, pytest.mark.interface]


@pytest.fixture(scope="module", params=["c", "lua"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(slurm_version: str, kind: str) -> Iterator[AskingSite]:
    with passable_directory() as path, asking(path, slurm_version, kind) as site:
        yield site


@pytest.fixture
def site(shared: AskingSite) -> AskingSite:
    shared.gate.answers = says()
    shared.conf(timeout_ms=1000)
    # A gate that failed before is asked again by the time that it answers.
    wait_until(lambda: asks(shared), 3 * QUIET_S)
    shared.gate.asked.clear()
    return shared


def asks(site: AskingSite) -> bool:
    before = len(site.gate.asked)
    site.submit()
    return len(site.gate.asked) > before


def is_old(site: AskingSite) -> bool:
    """Return whether this Slurm gives users no reason for rejected updates (before 23.02)."""
    return site.cluster.plan.slurm_version.startswith("22.")


def test_a_job_is_described_and_gets_its_token(site: AskingSite) -> None:
    site.gate.answers = says(admin_comment="steward=1.x", say="first\nsecond")
    options = ("-N1-2", "-c2", "--mem-per-cpu=10", "-t", "10", "-p", "main,debug", "--exclusive")
    words = ("sbatch", "--parsable", "-H", "-o", "/dev/null", *options, "--wrap", "sleep 9")
    code, said = site.run(*words)
    assert code == 0
    assert "sbatch: first\nsbatch: second\n" in said
    (question,) = site.gate.asked
    uid = site.cluster.users[site.user].uid
    assert (question["v"], question["op"], question["by"]) == (1, "submit", uid)
    assert question["cluster"] == "sandbox"
    wanted = {
        "uid": uid,
        "partition": "main,debug",
        "time_limit_min": 10,
        "min_nodes": 1,
        "max_nodes": 2,
        "cpus_per_task": 2,
        "min_cpus": 2,
        "mem_per_cpu_mib": 10,
        "exclusive": True,
        "held": True,
    }
    assert question["job"].items() >= wanted.items()
    job = next(int(line) for line in said.split() if line.isdigit())
    assert site.comment(job) == "steward=1.x"


def test_the_user_is_the_jobs_own(site: AskingSite) -> None:
    site.run("sbatch", f"--uid={site.user}", "-H", "-o", "/dev/null", "--wrap", "x", user="root")
    (question,) = site.gate.asked
    assert (question["by"], question["job"]["uid"]) == (0, site.cluster.users[site.user].uid)


def test_a_refusal_tells_the_user(site: AskingSite) -> None:
    site.gate.answers = says(ok=False, say="It may cost 5 SU\nand 2 SU are free")
    text = "{0}: error: It may cost 5 SU\n{0}: error: and 2 SU are free\n"
    assert text.format("sbatch") in site.refused()
    for command in ("srun", "salloc"):
        code, said = site.run(command, "-n1", "true")
        assert (code, text.format(command) in said) == (1, True), said


def test_a_job_is_sent_elsewhere(site: AskingSite) -> None:
    site.gate.answers = says(partition="debug")
    job = site.submit(time="5")
    shown = site.cluster.run(["squeue", "-h", "-j", str(job), "-o", "%P"]).stdout
    assert shown.strip() == "debug"


def test_arrays_components_and_tests_are_asked_for(site: AskingSite) -> None:
    site.submit(array="0-9%2")
    site.run("sbatch", "-H", "-o", "/dev/null", "-n1", ":", "-n2", "--wrap", "x")
    site.run("sbatch", "--test-only", "-n3", "--wrap", "x")
    array, first, second, test = [question["job"] for question in site.gate.asked]
    assert array["array"] == "0-9%2"
    assert [one.get("het") for one in (array, first, second, test)] == [None, True, True, None]
    assert [one["num_tasks"] for one in (first, second, test)] == [1, 2, 3]


def test_updates_that_cost_more_are_asked_for(site: AskingSite) -> None:
    job = site.submit(time="5")
    array = site.submit(array="0-3", time="5")
    site.gate.asked.clear()
    site.run("scontrol", "update", f"jobid={job}", "comment=x")
    site.run("scontrol", "hold", str(job))
    assert site.gate.asked == []
    site.gate.answers = says(ok=False, say="too dear")
    code, said = site.run("scontrol", "update", f"jobid={job}", "timelimit=4")
    assert code == 1
    assert is_old(site) or "too dear" in said
    site.gate.answers = says()
    code, said = site.run("scontrol", "update", f"jobid={array}_2", "timelimit=3")
    assert code == 0, said
    site.run("scontrol", "release", str(job))
    limit, task, release = site.gate.asked
    assert (limit["op"], limit["jobs"], limit["job"]["job_id"]) == ("modify", str(job), job)
    assert (limit["job"]["uid"], limit["job"]["time_limit_min"]) == (-1, 4)
    assert (task["jobs"], task["job"]["job_id"]) == (f"{array}_2", array)
    assert release["job"] == {"uid": -1, "job_id": job, "released": True}


def test_only_what_is_priced_is_sent_and_what_is_longer_is_rejected(site: AskingSite) -> None:
    job = site.submit(time="5")
    site.gate.asked.clear()
    excluded = ",".join(f"node{number:05}" for number in range(2000))
    site.run("sbatch", "-H", "-o", "/dev/null", "--exclude", excluded, "--wrap", "x")
    # As a line of the script: one argument has at most 128 KiB.
    afterwards = "afterany:1," * 136_000
    script = f"#!/bin/sh\n#SBATCH --dependency={afterwards}singleton\ntrue\n"
    words = ["sbatch", "-H", "-o", "/dev/null"]
    site.cluster.run(words, user=site.user, input=script, cwd="/tmp", check=False)
    assert len(site.gate.asked) == 2
    for question in site.gate.asked:
        assert "oversize" not in question
        assert "node00001" not in str(question)
        assert "afterany" not in str(question)
    site.gate.asked.clear()
    long = "reqnodelist=" + ",".join(["node1", "node2"] * 6000)
    site.gate.answers = says(ok=False)
    assert site.run("scontrol", "update", f"jobid={job}", long)[0] == 1
    (question,) = site.gate.asked
    assert question["oversize"] == "req_nodes"
    site.gate.answers = hangs
    site.conf("policy allow")
    limit = f"jobid={job}", "timelimit=4"
    assert site.run("scontrol", "update", *limit)[0] == 0, "the policy lets it in"
    assert site.run("scontrol", "update", f"jobid={job}", long)[0] == 1, "whatever the policy"
    off = site.directory / "off"
    off.touch()
    off.chmod(0o644)
    try:
        site.run("scontrol", "update", f"jobid={job}", long)
    finally:
        off.unlink()


SPOILT = {
    "rubbish": lambda _question, _sock: b"\xff\x00 no\n",
    "closed": lambda _question, _sock: None,
    "another": lambda _question, _sock: b'{"v":2,"ok":true}\n',
}


@pytest.mark.parametrize("policy", ["observe", "allow", "deny"])
@pytest.mark.parametrize("name", [*SPOILT, "away", "hung"])
def test_without_an_answer_the_policy_holds(site: AskingSite, name: str, policy: str) -> None:
    gate: AskedGate = site.gate
    site.conf(f"policy {policy}", "partition debug allow")
    if name == "away":
        gate.stop()
    else:
        gate.answers = SPOILT.get(name, hangs)
    begun = time.monotonic()
    try:
        for _ in range(3):
            if policy == "deny":
                assert "try again in a minute" in site.refused()
                job = site.submit(partition="debug", time="5")
                longer = site.run("scontrol", "update", f"jobid={job}", "timelimit=4")
                assert longer[0] == 0, longer
            else:
                assert site.submit()
    finally:
        if name == "away":
            gate.start()
    if name == "hung":
        # Once, and then not for a while.
        assert 1 <= len(gate.asked) <= 1 + (time.monotonic() - begun) // QUIET_S
    assert any("the outage policy applies" in line for line in site.log())


def test_without_a_partition_the_policy_of_the_default_one_holds(site: AskingSite) -> None:
    site.gate.answers = hangs
    site.conf("policy allow", "default_partition main", "partition main deny")
    assert "try again in a minute" in site.refused()
    site.submit(partition="debug", time="5")
    site.conf("policy deny", "default_partition main", "partition main observe")
    site.submit()
    assert "try again in a minute" in site.refused("-p", "main,debug", "-t", "5")


def test_the_file_that_switches_it_off(site: AskingSite) -> None:
    site.gate.answers = says(ok=False)
    off = site.directory / "off"
    off.touch()
    off.chmod(0o644)
    try:
        site.submit()
    finally:
        off.unlink()
    assert site.gate.asked == []
    assert "sbatch: error: Batch job submission failed" in site.refused()


def test_a_gate_that_hangs_costs_one_wait_and_stalls_nobody(site: AskingSite) -> None:
    site.conf("policy allow")
    usual = sorted(site.took(10))
    site.gate.answers = hangs
    site.gate.asked.clear()
    begun = time.monotonic()
    first, *later = site.took(10)
    # After a few slow requests the gate may be asked again.
    assert 1 <= len(site.gate.asked) <= 1 + (time.monotonic() - begun) // QUIET_S
    median = usual[len(usual) // 2]
    print(f"sbatch {median * 1e3:.1f} ms; hung: once {first * 1e3:.1f} ms, then ", end="")
    print(f"{sorted(later)[len(later) // 2] * 1e3:.1f} ms")


def test_others_are_answered_while_many_submit(site: AskingSite) -> None:
    site.conf("policy allow")
    site.gate.answers = hangs
    site.gate.asked.clear()
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(site.submit())) for _ in range(32)]
    for thread in threads:
        thread.start()
    pings: list[float] = []
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        assert site.run("scontrol", "ping", user="root")[0] == 0
        assert site.run("squeue", "-h", user="root")[0] == 0
        pings.append(time.monotonic() - begun)
    for thread in threads:
        thread.join()
    assert len(set(done)) == 32
    # Those that asked at the same time waited at the same time, and none after them.
    assert 1 <= len(site.gate.asked) <= 32
    print(f"asked {len(site.gate.asked)}; ping and squeue {max(pings) * 1e3:.0f} ms at the most")
