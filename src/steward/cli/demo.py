"""``steward demo``: see it all on a throwaway cluster."""

from typing import Annotated

import typer


def app(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave it up, and say how to go on and how to end it.")
    ] = False,
    directory: Annotated[
        str,
        typer.Option("--dir", metavar="D", help="Where everything goes; removed at the end."),
    ] = "",
    slurm: Annotated[
        str,
        typer.Option("--slurm", metavar="VERSION", help="24.11 or 26.05; else the installed one."),
    ] = "",
) -> None:
    """See it all on a throwaway cluster.

    Brings up a real Slurm, has jobs submitted, shows what is kept of them, and
    checks that all of it is right: the exit code is 1 if anything is not.
    """
    from steward.demo import play

    raise typer.Exit(1 if play(keep=keep, directory=directory, slurm=slurm) else 0)
