"""Writes the output blocks of README and docs: each is what its commands print, in the demo.

A block that is generated has a comment before it, which says who types it::

    <!-- run as ada -->
    ```console
    $ steward archive list
    ...
    ```

``ada`` and ``bela`` are the demo's users, ``operator`` is whom the daemon runs
as, ``root`` has no configuration. ``exit 1`` behind the name is the exit code
that the last command has to have. Lines that begin with ``$`` are the
commands, all else is replaced by what they print. ``make docs`` does it; a
test compares what is written with what comes out, up to numbers. The tables
of settings are made of what the code says of them.
"""

import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import actions_reference
from settings_reference import reference
from steward.core.databases import write_table
from steward.demo import DemoSite
from steward.demo.components import BURST_JOB, OPENING_COMMANDS, PAID_JOB, write_rule
from steward.demo.site import SubmittedJob
from steward.web.api.endpoints import ENDPOINTS
from steward.web.api.responses import STREAM

ROOT = Path(__file__).parent.parent
DIRECTORY = "/tmp/steward-sandbox-0"  # noqa: S108 - a sandbox is made there with its own checks
"""Where the demo is in the text."""

SUBMITS = "get-started"
"""The page whose commands submit jobs."""

_BLOCK = re.compile(
    r"(<!-- run as (?P<who>\w+)(?:, exit (?P<code>\d+))? -->\n```console\n)(?P<text>.*?)(?=^```$)",
    re.MULTILINE | re.DOTALL,
)

_SETTINGS = re.compile(r"(?<=<!-- settings -->\n)(.*?)(?=<!-- end of settings -->)", re.DOTALL)
_ACTIONS = re.compile(r"(?<=<!-- actions -->\n)(.*?)(?=<!-- end of actions -->)", re.DOTALL)

_ENDPOINTS = re.compile(r"(?<=<!-- endpoints -->\n)(.*?)(?=<!-- end of endpoints -->)", re.DOTALL)

_DATABASES = re.compile(r"(?<=<!-- databases -->\n)(.*?)(?=<!-- end of databases -->)", re.DOTALL)

_SUBMITTED = re.compile(r"Submitted batch job (\d+)\n")

Run = Callable[[str, str], tuple[int, str]]
"""Runs a command as somebody: its exit code and what it printed."""


class DocsError(Exception):
    """Error: the output of a block's commands cannot be written."""


def pages() -> list[Path]:
    """Return README and all pages of docs; last the page whose jobs other pages would list."""
    docs = sorted((ROOT / "docs").glob("*.md"), key=lambda page: (page.stem == SUBMITS, page))
    return [ROOT / "README.md", *docs]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the user and the text of each generated block of a page."""
    for match in _BLOCK.finditer(text):
        yield match["who"], match["text"]


def refreshed(text: str, run: Run) -> str:
    """Return a page with new output in each generated block.

    Raises:
        DocsError: A command's exit code differs from that of its block.
    """

    def anew(match: "re.Match[str]") -> str:
        commands = [line[2:] for line in match["text"].splitlines() if line.startswith("$ ")]
        shown: list[str] = []
        for number, command in enumerate(commands, start=1):
            code, printed = run(match["who"], command)
            wanted = int(match["code"] or 0) if number == len(commands) else 0
            if code != wanted:
                raise DocsError(f"{command!r} ended with {code}, not {wanted}: {printed}")
            shown += [f"$ {command}", *(line.rstrip() for line in printed.splitlines())]
        return match[1] + "".join(f"{line}\n" for line in shown)

    return _BLOCK.sub(anew, text)


def with_settings(text: str) -> str:
    """Return a page with new tables of settings."""
    return _SETTINGS.sub(lambda _: f"\n{reference()}\n", text)


def with_actions(text: str) -> str:
    """Return a page with a new list of actions."""
    return _ACTIONS.sub(lambda _: f"\n{actions_reference.reference()}\n", text)


def with_endpoints(text: str) -> str:
    """Return a page with a new table of endpoints."""
    return _ENDPOINTS.sub(lambda _: f"\n{list_endpoints()}\n", text)


def with_databases(text: str) -> str:
    """Return a page with its table of databases written anew."""
    return _DATABASES.sub(lambda _: f"\n{write_table()}\n", text)


def list_endpoints() -> str:
    """Return the table of all endpoints: method and path, scope of a token, help."""
    lines = ["| request | scope | what it does |", "|---|---|---|"]
    for endpoint in sorted((*ENDPOINTS, STREAM), key=lambda one: (one.path, one.method)):
        action = endpoint.definition
        help_line = endpoint.help or action.help
        lines.append(f"| `{endpoint.method} {endpoint.path}` | {action.scope} | {help_line} |")
    return "\n".join([*lines, ""])


def running_in(site: DemoSite) -> Run:
    """Return a function that runs commands in a demo whose jobs have ended, in any directory.

    It waits for submitted jobs until Steward shows all of their records.
    """
    here = site.sandbox.directory

    def run(who: str, command: str) -> tuple[int, str]:
        argv = shlex.split(command.replace(DIRECTORY, here))
        done = site.run(argv, "" if who == "operator" else who)
        printed = (done.stdout + done.stderr).decode(errors="backslashreplace")
        if submitted := _SUBMITTED.fullmatch(printed):
            what = next(job.what for job in site.jobs if job.what.filename == argv[-1])
            job = SubmittedJob(job=int(submitted[1]), user=who, what=what)
            site.jobs.append(job)
            site.wait_for_jobs()
            site.wait_for_reports(job)
            if any(word.startswith("--account=") for word in argv):
                site.wait_for_charge(job)
        return done.returncode, printed.replace(here, DIRECTORY)

    return run


def open_site(directory: str = "", slurm_version: str = "") -> DemoSite:
    """Bring up a demo in which every command of the pages has something to show.

    Jobs have ended, one of them charged; a rule has drained a node that failed.
    """
    site = DemoSite.up(directory, slurm_version=slurm_version, with_slurmdbd=True, with_bank=True)
    try:
        site.start_daemon()
        if not site.bank.skip_reason:
            for command in OPENING_COMMANDS:
                site.run(shlex.split(command.format(owner=site.users[0]))).check_returncode()
            site.wait_for_gate()
        site.submit_all()
        site.wait_for_jobs()
        if not site.books.skip_reason:
            site.wait_for_reports(site.submit(BURST_JOB))
        if not site.bank.skip_reason:
            enforce = "steward bank mode enforce --reason demo"
            site.run(shlex.split(enforce)).check_returncode()
            site.wait_for_charge(site.submit(PAID_JOB))
        write_rule(site.rules)
        node = f"node{site.sandbox.plan.spec.nodes}"
        site.sandbox.stop_service(f"slurmd.{node}", signal.SIGKILL)
        site.wait_for_rule(node)
        site.sandbox.start_service(f"slurmd.{node}")
        site.wait_for_jobs()
    except BaseException:
        site.down()
        raise
    return site


def main() -> int:
    """Write every page again."""
    with open_site(DIRECTORY) as site:
        run = running_in(site)
        for page in pages():
            old = page.read_text(encoding="utf-8")
            new = with_databases(with_endpoints(with_actions(with_settings(refreshed(old, run)))))
            if new != old:
                page.write_text(new, encoding="utf-8")
                print(f"{page.relative_to(ROOT)} is written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
