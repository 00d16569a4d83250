"""What is wrong with [actions], and with who may do them."""

import os
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from steward.core.config import Settings
from steward.core.config.problem import Problem

_LONGEST_S: Final = 240.0
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def action_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with the settings of actions."""
    actions = settings.actions
    if not os.path.isabs(actions.programs_file):
        yield Problem(
            ("actions", "programs_file"),
            f"'actions.programs_file' must be an absolute path, not {actions.programs_file!r}",
        )
    if actions.timeout_s > _LONGEST_S:
        yield Problem(
            ("actions", "timeout_s"),
            f"'actions.timeout_s' is above {_LONGEST_S:g}: the daemon waits no longer",
        )
    for name, address in actions.webhooks.items():
        key = ("actions", "webhooks", name)
        if _NAME.fullmatch(name) is None:
            yield Problem(
                key,
                f"{name!r} cannot be a webhook's name: use up to 64 letters, digits, '_' and '-'",
            )
        try:
            url = urlsplit(address)
            is_url = url.scheme in ("http", "https") and bool(url.hostname)
        except ValueError:
            is_url = False
        if not is_url:
            # The address is not shown: it may hold what only the site should know.
            yield Problem(key, f"'{'.'.join(key)}' must be a URL: 'https://host/path'")
    if "" in settings.access.administrators:
        yield Problem(
            ("access", "administrators"),
            "'access.administrators' holds an empty name: take it out",
        )
