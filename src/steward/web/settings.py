"""The settings of the pages and of the API over HTTP."""

from typing import Final
from urllib.parse import urlsplit

from steward.core.section import Section

_COOKIE: Final = "steward_session"
HEALTH: Final = "/healthz"
"""Path at which the pages' process says that it serves …"""
HEALTHY: Final = b"ok\n"
"""… and its whole answer."""


class WebSettings(Section, frozen=True, kw_only=True):
    """[web]: the pages and the API, served by ``steward web``.

    Attributes:
        listen: Address and port (``127.0.0.1:8290``) that ``steward web`` listens at; nobody
            can log in while it is empty.
        user: The user that ``steward web`` runs as: not root, and not the daemon's.
        url: Where browsers find it: ``https://steward.example.org``, a host name of its own. Under
            a path of a host name that other applications share, operators have users' rights.
        own_host: Whether nothing else is served under the host name of ``url``, though that has a
            path.
        certificate_file: Our certificate; without one, no encryption.
        key_file: The key of that certificate, which ``user`` can read.
        proxy_header: Name of the header in which a proxy says who its user is
            (``X-Remote-User``); "" where people log in by ``steward login`` alone.
        proxy_session_s: How long a session that a proxy's word opened lasts without being used, in
            seconds.
        proxy_operators: Whether operators may change in such a session what operators change.
        trusted_proxies: Addresses whose ``proxy_header`` is believed.
        shared_from: Networks whose addresses many people share (``10.1.2.0/24``): a portal's, login
            nodes behind NAT. Connections and requests without a user are bounded more widely there.
        session_s: How long somebody stays logged in, in seconds.
        login_s: How long a link of ``steward login`` can be used, in seconds.
        token_days: Longest life of a token, in days …
        munge_token_days: … that is made where nothing but MUNGE says whose it is.
        munge: Whether commands on other hosts, that have no token, are known by MUNGE.
        munge_from: Networks of the hosts whose MUNGE is believed so, and that connect from there
            (``10.1.2.0/24``); all of those with our key if empty.
        munge_socket: Socket of the munged that opens their credentials; MUNGE's default if empty.
        requests_per_minute: How often one user, or one address without a user, may ask.
        metrics_from: Addresses that may read /metrics without a token. Accounts' figures are in
            it for an operator's token alone.
    """

    listen: str = ""
    user: str = "steward-web"
    url: str = ""
    own_host: bool = False
    certificate_file: str = ""
    key_file: str = ""
    proxy_header: str = ""
    proxy_session_s: float = 600.0
    proxy_operators: bool = False
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    shared_from: tuple[str, ...] = ()
    session_s: float = 12 * 3600.0
    login_s: float = 300.0
    token_days: int = 366
    munge_token_days: int = 30
    munge: bool = True
    munge_from: tuple[str, ...] = ()
    munge_socket: str = ""
    requests_per_minute: int = 600
    metrics_from: tuple[str, ...] = ("127.0.0.1", "::1")

    @property
    def path(self) -> str:
        """The path of ``url``; "" for none."""
        return urlsplit(self.url).path.rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether browsers come by HTTPS."""
        return bool(self.certificate_file) or self.url.startswith("https:")

    @property
    def is_shared(self) -> bool:
        """Whether other applications may be of the same origin: to a browser no path is a bound."""
        return bool(self.path) and not self.own_host

    @property
    def cookie(self) -> str:
        """The name of a session's cookie; its prefix has browsers take it from us alone."""
        if not self.is_secure:
            return _COOKIE
        return f"__Secure-{_COOKIE}" if self.path else f"__Host-{_COOKIE}"
