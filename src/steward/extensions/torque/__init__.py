"""pbs_server's spool: how it is watched, what lies in it, and what its job files tell."""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.extensions.torque.spool import TORQUE
else:
    __getattr__ = lazy_exports(
        __name__,
        spool=("TORQUE",),
    )

__all__ = ["TORQUE"]
