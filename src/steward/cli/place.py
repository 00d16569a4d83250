"""Where a command asks, as its options name it."""

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where to ask: at most one of these is given.

    Attributes:
        config: A configuration file, whose state directory is read.
        socket: A daemon's socket.
        archive: A directory that ``archive watch`` keeps.
    """

    config: str = ""
    socket: str = ""
    archive: str = ""
