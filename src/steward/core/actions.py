"""Actions: their one declaration, decoding of requests, and the registry that runs them by name.

An action is a function of context, caller and request under the decorator :func:`action`. Its
request is a Struct; the annotations of its fields hold description and command-line form
(:func:`argument`, :func:`option`, :func:`described`); :func:`describe_default`
adds the default. Command, HTTP endpoint, OpenAPI document, socket call, client and help derive from
this declaration.

:data:`DECLARED` holds the actions of all modules imported so far; ``daemon/registry.py`` imports
those of a package. The :class:`Registry` runs them: ``decode`` makes the request from plain values,
then ``call`` checks the token's scope, removes operator rights of a caller of rank ``reads`` if the
action changes anything, makes the package's context at its first action, and runs the function.
That function checks the caller's permissions.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from steward.core.access import READ_SCOPES, Caller, Scope, check_scope
from steward.core.errors import UsageError
from steward.core.layouts import Layout

Role = Literal["everyone", "owner", "operator", "administrator"]
"""Audience of an action: the section of help with its command. ``owner`` is the job's owner."""
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
"""HTTP methods of the API."""
Unit = Literal["", "money", "duration"]
"""Unit of a number in a request. People type ``money`` in SU and a ``duration`` as 12h, 30d or 8w;
programs give micro-SU and seconds."""
Source = Literal["", "zone", "key", "rows"]
"""Value that the client supplies: the time zone of typed times, a random idempotency key, or the
maximum number of rows, which is 200 on a terminal and else 0, for all.
"""

MIN_INTEGER: Final = -(2**63)
MAX_INTEGER: Final = 2**63 - 1
"""Range of integers in requests: no database takes others."""


class ActionError(UsageError):
    """There is no such action, or the request does not match its type."""


def has_valid_integers(value: Any) -> bool:
    """Return whether all integers in plain values lie within the bounds of a request."""
    # Iterative, because the client chooses how deep the values are nested.
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, int):
            if not MIN_INTEGER <= item <= MAX_INTEGER:
                return False
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
    return True


class ActionMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of requests and answers: keyword-only, immutable."""


class Request(
    ActionMessage, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Base class of requests; an unknown field is an error."""


class Answer(ActionMessage, frozen=True, kw_only=True):
    """Base class of answers.

    Attributes:
        version: Version of the type.
        layout: Columns of the answer's rows, for every view.
        layouts: Columns of other fields that hold rows, by the field's name.
        failure_code: Exit code of the command if the action fails; 0 for that of the error.
        page_fields: Fields of one page of rows that concern the next page, ``next`` among them;
            empty if the answer has all rows.
    """

    version: int = 1
    layout: ClassVar[Layout] = ()
    layouts: ClassVar[Mapping[str, Layout]] = {}
    failure_code: ClassVar[int] = 0
    page_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows this answer."""
        return 0

    @property
    def has_changed_nothing(self) -> bool:
        """Whether the action changed nothing this time, so that its idempotency key is free."""
        return False

    @property
    def period(self) -> tuple[datetime, datetime] | None:
        """Period of the rows, or twice the time of a snapshot; None if they have none."""
        return None

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows, if so: people read it in place of the table."""
        return ""

    @classmethod
    def get_layout(cls, rows: str) -> Layout:
        """Return the columns of the rows in the field of that name."""
        return cls.layouts.get(rows, cls.layout)

    @classmethod
    def has_hours(cls, rows: str) -> bool:
        """Return whether one of these columns shows resource time, whose unit people choose."""
        return any(column.format == "hours" for column in cls.get_layout(rows))

    def list_lines(self) -> Iterable[str]:
        """Return lines that people read below the rows, or in place of them if there are none."""
        return ()

    def list_notes(self) -> Iterable[str]:
        """Return notes for people at a terminal, such as the scope or the sum of the rows."""
        return ()

    def list_warnings(self) -> Iterable[str]:
        """Return warnings for people and for programs that run the command."""
        return ()


