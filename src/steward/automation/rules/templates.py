"""Templates in rule parameters: Jinja2 in its sandbox, rendered once, with native values.

A parameter that is a single expression (``{{ trigger.partitions }}``) yields that value with its
type; in other text, values are inserted as text. Rendered output is never rendered again, whatever
a node's reason contains, and becomes one argument of a command, never shell text.

``find_template_error`` and ``find_trigger_fields`` validate templates when a rule is loaded,
``render_value`` and ``render_text`` fill them in, ``_make_environment`` configures the sandbox:
size limits, no filters or methods that make text of any length, and the filters of StackStorm that
rules use.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.automation.errors import RuleError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


TEMPLATE_MARKS: Final = ("{{", "{%", "{#")
"""Marks that make a text a template."""

_MAX_RENDERED: Final = 65536
"""Maximum size of rendered output: characters of a text, values of a list, bytes as JSON."""
_MAX_RENDER_DEPTH: Final = 32
"""Maximum depth of nesting."""
_MAX_POWER_BASE: Final = 10_000
"""Maximum base of ``**``."""
_LENGTHENING_METHODS: Final = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
"""Methods of text that can make it any length, and so are forbidden."""
_NAMES: Final = frozenset({"trigger", "range", "dict", "namespace"})
"""Names that templates may use."""


class RenderError(RuleError):
    """A template cannot be rendered with this payload."""


def is_template(value: object) -> bool:
    """Return whether a value is text with template marks."""
    return isinstance(value, str) and any(mark in value for mark in TEMPLATE_MARKS)


def find_template_error(text: str) -> str | None:
    """Return what is wrong with a template, in one line; None if it is valid."""
    from jinja2 import TemplateSyntaxError, meta, nodes

    try:
        tree = _make_environment().parse(text)
        unknown = meta.find_undeclared_variables(tree) - _NAMES
        if unknown:
            name = min(unknown)
            known = (
                "templates can use 'trigger' only; Steward has no datastore and no pack "
                "configuration"
            )
            return f"unknown name {name!r}: {known}"
        for node_type in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            if tree.find(node_type) is not None:
                return "templates cannot include others"
        _compile_template(text)
    except TemplateSyntaxError as error:
        return f"cannot parse the template: {error.message}"
    return None


def find_trigger_fields(text: str) -> set[str]:
    """Return the fields of ``trigger`` that a template uses."""
    from jinja2 import nodes

    fields = set()
    for node in _make_environment().parse(text).find_all((nodes.Getattr, nodes.Getitem)):
        if not isinstance(node, nodes.Getattr | nodes.Getitem):
            continue
        if not isinstance(node.node, nodes.Name) or node.node.name != "trigger":
            continue
        if isinstance(node, nodes.Getattr):
            fields.add(node.attr)
        elif isinstance(node.arg, nodes.Const):
            fields.add(str(node.arg.value))
    return fields


def render_value(value: Any, payload: Mapping[str, Any]) -> Any:
    """Render all templates inside a parameter's value.

    Raises:
        RenderError: A template uses an absent field, or its output is too large.
    """
    rendered = _render_nested(value, payload, 0)
    if len(msgspec.json.encode(rendered)) > _MAX_RENDERED:
        raise RenderError(f"the rendered text is larger than {_MAX_RENDERED} bytes")
    return rendered


def render_text(value: str, payload: Mapping[str, Any]) -> str:
    """Render a template to text.

    Raises:
        RenderError: As :func:`render_value`.
    """
    rendered = render_value(value, payload)
    return rendered if isinstance(rendered, str) else str(rendered)


def _render_nested(value: Any, payload: Mapping[str, Any], depth: int) -> Any:
    """Render all templates inside a value, with a limit of depth."""
    if depth > _MAX_RENDER_DEPTH:
        raise RenderError("parameters are nested too deeply")
    if isinstance(value, str):
        return _render_template(value, payload) if is_template(value) else value
    if isinstance(value, Mapping):
        return {name: _render_nested(item, payload, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_render_nested(item, payload, depth + 1) for item in value]
    return value


def _render_template(text: str, payload: Mapping[str, Any]) -> Any:
    """Render one template and convert the result to plain JSON."""
    from jinja2 import TemplateError, Undefined

    try:
        rendered = _compile_template(text)(payload)
        if isinstance(rendered, Undefined):
            # An undefined value raises when converted to text.
            str(rendered)
        return _to_plain_value(rendered, 0)
    except RuleError:
        raise
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = str(error).replace("'dict object' has no attribute", "the trigger has no field")
        raise RenderError(f"cannot render {_shorten_text(text)}: {reason}", text) from error
    except (MemoryError, RecursionError) as error:
        raise RenderError(
            f"cannot render {_shorten_text(text)}: the result is too large", text
        ) from error


def _to_plain_value(value: Any, depth: int) -> Any:
    """Convert a rendered value to plain JSON, within limits of depth and size."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        if len(value) > _MAX_RENDERED:
            raise RenderError(f"the rendered text is longer than {_MAX_RENDERED} characters")
        return str(value)
    if depth > _MAX_RENDER_DEPTH:
        raise RenderError("the rendered value is nested too deeply")
    if isinstance(value, Mapping):
        return {str(name): _to_plain_value(item, depth + 1) for name, item in value.items()}
    if callable(value) or not hasattr(value, "__iter__"):
        raise RenderError(
            f"the template gives a {type(value).__name__}: it must give text, a number, a list or "
            "a mapping"
        )
    items = []
    for item in value:
        items.append(_to_plain_value(item, depth + 1))
        if len(items) > _MAX_RENDERED:
            raise RenderError(f"the template gives more than {_MAX_RENDERED} values")
    return items


