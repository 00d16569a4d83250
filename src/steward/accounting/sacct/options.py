"""sacct command line: parse options and environment into a request, and the help text.

:func:`parse_sacct_options` returns :class:`SacctOptions`. As with Slurm's sacct, short options may
be bundled (``-Xnp``), long ones abbreviated, lists are comma-separated and may be repeated, and
environment variables apply where the command line says nothing.
"""

import getopt
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from steward.accounting.errors import AccountingUsage
from steward.accounting.job_page.pending_reasons import EXPLANATIONS
from steward.accounting.sacct.fields import (
    BRIEF,
    COMPLETION,
    COMPLETION_BRIEF,
    COMPLETION_LONG,
    DEFAULT,
    LONG,
    SLURM_FIELDS,
    STEWARD_FIELDS,
)
from steward.accounting.sacct.requests import SacctRequest
from steward.slurm.job_states import STATE_NAMES

_SHORT: Final = "aA:bBcC:DeE:f:F:g:hi:I:j:k:K:lLM:nN:o:pPq:r:R:s:S:tTu:UvVW:x:X"
_LONG: Final[dict[str, str]] = {
    "accounts=": "A",
    "allclusters": "L",
    "allocations": "X",
    "allusers": "a",
    "array": "array",
    "associations=": "x",
    "autocomplete=": "autocomplete",
    "batch-script": "B",
    "brief": "b",
    "cluster=": "M",
    "clusters=": "M",
    "completion": "c",
    "config=": "config",
    "constraints=": "C",
    "delimiter=": "delimiter",
    "duplicates": "D",
    "endtime=": "E",
    "env-vars": "env-vars",
    "expand-patterns": "expand-patterns",
    "federation": "L",
    "fields=": "o",
    "file=": "f",
    "flags=": "F",
    "format=": "o",
    "gid=": "g",
    "group=": "g",
    "help": "h",
    "help-fields": "e",
    "helpformat": "e",
    "helpreason": "helpreason",
    "helpstate": "helpstate",
    "jobs=": "j",
    "json": "json",
    "local": "local",
    "long": "l",
    "name=": "name",
    "ncpus=": "I",
    "nnodes=": "i",
    "noconvert": "noconvert",
    "nodelist=": "N",
    "noheader": "n",
    "parquet=": "parquet",
    "parsable": "p",
    "parsable2": "P",
    "partition=": "r",
    "qos=": "q",
    "reason=": "R",
    "socket=": "socket",
    "starttime=": "S",
    "state=": "s",
    "timelimit-max=": "K",
    "timelimit-min=": "k",
    "truncate": "T",
    "uid=": "u",
    "units=": "units",
    "usage": "U",
    "use-local-uid": "use-local-uid",
    "user=": "u",
    "verbose": "v",
    "version": "V",
    "wckeys=": "W",
    "whole-hetjob": "whole-hetjob",
    "yaml": "yaml",
}
"""Long options; those with a value end in ``=``."""

_OPTIONAL_VALUE: Final = re.compile(r"--(whole-hetjob|json|yaml)=(.*)", re.DOTALL)
"""Long options whose optional value follows ``=``."""

_COMMAS: Final = re.compile(r",(?![^\[]*\])")
"""Comma outside brackets, which array tasks and node lists use."""

_LISTS: Final = {
    "A": "accounts",
    "C": "constraints",
    "F": "flags",
    "M": "clusters",
    "R": "reasons",
    "W": "wckeys",
    "g": "groups",
    "j": "jobs",
    "name": "names",
    "q": "qos",
    "r": "partitions",
    "s": "states",
    "u": "users",
}
_WORDS: Final = {
    "E": "endtime",
    "I": "ncpus",
    "K": "timelimit_max",
    "N": "nodelist",
    "S": "starttime",
    "delimiter": "delimiter",
    "i": "nnodes",
    "k": "timelimit_min",
    "units": "units",
    "whole-hetjob": "whole_hetjob",
}
_SWITCHES: Final[dict[str, dict[str, Any]]] = {
    "D": {"duplicates": True},
    "L": {"all_clusters": True},
    "P": {"style": "parsable2"},
    "T": {"truncate": True},
    "X": {"allocations": True},
    "a": {"all_users": True},
    "expand-patterns": {"expand_patterns": True},
    "local": {"all_clusters": False},
    "noconvert": {"noconvert": True},
    "p": {"style": "parsable"},
    "t": {"allocations": True},
    "use-local-uid": {"use_local_uid": True},
}
_OUTPUTS: Final = {"B": "script", "env-vars": "environment", "json": "json", "yaml": "yaml"}
_INFORMATION: Final = {
    "U": "usage",
    "V": "version",
    "autocomplete": "completions",
    "e": "fields",
    "h": "help",
    "helpreason": "reasons",
    "helpstate": "states",
}

