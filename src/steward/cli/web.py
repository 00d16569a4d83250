"""``steward web``: serve the pages and the API."""

from typing import Annotated, Literal

import typer

from steward.config import Settings


def app(
    socket: Annotated[
        str,
        typer.Option(
            "--socket", envvar="STEWARD_SOCKET", metavar="FILE", help="The daemon's socket."
        ),
    ] = Settings().socket,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            case_sensitive=False,
            help="debug, info, warning or error.",
        ),
    ] = "info",
) -> None:
    """Serve the pages and the API.

    It reads no configuration and none of Steward's files: the daemon tells it what stands in
    [web]. Run it as the user that is named there. SIGTERM and Ctrl-C end it.
    """
    from steward.logs import set_up
    from steward.web.run import run

    set_up(log_level, "web")
    run(socket)
