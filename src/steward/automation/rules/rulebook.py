"""Rulebook: loads the site's rule files and the shipped ones.

``load_rulebook`` returns a :class:`Rulebook`. An invalid file disables only its own rule. A rule of
the site replaces a shipped rule of the same name. ``compute_signature`` changes when any file
changes, so that the consumer and :mod:`steward.automation.rules.actions` know when to reload. Files
that others than root or Steward's user can write are rejected: a rule acts with Steward's rights.
"""

import os
import re
import stat
from collections.abc import Iterator
from typing import Final

import msgspec

from steward.automation.errors import RuleError
from steward.automation.rules.model import Rule
from steward.automation.rules.parser import MAX_RULE_BYTES, parse_rule
from steward.automation.rules.validation import (
    find_rule_errors,
)
from steward.automation.settings import SHIPPED, RulesSettings

# Rule files

SHIPPED_RULES_DIR: Final = os.path.join(os.path.dirname(__file__), "shipped")
"""Directory of the shipped rules."""
_ENDING: Final = ".yaml"
_NAMED: Final = re.compile(rb"name['\"]?[ \t]*:[ \t]*['\"]?([A-Za-z0-9_.-]+)")
"""Finds ``name: VALUE`` in an invalid file."""
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
"""Permission bits that let others write."""

FilesSignature = tuple[tuple[str, tuple[int, ...]], ...]
"""Paths and stat values of rule files; differs after any change."""


class FileError(msgspec.Struct, frozen=True, kw_only=True):
    """Problem with a rule's file.

    Attributes:
        path: The file.
        what: Message, beginning with file and line.
    """

    path: str
    what: str


class Rulebook(msgspec.Struct, frozen=True, kw_only=True):
    """All loaded rules and the errors of invalid files.

    Attributes:
        rules: Rules, by name.
        troubles: Errors of invalid files.
    """

    rules: dict[str, Rule]
    troubles: tuple[FileError, ...] = ()


def load_rulebook(settings: RulesSettings) -> Rulebook:
    """Load the rules of a configuration from their files."""
    rules: dict[str, Rule] = {}
    errors: list[FileError] = []
    claimed_names: set[str] = set()
    for path, is_shipped in _list_rule_files(settings, errors):
        rule, file_errors = load_rule_file(path, shipped=is_shipped)
        errors += file_errors
        if rule is None:
            claimed_names |= set() if is_shipped else _guess_rule_names(path)
            continue
        previous = rules.get(rule.name)
        if previous is not None and previous.shipped == is_shipped:
            message = (
                f"{rule.format_position('name')}: duplicate rule name {rule.name!r}, also in "
                f"{previous.path}"
            )
            errors.append(FileError(path=path, what=message))
            continue
        rules[rule.name] = rule
    for error in errors:
        if error.path in settings.directories and os.path.isdir(error.path):
            claimed_names |= {
                name for path in _list_yaml(error.path) for name in _guess_rule_names(path)
            }
    for name in sorted(claimed_names & rules.keys()):
        if rules[name].shipped:
            # The site's file may have been meant to disable the shipped rule, so that one is left
            # out too.
            message = (
                f"{rules[name].path}:1: ignored, because the site's own rule {name!r} is invalid"
            )
            errors.append(FileError(path=rules[name].path, what=message))
            del rules[name]
    return Rulebook(rules=dict(sorted(rules.items())), troubles=tuple(errors))


def load_rule_file(
    path: str, *, shipped: bool = False, trusted: bool = False
) -> tuple[Rule | None, list[FileError]]:
    """Load the rule of one file, with its errors.

    Args:
        path: The file.
        shipped: Whether it is part of Steward's distribution.
        trusted: Skip the check of owner and permissions, because the rule will not be run.
    """
    try:
        rule = parse_rule(_read_rule_text(path, trusted=trusted or shipped), path, shipped=shipped)
    except RuleError as error:
        return None, [FileError(path=path, what=str(error))]
    errors = [FileError(path=path, what=message) for message in find_rule_errors(rule)]
    return (None if errors else rule), errors


def compute_signature(settings: RulesSettings) -> FilesSignature:
    """Compute the signature of all rule files."""
    signature: list[tuple[str, tuple[int, ...]]] = []
    for path, _shipped in _list_rule_files(settings, []):
        try:
            status = os.stat(path)
        except OSError:
            signature.append((path, ()))
        else:
            # Owner and permissions count too; changing them changes the ctime.
            stat_values = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            signature.append((path, stat_values))
    return tuple(signature)


def _list_rule_files(
    settings: RulesSettings, errors: list[FileError]
) -> Iterator[tuple[str, bool]]:
    """Yield the paths of rule files, with True for shipped ones; collect errors of directories."""
    if SHIPPED in settings.directories:
        yield from ((path, True) for path in _list_yaml(SHIPPED_RULES_DIR))
    for directory in settings.directories:
        if directory == SHIPPED:
            continue
        try:
            paths = _list_yaml(directory)
            _require_trusted_directory(directory)
        except FileNotFoundError:
            # The default directory need not exist.
            if directory not in RulesSettings().directories:
                message = f"{directory}: no such directory"
                errors.append(FileError(path=directory, what=message))
        except OSError as error:
            message = f"{directory}: cannot read the directory: {error.strerror}"
            errors.append(FileError(path=directory, what=message))
        except RuleError as error:
            errors.append(FileError(path=directory, what=str(error)))
        else:
            yield from ((path, False) for path in paths)


def _guess_rule_names(path: str) -> set[str]:
    """Guess the names of rules in an invalid file: its file name and every ``name:`` in it."""
    names = {os.path.basename(path).removesuffix(_ENDING)}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(MAX_RULE_BYTES)
    except OSError:
        return names
    return names | {name.decode() for name in _NAMED.findall(data)}


def _list_yaml(directory: str) -> list[str]:
    """List the YAML files of a directory, sorted."""
    # Editors' temporary files begin with a dot.
    names = (name for name in os.listdir(directory) if not name.startswith("."))
    return [os.path.join(directory, name) for name in sorted(names) if name.endswith(_ENDING)]


def _read_rule_text(path: str, *, trusted: bool) -> str:
    """Read a rule file as text, after checks of type, owner and size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RuleError(f"{path}: cannot read the file: {error.strerror}", path) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RuleError(f"{path}: not a regular file", path)
        if not trusted:
            _require_trusted_owner(path, status)
        data = file.read(MAX_RULE_BYTES + 1)
    if len(data) > MAX_RULE_BYTES:
        raise RuleError(
            f"{path}: the file is larger than {MAX_RULE_BYTES} bytes, the maximum", path
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleError(f"{path}:{line}: not UTF-8: {error.reason}", path) from error


def _require_trusted_directory(directory: str) -> None:
    """Check that only root or Steward's user can write a directory."""
    _require_trusted_owner(directory, os.stat(directory))


def _require_trusted_owner(path: str, status: os.stat_result) -> None:
    """Reject a file that others can write: a rule acts with Steward's rights."""
    if status.st_uid not in (0, os.geteuid()):
        raise RuleError(
            f"{path}: the owner must be root or Steward's user, because rules act with "
            f"Steward's rights: run 'chown root {path}'",
            path,
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise RuleError(
            f"{path}: writable by others, but rules act with Steward's rights: "
            f"run 'chmod go-w {path}'",
            path,
        )
