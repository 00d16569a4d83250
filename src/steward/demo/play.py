"""Script of the demo: the order in which everything is run, shown and checked.

`DemoPrinter` prints headings, prompts and results; `print_next_steps` prints what to try
afterwards. `run_demo` brings up the site (`site.py`), submits jobs, runs commands before the
reader's eyes and runs the checks (`checks.py`). The ``_show_...`` functions of the parts return how
many checks failed.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from steward.archive.requests import JobLine
from steward.demo import checks
from steward.demo.jobs import list_submissions
from steward.demo.parts import (
    ACCOUNT,
    BURST_BYTES,
    BURST_JOB,
    OPENING_COMMANDS,
    PAID_JOB,
    SBATCH_REJECTED,
    UNAFFORDABLE,
    UNANSWERED_S,
    get_page_peak,
    is_ledger_sound,
    write_rule,
)
from steward.demo.parts import PAGES_USER as WEB_USER
from steward.demo.site import DemoSite
from steward.sandbox import get_default_directory
from steward.sandbox.layout import find_free_directory
from steward.web.settings import WebSettings

_WIDTH = 100


class DemoPrinter:
    """Printer of the demo: headings, paragraphs, prompts and results on standard output."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._width = min(_WIDTH, self._console.width)

    def act(self, title: str, text: str = "") -> None:
        """Print a heading and an introduction.

        Args:
            title: The heading.
            text: What the reader is about to see, and why.
        """
        self._console.print()
        if self.is_terminal:
            rule = Rule(Text(title, style="bold"), align="left", style="dim")
            self._console.print(rule, width=self._width)
        else:
            self._console.print(f"== {title}")
        if text:
            self.say(text)
        self.flush()

    def say(self, text: str) -> None:
        """Print a wrapped paragraph."""
        for line in textwrap.wrap(text, self._width):
            self._console.print(line)

    def line(self, text: str, *, style: str = "") -> None:
        """Print one line as it is."""
        self._console.print(Text(text, style=style))

    def prompt(self, user: str, command: str, mark: str = "$") -> None:
        """Print a command as a user types it; its output follows."""
        self._console.print()
        line = Text(f"{user}{mark} ", style="bold cyan")
        self._console.print(line.append(command, style="bold default"))
        self.flush()

    def result(self, good: bool, what: str) -> None:
        """Print the result of one check."""
        mark = Text("   ok  " if good else "FAILED ", style="green" if good else "bold red")
        self._console.print(mark.append(what, style="default not bold"))
        self.flush()

    @contextmanager
    def working(self, what: str, done: str) -> Iterator[None]:
        """Show progress during the block, then how long it took.

        Args:
            what: The text shown meanwhile.
            done: The text shown afterwards.
        """
        began = time.monotonic()
        with self._console.status(what) if self.is_terminal else nullcontext():
            yield
        self.line(f"{done} ({time.monotonic() - began:.1f} s)")
        self.flush()

    def flush(self) -> None:
        """Flush the output before another program writes."""
        self._console.file.flush()


NextStep = tuple[str, str]
"""A purpose, and the command or link for it."""


def print_next_steps(stage: DemoPrinter, site: DemoSite, failed: int) -> None:
    """Print what to try next, or how many checks failed.

    Args:
        stage: The printer.
        site: The demo's site.
        failed: Number of failed checks; if not 0, only that is printed.
    """
    if failed:
        stage.act("Not everything was as it should be")
        stage.line(f"{failed} {'check' if failed == 1 else 'checks'} failed, see above.")
        return
    if site.keep:
        stage.act("What to open and type next", "All of it stays up.")
        choices = _list_steps_while_up(site)
    else:
        stage.act("What to type next")
        choices = _list_steps_after_end()
    for text, command in choices:
        if text:
            stage.line(text)
        stage.line(f"  {command}", style="bold")