Output = Literal["text", "json", "yaml", "parquet", "script", "environment"]
Told = Literal["", "usage", "version", "fields", "help", "states", "reasons", "completions"]


class SacctOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed command line of sacct.

    Attributes:
        request: Which lines to print, and in which format.
        output: Kind of output.
        tell: Information to print instead of lines; "" for none.
        prefix: Prefix of the options to complete, without dashes.
        header: Print a heading.
        file: Job log to read; "" for Steward's own data.
        parquet: Output file, if the output is Parquet.
        verbose: Verbosity.
        config: Path of the configuration file.
        socket: Path of the daemon's socket.
    """

    request: SacctRequest
    output: Output = "text"
    tell: Told = ""
    prefix: str = ""
    header: bool = True
    file: str = ""
    parquet: str = ""
    verbose: int = 0
    config: str = ""
    socket: str = ""


def parse_sacct_options(
    arguments: Sequence[str], environment: Mapping[str, str], zone: str = ""
) -> SacctOptions:
    """Parse a command line.

    Args:
        arguments: Arguments, without the command's name.
        environment: Environment variables.
        zone: IANA zone of typed times; "" for the cluster's.

    Raises:
        AccountingUsage: The command line is invalid.
    """
    collector = _OptionCollector()
    for name, value in _parse_words(arguments):
        collector.apply(name, value)
    request = {
        "all_clusters": bool(environment.get("SACCT_FEDERATION")),
        **collector.request,
        "format": collector.build_format(environment.get("SACCT_FORMAT", "")),
        "time_format": environment.get("SLURM_TIME_FORMAT", ""),
        "zone": zone,
    }
    if environment.get("SACCT_LOCAL"):
        request["all_clusters"] = False
    if collector.plain.get("output", "text") in ("script", "environment") and not request.get(
        "jobs"
    ):
        raise AccountingUsage(
            "no job given: name the jobs with --jobs to print a script or environment"
        )
    format_by_output = {"json": "json", "yaml": "json", "parquet": "lines"}
    request["form"] = format_by_output.get(collector.plain.get("output", ""), "text")
    try:
        return SacctOptions(request=msgspec.convert(request, SacctRequest), **collector.plain)
    except msgspec.ValidationError as error:
        raise AccountingUsage(_format_validation_error(error)) from error


def _parse_words(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the given options by short name, with their values."""
    options: list[tuple[str, str]] = []
    remaining = []
    for argument in arguments:
        match = _OPTIONAL_VALUE.fullmatch(argument)
        if match:
            options.append((match[1], match[2]))
        else:
            remaining.append(argument)
    try:
        parsed, extra = getopt.gnu_getopt(remaining, _SHORT, list(_LONG))
    except getopt.GetoptError as error:
        raise AccountingUsage(f"{error.msg} (see 'steward sacct --help')", error.opt) from error
    for name, value in parsed:
        long = name.removeprefix("--")
        short = _LONG.get(long) or _LONG.get(f"{long}=") if name.startswith("--") else name[1:]
        options.append((short or long, value))
    if extra:
        raise AccountingUsage(
            f"unexpected argument {extra[0]!r}: name jobs with --jobs (see 'steward sacct --help')",
            extra,
        )
    return options


