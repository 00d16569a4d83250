"""Commands from functions: annotated parameters become Click's options and arguments.

``Annotated[str, Option("--node", metavar="NAME", help="…")]`` declares an option, :class:`Argument`
an argument. :func:`wrap_function` makes the command of a function, :func:`read_function` the
parameters and the callback of a group. A parameter of type ``click.Context`` gets the context.
"""

import inspect
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import click

CONTEXT: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Click's context settings of every command: ``-h`` for help, 100 columns."""
LARGEST_NUMBER: Final = 2**63 - 1
"""Largest whole number of a parameter: the maximum of a database's 64-bit integer."""
_LONGEST_QUOTED: Final = 60
"""Most characters of an invalid value in a message."""

Check = Callable[[click.Context, click.Parameter, Any], Any]
"""Function of context, parameter and value that checks the value and returns it."""


class Argument:
    """Form of a command's argument.

    Args:
        words: Words of an option; none for an argument.
        help: Meaning, one line.
        metavar: Placeholder of the value in help; None for the name of its type.
        envvar: Environment variable with the value; None for none.
        callback: Function that checks the value.
        min: Least value of a number.
        max: Greatest value of a number.
        case_sensitive: Whether a choice is.
        show_default: Whether help shows the default.
        is_eager: Whether it is processed before other parameters.
    """

    def __init__(
        self,
        *words: str,
        help: str = "",  # noqa: A002 - Click's word
        metavar: str | None = None,
        envvar: str | None = None,
        callback: Check | None = None,
        min: float | None = None,  # noqa: A002 - as in Click's ranges
        max: float | None = None,  # noqa: A002
        case_sensitive: bool = True,
        show_default: bool = True,
        is_eager: bool = False,
    ) -> None:
        self.words = words
        self.min, self.max = min, max
        self.case_sensitive = case_sensitive
        self.show_default = show_default
        self.details: dict[str, Any] = {
            "help": help,
            "metavar": metavar,
            "envvar": envvar,
            "callback": callback,
            "is_eager": is_eager,
        }


class Option(Argument):
    """Form of a command's option; the parameters are those of :class:`Argument`."""


