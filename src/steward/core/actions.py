"""What Steward can be asked to do, by name: one way in for command line, socket and rules.

A room describes its actions here once, with the shapes of request and answer,
and whoever asks goes through :meth:`Registry.call`. So there is one place
where a request is read and one function that is run, whoever asks, and what
the asker may see is decided inside that function.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from steward.core.access import READS, Asker, check_scope, scope_of
from steward.core.errors import UsageError

Role = Literal["everyone", "operator", "administrator"]

LEAST: Final = -(2**63)
MOST: Final = 2**63 - 1
"""The whole numbers that can be asked about: no database takes others."""


class ActionError(UsageError):
    """There is no such action, or the request is not of its shape."""


def is_in_bounds(value: Any) -> bool:
    """Whether all whole numbers in plain values are from :data:`LEAST` to :data:`MOST`."""
    # However deep the values are: who asks may choose that, too.
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int):
            if not LEAST <= one <= MOST:
                return False
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return True


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What requests and answers have in common: keyword-only, immutable."""


class Request(Shape, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something asked; a field that it does not have is an error."""


class Answer(Shape, frozen=True, kw_only=True):
    """Something answered.

    Attributes:
        version: Of the shape.
    """

    version: int = 1


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be asked for.

    Attributes:
        name: ``room.verb``, such as ``archive.list``.
        help: One line for people.
        request: The Struct that a request is decoded into.
        answer: The Struct that comes back; where ``stream`` is set, the last item.
        run: Called as ``run(context, asker, request)``; the context is the room's own
            (for ``archive`` a :class:`steward.archive.context.Library`).
        stream: Whether ``run`` returns an iterator: items of the types in ``items``,
            then one ``answer``, which is always the last.
        items: The tagged Structs that a stream may hold before its answer.
        writes: Whether it needs the running daemon, because it appends to the journal.
        only_reads: Whether it changes nothing, so that it may be ended anywhere: as soon as
            whoever asked has gone.
        role: Who it is for, to group it in help; the rights are decided by ``run``.
    """

    name: str
    help: str
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    run: Callable[[Any, Asker, Any], Any]
    stream: bool = False
    items: tuple[type[msgspec.Struct], ...] = ()
    writes: bool = False
    only_reads: bool = False
    role: Role = "everyone"

    @property
    def room(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


def request_of(action: Action, args: Any) -> Any:
    """The request of an action that plain values stand for.

    Raises:
        ActionError: They are not of its shape, or hold a number that is too large.
    """
    name = action.name
    try:
        request = msgspec.convert(args, action.request)
    except msgspec.ValidationError as error:
        raise ActionError(f"{name}: {error}", name) from error
    for field, value in args.items():
        if not is_in_bounds(value):
            raise ActionError(
                f"{name}: {field!r} holds a number that is too large "
                f"(whole numbers go from {LEAST} to {MOST})",
                name,
            )
    return request


Room = Callable[[], Any]
"""Makes a room's context when its first action is called."""


class Registry:
    """The actions by name, and the contexts that they run in.

    Args:
        actions: Every action that can be asked for.
        rooms: For each room the maker of its context; called once, when first needed.
            Without a maker a room's actions can be described but not run.
    """

    def __init__(
        self, actions: tuple[Action, ...] = (), rooms: Mapping[str, Room] | None = None
    ) -> None:
        self._actions: dict[str, Action] = {}
        self._rooms = dict(rooms or {})
        self._contexts: dict[str, Any] = {}
        for action in actions:
            self.add(action)

    def add(self, action: Action) -> None:
        """Add one action.

        Raises:
            ActionError: The name is taken.
        """
        if action.name in self._actions:
            raise ActionError(f"two actions are named {action.name}", action.name)
        self._actions[action.name] = action

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions.values())

    def get(self, name: str) -> Action:
        """The action of that name.

        Raises:
            ActionError: There is none.
        """
        action = self._actions.get(name)
        if action is None:
            raise ActionError(f"there is no action {name!r}", name)
        return action

    def decode(self, name: str, args: Any) -> Any:
        """The request that plain JSON values stand for.

        Raises:
            ActionError: There is no such action, or the values are not of its shape, or hold
                a number that is too large.
        """
        return request_of(self.get(name), args)

    def call(self, name: str, asker: Asker, request: Any) -> Any:
        """Run an action: its answer, or the iterator of a stream's items and answer.

        Args:
            name: The action's name.
            asker: Who asks, as the kernel or a token says.
            request: A value of the action's request type.

        Raises:
            ActionError: There is no such action, or its room has no context here.
            NotInScope: The asker's token was not made for it; also where another action asks
                for them.
            StewardError: Whatever the action itself refuses or cannot do.
        """
        action = self.get(name)
        check_scope(asker, name)
        if asker.rank == "reads" and not (action.only_reads or scope_of(name) in READS):
            asker = msgspec.structs.replace(asker, rank="user")
        if not isinstance(request, action.request):
            wanted, got = action.request.__name__, type(request).__name__
            raise ActionError(f"{name} takes a {wanted}, not a {got}", request)
        return action.run(self._context(action.room), asker, request)

    def _context(self, room: str) -> Any:
        if room not in self._contexts:
            maker = self._rooms.get(room)
            if maker is None:
                raise ActionError(f"nothing here can run the actions of {room}", room)
            self._contexts[room] = maker()
        return self._contexts[room]
