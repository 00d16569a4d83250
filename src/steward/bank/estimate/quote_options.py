"""Parser of sbatch options for ``steward bank quote``: options and script to job descriptions.

`parse_options` parses one job, `parse_jobs` also heterogeneous jobs; `find_script` finds the batch
script's name. Unset options get the values that sbatch derives (tasks from nodes, CPUs from tasks).
An unknown option is an error: a quote that ignored it would promise too little.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from steward.bank.errors import BankUsage
from steward.bank.records import JobRequest
from steward.slurm.sbatch_options import VALUE_OPTIONS, expand_option, split_letters

Options = dict[str, str]
"""Option values by full name, without dashes."""

_MEMORY_PATTERN: Final = re.compile(r"([0-9]{1,15})([KMGT]?)(?:B|iB)?", re.IGNORECASE)
_PER_MIB: Final = {"K": (1, 1024), "": (1, 1), "M": (1, 1), "G": (1024, 1), "T": (1024**2, 1)}
"""For each suffix: multiplier and divisor to MiB."""
_NODES_PATTERN: Final = re.compile(
    r"([0-9]{1,15})([km]?)(?:-([0-9]{1,15})([km]?))?(?::[0-9]{1,15})?", re.IGNORECASE
)
_MAX_DIGITS: Final = 15
_NODE_MULTIPLIERS: Final = {"": 1, "k": 1000, "m": 1_000_000}
_UNLIMITED: Final = frozenset({"unlimited", "infinite", "-1"})


def parse_options(argv: Sequence[str], script: str = "", *, uid: int = -1) -> JobRequest:
    """Return the request that sbatch would send for these options.

    Args:
        argv: sbatch's options; words after the first other word are the script's own arguments.
        script: The batch script's text, for its ``#SBATCH`` lines.
        uid: The job's user.

    Raises:
        BankUsage: An option is unknown, a value is invalid, or the options request a heterogeneous
            job.
    """
    jobs = parse_jobs(argv, script, uid=uid)
    if len(jobs) > 1:
        raise BankUsage(
            "heterogeneous jobs cannot be quoted as one: quote each component", list(argv)
        )
    return jobs[0]


def parse_jobs(argv: Sequence[str], script: str = "", *, uid: int = -1) -> tuple[JobRequest, ...]:
    """Return the requests that sbatch would send, one for each heterogeneous component.

    Args:
        argv: sbatch's options, components separated by ``:``.
        script: The batch script's text; ``#SBATCH hetjob`` separates components.
        uid: The job's user.

    Raises:
        BankUsage: An option is unknown, or a value is invalid.
    """
    line_options: list[Options] = [{}]
    for word in _split_components(argv):
        if word is None:
            line_options.append({})
        elif word[0]:
            line_options[-1].update([word])
    script_options: list[Options] = [{}]
    for words in _iterate_directives(script):
        if words in (["hetjob"], ["packjob"]):
            script_options.append({})
            continue
        for word in _split_components(words):
            if word is not None and word[0]:
                script_options[-1].update([word])
    count = max(len(line_options), len(script_options))
    line_options += [{}] * (count - len(line_options))
    script_options += [{}] * (count - len(script_options))
    # The command line overrides the script.
    return tuple(
        _make_description({**of_script, **of_line}, uid, is_het=count > 1)
        for of_script, of_line in zip(script_options, line_options, strict=True)
    )


def find_script(argv: Sequence[str]) -> str:
    """Return the batch script named among sbatch's options; "" if none is.

    Args:
        argv: sbatch's options, the script, and its own arguments.

    Raises:
        BankUsage: An option is unknown.
    """
    position = 0
    for name, _, next_position in _iterate_options(argv):
        if not name:
            return ""
        position = next_position
    # A lone -- ends the options.
    words = [word for word in argv[position : position + 2] if word != "--"]
    return words[0] if words else ""


def _iterate_directives(script: str) -> Iterator[list[str]]:
    """Yield the words of each ``#SBATCH`` line, up to the first command."""
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            try:
                yield shlex.split(line[len("#SBATCH") :], comments=True)
            except ValueError as error:
                raise BankUsage(f"cannot parse {line[:80]!r}: {error}", line) from error
        elif line.strip() and not line.startswith("#"):
            return


