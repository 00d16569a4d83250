"""Programs that ask the API of a site of pages."""

from typing import Any, Self

import httpx
from web_site import WebSite


class Program(httpx.Client):
    """A program with a token.

    Args:
        site: Whom it asks.
        user: Whose token it has.
        scopes: What the token is good for.
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
    """A token's secret."""
    words = ["--scope", ",".join(scopes)] if scopes else []
    return str(site.daemon.ask("token", "create", *words, user=user).stdout).strip()
