"""sbatch's options, of 22.05 to 26.05: which take a value, and which are other names.

Source: sbatch(1), and what sbatch of each version says of its own options:
tests/integration/test_estimate_billing.py compares both.
"""

from typing import Final

VALUED: Final = frozenset(
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
"""Options that take a value."""

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
"""Options that take none."""

OPTIONAL: Final = frozenset(
    {
        *("exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate"),
        *("requeue", "resv-ports"),
    }
)
"""Options whose value, if they have one, stands behind ``=``."""

SHORT: Final = {
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
"""The letters that some of them have."""

ALIASES: Final = {
    "cluster": "clusters",
    "ntasks-per-tres": "ntasks-per-gpu",
    "tasks-per-node": "ntasks-per-node",
}
"""Other names of options."""

ALL: Final = VALUED | FLAGS | OPTIONAL | ALIASES.keys()
