"""The ``steward`` command: its groups."""

import os
import sys
from typing import Annotated

import typer

from steward import __version__
from steward.cli.ending import INTERRUPTED, WRONG_USE, ended, tell, wrong_value
from steward.cli.lazy import ADMINISTRATORS, CONTEXT, EVERYONE, OPERATORS, Entry, LazyGroup


class Root(LazyGroup):
    """The top of the command line."""

    entries = (
        Entry(
            "archive",
            EVERYONE,
            "Find, show and compare the scripts that jobs ran.",
            "steward.cli.archive",
        ),
        Entry(
            "job",
            EVERYONE,
            "Show what a job was, what it used, and how well.",
            "steward.cli.job",
            "job",
        ),
        Entry(
            "sacct",
            EVERYONE,
            "List jobs and steps with what they used, as Slurm's sacct does.",
            "steward.cli.sacct_command",
        ),
        Entry(
            "bank",
            EVERYONE,
            "What jobs cost, and what is left to spend.",
            "steward.cli.bank",
        ),
        Entry(
            "report",
            EVERYONE,
            "What a cluster did, who used it, how long jobs waited, what was wasted.",
            "steward.cli.report",
        ),
        Entry(
            "node",
            EVERYONE,
            "How nodes are, or were at a time, and what ran there.",
            "steward.cli.node",
            "node",
        ),
        Entry(
            "events",
            EVERYONE,
            "Show what happens: nodes that go down, daemons, rules.",
            "steward.cli.events",
        ),
        Entry(
            "login",
            EVERYONE,
            "Print a link that opens the pages.",
            "steward.cli.login",
        ),
        Entry(
            "token",
            EVERYONE,
            "What programs show to be let in as you.",
            "steward.cli.token",
        ),
        Entry(
            "action",
            OPERATORS,
            "Do something to a cluster: drain nodes, hold jobs, reserve.",
            "steward.cli.action",
        ),
        Entry(
            "rules",
            OPERATORS,
            "What is done about events by itself, and what was done.",
            "steward.cli.rules",
        ),
        Entry(
            "status",
            OPERATORS,
            "Show how Steward itself stands: processes, backlog, clusters, disks, the bank.",
            "steward.cli.status",
            "status",
        ),
        Entry(
            "metrics",
            OPERATORS,
            "Print figures for Prometheus, as for node_exporter's textfile collector.",
            "steward.cli.status",
            "metrics",
        ),
        Entry(
            "journal",
            OPERATORS,
            "Look at what Steward has recorded and what waits.",
            "steward.cli.journal",
        ),
        Entry(
            "accounting",
            OPERATORS,
            "Look after the books: the job log, imports, what is missing.",
            "steward.cli.accounting",
        ),
        Entry(
            "init",
            ADMINISTRATORS,
            "Write a first configuration, from what Slurm says, and tell what is left to do.",
            "steward.cli.init",
            "init",
        ),
        Entry(
            "backup",
            ADMINISTRATORS,
            "Write all that Steward knows into one file, while it runs.",
            "steward.cli.backup",
            "backup",
        ),
        Entry(
            "restore",
            ADMINISTRATORS,
            "Put a backup back: into the place that the configuration names.",
            "steward.cli.backup",
            "restore",
        ),
        Entry("serve", ADMINISTRATORS, "Run the daemon.", "steward.cli.serve"),
        Entry(
            "reload",
            ADMINISTRATORS,
            "Have the daemon read its configuration again.",
            "steward.cli.reload",
        ),
        Entry("web", ADMINISTRATORS, "Serve the pages and the API.", "steward.cli.web"),
        Entry(
            "listen",
            ADMINISTRATORS,
            "Listen for compute nodes under a user of its own.",
            "steward.cli.listen",
        ),
        Entry(
            "controller",
            ADMINISTRATORS,
            "Capture on a slurmctld host, and forward to a Steward elsewhere.",
            "steward.cli.controller",
        ),
        Entry(
            "agent",
            ADMINISTRATORS,
            "Send what happened on a compute node to Steward.",
            "steward.cli.agent",
        ),
        Entry(
            "doctor",
            ADMINISTRATORS,
            "Say whether all is as it must be, and what mends what is not.",
            "steward.cli.doctor",
        ),
        Entry(
            "plugins",
            ADMINISTRATORS,
            "What Slurm itself loads: build, install and check it.",
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
            "Run a throwaway Slurm cluster to try things on.",
            "steward.cli.sandbox",
        ),
        Entry(
            "mail",
            ADMINISTRATORS,
            "Send a mail of Slurm's, with the job's page at its end.",
            "steward.cli.mail",
            "mail",
        ),
        Entry("demo", ADMINISTRATORS, "See it all on a throwaway cluster.", "steward.cli.demo"),
    )


app = typer.Typer(
    cls=Root,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    add_completion=False,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"steward {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the program an error came from.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keep the books of a Slurm cluster: what every job ran, kept, found and shown."""
    del version  # its callback has done all
    if debug:
        os.environ["STEWARD_DEBUG"] = "1"


def run(args: list[str]) -> int:
    """Run a command line, without its first word; the exit code."""
    debug = bool(os.environ.get("STEWARD_DEBUG")) or "--debug" in args[:1]

    def command() -> int:
        try:
            return _run(args or ["--help"])
        except typer.TyperException as error:
            return _end_usage(error, debug)
        except typer.Abort:
            return INTERRUPTED

    return ended(command, debug=debug)


def _run(args: list[str]) -> int:
    command = typer.main.get_command(app)
    code = command.main(args=args, prog_name="steward", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _end_usage(error: typer.TyperException, debug: bool) -> int:
    """Say how a command was wrongly used; a group without a command shows its help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), file=sys.stderr)
        return WRONG_USE
    if isinstance(error, typer.BadParameter):
        error.message = wrong_value(error) or error.message
    # Choices come a line each; where one of them is nothing at all it need not be said.
    message = " ".join(error.format_message().rstrip(".").split())
    message = message.replace(": Value error, ", ": ").replace("one of '', ", "one of ")
    if context is not None:
        message += f" (see '{context.command_path} --help')"
    return tell(message[:1].lower() + message[1:], WRONG_USE, debug=debug)
