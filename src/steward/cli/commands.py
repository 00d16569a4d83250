"""Commands derived from actions: options from the request's fields, output from the reply's layout.

:func:`make_command` makes the command of an action. :func:`prints` marks a function that prints the
replies of actions whose output is more than a table and notes; ``make index`` records where it is.
Its keyword-only parameters, declared as in ``cli/parameters.py``, are further options of the
command.
:func:`with_request` gives a command written by hand the options of a request.
"""

import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import click
import msgspec

from steward.bank.money import parse_money
from steward.cli import options, output
from steward.cli.parameters import LARGEST_NUMBER, Argument, Option, wrap_function
from steward.client.calls import call_action, stream_action
from steward.client.places import ClientPlace
from steward.core.actions import (
    UNIT_SENTENCES,
    Action,
    ActionError,
    Answer,
    Input,
    InputFile,
    Unit,
    decode_request,
    describe_default,
    find_annotation,
)
from steward.core.errors import StewardError, UsageError
from steward.core.layouts import Layout, describe_scope
from steward.daemon.action_index import ACTION_INDEX
from steward.daemon.registry import get_action

Printer = Callable[..., Any]
"""Function of a reply that prints it, unless JSON was requested, in a ``style`` and for an
``action`` if it has these parameters. For a stream, it gets the iterator of items and answer, also
for JSON, and may return the answer for its warnings and exit code.
"""
PrinterFunction = TypeVar("PrinterFunction", bound=Printer)
P = ParamSpec("P")

PRINTERS: Final[dict[str, Printer]] = {}
"""Printers of the imported modules, by the name of the action."""

TERMINAL_ROWS: Final = 200
"""Default maximum number of rows of a list on a terminal."""
PAGE_ROWS: Final = 1000
"""Maximum number of rows of one request."""
_SECTIONS = re.compile(r"\n\n(?:Args|Raises|Returns|Yields):\n")
"""Start of the sections of a docstring that help omits."""

_FIELD_OF_ERROR = re.compile(r": (?P<reason>[^:]+?) - at `\$\.(?P<field>\w+)\b")
"""Field and reason in an error of msgspec."""
_FIELD_NAME = re.compile(r"`(\w+)`")
"""Field of a request in an error of an action."""
_DURATION = re.compile(r"(\d{1,6})\s*(m|h|d|w)", re.IGNORECASE | re.ASCII)
_DURATION_UNITS_S: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_JSON_OPTIONS: Final[dict[str, Any]] = {"as_json": options.Json}
_TABLE_OPTIONS: Final[dict[str, Any]] = {
    "columns": options.Format,
    "as_csv": options.Csv,
    "as_json": options.Json,
    "parsable": options.Parsable,
    "noheader": options.NoHeader,
}
"""Options of output, by the name that ``options.make_style`` gives them."""
_PLACE_OPTIONS: Final[dict[str, Any]] = {"config": options.Config, "socket": options.Socket}
_ARCHIVE_OPTIONS: Final[dict[str, Any]] = {**_PLACE_OPTIONS, "archive": options.Archive}
_KEPT_BY_ARCHIVES: Final = ("archive", "journal")
"""Packages whose actions ``archive watch`` also answers."""


def prints(*names: str) -> Callable[[PrinterFunction], PrinterFunction]:
    """Return a decorator that marks the printer of these actions' replies."""

    def register(function: PrinterFunction) -> PrinterFunction:
        PRINTERS.update(dict.fromkeys(names, function))
        return function

    return register


