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


class Web(msgspec.Struct, frozen=True, kw_only=True):
    """A Steward whose API is asked.

    Attributes:
        url: Where its pages are: ``https://steward.example.org``.
        token: What lets us in; "" for what this user has put down, see :mod:`steward.client.web`.
        token_file: The file in which the token is; "" for the usual one.
        ca_file: Certificates that its own is checked against; "" for the system's.
        munge_socket: Socket of the munged that says who we are where there is no token; ""
            for MUNGE's default.
    """

    url: str
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    munge_socket: str = ""
