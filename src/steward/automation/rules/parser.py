"""Parser of rule files: YAML with line numbers, Steward's limits, and the whole rule.

Files have the form of StackStorm's rules, with its names. Steward's additions are below ``context:
steward:``, which StackStorm ignores.

``parse_rule`` is the entry point; it returns a :class:`Rule` or raises RuleError, whose message
starts with file and line and names the key. It uses, in the order below, :class:`YamlDocument`
(YAML as plain values plus the line of each, which PyYAML's loader does not keep),
``parse_rule_limits`` (keys below ``context: steward:``), and ``_RuleReader`` (everything else).

Files come from people and may be faulty or huge: duplicate keys are rejected, and so are anchors
that expand to a million values.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import yaml

from steward.automation.errors import RuleError
from steward.automation.rules import criteria, templates
from steward.automation.rules.criteria import (
    REGEX_OPERATORS,
    SEARCH_CONDITIONS,
    TIME_OPERATORS,
    normalize_operator,
)
from steward.automation.rules.model import (
    Criterion,
    OnUnknown,
    RateLimit,
    Rule,
    RuleKey,
    RuleLimits,
)
from steward.automation.rules.templates import is_template
from steward.automation.rules.triggers import TRIGGER_TYPES

_MAX_YAML_VALUES: Final = 5000
"""Maximum number of values in a file."""
_MAX_YAML_DEPTH: Final = 40
"""Maximum depth of nesting."""

LineNumbers = dict[RuleKey, int]
"""Line number of each key, by its position in the file."""


# YAML with line numbers


class YamlDocument:
    """YAML document as plain values, with the line number of each.

    Args:
        text: The document.
        path: File name, for messages.

    Raises:
        RuleError: The text is not YAML, has a duplicate key, or is too large.
    """

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._count = 0
        self.lines: LineNumbers = {}
        try:
            self._loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise RuleError(f"{path}:{line}: a letter that YAML does not allow", path) from error
        try:
            node = self._loader.get_single_node()
            self.value = None if node is None else self._value(node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise RuleError(f"{path}:{line}: {error.problem or error.context}", path) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # An invalid number, or far too deep nesting.
            what = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
            raise RuleError(f"{path}:1: {what}", path) from error
        finally:
            self._loader.dispose()

    def _value(self, node: yaml.Node, key: RuleKey) -> Any:
        """Convert a YAML node to a plain value and record its line."""
        self._count += 1
        if self._count > _MAX_YAML_VALUES or len(key) > _MAX_YAML_DEPTH:
            raise self._wrong(node, "the file holds more than any rule needs")
        self.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(one, (*key, index)) for index, one in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, key: RuleKey) -> dict[str, Any]:
        """Convert a mapping; reject duplicate and non-text keys."""
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag.endswith(":merge"):
                raise self._wrong(name_node, "a key must be plain text")
            name = name_node.value
            if name in found:
                raise self._wrong(name_node, f"the key {name!r} is there twice")
            self.lines[(*key, name)] = name_node.start_mark.line + 1
            found[name] = self._value(value_node, (*key, name))
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        """Convert a scalar; keep timestamps as text, reject other tags."""
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        value = self._loader.construct_object(node)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise self._wrong(node, f"the tag {node.tag!r} is none that a rule may hold")

    def _wrong(self, node: yaml.Node, what: str) -> RuleError:
        """Make the error for a problem at a YAML node."""
        return RuleError(f"{self._path}:{node.start_mark.line + 1}: {what}", self._path)


# Steward's own keys (context: steward:)

MakeRuleError = Callable[..., RuleError]
"""Creates the error for a problem at a key: ``wrong(what, *key)``."""

_LIMITS_KEY: Final = ("context", "steward")
"""Position of Steward's keys in a rule's file."""
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*([smhd]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds per unit of a duration."""
_MAX_DURATION_S: Final = 366 * 86400.0
"""Maximum duration, in seconds."""
_MAX_RETRIES: Final = 20
"""Maximum number of retries."""
_MAX_RATE_COUNT: Final = 100_000
"""Maximum count of a rate limit."""


