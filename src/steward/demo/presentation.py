"""Presentation of the demo: runs its commands in order, shows them and checks the results.

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

from steward.admin.credentials.actions import LOGIN_S
from steward.archive.requests import JobLine
from steward.demo import checks
from steward.demo.components import (
    ACCOUNT,
    BURST_BYTES,
    BURST_JOB,
    OPENING_COMMANDS,
    PAID_JOB,
    SBATCH_REJECTED,
    SLURMD_TIMEOUT_S,
    UNAFFORDABLE_COMMAND,
    WEB_USER,
    get_page_peak,
    is_ledger_sound,
    write_rule,
)
from steward.demo.jobs import list_submissions
from steward.demo.site import DemoSite
from steward.sandbox import get_default_directory
from steward.sandbox.layout import find_free_directory

_WIDTH = 100


class DemoPrinter:
    """Printer of the demo: headings, paragraphs, prompts and results on standard output."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._width = min(_WIDTH, self._console.width)

    def print_heading(self, title: str, text: str = "") -> None:
        """Print a heading and an introduction.

        Args:
            title: The heading.
            text: Text that introduces the next step.
        """
        self._console.print()
        if self.is_terminal:
            rule = Rule(Text(title, style="bold"), align="left", style="dim")
            self._console.print(rule, width=self._width)
        else:
            self._console.print(f"== {title}")
        if text:
            self.print_paragraph(text)
        self.flush()

    def print_paragraph(self, text: str) -> None:
        """Print a wrapped paragraph."""
        for line in textwrap.wrap(text, self._width):
            self._console.print(line)

    def print_line(self, text: str, *, style: str = "") -> None:
        """Print one line as it is."""
        self._console.print(Text(text, style=style))

    def print_prompt(self, user: str, command: str, mark: str = "$") -> None:
        """Print a command as a user types it; its output follows."""
        self._console.print()
        line = Text(f"{user}{mark} ", style="bold cyan")
        self._console.print(line.append(command, style="bold default"))
        self.flush()

    def result(self, passed: bool, claim: str) -> None:
        """Print the result of one check."""
        mark = Text("   ok  " if passed else "FAILED ", style="green" if passed else "bold red")
        self._console.print(mark.append(claim, style="default not bold"))
        self.flush()

    @contextmanager
    def show_progress(self, text: str, done_text: str) -> Iterator[None]:
        """Show progress during the block, then how long it took.

        Args:
            text: The text shown meanwhile.
            done_text: The text shown afterwards.
        """
        started_s = time.monotonic()
        with self._console.status(text) if self.is_terminal else nullcontext():
            yield
        self.print_line(f"{done_text} ({time.monotonic() - started_s:.1f} s)")
        self.flush()

    def flush(self) -> None:
        """Flush the output before another program writes."""
        self._console.file.flush()


NextStep = tuple[str, str]
"""A purpose, and the command or link for it."""


def print_next_steps(printer: DemoPrinter, site: DemoSite, failures: int) -> None:
    """Print what to try next, or how many checks failed.

    Args:
        printer: The printer.
        site: The demo's site.
        failures: Number of failed checks; if not 0, only that is printed.
    """
    if failures:
        printer.print_heading("Some checks failed")
        printer.print_line(
            f"{failures} {'check' if failures == 1 else 'checks'} failed, see above."
        )
        return
    if site.keep:
        printer.print_heading("Next steps", "The cluster and Steward stay up.")
        steps = _list_steps_while_up(site)
    else:
        printer.print_heading("Next steps")
        steps = _list_steps_after_end()
    for text, command in steps:
        if text:
            printer.print_line(text)
        printer.print_line(f"  {command}", style="bold")


def _list_steps_after_end() -> Iterator[NextStep]:
    """Yield next steps after the demo was removed."""
    program = _get_command_name()
    yield (
        "Run the demo again and keep it up, with web pages to click through:",
        "make demo KEEP=1",
    )
    yield (
        "Archive scripts of your own cluster, without changes to it (as root or SlurmUser):",
        f"{program} archive watch --once --cluster NAME --archive DIR",
    )
    yield "List all commands:", f"{program} --help"


