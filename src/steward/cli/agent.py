"""``steward agent``: run the sender of a compute node, or write it out as a single file for nodes.

The sender itself is ``steward/agent``: standard library only, Python 3.9 or later.
"""

from pathlib import Path
from typing import Annotated

import click

from steward.agent import agent
from steward.cli.parameters import Option
from steward.core.errors import StewardError, UsageError
from steward.core.files import replace_file

# ruff: noqa: ARG001 -- the options are handed on as they stand in the context


def app(
    ctx: click.Context,
    spool: Annotated[
        str,
        Option(
            "--spool",
            metavar="DIR",
            help="Spool of the SPANK plugin: the directory that it writes to.",
        ),
    ] = "",
    to: Annotated[
        str,
        Option(
            "--to",
            metavar="HOST:PORT",
            help="Address where Steward receives node reports: 'listen' of [nodes].",
        ),
    ] = "",
    node: Annotated[
        list[str] | None,
        Option(
            "--node",
            metavar="NAME",
            help="NodeName in Slurm. Default: every node with a file in the spool.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        Option("--cluster", metavar="NAME", help="Name of the cluster in Steward's configuration."),
    ] = "",
    tls: Annotated[bool, Option("--tls", help="Encrypt connections with TLS.")] = False,
    ca: Annotated[
        str,
        Option("--ca", metavar="FILE", help="CA certificates that verify Steward's certificate."),
    ] = "",
    certificate: Annotated[
        str,
        Option("--certificate", metavar="FILE", help="Certificate of the node; replaces MUNGE."),
    ] = "",
    key: Annotated[
        str, Option("--key", metavar="FILE", help="Private key of the node's certificate.")
    ] = "",
    user: Annotated[
        list[str] | None,
        Option(
            "--user",
            metavar="NAME",
            help="User that Steward runs as. The agent accepts replies of this user and of root.",
        ),
    ] = None,
    munge_socket: Annotated[
        str, Option("--munge-socket", metavar="FILE", help="Socket of munged.")
    ] = "",
    once: Annotated[
        bool,
        Option("--once", help="Send all waiting reports, then exit. This is the default."),
    ] = False,
    resident: Annotated[
        bool,
        Option("--resident", help="Keep running, and send reports every --every seconds."),
    ] = False,
    every: Annotated[
        float,
        Option("--every", metavar="S", help="Interval between two runs of --resident, in seconds."),
    ] = 60.0,
    jitter: Annotated[
        float,
        Option(
            "--jitter",
            metavar="S",
            help="Maximum random delay before the first request, in seconds.",
        ),
    ] = 0.0,
    limit: Annotated[
        float,
        Option(
            "--limit", metavar="S", help="Time after which the agent stops retrying, in seconds."
        ),
    ] = 45.0,
    timeout: Annotated[
        float,
        Option("--timeout", metavar="S", help="Timeout of a reply from Steward, in seconds."),
    ] = 30.0,
    heartbeat: Annotated[
        float,
        Option(
            "--heartbeat",
            metavar="S",
            help="Interval of heartbeats from a node without reports, in seconds.",
        ),
    ] = 900.0,
    rotate_bytes: Annotated[
        int,
        Option(
            "--rotate-bytes",
            metavar="N",
            help="Size at which the agent starts a new file, in bytes.",
        ),
    ] = 1 << 20,
    most_bytes: Annotated[
        int,
        Option(
            "--most-bytes",
            metavar="N",
            help="Maximum size of waiting reports, in bytes; the agent drops the oldest.",
        ),
    ] = 64 << 20,
    write: Annotated[
        str,
        Option(
            "--write",
            metavar="FILE",
            help="Write the agent program to this file, to copy it to nodes, then exit.",
        ),
    ] = "",
) -> None:
    """Send the reports of a compute node to Steward.

    Compute nodes need only one file, which --write creates. It takes the same options and
    requires Python 3.9 or later. A timer runs it once a minute.
    """
    if write:
        _write_agent(Path(write))
        return
    if not spool or not to:
        raise UsageError(
            "options missing: give --spool (directory with the lines) and --to (address of Steward)"
        )
    arguments: list[str] = []
    for name, value in ctx.params.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False or value == "":
            continue
        if value is True:
            arguments.append(option)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            arguments += [f"{option}={item}" for item in values]
    code = agent.main(arguments, "steward agent")
    if code:
        raise click.exceptions.Exit(code)


def _write_agent(target: Path) -> None:
    """Write the program atomically: nodes may be reading the previous version."""
    try:
        with replace_file(str(target), 0o755) as file:
            file.write(Path(agent.__file__).read_bytes())
    except OSError as error:
        raise StewardError(f"cannot write {target}: {error.strerror}", target) from error
