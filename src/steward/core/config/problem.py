"""What a check of the settings says is wrong."""

from typing import Final

import msgspec

from steward.core.config.toml_lines import KeyPath

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
