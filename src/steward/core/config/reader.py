"""Configuration reader: parse steward.toml into Settings, with errors that name file and line.

``load_settings`` checks each key of the TOML file against the types of ``Settings``, so that an
error names the key and suggests the nearest known one; then ``checks.py`` checks what types cannot
express. ``render_config`` prints a configuration with the origin of each value.
"""

import os
import re
import tomllib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from steward.core.config import Settings
from steward.core.config.checks import find_problems
from steward.core.config.problems import ConfigProblem, KeyPath, find_key_lines
from steward.core.errors import UsageError
from steward.core.section import Section, TlsReference

DEFAULT_PATH = "/etc/steward/steward.toml"
"""Default path of the configuration file."""
_LARGEST = 1 << 20
"""Largest configuration file, in bytes."""
_SYNTAX_LINE = re.compile(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)


class ConfigError(UsageError):
    """The configuration is invalid.

    Args:
        message: The error and what to do about it.
        path: The file.
        line: Line in it, from 1; 0 if no line is to blame.
        key: Keys down to the wrong value.
    """

    def __init__(self, message: str, path: str, line: int = 0, key: KeyPath = ()) -> None:
        location = f"{path}:{line}" if line else path
        super().__init__(f"{location}: {message}", path)
        self.line = line
        self.key = key


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and the origin of its values.

    Attributes:
        settings: The complete, checked settings.
        path: The file; "" if there was none.
        lines: Line of every key that the file sets.
    """

    settings: Settings
    path: str = ""
    lines: dict[KeyPath, int] = {}


def load_settings(path: str) -> Settings:
    """Read and check a configuration file.

    Args:
        path: A TOML file.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; the message
            names file, line and key, and the nearest key to a misspelt one.
    """
    return load_with_lines(path).settings


def load_with_lines(path: str) -> LoadedConfig:
    """Read and check a configuration file as :func:`load_settings`; keep the line of every key."""
    text = _read_file(path)
    tree = _parse_toml(text, path)
    lines = find_key_lines(text)
    try:
        tls_tables = tree.get("tls")
        _check_table(tree, Settings, (), tls_tables if isinstance(tls_tables, dict) else {})
        for sink in tree.get("archive", {}).get("sink", {}).values():
            sink.setdefault("kind", "files")
        settings = msgspec.convert(tree, Settings)
    except _InvalidKey as invalid:
        raise ConfigError(invalid.what, path, _find_line(lines, invalid.key), invalid.key) from None
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), path) from error
    loaded = LoadedConfig(settings, path, lines)
    for problem in find_problems(settings):
        raise make_config_error(problem, loaded)
    return loaded


def make_config_error(problem: ConfigProblem, loaded: LoadedConfig) -> ConfigError:
    """Make the error for a problem, with its place in the file."""
    line = _find_line(loaded.lines, problem.key)
    return ConfigError(problem.what, loaded.path, line, problem.key)


def require_valid(settings: Settings, origin: str) -> Settings:
    """Check settings that were not read from a file, and return them.

    Args:
        settings: Settings to check.
        origin: Their origin, which begins the error message ("command line").

    Raises:
        ConfigError: As :func:`load_settings`.
    """
    for problem in find_problems(settings):
        raise ConfigError(problem.what, origin, key=problem.key)
    return settings


def render_config(loaded: LoadedConfig) -> str:
    """Render the whole configuration as TOML, with the origin of each value as a comment."""
    return "\n".join(_render_table(loaded.settings, (), loaded)) + "\n"


def _read_file(path: str) -> str:
    """Read a configuration file as text."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise ConfigError("no such file: name the configuration with --config", path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot be read: {reason}", path) from error
    if len(data) > _LARGEST:
        raise ConfigError(
            f"is larger than {_LARGEST} bytes, the maximum: is it the right file?", path
        )
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text", path, line) from error


