"""The one entry point of the pack's actions: what is asked for is done by Steward.

Which action it is says the parameter ``operation``, which each action's metadata
fixes. Steward checks who asks, keeps the audit log, and gives the result.
"""

from typing import Any

from st2common.runners.base_action import Action

from steward.automation.actions import RunOperationRequest
from steward.automation.runner import OperationOutcome
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.errors import StewardError
from steward.daemon.registry import get_action

_OWN = ("cluster", "dry_run", "force")
_TEXTS = ("jobid", "nodes")
"""Parameters that Steward takes as text, and workflows have as numbers and lists, too."""


class Run(Action):
    """Runs one of Steward's actions."""

    def run(self, *, operation: str = "", **given: Any) -> tuple[bool, Any]:
        """Run it.

        Args:
            operation: Its name.
            given: Its parameters; what is None was not given.

        Returns:
            Whether it succeeded; its result, or what went wrong in one line.
        """
        config = self.config or {}
        parameters = {
            name: _text(value) if name in _TEXTS else value
            for name, value in given.items()
            if value is not None and name not in _OWN
        }
        request = RunOperationRequest(
            action=operation,
            parameters=parameters,
            cluster=given.get("cluster") or config.get("cluster") or "",
            dry_run=bool(given.get("dry_run")),
            force=bool(given.get("force")),
            # What changes nothing is not audited.
            for_user=self._user() if "dry_run" in given else "",
        )
        path = config.get("config") or ""
        place = ClientPlace(config=path, socket="" if path else config.get("socket") or "")
        try:
            answer: OperationOutcome = call_action(place, get_action("automation.run"), request)
        except StewardError as error:
            return False, str(error)
        if answer.status != "succeeded":
            self.logger.error("%s: %s", operation, answer.message)
            return False, answer.message if answer.result is None else answer.result
        return True, answer.result

    def _user(self) -> str:
        """The StackStorm user who has it done; "" where StackStorm cannot say now."""
        try:
            return str(self.action_service.get_user_info()["username"])[:64]
        except Exception as error:
            # StackStorm's client raises anything, and the name gives no rights.
            self.logger.warning("StackStorm does not say who runs this: %s", error)
            return ""


def _text(value: Any) -> str:
    """A list's items with commas between them, which make ``n[1-2,5]`` whole again, too."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
