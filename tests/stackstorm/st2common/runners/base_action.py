"""Base class of actions, as StackStorm's page on writing actions describes it."""

import logging
from typing import Any


class Action:
    """Action: ``run`` is called with its parameters, ``config`` is the pack's."""

    def __init__(self, config: dict[str, Any] | None = None, action_service: Any = None) -> None:
        self.config = config or {}
        self.action_service = action_service
        self.logger = logging.getLogger(f"actions.{type(self).__name__}")

    def run(self, **parameters: Any) -> Any:
        """Run the action."""
        raise NotImplementedError
