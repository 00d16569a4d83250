"""The XML of Torque's ``.JB`` and ``.TA`` files, read so that no file can do harm.

A job's name, its directory and its environment are its user's. Torque escapes
them, but what lies in a spool may be cut short, older or foreign: a DTD or an
entity is refused before it is looked at, and size, depth and count are bounded.
Torque before 4.5 wrote a C struct in place of XML; that is refused, too.
"""

from typing import Final
from xml.parsers import expat  # what must not be there is refused below, as in defusedxml

from steward.core.errors import StewardError

MOST_BYTES: Final = 24 << 20
"""The largest file that is read; an environment of 8 MiB and what escaping adds."""

_MOST_ELEMENTS: Final = 5000
_DEEPEST: Final = 6
_PIECE: Final = 1 << 20


class TorqueRecordError(StewardError):
    """A file of Torque's that is not what it should be; ``offender`` is its name."""


Fields = dict[str, str]
"""Texts by path below the root: ``state``, ``attributes/euser``, ``attributes/Resource_List/…``."""


class _Reader:
    """Gathers the text of each element; of one that comes twice the first counts."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.root = ""
        self._path: list[str] = []
        self._texts: list[list[str]] = []
        self._count = 0

    def begin(self, name: str, _attributes: dict[str, str]) -> None:
        self._count += 1
        if not self._path and not self.root:
            self.root = name
        self._path.append(name)
        self._texts.append([])
        if self._count > _MOST_ELEMENTS or len(self._path) > _DEEPEST:
            raise ValueError("it has too many elements, or they are nested too deep")

    def text(self, data: str) -> None:
        self._texts[-1].append(data)

    def end(self, _name: str) -> None:
        self.fields.setdefault("/".join(self._path[1:]), "".join(self._texts.pop()))
        self._path.pop()


def _refuse(*_: object) -> int:
    raise ValueError("it declares a document type or an entity")


def read_fields(data: bytes, name: str) -> Fields:
    """The texts of a ``.JB`` or ``.TA`` file.

    Args:
        data: All of the file.
        name: Its name, for the error.

    Raises:
        TorqueRecordError: It is no such file, or not all of it.
    """
    if len(data) > MOST_BYTES:
        raise TorqueRecordError(f"{name} is larger than {MOST_BYTES} bytes", name)
    if not data.lstrip().startswith(b"<"):
        raise TorqueRecordError(f"{name} is no XML: was it written by Torque before 4.5?", name)
    reader = _Reader()
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = reader.begin
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    parser.ExternalEntityRefHandler = _refuse
    try:
        for begin in range(0, len(data), _PIECE):
            parser.Parse(data[begin : begin + _PIECE], False)
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError) as error:
        raise TorqueRecordError(f"{name} cannot be read: {error}", name) from error
    if reader.root != "job":
        raise TorqueRecordError(f"{name} holds a {reader.root!r}, not a job", name)
    return reader.fields