def _parse_toml(text: str, path: str) -> dict[str, Any]:
    """Parse TOML; errors name file and line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _SYNTAX_LINE.fullmatch(str(error))
        message = match[1] if match else str(error)
        line = int(match[2]) if match and match[2] else text.count("\n") + 1
        raise ConfigError(f"is not valid TOML: {message}", path, line) from error
    except RecursionError as error:
        raise ConfigError(
            "is not a configuration: its tables are nested too deeply", path
        ) from error


def _find_line(lines: dict[KeyPath, int], key: KeyPath) -> int:
    """Return the line of a key, or of the innermost table around it that the file has."""
    while key and key not in lines:
        key = key[:-1]
    return lines.get(key, 0)


class _InvalidKey(Exception):
    """A key or value does not match the settings' types."""

    def __init__(self, message: str, key: KeyPath) -> None:
        super().__init__(message)
        self.what = message
        self.key = key


def _format_key(key: KeyPath) -> str:
    return ".".join(part if part.isprintable() else repr(part) for part in key)


def _check_table(
    table: dict[str, Any], section: type[Section], key: KeyPath, tls_tables: dict[str, Any]
) -> None:
    """Check keys and values of a table against a section's fields.

    The table then has each table [tls.NAME] in place of the NAME that refers to it.
    """
    fields = {field.name: field for field in msgspec.structs.fields(section)}
    for name, value in table.items():
        field_key = (*key, name)
        if name == section.__struct_config__.tag_field:
            continue
        if name not in fields:
            raise _InvalidKey(_describe_unknown(field_key, fields), field_key)
        if fields[name].type == TlsReference:
            table[name] = _find_tls(value, field_key, tls_tables)
        else:
            _check_value(value, fields[name].type, field_key, tls_tables)


def _find_tls(name: Any, key: KeyPath, tls_tables: dict[str, Any]) -> Any:
    """Return the table [tls.NAME] that a key refers to; None for an empty name."""
    if not isinstance(name, str):
        raise _InvalidKey(_describe_wrong_type(name, str, key), key)
    if not name:
        return None
    if name not in tls_tables:
        nearest = _find_nearest(name, tls_tables)
        remedy = f"did you mean {nearest!r}?" if nearest else "add it, or correct the name"
        raise _InvalidKey(f"{_format_key(key)!r}: unknown table [tls.{name}]: {remedy}", key)
    return tls_tables[name]


def _describe_unknown(key: KeyPath, fields: dict[str, Any]) -> str:
    nearest = _find_nearest(key[-1], fields)
    hint = f"did you mean {nearest!r}?" if nearest else f"the keys are: {', '.join(fields)}"
    return f"unknown key {_format_key(key)!r}: {hint}"


def _find_nearest(name: str, names: Iterable[str]) -> str:
    """Return the known name most similar to a misspelt one; "" if none is similar."""
    import difflib

    matches = difflib.get_close_matches(name, names, n=1)
    return matches[0] if matches else ""


def _check_value(value: Any, kind: Any, key: KeyPath, tls_tables: dict[str, Any]) -> None:
    """Check a value against a field's type."""
    if isinstance(kind, type) and issubclass(kind, Section):
        if not isinstance(value, dict):
            raise _InvalidKey(f"{_format_key(key)!r} must be a table [{_format_key(key)}]", key)
        _check_table(value, kind, key, tls_tables)
    elif get_origin(kind) is dict and get_args(kind)[1] is str:
        _check_texts(value, key)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise _InvalidKey(
                f"{_format_key(key)!r} must contain tables: [{_format_key(key)}.NAME]", key
            )
        for name, item in value.items():
            item_key = (*key, name)
            section = _select_section_type(get_args(kind)[1], item, item_key)
            _check_value(item, section, item_key, tls_tables)
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise _InvalidKey(_describe_wrong_type(value, kind, key), key) from None


