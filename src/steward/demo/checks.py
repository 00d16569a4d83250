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
_MOST_AT_ONCE: Final = 4

T = TypeVar("T")


class CheckFailed(DemoError):
    """A check of the demo failed."""


def require_that(condition: bool, what: str) -> None:
    """Raise CheckFailed unless ``condition`` holds.

    Raises:
        CheckFailed: The condition is false; ``what`` describes what was found.
    """
    if not condition:
        raise CheckFailed(what)


def run_on_each(look: Callable[[T], None], things: Iterable[T]) -> None:
    """Run a check on several things, some at a time: each check starts programs and waits.

    Raises:
        CheckFailed: The first failure.
    """
    pool = ThreadPoolExecutor(_MOST_AT_ONCE)
    try:
        for _ in pool.map(look, things):
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
        f"{len(lines)} jobs are listed, with the owner and the state that Slurm gave them",
        lambda: _check_list(site, lines),
    )
    yield (
        (
            f"every script is byte for byte what was submitted, the one of {LARGE_SCRIPT_BYTES} "
            "bytes, too"
        ),
        lambda: _check_scripts(site),
    )
    yield (
        "newlines, '=' and bytes that are not UTF-8 came through in the environment",
        lambda: _check_environment(site),
    )
    yield (
        "the password is in none of Steward's files: archive, journal, databases, log",
        lambda: _check_no_secret(site),
    )
    yield "the search finds each script by a text in it, and no other", lambda: _check_search(site)
    if len(site.users) > 1:
        yield (
            f"{site.users[1]} cannot read {site.users[0]}'s script by any command, nor its file",
            lambda: _check_permissions(site),
        )
    yield (
        "every file has its checksum, and nothing was set aside",
        lambda: _check_integrity(site),
    )
    yield "the daemon reported no error", lambda: _check_log(site)


def _check_list(site: DemoSite, lines: Sequence[JobLine]) -> None:
    """Check that every job is listed with its owner, state and exit code."""
    expected = sum(one.what.tasks or 1 for one in site.jobs)
    require_that(len(lines) == expected, f"{len(lines)} jobs are listed, not {expected}")
    for one in site.jobs:
        found = [line for line in lines if line.job.partition("_")[0] == str(one.job)]
        require_that(
            len(found) == (one.what.tasks or 1), f"job {one.job} is listed {len(found)} times"
        )
        for line in found:
            seen = (line.user, line.name, line.state, line.exit_code or 0, line.kind)
            kind = "interactive" if one.what.script is None else "batch"
            wanted = (one.user, one.what.name, one.what.state, one.what.exit_code, kind)
            require_that(seen == wanted, f"job {line.job} is listed as {seen}, not {wanted}")


def _list_with_script(site: DemoSite) -> list[SubmittedJob]:
    return [one for one in site.jobs if one.what.script is not None]


def _check_scripts(site: DemoSite) -> None:
    """Check that each stored script equals the submitted one."""

    def look(one: SubmittedJob) -> None:
        printed = site.steward(["archive", "show", str(one.job), "--script"], one.user)
        require_that(printed.returncode == 0, f"job {one.job}: {printed.stderr.decode()}")
        require_that(printed.stdout == one.what.script, f"the script of {one.job} is another one")
        with open(get_script_path(site, one), "rb") as file:
            require_that(file.read() == one.what.script, f"the file of {one.job} is another one")

    run_on_each(look, _list_with_script(site))


def get_script_path(site: DemoSite, one: SubmittedJob) -> str:
    """Return the path of a job's stored script.

    Raises:
        DemoError: The script is not stored.
    """
    try:
        answer: ShowReply = site.ask("archive.show", job=str(one.job))
    except NotFound as error:
        raise CheckFailed(f"job {one.job} is not there: {error}") from error
    if answer.script is None or not answer.script.path:
        raise CheckFailed(f"job {one.job} has no script")
    return answer.script.path


