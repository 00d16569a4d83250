"""sacct fields: names, widths, and a compiled printer that formats lines.

:data:`SLURM_FIELDS`, :data:`REMOVED_FIELDS` and :data:`STEWARD_FIELDS` list the fields.
:func:`parse_format` parses a ``--format``; :func:`compile_printer` compiles it into two functions,
for runs and for steps; :func:`format_header` makes the heading.

A field's value is a Python expression in which ``{column}`` stands for a column of the line.
Compiling all expressions of a format into one function prints 400,000 lines a second; one call per
field reaches a third of that. Names, widths and order are those of sacct(1), because scripts rely
on them; Steward's own fields come last.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from steward.accounting.errors import AccountingUsage
from steward.accounting.sacct import values
from steward.accounting.sacct.requests import SacctRequest
from steward.accounting.sacct.values import ClusterClock
from steward.core.layouts import format_span
from steward.core.printable import escape_line

Kind = Literal["text", "whole", "date"]


class SacctField(msgspec.Struct, frozen=True):
    """Field that sacct can print.

    Attributes:
        name: Name, as in the heading.
        width: Width in a table; negative for left alignment.
        kind: ``text`` is cut if too long, ending in ``+``; ``date`` is cut; ``whole`` (numbers,
            durations) is never cut.
        run: Expression for a run's line; "" prints nothing.
        step: Expression for a step's line.
        few: Whether so few different values occur that formatted ones are cached: states,
            accounts, partitions.
    """

    name: str
    width: int
    kind: Kind = "text"
    run: str = ""
    step: str = ""
    few: bool = False


def _make_field(
    name: str, width: int, expression: str, kind: Kind = "text", *, few: bool = False
) -> SacctField:
    """Return a field with the same expression for runs and steps."""
    return SacctField(name, width, kind, expression, expression, few)


def _make_run_field(
    name: str, width: int, expression: str = "", kind: Kind = "text", *, few: bool = False
) -> SacctField:
    """Return a field that only runs have."""
    return SacctField(name, width, kind, expression, "", few)


def _make_step_field(
    name: str, width: int, expression: str = "", kind: Kind = "text"
) -> SacctField:
    """Return a field that only steps have."""
    return SacctField(name, width, kind, "", expression)


def _make_maximum_fields(
    what: str, column: str, widths: tuple[int, int, int], expression: str
) -> tuple[SacctField, ...]:
    """Return the fields of a maximum over tasks, with its node and task.

    ``expression`` formats the value.
    """
    size, node, task = widths
    return (
        _make_step_field(f"Max{what}", size, expression),
        _make_step_field(f"Max{what}Node", node, f"text({{{column}_node}})"),
        _make_step_field(f"Max{what}Task", task, f"number({{{column}_task}})", "whole"),
    )


def _build_path_expression(column: str) -> str:
    """Return the expression of a path in which patterns may be expanded."""
    return (
        f"path({{{column}}}, {{job_id}}, {{array_job_id}}, {{array_task}}, {{name}}, {{user}}, "
        "{nodelist})"
    )


def _make_cpu_field(name: str, expression: str) -> SacctField:
    """Return a field of CPU time; a run's is the sum of its steps, 0 without steps."""
    return SacctField(name, 10, "text", f"cpu_time({expression} or 0)", f"cpu_time({expression})")


_ELAPSED: Final = "elapsed({start_us}, {end_us}, {suspended_s})"
_CPUS: Final = "{allocated_cpus}"
_PLANNED: Final = "planned({eligible_us}, {start_us}, {end_us})"
_STEP: Final = "({step} if {step}.isalnum() else text({step}))"
_CPU_OF_STEP: Final = "total({user_us}, {system_us})"
_TASKS: Final = (
    "used(fs_disk=number({max_read_task}), mem=number({max_rss_task}), "
    "pages=number({max_pages_task}))"
)

COMPUTED_COLUMNS: Final = {
    # Without nodes, nothing is allocated (yet). Reading the node list only to test it takes time.
    f"allocated_{name}": f"CASE WHEN step <> '' OR nodelist <> '' THEN {name} ELSE 0 END"
    for name in ("cpus", "nodes")
}
"""SQL of columns that only expressions have."""