class InputFile(ActionMessage, frozen=True, kw_only=True):
    """File in a request; people give its path, or ``-`` for standard input.

    Attributes:
        name: Its name, without directory.
        text: Its content.
    """

    name: str = ""
    text: str


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line form of a request's field.

    Attributes:
        words: Words of the option, long ones first; empty for an argument.
        metavar: Placeholder of the value in help.
        unit: Unit of the number.
        source: Value that the client supplies if the field is not given.
        parse: Function that makes the value from the texts given, if the option may be repeated
            and holds more than a list of texts.
        allows_empty: Whether an empty text is a value; otherwise it is rejected, as from an unset
            shell variable.
        has_commas: Whether a comma is part of a value and does not separate values.
        is_signed: Whether an argument may be a negative number, which looks like an option.
    """

    words: tuple[str, ...] = ()
    metavar: str = ""
    unit: Unit = ""
    source: Source = ""
    parse: Callable[[list[str]], Any] | None = None
    allows_empty: bool = False
    has_commas: bool = False
    is_signed: bool = False


def argument(
    description: str,
    metavar: str,
    *,
    default: str = "",
    unit: Unit = "",
    has_commas: bool = False,
    is_signed: bool = False,
    ge: int | None = None,
) -> msgspec.Meta:
    """Annotate a field that people give as an argument of the command.

    Args:
        description: Meaning of the field, one line; its unit is added.
        metavar: Placeholder of the value in help.
        default: Default in words, if the field's default does not tell it.
        unit: Unit of the number.
        has_commas: Whether a comma is part of a value and does not separate values.
        is_signed: Whether a number may be negative, so that it looks like an option.
        ge: Least value of a number.
    """
    given = Input(metavar=metavar, unit=unit, has_commas=has_commas, is_signed=is_signed)
    return _annotate(description, given, default, ge=ge)


def option(
    description: str,
    *words: str,
    metavar: str = "",
    default: str = "",
    unit: Unit = "",
    source: Source = "",
    parse: Callable[[list[str]], Any] | None = None,
    allows_empty: bool = False,
    ge: int | None = None,
    le: int | None = None,
    max_length: int | None = None,
) -> msgspec.Meta:
    """Annotate a field that people give as an option of the command.

    Args:
        description: Meaning of the field, one line; its unit is added.
        words: Words of the option, such as ``--account`` and ``-A``; ``--on/--off`` for a boolean,
            or for a literal of two texts in their order.
        metavar: Placeholder of the value in help.
        default: Default in words, if the field's default does not tell it.
        unit: Unit of the number.
        source: Value that the client supplies if the option is not given.
        parse: Function that makes the value from the texts given.
        allows_empty: Whether an empty text is a value.
        ge: Least value of a number.
        le: Greatest value of a number.
        max_length: Most characters of a text.
    """
    given = Input(
        words=words,
        metavar=metavar,
        unit=unit,
        source=source,
        parse=parse,
        allows_empty=allows_empty,
    )
    return _annotate(description, given, default, ge=ge, le=le, max_length=max_length)


def described(
    description: str,
    *,
    default: str = "",
    unit: Unit = "",
    ge: int | None = None,
    le: int | None = None,
) -> msgspec.Meta:
    """Annotate a field that only programs give, or a field of a reply."""
    description += UNIT_SENTENCES[unit]
    return msgspec.Meta(description=description, ge=ge, le=le, extra={"default": default})


UNIT_SENTENCES: Final[dict[Unit, str]] = {
    "": "",
    "money": " In micro-SU.",
    "duration": " In seconds.",
}
"""Sentence that a description has for programs, by unit."""


def _annotate(description: str, given: Input, default: str = "", **bounds: Any) -> msgspec.Meta:
    """Return the annotation of a field that people or the client give."""
    return msgspec.Meta(
        description=f"{description}{UNIT_SENTENCES[given.unit]}",
        extra={"input": given, "default": default},
        **bounds,
    )


def find_annotation(field_type: Any) -> msgspec.Meta | None:
    """Return the annotation of a field's type, or of a part of it; None without one."""
    if get_origin(field_type) is Annotated:
        annotation: msgspec.Meta = get_args(field_type)[1]
        return annotation
    found = (find_annotation(part) for part in get_args(field_type))
    return next((annotation for annotation in found if annotation is not None), None)


def describe_default(field: msgspec.structs.FieldInfo) -> str:
    """Return the sentence about a field's default, after a blank; "" if there is none."""
    annotation = find_annotation(field.type)
    words = (annotation.extra or {}).get("default") if annotation is not None else ""
    value = field.default
    if not words and value and value is not msgspec.NODEFAULT:
        if isinstance(value, tuple):
            words = ",".join(map(str, value))
        elif isinstance(value, float):
            words = f"{value:g}"
        else:
            words = "yes" if value is True else str(value)
    return f" Default: {words}." if words else ""


