"""Rulebook: loads the site's rule files and the shipped ones, and validates each rule.

``load`` returns a :class:`Book`. An invalid file disables only its own rule. A rule of the site
replaces a shipped rule of the same name. ``signature`` changes when any file changes, so that the
consumer and :mod:`steward.automation.rules.actions` know when to reload. ``problems`` checks a
parsed rule against operations and trigger types; ``differences`` compares with StackStorm.
"""

import os
import re
import stat
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from steward.automation.errors import RuleError, UnknownOperation, WrongParameters
from steward.automation.operation import operation, parameters_of, read_parameters
from steward.automation.rules.limits import takes_nodes
from steward.automation.rules.model import Key, Rule
from steward.automation.rules.parser import LONGEST, read_rule
from steward.automation.rules.templates import fields_of, is_template
from steward.automation.rules.triggers import TYPES
from steward.automation.settings import RulesSettings


def problems(rule: Rule) -> Iterator[str]:
    """List all errors of a rule, each with file, line and key."""
    try:
        called = operation(rule.action)
    except UnknownOperation as error:
        yield f"{rule.at('action', 'ref')}: {error}"
        return
    yield from _parameters(rule)
    yield from _fields(rule)
    if rule.care.most_nodes_percent is not None and not takes_nodes(called.ref):
        where = rule.at("context", "steward", "most_nodes_percent")
        yield f"{where}: {rule.action} takes no nodes away"


def differences(rule: Rule) -> Iterator[str]:
    """List what StackStorm lacks or does differently with this file, each with file, line and key.

    The rule is valid for Steward.
    """
    dispatched = TYPES[rule.trigger].dispatched
    if not dispatched:
        yield f"{rule.at('trigger', 'type')}: the slurm pack has no trigger {rule.trigger}"
    if rule.wanted:
        where = rule.at("trigger", "parameters")
        yield f"{where}: StackStorm never fires such a rule: compare the fields in criteria"
    for criterion in rule.criteria:
        for field in criterion.path[:1] if dispatched else ():
            if field not in dispatched:
                yield _undispatched(rule, str(field), ("criteria", criterion.key))
    for key, text in _templates(rule.parameters, ("action", "parameters")):
        for field in sorted(fields_of(text) - dispatched if dispatched else ()):
            yield _undispatched(rule, field, key)
    if not rule.action.startswith("slurm."):
        yield f"{rule.at('action', 'ref')}: StackStorm calls it slurm.{rule.action}"
    for key in rule.lines:
        if key[:2] == ("context", "steward") and len(key) == 3:
            yield f"{rule.at(*key)}: StackStorm passes over it"


def _undispatched(rule: Rule, field: str, key: Key) -> str:
    """Explain that StackStorm's trigger lacks a field."""
    return f"{rule.at(*key)}: the slurm pack's {rule.trigger} has no field {field!r}"


def _parameters(rule: Rule) -> Iterator[str]:
    """Check the action's parameters, as far as they contain no templates."""
    called = operation(rule.action)
    known = {one.name: one for one in parameters_of(called)}
    for name in rule.parameters:
        if name not in known:
            names = ", ".join(known) or "none"
            where = rule.at("action", "parameters", name)
            yield f"{where}: {rule.action} has no such parameter: {names}"
    for one in known.values():
        if one.required and rule.parameters.get(one.name) in (None, ""):
            yield f"{rule.at('action', 'parameters')}: {rule.action} needs {one.name!r}"
    if not any(_is_rendered(value) for value in rule.parameters.values()):
        try:
            read_parameters(called, rule.parameters)
        except WrongParameters as error:
            if set(rule.parameters) <= set(known):
                yield f"{rule.at('action', 'parameters')}: {error}"


def _fields(rule: Rule) -> Iterator[str]:
    """List fields used in templates that the trigger lacks."""
    fields = TYPES[rule.trigger].fields
    for key, text in _templates(rule.parameters, ("action", "parameters")):
        for field in sorted(fields_of(text) - fields):
            known = ", ".join(sorted(fields))
            yield f"{rule.at(*key)}: {rule.trigger} has no field {field!r}: {known}"