def _list_steps_after_end() -> Iterator[NextStep]:
    """Yield next steps after the demo was removed."""
    me = _get_command_name()
    yield (
        "The same, left up: to be clicked through in a browser, and to be gone on with:",
        ("make demo KEEP=1"),
    )
    yield (
        "Your own cluster, where nothing is changed (as root or SlurmUser, on its host):",
        (f"{me} archive watch --once --cluster NAME --archive DIR"),
    )
    yield "What else there is:", f"{me} --help"


def _list_steps_while_up(site: DemoSite) -> Iterator[NextStep]:
    """Yield next steps for a demo that stays up."""
    me = _get_command_name()
    is_usual = site.sandbox.directory == get_default_directory()
    where = "" if is_usual else f" --dir {site.sandbox.directory}"
    inside = f"-- env STEWARD_SOCKET={site.socket}"
    yield from _list_links(site, f"{me} sandbox run{where} --user {site.users[0]} {inside} steward")
    yield (
        "A shell as one of its users, to submit and look:",
        (f"{me} sandbox run{where} --user {site.users[-1]} {inside} bash"),
    )
    yield (
        "The operators' view, how Steward itself stands, and its log:",
        (f"{me} archive list --config {site.config}"),
    )
    yield "", f"{me} status --config {site.config}"
    yield "", f"less {site.log}"
    if not site.bank.trouble:
        yield (
            "What accounts have, and where it went:",
            (f"{me} bank balance --config {site.config}"),
        )
        yield "", f"{me} bank statement {ACCOUNT} --config {site.config}"
    yield "The end of it, with all that is in it:", f"{me} sandbox down{where}"


def _list_links(site: DemoSite, as_user: str) -> Iterator[NextStep]:
    """Yield links that open the web pages; none if there are no pages."""
    if site.pages.trouble:
        return
    first = site.users[0]
    minutes = round(WebSettings().login_s / 60)
    each = f"each link opens them once, within {minutes} minutes"
    yield f"The pages, in a browser on this host; {each}. As {first}:", site.link(first)
    yield "As an operator, to see the cluster and Steward itself as well:", site.link()
    port = site.pages.url.rpartition(":")[2]
    yield (
        "From a browser elsewhere, run this there first, and open the links then:",
        f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}",
    )
    yield f"More such links, as {first} and as an operator:", f"{as_user} login"
    yield "", f"{_get_command_name()} login --config {site.config}"


def _get_command_name() -> str:
    """Return the command that starts this program from here."""
    found = shutil.which("steward")
    if found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0]):
        return "steward"
    return os.path.relpath(sys.argv[0]) if os.path.isfile(sys.argv[0]) else "steward"


_DIFF_CODE: Final = 1


def run_demo(*, keep: bool = False, directory: str = "", slurm: str = "") -> int:
    """Run the whole demo.

    Args:
        keep: Whether the cluster, the daemon and the archive stay up afterwards.
        directory: Directory of everything. If empty: a new temporary one; with ``keep``, the
            directory of ``steward sandbox``, or one beside it.
        slurm: Version of Slurm; if empty, the installed one.

    Returns:
        Number of failed checks.

    Raises:
        SandboxError: The cluster does not come up.
        DemoError: The demo fails before the checks.
    """
    stage = DemoPrinter()
    stage.say(
        "Steward keeps the script and the environment of every job that Slurm runs. This demo "
        "brings up a real Slurm cluster of its own, has jobs submitted to it, and shows what is "
        "kept of them. It touches nothing outside of its own directory."
    )
    if keep and not directory:
        directory = find_free_directory()
    with _open_site(stage, directory, keep, slurm) as site:
        _open_bank(stage, site)
        _submit_jobs(stage, site)
        with stage.working("Waiting for the jobs to end …", "All jobs have ended and are kept"):
            lines = site.wait_for_jobs()
        _show_archive(stage, site)
        failed = _show_accounting(stage, site)
        # Slurm takes a while to notice.
        node = _kill_node(stage, site)
        failed += _show_billing(stage, site)
        failed += _show_pages(stage, site)
        failed += _show_rule(stage, site, node)
        failed += _run_checks(stage, site, lines)
        if not keep:
            failed += _stop_daemon(stage, site)
        print_next_steps(stage, site, failed)
        return failed


