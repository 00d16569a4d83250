"""Split of SubmitLine into sbatch's words, with any characters."""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.resubmission import (
    derive_options,
    parse_submit_line,
    write_resubmission_script,
)
from steward.core.events import utc_now
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED
from steward.jobs import Job
from steward.slurm.sbatch_options import ALL_OPTIONS

SCRIPT = b"#!/bin/sh\ntrue\n"
WRAPPED = b"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n%s\n\n"
HOLE = REDACTED.decode()


def words(line: str, script: bytes = SCRIPT, **fields: Any) -> list[str]:
    read = parse_submit_line(line, JobRecord(job_id=1, **fields), script)
    assert read is not None
    components = [[option.word for option in given] for given in read.components]
    found = components[0]
    for more in components[1:]:
        found += [":", *more]
    return [*found, "|", *read.arguments, *(f"?{doubt}" for doubt in read.doubtful_options)]


@pytest.mark.parametrize(
    ("line", "fields", "expected"),
    [
        ("sbatch", {}, "|"),
        ("/usr/bin/sbatch -n4 -c 2 --mem=1G", {}, "--ntasks=4 --cpus-per-task=2 --mem=1G |"),
        ("sbatch -Hn 4 --tasks-per-node 2", {}, "--hold --ntasks=4 --ntasks-per-node=2 |"),
        ("sbatch --exclusive --requeue x.sh", {}, "--exclusive --requeue | ?script"),
        ("sbatch -n1 x.sh -n 4", {"command": "/home/x.sh -n 4"}, "--ntasks=1 | -n 4"),
        ("sbatch -n1 ./x.sh -n 4", {"command": "/home/x.sh -n 4"}, "--ntasks=1 | -n 4"),
        ("sbatch -n1 : -n 2 x.sh", {"command": "/x.sh"}, "--ntasks=1 : --ntasks=2 |"),
        (f"sbatch --export=A={HOLE} -n1", {}, f"'--export=A={HOLE}' --ntasks=1 |"),
        ("sbatch --comment=a b -n1", {"comment": "a b"}, "'--comment=a b' --ntasks=1 |"),
        ("sbatch -J a -n 4 -n1", {"name": "a -n 4"}, "'--job-name=a -n 4' --ntasks=1 |"),
        (
            "sbatch -Ja  b -n1 x",
            {"name": "a  b", "command": "/x"},
            "'--job-name=a  b' --ntasks=1 |",
        ),
        (
            "sbatch --export ALL,A=x y z -n 1 x.sh",
            {"command": "/x.sh"},
            "'--export=ALL,A=x y z' --ntasks=1 | ?--export",
        ),
        (
            "sbatch --comment=a --no-such -n1 x.sh",
            {"command": "/x.sh"},
            "'--comment=a --no-such' --ntasks=1 | ?--comment",
        ),
    ],
)
def test_a_line_is_parted_by_the_table_and_the_record(
    line: str, fields: dict[str, Any], expected: str
) -> None:
    assert words(line, **fields) == shlex.split(expected)


def test_a_wrapped_command_is_no_script_and_no_option() -> None:
    script = WRAPPED % b"srun -n 4 a; true --x"
    line = "sbatch --wrap srun -n 4 a; true --x -n2"
    assert words(line, script) == ["--wrap=srun -n 4 a; true --x", "--ntasks=2", "|"]


@pytest.mark.parametrize(
    "line", ["", "srun -n4 a", "sbatch --no-such x", "sbatch -Y", "sbatch -n", "sbatch --mem"]
)
def test_a_line_that_cannot_be_read_is_none(line: str) -> None:
    assert parse_submit_line(line, JobRecord(job_id=1), SCRIPT) is None


@given(st.text(max_size=200), st.text(max_size=50), st.text(max_size=20))
def test_any_line_is_read_or_is_none(line: str, command: str, name: str) -> None:
    record = JobRecord(job_id=1, command=command, name=name, comment=name)
    for text in (line, f"sbatch {line}", f"sbatch -J {name} {line} {command}"):
        parse_submit_line(text, record, SCRIPT)


def job_of(record: JobRecord) -> Job:
    return Job(
        number=1, cluster="c1", job_id=1, first_submit=utc_now(), verified=True, record=record
    )


def test_without_a_line_every_option_that_slurm_shows_is_given() -> None:
    record = JobRecord(
        job_id=1,
        tasks=2,
        cpus=8,
        requested_cpus=2,
        nodes=2,
        tres_requested="cpu=2,mem=600M,node=2,gres/gpu=4",
        tres_per_node="gres/gpu:a100:2,gres:shard:1",
        tres_per_task="gres/gpu=1",
        constraints="fast&big",
        licenses="matlab:2",
        oversubscribe="USER",
        wckey="key",
    )
    found = derive_options(job_of(record))
    assert {option.name for option in found} <= ALL_OPTIONS
    assert {option.word for option in found} == {
        *("--cpus-per-task=1", "--ntasks=2", "--nodes=2", "--mem=300M"),
        *("--gres=gpu:a100:2,shard:1", "--gpus-per-task=1"),
        *("--constraint=fast&big", "--licenses=matlab:2", "--exclusive=user", "--wckey=key"),
    }


def test_variables_of_sbatch_are_those_of_the_submission() -> None:
    entries = [
        *(b"SBATCH_TIMELIMIT=5", b"SBATCH_COMMENT=a'b; touch owned", b"HOME=/home/ada"),
        *(b"SBATCH_x'y=1", b"SBATCH_WCKEY=" + REDACTED, b"SBATCH_EXTRA=\xff"),
    ]
    environment = b"\4\0\0\0" + b"".join(entry + b"\0" for entry in entries)
    text = write_resubmission_script(job_of(JobRecord(job_id=1)), SCRIPT, (), environment)
    exported = [shlex.split(line) for line in text.splitlines() if line.startswith("export")]
    assert exported == [
        ["export", "SBATCH_TIMELIMIT=5"],
        ["export", "SBATCH_COMMENT=a'b; touch owned"],
    ]
    assert "set SBATCH_WCKEY to its former value" in text
    assert "SBATCH_EXTRA is not UTF-8" in text


def last_words(record: JobRecord) -> list[str]:
    """Return the words of the sbatch command in a job's resubmission script."""
    text = write_resubmission_script(job_of(record), SCRIPT)
    return shlex.split(text.splitlines()[-1])


def test_a_job_with_a_submit_line_is_submitted_with_its_options_alone() -> None:
    record = JobRecord(
        job_id=1, submit_line="sbatch -n4 x.sh in.dat", command="/x.sh in.dat", partition="long"
    )
    assert last_words(record) == ["sbatch", "--ntasks=4", "$script", "in.dat"]


def test_the_output_path_of_an_array_task_is_left_to_its_script() -> None:
    task = JobRecord(job_id=12, array_job_id=11, array_task="1", stdout="/home/ada/out-11_1.txt")
    assert last_words(task) == ["sbatch", "$script"]
    alone = JobRecord(job_id=1, stdout="/home/ada/out-1.txt")
    assert last_words(alone) == ["sbatch", "--output=/home/ada/out-%j.txt", "$script"]
