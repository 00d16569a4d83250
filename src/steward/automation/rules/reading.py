"""Rules, read from YAML of StackStorm's form.

What StackStorm takes is taken, by its names; what Steward adds stands under
``context: steward:``, which StackStorm passes over. Every error names file, line
and key.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from steward.automation.errors import RuleError
from steward.automation.rules import care, criteria, rendering
from steward.automation.rules.model import Criterion, Rule
from steward.automation.rules.triggers import TYPES
from steward.automation.rules.yaml_tree import Lines, Tree

LONGEST: Final = 256 * 1024
"""The most bytes that a rule's file may have."""

_KEYS: Final = frozenset(
    {
        *("name", "pack", "description", "enabled", "trigger", "criteria", "action", "context"),
        # StackStorm's own bookkeeping, of no meaning here.
        *("id", "ref", "uid", "tags", "metadata_file", "type"),
    }
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LONGEST_NAME: Final = 59
"""With "rule " before it, it stands in the reasons of nodes."""
_STEP: Final = re.compile(
    r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d{1,6})\]|\[(?:'([^']*)'|\"([^\"]*)\")\]"
)


def read(text: str, path: str, *, shipped: bool = False) -> Rule:
    """The rule that a file's text is.

    Args:
        text: The text.
        path: The file, for messages and for people.
        shipped: Whether it came with Steward.

    Raises:
        RuleError: It is none; the message begins with file and line and names the key.
    """
    tree = Tree(text, path)
    return _Reader(tree.lines, path).rule(tree.value, shipped=shipped)


class _Reader:
    """Reads one file; knows where its keys stand."""

    def __init__(self, lines: Lines, path: str) -> None:
        self._path = path
        self._empty = Rule(name="", trigger="", action="", path=path, lines=lines)

    def wrong(self, what: str, *key: str | int) -> RuleError:
        where = self._empty.at(*key)
        return RuleError(f"{where}: {what}" if key else f"{where}{what}", self._path)

    def rule(self, found: Any, *, shipped: bool) -> Rule:
        if not isinstance(found, dict):
            raise self.wrong("a rule is a mapping: 'name: …', 'trigger: …', 'action: …'")
        self.known(found, _KEYS)
        if self.mapping(found, "type").get("ref", "standard") != "standard":
            raise self.wrong("only the type 'standard' is known", "type", "ref")
        trigger = self.mapping(found, "trigger")
        action = self.mapping(found, "action")
        self.known(action, {"ref", "description", "parameters"}, "action")
        type_ = self.text(trigger, "type", "trigger")
        if type_ not in TYPES:
            known = ", ".join(TYPES)
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
            care=care.read(self.mapping(context, "steward", "context"), type_, self.wrong),
            path=self._path,
            shipped=shipped,
            lines=self._empty.lines,
        )

    def name(self, found: Mapping[str, Any]) -> str:
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
        for name in parameters:
            self.field(name, type_, "trigger", "parameters", name)
        return parameters

    def criteria(self, found: dict[str, Any], type_: str) -> tuple[Criterion, ...]:
        read = []
        for key, one in found.items():
            criterion = self.criterion(key, one, "trigger", ("criteria", key))
            if criterion.path:
                self.field(str(criterion.path[0]), type_, "criteria", key)
            read.append(criterion)
        return tuple(read)

    def criterion(self, key: str, found: Any, prefix: str, at: tuple[str, ...]) -> Criterion:
        if not isinstance(found, dict):
            raise self.wrong("a criterion is a mapping: 'type: …', 'pattern: …'", *at)
        self.known(found, {"type", "pattern", "condition"}, *at)
        name = self.text(found, "type", *at)
        long = criteria.in_long(name)
        if long is None:
            known = ", ".join(criteria.operators())
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
            is_template=rendering.is_template(pattern),
        )

    def search(
        self, key: str, path: tuple[str | int, ...], found: dict[str, Any], at: tuple[str, ...]
    ) -> Criterion:
        condition = self.text(found, "condition", *at)
        if condition not in criteria.CONDITIONS:
            known = ", ".join(sorted(criteria.CONDITIONS))
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
        """Refuse a pattern that its operator can do nothing with."""
        where = (*at, "pattern")
        if operator in ("exists", "nexists"):
            return
        if pattern is None and operator != "nequals":
            raise self.wrong("a pattern is wanted", *where)
        if rendering.is_template(pattern):
            if operator in criteria.REGULAR | criteria.TIMED:
                # What a payload holds would be looked at as an expression.
                raise self.wrong(f"{operator!r} takes no template as its pattern", *where)
            self.template(pattern, *where)
        elif operator in criteria.TIMED:
            if isinstance(pattern, bool) or not isinstance(pattern, int | float):
                raise self.wrong(f"{operator!r} takes a number of seconds", *where)
        elif operator in criteria.REGULAR:
            if not isinstance(pattern, str):
                raise self.wrong(f"{operator!r} takes text", *where)
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.wrong(
                    f"{pattern!r} is no regular expression: {error}", *where
                ) from error

    def path(self, key: str, prefix: str, at: tuple[str, ...]) -> tuple[str | int, ...]:
        """The keys and indices that ``trigger.a['b-c'][0]#label`` stands for."""
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
        """Refuse a field that a trigger of this type has not."""
        fields = TYPES[type_].fields
        if name not in fields:
            known = ", ".join(sorted(fields))
            raise self.wrong(f"{type_} has no field {name!r}: {known}", *key)

    def templates(self, value: Any, *key: str | int) -> None:
        """Refuse what is no template, wherever it stands in a value."""
        if rendering.is_template(value):
            self.template(value, *key)
        elif isinstance(value, dict):
            for name, one in value.items():
                self.templates(one, *key, name)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                self.templates(one, *key, index)

    def template(self, text: str, *key: str | int) -> None:
        what = rendering.problem(text)
        if what is not None:
            raise self.wrong(what, *key)

    def known(self, found: Mapping[str, Any], names: frozenset[str] | set[str], *at: str) -> None:
        for name in found:
            if name not in names:
                known = ", ".join(sorted(names))
                raise self.wrong(f"there is no key {name!r} here: {known}", *at, name)

    def mapping(self, found: Mapping[str, Any], name: str, *at: str) -> dict[str, Any]:
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
        value = found.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong("it is missing", *at, name)
        if not isinstance(value, str) or (default is None and not value):
            raise self.wrong("text is wanted", *at, name)
        return value

    def flag(self, found: Mapping[str, Any], name: str) -> bool:
        value = found.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong("true or false is wanted", name)
        return value