def _list_steps_while_up(site: DemoSite) -> Iterator[NextStep]:
    """Yield next steps for a demo that stays up."""
    program = _get_command_name()
    is_default = site.sandbox.directory == get_default_directory()
    dir_option = "" if is_default else f" --dir {site.sandbox.directory}"
    env_command = f"-- env STEWARD_SOCKET={site.socket_path}"
    yield from _list_links(
        site, f"{program} sandbox run{dir_option} --user {site.users[0]} {env_command} steward"
    )
    yield (
        "Open a shell as one of its users, to submit jobs:",
        f"{program} sandbox run{dir_option} --user {site.users[-1]} {env_command} bash",
    )
    yield (
        "See all jobs as an operator, the status of Steward, and its log:",
        f"{program} archive list --config {site.config}",
    )
    yield "", f"{program} status --config {site.config}"
    yield "", f"less {site.log_path}"
    if not site.bank.skip_reason:
        yield (
            "See balances and charges of accounts:",
            f"{program} bank balance --config {site.config}",
        )
        yield "", f"{program} bank statement {ACCOUNT} --config {site.config}"
    yield "Stop the demo, and remove its directory:", f"{program} sandbox down{dir_option}"


def _list_links(site: DemoSite, command_prefix: str) -> Iterator[NextStep]:
    """Yield links that open the web pages; none if there are no pages."""
    if site.pages.skip_reason:
        return
    user = site.users[0]
    minutes = round(LOGIN_S / 60)
    validity = f"each link can be used once, within {minutes} minutes"
    yield (
        f"Open the web pages as {user}, in a browser on this host; {validity}:",
        site.make_login_link(user),
    )
    yield (
        "Open them as an operator, to see the cluster and Steward's status, too:",
        site.make_login_link(),
    )
    port = site.pages.url.rpartition(":")[2]
    yield (
        "For a browser on another host, run this there first, then open the links:",
        f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}",
    )
    yield f"Create more links, as {user} and as an operator:", f"{command_prefix} login"
    yield "", f"{_get_command_name()} login --config {site.config}"


def _get_command_name() -> str:
    """Return the command that starts this program from here."""
    path = shutil.which("steward")
    if path is not None and os.path.realpath(path) == os.path.realpath(sys.argv[0]):
        return "steward"
    return os.path.relpath(sys.argv[0]) if os.path.isfile(sys.argv[0]) else "steward"


_DIFF_CODE: Final = 1


def run_demo(*, keep: bool = False, directory: str = "", slurm_version: str = "") -> int:
    """Run the whole demo.

    Args:
        keep: Whether the cluster, the daemon and the archive stay up afterwards.
        directory: Directory of everything. If empty: a new temporary one; with ``keep``, the
            directory of ``steward sandbox``, or one beside it.
        slurm_version: Version of Slurm; if empty, the installed one.

    Returns:
        Number of failed checks.

    Raises:
        SandboxError: The cluster does not come up.
        DemoError: The demo fails before the checks.
    """
    printer = DemoPrinter()
    printer.print_paragraph(
        "Steward archives the script and the environment of every job that Slurm runs. This demo "
        "starts a temporary Slurm cluster, submits jobs to it, and shows their records. It changes "
        "nothing outside its own directory."
    )
    if keep and not directory:
        directory = find_free_directory()
    with _open_site(printer, directory, keep, slurm_version) as site:
        _open_bank(printer, site)
        _submit_jobs(printer, site)
        with printer.show_progress(
            "Waiting for the jobs to end …", "All jobs have ended and are archived"
        ):
            lines = site.wait_for_jobs()
        _show_archive(printer, site)
        failures = _show_accounting(printer, site)
        # Slurm takes a while to notice.
        node = _kill_node(printer, site)
        failures += _show_billing(printer, site)
        failures += _show_pages(printer, site)
        failures += _show_rule(printer, site, node)
        failures += _run_checks(printer, site, lines)
        if not keep:
            failures += _stop_daemon(printer, site)
        print_next_steps(printer, site, failures)
        return failures