class Number(click.ParamType[Any]):
    """Number within bounds, with errors that name the bound.

    Args:
        kind: ``int`` or ``float``.
        min: Least value; None for none.
        max: Greatest value; None for none.
    """

    def __init__(self, kind: type[int] | type[float], min: Any, max: Any) -> None:  # noqa: A002 - as in Click
        self.name = "N"
        self.kind = kind
        self.min, self.max = min, max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of a text.

        Raises:
            click.BadParameter: The text is no number, or the number is out of bounds.
        """
        text = str(value)
        quoted = repr(text if len(text) <= _LONGEST_QUOTED else f"{text[:_LONGEST_QUOTED]}…")
        try:
            number = self.kind(value)
        except ValueError:
            if self.kind is int and text.strip().lstrip("+-").isdecimal():
                self.fail(f"{quoted} is too large: give a smaller number", param, ctx)
            noun = "a whole number" if self.kind is int else "a number"
            self.fail(f"{quoted} is not {noun}", param, ctx)
        if not -math.inf < number < math.inf:
            self.fail(f"{quoted} is not a number", param, ctx)
        if self.min is not None and number < self.min:
            self.fail(f"{quoted} is too small: give {_format_bound(self.min)} or more", param, ctx)
        if self.max is not None and number > self.max:
            self.fail(f"{quoted} is too large: give {_format_bound(self.max)} or less", param, ctx)
        return number


def _format_bound(bound: Any) -> str:
    """Return a bound of a number as people write it."""
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"


class _PlainArgument(click.Argument):
    """Argument whose placeholder shows whether it is optional, and whether it may be repeated."""

    def make_metavar(self, ctx: click.Context) -> str:  # noqa: ARG002 - Click's signature
        """Return the placeholder."""
        name = self.metavar or self.name.upper()
        if not self.required:
            name = f"[{name}]"
        return name if self.nargs == 1 or name.endswith("…") else f"{name}..."

    def get_error_hint(self, ctx: click.Context | None) -> str:  # noqa: ARG002 - Click's signature
        """Return the name in errors, without the marks of the placeholder."""
        return super().get_error_hint(None)


class _ArgumentSection:
    """Part of a command's class: help lists the arguments under the heading "Arguments"."""

    def format_arguments(self: Any, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments to the help."""
        arguments = [one for one in self.get_params(ctx) if isinstance(one, click.Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([one.get_help_record(ctx) for one in arguments])


class Command(_ArgumentSection, click.Command):
    """Command without subcommands."""


class Group(_ArgumentSection, click.Group):
    """Command with subcommands.

    Args:
        help: Its help; the docstring of the function if empty.
        function: Function with the group's own parameters, run before a subcommand; None for none.
        invoke_without_command: Whether the function also runs without a subcommand, instead of
            the help.
    """

    def __init__(
        self,
        help: str = "",  # noqa: A002 - Click's word
        function: Callable[..., Any] | None = None,
        *,
        invoke_without_command: bool = False,
    ) -> None:
        parameters, callback = read_function(function) if function is not None else ([], None)
        super().__init__(
            params=parameters,
            callback=callback,
            help=help or inspect.getdoc(function),
            context_settings=CONTEXT,
            invoke_without_command=invoke_without_command,
        )

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - Click's signature
        """Return the names of the commands, in the order of their declarations."""
        return list(self.commands)

    def subcommand(
        self, name: str = "", **context_settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds the command of a function, as :func:`wrap_function` does."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.add_command(wrap_function(function, name, **context_settings))
            return function

        return add


def wrap_function(
    function: Callable[..., Any], name: str = "", **context_settings: Any
) -> click.Command:
    """Return the command that runs a function; its help is the function's docstring.

    Args:
        function: The function.
        name: Name of the command; that of the function if empty.
        context_settings: Click's context settings, in place of :data:`CONTEXT`'s.
    """
    parameters, callback = read_function(function)
    return Command(
        name or function.__name__,
        params=parameters,
        callback=callback,
        help=inspect.getdoc(function),
        context_settings={**CONTEXT, **context_settings},
    )


def read_function(function: Callable[..., Any]) -> tuple[list[click.Parameter], Callable[..., Any]]:
    """Return the parameters of a function as Click's, and the callback that runs the function."""
    contexts: list[str] = []
    empty_lists: dict[str, Any] = {}
    parameters: list[click.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.annotation is click.Context:
            contexts.append(parameter.name)
            continue
        parameters.append(_make_parameter(parameter))
        if parameters[-1].multiple or parameters[-1].nargs == -1:
            empty_lists[parameter.name] = parameter.default

    def run(**values: Any) -> Any:
        for name in contexts:
            values[name] = click.get_current_context()
        for name, default in empty_lists.items():
            values[name] = list(values[name]) or default
        return function(**values)

    return parameters, run


def _make_parameter(parameter: inspect.Parameter) -> click.Parameter:
    """Return a function's parameter as Click's."""
    assert get_origin(parameter.annotation) is Annotated, f"{parameter} is not declared"
    value_type, form = get_args(parameter.annotation)[:2]
    if get_origin(value_type) in (Union, types.UnionType):
        (value_type,) = (part for part in get_args(value_type) if part is not types.NoneType)
    is_list = get_origin(value_type) is list
    if is_list:
        (value_type,) = get_args(value_type)
    details = dict(form.details)
    details["required"] = parameter.default is inspect.Parameter.empty
    if not details["required"]:
        details["default"] = parameter.default
    if isinstance(form, Option):
        details |= {
            "show_envvar": True,
            "show_default": form.show_default and parameter.default not in (None, ""),
        }
        details |= {"is_flag": True} if value_type is bool else {"multiple": is_list}
        make: Any = click.Option
    else:
        details |= {"nargs": -1} if is_list else {}
        make = _PlainArgument
    if form.max is not None and form.max < LARGEST_NUMBER:
        details["help"] += f" At most {_format_bound(form.max)}."
    if value_type is not bool:
        details["type"] = _make_type(value_type, form)
    made: click.Parameter = make([parameter.name, *form.words], **details)
    return made


def _make_type(value_type: Any, form: Argument) -> Any:
    """Return Click's type of a parameter's value."""
    if get_origin(value_type) is Literal:
        return click.Choice(get_args(value_type), case_sensitive=form.case_sensitive)
    if value_type in (int, float):
        return Number(value_type, form.min, form.max)
    assert value_type is str, f"{value_type} is no type of a parameter"
    return click.STRING
