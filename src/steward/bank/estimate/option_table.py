"""sbatch's options, of 22.05 to 26.05: which take a value, and which a quote depends on.

Source: sbatch(1) and src/common/slurm_opt.c of each version.
"""

from typing import Final

VALUED: Final = frozenset(
    {
        *("account", "acctg-freq", "admin-comment", "array", "batch", "bb", "bbf", "begin"),
        *("bcast", "chdir", "cluster-constraint", "clusters", "comment", "constraint"),
        *("consolidate-segments", "container", "container-id", "core-spec", "cores-per-socket"),
        *("cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency"),
        *("distribution", "error", "exclude", "export-file", "extra", "extra-node-info", "gid"),
        *("gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"),
        *("gres", "gres-flags", "hint", "input", "job-name", "licenses", "mail-type"),
        *("mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus"),
        *("network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core"),
        *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output"),
        *("partition", "power", "prefer", "priority", "profile", "qos", "reservation"),
        *("resv-ports", "segment", "signal", "sockets-per-node", "stepmgr", "switches"),
        *("thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind"),
        *("tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap", "oom-kill-step"),
        *("export", "nodes-file"),
    }
)
"""Options that take a value."""

FLAGS: Final = frozenset(
    {
        *(
            "contiguous",
            "disable-stdout-job-state",
            "help",
            "hold",
            "ignore-pbs",
            "kill-on-invalid-dep",
        ),
        *("no-requeue", "oversubscribe", "overcommit", "parsable", "quiet", "reboot", "requeue"),
        *(
            "share",
            "spread-job",
            "test-only",
            "usage",
            "use-min-nodes",
            "verbose",
            "version",
            "wait",
        ),
        *("external", "hetjob", "packjob"),
    }
)
"""Options that take none."""

OPTIONAL: Final = frozenset(
    {"exclusive", "get-user-env", "nice", "no-kill", "propagate", "kill-on-invalid-dep"}
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
    "I": "immediate",
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

ALL: Final = VALUED | FLAGS | OPTIONAL