class _OptionCollector:
    """Collector of parsed options."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        self._formats: list[str] = []
        self._switched: set[str] = set()

    def apply(self, name: str, value: str) -> None:
        """Apply one option."""
        if name in _LISTS:
            self._add_list(name, value)
        elif name in _WORDS:
            self.request[_WORDS[name]] = _check_word(name, value)
        elif name in _SWITCHES:
            self.request |= _SWITCHES[name]
        elif name in _OUTPUTS:
            self.plain["output"] = _OUTPUTS[name]
        elif name in _INFORMATION:
            self.plain |= {"tell": _INFORMATION[name], "prefix": value}
        elif name == "x":
            raise AccountingUsage(
                "--associations needs ids of slurmdbd, which Steward does not have: use "
                "--accounts and --user",
                value,
            )
        else:
            self._apply_other(name, value)

    def _apply_other(self, name: str, value: str) -> None:
        """Apply an option that is in no table."""
        if name == "o":
            self._formats.append(value)
        elif name == "n":
            self.plain["header"] = False
        elif name == "v":
            self.plain["verbose"] = self.plain.get("verbose", 0) + 1
        elif name == "f":
            self.plain["file"] = value
            self.request.setdefault("all_users", True)
        elif name == "parquet":
            self.plain |= {"output": "parquet", "parquet": value}
        elif name in ("config", "socket"):
            self.plain[name] = value
        else:
            self._switched.add(name)
            if name == "c":
                self.request["allocations"] = True

    def _add_list(self, name: str, value: str) -> None:
        """Add the words of a list option."""
        words = tuple(word.strip() for word in _COMMAS.split(value) if word.strip())
        if not words:
            raise _make_missing_value(name)
        key = _LISTS[name]
        if key == "users" and words == ("-1",):
            self.request["all_users"] = True
            return
        self.request[key] = (*self.request.get(key, ()), *words)

    def build_format(self, exported: str) -> str:
        """Return the fields to print: from options, else from the environment, else the default."""
        formats = list(self._formats)
        completion = "c" in self._switched
        if "b" in self._switched:
            formats.append(COMPLETION_BRIEF if completion else BRIEF)
        if "l" in self._switched:
            formats.append(COMPLETION_LONG if completion else LONG)
        if formats:
            return ",".join(formats)
        return COMPLETION if completion else exported or DEFAULT


def _make_missing_value(name: str) -> AccountingUsage:
    """Make the error about an option without a value; it names each way to write the option."""
    long = (f"--{key.removesuffix('=')}" for key, option in _LONG.items() if option == name)
    options = "/".join([*([f"-{name}"] if len(name) == 1 else []), *long])
    return AccountingUsage(f"{options} has no value: give one, or leave the option out")


def _check_word(name: str, value: str) -> str:
    """Check and normalize the value of an option."""
    if name == "whole-hetjob":
        answer = {"": "yes", "y": "yes", "yes": "yes", "n": "no", "no": "no"}.get(value.lower())
        if answer is None:
            raise AccountingUsage(f"invalid --whole-hetjob {value!r}: give yes or no", value)
        return answer
    if name == "units":
        if value.upper() not in tuple("KMGTP"):
            raise AccountingUsage(f"invalid --units {value!r}: give K, M, G, T or P", value)
        return value.upper()
    if not value:
        raise _make_missing_value(name)
    return value


def _format_validation_error(error: msgspec.ValidationError) -> str:
    """Return a validation error in words for users."""
    text, _, field = str(error).partition(" - at ")
    return f"{field.strip('`$.') or 'an option'}: {text[:1].lower()}{text[1:]}"


def list_completions(prefix: str) -> str:
    """Return the long options with a prefix, one per line, with ``=`` if they take a value."""
    names = sorted(name for name in _LONG if name.startswith(prefix))
    return "".join(f"--{name}\n" for name in names)


USAGE: Final = "Usage: steward sacct [-S TIME] [-E TIME] [-j JOB,…] [-o FIELD,…] [OPTIONS]\n"

HELP: Final = (
    USAGE
    + """
List jobs and steps with their resource use, as Slurm's sacct does.

