"""Replies of show, env and diff about one or two jobs, and permissions."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness import archive
from harness.events import NOVEMBER
from harness.site import ADA, BELA, ROOT, Site
from steward.archive.context import JobNotReadable
from steward.archive.errors import ArchiveError, NotArchived
from steward.archive.resubmission import derive_options
from steward.core.access import Caller
from steward.core.errors import PermissionRefused, UsageError
from steward.core.redaction import REDACTED
from steward.slurm.settings import ClusterSettings


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = archive.make_library(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------- show, env, diff


def test_a_job_is_shown_with_its_script_byte_for_byte(site: Site) -> None:
    data = b"#!/bin/sh\n\xff\xfe\0 caf\xe9\n"
    archive.add_job(site, 1, data)
    answer = site.ask("archive.show", ADA, job="1")
    assert answer.content.encoding == "base64"
    assert answer.content.data == data
    assert answer.record.account == "physics"
    assert answer.script.length == len(data)
    assert Path(answer.script.path).read_bytes() == data
    assert [run.state for run in answer.runs] == ["COMPLETED"]
    archive.trim(site)
    assert site.ask("archive.show", ADA, job="1").content.data == data


def test_a_script_is_shown_before_it_is_filed(site: Site) -> None:
    archive.add_job(site, 1, b"fresh", feed=False)
    del site.consumers["archive.files"]
    assert site.ask("archive.show", ADA, job="1").content.data == b"fresh"
    assert site.ask("archive.show", ADA, job="1").script.path == ""


@pytest.mark.parametrize("action", ["show", "env"])
def test_nobody_is_shown_anothers_job(site: Site, action: str) -> None:
    archive.add_job(site, 1, b"a secret plan", who=ADA, name="hush")
    with pytest.raises(JobNotReadable) as caught:
        site.ask(f"archive.{action}", BELA, job="1")
    assert isinstance(caught.value, PermissionRefused)
    for word in ("plan", "hush", "ada"):
        assert word not in str(caught.value)
    assert site.ask(f"archive.{action}", ROOT, job="1")
    reused_uid = Caller(uid=ADA.uid, user="cora")
    with pytest.raises(JobNotReadable):
        site.ask(f"archive.{action}", reused_uid, job="1")


def test_a_script_whose_owner_is_unknown_is_the_operators(site: Site) -> None:
    site.append([archive.script_at(site, 1, b"early", NOVEMBER - timedelta(hours=1))])
    site.feed()
    with pytest.raises(JobNotReadable, match="owner of job 1 is not known yet"):
        site.ask("archive.show", ADA, job="1")
    assert site.ask("archive.show", ROOT, job="1").content.data == b"early"


def test_of_a_reused_id_the_newest_is_shown_and_others_are_mentioned(site: Site) -> None:
    archive.add_job(site, 1, b"old", ago=timedelta(days=30))
    archive.add_job(site, 1, b"new", ago=timedelta(days=1))
    answer = site.ask("archive.show", ADA, job="1")
    assert answer.content.data == b"new"
    assert [other.submit for other in answer.others] == [NOVEMBER - timedelta(days=30)]
    archive.add_job(site, 1, b"anothers", ago=timedelta(hours=1), who=BELA)
    assert site.ask("archive.show", ADA, job="1").content.data == b"new"


def test_an_array_task_shows_its_arrays_script(site: Site) -> None:
    archive.add_job(site, 10, b"array script", array_job_id=10, array_task="2")
    archive.add_job(site, 11, None, array_job_id=10, array_task="1")
    answer = site.ask("archive.show", ADA, job="10_1")
    assert answer.job.job == "10_1"
    assert answer.content.data == b"array script"
    assert answer.script_of == "10"
    assert "--array=1 " in site.ask("archive.show", ADA, job="10_1", sbatch=True).sbatch
    assert "--array=1-2 " in site.ask("archive.show", ADA, job="10", sbatch=True).sbatch
    [hit] = site.ask("archive.search", ADA, terms=["array"]).hits
    assert hit.job.job == "10"


def test_no_sbatch_submits_a_job_that_is_not_slurms(site: Site) -> None:
    archive.add_job(site, 10, b"plan")
    torque = ClusterSettings(scheduler="torque")
    site.context("archive").settings = msgspec.structs.replace(
        site.settings, cluster={"alpha": torque}
    )
    with pytest.raises(UsageError, match="is not a Slurm job"):
        site.ask("archive.show", ADA, job="10", sbatch=True)
    assert site.ask("archive.show", ADA, job="10").content.data == b"plan"


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["3", "1", "2", "7"], "1-3,7"),
        (["4", "[5-9:2,11%3]"], "4,5-9:2,11%3"),
        (["1,3,..."], "1,3"),
        ([""], ""),
    ],
)
def test_tasks_are_said_as_sbatch_takes_them(site: Site, tasks: list[str], said: str) -> None:
    archive.add_job(site, 1, None)
    [job] = site.context("archive").jobs.find("1")
    expected = [f"--array={said}"] if said else []
    assert [one.word for one in derive_options(job, tasks) if one.name == "array"] == expected


def test_a_job_without_a_script_is_shown_without(site: Site) -> None:
    archive.add_job(site, 1, None)
    answer = site.ask("archive.show", ADA, job="1")
    assert answer.content is None
    assert answer.job.kind == "interactive"
    with pytest.raises(NotArchived, match="interactive"):
        site.ask("archive.show", ADA, job="1", sbatch=True)
    with pytest.raises(NotArchived):
        site.ask("archive.env", ADA, job="1")


def test_a_changed_file_is_not_shown_as_the_script(site: Site) -> None:
    archive.add_job(site, 1, b"as it was")
    path = site.ask("archive.show", ADA, job="1").script.path
    archive.trim(site)
    Path(path).write_bytes(b"as it never was")
    with pytest.raises(ArchiveError, match="changed"):
        site.ask("archive.show", ADA, job="1")
    items, answer = site.stream("archive.verify", ROOT)
    assert answer.problems == 1
    assert [item.problem for item in items if hasattr(item, "problem")] == ["changed"]


def test_an_environment_is_shown_with_what_was_redacted(site: Site) -> None:
    archive.add_job(site, 1)
    answer = site.ask("archive.env", ADA, job="1")
    values = {variable.name: variable.value.data for variable in answer.variables}
    assert values["HOME"] == b"/home/ada"
    assert values["TEXT"] == b"a=b\nc\xff"
    assert [variable.name for variable in answer.variables if variable.redacted] == ["API_TOKEN"]
    assert answer.redacted == ("API_TOKEN",)
    some = site.ask("archive.env", ADA, job="1", names=["H*"])
    assert [variable.name for variable in some.variables] == ["HOME"]


def test_a_diff_says_what_differs(site: Site) -> None:
    archive.add_job(site, 1, b"one\ntwo\r\nthree")
    archive.add_job(site, 2, b"one\ntwo\r\nfour\n")
    answer = site.ask("archive.diff", ADA, left="1", right="2")
    assert not answer.identical
    assert answer.diff.data == (
        b"--- 1\n+++ 2\n@@ -1,3 +1,3 @@\n one\n two\r\n-three\n"
        b"\\ No newline at end of file\n+four\n"
    )
    same = site.ask("archive.diff", ADA, left="1", right="1", environments=True)
    assert same.identical
    assert same.diff.data == b""
    archive.add_job(site, 3, b"other", who=BELA)
    with pytest.raises(JobNotReadable):
        site.ask("archive.diff", ADA, left="1", right="3")


@pytest.mark.parametrize(
    "script",
    [
        b"#!/bin/sh\nsrun a\n",
        b"no end of line",
        b"\xff\0binary\n",
        b"END_OF_SCRIPT\ntext\nEND_OF_SCRIPT_\n",
        b"",
        b"$HOME `id` \\ 'quotes\"\n",
    ],
)
def test_what_would_submit_again_does(site: Site, tmp_path: Path, script: bytes) -> None:
    work = tmp_path / "work dir"
    work.mkdir()
    hostile = "na me'; touch owned; '"
    archive.add_job(
        site,
        1,
        script,
        name=hostile,
        work_dir=str(work),
        command="/home/ada/job.sh first second",
        time_limit_s=90061,
        nodes=2,
        tasks=4,
        cpus=8,
        tres_requested="cpu=8,gres/gpu=2",
        stdout="/home/ada/slurm-1.out",
        submit_line="sbatch --no-such-option x\ntouch owned",
    )
    text = site.ask("archive.show", ADA, job="1", sbatch=True).sbatch
    # In sbatch's place stands a program that notes how it was called.
    there = tmp_path / "bin"
    there.mkdir()
    sbatch = there / "sbatch"
    sbatch.write_text(
        '#!/bin/sh\npwd > "$NOTES/pwd"\nfor word; do printf "%s\\0" "$word"; done > "$NOTES/args"\n'
        'for word; do [ -f "$word" ] && cat "$word" > "$NOTES/script"; done\nexit 0\n'
    )
    sbatch.chmod(0o755)
    subprocess.run(
        ["sh"],
        input=text.encode(),
        check=True,
        timeout=20,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{there}:{os.environ['PATH']}", "NOTES": str(tmp_path)},
    )
    assert (tmp_path / "script").read_bytes() == script
    assert (tmp_path / "pwd").read_text().strip() == str(work)
    words = (tmp_path / "args").read_text().split("\0")[:-1]
    assert f"--job-name={hostile}" in words
    assert "--time=1-01:01:01" in words
    assert "--cpus-per-task=2" in words
    assert "--gpus=2" in words
    assert words[-2:] == ["first", "second"]
    assert not [word for word in words if word.startswith("--output")]
    assert not (tmp_path / "owned").exists()
    assert not (work / "owned").exists()


def test_a_secret_that_was_taken_out_is_pointed_at_where_a_job_is_submitted_again(
    site: Site,
) -> None:
    hole = REDACTED.decode()
    command = f"/home/ada/job.sh --password {hole} --key={hole} in.txt"
    archive.add_job(site, 1, command=command, submit_line=f"sbatch {command}")
    lines = site.ask("archive.show", ADA, job="1", sbatch=True).sbatch.splitlines()
    assert any("put yours in place of" in line for line in lines if line.startswith("#"))
    words = shlex.split(lines[-1])
    assert words[-4:] == ["--password", hole, f"--key={hole}", "in.txt"]


def test_only_a_whole_number_in_a_files_name_is_taken_for_the_jobs_id(site: Site) -> None:
    archive.add_job(site, 1, stdout="/data/run12.out", stderr="/data/run-1.err", submit_line="")
    last = site.ask("archive.show", ADA, job="1", sbatch=True).sbatch.splitlines()[-1]
    assert "--output=/data/run12.out" in last
    assert "--error=/data/run-%j.err" in last


def test_a_job_of_a_cluster_without_settings_is_submitted_again(site: Site) -> None:
    archive.add_job(site, 1, submit_line="", name="md")
    site.reopen(cluster={})
    last = site.ask("archive.show", ROOT, job="1", sbatch=True).sbatch.splitlines()[-1]
    assert "--job-name=md" in last
