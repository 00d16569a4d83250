"""slurm.partition.update: change something of a partition."""

from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import WrongParameters
from steward.automation.operation import Doing, Operation, Parameters
from steward.slurm import UnknownPartition, WrongUpdate


class PartitionUpdate(Parameters, frozen=True, kw_only=True):
    """slurm.partition.update."""

    partition: Annotated[str, msgspec.Meta(description="Its name.")]
    infos: Annotated[
        dict[str, Any],
        msgspec.Meta(
            description="What to set, by the names that 'scontrol update partition' takes: "
            '{"state": "DRAIN", "max_time": "1-00:00:00"}.'
        ),
    ]


def update(doing: Doing, asked: PartitionUpdate) -> dict[str, Any]:
    """Change a partition."""
    from steward.slurm.machine_changing import partition_infos

    try:
        infos = partition_infos(asked.infos)
    except WrongUpdate as error:
        raise WrongParameters(f"slurm.partition.update: {error}") from error
    known = doing.machine.partitions()
    if asked.partition not in known:
        names = ", ".join(known)
        raise UnknownPartition(
            f"there is no partition {asked.partition!r}: there are {names}", (), asked.partition
        )
    before = known[asked.partition]
    told = {"partition": asked.partition, "old_state": before.state}
    if doing.dry_run:
        return {**told, "state": before.state, "would_change": True}
    doing.begin()
    doing.changing.update_partition(asked.partition, infos)
    after = doing.machine.partitions()[asked.partition]
    return {**told, "state": after.state, "changed": True}


OPERATIONS: Final = (
    Operation(
        ref="slurm.partition.update",
        help="Change something of a partition.",
        gives="The partition's state before and after.",
        parameters=PartitionUpdate,
        run=update,
        right="administrator",
        changes=True,
    ),
)