def _split_components(argv: Sequence[str]) -> Iterator[tuple[str, str] | None]:
    """Yield options with values; None where a component of a heterogeneous job ends."""
    remaining = list(argv)
    while remaining:
        position = 0
        for name, value, next_position in _iterate_options(remaining):
            yield (name, value) if name else None
            position = next_position
        # The rest is the script and its own arguments, unless another component follows.
        if ":" not in remaining[position:]:
            return
        remaining = remaining[remaining.index(":", position) :]


def _iterate_options(words: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield options, values and the next position, up to the first word that is neither.

    The name is "" for the ``:`` between components of a heterogeneous job.
    """
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == ":":
            yield "", "", position
        elif word.startswith("--") and word != "--":
            name, equals, value = word[2:].partition("=")
            name = expand_option(name)
            if name in VALUE_OPTIONS and not equals:
                value, position = _get_value(words, position, word), position + 1
            yield name, value, position
        elif word.startswith("-") and word not in ("-", "--"):
            for name, attached in split_letters(word):
                if attached is None:
                    attached, position = _get_value(words, position, word), position + 1  # noqa: PLW2901 # its value
                yield name, attached, position
        else:
            return


def _get_value(words: Sequence[str], position: int, word: str) -> str:
    if position >= len(words):
        raise BankUsage(f"{word} requires a value", word)
    return words[position]


def _make_description(options: Options, uid: int, *, is_het: bool) -> JobRequest:
    """Convert the options of one job to a description, with the values that sbatch derives."""
    if "," in options.get("clusters", ""):
        raise BankUsage(
            "--clusters names several clusters: quote for one cluster at a time",
            options["clusters"],
        )
    get = options.get
    min_nodes, max_nodes = _parse_nodes(get("nodes", ""))
    tasks = _parse_count(options, "ntasks")
    cpus_per_task = _parse_count(options, "cpus-per-task")
    tasks_per_node = _parse_count(options, "ntasks-per-node")
    sockets, cores, threads = _parse_geometry(options)
    has_task_count = tasks is not None
    task_count = tasks or 1
    if not has_task_count and min_nodes is not None:
        if tasks_per_node:
            task_count = tasks = min_nodes * tasks_per_node
        elif max_nodes in (None, min_nodes):
            task_count = max(1, min_nodes)
    if not has_task_count and (sockets or cores):
        # One task for each requested core.
        task_count = max(
            task_count, (min_nodes or 1) * (sockets or 1) * (cores or 1) * (threads or 1)
        )
        tasks = task_count
    min_cpus = (
        max(min_nodes or 1, 1) if "overcommit" in options else task_count * (cpus_per_task or 1)
    )
    memory = get("mem")
    return JobRequest(
        uid=uid,
        account=get("account", ""),
        partition=get("partition", ""),
        qos=get("qos", ""),
        reservation=get("reservation", ""),
        time_limit_min=_parse_minutes(options, "time"),
        time_min_min=_parse_minutes(options, "time-min"),
        min_nodes=min_nodes,
        max_nodes=max_nodes if max_nodes is not None or min_nodes is None else min_nodes,
        num_tasks=tasks,
        cpus_per_task=cpus_per_task,
        min_cpus=min_cpus,
        pn_min_cpus=_parse_count(options, "mincpus"),
        pn_min_memory_mib=None if memory is None else _parse_memory("mem", memory),
        mem_per_cpu_mib=_parse_memory("mem-per-cpu", options["mem-per-cpu"])
        if "mem-per-cpu" in options
        else None,
        ntasks_per_node=tasks_per_node,
        ntasks_per_socket=_parse_count(options, "ntasks-per-socket"),
        ntasks_per_core=_parse_count(options, "ntasks-per-core"),
        ntasks_per_tres=_parse_count(options, "ntasks-per-gpu"),
        sockets_per_node=sockets,
        cores_per_socket=cores,
        threads_per_core=threads,
        core_spec=_parse_core_spec(options),
        exclusive=get("exclusive") in ("", "topo"),
        overcommit="overcommit" in options,
        array=get("array", ""),
        held="hold" in options,
        het=is_het,
        req_nodes=get("nodelist", ""),
        features=get("constraint", ""),
        licenses=",".join(filter(None, (get("licenses", ""), get("resources", "")))),
        tres_per_job=_format_tres("gpu", get("gpus", "")),
        tres_per_node=",".join(
            filter(
                None,
                (
                    _format_gres_option(get("gres", "")),
                    _format_tres("gpu", get("gpus-per-node", "")),
                ),
            )
        ),
        tres_per_socket=_format_tres("gpu", get("gpus-per-socket", "")),
        tres_per_task=",".join(
            filter(None, (get("tres-per-task", ""), _format_tres("gpu", get("gpus-per-task", ""))))
        ),
        cpus_per_tres=_format_tres("gpu", get("cpus-per-gpu", "")),
        mem_per_tres=_format_tres("gpu", str(_parse_memory("mem-per-gpu", get("mem-per-gpu", "0"))))
        if "mem-per-gpu" in options
        else "",
    )


def _parse_count(options: Options, name: str) -> int | None:
    """Parse an option's value as a count; None if unset."""
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or len(value) > 9:
        raise BankUsage(f"invalid --{name}={value}: give a whole number", value)
    return int(value)


def _parse_core_spec(options: Options) -> int | None:
    core_count = _parse_count(options, "core-spec")
    return _parse_count(options, "thread-spec") if core_count is None else core_count


def _parse_nodes(value: str) -> tuple[int | None, int | None]:
    """Parse ``--nodes`` into minimum and maximum; None if unset."""
    if not value:
        return None, None
    widest: tuple[int, int] | None = None
    for size in value.split(","):  # later versions take a list of sizes
        match = _NODES_PATTERN.fullmatch(size)
        if match is None:
            raise BankUsage(f"invalid --nodes={value}: give a number of nodes", value)
        minimum = int(match[1]) * _NODE_MULTIPLIERS[match[2].lower()]
        maximum = (
            int(match[3]) * _NODE_MULTIPLIERS[(match[4] or "").lower()] if match[3] else minimum
        )
        widest = (
            (minimum, maximum)
            if widest is None
            else (min(widest[0], minimum), max(widest[1], maximum))
        )
    return widest if widest is not None else (None, None)


def _parse_geometry(options: Options) -> tuple[int | None, int | None, int | None]:
    """Return requested sockets, cores and threads per node; ``-B`` sets all three."""
    counts: list[int | None] = [None, None, None]
    for index, part in enumerate(options.get("extra-node-info", "").split(":")[:3]):
        if part and part != "*":
            counts[index] = _parse_count({"extra-node-info": part}, "extra-node-info")
    for index, name in enumerate(("sockets-per-node", "cores-per-socket", "threads-per-core")):
        if options.get(name) not in (None, "*"):
            counts[index] = _parse_count(options, name)
    hint = options.get("hint", "")
    if hint in ("nomultithread", "compute_bound", "memory_bound"):
        counts[2] = 1
    sockets, cores, threads = counts
    return sockets, cores, threads


def _parse_memory(name: str, value: str) -> int:
    """Parse memory as MiB, rounded up; without a suffix it is MiB."""
    match = _MEMORY_PATTERN.fullmatch(value)
    if match is None:
        raise BankUsage(
            f"invalid --{name}={value}: give an amount of memory such as 4G or 500M", value
        )
    multiplier, divisor = _PER_MIB[match[2].upper()]
    return -(-int(match[1]) * multiplier // divisor)


def _parse_minutes(options: Options, name: str) -> int | None:
    """Parse a time limit as minutes, rounded up as sbatch does; -1 for unlimited.

    Formats: ``min``, ``min:s``, ``h:min:s``, ``d-h``, ``d-h:min``, ``d-h:min:s``.
    """
    value = options.get(name)
    if value is None:
        return None
    if value.lower() in _UNLIMITED:
        return -1
    days, dash, clock = value.partition("-")
    parts = (clock if dash else days).split(":")
    numbers = [*([days] if dash else []), *parts]
    are_numbers = all(part.isascii() and part.isdigit() for part in numbers)
    if len(parts) > 3 or not are_numbers or max(map(len, numbers)) > _MAX_DIGITS:
        raise BankUsage(f"invalid --{name}={value}: give minutes, or days-hours:minutes", value)
    counts = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = ([*counts, 0, 0])[:3]
        hours += int(days) * 24
    elif len(counts) == 3:
        hours, minutes, seconds = counts
    else:
        hours, (minutes, seconds) = 0, ([*counts, 0])[:2]
    return hours * 60 + minutes + -(-seconds // 60)


def _format_tres(kind: str, value: str) -> str:
    """Convert ``a100:2,v100:1`` to ``gres/gpu:a100:2,gres/gpu:v100:1``."""
    return ",".join(f"gres/{kind}:{part}" for part in value.split(",") if part)


def _format_gres_option(value: str) -> str:
    parts = (part for part in value.split(",") if part and part.lower() != "none")
    return ",".join(f"gres/{part.removeprefix('gres:')}" for part in parts)