_ZONE: Final = Input(source="zone")
Zone = Annotated[str, _annotate("IANA time zone of typed times; the cluster's if empty.", _ZONE)]
HostZone = Annotated[str, _annotate("IANA time zone of typed times; this host's if empty.", _ZONE)]
"""Time zone in a request with typed times; ``HostZone`` if the request concerns no cluster."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP method and path of an action.

    Attributes:
        method: HTTP method.
        path: Path below /api/v1; ``{name}`` marks its variable parts.
        help: One line for people; the action's own help if empty.
        parts: Request field for a part of the path, if their names differ. A field of several
            values gets this one value.
        cursor: Request field for the start of a page, and reply field for the start of the next.
        status: HTTP status of a success.
    """

    method: Method
    path: str
    help: str = ""
    parts: dict[str, str] = {}
    cursor: tuple[str, str] | None = None
    status: int = 200


def route(
    line: str,
    help: str = "",  # noqa: A002 - the word of every declaration
    *,
    parts: dict[str, str] | None = None,
    cursor: tuple[str, str] | None = None,
    status: int = 200,
) -> Route:
    """Return the route of a line such as ``GET /accounts/{account}``; see :class:`Route`."""
    method, _, path = line.partition(" ")
    return Route(
        method=msgspec.convert(method, Method),
        path=path,
        help=help,
        parts=parts or {},
        cursor=cursor,
        status=status,
    )


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action, as :func:`action` declares it.

    Attributes:
        name: ``package.verb``, such as ``archive.list``.
        help: One line for people.
        request: Struct that a request is decoded into.
        answer: Struct of the answer; if ``stream`` is set, the last item.
        run: Called as ``run(context, caller, request)``; the package makes the context
            (for ``archive`` a :class:`steward.archive.context.ArchiveContext`).
        scope: Scope that a token needs; "any" if every token permits it.
        role: Audience, to group it in help; ``run`` decides on permissions.
        command: Words of its command, such as ``bank account create``; "" if it has none or one
            written by hand.
        rows: Field of the answer with the rows that the command prints, or name of the layout of a
            stream's items; "" for none.
        routes: HTTP methods and paths; any action may also be called at ``/ask/NAME``.
        stream: Whether ``run`` returns an iterator: items of the types in ``items``,
            then one ``answer``, which is always the last.
        items: Tagged Structs that a stream may yield before its answer.
        writes: Whether it needs the running daemon, because it appends to the journal.
        only_reads: Whether it changes nothing, so that it may be cancelled at any point, as
            soon as the client disconnects.
        for_web: Whether it is for the web process alone.
    """

    name: str
    help: str
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    run: Callable[..., Any]
    scope: Scope = "admin"
    role: Role = "everyone"
    command: str = ""
    rows: str = ""
    routes: tuple[Route, ...] = ()
    stream: bool = False
    items: tuple[type[msgspec.Struct], ...] = ()
    writes: bool = False
    only_reads: bool = False
    for_web: bool = False

    @property
    def package(self) -> str:
        """Package of the action: the part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def keeps_rights_to_read(self) -> bool:
        """Whether an operator of rank ``reads`` keeps operator rights in this action."""
        return self.only_reads or self.scope in READ_SCOPES


DECLARED: Final[dict[str, Action]] = {}
"""Actions of all imported modules, by name."""
Function = TypeVar("Function", bound=Callable[..., Any])


def action(
    name: str,
    *,
    scope: Scope,
    role: Role = "everyone",
    command: str = "",
    rows: str = "",
    routes: tuple[Route, ...] = (),
    writes: bool = False,
    only_reads: bool = False,
    for_web: bool = False,
    help: str = "",  # noqa: A002 - the word of every declaration
    kind: Callable[..., Action] = Action,
    **details: Any,
) -> Callable[[Function], Function]:
    """Declare a function as an action; see :class:`Action` for the arguments.

    The function takes context, caller and request; the annotation of its last parameter is the
    request's Struct, that of its result the answer's. A stream is annotated
    ``Iterator[Item | Answer]``, with the answer last. Its docstring's first line is the help unless
    ``help`` is given. ``kind`` is a subclass of :class:`Action`, ``details`` are its own fields.

    Raises:
        ActionError: The name is taken by another function.
    """

    def declare(function: Function) -> Function:
        annotations = inspect.get_annotations(function, eval_str=True)
        *_, request, result = annotations.values()
        origin: Any = get_origin(result)
        is_stream = origin is Iterator
        types = get_args(get_args(result)[0]) or get_args(result)[:1] if is_stream else (result,)
        taken = DECLARED.get(name)
        if taken is not None and taken.run.__qualname__ != function.__qualname__:
            raise ActionError(f"duplicate action name {name}", name)
        DECLARED[name] = kind(
            name=name,
            help=help or (inspect.getdoc(function) or "").partition("\n")[0],
            request=request,
            answer=types[-1],
            run=function,
            scope=scope,
            role=role,
            command=command,
            rows=rows,
            routes=routes,
            stream=is_stream,
            items=types[:-1],
            writes=writes,
            only_reads=only_reads,
            for_web=for_web,
            **details,
        )
        return function

    return declare


