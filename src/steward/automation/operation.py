"""Operations of automation: how one is declared, its parameters parsed, and the list of all.

An :class:`Operation` is an action that the decorator :func:`operation` declares. Command line, API,
rules, StackStorm pack and docs derive from it. Its request is a Struct of parameters, each field
annotated with its description. Its result is plain JSON, in the same form as StackStorm's slurm
pack where the pack has the same action.

- :class:`OperationContext` is the context that an operation's function gets
  (:mod:`steward.automation.runner` implements it).
- ``describe_parameters`` describes parameters, ``parse_operation_parameters`` parses them.
- ``load_operations`` loads all modules of :mod:`steward.automation.operations`, ``find_operation``
  looks one up by name.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from steward.automation.errors import InvalidParameters, UnknownOperation
from steward.core.access import Access, Caller
from steward.core.actions import DECLARED, Action, Function, Request, Role, action
from steward.core.config import Settings
from steward.slurm.settings import ClusterSettings

if TYPE_CHECKING:
    from steward.slurm import Slurm
    from steward.slurm.cluster import ClusterQueries
    from steward.slurm.cluster_changes import ClusterChanges
    from steward.slurm.job_changes import JobChanges
    from steward.slurm.triggers import Triggers


# Declaration of operations


class Parameters(Request, frozen=True, kw_only=True, omit_defaults=False):
    """Base class of operation parameters; the audit log has defaults, too."""


class OperationContext(Protocol):
    """Context of a running operation: cluster, caller, permissions, time limit, Slurm clients."""

    cluster: str
    cluster_settings: ClusterSettings
    settings: Settings
    caller: Caller
    speaker: str
    """Name that signs reasons: ``alice``, ``rule node-down``."""
    dry_run: bool
    """Whether this is a dry run: everything is checked, nothing is changed."""
    force: bool
    """Whether reasons and drains of others may be overridden."""
    access: Access
    """Checks what the caller may see and do."""
    timeout_s: float
    """Time limit of the whole operation, in seconds."""

    @property
    def remaining_s(self) -> float:
        """Seconds left until the time limit."""
        ...

    @property
    def slurm(self) -> "Slurm":
        """Client of the cluster's Slurm."""
        ...

    @property
    def machine(self) -> "ClusterQueries":
        """Queries of nodes, partitions, reservations and job details."""
        ...

    @property
    def cluster_changes(self) -> "ClusterChanges":
        """Changes to nodes, partitions and reservations."""
        ...

    @property
    def jobs(self) -> "JobChanges":
        """Changes to jobs."""
        ...

    @property
    def triggers(self) -> "Triggers":
        """Sets and clears Slurm's triggers."""
        ...

    def begin(self) -> None:
        """Mark the end of all checks: the next step changes something.

        Writes the operation to the audit log, once. An error before this call means that nothing
        was changed. Later calls only check that time is left.

        Raises:
            OperationTimeout: The time limit has passed.
            AuditUnavailable: The audit log cannot be written; nothing may be changed.
        """
        ...

    def is_operator(self) -> bool:
        """Return whether the caller has operator rights."""
        ...

    def require_role(self, role: Role, owner_uid: int | None = None) -> None:
        """Check that the caller has this role on the cluster.

        Raises:
            OperationForbidden: The caller has not.
        """
        ...

    def request_admission(self, jobs: str, job_id: int, *, restarts: int, starts_job: bool) -> None:
        """Ask the bank's gate, as the caller, to admit a change of a job before it is sent.

        Args:
            jobs: The job, as Slurm's commands name it.
            job_id: Raw job id.
            restarts: Restart count of the run that the change applies to.
            starts_job: Whether the change lets the job start.

        Raises:
            BankRefused: The gate rejects the change; the message is the gate's.
        """
        ...

    def call_action(self, name: str, request: dict[str, Any]) -> Any:
        """Run an action of another package, such as ``bank.balance``, for the same caller."""
        ...


class Operation(Action, frozen=True, kw_only=True):
    """Action that :func:`operation` declares and ``automation.run`` alone runs.

    Its function takes context and parameters. Unless it ``only_reads``, it is audited and has a dry
    run.

    Attributes:
        request: Struct that parameters are decoded into.
        remote: Whether other hosts may call it through the API.
        pack: Whether StackStorm's slurm pack has the same action.
        on_cluster: Whether it needs a cluster's Slurm; sending mail does not.
        check: For an operation that began and did not end: return whether its change took effect;
            None if that cannot be determined.
    """

    request: type[Parameters]
    remote: bool = True
    pack: bool = False
    on_cluster: bool = True
    check: Callable[[OperationContext, Any], bool | None] | None = None

    @property
    def ref(self) -> str:
        """Name without that of the package, for example ``slurm.node.drain``."""
        return self.name.removeprefix(_PREFIX)

    @property
    def result_help(self) -> str:
        """Result, in one line."""
        _, _, text = (self.run.__doc__ or "").partition("Returns:\n")
        return " ".join(text.partition("\n\n")[0].split())


