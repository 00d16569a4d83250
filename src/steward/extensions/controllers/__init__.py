"""Event forwarding between hosts: ``steward controller`` sends, ``steward serve`` receives.

``forwarder`` and ``receiver`` are the two ends, ``wire`` is the protocol between them;
``admission`` authenticates the hosts and checks what they send.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.extensions.controllers.forwarder import EventForwarder
    from steward.extensions.controllers.receiver import ControllerReceiver
    from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        receiver=("ControllerReceiver",),
        forwarder=("EventForwarder",),
        settings=(
            "ForwardSettings",
            "ReceiveSettings",
        ),
    )

__all__ = [
    "ControllerReceiver",
    "EventForwarder",
    "ForwardSettings",
    "ReceiveSettings",
]
