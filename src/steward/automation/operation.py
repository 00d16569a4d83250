"""What can be done: each operation is described once, for command line, API, rules, pack and docs.

An operation's parameters are a Struct, whose fields say by ``Annotated`` and
``msgspec.Meta(description=…)`` what they are for. What it gives back is plain
JSON, of the shape that StackStorm's slurm pack gives where that has the same one.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
from msgspec import NODEFAULT, inspect

from steward.automation.errors import UnknownOperation, WrongParameters
from steward.core.access import Access, Asker
from steward.core.config import Settings
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.slurm import Slurm
    from steward.slurm.cluster import Machine
    from steward.slurm.cluster_changes import MachineChanging
    from steward.slurm.job_changes import Changing
    from steward.slurm.triggers import Triggers


Right = Literal["everyone", "owner", "operator", "administrator"]
"""Who may: everyone who may see it, the job's owner, an operator, or an administrator; each
of them may what those before may."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation's parameters; a field that it does not have is an error."""


class Doing(Protocol):
    """What an operation works with: where, for whom, and how far it may go."""

    cluster: str
    cluster_settings: ClusterSettings
    settings: Settings
    asker: Asker
    speaker: str
    """Who stands behind a reason: ``alice``, ``rule node-down``."""
    dry_run: bool
    """Whether it only says what it would do: everything is looked at, nothing is changed."""
    force: bool
    """Whether reasons and drains of others are overridden."""
    access: Access
    """Who may see and do what."""
    timeout_s: float
    """How long it may take altogether, in seconds."""

    @property
    def left_s(self) -> float:
        """Seconds of them that are left."""
        ...

    @property
    def slurm(self) -> "Slurm":
        """The cluster's Slurm."""
        ...

    @property
    def machine(self) -> "Machine":
        """The cluster's nodes, partitions, reservations and jobs as Slurm shows them."""
        ...

    @property
    def changing(self) -> "MachineChanging":
        """What changes nodes, partitions and reservations."""
        ...

    @property
    def jobs(self) -> "Changing":
        """What changes jobs."""
        ...

    @property
    def triggers(self) -> "Triggers":
        """What sets and clears triggers."""
        ...

    def begin(self) -> None:
        """Say that all was looked at, and that the next thing done changes something.

        It is in the audit log from here on; whatever goes wrong before changes nothing. Called
        again it sees to it that there is time left.

        Raises:
            OutOfTime: The action has taken as long as it may.
            AuditUnavailable: Nothing can be written there: then nothing is changed.
        """
        ...

    def is_operator(self) -> bool:
        """Whether the asker may do what operators may."""
        ...

    def needs(self, right: Right, owner_uid: int | None = None) -> None:
        """Let the asker pass who has this right on the cluster.

        Raises:
            NotYours: The asker has not.
        """
        ...

    def grant(self, jobs: str, job_id: int, *, restarts: int, released: bool) -> None:
        """Have the bank's gate decide on a change of a job, as the asker's, before it is sent.

        Args:
            jobs: How Slurm's commands name the job.
            job_id: Its raw id.
            restarts: How often it was requeued before the run that the change is for.
            released: Whether the change lets it start.

        Raises:
            BankRefused: The gate rejects it; in the gate's words.
        """
        ...

    def ask(self, name: str, request: dict[str, Any]) -> Any:
        """Have another room's action done, such as ``bank.balance``, for the same asker."""
        ...


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be done.

    Attributes:
        ref: Its name, ``slurm.node.drain``.
        help: One line for people.
        parameters: The Struct that they are decoded into.
        gives: One line on its result.
        run: Does it; gives plain JSON.
        right: Who may.
        changes: Whether it changes anything: then it is audited, and takes ``dry_run``.
        remote: Whether it may be had through the API, from other hosts.
        pack: Whether it is one of StackStorm's slurm pack.
        on_cluster: Whether it is done on a cluster, whose Slurm is asked; not a mail.
        check: Says whether a change is there, for one that was begun and not ended:
            True, False, or None where that cannot be seen.
    """

    ref: str
    help: str
    gives: str
    parameters: type[Parameters]
    run: Callable[[Doing, Any], Any]
    right: Right = "everyone"
    changes: bool = False
    remote: bool = True
    pack: bool = False
    on_cluster: bool = True
    check: Callable[[Doing, Any], bool | None] | None = None


TypeName = Literal["string", "integer", "number", "boolean", "array", "object"]

_NAMES: Final[tuple[tuple[type[inspect.Type], TypeName], ...]] = (
    (inspect.StrType, "string"),
    (inspect.BoolType, "boolean"),
    (inspect.IntType, "integer"),
    (inspect.FloatType, "number"),
    (inspect.VarTupleType, "array"),
    (inspect.ListType, "array"),
    (inspect.DictType, "object"),
    (inspect.StructType, "object"),
    (inspect.LiteralType, "string"),
)
_LONGEST_SHOWN: Final = 60
_LONGEST_NUMBER: Final = 16


class ParameterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of an operation.

    Attributes:
        name: Its name.
        type: What it is, as JSON schemas call it.
        description: What it is for, one line.
        required: Whether it must be given.
        default: What it is where it is not given; None for nothing.
        enum: All that it may be; empty where that cannot be listed.
        items: Of an array: what its items may be.
        within: Of an object: what may be in it; empty where anything may.
    """

    name: str
    type: TypeName
    description: str
    required: bool = False
    default: Any = None
    enum: tuple[str, ...] = ()
    items: tuple[TypeName, ...] = ()
    within: "tuple[ParameterDescription, ...]" = ()


def parameters_of(operation: Operation) -> tuple[ParameterDescription, ...]:
    """What an operation takes, in the order in which it is told."""
    return _described(operation.parameters)