def parse_rule_limits(found: dict[str, Any], type_: str, wrong: MakeRuleError) -> RuleLimits:
    """Parse Steward's own keys of a rule, below ``context: steward:``.

    Raises:
        RuleError: A key is unknown, or its value is invalid.
    """
    reader = _LimitsReader(found, type_, wrong)
    for name in found:
        if name not in LIMIT_PARSERS:
            raise wrong(
                f"there is no key {name!r} here: {', '.join(LIMIT_PARSERS)}", *_LIMITS_KEY, name
            )
    given = {name: LIMIT_PARSERS[name](reader, name) for name in found}
    return RuleLimits(**{_FIELDS.get(name, name): value for name, value in given.items()})


class _LimitsReader:
    """Parser of the values of Steward's keys; each method reads one kind of value."""

    def __init__(self, found: dict[str, Any], type_: str, wrong: MakeRuleError) -> None:
        self._found = found
        self._type = type_
        self._wrong = wrong

    def duration(self, name: str) -> float:
        """Read a duration, in seconds."""
        seconds = _parse_duration(self._found[name])
        if seconds is None:
            raise self._wrong("a duration is wanted: 90s, 10m, 1h, 1d", *_LIMITS_KEY, name)
        return seconds

    def some_time(self, name: str) -> float:
        """Read a duration above 0, in seconds."""
        seconds = self.duration(name)
        if not seconds:
            raise self._wrong("it must be above 0", *_LIMITS_KEY, name)
        return seconds

    def rate(self, name: str) -> RateLimit:
        """Read a rate such as ``10/1h``."""
        text = self._found[name]
        count, sign, length = str(text).replace(" ", "").partition("/")
        # "30/h" means thirty per hour.
        seconds = _parse_duration(f"1{length}" if length in _SECONDS and length else length)
        if not sign or not count.isdecimal() or len(count) > 6 or not seconds:
            raise self._wrong("a rate is wanted: 10/1h, 100/d", *_LIMITS_KEY, name)
        if int(count) > _MAX_RATE_COUNT:
            raise self._wrong(f"a rate is {_MAX_RATE_COUNT} at the most", *_LIMITS_KEY, name)
        return RateLimit(int(count), seconds)

    def percent(self, name: str) -> float:
        """Read a percentage, 0 to 100, with or without ``%``."""
        value = self._found[name]
        if isinstance(value, str) and re.fullmatch(r"\d{1,3}(\.\d+)?%", value):
            value = float(value[:-1])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise self._wrong("a share in percent is wanted, 0 to 100", *_LIMITS_KEY, name)
        return float(value)

    def flag(self, name: str) -> bool:
        """Read true or false."""
        value = self._found[name]
        if not isinstance(value, bool):
            raise self._wrong("true or false is wanted", *_LIMITS_KEY, name)
        return value

    def unknown(self, name: str) -> OnUnknown:
        """Read ``end`` or ``repeat``."""
        value = self._found[name]
        if value not in ("end", "repeat"):
            raise self._wrong("'end' or 'repeat' is wanted", *_LIMITS_KEY, name)
        kept: OnUnknown = value
        return kept

    def count(self, name: str) -> int:
        """Read a number of retries."""
        value = self._found[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_RETRIES:
            raise self._wrong(f"a number is wanted, 0 to {_MAX_RETRIES}", *_LIMITS_KEY, name)
        return value

    def paths(self, name: str) -> tuple[tuple[str | int, ...], ...]:
        """Read one or several payload fields."""
        value = self._found[name]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts:
            raise self._wrong("fields are wanted: trigger.node", *_LIMITS_KEY, name)
        return tuple(self._path(text, name) for text in texts)

    def _path(self, text: Any, name: str) -> tuple[str | int, ...]:
        """Read one payload field (``trigger.FIELD``) of the rule's trigger type."""
        prefix, _, field = text.partition(".") if isinstance(text, str) else ("", "", "")
        if prefix != "trigger" or field not in TRIGGER_TYPES[self._type].fields:
            known = ", ".join(sorted(TRIGGER_TYPES[self._type].fields))
            raise self._wrong(f"{text!r} is no field of {self._type}: trigger.…, with {known}",
                              *_LIMITS_KEY, name)  # fmt: skip
        return (field,)


LIMIT_PARSERS: Final[dict[str, Callable[[_LimitsReader, str], Any]]] = {
    "rate_limit": _LimitsReader.rate,
    "dedup_window": _LimitsReader.duration,
    "dedup_by": _LimitsReader.paths,
    "most_nodes_percent": _LimitsReader.percent,
    "dry_run": _LimitsReader.flag,
    "on_unknown": _LimitsReader.unknown,
    "retries": _LimitsReader.count,
    "backoff": _LimitsReader.duration,
    "timeout": _LimitsReader.some_time,
    "max_age": _LimitsReader.some_time,
}
"""Keys of this section, and the method that parses each."""
_FIELDS: Final = {
    "dedup_window": "dedup_window_s",
    "backoff": "backoff_s",
    "timeout": "timeout_s",
    "max_age": "max_age_s",
}
"""Fields of :class:`RuleLimits` whose names differ from their keys."""


def _parse_duration(value: Any) -> float | None:
    """Parse ``90``, ``90s``, ``10m``, ``1h`` or ``1d`` to seconds; None if it is not a duration."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return None
        seconds = float(match[1]) * _SECONDS[match[2]]
    return seconds if math.isfinite(seconds) and 0 <= seconds <= _MAX_DURATION_S else None


# Whole rule

MAX_RULE_BYTES: Final = 256 * 1024
"""Maximum size of a rule's file, in bytes."""

_KEYS: Final = frozenset(
    {
        *("name", "pack", "description", "enabled", "trigger", "criteria", "action", "context"),
        # StackStorm's bookkeeping, without meaning here.
        *("id", "ref", "uid", "tags", "metadata_file", "type"),
    }
)
"""Keys at the top level of a rule."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Valid names of rules and packs."""
_LONGEST_NAME: Final = 59
"""With "rule " in front, the name must fit into reasons of nodes."""
_STEP: Final = re.compile(
    r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d{1,6})\]|\[(?:'([^']*)'|\"([^\"]*)\")\]"
)
"""One step of a path: ``.name``, ``[0]`` or ``['name']``."""


