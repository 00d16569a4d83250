"""Base class of configuration sections; each package's settings module derives its own from it."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class for a table of the configuration file; an unknown key is an error."""
