"""What a check of the settings says is wrong."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from steward.core.config.toml_lines import KeyPath
from steward.core.errors import StewardError
from steward.core.extensions import load_offer

if TYPE_CHECKING:
    from steward.core.config import Settings

CHECKS: Final = "steward.settings_check"
"""The group of entry points of packages' own checks: each takes the settings, yields problems."""


class Problem(msgspec.Struct, frozen=True):
    """Something wrong.

    Attributes:
        key: The keys down to it.
        what: What is wrong and what to do, in one line.
    """

    key: KeyPath
    what: str


def offered_check(name: str, key: KeyPath, settings: "Settings") -> Iterator[Problem]:
    """Yield what a check that a package offers finds wrong.

    Args:
        name: Name of the offer.
        key: The key to name if the check is not installed or cannot be imported.
        settings: The settings.
    """
    try:
        check = load_offer(CHECKS, name)
    except StewardError as error:
        yield Problem(key, str(error))
        return
    yield from check(settings)