SLURM_FIELDS: Final = (
    _make_field("Account", 10, "text({account})", few=True),
    _make_run_field("AdminComment", 20, "text({admin_comment})"),
    _make_field("AllocCPUS", 10, _CPUS, "whole"),
    _make_field("AllocNodes", 10, "count({allocated_nodes})"),
    _make_field("AllocTRES", 10, "tres({tres_allocated})", few=True),
    _make_run_field("AssocID", 7),
    _make_step_field("AveCPU", 10, "seconds({ave_cpu_us})"),
    _make_step_field("AveCPUFreq", 10),
    _make_step_field("AveDiskRead", 14, "megabytes({ave_read_bytes})"),
    _make_step_field("AveDiskWrite", 14, "megabytes({ave_written_bytes})"),
    _make_step_field("AvePages", 10, "size({ave_pages})"),
    _make_step_field("AveRSS", 10, "size({ave_rss_bytes})"),
    _make_step_field("AveVMSize", 10),
    _make_run_field("BlockID", 16),
    _make_field("Cluster", 10, "text({cluster})", few=True),
    _make_run_field("Comment", 14, "text({comment})"),
    _make_run_field("Constraints", 19, "text({constraints})", few=True),
    _make_run_field("ConsumedEnergy", 14),
    _make_run_field("ConsumedEnergyRaw", 17),
    _make_field("Container", 20, "text({container})", few=True),
    _make_field("CPUTime", 10, f"clock({_ELAPSED} * {_CPUS})", "whole"),
    _make_field("CPUTimeRAW", 10, f"{_ELAPSED} * {_CPUS}", "whole"),
    _make_run_field("DBIndex", 15),
    _make_run_field(
        "DerivedExitCode", 15, "exit_text({derived_exit_code}, {derived_exit_signal})", few=True
    ),
    _make_field("Elapsed", 10, f"clock({_ELAPSED})", "whole"),
    _make_field("ElapsedRaw", 10, _ELAPSED, "whole"),
    SacctField("Eligible", 19, "date", "date({eligible_us})", "date({start_us})"),
    _make_field("End", 19, "date({end_us})", "date"),
    _make_run_field("Exclusive", 9, "exclusive_text({oversubscribe})", few=True),
    _make_field("ExitCode", 8, "exit_text({exit_code}, {exit_signal})", few=True),
    _make_run_field("Extra", 14, "text({extra})"),
    _make_run_field("FailedNode", 8, "text({failed_node})"),
    _make_run_field("Flags", 19, "text({job_flags})", few=True),
    _make_run_field("GID", 6, "number({gid})", "whole", few=True),
    _make_run_field("Group", 9, "text({group})", few=True),
    SacctField(
        "JobID",
        -12,
        "text",
        # Letters and digits alone need no escaping.
        "({label} if {label}.isalnum() else label({label}))",
        f"({{label}} if {{label}}.isalnum() else label({{label}})) + '.' + {_STEP}",
    ),
    SacctField("JobIDRaw", -12, "text", "str({job_id})", f"str({{job_id}}) + '.' + {_STEP}"),
    _make_field("JobName", 10, "text({name})", few=True),
    _make_step_field("Layout", 9),
    _make_run_field("Licenses", 10, "text({licenses})", few=True),
    *_make_maximum_fields("DiskRead", "max_read", (12, 15, 15), "megabytes({max_read_bytes})"),
    *_make_maximum_fields(
        "DiskWrite", "max_written", (12, 16, 16), "megabytes({max_written_bytes})"
    ),
    *_make_maximum_fields("Pages", "max_pages", (8, 12, 14), "size({max_pages})"),
    *_make_maximum_fields("RSS", "max_rss", (10, 10, 10), "size({max_rss_bytes})"),
    _make_step_field("MaxVMSize", 10),
    _make_step_field("MaxVMSizeNode", 14),
    _make_step_field("MaxVMSizeTask", 14),
    _make_run_field("McsLabel", 10),
    _make_step_field("MinCPU", 10, "seconds({min_cpu_us})"),
    _make_step_field("MinCPUNode", 10, "text({min_cpu_node})"),
    _make_step_field("MinCPUTask", 10, "number({min_cpu_task})", "whole"),
    _make_field("NCPUS", 10, _CPUS, "whole"),
    _make_field("NNodes", 8, "({nodes} or {requested_nodes})", "whole"),
    SacctField("NodeList", 15, "text", "text({nodelist}) or 'None assigned'", "text({nodelist})"),
    _make_step_field("NTasks", 8, "{tasks}", "whole"),
    _make_run_field("OriginalSLUID", 14, "text({original_sluid})"),
    _make_run_field("OverSubscribe", 13, "shares_text({oversubscribe})", few=True),
    _make_run_field("Partition", 10, "text({partition})", few=True),
    _make_run_field("Planned", 10, f"clock({_PLANNED})", "whole"),
    _make_run_field("PlannedCPU", 10, f"clock({_PLANNED} * {{requested_cpus}})", "whole"),
    _make_run_field("PlannedCPURAW", 13, f"{_PLANNED} * {{requested_cpus}}", "whole"),
    _make_run_field("Priority", 10, "number({priority})", "whole"),
    _make_run_field("QOS", 10, "text({qos})", few=True),
    _make_run_field("QOSRAW", 6),
    _make_run_field("QOSREQ", 10),
    _make_run_field("Reason", 22, "text({reason}) or 'None'", few=True),
    _make_step_field("ReqCPUFreq", 10),
    _make_step_field("ReqCPUFreqGov", 13),
    _make_step_field("ReqCPUFreqMax", 13),
    _make_step_field("ReqCPUFreqMin", 13),
    SacctField("ReqCPUS", 8, "whole", "{requested_cpus}", "{cpus}"),
    _make_run_field("ReqMem", 10, "memory({tres_requested})", few=True),
    SacctField("ReqNodes", 8, "text", "count({requested_nodes})", "count({nodes})"),
    _make_run_field("ReqReservation", 20),
    _make_run_field("ReqTRES", 10, "tres({tres_requested})", few=True),
    _make_run_field("Reservation", 20, "text({reservation})", few=True),
    _make_run_field("ReservationId", 8),
    _make_run_field("Restarts", 8, "{restarts}", "whole"),
    _make_run_field("SegmentSize", 11),
    _make_field("SLUID", 14, "text({sluid})", "whole"),
    # As Slurm does for a job that ended before it started.
    SacctField(
        "Start",
        19,
        "date",
        "(date({start_us}) if {start_us} or not {end_us} else 'None')",
        "date({start_us})",
    ),
    _make_field("State", 10, "state_text({state}, {cancelled_by})", few=True),
    _make_run_field("StdErr", 20, _build_path_expression("stderr")),
    _make_run_field("StdIn", 20, _build_path_expression("stdin")),
    _make_run_field("StdOut", 20, _build_path_expression("stdout")),
    SacctField("Submit", 19, "date", "date({submit_us})", "date({start_us})"),
    _make_field("SubmitLine", 20, "text({submit_line})"),
    _make_field("Suspended", 10, "clock({suspended_s})", "whole"),
    _make_run_field("SystemComment", 20, "text({system_comment})"),
    _make_cpu_field("SystemCPU", "{system_us}"),
    _make_run_field("Timelimit", 10, "limit_text({time_limit_s}, started={start_us})", few=True),
    _make_run_field("TimelimitRaw", 10, "limit_minutes({time_limit_s}, {start_us})", few=True),
    _make_cpu_field("TotalCPU", _CPU_OF_STEP),
    _make_step_field(
        "TRESUsageInAve",
        14,
        "used(cpu=seconds({ave_cpu_us}), fs_disk=number({ave_read_bytes}), "
        "mem=size({ave_rss_bytes}), pages=number({ave_pages}))",
    ),
    _make_step_field(
        "TRESUsageInMax",
        14,
        "used(fs_disk=number({max_read_bytes}), mem=size({max_rss_bytes}), "
        "pages=number({max_pages}))",
    ),
    _make_step_field(
        "TRESUsageInMaxNode",
        18,
        "used(fs_disk=text({max_read_node}), mem=text({max_rss_node}), "
        "pages=text({max_pages_node}))",
    ),
    _make_step_field("TRESUsageInMaxTask", 18, _TASKS),
    _make_step_field("TRESUsageInMin", 14, "used(cpu=seconds({min_cpu_us}))"),
    _make_step_field("TRESUsageInMinNode", 18, "used(cpu=text({min_cpu_node}))"),
    _make_step_field("TRESUsageInMinTask", 18, "used(cpu=number({min_cpu_task}))"),
    _make_step_field(
        "TRESUsageInTot",
        14,
        f"used(cpu=seconds({_CPU_OF_STEP}), fs_disk=number({{read_bytes}}))",
    ),
    _make_step_field("TRESUsageOutAve", 15, "used(fs_disk=number({ave_written_bytes}))"),
    _make_step_field("TRESUsageOutMax", 15, "used(fs_disk=number({max_written_bytes}))"),
    _make_step_field("TRESUsageOutMaxNode", 19, "used(fs_disk=text({max_written_node}))"),
    _make_step_field("TRESUsageOutMaxTask", 19, "used(fs_disk=number({max_written_task}))"),
    _make_step_field("TRESUsageOutMin", 15),
    _make_step_field("TRESUsageOutMinNode", 19),
    _make_step_field("TRESUsageOutMinTask", 19),
    _make_step_field("TRESUsageOutTot", 15, "used(fs_disk=number({written_bytes}))"),
    _make_run_field("UID", 6, "uid({uid}, {user})", "whole", few=True),
    _make_run_field("User", 9, "text({user}) or number({uid})", few=True),
    _make_cpu_field("UserCPU", "{user_us}"),
    _make_run_field("WCKey", 10, "text({wckey})", few=True),
    _make_run_field("WCKeyID", 10),
    _make_run_field("WorkDir", 20, "text({work_dir})"),
)
"""Fields of Slurm 22.05 to 26.05.

Those without an expression print nothing: internal numbers of slurmdbd, or values that Steward
does not measure.
"""

