"""``steward listen``: listen for compute nodes in the daemon's place."""

import os
from typing import Annotated

import typer

from steward.capture.settings import LISTENER_SOCKET
from steward.cli.options import LogLevelOption
from steward.core.config import Settings


def app(
    socket: Annotated[
        str,
        typer.Option("--socket", metavar="FILE", help="The daemon's socket for the listener."),
    ] = os.path.join(os.path.dirname(Settings().socket), LISTENER_SOCKET),
    log_level: LogLevelOption = "info",
) -> None:
    """Listen for compute nodes under a user of its own.

    It reads no configuration and none of Steward's files: the daemon tells it what stands in
    [nodes]. Run it as the user that 'listener' names there. SIGTERM and Ctrl-C end it.
    """
    from steward.capture.nodes.listener import listen
    from steward.core.logs import set_up

    set_up(log_level, "listen")
    listen(socket)
