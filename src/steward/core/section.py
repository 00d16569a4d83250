"""What every table of the configuration file is made of."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file; a key that it does not have is an error."""
