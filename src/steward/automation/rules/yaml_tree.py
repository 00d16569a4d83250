"""YAML as plain values, with the line of each: what PyYAML's loader does not tell.

A file is somebody's mistake at worst, but it may be a large one: a key that is there
twice, an anchor that unfolds to a million values.
"""

from typing import Any, Final

import yaml

from steward.automation.errors import RuleError
from steward.automation.rules.model import Key

_MOST_VALUES: Final = 5000
_DEEPEST: Final = 40

Lines = dict[Key, int]


class Tree:
    """A document's values and lines.

    Args:
        text: The document.
        path: Its file, for messages.

    Raises:
        RuleError: It is no YAML, holds a key twice, or is too large.
    """

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._count = 0
        self.lines: Lines = {}
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
            # A number that is none after all; more brackets than anybody writes.
            what = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
            raise RuleError(f"{path}:1: {what}", path) from error
        finally:
            self._loader.dispose()

    def _value(self, node: yaml.Node, key: Key) -> Any:
        self._count += 1
        if self._count > _MOST_VALUES or len(key) > _DEEPEST:
            raise self._wrong(node, "the file holds more than any rule needs")
        self.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(one, (*key, index)) for index, one in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
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
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        value = self._loader.construct_object(node)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise self._wrong(node, f"the tag {node.tag!r} is none that a rule may hold")

    def _wrong(self, node: yaml.Node, what: str) -> RuleError:
        return RuleError(f"{self._path}:{node.start_mark.line + 1}: {what}", self._path)
