"""Pages of jobs on a real cluster: lists, single jobs, comparisons, and permissions."""

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_submission import state_of, wait_until
from web_cluster import CLUSTER, PATIENCE_S, JobSite, job_site
from web_site import USERS, Visitor, WebSite

from steward.jobs import Jobs, database_path
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.timeout(900)

TOKEN = "hush-hush-hush"
SCRIPT = "#SBATCH --comment=confidential\necho needle-in-a-haystack '<b>&'\n"


def test_a_job_is_found_shown_and_cancelled(slurm_version: str) -> None:
    spec = SandboxSpec(slurm=slurm_version, user_names=USERS)
    with (
        Sandbox.up(spec, report=print) as cluster,
        WebSite(cluster, Path(cluster.directory) / "steward") as web,
    ):
        site = JobSite(cluster, web)
        job = site.submit("sleep 1000", job_name="smoke")
        site.until(job, "RUNNING", "PENDING")
        ada = web.visitor("ada")
        assert f'href="/jobs/{CLUSTER}/{job}"' in ada.page("/jobs")
        page = ada.page(f"/jobs/{CLUSTER}/{job}")
        assert "sleep" in text_of(page)
        assert "Cancel" in page
        answer = ada.submit(f"/jobs/{CLUSTER}/{job}/cancel")
        assert answer.status_code == 303, answer.text
        site.until(job, "CANCELLED")


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[JobSite]:
    if shutil.which("cc") is None:
        pytest.skip("the plugin is compiled")
    with job_site(slurm_version) as site:
        yield site


@pytest.fixture(scope="module")
def ada(site: JobSite) -> Visitor:
    return site.web.visitor("ada")


@pytest.fixture(scope="module")
def grace(site: JobSite) -> Visitor:
    return site.web.visitor("grace")


@pytest.fixture(scope="module")
def olga(site: JobSite) -> Visitor:
    return site.web.visitor("olga")


@pytest.fixture(scope="module")
def worked(site: JobSite) -> int:
    """Run a job of ada with four unequal tasks; return it completed."""
    work = "srun -n4 bash -c 'for i in $(seq $((SLURM_PROCID*60000+60000))); do :; done; sleep 1'"
    env = {"API_TOKEN": TOKEN, "COLOUR": "red"}
    job = site.submit(SCRIPT + work, job_name="train", ntasks=4, mem="200M", env=env)
    site.until(job, "COMPLETED")
    return job


@pytest.fixture(scope="module")
def failed(site: JobSite, worked: int) -> int:
    """Run a later job of the same name that fails."""
    assert worked
    env = {"COLOUR": "blue"}
    job = site.submit("echo other\nsleep 1\nexit 3", job_name="train", time="5", env=env)
    site.until(job, "FAILED")
    return job


@pytest.fixture(scope="module")
def array(site: JobSite) -> int:
    job = site.submit("exit $((SLURM_ARRAY_TASK_ID % 2))", job_name="sweep", array="0-5")
    for task in range(6):
        site.until(f"{job}_{task}", "FAILED" if task % 2 else "COMPLETED")
    return job


