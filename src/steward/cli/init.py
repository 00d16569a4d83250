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
    Site,
    Step,
    Wishes,
    is_user,
    make,
    site_of,
    steps,
)
from steward.admin.plugins.installation import DEFAULT_LINES
from steward.capture.settings import LISTENER_USER
from steward.core.errors import UsageError
from steward.core.printable import safe

_NODES = "0.0.0.0:6826"
_WEB = "127.0.0.1:8290"
_URL = "URL of the pages in users' browsers, such as https://steward.example.org"


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
    ] = DEFAULT_LINES,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="ADDRESS", help=f"Where nodes report, e.g. {_NODES}."),
    ] = None,
    bank: Annotated[
        bool | None, typer.Option("--bank/--no-bank", help="Have a bank, which observes.")
    ] = None,
    sensor: Annotated[
        bool | None, typer.Option("--sensor/--no-sensor", help="Tell when nodes change.")
    ] = None,
    web: Annotated[
        str | None,
        typer.Option("--web", metavar="ADDRESS", help=f"Where pages are served, e.g. {_WEB}."),
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
    """Write a first configuration, from what Slurm says, and tell what is left to do.

    To be run as root on slurmctld's host. What is not said is asked on a terminal; with --yes,
    or without a terminal, it is what is said in brackets. No file of Slurm's is changed.
    """
    asks = not yes and sys.stdin.isatty()
    site = site_of(slurm_conf, slurm_bin)
    free = not site.jobcomp or site.jobcomp == "jobcomp/lua"
    has_jobcomp = _whether(asks, jobcomp, "Have slurmctld tell of each job that ends", free)
    wishes = Wishes(
        cluster=_text(asks, cluster, "The cluster's name", site.cluster or "cluster"),
        user=_text(asks, user, "Who Steward runs as", site.slurm_user),
        archive_dir=_text(asks, archive_dir, "Where scripts are archived", DEFAULT_ARCHIVE),
        state_dir=state_dir,
        out=out,
        jobcomp_lines=lines if has_jobcomp else "",
        nodes=_address(asks, nodes, "Are nodes to report what jobs use", _NODES),
        bank=_whether(asks, bank, "Have a bank, which observes and refuses nothing", False),
        sensor=_whether(asks, sensor, "Tell when nodes change their state", False),
        web=_address(asks, web, "Serve web pages", _WEB),
    )
    if wishes.nodes and is_user(LISTENER_USER):
        wishes = msgspec.structs.replace(wishes, listener=LISTENER_USER)
    if wishes.web:
        url = _text(asks and web_url is None, web_url or "", _URL, "")
        wishes = msgspec.structs.replace(wishes, web_url=url)
    _check(wishes)
    for path in make(wishes, site, force=force):
        typer.echo(f"{safe(path)} is written.")
    _tell(wishes, site)


def _check(wishes: Wishes) -> None:
    """Reject relative paths."""
    for name in ("archive_dir", "state_dir", "out"):
        path = getattr(wishes, name)
        if not path.startswith("/"):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be an absolute path, not {path!r}", path)


def _tell(wishes: Wishes, site: Site) -> None:
    """Print the remaining steps."""
    if site.jobcomp and site.jobcomp != "jobcomp/lua":
        typer.echo(
            f"JobCompType is {safe(site.jobcomp)}: what slurmctld would tell of jobs that end "
            "comes from snapshots and sacct (docs/accounting.md says what is lost)."
        )
    typer.echo("\nWhat is left, in this order; each step is of use without the next ones:")
    for number, step in enumerate(steps(wishes, site), start=1):
        _print(number, step)


def _print(number: int, step: Step) -> None:
    """Print a step with its commands and note."""
    typer.echo(f"\n{number}. {step.title}")
    for line in step.commands:
        typer.echo(f"     {safe(line)}")
    if step.note:
        typer.echo(f"   {safe(step.note)}")


def _text(asks: bool, said: str, question: str, usual: str) -> str:
    """Return an option's value, else ask for it, else return the default."""
    if said or not asks:
        return said or usual
    answer: str = typer.prompt(question, default=usual, err=True)
    return answer.strip()


def _whether(asks: bool, said: bool | None, question: str, usual: bool) -> bool:
    """Return an option's value, else ask yes or no, else return the default."""
    if said is not None or not asks:
        return usual if said is None else said
    return bool(typer.confirm(question, default=usual, err=True))


def _address(asks: bool, said: str | None, question: str, usual: str) -> str:
    """Return an option's address, else ask whether and where to listen; "" for no."""
    if said is not None or not asks:
        return said or ""
    return (
        _text(asks, "", "At which address", usual) if _whether(asks, None, question, False) else ""
    )
