"""``steward sandbox`` and ``steward demo``: run a throwaway Slurm cluster, and a demo on it."""

import os
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated

import click

from steward.cli.parameters import Argument, Group, Option

if TYPE_CHECKING:
    from steward.sandbox import Sandbox


app = Group("Run a temporary Slurm cluster in one directory.")

Directory = Annotated[
    str,
    Option(
        "--dir", metavar="D", help="Directory of the sandbox. Default: one in /tmp for each user."
    ),
]
SlurmVersion = Annotated[
    str,
    Option(
        "--slurm",
        metavar="VERSION",
        help="Version of Slurm: 24.11 or 26.05. Default: the installed one.",
    ),
]


@app.subcommand()
def up(
    directory: Directory = "",
    nodes: Annotated[int, Option("--nodes", min=1, max=256, help="Number of virtual nodes.")] = 4,
    slurm: SlurmVersion = "",
    cluster: Annotated[str, Option("--cluster", help="ClusterName.")] = "sandbox",
    conf: Annotated[
        list[str] | None,
        Option("--conf", metavar="LINE", help="Line to append to slurm.conf."),
    ] = None,
    database: Annotated[bool, Option("--db", help="Also start slurmdbd and MariaDB.")] = False,
    plugstack: Annotated[
        list[str] | None,
        Option(
            "--plugstack",
            metavar="LINE",
            help="Line to append to plugstack.conf; {directory} is the sandbox's directory.",
        ),
    ] = None,
    jobcomp: Annotated[
        str,
        Option(
            "--jobcomp", metavar="FILE", help="Script for JobCompType=jobcomp/lua: a jobcomp.lua."
        ),
    ] = "",
    foreground: Annotated[
        bool,
        Option("--foreground", help="Stay in the foreground, and end the cluster at Ctrl-C."),
    ] = False,
) -> None:
    """Start a temporary cluster, and return when it is ready for jobs."""
    from steward.sandbox import Sandbox, SandboxSpec

    spec = SandboxSpec(
        directory=_choose_directory(directory),
        nodes=nodes,
        slurm=slurm,
        cluster=cluster,
        extra=tuple(conf or ()),
        accounting=database,
        plugstack=tuple(plugstack or ()),
        jobcomp_lua=jobcomp,
    )
    started_s = time.monotonic()
    if foreground:
        # Defer signals during the start until there is a cluster to shut down.
        signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    sandbox = Sandbox.up(spec, detached=not foreground, report=_print_progress)
    _print_greeting(sandbox, time.monotonic() - started_s)
    if foreground:
        signal.sigwait(_END_SIGNALS)
        sandbox.down()


@app.subcommand(ignore_unknown_options=True, allow_interspersed_args=False)
def run(
    command: Annotated[list[str], Argument(help="Command to run, after --.")],
    directory: Directory = "",
    user: Annotated[
        str,
        Option(
            "--user",
            metavar="NAME",
            help="User of the sandbox that runs the command. Default: you.",
        ),
    ] = "",
) -> None:
    """Run a command in the temporary cluster.

    The command gets the cluster's SLURM_CONF. 'sandbox run' exits with its exit code.
    """
    sandbox = _load_sandbox(directory)
    argv = sandbox.make_command(command, user=user)
    sys.stdout.flush()
    os.execve(argv[0], argv, sandbox.make_environment())  # noqa: S606 - signals and exit code pass


@app.subcommand()
def status(
    directory: Directory = "",
    as_json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show whether the temporary cluster is up, and its directory. Exit with 1 if it is down."""
    import msgspec

    sandbox = _load_sandbox(directory)
    is_up = sandbox.is_up()
    services = sandbox.get_status() if is_up else {}
    if as_json:
        facts = {
            "up": is_up,
            "directory": sandbox.directory,
            "cluster": sandbox.plan.spec.cluster,
            "slurm_version": sandbox.plan.slurm_version,
            "slurm_conf": sandbox.slurm_conf,
            "users": list(sandbox.users),
            "services": {name: bool(pid) for name, pid in services.items()},
        }
        click.echo(msgspec.json.encode(facts))
    elif is_up:
        stopped = [name for name, pid in services.items() if not pid]
        click.echo(_summarize_sandbox(sandbox))
        click.echo(f"  slurm.conf  {sandbox.slurm_conf}")
        click.echo(f"  logs        {sandbox.directory}/log")
        if stopped:
            click.echo(f"  ended       {', '.join(stopped)}")
    else:
        click.echo(f"The sandbox in {sandbox.directory} is down; its directory remains.")
    if not is_up:
        raise click.exceptions.Exit(1)


@app.subcommand()
def down(
    directory: Directory = "",
    keep: Annotated[bool, Option("--keep", help="Keep the directory, with its logs.")] = False,
) -> None:
    """End all processes of the temporary cluster, and remove its directory."""
    from steward.sandbox import Sandbox

    path = _choose_directory(directory)
    if not os.path.exists(path):
        click.echo(f"No sandbox in {path}. Start one with 'steward sandbox up'.")
        return
    sandbox = Sandbox.load(path)
    sandbox.down(keep=keep)
    click.echo(f"The sandbox in {path} is down" + ("." if keep else " and removed."))


_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that shut down a sandbox that runs in the foreground."""


def _print_progress(line: str) -> None:
    """Print progress on stderr."""
    click.echo(line, err=True)


def _choose_directory(directory: str) -> str:
    """Return the sandbox's directory: option, environment, or the user's default."""
    from steward.sandbox import get_default_directory

    return directory or os.environ.get("STEWARD_SANDBOX") or get_default_directory()


def _load_sandbox(directory: str) -> "Sandbox":
    """Return the sandbox in a directory."""
    from steward.sandbox import Sandbox

    return Sandbox.load(_choose_directory(directory))


def _summarize_sandbox(sandbox: "Sandbox") -> str:
    """Describe a running sandbox in one sentence."""
    nodes = sandbox.plan.spec.nodes
    users = " and ".join(sandbox.users)
    return (
        f"Slurm {sandbox.plan.slurm_version} is up in {sandbox.directory}: "
        f"{nodes} {'node' if nodes == 1 else 'nodes'}, jobs by {users}."
    )


def _print_greeting(sandbox: "Sandbox", elapsed_s: float) -> None:
    """Print how to use and shut down a new sandbox."""
    from steward.sandbox import get_default_directory

    dir_option = (
        "" if sandbox.directory == get_default_directory() else f" --dir {sandbox.directory}"
    )
    first_user = next(iter(sandbox.users))
    click.echo(f"{_summarize_sandbox(sandbox)} It took {elapsed_s:.1f} s.")
    for arguments in (
        f"run{dir_option} -- sinfo",
        f"run{dir_option} --user {first_user} -- sbatch --wrap hostname",
    ):
        click.echo(f"  steward sandbox {arguments}")
    click.echo(f"  steward sandbox {shlex.join(['down', *dir_option.split()])}")


def demo(
    keep: Annotated[
        bool, Option("--keep", help="Keep the cluster running, and print the next commands.")
    ] = False,
    directory: Annotated[
        str,
        Option("--dir", metavar="D", help="Directory of the demo; removed at the end."),
    ] = "",
    slurm: SlurmVersion = "",
) -> None:
    """Demonstrate Steward on a temporary cluster.

    The demo starts a real Slurm, submits jobs, shows their records, and checks
    them. The exit code is 1 if a check fails.
    """
    from steward.demo.presentation import run_demo

    raise click.exceptions.Exit(
        1 if run_demo(keep=keep, directory=directory, slurm_version=slurm) else 0
    )