def _templates(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """Yield all templates inside a value, with their positions."""
    if is_template(value):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _templates(one, (*key, name))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _templates(one, (*key, index))


def _is_rendered(value: Any) -> bool:
    """Return whether a value contains a template."""
    return any(True for _ in _templates(value, ()))


# Rule files

SHIPPED: Final = os.path.join(os.path.dirname(__file__), "shipped")
"""Directory of the shipped rules."""
_ENDING: Final = ".yaml"
_NAMED: Final = re.compile(rb"name['\"]?[ \t]*:[ \t]*['\"]?([A-Za-z0-9_.-]+)")
"""Finds ``name: VALUE`` in an invalid file."""
_ANYBODYS: Final = stat.S_IWGRP | stat.S_IWOTH
"""Permission bits that let others write."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Paths and stat values of rule files; differs after any change."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Problem with a rule's file.

    Attributes:
        path: The file.
        what: Message, beginning with file and line.
    """

    path: str
    what: str


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """All loaded rules and the errors of invalid files.

    Attributes:
        rules: Rules, by name.
        troubles: Errors of invalid files.
    """

    rules: dict[str, Rule]
    troubles: tuple[Trouble, ...] = ()


def load(settings: RulesSettings) -> Book:
    """Load the rules of a configuration from their files."""
    rules: dict[str, Rule] = {}
    troubles: list[Trouble] = []
    claimed: set[str] = set()
    for path, is_shipped in _files(settings, troubles):
        found, wrong = load_file(path, shipped=is_shipped)
        troubles += wrong
        if found is None:
            claimed |= set() if is_shipped else _claims(path)
            continue
        before = rules.get(found.name)
        if before is not None and before.shipped == is_shipped:
            what = f"{found.at('name')}: {before.path} has a rule of the same name {found.name!r}"
            troubles.append(Trouble(path=path, what=what))
            continue
        rules[found.name] = found
    for trouble in troubles:
        if trouble.path in settings.directories and os.path.isdir(trouble.path):
            claimed |= {name for path in _yaml_in(trouble.path) for name in _claims(path)}
    for name in sorted(claimed & rules.keys()):
        if rules[name].shipped:
            # The site's file may have been meant to disable the shipped rule, so that one is left
            # out too.
            what = f"{rules[name].path}:1: left out: the site's own rule {name!r} is wrong"
            troubles.append(Trouble(path=rules[name].path, what=what))
            del rules[name]
    return Book(rules=dict(sorted(rules.items())), troubles=tuple(troubles))


def load_file(
    path: str, *, shipped: bool = False, trusted: bool = False
) -> tuple[Rule | None, list[Trouble]]:
    """Load the rule of one file, with its errors.

    Args:
        path: The file.
        shipped: Whether it is part of Steward's distribution.
        trusted: Skip the check of owner and permissions, because the rule will not be run.
    """
    try:
        rule = read_rule(_text(path, trusted=trusted or shipped), path, shipped=shipped)
    except RuleError as error:
        return None, [Trouble(path=path, what=str(error))]
    wrong = [Trouble(path=path, what=what) for what in problems(rule)]
    return (None if wrong else rule), wrong


def signature(settings: RulesSettings) -> Signature:
    """Compute the signature of all rule files."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for path, _shipped in _files(settings, []):
        try:
            status = os.stat(path)
        except OSError:
            found.append((path, ()))
        else:
            # Owner and permissions count too; changing them changes the ctime.
            told = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            found.append((path, told))
    return tuple(found)


def _files(settings: RulesSettings, troubles: list[Trouble]) -> Iterator[tuple[str, bool]]:
    """Yield the paths of rule files, with True for shipped ones; collect errors of directories."""
    if settings.shipped:
        yield from ((path, True) for path in _yaml_in(SHIPPED))
    for directory in settings.directories:
        try:
            paths = _yaml_in(directory)
            _need_trusted(directory)
        except FileNotFoundError:
            # The default directory need not exist.
            if directory not in RulesSettings().directories:
                what = f"{directory}:1: there is no such directory"
                troubles.append(Trouble(path=directory, what=what))
        except OSError as error:
            what = f"{directory}:1: it cannot be read: {error.strerror}"
            troubles.append(Trouble(path=directory, what=what))
        except RuleError as error:
            troubles.append(Trouble(path=directory, what=str(error)))
        else:
            yield from ((path, False) for path in paths)


def _claims(path: str) -> set[str]:
    """Guess the names of rules in an invalid file: its file name and every ``name:`` in it."""
    found = {os.path.basename(path).removesuffix(_ENDING)}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(LONGEST)
    except OSError:
        return found
    return found | {name.decode() for name in _NAMED.findall(data)}


def _yaml_in(directory: str) -> list[str]:
    """List the YAML files of a directory, sorted."""
    # Editors' temporary files begin with a dot.
    names = (name for name in os.listdir(directory) if not name.startswith("."))
    return [os.path.join(directory, name) for name in sorted(names) if name.endswith(_ENDING)]


def _text(path: str, *, trusted: bool) -> str:
    """Read a rule file as text, after checks of type, owner and size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RuleError(f"{path}:1: it cannot be read: {error.strerror}", path) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RuleError(f"{path}:1: it is no file", path)
        if not trusted:
            _need_owned(path, status)
        data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise RuleError(f"{path}:1: it is larger than any rule needs", path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleError(f"{path}:{line}: it is not UTF-8: {error.reason}", path) from error


def _need_trusted(directory: str) -> None:
    """Check that only root or Steward's user can write a directory."""
    _need_owned(directory, os.stat(directory))


def _need_owned(path: str, status: os.stat_result) -> None:
    """Reject a file that others can write: a rule acts with Steward's rights."""
    if status.st_uid not in (0, os.geteuid()):
        raise RuleError(
            f"{path}:1: it is neither root's nor Steward's own: a rule acts with Steward's "
            "rights, so 'chown root' it",
            path,
        )
    if status.st_mode & _ANYBODYS:
        raise RuleError(
            f"{path}:1: others may write it, and a rule acts with Steward's rights: "
            f"'chmod go-w {path}'",
            path,
        )