def text_of(page: str) -> str:
    """Return the visible text of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def names(page: str) -> list[str]:
    """Return the jobs of a list, in its order."""
    rows = re.findall(r'<th scope="row"><a href="([^"]*)">', page)
    return [row.rpartition("/")[2] for row in rows]


def part(visitor: Visitor, path: str, **query: Any) -> str:
    """Return a part of a page, as htmx requests it."""
    answer = visitor.get(path, params=query or None, headers={"HX-Request": "true"})
    assert answer.status_code == 200, answer.text
    return answer.text


# ---------------------------------------------------------------- lists


@pytest.mark.wide
def test_a_list_is_what_its_address_says(
    site: JobSite, ada: Visitor, worked: int, failed: int, array: int
) -> None:
    listed = names(ada.page("/jobs", users="ada"))
    assert {str(worked), str(failed), str(array)} <= set(listed)
    # An array is one row, wherever its tasks are.
    assert listed.count(str(array)) == 1
    assert not any("_" in name for name in listed)
    assert listed.index(str(array)) < listed.index(str(failed)) < listed.index(str(worked))
    upside_down = names(ada.page("/jobs", users="ada", order="submit"))
    assert upside_down == listed[::-1]
    assert names(ada.page("/jobs", states="FAILED", names="train")) == [str(failed)]
    assert names(ada.page("/jobs", jobs=f"{worked},{failed}")) == [str(failed), str(worked)]
    assert names(ada.page("/jobs", users="grace", names="train")) == []
    apart = names(ada.page("/jobs", jobs=array, arrays="apart", order="submit"))
    assert apart == [f"{array}_{task}" for task in (5, 0, 1, 2, 3, 4)] or apart == [
        f"{array}_{task}" for task in range(6)
    ]
    page = ada.page("/jobs", jobs=worked, columns="exit,cost,nodelist,state")
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', page)
    assert heads == ["Job", "State", "Node list", "Exit", "Cost"]
    wait_until(
        lambda: bool(re.search(r">0\.\d\d<", ada.page("/jobs", jobs=worked, columns="cost"))),
        PATIENCE_S,
    )


@pytest.mark.wide
def test_a_list_goes_on_where_it_ended(
    site: JobSite, ada: Visitor, worked: int, failed: int, array: int
) -> None:
    whole = names(ada.page("/jobs", arrays="apart"))
    assert len(whole) > 6
    found: list[str] = []
    page = ada.page("/jobs", arrays="apart", rows=3)
    while True:
        found += names(page)
        more = re.search(r'<a href="([^"]*)">More jobs</a>', page)
        if more is None:
            break
        page = ada.page(html.unescape(more[1]).replace("arrays=", "rows=3&arrays="))
    assert found == whole
    # More rows change the page's address, so that a returning user has as many rows.
    first = ada.page("/jobs", arrays="apart", rows=3)
    follows = re.search(r'hx-get="([^"]*before=3[^"]*)"', first)
    assert follows
    answer = ada.get(html.unescape(follows[1]), headers={"HX-Request": "true"})
    assert "<h1>" not in answer.text
    address = answer.headers["hx-replace-url"]
    assert names(ada.page(address))[:3] == whole[:3]


@pytest.mark.wide
def test_an_array_opens_in_its_place_and_without_scripts(ada: Visitor, array: int) -> None:
    page = ada.page("/jobs", jobs=array)
    opens = re.search(r'class="opens" href="([^"]*)" hx-get="([^"]*)"', page)
    assert opens
    assert '3 <span class="state state-failed">FAILED' in page
    plain = ada.page(html.unescape(opens[1]))
    inside = part(ada, html.unescape(opens[2]))
    assert "<h1>" in plain
    assert "<h1>" not in inside
    assert sorted(names(plain)) == sorted(names(inside)) == [f"{array}_{task}" for task in range(6)]


@pytest.mark.wide
def test_jobs_are_counted_by_state(ada: Visitor, array: int) -> None:
    told = text_of(part(ada, "/jobs/counts", jobs=array))
    assert re.search(r"3\s+FAILED", told)
    assert re.search(r"3\s+COMPLETED", told)
    assert "<h1>" in ada.page("/jobs/counts", jobs=array)


@pytest.mark.wide
def test_scripts_are_found_by_what_stands_in_them(
    ada: Visitor, grace: Visitor, olga: Visitor, worked: int
) -> None:
    def found(visitor: Visitor) -> str:
        return visitor.page("/jobs", text="needle-in-a-haystack")

    wait_until(lambda: f"/jobs/{CLUSTER}/{worked}" in found(ada), PATIENCE_S)
    assert "<mark>needle-in-a-haystack</mark>" in found(ada)
    assert f"/jobs/{CLUSTER}/{worked}" in found(olga)
    assert f"/jobs/{CLUSTER}/{worked}" not in found(grace)
    assert f"/jobs/{CLUSTER}/{worked}" not in ada.page(
        "/jobs", text="needle-in-a-haystack", users="grace"
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    "query",
    [
        {"page": "nonsense"},
        {"order": "cost; drop"},
        {"states": "BROKEN"},
        {"rows": "-1"},
        {"jobs": "seven"},
        {"since": "\0"},
        {"users": "u" * 5000},
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(ada: Visitor, query: dict[str, str]) -> None:
    answer = ada.get("/jobs", params=query)
    assert answer.status_code == 400
    said = re.search(r'<p role="alert">([^<]+)</p>', answer.text)
    assert said
    assert "Traceback" not in answer.text


# ---------------------------------------------------------------- a job


@pytest.mark.wide
def test_a_job_is_shown_with_all_that_is_known(ada: Visitor, worked: int) -> None:
    path = f"/jobs/{CLUSTER}/{worked}"
    wait_until(lambda: "Memory peak by task" in ada.page(path), PATIENCE_S)
    wait_until(lambda: "cpu x 7.00 an hour" in ada.page(path), PATIENCE_S)
    page = ada.page(path)
    told = text_of(page)
    for words in (
        "train",
        "COMPLETED",
        "Nodes",
        "Allocated",
        "Started",
        "Efficiency",
        "confidential",
    ):
        assert words in told, words
    # Script: escaped, in colour.
    assert "needle-in-a-haystack" in told
    assert "<b>&" not in page.replace("&lt;b&gt;&amp;", "")
    assert '<span class="nb">echo</span>' in page
    assert "Tasks of step 0" in told
    assert len(re.findall(r'data-plot="', page)) == 2
    assert ada.get(f"{path}/script").content.startswith(b"#!/bin/bash\n#SBATCH --comment=")


@pytest.mark.wide
def test_an_environment_is_shown_without_its_secrets(ada: Visitor, worked: int) -> None:
    for page in (
        ada.page(f"/jobs/{CLUSTER}/{worked}/environment"),
        part(ada, f"/jobs/{CLUSTER}/{worked}/environment"),
    ):
        assert re.search(r"<code>COLOUR</code></th><td><code>red</code>", page)
        assert re.search(r"<code>API_TOKEN</code></th><td><em[^>]*>redacted", page)
        assert TOKEN not in page


@pytest.mark.wide
def test_an_array_is_summed_up(ada: Visitor, array: int) -> None:
    path = f"/jobs/{CLUSTER}/{array}"
    page = ada.page(path)
    assert f"<h1>Array {array} " in page
    wait_until(lambda: "exit code 1" in part(ada, f"{path}/array"), PATIENCE_S)
    assert "<h1>Array" in ada.page(f"{path}/array")
    assert f"<h1>Job {array}_3 " in ada.page(f"/jobs/{CLUSTER}/{array}_3")
    wait_until(lambda: "Charged" in part(ada, f"{path}/cost"), PATIENCE_S)


@pytest.mark.wide
def test_the_run_that_worked_and_the_one_that_failed(
    ada: Visitor, worked: int, failed: int
) -> None:
    for job in (worked, failed):
        # Of itself the other is chosen, the earlier always to the left.
        page = ada.page(f"/jobs/{CLUSTER}/{job}/compare")
        told = text_of(page)
        assert f"Comparison of job {worked} and job {failed}" in told
        assert "<ins>+echo other</ins>" in page
        assert re.search(r"<del>-echo needle-in-a-haystack", page)
        assert re.search(r"COLOUR</code></th>\s*<td><code>red</code></td><td><code>blue<", page)
        assert TOKEN not in page
        assert re.search(
            r"State</th><td>COMPLETED</td><td>FAILED, exit code 3</td><td>differs", page
        )
        assert re.search(r"Partition</th><td>(\w+)</td><td>\1</td><td></td>", page)
    other = ada.page(f"/jobs/{CLUSTER}/{failed}/compare", **{"with": str(failed)})
    assert "The scripts are identical" in other
    assert ada.get(f"/jobs/{CLUSTER}/{failed}/compare?with=9999999").status_code == 404


@pytest.mark.wide
def test_what_happened_to_its_nodes_stands_on_its_page(site: JobSite, ada: Visitor) -> None:
    job = site.submit("sleep 1000", job_name="watched")
    site.until(job, "RUNNING")
    reason = "a fan is <loud>"
    node = site.cluster.run(["squeue", "-h", "-j", str(job), "-o", "%N"]).stdout.strip()
    change = ["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"]
    site.cluster.run(change, user="root")
    try:
        path = f"/jobs/{CLUSTER}/{job}"
        wait_until(lambda: html.escape(reason) in ada.page(path), PATIENCE_S)
        assert reason not in ada.page(path)
    finally:
        site.cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"], user="root")
        site.cluster.run(["scancel", str(job)], user="root")


@pytest.mark.wide
def test_a_job_is_found_by_all_its_names(site: JobSite, ada: Visitor, worked: int) -> None:
    het = [
        *("sbatch", "--parsable", "--account=physics", "--output=/dev/null", "--job-name=het"),
        *("--wrap=true", ":", "--ntasks=1"),
    ]
    leader = int(site.cluster.run(het, user="ada").stdout)
    site.until(f"{leader}+1", "COMPLETED")
    for name in (f"{leader}+1", f"{leader}%2B1", leader + 1):
        assert f"<h1>Job {leader}+1 " in ada.page(f"/jobs/{CLUSTER}/{name}")
    page = ada.page(f"/jobs/{CLUSTER}/{leader}")
    assert f'href="/jobs/{CLUSTER}/{leader}%2B1"' in page
    books = Jobs(database_path(str(site.web.daemon.state)))
    try:
        sluid = books.find(str(worked), CLUSTER)[0].record.original_sluid
    finally:
        books.close()
    if sluid:
        page = ada.page(f"/jobs/{CLUSTER}/{sluid}")
        assert f"<h1>Job {worked} " in page
        assert f"/jobs/{CLUSTER}/{worked}/script" in page


# ---------------------------------------------------------------- who may do what


@pytest.mark.wide
def test_what_is_private_is_told_to_nobody_else(
    ada: Visitor, grace: Visitor, olga: Visitor, worked: int
) -> None:
    path = f"/jobs/{CLUSTER}/{worked}"
    for visitor in (ada, olga):
        assert "needle-in-a-haystack" in visitor.page(path)
    page = grace.page(path)
    for secret in ("needle", "confidential", "Charged", "COLOUR", "Cancel"):
        assert secret not in page, secret
    for inside in ("script", "environment"):
        assert grace.get(f"{path}/{inside}").status_code == 403
        assert olga.get(f"{path}/{inside}").status_code == 200
    assert "needle" not in grace.page(f"{path}/compare", **{"with": str(worked)})
    assert "Charged" not in grace.page(f"{path}/cost")


@pytest.mark.wide
def test_owners_hold_release_and_cancel_and_nobody_else(
    site: JobSite, ada: Visitor, grace: Visitor, olga: Visitor
) -> None:
    job = site.submit("sleep 1000", job_name="mine", hold=True)
    path = f"/jobs/{CLUSTER}/{job}"
    site.until(job, "PENDING")
    assert verbs(ada.page(path)) == ["cancel", "release"]
    assert verbs(grace.page(path)) == []
    for verb in ("cancel", "release", "hold", "requeue"):
        answer = grace.submit(f"{path}/{verb}")
        assert answer.status_code == 403, (verb, answer.text)
    assert ada.post(f"{path}/release").status_code == 403, "a form of nobody's"
    assert state_of(site.cluster, job) == "PENDING"

    done = ada.submit(f"{path}/release")
    assert (done.status_code, done.headers["location"]) == (303, f"{path}?done=release")
    assert "Steward sent the release request to Slurm" in ada.page(done.headers["location"])
    site.until(job, "RUNNING")
    wait_until(lambda: verbs(ada.page(path)) == ["cancel", "requeue"])
    # A false state is reported, and a second click does no harm.
    again = ada.submit(f"{path}/release")
    assert again.status_code in (303, 409), again.text
    assert olga.submit(f"{path}/cancel", reason="too long").status_code == 303
    site.until(job, "CANCELLED")
    again = ada.submit(f"{path}/cancel")
    assert again.status_code == 409
    assert "nothing to change" in again.text
    assert verbs(ada.page(path)) == []
    assert ada.submit(f"{path}/suspend").status_code == 404


def verbs(page: str) -> list[str]:
    """Return the job operations that a page offers."""
    return re.findall(r'<form method="post" action="/jobs/[^"]*/(\w+)"', page)


@pytest.mark.wide
@pytest.mark.parametrize("job", ["x", "0", "1.batch", "..", "%2e%2e", "%3Cscript%3E", "9" * 30])
def test_what_names_no_job_is_nowhere(ada: Visitor, job: str) -> None:
    answer = ada.get(f"/jobs/{CLUSTER}/{job}", follow_redirects=True)
    assert answer.status_code in (404, 200)
    assert answer.status_code == 404 or job in ("..", "%2e%2e")
    assert "<script>" not in answer.text


@pytest.mark.wide
@pytest.mark.database
def test_where_jobs_are_private_a_coordinator_sees_records_and_no_scripts(
    slurm_version: str,
) -> None:
    spec = SandboxSpec(
        slurm=slurm_version,
        user_names=USERS,
        accounting=True,
        accounts=("physics",),
        private_data="jobs",
    )
    with (
        Sandbox.up(spec, report=print) as cluster,
        WebSite(cluster, Path(cluster.directory) / "steward") as web,
    ):
        site = JobSite(cluster, web)
        # ada is the account's coordinator.
        hers = site.submit("echo hers; sleep 1000", user="grace", job_name="hers")
        mine = site.submit("echo mine; sleep 1000", user="ada", job_name="mine")
        for job in (hers, mine):
            site.until(job, "RUNNING", "PENDING")
        ada, grace, olga = (web.visitor(user) for user in ("ada", "grace", "olga"))
        wait_until(lambda: set(names(ada.page("/jobs"))) == {str(hers), str(mine)}, PATIENCE_S)
        assert set(names(olga.page("/jobs"))) == {str(hers), str(mine)}
        page = ada.page(f"/jobs/{CLUSTER}/{hers}")
        assert verbs(page) == []
        assert "echo" not in page
        assert ada.get(f"/jobs/{CLUSTER}/{hers}/script").status_code == 403
        assert ada.submit(f"/jobs/{CLUSTER}/{hers}/cancel").status_code == 403
        # Of what grace may not see there is not even a number.
        assert names(grace.page("/jobs")) == [str(hers)]
        assert re.search(r"\b1 job:", text_of(part(grace, "/jobs/counts")))
        for inside in ("", "/compare", "/script", "/environment", "/array"):
            answer = grace.get(f"/jobs/{CLUSTER}/{mine}{inside}")
            assert answer.status_code in (403, 404), inside
            assert "mine" not in answer.text
        compared = grace.get(f"/jobs/{CLUSTER}/{hers}/compare", params={"with": str(mine)})
        assert compared.status_code == 404
        assert grace.submit(f"/jobs/{CLUSTER}/{mine}/cancel").status_code == 404
        assert state_of(cluster, mine) in ("RUNNING", "PENDING")
        assert "cancel" in verbs(olga.page(f"/jobs/{CLUSTER}/{mine}"))
