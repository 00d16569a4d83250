"""Typer entry of ``steward sacct``, for the command list and for ``steward --debug sacct``.

Passes all arguments to ``cli/sacct.py``, which parses them without Typer.
"""

import typer

from steward.cli.groups import CONTEXT

app = typer.Typer(context_settings=CONTEXT, add_completion=False)


@app.command(
    "sacct",
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
        "ignore_unknown_options": True,
    },
)
def command(context: typer.Context) -> None:
    """List jobs and steps with their resource use, as Slurm's sacct does."""
    from steward.cli.sacct import execute_sacct

    code = execute_sacct(context.args)
    if code:
        raise typer.Exit(code)
