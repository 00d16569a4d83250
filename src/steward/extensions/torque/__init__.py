"""Torque as a scheduler: watches pbs_server's spool and reads its scripts and job files.

``spool`` watches and captures, ``files`` turns what was captured into scripts, environments and
events, ``records`` parses job files.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.extensions.torque.spool import TORQUE
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        spool=("TORQUE",),
    )

__all__ = ["TORQUE"]
