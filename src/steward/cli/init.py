"""``steward init``: write a first configuration from slurm.conf, and print the next steps.

Asks questions on a terminal; ``--yes`` takes the defaults. ``admin/init`` reads Slurm's
configuration and writes the files.
"""

import sys
from typing import Annotated

import click
import msgspec

from steward.admin.init import (
    DEFAULT_ARCHIVE,
    DEFAULT_OUT,
    DEFAULT_STATE,
    InitOptions,
    SetupStep,
    SlurmSite,
    has_user,
    list_steps,
    query_site,
    write_configuration,
)
from steward.admin.plugins.installation import DEFAULT_LINES_PATH
from steward.capture.settings import LISTENER_USER
from steward.cli.parameters import Option
from steward.core.errors import UsageError
from steward.core.printable import escape_line

_NODES_EXAMPLE = "0.0.0.0:6826"
_WEB_EXAMPLE = "127.0.0.1:8290"
_URL_QUESTION = "URL of the pages in users' browsers, such as https://steward.example.org"


def init(
    cluster: Annotated[
        str,
        Option(
            "--cluster",
            metavar="NAME",
            help="Name of the cluster. Default: ClusterName of slurm.conf.",
        ),
    ] = "",
    user: Annotated[
        str,
        Option(
            "--user",
            metavar="NAME",
            help="User that Steward runs as. Default: SlurmUser of slurm.conf.",
        ),
    ] = "",
    archive_dir: Annotated[
        str, Option("--archive-dir", metavar="DIR", help="Root directory of the archive.")
    ] = "",
    state_dir: Annotated[
        str,
        Option("--state-dir", metavar="DIR", help="Directory of the databases, on a local disk."),
    ] = DEFAULT_STATE,
    jobcomp: Annotated[
        bool | None,
        Option(
            "--jobcomp/--no-jobcomp",
            help="Record job ends that slurmctld reports through jobcomp/lua.",
        ),
    ] = None,
    lines: Annotated[
        str,
        Option("--lines", metavar="FILE", help="File that jobcomp/lua writes job ends to."),
    ] = DEFAULT_LINES_PATH,
    nodes: Annotated[
        str | None,
        Option(
            "--nodes",
            metavar="ADDRESS",
            help=f"Address where Steward receives node reports, such as {_NODES_EXAMPLE}.",
        ),
    ] = None,
    bank: Annotated[
        bool | None, Option("--bank/--no-bank", help="Enable the bank, in mode observe.")
    ] = None,
    sensor: Annotated[
        bool | None,
        Option(
            "--sensor/--no-sensor",
            help="Enable the sensor, which records state changes of nodes.",
        ),
    ] = None,
    web: Annotated[
        str | None,
        Option(
            "--web", metavar="ADDRESS", help=f"Address of the web pages, such as {_WEB_EXAMPLE}."
        ),
    ] = None,
    web_url: Annotated[
        str | None,
        Option("--web-url", metavar="URL", help="URL of the pages in users' browsers."),
    ] = None,
    slurm_conf: Annotated[
        str,
        Option("--slurm-conf", metavar="FILE", help="Path of slurm.conf. Default: Slurm's own."),
    ] = "",
    slurm_bin: Annotated[
        str,
        Option(
            "--slurm-bin",
            metavar="DIR",
            help="Directory of Slurm's commands. Default: from PATH.",
        ),
    ] = "",
    out: Annotated[
        str, Option("--out", metavar="DIR", help="Directory of the new configuration.")
    ] = DEFAULT_OUT,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Replace an existing configuration, and keep a copy of it in the same directory.",
        ),
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Use the defaults without asking.")] = False,
) -> None:
    """Write a first configuration from Slurm's settings, and list the next steps.

    Run it as root on slurmctld's host. On a terminal it asks for options that are not given;
    with --yes, or without a terminal, it uses the defaults. It changes no file of Slurm.
    """
    is_interactive = not yes and sys.stdin.isatty()
    site = query_site(slurm_conf, slurm_bin)
    is_jobcomp_free = not site.jobcomp or site.jobcomp == "jobcomp/lua"
    has_jobcomp = _ask_yes_no(
        is_interactive, jobcomp, "Record job ends that slurmctld reports", is_jobcomp_free
    )
    init_options = InitOptions(
        cluster=_ask_text(
            is_interactive, cluster, "Name of the cluster", site.cluster or "cluster"
        ),
        user=_ask_text(is_interactive, user, "User that Steward runs as", site.slurm_user),
        archive_dir=_ask_text(
            is_interactive, archive_dir, "Root directory of the archive", DEFAULT_ARCHIVE
        ),
        state_dir=state_dir,
        out=out,
        jobcomp_lines=lines if has_jobcomp else "",
        nodes=_ask_address(is_interactive, nodes, "Receive usage reports of nodes", _NODES_EXAMPLE),
        bank=_ask_yes_no(
            is_interactive, bank, "Enable the bank, in mode observe (rejects no jobs)", False
        ),
        sensor=_ask_yes_no(is_interactive, sensor, "Record state changes of nodes", False),
        web=_ask_address(is_interactive, web, "Serve web pages", _WEB_EXAMPLE),
    )
    if init_options.nodes and has_user(LISTENER_USER):
        init_options = msgspec.structs.replace(init_options, listener=LISTENER_USER)
    if init_options.web:
        url = _ask_text(is_interactive and web_url is None, web_url or "", _URL_QUESTION, "")
        init_options = msgspec.structs.replace(init_options, web_url=url)
    _check_paths(init_options)
    for path in write_configuration(init_options, site, force=force):
        click.echo(f"Wrote {escape_line(path)}.")
    _print_steps(init_options, site)


def _check_paths(init_options: InitOptions) -> None:
    """Reject relative paths."""
    for name in ("archive_dir", "state_dir", "out"):
        path = getattr(init_options, name)
        if not path.startswith("/"):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be an absolute path, not {path!r}", path)


def _print_steps(init_options: InitOptions, site: SlurmSite) -> None:
    """Print the remaining steps."""
    if site.jobcomp and site.jobcomp != "jobcomp/lua":
        click.echo(
            f"JobCompType is {escape_line(site.jobcomp)}: Steward takes job ends from queue "
            "polls and sacct instead (docs/accounting.md lists what they lack)."
        )
    click.echo("\nNext steps, in this order; each is useful without the later ones:")
    for number, step in enumerate(list_steps(init_options, site), start=1):
        _print_step(number, step)


def _print_step(number: int, step: SetupStep) -> None:
    """Print a step with its commands and note."""
    click.echo(f"\n{number}. {step.title}")
    for line in step.commands:
        click.echo(f"     {escape_line(line)}")
    if step.note:
        click.echo(f"   {escape_line(step.note)}")


def _ask_text(is_interactive: bool, value: str, question: str, default: str) -> str:
    """Return an option's value, else ask for it, else return the default."""
    if value or not is_interactive:
        return value or default
    reply: str = click.prompt(question, default=default, err=True)
    return reply.strip()


def _ask_yes_no(is_interactive: bool, value: bool | None, question: str, default: bool) -> bool:
    """Return an option's value, else ask yes or no, else return the default."""
    if value is not None or not is_interactive:
        return default if value is None else value
    return bool(click.confirm(question, default=default, err=True))


def _ask_address(is_interactive: bool, value: str | None, question: str, default: str) -> str:
    """Return an option's address, else ask whether and where to listen; "" for no."""
    if value is not None or not is_interactive:
        return value or ""
    return (
        _ask_text(is_interactive, "", "Address", default)
        if _ask_yes_no(is_interactive, None, question, False)
        else ""
    )
