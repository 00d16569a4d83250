"""What the actions about Steward itself work with, and who may call them."""

import os
import pwd
from collections.abc import Callable
from datetime import datetime
from typing import Any

from steward.core.access import Access, Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.errors import Refused
from steward.core.events import utc_now
from steward.jobs.queries import clusters_of


class StatusRoom:
    """The context of the actions about Steward itself.

    Args:
        settings: The whole configuration.
        access: Who may see what.
        registry: What other rooms can be asked for.
        now: The clock.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        registry: Registry,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.now = now
        self._access = access
        self._registry = registry

    def admit(self, asker: Asker) -> None:
        """Let an operator pass.

        Raises:
            Refused: The asker is none, or not on every cluster.
        """
        if not self.is_operator(asker):
            raise Refused("how Steward itself stands is for operators to see")

    def admit_scraper(self, asker: Asker) -> None:
        """Let an operator pass, or the user of the web process, which serves the figures.

        Raises:
            Refused: The asker is neither.
        """
        if asker.uid != _uid_of(self.settings.web.user) and not self.is_operator(asker):
            raise Refused("figures are for operators and for the user of Steward's web process")

    def is_operator(self, asker: Asker) -> bool:
        """Whether the asker is an operator on every cluster."""
        clusters = clusters_of(self.settings)
        return all(self._access.is_operator(asker, cluster) for cluster in clusters)

    def ask(self, name: str, request: Any) -> Any:
        """The answer of another room to Steward itself: who asked this one was let in.

        Raises:
            StewardError: Whatever the action refuses or cannot do.
        """
        return self._registry.call(name, self._own(), request)

    def _own(self) -> Asker:
        try:
            uid = os.stat(self.settings.state_dir).st_uid
        except OSError:
            uid = os.geteuid()
        return Asker(uid=uid, how="local")


def _uid_of(user: str) -> int | None:
    if not user:
        return None
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None  # no such user on this host, so nobody is it
