"""Torque as a scheduler: watches pbs_server's spool and reads its scripts and job files."""

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
