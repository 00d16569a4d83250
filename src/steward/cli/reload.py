"""``steward reload``: have the daemon read its configuration again, and say what came of it."""

import typer

from steward.cli.options import DAEMON_SOCKET, DaemonSocket
from steward.daemon.reload import ask_reload

_TIMEOUT_S = 80.0


def app(
    socket: DaemonSocket = DAEMON_SOCKET,
) -> None:
    """Have the daemon read its configuration again.

    The daemon reads the file itself. If anything is wrong, this prints file, line and
    reason and exits with 1, and the daemon keeps its present configuration.
    """
    reloaded = ask_reload(socket, _TIMEOUT_S)
    typer.echo("The new configuration is in force.")
    if reloaded.waiting:
        typer.echo(f"These parts do not work yet: {', '.join(reloaded.waiting)}. 'steward doctor'")