def _check_environment(site: DemoSite) -> None:
    """Check the stored environment: odd bytes kept, secrets redacted."""
    one = site.job("train")
    printed = site.steward(["archive", "env", str(one.job), "--null"], one.user)
    variables = dict(entry.partition(b"=")[::2] for entry in printed.stdout.split(b"\0"))
    for name, value in one.what.env.items():
        kept = variables.get(name.encode())
        if PASSWORD in value:
            require_that(kept is not None and b"redacted" in kept, f"{name} is kept as {kept!r}")
        else:
            require_that(
                kept == value.encode("utf-8", "surrogateescape"), f"{name} is kept as {kept!r}"
            )


def _check_no_secret(site: DemoSite) -> None:
    """Check that no file of Steward's holds the password."""
    secret = PASSWORD.encode()
    seen = 0
    for top in site.kept_directories:
        for directory, _, names in os.walk(top):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.isfile(path):
                    seen += 1
                    with open(path, "rb") as file:
                        require_that(secret not in file.read(), f"the password is in {path}")
    require_that(seen > len(site.jobs), f"only {seen} files were there to look at")


def _check_search(site: DemoSite) -> None:
    """Check that a search finds exactly the right script."""

    def look(sought: tuple[str, str]) -> None:
        name, text = sought
        one = site.job(name)
        printed = site.steward(["archive", "search", text, "--json"], one.user)
        require_that(printed.returncode == 0, printed.stderr.decode())
        hits = msgspec.json.decode(printed.stdout, type=SearchReply).hits
        found = {hit.job.job.partition("_")[0] for hit in hits}
        require_that(found == {str(one.job)}, f"{text!r} was found in {sorted(found)}")

    texts = (
        ("relax-finer", "emtol=10.0"),
        ("train", "y[2] - y[0]"),
        ("sweep", "280 + 10 * SLURM_ARRAY_TASK_ID"),
        ("broken", "/no/such/input"),
    )
    run_on_each(look, texts)


def _check_permissions(site: DemoSite) -> None:
    """Check that another user can read neither script nor file."""
    other = site.users[1]
    one, another = site.job("train"), site.job("relax")
    job = str(one.job)

    def look(arguments: Sequence[str]) -> None:
        tried = site.steward(["archive", *arguments], other)
        what = f"{other}: steward archive {' '.join(arguments)}"
        wanted = DIFF_ERROR_CODE if arguments[0] == "diff" else DENIED_CODE
        require_that(tried.returncode == wanted, f"{what} ended with {tried.returncode}")
        require_that(b"slope" not in tried.stdout, f"{what} showed the script")

    commands = (
        ("show", job),
        ("show", job, "--script"),
        ("show", job, "--sbatch"),
        ("env", job),
        ("diff", job, str(another.job)),
    )
    run_on_each(look, commands)
    tried = site.steward(["archive", "search", "slope", "--json"], other)
    hits = msgspec.json.decode(tried.stdout, type=SearchReply).hits
    require_that(not hits, f"{other} found {one.user}'s script")
    tried = site.run(["cat", get_script_path(site, one)], other)
    require_that(tried.returncode != 0 and not tried.stdout, f"{other} read {one.user}'s file")


def _check_integrity(site: DemoSite) -> None:
    """Check that checksums match and there are no dead letters."""
    verified = site.steward(["archive", "verify"])
    require_that(verified.returncode == 0, (verified.stdout + verified.stderr).decode())
    printed = site.steward(["journal", "dead", "--json"])
    letters = msgspec.json.decode(printed.stdout, type=DeadAnswer).letters
    require_that(not letters, f"{len(letters)} events were set aside")


def _check_log(site: DemoSite) -> None:
    """Check that the daemon's log has no warning or error."""
    with open(site.log, encoding="utf-8", errors="replace") as file:
        loud = [line for line in file if " error " in line or " warning " in line]
    require_that(not loud, "".join(loud[:3]).strip())