@contextlib.contextmanager
def _open_site(
    printer: DemoPrinter, directory: str, keep: bool, slurm_version: str
) -> Iterator[DemoSite]:
    """Bring up a site with a running daemon; end it after the block, unless it is kept."""
    printer.print_heading("A Slurm cluster with Steward")
    site: DemoSite | None = None
    try:
        with printer.show_progress("Starting Slurm …", "slurmctld, slurmd and munge are up"):
            site = DemoSite.up(
                directory,
                keep=keep,
                slurm_version=slurm_version,
                with_slurmdbd=True,
                with_bank=True,
            )
        cluster = site.sandbox
        names = " and ".join(site.users)
        printer.print_paragraph(
            f"Slurm {cluster.plan.slurm_version} in {cluster.directory}: "
            f"{cluster.plan.spec.nodes} nodes, jobs by {names}."
        )
        with printer.show_progress("Starting the daemon …", "The daemon answers"):
            printer.print_prompt(
                site.steward_user or site.users[0], f"steward serve --config {site.config}"
            )
            site.start_daemon()
        yield site
    except BaseException:
        if site is not None:
            site.down()
        raise
    if not keep:
        site.down()


def _open_bank(printer: DemoPrinter, site: DemoSite) -> None:
    """Set a rate, and deposit SU in an account."""
    if site.bank.skip_reason:
        return
    printer.print_heading(
        "The bank",
        "Set the rate of a CPU hour, and create an account with 500 SU. A new bank is in "
        "mode observe: it rejects nothing yet.",
    )
    for command in OPENING_COMMANDS:
        _run_command(printer, site, "", command.format(owner=site.users[0]))
    with printer.show_progress("Waiting for the gate ...", "slurmctld can ask the gate"):
        site.wait_for_gate()


def _submit_jobs(printer: DemoPrinter, site: DemoSite) -> None:
    """Submit all jobs, showing each command."""
    title = "Two ordinary users submit jobs" if len(site.users) > 1 else "A user submits jobs"
    printer.print_heading(
        title, "Slurm writes each script to its spool, and removes it when the job is over."
    )
    for submission in list_submissions():
        job = site.submit(submission)
        printer.print_prompt(job.user, submission.shell_command)
        printer.print_line(f"{f'job {job.job}':<8} {submission.description}", style="dim")


def _show_archive(printer: DemoPrinter, site: DemoSite) -> None:
    """Show the archive: list, script, environment, search, diff, permissions."""
    first_user = site.users[0]
    relax_id, finer_id, train_id = (
        site.get_job(name).job for name in ("relax", "relax-finer", "train")
    )
    printer.print_heading(
        "The archive", "All jobs, as operators see them. The interactive one has no script."
    )
    _run_command(printer, site, "", "steward archive list")
    printer.print_heading("One job with its script")
    _run_command(printer, site, first_user, f"steward archive show {relax_id}")
    printer.print_heading(
        "The environment of a job",
        "The command names the variables to show. Steward recognizes one secret by the name of "
        "its variable, the other by its form. It never wrote either to a file.",
    )
    variables = " ".join(site.get_job("train").what.env)
    _run_command(printer, site, first_user, f"steward archive env {train_id} {variables}")
    printer.print_heading("Search in scripts", "Search for any text: a path, a module, an option.")
    _run_command(printer, site, first_user, "steward archive search gromacs/2024.2")
    printer.print_heading("Compare two jobs")
    _run_command(
        printer, site, first_user, f"steward archive diff {relax_id} {finer_id}", _DIFF_CODE
    )
    if len(site.users) > 1:
        printer.print_heading(
            "Permissions",
            f"Job {relax_id} belongs to {first_user}, so {site.users[1]} cannot read it.",
        )
        _run_command(
            printer, site, site.users[1], f"steward archive show {relax_id}", checks.DENIED_CODE
        )
    _show_files(printer, site)


