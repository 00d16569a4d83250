"""Settings of the myBRC REST API: the section [mybrc]."""

from steward.core.section import Section, TlsReference


class MybrcSettings(Section, frozen=True, kw_only=True):
    """[mybrc]: the myBRC REST API, for the plugins that speak it.

    Attributes:
        listen: Address and port (``127.0.0.1:8000``); if empty, the API is off.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption.
        users_file: Lines ``USER:HASH`` of the users that may get a token, see docs/mybrc.md.
        cluster: Cluster that the API's jobs belong to; the first if empty.
    """

    listen: str = ""
    tls: TlsReference = None
    users_file: str = ""
    cluster: str = ""
