"""Client of Steward for programs, commands and packs, on this host or over HTTPS.

:class:`Client` is for programs; the other modules find the daemon to ask and decode its
answers, for ``Client`` and for the command line.
"""

from steward.client.client import Client
from steward.client.places import ClientError, DaemonAway

__all__ = ["Client", "ClientError", "DaemonAway"]
