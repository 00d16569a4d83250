"""Programs that use the API of a site with pages."""

from typing import Any, Self

import httpx
from web_site import WebSite


class Program(httpx.Client):
    """Program with a token.

    Args:
        site: Site that it queries.
        user: Owner of the token.
        scopes: Scopes of the token.
    """

    def __init__(self, site: WebSite, user: str, *scopes: str) -> None:
        self.secret = token(site, user, *scopes)
        super().__init__(
            base_url=f"{site.url}/api/v1",
            headers={"Authorization": f"Bearer {self.secret}"},
            timeout=60,
        )

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def told(self, path: str, **query: Any) -> Any:
        """Return the reply to a GET request."""
        answer = self.get(path, params=query or None)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:2000])
        return answer.json()


def token(site: WebSite, user: str, *scopes: str) -> str:
    """Return the secret of a token."""
    words = ["--scope", ",".join(scopes)] if scopes else []
    return str(site.daemon.ask("token", "create", *words, user=user).stdout).strip()