@contextlib.contextmanager
def _open_site(stage: DemoPrinter, directory: str, keep: bool, slurm: str) -> Iterator[DemoSite]:
    """Bring up a site with a running daemon; end it after the block, unless it is kept."""
    stage.act("A Slurm cluster, and Steward in it")
    site: DemoSite | None = None
    try:
        with stage.working("Bringing up Slurm …", "slurmctld, slurmd and munge are up"):
            site = DemoSite.up(directory, keep=keep, slurm=slurm, booked=True, paid=True)
        cluster = site.sandbox
        names = " and ".join(site.users)
        stage.say(
            f"Slurm {cluster.plan.slurm_version} in {cluster.directory}: "
            f"{cluster.plan.spec.nodes} nodes, jobs by {names}."
        )
        with stage.working("Starting the daemon …", "The daemon answers"):
            stage.prompt(
                site.steward_user or site.users[0], f"steward serve --config {site.config}"
            )
            site.serve()
        yield site
    except BaseException:
        if site is not None:
            site.down()
        raise
    if not keep:
        site.down()


def _open_bank(stage: DemoPrinter, site: DemoSite) -> None:
    """Set a rate, and deposit SU in an account."""
    if site.bank.trouble:
        return
    stage.act(
        "A bank",
        "What a CPU costs for an hour, and an account with 500 units. Nothing is refused yet: a "
        "new bank only observes.",
    )
    for command in OPENING_COMMANDS:
        _run_command(stage, site, "", command.format(owner=site.users[0]))
    with stage.working("Waiting for the gate ...", "slurmctld can ask the gate"):
        site.wait_for_gate()


def _submit_jobs(stage: DemoPrinter, site: DemoSite) -> None:
    """Submit all jobs, showing each command."""
    who = "Two ordinary users submit jobs" if len(site.users) > 1 else "Jobs are submitted"
    stage.act(who, "Slurm writes each script to its spool, and removes it when the job is over.")
    for what in list_submissions():
        one = site.submit(what)
        stage.prompt(one.user, what.typed)
        stage.line(f"{f'job {one.job}':<8} {what.about}", style="dim")


def _show_archive(stage: DemoPrinter, site: DemoSite) -> None:
    """Show the archive: list, script, environment, search, diff, permissions."""
    first = site.users[0]
    relax, finer, train = (site.job(name).job for name in ("relax", "relax-finer", "train"))
    stage.act("What is kept", "The jobs as operators see them; the interactive one has no script.")
    _run_command(stage, site, "", "steward archive list")
    stage.act("One job, and the script it ran")
    _run_command(stage, site, first, f"steward archive show {relax}")
    stage.act(
        "The environment it was submitted with",
        "Just these variables. One secret is known by its variable's name, the other by its "
        "look; neither was ever written to a file of Steward's.",
    )
    names = " ".join(site.job("train").what.env)
    _run_command(stage, site, first, f"steward archive env {train} {names}")
    stage.act("Search in what was run", "Any text, as it is written: a path, a module, an option.")
    _run_command(stage, site, first, "steward archive search gromacs/2024.2")
    stage.act("What changed from one job to the next?")
    _run_command(stage, site, first, f"steward archive diff {relax} {finer}", _DIFF_CODE)
    if len(site.users) > 1:
        stage.act("Everybody's own", f"Job {relax} is {first}'s, so {site.users[1]} is refused.")
        _run_command(
            stage, site, site.users[1], f"steward archive show {relax}", checks.DENIED_CODE
        )
    _show_files(stage, site)