REMOVED_FIELDS: Final = (
    _make_run_field("Reserved", 10, f"clock({_PLANNED})", "whole"),
    _make_run_field("ResvCPU", 10, f"clock({_PLANNED} * {{requested_cpus}})", "whole"),
    _make_run_field("ResvCPURAW", 10, f"{_PLANNED} * {{requested_cpus}}", "whole"),
)
"""Field names that Slurm removed, for scripts that still use them."""

STEWARD_FIELDS: Final = (
    _make_field("CgroupSystemCPU", 15, "cpu_time({cgroup_system_us})"),
    _make_field("CgroupUserCPU", 13, "cpu_time({cgroup_user_us})"),
    _make_field("Doubts", 20, "text({doubts})"),
    _make_field("MinorFaults", 11, "number({minor_faults})", "whole"),
    _make_field("PeakMem", 10, "size({peak_bytes})"),
    _make_field("PeakMemNode", 12, "text({peak_node})"),
    _make_field("Source", 10, "text({source})", few=True),
)
"""Fields that only Steward has: printed if named, never part of ALL."""

DEFAULT: Final = "jobid,jobname,partition,account,alloccpus,state,exitcode"
BRIEF: Final = "jobid,state,exitcode"
LONG: Final = (
    "jobid,jobidraw,jobname,partition,maxvmsize,maxvmsizenode,maxvmsizetask,avevmsize,maxrss,"
    "maxrssnode,maxrsstask,averss,maxpages,maxpagesnode,maxpagestask,avepages,mincpu,mincpunode,"
    "mincputask,avecpu,ntasks,alloccpus,elapsed,state,exitcode,avecpufreq,reqcpufreqmin,"
    "reqcpufreqmax,reqcpufreqgov,reqmem,consumedenergy,maxdiskread,maxdiskreadnode,"
    "maxdiskreadtask,avediskread,maxdiskwrite,maxdiskwritenode,maxdiskwritetask,avediskwrite,"
    "reqtres,alloctres,tresusageinave,tresusageinmax,tresusageinmaxn,tresusageinmaxt,"
    "tresusageinmin,tresusageinminn,tresusageinmint,tresusageintot,tresusageoutmax,"
    "tresusageoutmaxn,tresusageoutmaxt,tresusageoutave,tresusageouttot"
)
COMPLETION: Final = "jobidraw,uid,jobname,partition,nnodes,nodelist,state,end"
COMPLETION_BRIEF: Final = "jobidraw,uid,state"
COMPLETION_LONG: Final = "jobidraw,uid,jobname,partition,nnodes,nodelist,state,start,end,timelimit"
"""Default formats: without options, with --brief, --long and --completion."""