def decode_request(action: Action, args: Any) -> Any:
    """Decode plain values into an action's request.

    Raises:
        ActionError: They do not match its type, or hold a number that is too large.
    """
    name = action.name
    try:
        request = msgspec.convert(args, action.request)
    except msgspec.ValidationError as error:
        raise ActionError(f"{name}: {error}", name) from error
    for field, value in args.items():
        if not has_valid_integers(value):
            raise ActionError(
                f"{name}: the number in {field!r} is too large: give a whole number from "
                f"{MIN_INTEGER} to {MAX_INTEGER}",
                name,
            )
    return request


ContextMaker = Callable[[], Any]
"""Function that makes a package's context; called once, for the package's first action."""


class Registry:
    """Registry of actions by name, with the contexts that they run in.

    Args:
        actions: Actions to register.
        context_makers: For each package the maker of its context; called once, when first needed.
            Without a maker a package's actions can be described but not run.
        declared: Further actions by name, looked up when first needed.
    """

    def __init__(
        self,
        actions: Iterable[Action] = (),
        context_makers: Mapping[str, ContextMaker] | None = None,
        *,
        declared: Mapping[str, Action] | None = None,
    ) -> None:
        self._actions: dict[str, Action] = {}
        self._declared = declared or {}
        self._context_makers = dict(context_makers or {})
        self._contexts: dict[str, Any] = {}
        for action in actions:
            self.add(action)

    def add(self, action: Action) -> None:
        """Register one action.

        Raises:
            ActionError: The name is taken.
        """
        if action.name in self._actions:
            raise ActionError(f"duplicate action name {action.name}", action.name)
        self._actions[action.name] = action

    def __iter__(self) -> Iterator[Action]:
        yield from self._actions.values()
        yield from self._declared.values()

    def get(self, name: str) -> Action:
        """Return the action of that name.

        Raises:
            ActionError: There is none.
        """
        action = self._actions.get(name) or self._declared.get(name)
        if action is None:
            raise ActionError(f"unknown action {name!r}", name)
        return action

    def decode(self, name: str, args: Any) -> Any:
        """Decode plain JSON values into an action's request.

        Raises:
            ActionError: There is no such action, or the values do not match its type, or hold
                a number that is too large.
        """
        return decode_request(self.get(name), args)

    def call(self, name: str, asker: Caller, request: Any) -> Any:
        """Run an action; return its answer, or the iterator of a stream's items and answer.

        Args:
            name: Name of the action.
            asker: The caller, as the kernel, MUNGE or a token identifies it.
            request: A value of the action's request type.

        Raises:
            ActionError: There is no such action, or its package has no context here.
            ScopeRefused: The asker's token lacks the scope; also when another action calls this one
                for the asker.
            StewardError: The action rejects the request or fails.
        """
        action = self.get(name)
        check_scope(asker, name, action.scope)
        if asker.rank == "reads" and not action.keeps_rights_to_read:
            asker = msgspec.structs.replace(asker, rank="user")
        if not isinstance(request, action.request):
            expected, actual = action.request.__name__, type(request).__name__
            raise ActionError(f"{name} takes a {expected}, not a {actual}", request)
        return action.run(self._get_context(action.package), asker, request)

    def _get_context(self, package: str) -> Any:
        if package not in self._contexts:
            maker = self._context_makers.get(package)
            if maker is None:
                raise ActionError(
                    f"cannot run the actions of {package} here: this process has no context "
                    "for them",
                    package,
                )
            self._contexts[package] = maker()
        return self._contexts[package]
