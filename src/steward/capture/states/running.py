"""The process that watches one cluster: what it needs, and its loop."""

import logging
from collections.abc import Callable
from contextlib import closing

from steward.capture.states.daemons import stands_by
from steward.capture.states.source import Sensor
from steward.capture.states.store import StateStore
from steward.capture.states.triggers import OurTriggers, program_of
from steward.capture.states.wakeups import Wakeups
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.waiting import Backoff, Stop
from steward.slurm.machine import Machine

log = logging.getLogger(__name__)

_LONGEST_NAP_S = 10.0


def run(
    settings: Settings, cluster: str, append: Append, stop: Stop, beat: Callable[[], None]
) -> None:
    """Watch a cluster until the Stop is raised.

    Args:
        settings: The configuration.
        cluster: Name of the cluster.
        append: Appends events durably.
        stop: Ends it.
        beat: Called at every turn, to show that the process lives.

    Raises:
        SqliteUnavailable: What was told cannot be looked up now.
    """
    of, sensor = settings.cluster[cluster], settings.sensor
    store = StateStore(settings.state_dir, cluster)
    wakeups = _wakeups(settings, cluster)
    watching = Sensor(
        cluster,
        Machine(cluster, of),
        store,
        interval_s=sensor.interval_s,
        usage=sensor.usage,
        triggers=OurTriggers(
            cluster, of, program_of(settings, cluster) if wakeups is not None else "", sensor.helper
        ),
        stands_by=stands_by,
    )
    with closing(store):
        try:
            _watch(watching, wakeups, append, stop, beat)
        finally:
            if wakeups is not None:
                wakeups.close()


def _wakeups(settings: Settings, cluster: str) -> Wakeups | None:
    if not settings.sensor.triggers:
        return None
    wakeups = Wakeups(settings.wake_socket(cluster), settings.sensor.secret_file, cluster)
    try:
        wakeups.start()
    except OSError as error:
        log.error(
            "cluster %s: cannot listen on %s: %s; nodes are looked at by the clock alone",
            cluster,
            settings.wake_socket(cluster),
            error.strerror or error,
        )
        wakeups.close()
        return None
    return wakeups


def _watch(
    watching: Sensor,
    wakeups: Wakeups | None,
    append: Append,
    stop: Stop,
    beat: Callable[[], None],
) -> None:
    backoff = Backoff()
    fds = (wakeups.fd,) if wakeups is not None else ()
    said = ""
    while not stop.is_set():
        beat()
        if wakeups is not None:
            watching.wake(wakeups.take())
        try:
            wait_s = watching.turn(append)
            backoff.reset()
            said = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if stop.is_set():
                return
            if str(error) != said:
                said = str(error)
                log.error("the sensor waits: %s", error)
        stop.wait(min(wait_s, _LONGEST_NAP_S), *fds)
