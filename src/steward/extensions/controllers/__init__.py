"""Event forwarding between hosts: ``steward controller`` sends, ``steward serve`` receives."""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.extensions.controllers.forwarder import Forward
    from steward.extensions.controllers.receiver import Receiver
    from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
else:
    __getattr__ = lazy_exports(
        __name__,
        receiver=("Receiver",),
        forwarder=("Forward",),
        settings=(
            "ForwardSettings",
            "ReceiveSettings",
        ),
    )

__all__ = [
    "Forward",
    "ForwardSettings",
    "ReceiveSettings",
    "Receiver",
]