WIDEST: Final = 10_000
_MOST_FIELDS: Final = 1000
_WIDEST_LINE: Final = 100_000
"""Maximum width of all fields together, in characters."""


def parse_format(text: str) -> tuple[SacctField, ...]:
    """Return the fields of a format, with their widths.

    A name may be abbreviated, as in Slurm: the first field that begins so is used. A width applies
    to every occurrence of its field.

    Raises:
        AccountingUsage: A field or width is invalid.
    """
    fields: list[SacctField] = []
    widths: dict[str, int] = {}
    for item in text.split(","):
        name, percent, width = item.strip().partition("%")
        if not name:
            continue
        matching = _find_fields(name)
        if percent:
            widths |= dict.fromkeys((field.name for field in matching), _parse_width(width, item))
        fields += matching
        if len(fields) > _MOST_FIELDS:
            raise AccountingUsage(f"too many fields: give at most {_MOST_FIELDS}")
    if not fields:
        raise AccountingUsage("no field in the format: see 'steward sacct --helpformat'")
    sized = [
        msgspec.structs.replace(field, width=widths.get(field.name, field.width))
        for field in fields
    ]
    if sum(abs(field.width) for field in sized) > _WIDEST_LINE:
        raise AccountingUsage(
            f"the fields are wider than {_WIDEST_LINE} characters together: print fewer or "
            "narrower fields"
        )
    return tuple(sized)


