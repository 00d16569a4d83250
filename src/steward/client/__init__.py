"""Client of Steward for programs, commands and packs, on this host or over HTTPS.

:class:`Client` is for programs; commands use ``calls.py``. For both, ``places.py`` finds the
daemon or the files to use; ``sockets.py`` and ``web.py`` send the request and decode the answer.
"""

from steward.client.client import Client
from steward.client.places import ClientError, DaemonAway

__all__ = ["Client", "ClientError", "DaemonAway"]
