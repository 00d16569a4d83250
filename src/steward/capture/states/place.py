"""Where the trigger helper and the sensor meet: a socket, and a trigger's program."""

import os
from typing import Final

from steward.core.config import Settings

HELPER_NAME: Final = "steward-trigger"
"""What the helper is called wherever it lies: so our triggers are known again."""


def wake_socket(settings: Settings, cluster: str) -> str:
    """The socket on which a cluster's helper wakes its sensor.

    Each cluster has one of its own where several are watched by one Steward.
    """
    path = settings.sensor.socket
    watched = [name for name, of in settings.cluster.items() if of.asks_slurm and not of.remote]
    if len(watched) <= 1:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}-{cluster}{suffix}"


def program_of(settings: Settings, cluster: str) -> str:
    """The words of a trigger's program, but for the event; every user can read them."""
    sensor = settings.sensor
    return " ".join(
        (
            *(sensor.helper, "--socket", wake_socket(settings, cluster)),
            *("--secret", sensor.secret_file, cluster),
        )
    )
