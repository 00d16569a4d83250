"""Which cluster a question is of: Lua is not told its name."""

import logging
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from steward.bank.gate.shapes import Submit

log = logging.getLogger(__name__)

_SAY_AGAIN_S: Final = 60.0


class Clusters:
    """Puts the name in where it goes without saying.

    Args:
        names: The clusters that are configured.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._said_at = -_SAY_AGAIN_S

    def named(self, ask: Submit) -> Submit:
        """The question with its cluster's name; unchanged where nobody can tell it."""
        if ask.cluster:
            return ask
        if len(self._names) == 1:
            return msgspec.structs.replace(ask, cluster=self._names[0])
        now = time.monotonic()
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            log.error(
                "slurmctld's job_submit.lua does not say of which cluster it asks, and there are "
                '%s: put steward_gate_cluster = "NAME" before its dofile, or run '
                "'steward plugins install --job-submit-lua' with --cluster NAME; "
                "until then the policy holds there",
                ", ".join(self._names),
            )
        return ask