def _find_fields(name: str) -> tuple[SacctField, ...]:
    """Return the fields that a name, perhaps abbreviated, stands for."""
    prefix = name.lower()
    if "all".startswith(prefix):
        return SLURM_FIELDS
    for field in (*SLURM_FIELDS, *REMOVED_FIELDS, *STEWARD_FIELDS):
        if field.name.lower().startswith(prefix):
            return (field,)
    raise AccountingUsage(
        f"unknown field {name!r}: 'steward sacct --helpformat' lists all fields", name
    )


def _parse_width(text: str, item: str) -> int:
    """Parse the width of a field."""
    digits = text.removeprefix("-")
    if not digits.isdecimal() or len(digits) > 5 or int(digits) > WIDEST:
        raise AccountingUsage(
            f"invalid field {item!r}: give the width as a number up to {WIDEST}, as in jobid%20",
            item,
        )
    return int(text)


_COLUMN: Final = re.compile(r"\{([a-z_]+)\}")
_MOST_KNOWN: Final = 20_000
_MOST_LETTERS: Final = 64
"""Maximum length of a task expression, as SLURM_BITSTR_LEN defaults to."""

Row = Sequence[Any]


class LinePrinter(msgspec.Struct, frozen=True, kw_only=True):
    """Compiled printer of lines.

    Attributes:
        columns: The columns it needs, in order.
        run: Formats a run's row, including the newline.
        step: Formats a step's row.
    """

    columns: tuple[str, ...]
    run: Callable[[Row], str]
    step: Callable[[Row], str]


