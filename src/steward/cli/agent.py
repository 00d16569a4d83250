"""``steward agent``: run the sender of a compute node, or write it out as a single file for nodes.

The sender itself is ``steward/agent``: standard library only, Python 3.9 or later.
"""

from pathlib import Path
from typing import Annotated

import typer

from steward.agent import agent
from steward.core.errors import StewardError, UsageError
from steward.core.files import replace_file

# ruff: noqa: ARG001 -- the options are handed on as they stand in the context


def app(
    ctx: typer.Context,
    spool: Annotated[
        str,
        typer.Option("--spool", metavar="DIR", help="Directory that the SPANK plugin writes to."),
    ] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="HOST:PORT", help="Where Steward listens for nodes.")
    ] = "",
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", metavar="NAME", help="NodeName; each that has a file there if none."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="The cluster, as Steward calls it.")
    ] = "",
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt.")] = False,
    ca: Annotated[
        str, typer.Option("--ca", metavar="FILE", help="What Steward's certificate is signed with.")
    ] = "",
    certificate: Annotated[
        str,
        typer.Option("--certificate", metavar="FILE", help="The node's own, in place of MUNGE."),
    ] = "",
    key: Annotated[
        str, typer.Option("--key", metavar="FILE", help="The key of that certificate.")
    ] = "",
    user: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME", help="User that Steward runs as, beside root."),
    ] = None,
    munge_socket: Annotated[
        str, typer.Option("--munge-socket", metavar="FILE", help="munged's socket.")
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Send what there is, and end: the default.")
    ] = False,
    resident: Annotated[
        bool, typer.Option("--resident", help="Stay, and look once a minute.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="S", help="Seconds between two looks.")
    ] = 60.0,
    jitter: Annotated[
        float, typer.Option("--jitter", metavar="S", help="Begin within so many seconds.")
    ] = 0.0,
    limit: Annotated[
        float, typer.Option("--limit", metavar="S", help="Try again for so many seconds.")
    ] = 45.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="How long Steward may take to answer.")
    ] = 30.0,
    heartbeat: Annotated[
        float,
        typer.Option("--heartbeat", metavar="S", help="Say so where there is nothing to say."),
    ] = 900.0,
    rotate_bytes: Annotated[
        int, typer.Option("--rotate-bytes", metavar="N", help="Begin a new file at this size.")
    ] = 1 << 20,
    most_bytes: Annotated[
        int, typer.Option("--most-bytes", metavar="N", help="Give up the oldest lines beyond this.")
    ] = 64 << 20,
    write: Annotated[
        str,
        typer.Option(
            "--write", metavar="FILE", help="Only write the program, to be copied to nodes."
        ),
    ] = "",
) -> None:
    """Send what happened on a compute node to Steward.

    Nodes need no Steward for this: --write makes one file, which runs with their own
    Python (3.9 or later) and takes the same options. It runs once a minute by a timer.
    """
    if write:
        _write_agent(Path(write))
        return
    if not spool or not to:
        raise UsageError("say where the lines are, --spool, and where Steward listens, --to")
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
        raise typer.Exit(code)


def _write_agent(target: Path) -> None:
    """Write the program atomically: nodes may be reading the previous version."""
    try:
        with replace_file(str(target), 0o755) as file:
            file.write(Path(agent.__file__).read_bytes())
    except OSError as error:
        raise StewardError(f"{target} cannot be written: {error.strerror}", target) from error