def _shorten_text(text: str) -> str:
    """Quote a template for an error message, shortened."""
    return repr(text if len(text) < 60 else f"{text[:57]}...")


TemplateFunction = Callable[[Mapping[str, Any]], Any]
"""Compiled template: takes the payload and returns the rendered value."""


@lru_cache(maxsize=1024)
def _compile_template(text: str) -> TemplateFunction:
    """Compile a template, cached: a single expression keeps its type, other text becomes text."""
    environment = _make_environment()
    expression = _extract_expression(environment, text)
    if expression:
        evaluate = environment.compile_expression(expression, undefined_to_none=False)
        return lambda payload: evaluate(trigger=payload)
    template = environment.from_string(text)

    def fill(payload: Mapping[str, Any]) -> str:
        parts, length = [], 0
        for part in template.generate(trigger=payload):
            length += len(part)
            if length > _MAX_RENDERED:
                raise RenderError(f"the rendered text is longer than {_MAX_RENDERED} characters")
            parts.append(part)
        return "".join(parts)

    return fill


def _extract_expression(environment: "SandboxedEnvironment", text: str) -> str:
    """Return the expression of a text that consists of one expression only; "" otherwise."""
    tokens = list(environment.lex(text))
    kinds = [kind for _line, kind, _value in tokens]
    is_expression = (
        len(kinds) > 2
        and (kinds[0], kinds[-1]) == ("variable_begin", "variable_end")
        and kinds.count("variable_begin") == 1
    )
    return "".join(value for _line, _kind, value in tokens[1:-1]).strip() if is_expression else ""


@lru_cache(maxsize=1)
def _make_environment() -> "SandboxedEnvironment":
    """Create the sandboxed Jinja2 environment, once per process."""
    from jinja2 import StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class RuleEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if not numbers:
                raise SecurityError(f"'{operator}' requires numbers")
            if operator == "**" and (abs(left) > _MAX_POWER_BASE or abs(right) > 100):
                raise SecurityError("the numbers are too large")
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            # Fields of the payload take precedence over methods of Python's dictionaries.
            if isinstance(obj, Mapping) and attribute in obj:
                return obj[attribute]
            return super().getattr(obj, attribute)

        def wrap_str_format(self, value: Any) -> Any:
            if super().wrap_str_format(value) is not None:
                # A width in a format string makes text of any length.
                raise SecurityError("the method 'format' is not available")
            return None

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, str) and attr in _LENGTHENING_METHODS:
                return False
            return super().is_safe_attribute(obj, attr, value)

    environment = RuleEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    for name in ("center", "format", "indent", "random", "pprint", "xmlattr"):
        del environment.filters[name]
    environment.filters |= _FILTERS
    return environment


def _regex_match(text: str, pattern: str, ignorecase: bool = False) -> bool:
    """Return whether a text begins with a pattern (StackStorm's filter ``regex_match``)."""
    return re.match(pattern, text, _regex_flags(ignorecase)) is not None


def _regex_search(text: str, pattern: str, ignorecase: bool = False) -> bool:
    """Return whether a text contains a pattern (StackStorm's filter ``regex_search``)."""
    return re.search(pattern, text, _regex_flags(ignorecase)) is not None


def _regex_replace(text: str, pattern: str, replacement: str = "", ignorecase: bool = False) -> str:
    """Replace each match of a pattern (StackStorm's filter ``regex_replace``)."""
    return re.sub(pattern, replacement, text, flags=_regex_flags(ignorecase))


def _regex_flags(ignorecase: bool) -> int:
    """Return the flags of a regular expression."""
    return re.IGNORECASE if ignorecase else 0


def _dump_json(value: Any) -> str:
    """Encode a value as JSON (StackStorm's filter ``to_json_string``)."""
    return msgspec.json.encode(_to_plain_value(value, 0)).decode()


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    # StackStorm's own filters, as far as rules use them.
    "regex_match": _regex_match,
    "regex_search": _regex_search,
    "regex_replace": _regex_replace,
    "to_json_string": _dump_json,
    "use_none": lambda value: value,
}
