"""Checks of the demo: each claim with a function that verifies it in files and by commands.

`list_checks` yields the claims in order; `require_that` raises `CheckFailed` if one does not hold.
The checks compare what Steward lists, prints and stores with what the demo's users submitted.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from steward.admin.journal import DeadAnswer
from steward.archive.requests import JobLine, SearchReply, ShowReply
from steward.core.errors import NotFound
from steward.demo.jobs import LARGE_SCRIPT_BYTES, PASSWORD
from steward.demo.site import DemoError, DemoSite, SubmittedJob

DENIED_CODE: Final = 1
"""Exit code of ``steward`` if permission is denied."""
DIFF_ERROR_CODE: Final = 2
"""Exit code of ``steward archive diff`` in that case, like diff(1) if it cannot compare."""
_MAX_PARALLEL_CHECKS: Final = 4

T = TypeVar("T")


class CheckFailed(DemoError):
    """A check of the demo failed."""


def require_that(condition: bool, message: str) -> None:
    """Raise CheckFailed unless ``condition`` holds.

    Raises:
        CheckFailed: The condition is false; ``message`` describes what was found.
    """
    if not condition:
        raise CheckFailed(message)


def run_on_each(check: Callable[[T], None], items: Iterable[T]) -> None:
    """Run a check on several things, some at a time: each check starts programs and waits.

    Raises:
        CheckFailed: The first failure.
    """
    pool = ThreadPoolExecutor(_MAX_PARALLEL_CHECKS)
    try:
        for _ in pool.map(check, items):
            pass
    finally:
        # After a failure the remaining checks are not needed.
        pool.shutdown(cancel_futures=True)


ClaimCheck = tuple[str, Callable[[], None]]


def list_checks(site: DemoSite, lines: Sequence[JobLine]) -> Iterator[ClaimCheck]:
    """Yield every check: the claim, and the function that verifies it.

    Args:
        site: The demo's site, after all jobs have ended and are in the archive.
        lines: The jobs as ``archive list`` shows them.
    """
    yield (
        f"{len(lines)} jobs are listed, with owner and state as in Slurm",
        lambda: _check_list(site, lines),
    )
    yield (
        f"every archived script equals the submitted one, also that of {LARGE_SCRIPT_BYTES} bytes",
        lambda: _check_scripts(site),
    )
    yield (
        "the environment is unchanged: newlines, '=' and bytes that are not UTF-8",
        lambda: _check_environment(site),
    )
    yield (
        "no file of Steward contains the password: archive, journal, databases, log",
        lambda: _check_no_secret(site),
    )
    yield "a search for text of one script finds that script alone", lambda: _check_search(site)
    if len(site.users) > 1:
        yield (
            f"{site.users[1]} cannot read {site.users[0]}'s script by any command, nor its file",
            lambda: _check_permissions(site),
        )
    yield (
        "every checksum matches, and there are no dead letters (rejected events)",
        lambda: _check_integrity(site),
    )
    yield "the daemon reported no error", lambda: _check_log(site)


def _check_list(site: DemoSite, lines: Sequence[JobLine]) -> None:
    """Check that every job is listed with its owner, state and exit code."""
    expected = sum(job.what.tasks or 1 for job in site.jobs)
    require_that(len(lines) == expected, f"{len(lines)} jobs are listed, not {expected}")
    for job in site.jobs:
        job_lines = [line for line in lines if line.job.partition("_")[0] == str(job.job)]
        require_that(
            len(job_lines) == (job.what.tasks or 1),
            f"job {job.job} is listed {len(job_lines)} times",
        )
        for line in job_lines:
            actual_line = (line.user, line.name, line.state, line.exit_code or 0, line.kind)
            kind = "interactive" if job.what.script is None else "batch"
            expected_line = (job.user, job.what.name, job.what.state, job.what.exit_code, kind)
            require_that(
                actual_line == expected_line,
                f"job {line.job} is listed as {actual_line}, not {expected_line}",
            )


def _list_with_script(site: DemoSite) -> list[SubmittedJob]:
    return [job for job in site.jobs if job.what.script is not None]


def _check_scripts(site: DemoSite) -> None:
    """Check that each stored script equals the submitted one."""

    def look(job: SubmittedJob) -> None:
        result = site.run_steward(["archive", "show", str(job.job), "--script"], job.user)
        require_that(result.returncode == 0, f"job {job.job}: {result.stderr.decode()}")
        require_that(result.stdout == job.what.script, f"the script of job {job.job} differs")
        with open(get_script_path(site, job), "rb") as file:
            require_that(file.read() == job.what.script, f"the file of job {job.job} differs")

    run_on_each(look, _list_with_script(site))


def get_script_path(site: DemoSite, job: SubmittedJob) -> str:
    """Return the path of a job's stored script.

    Raises:
        DemoError: The script is not stored.
    """
    try:
        reply: ShowReply = site.call_action("archive.show", job=str(job.job))
    except NotFound as error:
        raise CheckFailed(f"job {job.job} is not archived: {error}") from error
    if reply.script is None or not reply.script.path:
        raise CheckFailed(f"job {job.job} has no script")
    return reply.script.path


def _check_environment(site: DemoSite) -> None:
    """Check the stored environment: odd bytes kept, secrets redacted."""
    job = site.get_job("train")
    result = site.run_steward(["archive", "env", str(job.job), "--null"], job.user)
    variables = dict(entry.partition(b"=")[::2] for entry in result.stdout.split(b"\0"))
    for name, value in job.what.env.items():
        stored_value = variables.get(name.encode())
        if PASSWORD in value:
            require_that(
                stored_value is not None and b"redacted" in stored_value,
                f"{name} is stored as {stored_value!r}",
            )
        else:
            require_that(
                stored_value == value.encode("utf-8", "surrogateescape"),
                f"{name} is stored as {stored_value!r}",
            )


def _check_no_secret(site: DemoSite) -> None:
    """Check that no file of Steward's holds the password."""
    secret = PASSWORD.encode()
    file_count = 0
    for top_directory in site.written_dirs:
        for directory, _, names in os.walk(top_directory):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.isfile(path):
                    file_count += 1
                    with open(path, "rb") as file:
                        require_that(secret not in file.read(), f"the password is in {path}")
    require_that(file_count > len(site.jobs), f"found only {file_count} files to check")


