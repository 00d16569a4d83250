"""Settings of the web pages and the HTTP API: the section [web] of the configuration."""

from typing import Final

from steward.core.section import Section, TlsReference

_COOKIE: Final = "steward_session"
"""Name of the session cookie, without its prefix."""
HEALTH_PATH: Final = "/healthz"
"""Path of the web process's health check …"""
HEALTHY_BODY: Final = b"ok\n"
"""… and its complete response."""
SESSION_S: Final = 12 * 3600.0
"""Lifetime of a session, in seconds: a working day, so that a stolen cookie expires soon."""


class WebSettings(Section, frozen=True, kw_only=True):
    """[web]: web pages and HTTP API, served by ``steward web``.

    Attributes:
        listen: Address and port (``127.0.0.1:8290``) that ``steward web`` listens on. While it is
            empty, nobody can log in.
        user: User that ``steward web`` runs as; neither root nor the daemon's user.
        url: Address for browsers: ``https://steward.example.org``, a host name of its own. Under a
            path of a host name shared with other applications, operators have only users' rights.
        own_host: Whether the host name of ``url`` serves nothing else although it has a path.
        tls: Name of a table ``[tls.NAME]``, whose files ``user`` can read; if empty, no encryption.
        proxy_header: Header in which a proxy names its user (``X-Remote-User``); "" allows only
            logins by ``steward login``.
        proxy_operators: Whether operators may use operators' rights in such a session.
        trusted_proxies: Addresses whose ``proxy_header`` is trusted.
        shared_from: Networks whose addresses many people share (``10.1.2.0/24``), such as a
            portal's or login nodes' behind NAT. Limits on connections and on requests without a
            user are wider there.
        token_days: Longest lifetime of a token, in days; 30 days at most if MUNGE alone
            authenticated its user.
        munge_from: Networks (``10.1.2.0/24``) whose hosts may authenticate by MUNGE instead of a
            token. Default: all hosts with the same MUNGE key. If empty, none.
        munge_socket: Socket of the munged that decodes the credentials; empty for MUNGE's default.
        requests_per_minute: Requests allowed per minute for one user, or one address without a
            user.
        metrics_from: Addresses that may read /metrics without a token. Metrics of accounts require
            an operator's token.
    """

    listen: str = ""
    user: str = "steward-web"
    url: str = ""
    own_host: bool = False
    tls: TlsReference = None
    proxy_header: str = ""
    proxy_operators: bool = False
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    shared_from: tuple[str, ...] = ()
    token_days: int = 366
    munge_from: tuple[str, ...] = ("0.0.0.0/0",)
    munge_socket: str = ""
    requests_per_minute: int = 600
    metrics_from: tuple[str, ...] = ("127.0.0.1", "::1")

    @property
    def path(self) -> str:
        """Return the path of ``url``, or ""."""
        from urllib.parse import urlsplit

        return urlsplit(self.url).path.rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Return True if browsers connect by HTTPS."""
        return self.tls is not None or self.url.startswith("https:")

    @property
    def is_shared(self) -> bool:
        """Return True if other applications may share the origin: paths do not separate them."""
        return bool(self.path) and not self.own_host

    @property
    def cookie(self) -> str:
        """Return the name of the session cookie, with a prefix that binds it to this host."""
        if not self.is_secure:
            return _COOKIE
        return f"__Secure-{_COOKIE}" if self.path else f"__Host-{_COOKIE}"
