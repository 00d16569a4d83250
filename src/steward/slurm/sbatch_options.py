"""sbatch options of Slurm 22.05 to 26.05: which take a value, short letters and aliases.

:func:`split_letters` and :func:`expand_option` read options as getopt does. Price quotes and the
resubmission of archived scripts parse submit lines with them.

Source: sbatch(1), and what sbatch of each version says of each option;
tests/integration/test_estimate_billing.py compares the tables with sbatch.
"""

from collections.abc import Iterator
from typing import Final

from steward.core.errors import UsageError

VALUE_OPTIONS: Final = frozenset(
    {
        *("account", "acctg-freq", "autocomplete", "array", "batch", "bb", "bbf", "begin"),
        *("chdir", "cluster-constraint", "clusters", "comment", "constraint"),
        *(
            "container",
            "container-id",
            "container-type",
            "context",
            "core-spec",
            "cores-per-socket",
        ),
        *("cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency"),
        *("distribution", "error", "exclude", "export-file", "extra", "extra-node-info", "gid"),
        *("gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"),
        *(
            "gres",
            "gres-flags",
            "hint",
            "input",
            "job-name",
            "kill-on-invalid-dep",
            "licenses",
            "mail-type",
        ),
        *(
            "mail-user",
            "mcs-label",
            "mem",
            "mem-bind",
            "mem-per-cpu",
            "mem-per-gpu",
            "mem-update",
            "mincpus",
        ),
        *("network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core"),
        *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output"),
        *("partition", "power", "prefer", "priority", "profile", "qos", "reservation", "resources"),
        *("segment", "signal", "sockets-per-node", "switches"),
        *("thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind"),
        *("tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap"),
        "export",
    }
)
"""Options that require a value."""

FLAGS: Final = frozenset(
    {
        *(
            "consolidate-segments",
            "contiguous",
            "help",
            "hold",
            "ignore-pbs",
        ),
        *("no-requeue", "oversubscribe", "overcommit", "parsable", "quiet", "reboot"),
        *(
            "spread-job",
            "spread-segments",
            "stepmgr",
            "test-only",
            "usage",
            "use-min-nodes",
            "verbose",
            "version",
            "wait",
        ),
        *("external",),
    }
)
"""Options without a value."""

OPTIONAL_VALUE_OPTIONS: Final = frozenset(
    {
        *("exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate"),
        *("requeue", "resv-ports"),
    }
)
"""Options with an optional value, given after ``=``."""

SHORT_OPTIONS: Final = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "O": "overcommit",
    "Q": "quiet",
    "S": "core-spec",
    "V": "version",
    "W": "wait",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "h": "help",
    "i": "input",
    "k": "no-kill",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "x": "exclude",
}
"""Single-letter options and their long names."""

ALIASES: Final = {
    "cluster": "clusters",
    "ntasks-per-tres": "ntasks-per-gpu",
    "tasks-per-node": "ntasks-per-node",
}
"""Alternative long names of options."""

ALL_OPTIONS: Final = VALUE_OPTIONS | FLAGS | OPTIONAL_VALUE_OPTIONS | ALIASES.keys()


def split_letters(word: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a word such as ``-Hn4``; value None means the next word.

    Raises:
        UsageError: A letter is not an option of sbatch.
    """
    rest = word[1:]
    while rest:
        name, rest = SHORT_OPTIONS.get(rest[0], ""), rest[1:]
        if not name:
            raise UsageError(f"unknown sbatch option -{word[len(word) - len(rest) - 1]}", word)
        if name in VALUE_OPTIONS:
            yield name, rest or None
            return
        yield name, ""


def expand_option(name: str) -> str:
    """Return the full name of an option, which getopt accepts abbreviated if unambiguous.

    Raises:
        UsageError: sbatch has no such option, or the abbreviation is ambiguous.
    """
    names = (
        {name}
        if name in ALL_OPTIONS
        else {option for option in ALL_OPTIONS if option.startswith(name)}
    )
    names = {ALIASES.get(option, option) for option in names}
    if not names:
        raise UsageError(f"unknown sbatch option --{name}", name)
    if len(names) > 1:
        raise UsageError(
            f"ambiguous sbatch option --{name}: write one of --{', --'.join(sorted(names))}", name
        )
    return names.pop()
