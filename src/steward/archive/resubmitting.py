"""What would submit a job again: a shell script made of the record and of the kept script.

The script's own ``#SBATCH`` lines still hold; the options here are what Slurm
showed of the job, so that what was said on the command line is not lost. What
Slurm does not show (22.05 without slurmdbd shows no submit line) cannot be
said again, and the text says so.
"""

import base64
import itertools
import re
import shlex
from collections.abc import Sequence

from steward.jobs import Job
from steward.records import JobRecord
from steward.redact import REDACTED

_MARK = "END_OF_SCRIPT"
_REDACTED = REDACTED.decode()


def submit_again(job: Job, script: bytes, tasks: Sequence[str] = ()) -> str:
    """A shell script that submits the job again.

    Args:
        job: The job; its record tells the options.
        script: The script that it ran, byte for byte.
        tasks: Of an array the tasks that are meant, as numbers or as Slurm's expressions.

    Returns:
        Text for sh; nothing in it is run but ``cd``, ``mktemp``, ``cat`` or ``base64``, ``sbatch``.
    """
    record = job.record
    said = map(shlex.quote, options(job, tasks))
    words = ["sbatch", *said, '"$script"', *_arguments(record)]
    lines = [
        "#!/bin/sh",
        f"# Submits job {_comment(job.label)} of cluster {_comment(job.cluster)} again.",
        *_said(record),
        *([f"cd {shlex.quote(record.work_dir)} || exit 1"] if record.work_dir else []),
        "script=$(mktemp) || exit 1",
        """trap 'rm -f "$script"' EXIT""",
        *_kept(script),
        " ".join(words),
    ]
    return "\n".join(lines) + "\n"


def options(job: Job, tasks: Sequence[str] = ()) -> list[str]:
    """The options of sbatch that say what Slurm showed of a job, and which tasks are meant."""
    record = job.record
    found = {
        "job-name": record.name,
        "account": record.account,
        "partition": record.partition,
        "qos": record.qos,
        "reservation": record.reservation,
        "comment": record.comment,
        "array": _array(tasks),
        "time": _time_limit(record.time_limit_s),
        "nodes": str(record.nodes) if record.nodes else "",
        "ntasks": str(record.tasks) if record.tasks else "",
        "cpus-per-task": _cpus_per_task(record),
        "gpus": _gpus(record.tres_requested),
        "input": _path(job, record.stdin) if record.stdin != "/dev/null" else "",
        "output": _path(job, record.stdout),
        "error": _path(job, record.stderr) if record.stderr != record.stdout else "",
    }
    return [f"--{name}={value}" for name, value in found.items() if value]


def _said(record: JobRecord) -> list[str]:
    lines = []
    if record.submit_line:
        lines.append(f"# It was submitted by: {_comment(record.submit_line)}")
    else:
        lines.append("# Slurm did not show the submit line: options that are neither in the script")
        lines.append("# nor below were lost.")
    if record.dependency:
        lines.append(f"# It depended on: {_comment(record.dependency)}")
    if " " in record.command:
        lines.append("# Slurm shows arguments without quotes: look at those behind the script.")
    if _REDACTED in record.command or _REDACTED in record.comment:
        lines.append(f"# Steward kept no secrets: put yours where it says {_REDACTED}.")
    return lines


def _kept(script: bytes) -> list[str]:
    """Lines that write the script to ``$script``, byte for byte."""
    try:
        text = script.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or not text.endswith("\n"):
        encoded = base64.encodebytes(script).decode("ascii").rstrip("\n")
        return [f"""base64 -d > "$script" <<'{_MARK}'""", encoded, _MARK]
    mark = _MARK
    while f"\n{mark}\n" in f"\n{text}":
        mark += "_"
    return [f"""cat > "$script" <<'{mark}'""", text.removesuffix("\n"), mark]


def _arguments(record: JobRecord) -> list[str]:
    """The words behind the script's path, as far as Slurm lets them be told apart."""
    words = re.findall(rf"(?:{re.escape(_REDACTED)}|[^ ])+", record.command)
    return [shlex.quote(word) for word in words[1:]]


def _array(tasks: Sequence[str]) -> str:
    """Tasks as sbatch's --array takes them: 1-3,7,10-20:2%4."""
    numbers = sorted({int(task) for task in tasks if task.isdecimal()})
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    limit = ""
    for task in tasks:
        if task and not task.isdecimal():
            # What Slurm cut off ("1,3,...") cannot be said again.
            expression, _, most = task.strip("[]").partition("%")
            parts += [part for part in expression.split(",") if part and part != "..."]
            limit = f"%{most}" if most else limit
    return ",".join(parts) + limit if parts else ""


def _time_limit(seconds: int | None) -> str:
    if not seconds:
        return ""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    return f"{days}-{hours:02d}:{minutes:02d}:{left:02d}"


def _cpus_per_task(record: JobRecord) -> str:
    if not record.cpus or not record.tasks or record.cpus % record.tasks:
        return ""
    each = record.cpus // record.tasks
    return str(each) if each > 1 else ""


def _gpus(tres: str) -> str:
    counts = dict(part.partition("=")[::2] for part in tres.split(","))
    return counts.get("gres/gpu", "")


def _path(job: Job, path: str) -> str:
    """A path for output, with the job's id as a pattern again; "" for what is the default."""
    record = job.record
    if not path or (path == "/dev/null" and path != record.stdout):
        return ""
    if record.array_job_id:
        # Which digits were the task's cannot be told: the script's own lines say it.
        return ""
    directory, _, name = path.rpartition("/")
    # Digits among others are not the id: job 1 wrote "run12.out" itself.
    name = re.sub(rf"(?<!\d){job.job_id}(?!\d)", "%j", name.replace("%", "%%"))
    if name == "slurm-%j.out":
        return ""
    return f"{directory.replace('%', '%%')}/{name}" if directory else name


def _comment(text: str) -> str:
    """Text that stays within its line of comment."""
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in text
    )