Selection:
  -a, --allusers            Jobs of all users that you may see.
  -A, --accounts=NAME,…     Jobs of these accounts.
      --array               Accepted for compatibility with sacct; no effect.
  -C, --constraints=NAME,…  Jobs that requested all of these features.
  -D, --duplicates          Also list former runs of requeued jobs.
  -E, --endtime=TIME        End of the window. Default: now.
  -F, --flags=NAME,…        Jobs with a flag: SchedSubmit, SchedMain, SchedBackfill.
  -g, --gid, --group=NAME,… Jobs of these groups, names or gids.
  -i, --nnodes=N[-N]        Jobs with this number of nodes.
  -I, --ncpus=N[-N]         Jobs with this number of CPUs.
  -j, --jobs=JOB,…          Jobs or steps: 123, 123_4, 123_[1-3], 123+1, 123.batch.
  -k, --timelimit-min=TIME  Exact time limit; with -K, the minimum.
  -K, --timelimit-max=TIME  With -k, the maximum time limit.
  -L, --allclusters         Jobs of all clusters; --federation means the same.
  -M, --clusters=NAME,…     Jobs of these clusters.
  -N, --nodelist=NODES      Jobs that ran on one of these nodes.
      --name=NAME,…         Jobs with these names.
  -q, --qos=NAME,…          Jobs of these QOSes.
  -r, --partition=NAME,…    Jobs in these partitions.
  -R, --reason=NAME,…       Jobs whose last pending reason is one of these.
  -s, --state=STATE,…       Jobs in one of these states in the window: CD, F, RUNNING …
  -S, --starttime=TIME      Start of the window. Default: midnight; all with -j; now with -s.
  -u, --uid, --user=NAME,…  Jobs of these users, names or uids.
  -W, --wckeys=NAME,…       Jobs of these wckeys.
      --whole-hetjob=yes|no All components of a heterogeneous job, or the named ones.
  -X, --allocations         Omit steps.

Times: 08:00, 11/20, 2026-11-20, 2026-11-20T10:00, today, midnight, noon, now-1day.

Format:
  -b, --brief               JobID, State and ExitCode.
  -c, --completion          Fields of a job completion record, one line per job.
      --delimiter=TEXT      Separator of fields with -p and -P. Default: '|'.
  -e, --helpformat          List all fields.
      --expand-patterns     Replace patterns such as %j in StdIn, StdOut and StdErr.
  -l, --long                A long list of fields.
  -n, --noheader            Omit the heading.
      --noconvert           Sizes in their original unit.
  -o, --format=FIELD,…      Fields; %20 sets a width, %-20 aligns to the left.
  -p, --parsable            Print '|' after each field.
  -P, --parsable2           Print '|' between fields.
  -T, --truncate            Cut times to the window.
      --units=K|M|G|T|P     Sizes in this unit.
      --use-local-uid       Show the uid that this host has for the user name.

Other output:
  -B, --batch-script        The scripts of the jobs named with -j.
      --env-vars            The environments of the jobs named with -j.
      --json, --yaml        All fields, for programs.
      --parquet=FILE        All columns of the lines, as a Parquet file.

Source:
      --config=FILE         Path of the configuration file.
  -f, --file=FILE           Read a job log, its directory, or Parquet.
      --socket=PATH         Path of the daemon's socket.

      --autocomplete=TEXT   List long options with this prefix.
  -h, --help                Show this page.
      --helpreason          List the reasons that -R recognizes; others are accepted.
      --helpstate           List the states that -s accepts.
  -U, --usage               Show a one-line usage.
  -v, --verbose             Show the window on stderr.
  -V, --version             Show the version.

SACCT_FORMAT, SACCT_FEDERATION, SACCT_LOCAL, SLURM_TIME_FORMAT and TZ have an effect.
"""
)


def list_fields() -> str:
    """Return the field names, four per line, Slurm's first."""
    return _format_columns([field.name for field in (*SLURM_FIELDS, *STEWARD_FIELDS)], 4, 19)


def list_states() -> str:
    """Return the job states, four per line."""
    return _format_columns(sorted(STATE_NAMES), 4, 19)


def list_reasons() -> str:
    """Return the reasons that Steward explains, two per line."""
    return _format_columns(sorted(EXPLANATIONS), 2, 39)


def _format_columns(names: list[str], count: int, width: int) -> str:
    rows = [names[at : at + count] for at in range(0, len(names), count)]
    return "".join(" ".join(f"{name:<{width}}" for name in row) + "\n" for row in rows)