def _show_files(printer: DemoPrinter, site: DemoSite) -> None:
    """Show the archived files and their permissions."""
    printer.print_heading(
        "Archived files",
        "Plain files, which outlive Steward: the script, the environment in slurmctld's "
        "format, and JSON with the details of the job. Only the owner may read them.",
    )
    job = site.get_job("relax")
    path = checks.get_script_path(site, job)
    _run_command(printer, site, "", f"ls -l {os.path.dirname(path)}")
    if _has_acl(path) and len(site.users) > 1:
        _run_command(printer, site, job.user, f"tail -n 3 {path}")
        _run_command(printer, site, site.users[1], f"tail -n 3 {path}", 1)


def _show_accounting(printer: DemoPrinter, site: DemoSite) -> int:
    """Show the accounting record of a short job; return the number of failures."""
    printer.print_heading(
        "Resource use of a job",
        "A short job that uses 300 MB for a moment. Nodes report each task when it ends, with "
        "the counters of the kernel, so Steward measures even the shortest task.",
    )
    if site.books.skip_reason:
        printer.print_line(f"Skipped: {site.books.skip_reason}.")
        return 0
    job = site.submit_unrecorded(BURST_JOB)
    printer.print_prompt(job.user, BURST_JOB.shell_command)
    printer.print_line(f"{f'job {job.job}':<8} {BURST_JOB.description}", style="dim")
    with printer.show_progress("Waiting for the node's report ...", "The node has reported"):
        page = site.wait_for_reports(job)
    if site.sandbox.plan.spec.accounting:
        printer.print_paragraph(
            "Slurm's records, from samples of /proc every 30 seconds (Slurm's default):"
        )
        _run_command(
            printer, site, job.user, f"sacct -j {job.job} -o jobid,elapsed,maxrss,totalcpu,state"
        )
    else:
        printer.print_paragraph(
            "(slurmdbd is not installed, so there are no records of Slurm to compare.)"
        )
    _run_command(printer, site, job.user, f"steward job {job.job}")
    _run_command(
        printer,
        site,
        job.user,
        f"steward sacct -j {job.job} -o jobid,elapsed,maxrss,totalcpu,state",
    )
    passed = get_page_peak(page) >= BURST_BYTES
    printer.result(passed, "the job record shows the 300 MB that the job used for a moment")
    return int(not passed)


def _show_billing(printer: DemoPrinter, site: DemoSite) -> int:
    """Show a quote, a rejected job, a charged job and the ledger; return the number of failures."""
    printer.print_heading(
        "Charges",
        "slurmctld asks the gate before it accepts a job. The gate rejects a job that its account "
        "cannot pay for, and says why. It places a hold for the highest price that an admitted job "
        "can reach; at the job's end the bank charges its usage.",
    )
    if site.bank.skip_reason:
        printer.print_line(f"Skipped: {site.bank.skip_reason}.")
        return 0
    _run_command(printer, site, "", "steward bank mode enforce --reason demo")
    first_user = site.users[0]
    job = site.submit_unrecorded(PAID_JOB)
    printer.print_prompt(job.user, PAID_JOB.shell_command)
    printer.print_line(f"{f'job {job.job}':<8} {PAID_JOB.description}", style="dim")
    _run_command(printer, site, first_user, f"steward bank quote --account={ACCOUNT} paid.sh")
    _run_command(printer, site, first_user, shlex.join(UNAFFORDABLE_COMMAND), SBATCH_REJECTED)
    with printer.show_progress(
        "Waiting for the job to end ...", "The job has ended and is charged"
    ):
        amount = site.wait_for_charge(job)
    _run_command(printer, site, first_user, f"steward bank explain {job.job}")
    _run_command(printer, site, first_user, f"steward bank statement {ACCOUNT}")
    _run_command(printer, site, "", "steward bank usage")
    _run_command(printer, site, "", "steward bank check")
    passed = amount > 0 and is_ledger_sound(site.call_action("bank.check"))
    printer.result(
        passed, "the rejected job did not run, the other was charged, the ledger is consistent"
    )
    return int(not passed)


