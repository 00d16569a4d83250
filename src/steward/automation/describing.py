"""What an operation takes, said once: for help, docs and packs, and to read what was given.

All is derived from the Struct of its parameters. The names of types are those of
JSON schemas, which StackStorm's metadata uses, too.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import NODEFAULT, inspect

from steward.automation.errors import WrongParameters
from steward.automation.operation import Operation, Parameters

TypeName = Literal["string", "integer", "number", "boolean", "array", "object"]

_NAMES: Final[tuple[tuple[type[inspect.Type], TypeName], ...]] = (
    (inspect.StrType, "string"),
    (inspect.BoolType, "boolean"),
    (inspect.IntType, "integer"),
    (inspect.FloatType, "number"),
    (inspect.VarTupleType, "array"),
    (inspect.ListType, "array"),
    (inspect.DictType, "object"),
    (inspect.StructType, "object"),
    (inspect.LiteralType, "string"),
)
_LONGEST_SHOWN: Final = 60
_LONGEST_NUMBER: Final = 16


class ParameterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of an operation.

    Attributes:
        name: Its name.
        type: What it is, as JSON schemas call it.
        description: What it is for, one line.
        required: Whether it must be given.
        default: What it is where it is not given; None for nothing.
        enum: All that it may be; empty where that cannot be listed.
        items: Of an array: what its items may be.
        within: Of an object: what may be in it; empty where anything may.
    """

    name: str
    type: TypeName
    description: str
    required: bool = False
    default: Any = None
    enum: tuple[str, ...] = ()
    items: tuple[TypeName, ...] = ()
    within: "tuple[ParameterDescription, ...]" = ()


def parameters_of(operation: Operation) -> tuple[ParameterDescription, ...]:
    """What an operation takes, in the order in which it is told."""
    return _described(operation.parameters)


def read(operation: Operation, given: Mapping[str, Any]) -> Parameters:
    """The parameters that plain values stand for.

    Where a parameter is no text, a text is read as one would write it on a command
    line: numbers and truth values in letters, lists by commas, objects as JSON.

    Raises:
        WrongParameters: One is unknown, missing, or cannot be read as what it should be.
    """
    described = {one.name: one for one in parameters_of(operation)}
    unknown = [name for name in given if name not in described]
    if unknown:
        raise WrongParameters(_unknown(operation.ref, unknown[0], described), unknown[0])
    missing = [one.name for one in described.values() if one.required and _is_missing(one, given)]
    if missing:
        words = " and ".join(f"{name}=…" for name in missing)
        raise WrongParameters(f"{operation.ref} needs {words}", tuple(missing))
    values = {name: _value(operation.ref, described[name], value) for name, value in given.items()}
    try:
        return msgspec.convert(values, operation.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise WrongParameters(f"{operation.ref}: {error}", dict(given)) from error


def given(parameters: Parameters) -> dict[str, Any]:
    """Parameters as plain values, with the defaults of those that were not given."""
    found: dict[str, Any] = plain(parameters)
    return found


def plain(value: Any) -> Any:
    """A value as it is after it was sent as JSON, so that it is the same wherever it was made."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _described(struct: type[msgspec.Struct]) -> tuple[ParameterDescription, ...]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return tuple(_field(field) for field in info.fields)


def _field(field: inspect.Field) -> ParameterDescription:
    kind, description = _without_metadata(field.type)
    if isinstance(kind, inspect.UnionType):
        # What may be left out is described as what it is where it is given.
        kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        kind, inner = _without_metadata(kind)
        description = description or inner
    default = None if field.required else _default(field)
    return ParameterDescription(
        name=field.name,
        type=_named(kind),
        description=description,
        required=field.required,
        default=default,
        enum=tuple(map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else (),
        items=_items(kind),
        within=_described(kind.cls) if isinstance(kind, inspect.StructType) else (),
    )


def _named(kind: inspect.Type) -> TypeName:
    return next(name for known, name in _NAMES if isinstance(kind, known))


def _items(kind: inspect.Type) -> tuple[TypeName, ...]:
    if not isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return ()
    item, _ = _without_metadata(kind.item_type)
    kinds = item.types if isinstance(item, inspect.UnionType) else (item,)
    return tuple(_named(one) for one in kinds)


def _without_metadata(kind: inspect.Type) -> tuple[inspect.Type, str]:
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


def _default(field: inspect.Field) -> Any:
    value = field.default
    if value is NODEFAULT:
        factory: Any = field.default_factory
        value = factory()
    return plain(value)


def _is_missing(one: ParameterDescription, given: Mapping[str, Any]) -> bool:
    value = given.get(one.name)
    # A list of nodes that is but a blank must not be taken for all of them.
    return value is None or (isinstance(value, str) and not value.strip())


def _value(ref: str, one: ParameterDescription, value: Any) -> Any:
    if one.type == "string":
        return _item(one, value)
    if isinstance(value, str):
        value = _from_text(ref, one, value.strip())
    if one.type == "array" and isinstance(value, list | tuple):
        return [_item(one, item) for item in value]
    return value


def _from_text(ref: str, one: ParameterDescription, text: str) -> Any:
    if one.type == "boolean":
        return _truth(ref, one.name, text)
    if one.type == "array" and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if one.type in ("array", "object"):
        return _from_json(ref, one, text)
    return text


def _item(one: ParameterDescription, item: Any) -> Any:
    """A number where it is written as one and may be one, else a text."""
    if isinstance(item, str) and "integer" in one.items:
        is_number = item.isascii() and item.isdigit() and len(item) < _LONGEST_NUMBER
        return int(item) if is_number and str(int(item)) == item else item
    if isinstance(item, int) and not isinstance(item, bool) and "integer" not in one.items:
        return str(item)
    return item


def _truth(ref: str, name: str, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise WrongParameters(f"{ref}: {name} is true or false, not {_short(text)}", text)


def _from_json(ref: str, one: ParameterDescription, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        example = '{"name": "value"}' if one.type == "object" else '["one", "two"]'
        raise WrongParameters(
            f"{ref}: {one.name} is no JSON ({error}): write it as '{one.name}={example}'", text
        ) from error
    wanted = dict if one.type == "object" else list
    if not isinstance(value, wanted):
        raise WrongParameters(f"{ref}: {one.name} is no {one.type}: {_short(text)}", text)
    return value


def _unknown(ref: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"is it {near[0]}?" if near else f"it takes {', '.join(names) or 'none'}"
    return f"{ref} has no parameter {_short(name)}: {hint}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")
