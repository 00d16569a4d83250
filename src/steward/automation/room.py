"""What automation's actions work with."""

from steward.automation.running import Runner
from steward.core.access import Access
from steward.core.actions import Registry
from steward.core.config import Settings


class AutomationRoom:
    """The context of automation's actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: Who may see and do what.
        registry: What other rooms can be asked for.
    """

    def __init__(self, settings: Settings, *, access: Access, registry: Registry) -> None:
        self.settings = settings
        self.access = access
        self.runner = Runner(settings, access, registry)
