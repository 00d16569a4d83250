"""``steward init``: write a first configuration from slurm.conf, and print the next steps.

Asks questions on a terminal; ``--yes`` takes the defaults. ``admin/init`` reads Slurm's
configuration and writes the files.
"""

import sys
from typing import Annotated

import msgspec
import typer

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
from steward.core.errors import UsageError
from steward.core.printable import escape_line

_NODES_EXAMPLE = "0.0.0.0:6826"
_WEB_EXAMPLE = "127.0.0.1:8290"
_URL_QUESTION = "URL of the pages in users' browsers, such as https://steward.example.org"


def init(
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="The cluster's name; ClusterName.")
    ] = "",
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="Who Steward runs as; SlurmUser.")
    ] = "",
    archive_dir: Annotated[
        str, typer.Option("--archive-dir", metavar="DIR", help="Where scripts are archived.")
    ] = "",
    state_dir: Annotated[
        str, typer.Option("--state-dir", metavar="DIR", help="Where databases live: a local disk.")
    ] = DEFAULT_STATE,
    jobcomp: Annotated[
        bool | None,
        typer.Option("--jobcomp/--no-jobcomp", help="Have slurmctld tell of jobs that end."),
    ] = None,
    lines: Annotated[
        str, typer.Option("--lines", metavar="FILE", help="Where slurmctld writes that.")
    ] = DEFAULT_LINES_PATH,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes", metavar="ADDRESS", help=f"Where nodes report, e.g. {_NODES_EXAMPLE}."
        ),
    ] = None,
    bank: Annotated[
        bool | None, typer.Option("--bank/--no-bank", help="Have a bank, which observes.")
    ] = None,
    sensor: Annotated[
        bool | None, typer.Option("--sensor/--no-sensor", help="Tell when nodes change.")
    ] = None,
    web: Annotated[
        str | None,
        typer.Option(
            "--web", metavar="ADDRESS", help=f"Where pages are served, e.g. {_WEB_EXAMPLE}."
        ),
    ] = None,
    web_url: Annotated[
        str | None,
        typer.Option("--web-url", metavar="URL", help="URL of the pages in users' browsers."),
    ] = None,
    slurm_conf: Annotated[
        str, typer.Option("--slurm-conf", metavar="FILE", help="slurm.conf, if it is not found.")
    ] = "",
    slurm_bin: Annotated[
        str, typer.Option("--slurm-bin", metavar="DIR", help="Slurm's commands, likewise.")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Where the configuration goes.")
    ] = DEFAULT_OUT,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a configuration; it is kept beside.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
) -> None:
    """Write a first configuration from Slurm's settings, and list the next steps.

    To be run as root on slurmctld's host. What is not said is asked on a terminal; with --yes,
    or without a terminal, it is what is said in brackets. No file of Slurm's is changed.
    """
    is_interactive = not yes and sys.stdin.isatty()
    site = query_site(slurm_conf, slurm_bin)
    is_jobcomp_free = not site.jobcomp or site.jobcomp == "jobcomp/lua"
    has_jobcomp = _ask_yes_no(
        is_interactive, jobcomp, "Have slurmctld tell of each job that ends", is_jobcomp_free
    )
    init_options = InitOptions(
        cluster=_ask_text(is_interactive, cluster, "The cluster's name", site.cluster or "cluster"),
        user=_ask_text(is_interactive, user, "Who Steward runs as", site.slurm_user),
        archive_dir=_ask_text(
            is_interactive, archive_dir, "Where scripts are archived", DEFAULT_ARCHIVE
        ),
        state_dir=state_dir,
        out=out,
        jobcomp_lines=lines if has_jobcomp else "",
        nodes=_ask_address(
            is_interactive, nodes, "Are nodes to report what jobs use", _NODES_EXAMPLE
        ),
        bank=_ask_yes_no(
            is_interactive, bank, "Have a bank, which observes and refuses nothing", False
        ),
        sensor=_ask_yes_no(is_interactive, sensor, "Tell when nodes change their state", False),
        web=_ask_address(is_interactive, web, "Serve web pages", _WEB_EXAMPLE),
    )
    if init_options.nodes and has_user(LISTENER_USER):
        init_options = msgspec.structs.replace(init_options, listener=LISTENER_USER)
    if init_options.web:
        url = _ask_text(is_interactive and web_url is None, web_url or "", _URL_QUESTION, "")
        init_options = msgspec.structs.replace(init_options, web_url=url)
    _check_paths(init_options)
    for path in write_configuration(init_options, site, force=force):
        typer.echo(f"{escape_line(path)} is written.")
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
        typer.echo(
            f"JobCompType is {escape_line(site.jobcomp)}: what slurmctld would tell of jobs "
            "that end "
            "comes from snapshots and sacct (docs/accounting.md says what is lost)."
        )
    typer.echo("\nWhat is left, in this order; each step is of use without the next ones:")
    for number, step in enumerate(list_steps(init_options, site), start=1):
        _print_step(number, step)


def _print_step(number: int, step: SetupStep) -> None:
    """Print a step with its commands and note."""
    typer.echo(f"\n{number}. {step.title}")
    for line in step.commands:
        typer.echo(f"     {escape_line(line)}")
    if step.note:
        typer.echo(f"   {escape_line(step.note)}")


def _ask_text(is_interactive: bool, value: str, question: str, default: str) -> str:
    """Return an option's value, else ask for it, else return the default."""
    if value or not is_interactive:
        return value or default
    reply: str = typer.prompt(question, default=default, err=True)
    return reply.strip()


def _ask_yes_no(is_interactive: bool, value: bool | None, question: str, default: bool) -> bool:
    """Return an option's value, else ask yes or no, else return the default."""
    if value is not None or not is_interactive:
        return default if value is None else value
    return bool(typer.confirm(question, default=default, err=True))


def _ask_address(is_interactive: bool, value: str | None, question: str, default: str) -> str:
    """Return an option's address, else ask whether and where to listen; "" for no."""
    if value is not None or not is_interactive:
        return value or ""
    return (
        _ask_text(is_interactive, "", "At which address", default)
        if _ask_yes_no(is_interactive, None, question, False)
        else ""
    )
