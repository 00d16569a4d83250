"""Base class of configuration sections."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class for a table of the configuration file; an unknown key is an error."""
