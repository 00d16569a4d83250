"""Messages between a plugin's halves: recorded durably in send(), delivered as events.

:class:`MessageSender` appends a message to the journal before the hook that sends it goes on; the
journal delivers it to the plugin's consumer, which calls ``slurm_jobacct_process_message``. A hook
that is called again sends the same message under the same key, so it is recorded once. The plugin's
parameters MaxSendRetries and MaxSendRetryDelay set the tries while the journal is unavailable.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Final

from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import PLUGIN_MESSAGE, Event, utc_now
from steward.core.usage import PluginMessage
from steward.core.waits import Stop
from steward.extensions.jobacct_plugins.api import (
    CONTROLLER,
    MAX_MESSAGE_BYTES,
    PluginError,
    SendFailed,
    parse_number_parameter,
)

log = logging.getLogger(__name__)

RETRIES_PARAMETER: Final = "MaxSendRetries"
"""Parameter with the number of tries after the first."""
DELAY_PARAMETER: Final = "MaxSendRetryDelay"
"""Parameter with the time between tries, in seconds."""
_DEFAULT_RETRIES: Final = 3
_DEFAULT_DELAY_S: Final = 1
MAX_DELAY_S: Final = 60
"""Longest accepted delay, in seconds: longer waits would look like a hang."""


class MessageSender:
    """Sender of one plugin's messages; retries as the plugin's parameters say.

    Args:
        plugin_type: The plugin's type.
        parameters: JobAcctParameters.
        append: Appends events once.
        stop: Ends the waiting between tries.
        beat: Heartbeat, called at each try.

    Raises:
        ParameterError: One of the parameters is not a number.
    """

    def __init__(
        self,
        plugin_type: str,
        parameters: str,
        append: Append,
        stop: Stop,
        beat: Callable[[], None],
    ) -> None:
        self._type = plugin_type
        self._append = append
        self._stop = stop
        self._beat = beat
        self._retries = parse_number_parameter(parameters, RETRIES_PARAMETER, _DEFAULT_RETRIES)
        self._delay_s = min(
            parse_number_parameter(parameters, DELAY_PARAMETER, _DEFAULT_DELAY_S), MAX_DELAY_S
        )

    def send_message(
        self, cause: Event, call_id: str, node: str, recipient: str, data: bytes
    ) -> None:
        """Record one message as an event.

        Args:
            cause: The event that the hook was called for.
            call_id: Hook and message number within it: the same cause sends the same message
                under the same key.
            node: Node of the hook; "" for the controller.
            recipient: ``controller`` or ``mynode``.
            data: The content.

        Raises:
            PluginError: The message is invalid.
            SendFailed: It could not be recorded in as many tries as the parameters say.
        """
        if recipient not in (CONTROLLER, "mynode"):
            raise PluginError(
                f"invalid recipient {recipient!r}: use 'controller' or 'mynode'", recipient
            )
        if type(data) is not bytes or len(data) > MAX_MESSAGE_BYTES:
            raise PluginError(f"invalid message: give bytes, at most {MAX_MESSAGE_BYTES}", data)
        sender = node or CONTROLLER
        digest = hashlib.blake2b(
            f"{self._type}\n{cause.key}\n{call_id}".encode(), digest_size=16
        ).hexdigest()
        now = utc_now()
        event = Event(
            kind=PLUGIN_MESSAGE,
            cluster=cause.cluster,
            key=f"message:{self._type}:{digest}",
            at=now,
            seen_at=now,
            source=self._type,
            body=PluginMessage(
                plugin_type=self._type,
                to=sender if recipient == "mynode" else CONTROLLER,
                sender=sender,
                data=data,
            ),
        )
        self._append_with_retries(event)

    def _append_with_retries(self, event: Event) -> None:
        """Append an event, with retries."""
        for attempt in range(self._retries + 1):
            self._beat()
            try:
                self._append([event])
            except Unavailable as error:
                log.debug("%s: cannot send a message, retrying: %s", self._type, error)
                last_error = error
            else:
                return
            if attempt < self._retries:
                self._stop.wait(self._delay_s)
            if self._stop.is_set():
                break
        raise SendFailed(f"{self._type}: cannot record a message: {last_error}") from last_error
