"""``steward serve``: run the daemon of a configuration file."""

import os
from typing import Annotated

import typer

from steward.core.config.reader import DEFAULT_PATH, load
from steward.daemon.__main__ import become


def app(
    config: Annotated[
        str,
        typer.Option(
            "--config", envvar="STEWARD_CONFIG", metavar="FILE", help="The configuration file."
        ),
    ] = DEFAULT_PATH,
) -> None:
    """Run the daemon.

    It stays in the foreground, for systemd or a terminal. SIGHUP reads the
    configuration again, SIGTERM and Ctrl-C end it within five seconds.
    """
    load(config)  # says what is wrong with it, before anything starts
    become(os.path.abspath(config))
