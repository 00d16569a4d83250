"""Command tree of ``steward``: all command groups, and the entry point that runs a command line.

:class:`Root` lists the top-level commands; ``AccountingGroup``, ``ArchiveGroup`` and ``BankGroup``
(with its account, user, allocation and rate groups) list the subcommands. Each entry names the
module that defines the command, imported only on use. :func:`run` returns the exit code: 2 for
wrong use, 130 for Ctrl-C, else as the error says.
"""

import os
import sys
from typing import Annotated, ClassVar, Final

import click

from steward import __version__
from steward.cli.errors import (
    INTERRUPTED,
    WRONG_USE,
    print_error,
    run_command,
)
from steward.cli.groups import (
    ADMINISTRATORS,
    EVERYONE,
    OPERATORS,
    Entry,
    LazyGroup,
    describe_by_action,
)
from steward.cli.parameters import Option

_APP: Final = "steward.cli.app"


class Root(LazyGroup):
    """Top-level commands of ``steward``."""

    words = ""

    entries = (
        Entry(
            "archive",
            EVERYONE,
            "Find, show and compare the scripts that jobs ran.",
            "steward.cli.app",
            "archive_app",
        ),
        describe_by_action("job", "accounting.job", "steward.cli.job", "job"),
        Entry(
            "sacct",
            EVERYONE,
            "List jobs and steps with their resource use, as Slurm's sacct does.",
            "steward.cli.sacct_command",
        ),
        Entry(
            "bank",
            EVERYONE,
            "Manage accounts, allocations, rates and charges of the bank.",
            "steward.cli.app",
            "bank_app",
        ),
        Entry(
            "report",
            EVERYONE,
            "Report usage, utilization, wait times and waste of clusters.",
            "steward.cli.app",
            "reports",
        ),
        Entry(
            "node",
            EVERYONE,
            "Show node states, now or at a past time, with the jobs they ran.",
            "steward.cli.node",
            "node",
        ),
        Entry(
            "events",
            EVERYONE,
            "List or follow events: node failures, daemon restarts, rule executions.",
            "steward.cli.events",
        ),
        Entry("token", EVERYONE, "Create and revoke API tokens.", _APP, "token_app"),
        Entry(
            "action",
            OPERATORS,
            "Run actions on a cluster: drain nodes, hold jobs, create reservations.",
            _APP,
            "action_app",
        ),
        Entry(
            "rules",
            OPERATORS,
            "Manage rules that react to events, and show their history.",
            _APP,
            "rules_app",
        ),
        describe_by_action("status", "status.show", "steward.cli.status", "status"),
        Entry(
            "metrics",
            OPERATORS,
            "Print Prometheus metrics, or write them for node_exporter's textfile collector.",
            "steward.cli.status",
            "metrics",
        ),
        Entry(
            "journal",
            OPERATORS,
            "Show events, consumers and dead letters of the journal.",
            _APP,
            "journal_app",
        ),
        Entry(
            "accounting",
            OPERATORS,
            "Manage accounting data: job log, imports, gaps and plugins.",
            "steward.cli.app",
            "accounting_app",
        ),
        Entry(
            "init",
            ADMINISTRATORS,
            "Write a first configuration from Slurm's settings, and list the next steps.",
            "steward.cli.init",
            "init",
        ),
        Entry(
            "backup",
            ADMINISTRATORS,
            "Back up databases, settings and secrets into one file, while Steward runs.",
            "steward.cli.backup",
            "backup",
        ),
        Entry(
            "restore",
            ADMINISTRATORS,
            "Restore a backup into the directories that the configuration names.",
            "steward.cli.backup",
            "restore",
        ),
        Entry("serve", ADMINISTRATORS, "Run the daemon.", "steward.cli.services", "serve"),
        Entry(
            "reload",
            ADMINISTRATORS,
            "Reload the daemon's configuration.",
            "steward.cli.services",
            "reload",
        ),
        Entry(
            "web",
            ADMINISTRATORS,
            ("Serve the web pages and the API."),
            "steward.cli.services",
            "web",
        ),
        Entry(
            "listen",
            ADMINISTRATORS,
            "Receive reports of compute nodes, as an unprivileged user.",
            "steward.cli.services",
            "listen",
        ),
        Entry(
            "controller",
            ADMINISTRATORS,
            "Capture scripts and job events of a slurmctld host; forward them to Steward on "
            "another host.",
            "steward.cli.services",
            "controller",
        ),
        Entry(
            "agent",
            ADMINISTRATORS,
            "Send the reports of a compute node to Steward.",
            "steward.cli.agent",
        ),
        Entry(
            "doctor",
            ADMINISTRATORS,
            "Check the installation and suggest fixes.",
            "steward.cli.doctor",
        ),
        Entry(
            "plugins",
            ADMINISTRATORS,
            "Build, install and check the plugins that Slurm loads.",
            "steward.cli.plugins",
        ),
        Entry(
            "config",
            ADMINISTRATORS,
            "Check or show the configuration.",
            "steward.cli.config",
        ),
        Entry(
            "sandbox",
            ADMINISTRATORS,
            "Run a temporary Slurm cluster for tests.",
            "steward.cli.sandbox",
        ),
        Entry(
            "mail",
            ADMINISTRATORS,
            "Send one of Slurm's job mails, with the job page appended.",
            "steward.cli.mail",
            "mail",
        ),
        Entry(
            "demo",
            ADMINISTRATORS,
            "Demonstrate Steward on a temporary cluster.",
            "steward.cli.sandbox",
            "demo",
        ),
    )


