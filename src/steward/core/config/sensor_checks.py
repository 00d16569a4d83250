"""What is wrong with [sensor]."""

import os
from collections.abc import Iterator
from typing import Final

from steward.capture.settings import HELPER_NAME
from steward.core.config import Settings
from steward.core.config.problem import Problem

_LEAST_INTERVAL_S: Final = 0.1
_LONGEST_ADDRESS: Final = 107
"""A Unix socket's path, unix(7)."""


def sensor_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with the sensor's settings."""
    sensor = settings.sensor
    if sensor.interval_s < _LEAST_INTERVAL_S:
        yield Problem(
            ("sensor", "interval_s"), f"'sensor.interval_s' must be {_LEAST_INTERVAL_S} or more"
        )
    for name in ("helper", "socket", "secret_file"):
        path = getattr(sensor, name)
        if not os.path.isabs(path):
            yield Problem(
                ("sensor", name), f"'sensor.{name}' must be an absolute path, not {path!r}"
            )
        elif any(character.isspace() for character in path):
            # slurmctld cuts a trigger's program into words, and knows no quotes.
            yield Problem(("sensor", name), f"'sensor.{name}' holds a blank: choose another path")
    if os.path.basename(sensor.helper) != HELPER_NAME:
        yield Problem(
            ("sensor", "helper"),
            f"'sensor.helper' must be called {HELPER_NAME}: so Steward knows its triggers again",
        )
    for cluster in settings.cluster:
        path = settings.wake_socket(cluster)
        if len(os.fsencode(path)) > _LONGEST_ADDRESS:
            yield Problem(
                ("sensor", "socket"),
                f"'sensor.socket': {path} is longer than the {_LONGEST_ADDRESS} bytes that a "
                "socket's path may have",
            )
            return
    if sensor.enabled and not any(
        of.asks_slurm and not of.remote for of in settings.cluster.values()
    ):
        yield Problem(
            ("sensor", "enabled"),
            "[sensor] asks Slurm, and no cluster here is asked: of one with remote = true "
            "the controller's own configuration has it",
        )
