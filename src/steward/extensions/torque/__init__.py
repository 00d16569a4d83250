"""pbs_server's spool: how it is watched, what lies in it, and what its job files tell."""

from typing import TYPE_CHECKING

from steward.core.offered import offered

if TYPE_CHECKING:
    from steward.extensions.torque.spool import TORQUE
else:
    __getattr__ = offered(
        __name__,
        spool=("TORQUE",),
    )

__all__ = ["TORQUE"]
