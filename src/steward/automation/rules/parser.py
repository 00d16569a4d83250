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
        self._value_count = 0
        self.lines: LineNumbers = {}
        try:
            self._loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise RuleError(f"{path}:{line}: invalid YAML character", path) from error
        try:
            node = self._loader.get_single_node()
            self.value = None if node is None else self._convert_node(node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise RuleError(f"{path}:{line}: {error.problem or error.context}", path) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # An invalid number, or far too deep nesting.
            message = str(error).splitlines()[0] if str(error) else "nested too deeply"
            raise RuleError(f"{path}:1: {message}", path) from error
        finally:
            self._loader.dispose()

    def _convert_node(self, node: yaml.Node, key: RuleKey) -> Any:
        """Convert a YAML node to a plain value and record its line."""
        self._value_count += 1
        if self._value_count > _MAX_YAML_VALUES or len(key) > _MAX_YAML_DEPTH:
            raise self._make_error(node, "the file is too large for a rule")
        self.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._convert_node(child, (*key, index)) for index, child in enumerate(node.value)
            ]
        return self._convert_scalar(node)

    def _convert_mapping(self, node: yaml.MappingNode, key: RuleKey) -> dict[str, Any]:
        """Convert a mapping; reject duplicate and non-text keys."""
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag.endswith(":merge"):
                raise self._make_error(name_node, "a key must be plain text")
            name = name_node.value
            if name in mapping:
                raise self._make_error(name_node, f"duplicate key {name!r}")
            self.lines[(*key, name)] = name_node.start_mark.line + 1
            mapping[name] = self._convert_node(value_node, (*key, name))
        return mapping

    def _convert_scalar(self, node: yaml.Node) -> Any:
        """Convert a scalar; keep timestamps as text, reject other tags."""
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        value = self._loader.construct_object(node)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise self._make_error(node, f"the tag {node.tag!r} is not allowed in a rule")

    def _make_error(self, node: yaml.Node, message: str) -> RuleError:
        """Make the error for a problem at a YAML node."""
        return RuleError(f"{self._path}:{node.start_mark.line + 1}: {message}", self._path)


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


def parse_rule_limits(
    values: dict[str, Any], trigger_type: str, make_error: MakeRuleError
) -> RuleLimits:
    """Parse Steward's own keys of a rule, below ``context: steward:``.

    Raises:
        RuleError: A key is unknown, or its value is invalid.
    """
    reader = _LimitsReader(values, trigger_type, make_error)
    for name in values:
        if name not in LIMIT_PARSERS:
            raise make_error(
                f"unknown key {name!r}: use one of {', '.join(LIMIT_PARSERS)}", *_LIMITS_KEY, name
            )
    fields = {name: LIMIT_PARSERS[name](reader, name) for name in values}
    return RuleLimits(**{_FIELDS.get(name, name): value for name, value in fields.items()})


