"""Settings of the myBRC REST API: the section [mybrc]."""

from steward.core.section import Section, TlsReference


class MybrcSettings(Section, frozen=True, kw_only=True):
    """[mybrc]: the myBRC REST API, for the plugins that speak it.

    Its jobs belong to the first cluster in this file.

    Attributes:
        listen: Address and port (``127.0.0.1:8000``); if empty, the API is off.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption.
        users_file: Lines ``USER:HASH`` of the users that may get a token, see docs/mybrc.md.
    """

    listen: str = ""
    tls: TlsReference = None
    users_file: str = ""