def _kill_node(printer: DemoPrinter, site: DemoSite) -> str:
    """Install a rule for failing nodes, and kill a slurmd; return the node's name."""
    printer.print_heading(
        "A node fails",
        "The sensor compares node states with those of the last poll, and reports each change. A "
        "rule reacts to the change, and cannot drain more nodes than its limit allows.",
    )
    cluster = site.sandbox
    node = f"node{cluster.plan.spec.nodes}"
    path = write_rule(site.rules)
    _run_command(printer, site, "", f"cat {path}")
    _run_command(printer, site, "", f"steward rules check {path}")
    cluster.stop_service(f"slurmd.{node}", signal.SIGKILL)
    printer.print_line("")
    printer.print_paragraph(
        f"The demo killed slurmd of {node}. Slurm notices after {SLURMD_TIMEOUT_S} seconds "
        "without an answer. The demo continues meanwhile."
    )
    return node


def _show_rule(printer: DemoPrinter, site: DemoSite, node: str) -> int:
    """Show what the rule did about the failed node; return the number of failures."""
    printer.print_heading(
        "The rule", f"The rule drained {node}. An operator checks the node, and resumes it."
    )
    with printer.show_progress(
        "Waiting for Slurm to notice ...", "Slurm has noticed, and the rule was executed"
    ):
        passed = site.wait_for_rule(node)
    _run_command(printer, site, "", f"steward events list --nodelist {node} --failed")
    _run_command(printer, site, "", "steward rules history")
    site.sandbox.start_service(f"slurmd.{node}")
    _run_command(printer, site, "", f"steward action run slurm.node.resume nodes={node}")
    claim = "the failure was recorded, the rule was executed once, and the node was drained"
    printer.result(passed, claim)
    return int(not passed)


def _show_pages(printer: DemoPrinter, site: DemoSite) -> int:
    """Start the web server and check that a login link works; return the number of failures."""
    printer.print_heading(
        "The web pages",
        "A separate process without rights serves the web pages, and asks the daemon on behalf "
        "of the user who is logged in. 'steward login' prints the link on a login node. The demo "
        "itself uses this link.",
    )
    if site.pages.skip_reason:
        printer.print_line(f"Skipped: {site.pages.skip_reason}.")
        return 0
    first_user = site.users[0]
    printer.print_prompt(WEB_USER, f"steward web --socket {site.socket_path}")
    with printer.show_progress("Starting the web pages ...", "The web pages answer"):
        site.start_web_server()
    printer.print_prompt(first_user, "steward login")
    link = site.make_login_link(first_user)
    printer.print_line(link)
    passed = bool(link) and site.pages.can_open(link, first_user)
    printer.result(passed, f"the link opens the web pages once, with the jobs of {first_user}")
    return int(not passed)


def _has_acl(path: str) -> bool:
    """Return True if an ACL admits the owner; the file system may lack ACLs."""
    return "system.posix_acl_access" in os.listxattr(path)


def _run_command(
    printer: DemoPrinter, site: DemoSite, user: str, command: str, expected_code: int = 0
) -> None:
    """Run a command as a user and show its output.

    Raises:
        CheckFailed: The exit code is not the expected one.
    """
    printer.print_prompt(user or _get_operator(site), command)
    exit_code = site.run_visible(shlex.split(command), user)
    checks.require_that(
        exit_code == expected_code, f"{command!r} ended with {exit_code}, not {expected_code}"
    )


def _get_operator(site: DemoSite) -> str:
    """Return the user that the daemon runs as."""
    return site.steward_user or site.users[0]


def _run_checks(printer: DemoPrinter, site: DemoSite, lines: Sequence[JobLine]) -> int:
    """Run all checks; return the number of failures."""
    printer.print_heading("Checks", "The demo checks its results now, in files and by commands.")
    failures = 0
    for claim, check in checks.list_checks(site, lines):
        try:
            check()
        except (checks.CheckFailed, OSError) as error:
            failures += 1
            printer.result(False, f"{claim}: {error}")
        else:
            printer.result(True, claim)
    return failures


def _stop_daemon(printer: DemoPrinter, site: DemoSite) -> int:
    """Stop the daemon; return 1 if it did not end properly."""
    exit_code = site.stop_daemon()
    outcome = "did not end" if exit_code is None else f"ended with {exit_code}"
    claim = "the daemon ends at SIGTERM without an error"
    printer.result(exit_code == 0, claim if exit_code == 0 else f"{claim}: {outcome}")
    return int(exit_code != 0)
