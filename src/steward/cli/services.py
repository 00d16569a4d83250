"""Commands that run Steward's services: serve, controller, listen, web; and reload.

Each service stays in the foreground for systemd; ``reload`` makes the daemon read its
configuration.
"""

import os
from typing import Annotated

import click

from steward.capture.settings import LISTENER_SOCKET
from steward.cli.options import DAEMON_SOCKET, DaemonSocket, LogLevelOption
from steward.cli.parameters import Option
from steward.core.config import Settings
from steward.core.config.reader import DEFAULT_PATH, load_settings
from steward.daemon.__main__ import exec_daemon
from steward.daemon.controller import make_controller_workers
from steward.daemon.reload import request_reload

_ConfigPath = Annotated[
    str,
    Option(
        "--config",
        envvar="STEWARD_CONFIG",
        metavar="FILE",
        help="Path of the configuration file.",
    ),
]


def serve(config: _ConfigPath = DEFAULT_PATH) -> None:
    """Run the daemon.

    It stays in the foreground, for systemd or a terminal. SIGHUP reloads the
    configuration. SIGTERM and Ctrl-C end it within five seconds.
    """
    load_settings(config)  # reports errors before anything starts
    exec_daemon(os.path.abspath(config))


def controller(config: _ConfigPath = DEFAULT_PATH) -> None:
    """Capture scripts and job events of a slurmctld host; forward them to Steward on another host.

    It stays in the foreground, for systemd or a terminal. SIGHUP reloads the
    configuration. SIGTERM and Ctrl-C end it within five seconds.
    """
    make_controller_workers(load_settings(config))  # reports errors before anything starts
    exec_daemon(os.path.abspath(config), controller=True)


def listen(
    socket: Annotated[
        str,
        Option("--socket", metavar="FILE", help="Path of the socket between daemon and listener."),
    ] = os.path.join(os.path.dirname(Settings().socket), LISTENER_SOCKET),
    log_level: LogLevelOption = "info",
) -> None:
    """Receive reports of compute nodes, as an unprivileged user.

    It reads neither the configuration nor Steward's files: the daemon sends it the settings of
    [nodes]. Run it as the user that [nodes] names as 'listener'. SIGTERM and Ctrl-C end it.
    """
    from steward.capture.nodes.listener import run_listener
    from steward.core.logs import configure_logging

    configure_logging(log_level, "listen")
    run_listener(socket)


def web(
    socket: DaemonSocket = DAEMON_SOCKET,
    log_level: LogLevelOption = "info",
) -> None:
    """Serve the web pages and the API.

    It reads neither the configuration nor Steward's files: the daemon sends it the settings of
    [web]. Run it as the user that [web] names as 'user'. SIGTERM and Ctrl-C end it.
    """
    from steward.core.logs import configure_logging
    from steward.web.application import run_web

    configure_logging(log_level, "web")
    run_web(socket)


_TIMEOUT_S = 80.0
"""Longest wait for the daemon to reload, in seconds."""


def reload(
    socket: DaemonSocket = DAEMON_SOCKET,
) -> None:
    """Reload the daemon's configuration.

    The daemon reads the file itself. If the file is invalid, the daemon keeps its
    present configuration, and the command prints file, line and reason and exits with 1.
    """
    reply = request_reload(socket, _TIMEOUT_S)
    click.echo("The daemon reloaded its configuration.")
    if reply.waiting:
        click.echo(
            f"These workers are not ready yet: {', '.join(reply.waiting)}. Run 'steward doctor'."
        )