def _parse_duration(text: str) -> float:
    """Parse a duration such as ``30d`` into seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration: write 12h, 30d or 8w", text)
    return float(int(match[1]) * _DURATION_UNITS_S[match[2].lower()])


_PARSERS: Final[dict[Unit, Callable[[str], Any]]] = {
    "": lambda value: value,
    "money": parse_money,
    "duration": _parse_duration,
}
"""Converter of a typed value, by unit."""


class _Parameter(NamedTuple):
    """A request field that people type, or that the client supplies.

    Attributes:
        name: Name of the field.
        type: Its type, without annotation and None.
        meta: Its annotation.
        given: How people give it.
        required: Whether they must give it.
        texts: Texts that stand for a value of another type, such as ``none`` for no limit.
        default: Sentence about its default, after a blank; "" if there is none.
        counts_rows: Whether it is the number of rows of a reply in pages: the command reads as many
            pages as it takes, so people may type any number, 0 for all.
    """

    name: str
    type: Any
    meta: msgspec.Meta
    given: Input
    required: bool
    texts: tuple[str, ...] = ()
    default: str = ""
    counts_rows: bool = False

    @property
    def is_list(self) -> bool:
        """Whether it holds several values."""
        return get_origin(self.type) is tuple

    @property
    def item_type(self) -> Any:
        """Type of one of several values."""
        item_type = get_args(self.type)[0]
        return get_args(item_type)[0] if get_origin(item_type) is Annotated else item_type

    @property
    def is_mapping(self) -> bool:
        """Whether it holds values by name, typed as ``NAME=VALUE``."""
        return get_origin(self.type) is dict

    @property
    def is_switch(self) -> bool:
        """Whether two words choose between its two texts."""
        return get_origin(self.type) is Literal and "/" in "".join(self.given.words)

    @property
    def shown_name(self) -> str:
        """Name in errors: the option's first word, or the argument's placeholder."""
        return (*self.given.words, self.given.metavar)[0].partition("/")[0]

    @property
    def is_typed(self) -> bool:
        """Whether people may type it."""
        return bool(self.given.words or self.given.metavar)

    def parse(self, value: Any) -> Any:
        """Convert a typed value to the field's value."""
        if value is None:
            return _SOURCES[self.given.source]()
        if self.given.parse is not None:
            return self.given.parse(value)
        if self.type is InputFile:
            return options.read_input_file(value)
        if self.is_mapping:
            return options.parse_pairs(value)
        if self.is_switch:
            return get_args(self.type)[0 if value else 1]
        if not self.is_list:
            return value if value in self.texts else _PARSERS[self.given.unit](value)
        if self.item_type is int or self.given.has_commas:
            return tuple(value)
        return self._check_choices(options.split_lists(value))

    def _check_choices(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values of a list, or reject one that is not among the choices."""
        choices = get_args(self.item_type)
        for value in values:
            if choices and value not in choices:
                known = ", ".join(map(repr, choices))
                raise UsageError(
                    f"invalid value for '{self.shown_name}': {value!r} is not one of {known}",
                    value,
                )
        return values

    def make_option(self) -> inspect.Parameter:
        """Return the parameter of the command's function."""
        given = self.given
        details: dict[str, Any] = {"metavar": given.metavar or None, "show_default": False}
        help_line = (self.meta.description or "").removesuffix(UNIT_SENTENCES[given.unit])
        help_line += " 0 means all." * self.counts_rows + self.default
        details["help"] = help_line
        value_type = self.type
        if self.is_list or self.is_mapping or given.parse is not None:
            is_number = self.is_list and self.item_type is int and given.parse is None
            value_type = list[int] if is_number else list[str]
        elif self.is_switch:
            value_type = bool
        elif given.unit or self.type is InputFile:
            value_type = str
        if self.counts_rows:
            details |= {"min": 0, "max": LARGEST_NUMBER}
        elif value_type in (int, float, list[int]):
            item = find_annotation(get_args(self.type)[0]) if self.is_list else None
            bounds = item or self.meta
            details["min"] = bounds.ge
            largest = None if value_type is float else LARGEST_NUMBER
            details["max"] = largest if bounds.le is None else bounds.le
        is_free_text = self.is_mapping and given.parse is None
        if value_type in (str, list[str]) and not (
            is_free_text or given.allows_empty or given.has_commas
        ):
            details["callback"] = options.reject_empty
        words = given.words
        about = Option(*words, **details) if words else Argument(**details)
        if self.required:
            return _make_parameter(self.name, inspect.Parameter.empty, Annotated[value_type, about])
        return _make_parameter(self.name, None, Annotated[value_type | None, about])


_SOURCES: Final[dict[str, Callable[[], Any]]] = {
    "zone": output.find_requested_zone,
    "key": options.make_key,
    "rows": lambda: TERMINAL_ROWS if output.is_terminal() else 0,
}
"""Function that supplies a field that was not given, by source."""


_SOURCE_DEFAULTS: Final[dict[str, str]] = {
    "key": " Default: random.",
    "rows": f" Default: {TERMINAL_ROWS} on a terminal, else all.",
}
"""Sentence about the default of a field that the client supplies, by source."""


def _list_parameters(action: Action) -> list[_Parameter]:
    """Return the fields of an action's request that people or the client give."""
    parameters = []
    for field in msgspec.structs.fields(action.request):
        meta = find_annotation(field.type)
        given = (meta.extra or {}).get("input") if meta is not None else None
        if meta is not None and given is not None:
            field_type, texts = _strip_annotation(field.type)
            counts_rows = field.name == "limit" and _has_pages(action)
            parameters.append(
                _Parameter(
                    name=field.name,
                    type=field_type,
                    meta=meta,
                    given=given,
                    required=field.required,
                    texts=texts,
                    default=_SOURCE_DEFAULTS.get(given.source) or describe_default(field),
                    counts_rows=counts_rows,
                )
            )
    return parameters


def _has_pages(action: Action) -> bool:
    """Return whether a reply of an action holds one page of the rows."""
    return bool(getattr(action.answer, "page_fields", ()))


def _strip_annotation(field_type: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a field's type, without annotation, None and empty choices, and other texts."""
    texts: tuple[str, ...] = ()
    if get_origin(field_type) is Annotated:
        field_type = get_args(field_type)[0]
    if get_origin(field_type) in (Union, types.UnionType):
        field_type, *others = (part for part in get_args(field_type) if part is not types.NoneType)
        texts = tuple(text for other in others for text in get_args(other))
    if get_origin(field_type) is Annotated:
        field_type = get_args(field_type)[0]
    if get_origin(field_type) is Literal:
        field_type = Literal[tuple(filter(None, get_args(field_type)))]
    return field_type, texts


def _make_request(
    action: Action, parameters: Sequence[_Parameter], values: Mapping[str, Any]
) -> Any:
    """Make a request of the fields that were typed, or that the client supplies.

    Raises:
        UsageError: A value is invalid; the error names its option or argument.
    """
    fields = {
        parameter.name: parameter.parse(values.get(parameter.name))
        for parameter in parameters
        if not parameter.counts_rows
        and (parameter.given.source or values.get(parameter.name) is not None)
    }
    try:
        return decode_request(action, fields)
    except ActionError as error:
        place = _FIELD_OF_ERROR.search(str(error))
        found = [one for one in parameters if place is not None and one.name == place["field"]]
        if not found or place is None:
            raise
        name, reason = found[0].shown_name, place["reason"]
        message = f"invalid value for '{name}': {reason[:1].lower()}{reason[1:]}"
        raise UsageError(message, error.offender) from error


@contextmanager
def _name_options(parameters: Sequence[_Parameter]) -> Iterator[None]:
    """Name options and arguments in errors of an action, which name its request's fields."""
    try:
        yield
    except StewardError as error:
        names = {f"`{one.name}`": one.shown_name for one in parameters if one.is_typed}
        message = _FIELD_NAME.sub(lambda match: names.get(match[0], match[0]), str(error))
        error.args = (message, *error.args[1:])
        raise


def with_request(
    name: str, *fields: str
) -> Callable[[Callable[Concatenate[Any, P], None]], options.Command[P]]:
    """Return a decorator that gives a command written by hand the options of a request.

    The request becomes the command's first argument.

    Args:
        name: Name of the action.
        fields: Fields that people give; all that they may give if empty.
    """
    action = get_action(name)
    parameters = [
        parameter
        for parameter in _list_parameters(action)
        if not fields or parameter.name in fields or not parameter.is_typed
    ]

    def read_request(**values: Any) -> Any:
        return _make_request(action, parameters, values)

    typed = [parameter.make_option() for parameter in parameters if parameter.is_typed]
    read_request.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined] # inspect's own

    def add_options(command: Callable[Concatenate[Any, P], None]) -> options.Command[P]:
        return options.with_options(read_request)(_name_options(parameters)(command))

    return add_options


def make_command(name: str) -> click.Command:
    """Return the command of an action."""
    action = get_action(name)
    parameters = _list_parameters(action)
    printer = _find_printer(action)
    own = _list_printer_options(printer)
    printer_parameters = inspect.signature(printer).parameters if printer is not None else ()
    has_style, has_action = "style" in printer_parameters, "action" in printer_parameters
    style_options = _TABLE_OPTIONS if action.rows and (has_style or not printer) else _JSON_OPTIONS
    if action.stream and not has_style:
        style_options = {}
    if issubclass(action.answer, Answer) and action.answer.has_hours(action.rows):
        style_options = {"unit": options.ResourceTimeUnit, **style_options}
    place_options = _ARCHIVE_OPTIONS if action.package in _KEPT_BY_ARCHIVES else _PLACE_OPTIONS

    def command(**values: Any) -> None:
        style = options.make_style(**{name: values[name] for name in style_options})
        place = ClientPlace(**{name: values[name] for name in place_options})
        details = {item.name: values[item.name] for item in own}
        if has_style:
            details["style"] = style
        if has_action:
            details["action"] = action
        print_answer = printer and partial(printer, **details)
        try:
            with _name_options(parameters):
                request = _make_request(action, parameters, values)
                if _has_pages(action):
                    count = _count_rows(parameters, values)
                    limit = request.limit if count is None else count
                    pages = ReplyPages(place, action, request, limit)
                    reply = print_pages(action, pages, style, print_answer)
                else:
                    items = stream_action(place, action, request)
                    reply = _print(action, items, style, print_answer)
                report_outcome(reply)
        except StewardError as error:
            error.exit_code = getattr(action.answer, "failure_code", 0) or error.exit_code
            raise

    typed = [parameter.make_option() for parameter in parameters if parameter.is_typed]
    typed += own
    typed.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    for option, annotation in (style_options | place_options).items():
        default = get_args(annotation)[0]()
        typed.append(_make_parameter(option, default, annotation))
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined] # inspect's own
    command.__doc__ = describe_action(action)
    is_signed = any(parameter.given.is_signed for parameter in parameters)
    name = action.command.split()[-1]
    return wrap_function(command, name, ignore_unknown_options=is_signed)