def compile_printer(
    fields: Sequence[SacctField],
    request: SacctRequest,
    clock: ClusterClock,
    now: datetime,
    offset: int,
) -> LinePrinter:
    """Compile a format into a printer.

    Args:
        fields: Fields to print.
        request: Style, delimiter and units.
        clock: Formats times.
        now: Present time: the end of runs that have not ended.
        offset: Number of values in a row before the columns; the second is the cluster.
    """
    names = {
        name
        for field in fields
        for expression in (field.run, field.step)
        for name in _find_columns(expression)
    }
    columns = tuple(sorted(names))
    places = {name: f"r[{offset + number}]" for number, name in enumerate(columns)}
    namespace = _build_namespace(request, clock, now)
    # With one time zone there is one function; looking it up per line would double the cost.
    date = "date" if len(clock) == 1 else "dates[r[1]]"

    def compile_columns(get_expression: Callable[[SacctField], str]) -> Callable[[Row], str]:
        parts = []
        for field in fields:
            expression = get_expression(field)
            if field.few and expression:
                parts.append(_build_cached(field, expression, request, places, namespace))
            else:
                parts.append(
                    _place_columns(
                        _build_cell(field, expression, request), places, date, field.kind
                    )
                )
        return _compile_function(
            "r", f"{_build_template(fields, request)!r} % ({', '.join(parts)},)", namespace
        )

    return LinePrinter(
        columns=columns,
        run=compile_columns(lambda field: field.run),
        step=compile_columns(lambda field: field.step),
    )


def _compile_function(names: str, code: str, namespace: dict[str, Any]) -> Callable[..., str]:
    """Compile an expression into a function."""
    function: Callable[..., str] = eval(f"lambda {names}: {code}", namespace)  # noqa: S307 -- our own expressions
    return function


