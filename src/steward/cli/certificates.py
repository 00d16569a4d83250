"""``steward plugins certificates``: certificates that nodes are known by in place of MUNGE."""

from typing import Annotated

import typer

from steward.admin.certificates import Authority
from steward.core.errors import UsageError


def certificates(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where they are kept, keys included.")
    ],
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="HOST", help="A name or address that agents are given."),
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="NODELIST", help="Nodes, as Slurm writes them.")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", metavar="NAME", help="Their cluster, where Steward has several."),
    ] = "",
    days: Annotated[
        int, typer.Option("--days", min=1, max=36500, help="How long they are valid.")
    ] = 1825,
) -> None:
    """Make certificates for nodes, and for Steward.

    An authority is made with the first of them. What is there is left as it is: remove a
    file and its key to have it made anew. Each node needs ca.crt and its own two files.
    """
    if not server and not nodes:
        raise UsageError("say for whom: --server for Steward's host, --nodes for nodes")
    authority = Authority(directory, days)
    if server:
        is_new = authority.server(server)
        typer.echo(f"{directory}/server.crt {'is new' if is_new else 'was there'}")
        if is_new:
            typer.echo(f"Now give {directory}/server.key to Steward's user, by chown")
    made = [is_new for _, is_new in authority.nodes(nodes, cluster)] if nodes else []
    if made:
        typer.echo(f"{directory}/nodes: {sum(made)} new, {len(made) - sum(made)} were there")