def read_parameters(operation: Operation, given: Mapping[str, Any]) -> Parameters:
    """The parameters that plain values stand for.

    Where a parameter is no text, a text is read as one would write it on a command
    line: numbers and truth values in letters, lists by commas, objects as JSON.

    Raises:
        WrongParameters: One is unknown, missing, or cannot be read as what it should be.
    """
    described = {one.name: one for one in parameters_of(operation)}
    unknown = [name for name in given if name not in described]
    if unknown:
        raise WrongParameters(_unknown(operation.ref, unknown[0], described), unknown[0])
    missing = [one.name for one in described.values() if one.required and _is_missing(one, given)]
    if missing:
        words = " and ".join(f"{name}=…" for name in missing)
        raise WrongParameters(f"{operation.ref} needs {words}", tuple(missing))
    values = {name: _value(operation.ref, described[name], value) for name, value in given.items()}
    try:
        return msgspec.convert(values, operation.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise WrongParameters(f"{operation.ref}: {error}", dict(given)) from error


def given_parameters(parameters: Parameters) -> dict[str, Any]:
    """Parameters as plain values, with the defaults of those that were not given."""
    found: dict[str, Any] = plain_parameters(parameters)
    return found


def plain_parameters(value: Any) -> Any:
    """A value as it is after it was sent as JSON, so that it is the same wherever it was made."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _described(struct: type[msgspec.Struct]) -> tuple[ParameterDescription, ...]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return tuple(_field(field) for field in info.fields)


def _field(field: inspect.Field) -> ParameterDescription:
    kind, description = _without_metadata(field.type)
    if isinstance(kind, inspect.UnionType):
        # What may be left out is described as what it is where it is given.
        kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        kind, inner = _without_metadata(kind)
        description = description or inner
    default = None if field.required else _default(field)
    return ParameterDescription(
        name=field.name,
        type=_named(kind),
        description=description,
        required=field.required,
        default=default,
        enum=tuple(map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else (),
        items=_items(kind),
        within=_described(kind.cls) if isinstance(kind, inspect.StructType) else (),
    )


def _named(kind: inspect.Type) -> TypeName:
    return next(name for known, name in _NAMES if isinstance(kind, known))


def _items(kind: inspect.Type) -> tuple[TypeName, ...]:
    if not isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return ()
    item, _ = _without_metadata(kind.item_type)
    kinds = item.types if isinstance(item, inspect.UnionType) else (item,)
    return tuple(_named(one) for one in kinds)


def _without_metadata(kind: inspect.Type) -> tuple[inspect.Type, str]:
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


def _default(field: inspect.Field) -> Any:
    value = field.default
    if value is NODEFAULT:
        factory: Any = field.default_factory
        value = factory()
    return plain_parameters(value)


def _is_missing(one: ParameterDescription, given: Mapping[str, Any]) -> bool:
    value = given.get(one.name)
    # A list of nodes that is but a blank must not be taken for all of them.
    return value is None or (isinstance(value, str) and not value.strip())


def _value(ref: str, one: ParameterDescription, value: Any) -> Any:
    if one.type == "string":
        return _item(one, value)
    if isinstance(value, str):
        value = _from_text(ref, one, value.strip())
    if one.type == "array" and isinstance(value, list | tuple):
        return [_item(one, item) for item in value]
    return value


def _from_text(ref: str, one: ParameterDescription, text: str) -> Any:
    if one.type == "boolean":
        return _truth(ref, one.name, text)
    if one.type == "array" and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if one.type in ("array", "object"):
        return _from_json(ref, one, text)
    return text


def _item(one: ParameterDescription, item: Any) -> Any:
    """A number where it is written as one and may be one, else a text."""
    if isinstance(item, str) and "integer" in one.items:
        is_number = item.isascii() and item.isdigit() and len(item) < _LONGEST_NUMBER
        return int(item) if is_number and str(int(item)) == item else item
    if isinstance(item, int) and not isinstance(item, bool) and "integer" not in one.items:
        return str(item)
    return item


def _truth(ref: str, name: str, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise WrongParameters(f"{ref}: {name} is true or false, not {_short(text)}", text)


def _from_json(ref: str, one: ParameterDescription, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        example = '{"name": "value"}' if one.type == "object" else '["one", "two"]'
        raise WrongParameters(
            f"{ref}: {one.name} is no JSON ({error}): write it as '{one.name}={example}'", text
        ) from error
    wanted = dict if one.type == "object" else list
    if not isinstance(value, wanted):
        raise WrongParameters(f"{ref}: {one.name} is no {one.type}: {_short(text)}", text)
    return value


def _unknown(ref: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"is it {near[0]}?" if near else f"it takes {', '.join(names) or 'none'}"
    return f"{ref} has no parameter {_short(name)}: {hint}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")


_WHERE: Final = (
    *("cluster", "jobs", "job_changes", "nodes", "triggers", "bank", "notifications", "programs"),
)


@cache
def operations() -> dict[str, Operation]:
    """All of them, those of StackStorm's pack first."""
    found: list[Operation] = []
    for name in _WHERE:
        module = importlib.import_module(f"steward.automation.operations.{name}")
        found += module.OPERATIONS
    found.sort(key=lambda one: (not one.pack, one.ref))
    return {one.ref: one for one in found}


def operation(ref: str) -> Operation:
    """The operation of that name.

    Raises:
        UnknownOperation: There is none.
    """
    known = operations()
    if ref in known:
        return known[ref]
    near = difflib.get_close_matches(ref, known, 1)
    hint = f"is it {near[0]}?" if near else "'steward action list' shows all"
    raise UnknownOperation(f"there is no action {ref!r}: {hint}", ref)