def parse_rule(text: str, path: str, *, shipped: bool = False) -> Rule:
    """Parse the text of a rule's file.

    Args:
        text: Text of the file.
        path: File name, for messages and people.
        shipped: Whether it is part of Steward's distribution.

    Raises:
        RuleError: The rule is invalid; the message starts with file and line and names the key.
    """
    tree = YamlDocument(text, path)
    return _RuleReader(tree.lines, path).rule(tree.value, shipped=shipped)


class _RuleReader:
    """Parser of one rule; knows the line of each key for error messages."""

    def __init__(self, lines: LineNumbers, path: str) -> None:
        self._path = path
        self._empty = Rule(name="", trigger="", action="", path=path, lines=lines)

    def wrong(self, what: str, *key: str | int) -> RuleError:
        """Make the error for a problem at a key."""
        where = self._empty.at(*key)
        return RuleError(f"{where}: {what}" if key else f"{where}{what}", self._path)

    def rule(self, found: Any, *, shipped: bool) -> Rule:
        """Parse the whole rule."""
        if not isinstance(found, dict):
            raise self.wrong("a rule is a mapping: 'name: …', 'trigger: …', 'action: …'")
        self.known(found, _KEYS)
        if self.mapping(found, "type").get("ref", "standard") != "standard":
            raise self.wrong("only the type 'standard' is known", "type", "ref")
        trigger = self.mapping(found, "trigger")
        action = self.mapping(found, "action")
        self.known(action, {"ref", "description", "parameters"}, "action")
        type_ = self.text(trigger, "type", "trigger")
        if type_ not in TRIGGER_TYPES:
            known = ", ".join(TRIGGER_TYPES)
            raise self.wrong(f"{type_!r} is no trigger of Steward's: {known}", "trigger", "type")
        parameters = self.mapping(action, "parameters", "action")
        self.templates(parameters, "action", "parameters")
        context = self.mapping(found, "context")
        return Rule(
            name=self.name(found),
            description=self.text(found, "description", default=""),
            enabled=self.flag(found, "enabled"),
            trigger=type_,
            wanted=self.wanted(self.mapping(trigger, "parameters", "trigger"), type_),
            criteria=self.criteria(self.mapping(found, "criteria"), type_),
            action=self.text(action, "ref", "action"),
            parameters=parameters,
            care=parse_rule_limits(self.mapping(context, "steward", "context"), type_, self.wrong),
            path=self._path,
            shipped=shipped,
            lines=self._empty.lines,
        )

    def name(self, found: Mapping[str, Any]) -> str:
        """Parse the full name, with the pack unless that is ``default``."""
        name = self.text(found, "name")
        pack = self.text(found, "pack", default="")
        for key, value in (("name", name), ("pack", pack)):
            if value and _NAME.fullmatch(value) is None:
                raise self.wrong("use letters, digits, '_', '.' and '-'", key)
        whole = f"{pack}.{name}" if pack and pack != "default" else name
        if len(whole) > _LONGEST_NAME:
            raise self.wrong(f"with its pack it is longer than {_LONGEST_NAME} letters", "name")
        return whole

    def wanted(self, parameters: dict[str, Any], type_: str) -> dict[str, Any]:
        """Check the trigger's parameters."""
        for name in parameters:
            self.field(name, type_, "trigger", "parameters", name)
        return parameters

    def criteria(self, found: dict[str, Any], type_: str) -> tuple[Criterion, ...]:
        """Parse all criteria."""
        read = []
        for key, one in found.items():
            criterion = self.criterion(key, one, "trigger", ("criteria", key))
            if criterion.path:
                self.field(str(criterion.path[0]), type_, "criteria", key)
            read.append(criterion)
        return tuple(read)

    def criterion(self, key: str, found: Any, prefix: str, at: tuple[str, ...]) -> Criterion:
        """Parse one criterion."""
        if not isinstance(found, dict):
            raise self.wrong("a criterion is a mapping: 'type: …', 'pattern: …'", *at)
        self.known(found, {"type", "pattern", "condition"}, *at)
        name = self.text(found, "type", *at)
        long = normalize_operator(name)
        if long is None:
            known = ", ".join(criteria.list_operators())
            raise self.wrong(f"{name!r} is no operator: {known}", *at, "type")
        path = self.path(key, prefix, at)
        pattern = found.get("pattern")
        if long == "search":
            return self.search(key, path, found, at)
        if "condition" in found:
            raise self.wrong("only 'search' has a condition", *at, "condition")
        self.pattern(long, pattern, at)
        return Criterion(
            key=key,
            path=path,
            type=long,
            pattern=pattern,
            is_template=is_template(pattern),
        )

    def search(
        self, key: str, path: tuple[str | int, ...], found: dict[str, Any], at: tuple[str, ...]
    ) -> Criterion:
        """Parse a ``search`` criterion with the criteria for its items."""
        condition = self.text(found, "condition", *at)
        if condition not in SEARCH_CONDITIONS:
            known = ", ".join(sorted(SEARCH_CONDITIONS))
            raise self.wrong(f"the condition is one of: {known}", *at, "condition")
        inner = []
        for name, one in self.mapping(found, "pattern", *at).items():
            read = self.criterion(name, one, "item", (*at, "pattern", name))
            if read.is_template or read.type == "search":
                raise self.wrong(
                    "within 'search' there are neither templates nor searches",
                    *(*at, "pattern", name),
                )
            inner.append(read)
        if not inner:
            raise self.wrong("'search' needs criteria for its items", *at, "pattern")
        return Criterion(key=key, path=path, type="search", condition=condition, inner=tuple(inner))

    def pattern(self, operator: str, pattern: Any, at: tuple[str, ...]) -> None:
        """Reject a pattern that is invalid for its operator."""
        where = (*at, "pattern")
        if operator in ("exists", "nexists"):
            return
        if pattern is None and operator != "nequals":
            raise self.wrong("a pattern is wanted", *where)
        if is_template(pattern):
            if operator in REGEX_OPERATORS | TIME_OPERATORS:
                # A rendered value of the payload would be used as a regular expression.
                raise self.wrong(f"{operator!r} takes no template as its pattern", *where)
            self.template(pattern, *where)
        elif operator in TIME_OPERATORS:
            if isinstance(pattern, bool) or not isinstance(pattern, int | float):
                raise self.wrong(f"{operator!r} takes a number of seconds", *where)
        elif operator in REGEX_OPERATORS:
            if not isinstance(pattern, str):
                raise self.wrong(f"{operator!r} takes text", *where)
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.wrong(
                    f"{pattern!r} is no regular expression: {error}", *where
                ) from error

    def path(self, key: str, prefix: str, at: tuple[str, ...]) -> tuple[str | int, ...]:
        """Parse ``trigger.a['b-c'][0]#label`` to keys and indices."""
        text = key.partition("#")[0].strip()
        if not text.startswith(prefix) or text[len(prefix) : len(prefix) + 1] not in ("", ".", "["):
            raise self.wrong(f"a key here begins with '{prefix}.'", *at)
        rest, steps = text[len(prefix) :], []
        while rest:
            match = _STEP.match(rest)
            if match is None or (match[1] is not None and not rest.startswith(".")):
                raise self.wrong(f"{rest!r} is not understood: use .name, ['name'] and [0]", *at)
            named = next(part for part in match.groups() if part is not None)
            steps.append(int(named) if match[2] is not None else named)
            rest = rest[match.end() :]
        return tuple(steps)

    def field(self, name: str, type_: str, *key: str) -> None:
        """Reject a field that triggers of this type lack."""
        fields = TRIGGER_TYPES[type_].fields
        if name not in fields:
            known = ", ".join(sorted(fields))
            raise self.wrong(f"{type_} has no field {name!r}: {known}", *key)

    def templates(self, value: Any, *key: str | int) -> None:
        """Validate all templates inside a value."""
        if is_template(value):
            self.template(value, *key)
        elif isinstance(value, dict):
            for name, one in value.items():
                self.templates(one, *key, name)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                self.templates(one, *key, index)

    def template(self, text: str, *key: str | int) -> None:
        """Validate one template."""
        what = templates.find_template_error(text)
        if what is not None:
            raise self.wrong(what, *key)

    def known(self, found: Mapping[str, Any], names: frozenset[str] | set[str], *at: str) -> None:
        """Reject unknown keys."""
        for name in found:
            if name not in names:
                known = ", ".join(sorted(names))
                raise self.wrong(f"there is no key {name!r} here: {known}", *at, name)

    def mapping(self, found: Mapping[str, Any], name: str, *at: str) -> dict[str, Any]:
        """Return a key's mapping; {} if absent, unless the key is required."""
        value = found.get(name)
        if value is None:
            if name in ("trigger", "action"):
                raise self.wrong("it is missing", *at, name)
            return {}
        if not isinstance(value, dict):
            raise self.wrong("a mapping is wanted", *at, name)
        return value

    def text(
        self, found: Mapping[str, Any], name: str, *at: str, default: str | None = None
    ) -> str:
        """Return a key's text, or the default if there is one."""
        value = found.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong("it is missing", *at, name)
        if not isinstance(value, str) or (default is None and not value):
            raise self.wrong("text is wanted", *at, name)
        return value

    def flag(self, found: Mapping[str, Any], name: str) -> bool:
        """Return a key's truth value; False if absent."""
        value = found.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong("true or false is wanted", name)
        return value
