"""Our permanent triggers: one for each event, set anew where lost, cleared where of no use.

slurmctld writes its triggers down some seconds after they were set, and one that is
killed meanwhile has lost them. So they are looked at now and then, and whenever it
was started anew. They only wake the sensor; without them it looks by the clock.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Final

from steward.capture.settings import HELPER_NAME
from steward.core.config import Settings
from steward.slurm import SlurmError
from steward.slurm.errors import UnknownTrigger
from steward.slurm.settings import ClusterSettings
from steward.slurm.triggers import TriggerRecord, Triggers

log = logging.getLogger(__name__)

EVENTS: Final = (
    *("down", "up", "drained", "draining", "resume", "fail", "reconfig"),
    *("primary_slurmctld_resumed_operation", "primary_slurmctld_resumed_control"),
    *("primary_slurmdbd_failure", "primary_slurmdbd_resumed_operation"),
)
"""What is worth a look. Not ``idle``: a permanent one of it goes off at every turn of
slurmctld's, whether there is news or not."""


class OurTriggers:
    """Keeps the triggers of one cluster.

    Args:
        cluster: Its name.
        settings: How its commands are found and started.
        program: The words of their program but for the event; "" to have none set.
        helper: The path of the helper, with which each of them begins.
    """

    def __init__(self, cluster: str, settings: ClusterSettings, program: str, helper: str) -> None:
        self._cluster = cluster
        self._triggers = Triggers(cluster, settings)
        self._program = program
        self._helper = helper
        self._said = ""
        self._is_cleared = False

    def keep(self) -> None:
        """Set those that are not there, and clear those of ours that are of no use.

        What cannot be done is said once: the sensor sees without them, only later.
        """
        if self._is_cleared:
            return
        try:
            self._keep()
            self._is_cleared = not self._program
        except SlurmError as error:
            self._say(
                f"cannot keep the triggers set, nodes are looked at by the clock alone: {error}"
            )
        else:
            self._said = ""

    def _keep(self) -> None:
        wanted = {event: f"{self._program} {event}" for event in self._wanted()}
        found: set[str] = set()
        for trigger in self._triggers.all():
            if not self._is_ours(trigger):
                continue
            if self._is_good(trigger, wanted) and trigger.event not in found:
                found.add(trigger.event)
            else:
                log.info("cluster %s: trigger %d is cleared", self._cluster, trigger.id)
                # Somebody else may have cleared it in this moment.
                with contextlib.suppress(UnknownTrigger):
                    self._triggers.clear(trigger.id)
        for event, program in wanted.items():
            if event not in found:
                self._triggers.set(program, event, permanent=True)
                log.info("cluster %s: a trigger is set for %s", self._cluster, event)

    def _wanted(self) -> Sequence[str]:
        if not self._program:
            return ()
        fires = self._triggers.events()
        return [event for event in EVENTS if fires.get(event) == ""]

    def _is_ours(self, trigger: TriggerRecord) -> bool:
        """Whether Steward has set it for this cluster; wherever its helper lay then."""
        words = trigger.program.split()
        return (
            len(words) >= 6
            and os.path.basename(words[0]) == HELPER_NAME
            and words[1] == "--socket"
            and words[5] == self._cluster
        )

    def _is_good(self, trigger: TriggerRecord, wanted: dict[str, str]) -> bool:
        return (
            trigger.permanent
            and not trigger.offset_s
            and wanted.get(trigger.event) == " ".join(trigger.program.split())
        )

    def _say(self, message: str) -> None:
        if message != self._said:
            self._said = message
            log.warning("cluster %s: %s", self._cluster, message)


def program_of(settings: Settings, cluster: str) -> str:
    """Return the words of a trigger's program, but for the event; every user can read them."""
    sensor = settings.sensor
    return " ".join(
        (
            *(sensor.helper, "--socket", settings.wake_socket(cluster)),
            *("--secret", sensor.secret_file, cluster),
        )
    )
