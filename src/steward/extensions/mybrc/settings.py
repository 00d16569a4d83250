"""Settings of the myBRC REST API: the section [mybrc]."""

from steward.core.section import Section


class MybrcSettings(Section, frozen=True, kw_only=True):
    """[mybrc]: the myBRC REST API, for the plugins that speak it.

    Attributes:
        listen: Address and port (``127.0.0.1:8000``); if empty, the API is off.
        certificate_file: Server certificate; without one, no encryption.
        key_file: Private key of that certificate.
        users_file: Lines ``USER:HASH`` of the users that may get a token, see docs/mybrc.md.
        cluster: Cluster that the API's jobs belong to; the first if empty.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    users_file: str = ""
    cluster: str = ""
