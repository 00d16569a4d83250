"""Base class of configuration sections, and [tls.NAME], to which several of them refer.

Each package's settings module derives its own sections from :class:`Section`. ``list_values``
walks the keys of a section and of the tables below it.
"""

from collections.abc import Iterator
from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class for a table of the configuration file; an unknown key is an error."""


class TlsSettings(Section, frozen=True, kw_only=True):
    """[tls.NAME]: certificates of TLS connections; other tables refer to it by ``tls = "NAME"``.

    Attributes:
        certificate_file: Certificate with its chain; a server needs one.
        key_file: Private key of that certificate.
        ca_file: CA certificates that verify servers; the system's if empty.
        client_ca_file: CA certificates that verify clients; if empty, a server requests no
            certificate.
    """

    certificate_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    client_ca_file: str = ""


TlsReference = TlsSettings | None
"""Type of a key ``tls``: the table [tls.NAME] that the file names there; None for ""."""


def list_values(
    section: Section, key: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path, value and default of every key of a section and of the tables below it.

    A key that names another table, such as ``tls``, has that table as its value.
    """
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        path = (*key, field.name)
        if isinstance(value, Section) and field.default is not None:
            yield from list_values(value, path)
        elif isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, Section):
                    yield from list_values(item, (*path, name))
                else:
                    yield (*path, name), item, ""
        else:
            yield path, value, field.default
