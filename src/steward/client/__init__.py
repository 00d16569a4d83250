"""Asks Steward: from this host or another, for commands, for packs and for your own programs.

``Client`` is what programs use; everything else here is how it, and the command
line, find whom to ask and understand the answer.
"""

from steward.client.client import Client
from steward.client.places import ClientError, DaemonAway

__all__ = ["Client", "ClientError", "DaemonAway"]