def _select_section_type(kind: Any, value: Any, key: KeyPath) -> Any:
    """Select the section type that a table's ``kind`` names; the first if it names none."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    by_name = {str(section.__struct_config__.tag): section for section in get_args(kind)}
    name = value.get("kind") if isinstance(value, dict) else None
    if name is None:
        return get_args(kind)[0]
    if not isinstance(name, str) or name not in by_name:
        raise _InvalidKey(
            _describe_wrong_type(name, Literal[tuple(by_name)], (*key, "kind")), (*key, "kind")
        )
    return by_name[name]


def _check_texts(value: Any, key: KeyPath) -> None:
    if not isinstance(value, dict):
        raise _InvalidKey(f"{_format_key(key)!r} must be a table [{_format_key(key)}]", key)
    for name, text in value.items():
        if not isinstance(text, str):
            item_key = (*key, name)
            raise _InvalidKey(
                f"{_format_key(item_key)!r} must be text in quotes, not {_describe_value(text)}",
                item_key,
            )


def _describe_wrong_type(value: Any, kind: Any, key: KeyPath) -> str:
    """Describe a value of the wrong type, with the nearest valid choice."""
    expected = f"{_format_key(key)!r} must be {_describe_type(kind)}"
    if get_origin(kind) is Literal and isinstance(value, str):
        nearest = _find_nearest(value, get_args(kind))
        hint = f": did you mean {nearest!r}?" if nearest else ""
        return f"{expected}, not {value!r}{hint}"
    if isinstance(value, list) and get_origin(kind) is not list:
        bad_item = next((item for item in value if not isinstance(item, str)), None)
        if bad_item is not None and "list" in _describe_type(kind):
            return f"{expected}; {bad_item!r} is {_describe_value(bad_item)}"
    return f"{expected}, not {_describe_value(value)}"


_WORDS = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


def _describe_type(kind: Any) -> str:
    """Describe the TOML values that a type accepts, for error messages."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_describe_type(arg) for arg in get_args(kind) if arg is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f'a list of {_describe_type(get_args(kind)[0])}, ["…"]'
    return _WORDS.get(kind, str(kind))


def _describe_value(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")


def _render_table(section: Section, key: KeyPath, loaded: LoadedConfig) -> list[str]:
    """Render a section as lines of TOML, subsections last."""
    values = []
    tables: list[str] = []
    config = section.__struct_config__
    if config.tag_field is not None:
        values.append(
            _render_line(config.tag_field, str(config.tag), (*key, config.tag_field), loaded)
        )
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        field_key = (*key, field.name)
        if field.type == TlsReference:
            name = loaded.settings.tls_name(value) if value else ""
            values.append(_render_line("tls", name, field_key, loaded) if name else "# tls: none")
        elif isinstance(value, Section):
            tables += ["", f"[{'.'.join(field_key)}]", *_render_table(value, field_key, loaded)]
        elif isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            if value:
                tables += ["", f"[{'.'.join(field_key)}]"]
                tables += [
                    _render_line(_render_literal(name), text, (*field_key, name), loaded)
                    for name, text in value.items()
                ]
        elif isinstance(value, dict):
            for name, item in value.items():
                table = (*field_key, name)
                tables += ["", f"[{'.'.join(table)}]", *_render_table(item, table, loaded)]
        elif value is None:
            values.append(f"# {field.name}: as built in")
        else:
            values.append(_render_line(field.name, value, field_key, loaded))
    return values + tables


def _render_line(name: str, value: Any, key: KeyPath, loaded: LoadedConfig) -> str:
    line = loaded.lines.get(key)
    source = f"{os.path.basename(loaded.path)}:{line}" if line else "default"
    return f"{name} = {_render_literal(value)}  # {source}"


def _render_literal(value: Any) -> str:
    """Render a value as TOML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_render_literal, value)) + "]"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML too; JSON allows a raw DEL, TOML does not.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


__all__ = [
    "DEFAULT_PATH",
    "ConfigError",
    "ConfigProblem",
    "LoadedConfig",
    "load_settings",
    "load_with_lines",
    "make_config_error",
    "render_config",
    "require_valid",
]
