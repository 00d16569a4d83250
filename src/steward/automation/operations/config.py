"""slurm.config.get: Slurm's configuration as slurmctld shows it."""

from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import WrongParameters
from steward.automation.operation import Doing, Operation, Parameters


class ConfigGet(Parameters, frozen=True, kw_only=True):
    """slurm.config.get."""

    item: Annotated[
        str,
        msgspec.Meta(description="One setting, in snake_case (topology_plugin); all if empty."),
    ] = ""


def get(doing: Doing, asked: ConfigGet) -> dict[str, Any]:
    """Settings and their values."""
    items = doing.machine.config_items()
    if not asked.item:
        return items
    if asked.item not in items:
        raise WrongParameters(
            f"Slurm's configuration has no {asked.item!r}: slurm.config.get without item shows all",
            asked.item,
        )
    return {asked.item: items[asked.item]}


OPERATIONS: Final = (
    Operation(
        ref="slurm.config.get",
        help="Show one or all settings of Slurm.",
        gives="Each setting's name and value.",
        parameters=ConfigGet,
        run=get,
        pack=True,
    ),
)