class _LimitsReader:
    """Parser of the values of Steward's keys; each method reads one kind of value."""

    def __init__(
        self, values: dict[str, Any], trigger_type: str, make_error: MakeRuleError
    ) -> None:
        self._values = values
        self._trigger_type = trigger_type
        self._make_error = make_error

    def read_duration(self, name: str) -> float:
        """Read a duration, in seconds."""
        seconds = _parse_duration(self._values[name])
        if seconds is None:
            raise self._make_error("not a duration: write 90s, 10m, 1h or 1d", *_LIMITS_KEY, name)
        return seconds

    def read_positive_duration(self, name: str) -> float:
        """Read a duration above 0, in seconds."""
        seconds = self.read_duration(name)
        if not seconds:
            raise self._make_error("must be above 0", *_LIMITS_KEY, name)
        return seconds

    def read_rate(self, name: str) -> RateLimit:
        """Read a rate such as ``10/1h``."""
        text = self._values[name]
        count, slash, length = str(text).replace(" ", "").partition("/")
        # "30/h" means thirty per hour.
        seconds = _parse_duration(f"1{length}" if length in _SECONDS and length else length)
        if not slash or not count.isdecimal() or len(count) > 6 or not seconds:
            raise self._make_error("not a rate: write 10/1h or 100/d", *_LIMITS_KEY, name)
        if int(count) > _MAX_RATE_COUNT:
            raise self._make_error(
                f"rate too high: give at most {_MAX_RATE_COUNT}", *_LIMITS_KEY, name
            )
        return RateLimit(int(count), seconds)

    def read_percent(self, name: str) -> float:
        """Read a percentage, 0 to 100, with or without ``%``."""
        value = self._values[name]
        if isinstance(value, str) and re.fullmatch(r"\d{1,3}(\.\d+)?%", value):
            value = float(value[:-1])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise self._make_error("not a percentage: give 0 to 100", *_LIMITS_KEY, name)
        return float(value)

    def read_flag(self, name: str) -> bool:
        """Read true or false."""
        value = self._values[name]
        if not isinstance(value, bool):
            raise self._make_error("must be true or false", *_LIMITS_KEY, name)
        return value

    def read_on_unknown(self, name: str) -> OnUnknown:
        """Read ``end`` or ``repeat``."""
        value = self._values[name]
        if value not in ("end", "repeat"):
            raise self._make_error("must be 'end' or 'repeat'", *_LIMITS_KEY, name)
        choice: OnUnknown = value
        return choice

    def count(self, name: str) -> int:
        """Read a number of retries."""
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_RETRIES:
            raise self._make_error(f"must be a number from 0 to {_MAX_RETRIES}", *_LIMITS_KEY, name)
        return value

    def read_paths(self, name: str) -> tuple[tuple[str | int, ...], ...]:
        """Read one or several payload fields."""
        value = self._values[name]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts:
            raise self._make_error(
                "no fields given: write them as trigger.node", *_LIMITS_KEY, name
            )
        return tuple(self._read_path(text, name) for text in texts)

    def _read_path(self, text: Any, name: str) -> tuple[str | int, ...]:
        """Read one payload field (``trigger.FIELD``) of the rule's trigger type."""
        prefix, _, field = text.partition(".") if isinstance(text, str) else ("", "", "")
        if prefix != "trigger" or field not in TRIGGER_TYPES[self._trigger_type].fields:
            choices = ", ".join(sorted(TRIGGER_TYPES[self._trigger_type].fields))
            message = (
                f"{text!r} is not a field of {self._trigger_type}: write trigger.…, with {choices}"
            )
            raise self._make_error(message, *_LIMITS_KEY, name)
        return (field,)