def _make_parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """Return a parameter of a command's function."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def describe_action(action: Action) -> str:
    """Return the help of an action's command: its line, and the rest of the docstring's text."""
    text = _SECTIONS.split(inspect.getdoc(action.run) or "", maxsplit=1)[0]
    return "\n\n".join([action.help, *text.split("\n\n")[1:]])


def _find_printer(action: Action) -> Printer | None:
    """Return the printer of an action's replies, or None if they are a table and notes."""
    module = ACTION_INDEX[action.name].printer
    if module:
        importlib.import_module(module)
    return PRINTERS.get(action.name)


def _list_printer_options(printer: Printer | None) -> list[inspect.Parameter]:
    """Return the options that a printer adds to its command."""
    if printer is None:
        return []
    return [
        parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(printer, eval_str=True).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def _count_rows(parameters: Sequence[_Parameter], values: Mapping[str, Any]) -> int | None:
    """Return the number of rows that were typed or that the client supplies; None for neither."""
    for parameter in parameters:
        if parameter.counts_rows and (parameter.given.source or values[parameter.name] is not None):
            count: int = parameter.parse(values[parameter.name])
            return count
    return None


class ReplyPages:
    """Rows of a reply in pages, each requested when the rows before are printed.

    Attributes:
        reply: Reply of the first page; its fields that concern the next page are the last one's.
        count: Number of rows so far.
    """

    def __init__(self, place: ClientPlace, action: Action, request: Any, limit: int) -> None:
        self._place = place
        self._action = action
        self._request = request
        self._limit = limit
        self.count = 0
        self.reply = self._read_page("")

    def _read_page(self, page: str) -> Any:
        size = min(self._limit - self.count, PAGE_ROWS) if self._limit else PAGE_ROWS
        request = msgspec.structs.replace(self._request, limit=size, page=page)
        return call_action(self._place, self._action, request)

    def __iter__(self) -> Iterator[Any]:
        reply = self.reply
        while True:
            rows = getattr(reply, self._action.rows)
            yield from rows
            self.count += len(rows)
            fields = {name: getattr(reply, name) for name in reply.page_fields}
            self.reply = msgspec.structs.replace(self.reply, **fields)
            if not reply.next or 0 < self._limit <= self.count:
                return
            reply = self._read_page(reply.next)

    @property
    def note(self) -> str:
        """Note that further rows match; "" if none do, or if that is unknown."""
        has_more = self._limit and self.reply.next and getattr(self.reply, "complete", True)
        return f"More than {self.count} match; use --limit 0 for all." if has_more else ""


def print_pages(
    action: Action, pages: ReplyPages, style: output.Style, printer: Printer | None
) -> Any:
    """Print a reply in pages, without a list of all rows unless a printer needs it."""
    rows = action.rows
    if style.json:
        names = [name for name in action.answer.__struct_fields__ if name != rows]
        output.print_json_rows(
            rows, pages, lambda: {name: getattr(pages.reply, name) for name in names}
        )
        return pages.reply
    if printer is None:
        print_reply(pages.reply, style, rows, row_values=pages)
    else:
        all_rows = tuple(pages)
        printer(msgspec.structs.replace(pages.reply, **{rows: all_rows}))
    if not style.is_for_programs:
        output.print_note(pages.note)
    return pages.reply


def _print(
    action: Action, items: Iterator[Any], style: output.Style, printer: Printer | None
) -> Any:
    """Print the reply of an action, or the items of its stream; return the reply."""
    if action.stream:
        if printer is None:
            raise StewardError(f"{action.name} has no printer for its stream", action.name)
        return printer(items)
    (reply,) = items
    if style.json:
        output.print_json(reply)
    elif printer is not None:
        printer(reply)
    else:
        print_reply(reply, style, action.rows)
    return reply


def report_outcome(reply: Any) -> None:
    """Print the warnings of a reply, and exit with its code unless that is 0."""
    if not isinstance(reply, Answer):
        return
    for warning in reply.list_warnings():
        output.print_warning(warning)
    if reply.exit_code:
        raise click.exceptions.Exit(reply.exit_code)


def print_reply(
    reply: Any,
    style: output.Style,
    rows: str,
    *,
    columns: Layout | None = None,
    row_values: Iterable[Any] | None = None,
) -> None:
    """Print the rows of a reply as a table, or why there are none, then its lines and notes.

    People also get the period and the unit of the rows.

    Args:
        reply: The reply.
        style: Output style.
        rows: Name of the field that holds the rows; "" if there are none.
        columns: Columns of the rows, if the reply's Struct does not declare them all.
        row_values: The rows, if the reply holds only the first page.
    """
    is_for_people = not style.is_for_programs
    lines = tuple(reply.list_lines()) if is_for_people else ()
    if rows:
        columns = reply.get_layout(rows) if columns is None else columns
        first_rows = getattr(reply, rows)
        if is_for_people:
            scope = describe_scope(reply, columns, output.format_time, style.hours_unit)
            output.print_note(f"{scope}." if scope else "")
        reason = "" if first_rows else reply.empty_reason
        if reason and is_for_people and style.has_header:
            output.print_line(reason)
        elif first_rows or not lines:
            values = first_rows if row_values is None else row_values
            output.print_table(columns, values, style, reply)
    if not is_for_people:
        return
    for line in lines:
        output.print_line(line)
    for note in reply.list_notes():
        output.print_note(note)
