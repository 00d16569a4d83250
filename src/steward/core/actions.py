"""Actions: their declaration, decoding of requests, and the registry that runs them by name.

Each package declares its actions as :class:`Action` values with the Structs of request and
answer. The command line, the socket, HTTP and rules all run them through the :class:`Registry`:
``decode`` makes the request from plain values, then ``call`` checks the token's scope, takes the
operator rights from an asker of rank ``reads`` if the action changes anything, makes the
package's context at its first action, and runs ``action.run(context, asker, request)``. That
function decides what the asker may see.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from steward.core.access import READ_SCOPES, Caller, check_scope, find_scope
from steward.core.errors import UsageError
from steward.core.layouts import Layout

Role = Literal["everyone", "operator", "administrator"]

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
    """

    version: int = 1
    layout: ClassVar[Layout] = ()


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one action.

    Attributes:
        name: ``package.verb``, such as ``archive.list``.
        help: One line for people.
        request: Struct that a request is decoded into.
        answer: Struct of the answer; if ``stream`` is set, the last item.
        run: Called as ``run(context, asker, request)``; the package makes the context
            (for ``archive`` a :class:`steward.archive.context.ArchiveContext`).
        stream: Whether ``run`` returns an iterator: items of the types in ``items``,
            then one ``answer``, which is always the last.
        items: Tagged Structs that a stream may yield before its answer.
        writes: Whether it needs the running daemon, because it appends to the journal.
        only_reads: Whether it changes nothing, so that it may be cancelled at any point, as
            soon as the client disconnects.
        role: Audience, to group it in help; ``run`` decides on permissions.
    """

    name: str
    help: str
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    run: Callable[[Any, Caller, Any], Any]
    stream: bool = False
    items: tuple[type[msgspec.Struct], ...] = ()
    writes: bool = False
    only_reads: bool = False
    role: Role = "everyone"

    @property
    def package(self) -> str:
        """Package of the action: the part of the name before the dot."""
        return self.name.partition(".")[0]


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
                f"{name}: {field!r} holds a number that is too large "
                f"(whole numbers go from {MIN_INTEGER} to {MAX_INTEGER})",
                name,
            )
    return request


ContextMaker = Callable[[], Any]
"""Function that makes a package's context; called once, for the package's first action."""


class Registry:
    """Registry of actions by name, with the contexts that they run in.

    Args:
        actions: All actions to register.
        context_makers: For each package the maker of its context; called once, when first needed.
            Without a maker a package's actions can be described but not run.
    """

    def __init__(
        self,
        actions: tuple[Action, ...] = (),
        context_makers: Mapping[str, ContextMaker] | None = None,
    ) -> None:
        self._actions: dict[str, Action] = {}
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
            raise ActionError(f"two actions are named {action.name}", action.name)
        self._actions[action.name] = action

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions.values())

    def get(self, name: str) -> Action:
        """Return the action of that name.

        Raises:
            ActionError: There is none.
        """
        action = self._actions.get(name)
        if action is None:
            raise ActionError(f"there is no action {name!r}", name)
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
        check_scope(asker, name)
        if asker.rank == "reads" and not (action.only_reads or find_scope(name) in READ_SCOPES):
            asker = msgspec.structs.replace(asker, rank="user")
        if not isinstance(request, action.request):
            expected, actual = action.request.__name__, type(request).__name__
            raise ActionError(f"{name} takes a {expected}, not a {actual}", request)
        return action.run(self._get_context(action.package), asker, request)

    def _get_context(self, package: str) -> Any:
        if package not in self._contexts:
            maker = self._context_makers.get(package)
            if maker is None:
                raise ActionError(f"nothing here can run the actions of {package}", package)
            self._contexts[package] = maker()
        return self._contexts[package]