LIMIT_PARSERS: Final[dict[str, Callable[[_LimitsReader, str], Any]]] = {
    "rate_limit": _LimitsReader.read_rate,
    "dedup_window": _LimitsReader.read_duration,
    "dedup_by": _LimitsReader.read_paths,
    "most_nodes_percent": _LimitsReader.read_percent,
    "dry_run": _LimitsReader.read_flag,
    "on_unknown": _LimitsReader.read_on_unknown,
    "retries": _LimitsReader.count,
    "backoff": _LimitsReader.read_duration,
    "timeout": _LimitsReader.read_positive_duration,
    "max_age": _LimitsReader.read_positive_duration,
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
    return _RuleReader(tree.lines, path).parse(tree.value, shipped=shipped)


class _RuleReader:
    """Parser of one rule; knows the line of each key for error messages."""

    def __init__(self, lines: LineNumbers, path: str) -> None:
        self._path = path
        self._positions = Rule(name="", trigger="", action="", path=path, lines=lines)

    def make_error(self, message: str, *key: str | int) -> RuleError:
        """Make the error for a problem at a key."""
        position = self._positions.format_position(*key)
        return RuleError(f"{position}: {message}" if key else f"{position}{message}", self._path)

    def parse(self, document: Any, *, shipped: bool) -> Rule:
        """Parse the whole rule."""
        if not isinstance(document, dict):
            raise self.make_error("a rule must be a mapping: 'name: …', 'trigger: …', 'action: …'")
        self.reject_unknown_keys(document, _KEYS)
        if self.get_mapping(document, "type").get("ref", "standard") != "standard":
            raise self.make_error("unknown type: use 'standard'", "type", "ref")
        trigger = self.get_mapping(document, "trigger")
        action = self.get_mapping(document, "action")
        self.reject_unknown_keys(action, {"ref", "description", "parameters"}, "action")
        trigger_type = self.get_text(trigger, "type", "trigger")
        if trigger_type not in TRIGGER_TYPES:
            choices = ", ".join(TRIGGER_TYPES)
            raise self.make_error(
                f"unknown trigger {trigger_type!r}: use one of {choices}", "trigger", "type"
            )
        parameters = self.get_mapping(action, "parameters", "action")
        self.check_templates(parameters, "action", "parameters")
        context = self.get_mapping(document, "context")
        return Rule(
            name=self.name(document),
            description=self.get_text(document, "description", default=""),
            enabled=self.get_flag(document, "enabled"),
            trigger=trigger_type,
            trigger_parameters=self.check_trigger_parameters(
                self.get_mapping(trigger, "parameters", "trigger"), trigger_type
            ),
            criteria=self.parse_criteria(self.get_mapping(document, "criteria"), trigger_type),
            action=self.get_text(action, "ref", "action"),
            parameters=parameters,
            limits=parse_rule_limits(
                self.get_mapping(context, "steward", "context"), trigger_type, self.make_error
            ),
            path=self._path,
            shipped=shipped,
            lines=self._positions.lines,
        )

    def name(self, document: Mapping[str, Any]) -> str:
        """Parse the full name, with the pack unless that is ``default``."""
        name = self.get_text(document, "name")
        pack = self.get_text(document, "pack", default="")
        for key, value in (("name", name), ("pack", pack)):
            if value and _NAME.fullmatch(value) is None:
                raise self.make_error("invalid name: use letters, digits, '_', '.' and '-'", key)
        full_name = f"{pack}.{name}" if pack and pack != "default" else name
        if len(full_name) > _LONGEST_NAME:
            raise self.make_error(
                f"name and pack together are longer than {_LONGEST_NAME} characters", "name"
            )
        return full_name

    def check_trigger_parameters(
        self, parameters: dict[str, Any], trigger_type: str
    ) -> dict[str, Any]:
        """Check the trigger's parameters."""
        for name in parameters:
            self.check_field(name, trigger_type, "trigger", "parameters", name)
        return parameters

    def parse_criteria(self, section: dict[str, Any], trigger_type: str) -> tuple[Criterion, ...]:
        """Parse all criteria."""
        parsed = []
        for key, definition in section.items():
            criterion = self.parse_criterion(key, definition, "trigger", ("criteria", key))
            if criterion.path:
                self.check_field(str(criterion.path[0]), trigger_type, "criteria", key)
            parsed.append(criterion)
        return tuple(parsed)

    def parse_criterion(
        self, key: str, definition: Any, prefix: str, at: tuple[str, ...]
    ) -> Criterion:
        """Parse one criterion."""
        if not isinstance(definition, dict):
            raise self.make_error("a criterion must be a mapping: 'type: …', 'pattern: …'", *at)
        self.reject_unknown_keys(definition, {"type", "pattern", "condition"}, *at)
        name = self.get_text(definition, "type", *at)
        operator = normalize_operator(name)
        if operator is None:
            choices = ", ".join(criteria.list_operators())
            raise self.make_error(f"unknown operator {name!r}: use one of {choices}", *at, "type")
        path = self.parse_path(key, prefix, at)
        pattern = definition.get("pattern")
        if operator == "search":
            return self.parse_search(key, path, definition, at)
        if "condition" in definition:
            raise self.make_error("only 'search' accepts a condition: remove it", *at, "condition")
        self.check_pattern(operator, pattern, at)
        return Criterion(
            key=key,
            path=path,
            type=operator,
            pattern=pattern,
            is_template=is_template(pattern),
        )

    def parse_search(
        self, key: str, path: tuple[str | int, ...], definition: dict[str, Any], at: tuple[str, ...]
    ) -> Criterion:
        """Parse a ``parse_search`` criterion with the criteria for its items."""
        condition = self.get_text(definition, "condition", *at)
        if condition not in SEARCH_CONDITIONS:
            choices = ", ".join(sorted(SEARCH_CONDITIONS))
            raise self.make_error(f"unknown condition: use one of {choices}", *at, "condition")
        inner = []
        for name, item in self.get_mapping(definition, "pattern", *at).items():
            criterion = self.parse_criterion(name, item, "item", (*at, "pattern", name))
            if criterion.is_template or criterion.type == "search":
                raise self.make_error(
                    "'search' cannot contain templates or another 'search'",
                    *(*at, "pattern", name),
                )
            inner.append(criterion)
        if not inner:
            raise self.make_error("'search' requires criteria for its items", *at, "pattern")
        return Criterion(key=key, path=path, type="search", condition=condition, inner=tuple(inner))

    def check_pattern(self, operator: str, pattern: Any, at: tuple[str, ...]) -> None:
        """Reject a pattern that is invalid for its operator."""
        position = (*at, "pattern")
        if operator in ("exists", "nexists"):
            return
        if pattern is None and operator != "nequals":
            raise self.make_error("missing pattern", *position)
        if is_template(pattern):
            if operator in REGEX_OPERATORS | TIME_OPERATORS:
                # A rendered value of the payload would be used as a regular expression.
                raise self.make_error(
                    f"the pattern of {operator!r} cannot be a template", *position
                )
            self.check_template(pattern, *position)
        elif operator in TIME_OPERATORS:
            if isinstance(pattern, bool) or not isinstance(pattern, int | float):
                raise self.make_error(f"{operator!r} requires a number of seconds", *position)
        elif operator in REGEX_OPERATORS:
            if not isinstance(pattern, str):
                raise self.make_error(f"{operator!r} requires text", *position)
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.make_error(
                    f"invalid regular expression {pattern!r}: {error}", *position
                ) from error

    def parse_path(self, key: str, prefix: str, at: tuple[str, ...]) -> tuple[str | int, ...]:
        """Parse ``trigger.a['b-c'][0]#label`` to keys and indices."""
        text = key.partition("#")[0].strip()
        if not text.startswith(prefix) or text[len(prefix) : len(prefix) + 1] not in ("", ".", "["):
            raise self.make_error(f"a key must begin with '{prefix}.'", *at)
        rest, steps = text[len(prefix) :], []
        while rest:
            match = _STEP.match(rest)
            if match is None or (match[1] is not None and not rest.startswith(".")):
                raise self.make_error(f"cannot parse {rest!r}: use .name, ['name'] and [0]", *at)
            step = next(part for part in match.groups() if part is not None)
            steps.append(int(step) if match[2] is not None else step)
            rest = rest[match.end() :]
        return tuple(steps)

    def check_field(self, name: str, trigger_type: str, *key: str) -> None:
        """Reject a field that triggers of this type lack."""
        fields = TRIGGER_TYPES[trigger_type].fields
        if name not in fields:
            choices = ", ".join(sorted(fields))
            raise self.make_error(
                f"{trigger_type} has no field {name!r}: use one of {choices}", *key
            )

    def check_templates(self, value: Any, *key: str | int) -> None:
        """Validate all templates inside a value."""
        if is_template(value):
            self.check_template(value, *key)
        elif isinstance(value, dict):
            for name, item in value.items():
                self.check_templates(item, *key, name)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.check_templates(item, *key, index)

    def check_template(self, text: str, *key: str | int) -> None:
        """Validate one template."""
        problem = templates.find_template_error(text)
        if problem is not None:
            raise self.make_error(problem, *key)

    def reject_unknown_keys(
        self, mapping: Mapping[str, Any], names: frozenset[str] | set[str], *at: str
    ) -> None:
        """Reject unknown keys."""
        for name in mapping:
            if name not in names:
                choices = ", ".join(sorted(names))
                raise self.make_error(f"unknown key {name!r}: use one of {choices}", *at, name)

    def get_mapping(self, section: Mapping[str, Any], name: str, *at: str) -> dict[str, Any]:
        """Return a key's mapping; {} if absent, unless the key is required."""
        value = section.get(name)
        if value is None:
            if name in ("trigger", "action"):
                raise self.make_error("missing", *at, name)
            return {}
        if not isinstance(value, dict):
            raise self.make_error("must be a mapping", *at, name)
        return value

    def get_text(
        self, section: Mapping[str, Any], name: str, *at: str, default: str | None = None
    ) -> str:
        """Return a key's text, or the default if there is one."""
        value = section.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.make_error("missing", *at, name)
        if not isinstance(value, str) or (default is None and not value):
            raise self.make_error("must be text", *at, name)
        return value

    def get_flag(self, section: Mapping[str, Any], name: str) -> bool:
        """Return a key's truth value; False if absent."""
        value = section.get(name, False)
        if not isinstance(value, bool):
            raise self.make_error("must be true or false", name)
        return value
