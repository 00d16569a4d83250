"""The settings of the pages and of the API over HTTP."""

from steward.config_section import Section


class WebSettings(Section, frozen=True, kw_only=True):
    """[web]: the pages and the API, served by ``steward web``.

    Attributes:
        listen: Address and port (``127.0.0.1:8290``) that ``steward web`` listens at; nobody
            can log in while it is empty.
        user: The user that ``steward web`` runs as: not root, and not the daemon's.
        url: Where browsers find it, with its path: ``https://ondemand.example.org/steward``.
        certificate_file: Our certificate; without one, no encryption.
        key_file: The key of that certificate, which ``user`` can read.
        proxy_header: Name of the header in which a proxy says who its user is
            (``X-Remote-User``); "" where people log in by ``steward login`` alone.
        trusted_proxies: Addresses whose ``proxy_header`` is believed.
        session_s: How long somebody stays logged in, in seconds.
        login_s: How long a link of ``steward login`` can be used, in seconds.
        token_days: Longest life of a token, in days …
        munge_token_days: … that is made where nothing but MUNGE says whose it is.
        munge: Whether commands on other hosts, that have no token, are known by MUNGE.
        munge_from: Networks of the hosts whose MUNGE is believed so, and that connect from there
            (``10.1.2.0/24``); all of those with our key if empty.
        munge_socket: Socket of the munged that opens their credentials; MUNGE's default if empty.
        requests_per_minute: How often one user, or one address without a user, may ask.
        metrics_from: Addresses that may read /metrics.
    """

    listen: str = ""
    user: str = "steward-web"
    url: str = ""
    certificate_file: str = ""
    key_file: str = ""
    proxy_header: str = ""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    session_s: float = 12 * 3600.0
    login_s: float = 300.0
    token_days: int = 366
    munge_token_days: int = 30
    munge: bool = True
    munge_from: tuple[str, ...] = ()
    munge_socket: str = ""
    requests_per_minute: int = 600
    metrics_from: tuple[str, ...] = ("127.0.0.1", "::1")
