"""The settings of the myBRC API, and of a myBRC server elsewhere."""

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


class RemoteBankSettings(Section, frozen=True, kw_only=True):
    """[bank.remote]: a myBRC server elsewhere that is told of holds and charges.

    Attributes:
        url: Where its API begins (``https://host/mybrc-rest``); nobody is told if empty.
        token_file: A file that holds the token for ``Authorization: Token …``.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        timeout_s: How long one request may take, in seconds.
        balances: Whether accounts have what the server says, which is asked all the time, and
            the ledger's balances follow it.
        balance_age_s: How old an account's balance may be, in seconds; for an older one
            ``[gate] policy`` decides.
    """

    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    timeout_s: float = 30.0
    balances: bool = False
    balance_age_s: float = 1800.0
