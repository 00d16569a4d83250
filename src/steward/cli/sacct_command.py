"""Entry of ``steward sacct``, for the command list and for ``steward --debug sacct``.

Passes all arguments to ``cli/sacct.py``, which parses them without Click.
"""

import click

from steward.cli.parameters import wrap_function


def _sacct(context: click.Context) -> None:
    """List jobs and steps with their resource use, as Slurm's sacct does."""
    from steward.cli.sacct import execute_sacct

    code = execute_sacct(context.args)
    if code:
        raise click.exceptions.Exit(code)


app = wrap_function(
    _sacct,
    allow_extra_args=True,
    allow_interspersed_args=False,
    help_option_names=[],
    ignore_unknown_options=True,
)
