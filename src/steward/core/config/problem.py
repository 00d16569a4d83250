"""What a check of the settings says is wrong."""

import msgspec

from steward.core.config.toml_lines import KeyPath


class Problem(msgspec.Struct, frozen=True):
    """Something wrong.

    Attributes:
        key: The keys down to it.
        what: What is wrong and what to do, in one line.
    """

    key: KeyPath
    what: str