def _show_files(stage: DemoPrinter, site: DemoSite) -> None:
    """Show the archived files and their permissions."""
    stage.act(
        "Where it is",
        "Plain files, which outlive Steward: the script, the environment in slurmctld's own "
        "format, and a line of JSON for each fact. An owner may read them, nobody else.",
    )
    one = site.job("relax")
    path = checks.get_script_path(site, one)
    _run_command(stage, site, "", f"ls -l {os.path.dirname(path)}")
    if _has_acl(path) and len(site.users) > 1:
        _run_command(stage, site, one.user, f"tail -n 3 {path}")
        _run_command(stage, site, site.users[1], f"tail -n 3 {path}", 1)


def _show_accounting(stage: DemoPrinter, site: DemoSite) -> int:
    """Show the accounting record of a short job; return the number of failures."""
    stage.act(
        "What a job used",
        "A short job that holds 300 MB for a moment. Nodes report on each task when it is reaped, "
        "with what the kernel counted, so nothing is too short to be seen.",
    )
    if site.books.trouble:
        stage.line(f"Left out here: {site.books.trouble}.")
        return 0
    one = site.order(BURST_JOB)
    stage.prompt(one.user, BURST_JOB.typed)
    stage.line(f"{f'job {one.job}':<8} {BURST_JOB.about}", style="dim")
    with stage.working("Waiting for the node's report ...", "The node has told of it"):
        page = site.wait_for_books(one)
    if site.sandbox.plan.spec.accounting:
        stage.say(
            "Slurm's own books, from samples of /proc every 30 seconds, which is its default:"
        )
        _run_command(
            stage, site, one.user, f"sacct -j {one.job} -o jobid,elapsed,maxrss,totalcpu,state"
        )
    else:
        stage.say("(slurmdbd is not installed, so Slurm's own books cannot be shown beside it.)")
    _run_command(stage, site, one.user, f"steward job {one.job}")
    _run_command(
        stage,
        site,
        one.user,
        f"steward sacct -j {one.job} -o jobid,elapsed,maxrss,totalcpu,state",
    )
    is_right = get_page_peak(page) >= BURST_BYTES
    stage.result(is_right, "the 300 MB that a job held for a moment are in its books")
    return int(not is_right)


def _show_billing(stage: DemoPrinter, site: DemoSite) -> int:
    """Show a quote, a rejected job, a charged job and the ledger; return the number of failures."""
    stage.act(
        "What a job may cost",
        "slurmctld asks before it takes a job, and a job that its account cannot pay is refused "
        "with the reason. What a job may cost at the most is held, what it used is charged.",
    )
    if site.bank.trouble:
        stage.line(f"Left out here: {site.bank.trouble}.")
        return 0
    _run_command(stage, site, "", "steward bank enforce gate --reason demo")
    first = site.users[0]
    one = site.order(PAID_JOB)
    stage.prompt(one.user, PAID_JOB.typed)
    stage.line(f"{f'job {one.job}':<8} {PAID_JOB.about}", style="dim")
    _run_command(stage, site, first, f"steward bank quote --account={ACCOUNT} paid.sh")
    _run_command(stage, site, first, shlex.join(UNAFFORDABLE), SBATCH_REJECTED)
    with stage.working("Waiting for the job to end ...", "It has ended and is charged"):
        amount = site.wait_for_charge(one)
    _run_command(stage, site, first, f"steward bank explain {one.job}")
    _run_command(stage, site, first, f"steward bank statement {ACCOUNT}")
    _run_command(stage, site, "", "steward bank usage")
    _run_command(stage, site, "", "steward bank check")
    is_right = amount > 0 and is_ledger_sound(site.ask("bank.check"))
    stage.result(is_right, "what was refused was not run, what ran was charged, the books agree")
    return int(not is_right)