_PREFIX: Final = "automation."
"""Prefix of the names of operations among those of all actions."""


def operation(ref: str, **details: Any) -> Callable[[Function], Function]:
    """Declare a function of context and parameters as an operation.

    The docstring's section ``Returns`` describes the result in one line.

    Args:
        ref: Name that people and rules use.
        details: Fields of :class:`Operation`.
    """
    return action(_PREFIX + ref, scope="actions", kind=Operation, **details)


# Description and parsing of parameters

TypeName = Literal["string", "integer", "number", "boolean", "array", "object"]
"""Type names of JSON Schema."""

_MAX_SHOWN_LENGTH: Final = 60
"""Maximum length of a value in an error message, in characters."""
_MAX_INTEGER_DIGITS: Final = 16
"""Longer digit strings stay text."""


class ParameterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one parameter of an operation.

    Attributes:
        name: Its name.
        type: Type, as JSON Schema names it.
        description: Meaning, one line.
        required: Whether it must be given.
        default: Default value; None if there is none.
        enum: Allowed values; empty if they cannot be listed.
        items: For an array: types of its items.
        within: For an object: its fields; empty if any are allowed.
    """

    name: str
    type: TypeName
    description: str
    required: bool = False
    default: Any = None
    enum: tuple[str, ...] = ()
    items: tuple[TypeName, ...] = ()
    within: "tuple[ParameterDescription, ...]" = ()


def describe_parameters(action: Action) -> tuple[ParameterDescription, ...]:
    """Describe the parameters of an operation or another action, in the order of declaration."""
    _, schemas = msgspec.json.schema_components((action.request,), ref_template="{name}")
    return _describe_fields(action.request.__name__, schemas)


def parse_operation_parameters(operation: Operation, arguments: Mapping[str, Any]) -> Parameters:
    """Parse plain values into an operation's parameters.

    A text given for a parameter of another type is parsed as on a command line: numbers and truth
    values in letters, lists separated by commas, objects as JSON.

    Raises:
        InvalidParameters: A parameter is unknown, missing or invalid.
    """
    descriptions = {parameter.name: parameter for parameter in describe_parameters(operation)}
    unknown = [name for name in arguments if name not in descriptions]
    if unknown:
        raise InvalidParameters(
            _explain_unknown(operation.ref, unknown[0], descriptions), unknown[0]
        )
    missing = [
        parameter.name
        for parameter in descriptions.values()
        if parameter.required and _is_missing(parameter, arguments)
    ]
    if missing:
        placeholders = " and ".join(f"{name}=…" for name in missing)
        raise InvalidParameters(f"{operation.ref}: missing {placeholders}", tuple(missing))
    values = {
        name: _parse_value(operation.ref, descriptions[name], value)
        for name, value in arguments.items()
    }
    try:
        return msgspec.convert(values, operation.request, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameters(f"{operation.ref}: {error}", dict(arguments)) from error


def dump_parameters(parameters: Parameters) -> dict[str, Any]:
    """Convert parameters to plain values, with defaults for those not given."""
    values: dict[str, Any] = to_plain_json(parameters)
    return values


def to_plain_json(value: Any) -> Any:
    """Round-trip a value through JSON, so that it is the same wherever it was made."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _describe_fields(struct: str, schemas: dict[str, Any]) -> tuple[ParameterDescription, ...]:
    """Describe the fields of a Struct from its JSON Schema and those of nested Structs."""
    schema = schemas[struct]
    return tuple(
        _describe_parameter(name, field, schemas, required=name in schema["required"])
        for name, field in schema["properties"].items()
    )