def _check_search(site: DemoSite) -> None:
    """Check that a search finds exactly the right script."""

    def look(case: tuple[str, str]) -> None:
        name, text = case
        job = site.get_job(name)
        result = site.run_steward(["archive", "search", text, "--json"], job.user)
        require_that(result.returncode == 0, result.stderr.decode())
        hits = msgspec.json.decode(result.stdout, type=SearchReply).hits
        job_ids = {hit.job.job.partition("_")[0] for hit in hits}
        require_that(job_ids == {str(job.job)}, f"{text!r} was found in {sorted(job_ids)}")

    cases = (
        ("relax-finer", "emtol=10.0"),
        ("train", "y[2] - y[0]"),
        ("sweep", "280 + 10 * SLURM_ARRAY_TASK_ID"),
        ("broken", "/no/such/input"),
    )
    run_on_each(look, cases)


def _check_permissions(site: DemoSite) -> None:
    """Check that another user can read neither script nor file."""
    other_user = site.users[1]
    first_job, second_job = site.get_job("train"), site.get_job("relax")
    first_id = str(first_job.job)

    def look(arguments: Sequence[str]) -> None:
        result = site.run_steward(["archive", *arguments], other_user)
        command = f"{other_user}: steward archive {' '.join(arguments)}"
        expected_code = DIFF_ERROR_CODE if arguments[0] == "diff" else DENIED_CODE
        require_that(
            result.returncode == expected_code, f"{command} ended with {result.returncode}"
        )
        require_that(b"slope" not in result.stdout, f"{command} showed the script")

    commands = (
        ("show", first_id),
        ("show", first_id, "--script"),
        ("show", first_id, "--sbatch"),
        ("env", first_id),
        ("diff", first_id, str(second_job.job)),
    )
    run_on_each(look, commands)
    result = site.run_steward(["archive", "search", "slope", "--json"], other_user)
    hits = msgspec.json.decode(result.stdout, type=SearchReply).hits
    require_that(not hits, f"{other_user} found {first_job.user}'s script")
    result = site.run(["cat", get_script_path(site, first_job)], other_user)
    require_that(
        result.returncode != 0 and not result.stdout, f"{other_user} read {first_job.user}'s file"
    )


def _check_integrity(site: DemoSite) -> None:
    """Check that checksums match and there are no dead letters."""
    verification = site.run_steward(["archive", "verify"])
    require_that(verification.returncode == 0, (verification.stdout + verification.stderr).decode())
    result = site.run_steward(["journal", "dead", "--json"])
    dead_letters = msgspec.json.decode(result.stdout, type=DeadAnswer).letters
    require_that(not dead_letters, f"{len(dead_letters)} events are in the dead letters")


def _check_log(site: DemoSite) -> None:
    """Check that the daemon's log has no warning or error."""
    with open(site.log_path, encoding="utf-8", errors="replace") as file:
        problems = [line for line in file if " error " in line or " warning " in line]
    require_that(not problems, "".join(problems[:3]).strip())