def _kill_node(stage: DemoPrinter, site: DemoSite) -> str:
    """Install a rule for failing nodes, and kill a slurmd; return the node's name."""
    stage.act(
        "A node fails",
        "The sensor compares what Slurm shows with what it showed before, so that nothing is "
        "missed. A rule says what is done about it, and cannot take away more nodes than its cap.",
    )
    cluster = site.sandbox
    node = f"node{cluster.plan.spec.nodes}"
    path = write_rule(site.rules)
    _run_command(stage, site, "", f"cat {path}")
    _run_command(stage, site, "", f"steward rules check {path}")
    cluster.stop_service(f"slurmd.{node}", signal.SIGKILL)
    stage.line("")
    stage.say(
        f"slurmd of {node} is killed. Slurm notices when it has not answered for "
        f"{UNANSWERED_S} seconds; until then there is more to see."
    )
    return node


def _show_rule(stage: DemoPrinter, site: DemoSite, node: str) -> int:
    """Show what the rule did about the failed node; return the number of failures."""
    stage.act(
        "What the rule did", f"{node} runs no more jobs until somebody has looked at it: now."
    )
    with stage.working("Waiting for Slurm to notice ...", "Slurm has noticed, and the rule acted"):
        is_right = site.wait_for_rule(node)
    _run_command(stage, site, "", f"steward events list --nodelist {node} --failed")
    _run_command(stage, site, "", "steward rules history")
    site.sandbox.start_service(f"slurmd.{node}")
    _run_command(stage, site, "", f"steward action run slurm.node.resume nodes={node}")
    promise = "the failure was told, the rule acted once, and the node is drained"
    stage.result(is_right, promise)
    return int(not is_right)


def _show_pages(stage: DemoPrinter, site: DemoSite) -> int:
    """Start the web server and check that a login link works; return the number of failures."""
    stage.act(
        "The pages",
        "A process of its own, without any rights, serves them: it asks the daemon for whoever "
        "has logged in, by a link that 'steward login' prints on a login node. The demo uses up "
        "this one itself.",
    )
    if site.pages.trouble:
        stage.line(f"Left out here: {site.pages.trouble}.")
        return 0
    first = site.users[0]
    stage.prompt(WEB_USER, f"steward web --socket {site.socket}")
    with stage.working("Starting the pages ...", "The pages answer"):
        site.serve_pages()
    stage.prompt(first, "steward login")
    link = site.link(first)
    stage.line(link)
    is_right = bool(link) and site.pages.opens(link, first)
    stage.result(is_right, f"the link opens the pages once, and {first} finds her jobs there")
    return int(not is_right)


def _has_acl(path: str) -> bool:
    """Return True if an ACL admits the owner; the file system may lack ACLs."""
    return "system.posix_acl_access" in os.listxattr(path)


def _run_command(
    stage: DemoPrinter, site: DemoSite, user: str, command: str, wanted: int = 0
) -> None:
    """Run a command as a user and show its output.

    Raises:
        CheckFailed: The exit code is not the expected one.
    """
    stage.prompt(user or _get_operator(site), command)
    code = site.show(shlex.split(command), user)
    checks.require_that(code == wanted, f"{command!r} ended with {code}, not {wanted}")


def _get_operator(site: DemoSite) -> str:
    """Return the user that the daemon runs as."""
    return site.steward_user or site.users[0]


def _run_checks(stage: DemoPrinter, site: DemoSite, lines: Sequence[JobLine]) -> int:
    """Run all checks; return the number of failures."""
    stage.act("Is it so?", "Each of these is looked up now, in the files and by the commands.")
    failed = 0
    for promise, find_out in checks.list_checks(site, lines):
        try:
            find_out()
        except (checks.CheckFailed, OSError) as error:
            failed += 1
            stage.result(False, f"{promise}: {error}")
        else:
            stage.result(True, promise)
    return failed


def _stop_daemon(stage: DemoPrinter, site: DemoSite) -> int:
    """Stop the daemon; return 1 if it did not end properly."""
    code = site.stop()
    how = "did not end" if code is None else f"ended with {code}"
    promise = "the daemon ends at SIGTERM with everything finished"
    stage.result(code == 0, promise if code == 0 else f"{promise}: it {how}")
    return int(code != 0)
