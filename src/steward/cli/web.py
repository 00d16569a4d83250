"""``steward web``: serve the pages and the API."""

from steward.cli.options import DAEMON_SOCKET, DaemonSocket, LogLevelOption


def app(
    socket: DaemonSocket = DAEMON_SOCKET,
    log_level: LogLevelOption = "info",
) -> None:
    """Serve the pages and the API.

    It reads no configuration and none of Steward's files: the daemon tells it what stands in
    [web]. Run it as the user that is named there. SIGTERM and Ctrl-C end it.
    """
    from steward.core.logs import set_up
    from steward.web.application import run

    set_up(log_level, "web")
    run(socket)