class _ValueCache(dict[Any, str]):
    """Cache of formatted values, of limited size because users choose the values.

    Args:
        make: Formats a value, or a tuple of values.
    """

    def __init__(self, make: Callable[[Any], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> str:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        text = self[key] = self._make(key)
        return text


def _build_cached(
    field: SacctField,
    expression: str,
    request: SacctRequest,
    places: dict[str, str],
    namespace: dict[str, Any],
) -> str:
    """Return an expression that looks up the formatted value of a field in a cache."""
    names = list(dict.fromkeys(_find_columns(expression)))
    key_places = {name: f"k[{number}]" if names[1:] else "k" for number, name in enumerate(names)}
    format_value = _compile_function(
        "k",
        _place_columns(_build_cell(field, expression, request), key_places, "date", field.kind),
        namespace,
    )
    name = f"known{sum(key.startswith('known') for key in namespace)}"
    namespace[name] = _ValueCache(format_value)
    return f"{name}[{', '.join(places[column] for column in names)}]"


def _find_columns(expression: str) -> list[str]:
    """Return the columns in an expression."""
    return _COLUMN.findall(expression)


def _build_cell(field: SacctField, expression: str, request: SacctRequest) -> str:
    """Return the expression of a field's value, cut if too wide for a table."""
    if not expression:
        return "''"
    width = abs(field.width)
    if request.style != "table" or field.kind != "text":
        return f"({expression})"
    return (
        f"(v if len(v := {expression}) <= {width} else v[:{max(width - 1, 0)}] + {'+'[:width]!r})"
    )


def _place_columns(code: str, places: dict[str, str], date: str, kind: str) -> str:
    """Replace each column in an expression by its place in the row."""
    if kind == "date":
        code = code.replace("date(", f"{date}(")
    return _COLUMN.sub(lambda match: places[match[1]], code)


def _build_template(fields: Sequence[SacctField], request: SacctRequest) -> str:
    """Return the format string of a line."""
    if request.style == "table":
        return "".join(f"{_build_spec(field)} " for field in fields) + "\n"
    delimiter = request.delimiter.replace("%", "%%")
    end = delimiter if request.style == "parsable" else ""
    return delimiter.join("%s" for _ in fields) + end + "\n"


def _build_spec(field: SacctField) -> str:
    """Return the format specification of a table cell."""
    width = abs(field.width)
    side = "-" if field.width < 0 else ""
    precision = f".{width}" if field.kind == "date" else ""
    return f"%{side}{width}{precision}s"


def format_header(fields: Sequence[SacctField], request: SacctRequest) -> str:
    """Return the heading, with its newlines."""
    if request.style != "table":
        names = request.delimiter.join(field.name for field in fields)
        return names + (request.delimiter if request.style == "parsable" else "") + "\n"
    cells = [
        f"{field.name[: abs(field.width)]:{'<' if field.width < 0 else '>'}{abs(field.width)}} "
        for field in fields
    ]
    rules = ["-" * abs(field.width) + " " for field in fields]
    return "".join(cells) + "\n" + "".join(rules) + "\n"


def _build_namespace(request: SacctRequest, clock: ClusterClock, now: datetime) -> dict[str, Any]:
    """Return the functions that expressions may call, and nothing else."""
    now_s = int(now.timestamp())
    units = request.units or ("=" if request.noconvert else "")

    def compute_elapsed(start_us: int | None, end_us: int | None, suspended_s: int | None) -> int:
        if not start_us:
            return 0
        end_s = end_us // 1_000_000 if end_us else now_s
        return max(0, end_s - start_us // 1_000_000 - (suspended_s or 0))

    def compute_planned(eligible_us: int | None, start_us: int | None, end_us: int | None) -> int:
        if not eligible_us:
            return 0
        until_us = start_us or end_us
        until_s = until_us // 1_000_000 if until_us else now_s
        return max(0, until_s - eligible_us // 1_000_000)

    return {
        "__builtins__": {"len": len, "str": str},
        "clock": lru_cache(maxsize=4096)(format_span),
        "count": lambda number: values.format_unit_size(number, "=" if request.noconvert else ""),
        "cpu_time": values.format_cpu_time,
        "date": clock[""],
        "dates": clock,
        "elapsed": compute_elapsed,
        "exit_text": values.format_exit_status,
        "label": _format_label,
        "limit_minutes": _format_limit_minutes,
        "limit_text": values.format_time_limit,
        "megabytes": lambda count: values.format_megabytes(count, units),
        "memory": lambda text: values.format_memory(text, units),
        "number": _format_number,
        "path": _format_expanded_path if request.expand_patterns else _format_path,
        "planned": compute_planned,
        "seconds": _format_seconds,
        "size": lambda number: values.format_unit_size(number, units),
        "state_text": values.format_state,
        "shares_text": values.format_oversubscribe,
        "exclusive_text": values.format_exclusive,
        "text": _format_text,
        "total": _add_cpu,
        "tres": lru_cache(maxsize=4096)(
            lambda text: _format_text(values.format_tres_units(text, units))
        ),
        "uid": _resolve_local_uid if request.use_local_uid else _format_uid,
        "used": values.format_usage,
    }


def _format_text(value: str | None) -> str:
    """Return a text safe for a terminal; "" for None."""
    if not value:
        return ""
    return value if value.isascii() and value.isprintable() else escape_line(value)


def _format_path(value: str | None, *_of_job: Any) -> str:
    return _format_text(value)


def _format_expanded_path(value: str | None, *of_job: Any) -> str:
    return _format_text(values.expand_path(value or "", *of_job))


def _format_number(value: int | None) -> str:
    return "" if value is None else str(value)


def _format_seconds(microseconds: int | None) -> str:
    return "" if microseconds is None else format_span(microseconds // 1_000_000)


def _add_cpu(user_us: int | None, system_us: int | None) -> int | None:
    if user_us is None and system_us is None:
        return None
    return (user_us or 0) + (system_us or 0)


def _format_label(label: str) -> str:
    """Format a job name; cut a long task expression as Slurm does."""
    label = escape_line(label)
    if label.endswith("]") and len(label) > _MOST_LETTERS:
        head, _, tasks = label.partition("[")
        kept = tasks[:_MOST_LETTERS].rpartition(",")[0] or tasks[:_MOST_LETTERS]
        return f"{head}[{kept},...]"
    return label


def _format_limit_minutes(seconds: int | None, start_us: int | None) -> str:
    """Format a time limit in minutes."""
    if seconds is None:
        return values.format_time_limit(None, started=bool(start_us))
    return str(seconds // 60)


def _format_uid(uid: int | None, user: str | None) -> str:  # noqa: ARG001 -- as _resolve_local_uid
    return _format_number(uid)


@lru_cache(maxsize=4096)
def _resolve_local_uid(uid: int | None, user: str | None) -> str:
    """Return the uid that a user name resolves to on this host."""
    import pwd

    try:
        return str(pwd.getpwnam(user).pw_uid) if user else _format_number(uid)
    except (KeyError, ValueError):
        return _format_number(uid)
