"""The settings of the myBRC API."""

from steward.core.section import Section


class MybrcSettings(Section, frozen=True, kw_only=True):
    """[mybrc]: the myBRC REST API, for the plugins that speak it.

    Attributes:
        listen: Address and port (``127.0.0.1:8000``); there is none if empty.
        certificate_file: Our certificate; without one, no encryption.
        key_file: The key of that certificate.
        users_file: Lines ``USER:HASH`` of those that may get a token, see docs/mybrc.md.
        cluster: The cluster whose jobs are told and asked of; the first if empty.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    users_file: str = ""
    cluster: str = ""