def _describe_parameter(
    name: str, schema: dict[str, Any], schemas: dict[str, Any], *, required: bool
) -> ParameterDescription:
    """Describe one field: type, default, allowed values."""
    # Describe an optional parameter by its type other than None.
    kind = next(kind for kind in schema.get("anyOf", (schema,)) if kind.get("type") != "null")
    inner, item = kind.get("$ref"), kind.get("items", {})
    return ParameterDescription(
        name=name,
        type="object" if inner else kind.get("type", "string"),
        description=schema.get("description", ""),
        required=required,
        default=to_plain_json(schema.get("default")),
        enum=tuple(map(str, kind.get("enum", ()))),
        items=tuple(item_kind["type"] for item_kind in item.get("anyOf", (item,)) if item_kind),
        within=_describe_fields(inner, schemas) if inner else (),
    )


def _is_missing(parameter: ParameterDescription, arguments: Mapping[str, Any]) -> bool:
    """Return whether a required parameter is absent or blank."""
    value = arguments.get(parameter.name)
    # A blank node list must not be taken for all nodes.
    return value is None or (isinstance(value, str) and not value.strip())


def _parse_value(ref: str, parameter: ParameterDescription, value: Any) -> Any:
    """Convert a given value towards the parameter's type."""
    if parameter.type == "string":
        return _parse_item(parameter, value)
    if isinstance(value, str):
        value = _parse_text(ref, parameter, value.strip())
    if parameter.type == "array" and isinstance(value, list | tuple):
        return [_parse_item(parameter, item) for item in value]
    return value


def _parse_text(ref: str, parameter: ParameterDescription, text: str) -> Any:
    """Convert a text to the parameter's type, as on a command line."""
    if parameter.type == "boolean":
        return _parse_boolean(ref, parameter.name, text)
    if parameter.type == "array" and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if parameter.type in ("array", "object"):
        return _parse_json(ref, parameter, text)
    return text


def _parse_item(parameter: ParameterDescription, item: Any) -> Any:
    """Return an integer if the text is one and the array allows integers, else text."""
    if isinstance(item, str) and "integer" in parameter.items:
        is_number = item.isascii() and item.isdigit() and len(item) < _MAX_INTEGER_DIGITS
        return int(item) if is_number and str(int(item)) == item else item
    if isinstance(item, int) and not isinstance(item, bool) and "integer" not in parameter.items:
        return str(item)
    return item


def _parse_boolean(ref: str, name: str, text: str) -> bool:
    """Parse a truth value."""
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise InvalidParameters(f"{ref}: invalid {name} {_shorten(text)}: give true or false", text)


def _parse_json(ref: str, parameter: ParameterDescription, text: str) -> Any:
    """Parse JSON and check that it is an object or array as declared."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        example = '{"name": "value"}' if parameter.type == "object" else '["one", "two"]'
        raise InvalidParameters(
            f"{ref}: {parameter.name} is not valid JSON ({error}): write it as "
            f"'{parameter.name}={example}'",
            text,
        ) from error
    expected_type = dict if parameter.type == "object" else list
    if not isinstance(value, expected_type):
        raise InvalidParameters(
            f"{ref}: {parameter.name} is not of type {parameter.type}: {_shorten(text)}", text
        )
    return value


def _explain_unknown(ref: str, name: str, known_names: Iterable[str]) -> str:
    """Explain an unknown parameter and suggest the nearest name."""
    names = list(known_names)
    suggestions = difflib.get_close_matches(name, names, 1)
    hint = (
        f"did you mean {suggestions[0]}?"
        if suggestions
        else f"the parameters are {', '.join(names) or 'none'}"
    )
    return f"{ref}: unknown parameter {_shorten(name)}: {hint}"


def _shorten(text: str) -> str:
    """Quote a text for an error message, shortened."""
    return repr(text if len(text) <= _MAX_SHOWN_LENGTH else text[: _MAX_SHOWN_LENGTH - 3] + "...")


# List of operations


@cache
def load_operations() -> dict[str, Operation]:
    """Return all operations by name, those of StackStorm's pack first."""
    from steward.automation import operations

    for module in pkgutil.iter_modules(operations.__path__):
        importlib.import_module(f"{operations.__name__}.{module.name}")
    declared = [item for item in DECLARED.values() if isinstance(item, Operation)]
    declared.sort(key=lambda operation: (not operation.pack, operation.ref))
    return {operation.ref: operation for operation in declared}


def find_operation(ref: str) -> Operation:
    """Return the operation with this name.

    Raises:
        UnknownOperation: No operation has that name.
    """
    operations = load_operations()
    if ref in operations:
        return operations[ref]
    suggestions = difflib.get_close_matches(ref, operations, 1)
    hint = f"did you mean {suggestions[0]}?" if suggestions else "'steward action list' lists all"
    raise UnknownOperation(f"unknown action {ref!r}: {hint}", ref)
