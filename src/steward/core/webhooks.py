"""How a site's webhook is told something: one POST of JSON.

A webhook's URL is a secret of the site's: of it no more than the host is said.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from steward.core.errors import StewardError, Unavailable

TIMEOUT_S: Final = 10.0
_REFUSED: Final = range(400, 500)
_TRY_AGAIN: Final = frozenset({408, 425, 429})


class WebhookAway(Unavailable):
    """A webhook does not answer now, or nobody knows whether it was told."""


class WebhookRefused(StewardError):
    """A webhook does not take what it is told, and will not."""


def tell(url: str, said: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> int:
    """Tell a webhook something; the status that it answers with.

    Args:
        url: Where it is.
        said: What it is told, as JSON.
        timeout_s: How long it may take for each of connecting, sending and answering.

    Raises:
        WebhookAway: It does not answer: try again later.
        WebhookRefused: It does not take it.
    """
    import httpx

    where = host_of(url)
    try:
        answer = httpx.post(
            url,
            content=msgspec.json.encode(said),
            headers={"Content-Type": "application/json"},
            timeout=timeout_s,
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # What it says may hold the URL, and where the error is shown its cause is, too.
        kind = type(error).__name__
        raise WebhookAway(f"{where} cannot be told: {kind}", where) from None
    code = answer.status_code
    if code in _REFUSED and code not in _TRY_AGAIN:
        raise WebhookRefused(f"{where} does not take it: it answers {code}", where)
    if not answer.is_success:
        raise WebhookAway(f"{where} answers {code}", where)
    return code


def host_of(url: str) -> str:
    """A webhook, as it may be spoken of."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None  # it is no URL, and that is said when it is used
    return f"the webhook at {host}" if host else "the webhook"