def _print_version(context: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    if value:
        click.echo(f"steward {__version__}")
        context.exit()


def _set_debug(
    debug: Annotated[bool, Option("--debug", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool,
        Option(
            "--version", "-V", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keep the books of a Slurm cluster: archive jobs, record and charge them, react to nodes."""
    del version  # its callback has printed the version
    if debug:
        os.environ["STEWARD_DEBUG"] = "1"


app = Root(function=_set_debug)


def run(args: list[str]) -> int:
    """Run a command line (without the program name) and return its exit code."""
    debug = bool(os.environ.get("STEWARD_DEBUG")) or "--debug" in args[:1]

    def command() -> int:
        try:
            return _run_click(args or ["--help"])
        except click.ClickException as error:
            return _print_usage_error(error, debug)
        except click.Abort:
            return INTERRUPTED

    return run_command(command, debug=debug)


def _run_click(args: list[str]) -> int:
    """Parse and run a command line with Click; errors propagate to the caller."""
    code = app.main(args=args, prog_name="steward", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _print_usage_error(error: click.ClickException, debug: bool) -> int:
    """Print a usage error, or the help of a group called without a command; return the code."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and context is not None:
        print(context.get_help(), file=sys.stderr)
        return WRONG_USE
    # Choices come one a line; an empty choice need not be listed.
    message = " ".join(error.format_message().rstrip(".").split())
    message = message.replace("one of '', ", "one of ")
    if context is not None:
        message += f" (see '{context.command_path} --help')"
    return print_error(message[:1].lower() + message[1:], WRONG_USE, debug=debug)


class ReportGroup(LazyGroup):
    """Commands of ``steward report``."""

    words = "report"


_ACCOUNTING = "steward.cli.accounting"


class AccountingGroup(LazyGroup):
    """Commands of ``steward accounting``: job log, plugins, gaps and imports."""

    words = "accounting"
    entries: "ClassVar[tuple[Entry, ...]]" = (
        describe_by_action("gaps", "accounting.gaps", _ACCOUNTING, "gaps"),
        Entry(
            "import",
            ADMINISTRATORS,
            "Import jobs from slurmdbd, a file written by sacct, or a job log.",
            _ACCOUNTING,
            "import_",
        ),
    )


_ARCHIVE_SOURCES = "steward.cli.archive_sources"


class ArchiveGroup(LazyGroup):
    """Commands of ``steward archive``: search, show, export, verify and erase scripts."""

    words = "archive"
    entries = (
        Entry(
            "watch",
            ADMINISTRATORS,
            ("Archive the scripts of one cluster, without the daemon."),
            _ARCHIVE_SOURCES,
            "watch",
        ),
        Entry(
            "consume",
            ADMINISTRATORS,
            "Archive the scripts that another Steward sends to Kafka.",
            _ARCHIVE_SOURCES,
            "consume",
        ),
        Entry(
            "import",
            ADMINISTRATORS,
            "Import the archive of another tool.",
            _ARCHIVE_SOURCES,
            "import_",
        ),
    )


_JOBS = "steward.cli.bank_jobs"


class BankGroup(LazyGroup):
    """Commands of ``steward bank``: balances, charges, holds and their administration."""

    words = "bank"
    entries: "ClassVar[tuple[Entry, ...]]" = (
        describe_by_action("quote", "bank.quote", _JOBS, "quote_app"),
        Entry("account", OPERATORS, "Create, show and change accounts.", _APP, "accounts"),
        Entry(
            "user", OPERATORS, "Manage users of accounts and their spending limits.", _APP, "users"
        ),
        Entry(
            "allocation",
            OPERATORS,
            "Manage allocations: service units for a period.",
            _APP,
            "allocations",
        ),
        Entry("rate", OPERATORS, "Manage rates: the prices of jobs.", _APP, "rates"),
        describe_by_action("notices", "bank.notices", "steward.cli.bank_maintenance", "notices"),
        Entry(
            "mybrc-user",
            ADMINISTRATORS,
            "Manage users of the myBRC API.",
            "steward.cli.bank_maintenance",
            "mybrc_user",
        ),
    )


class TokenGroup(LazyGroup):
    """Commands of ``steward token``."""

    words = "token"


class JournalGroup(LazyGroup):
    """Commands of ``steward journal``."""

    words = "journal"


class AccountGroup(LazyGroup):
    """Commands of ``steward bank account``."""

    words = "bank account"


class UserGroup(LazyGroup):
    """Commands of ``steward bank user``: users of bank accounts and their limits."""

    words = "bank user"


class AllocationGroup(LazyGroup):
    """Commands of ``steward bank allocation``."""

    words = "bank allocation"


class RateGroup(LazyGroup):
    """Commands of ``steward bank rate``: prices of jobs."""

    words = "bank rate"


class ActionGroup(LazyGroup):
    """Commands of ``steward action``: run and describe actions on clusters, show the audit log."""

    words = "action"


class RulesGroup(LazyGroup):
    """Commands of ``steward rules``: rules that react to events, and their history."""

    words = "rules"
    entries = (
        describe_by_action("check", "rules.check", "steward.cli.rules", "check"),
        describe_by_action("test", "rules.test", "steward.cli.rules", "try_"),
    )


archive_app = ArchiveGroup("Find, show and compare the scripts that jobs ran.")
accounting_app = AccountingGroup("Manage accounting data: job log, imports, gaps and plugins.")
token_app = TokenGroup("Create and revoke API tokens.")
journal_app = JournalGroup("Show events, consumers and dead letters of the journal.")
bank_app = BankGroup("Manage accounts, allocations, rates and charges of the bank.")
accounts = AccountGroup("Create, show and change accounts.")
users = UserGroup("Manage users of accounts and their spending limits.")
allocations = AllocationGroup("Manage allocations: service units for a period.")
rates = RateGroup("Manage rates: the prices of jobs.")
action_app = ActionGroup("Run actions on a cluster: drain nodes, hold jobs, create reservations.")
rules_app = RulesGroup("Manage rules that react to events, and show their history.")
reports = ReportGroup(
    """Report usage, utilization, wait times and waste of clusters.

    Operators see all jobs, coordinators those of their accounts, users their own.
    """
)
