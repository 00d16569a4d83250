"""Job resubmission: parse a submit line, and write a shell script that submits the job again.

:func:`parse_submit_line` splits Slurm's SubmitLine into sbatch's options and the script's arguments
(:class:`SubmitLine`). Slurm joins the words of the command line with blanks and drops the quotes,
so word boundaries are lost. The table of sbatch's options and the job record restore them; where
neither decides, the result names the doubtful option. :func:`write_resubmission_script` writes the
script; without a submit line, :func:`derive_options` derives options from the job record. Used by
``archive.show``.
"""

import base64
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from steward.core.errors import UsageError
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED
from steward.jobs import Job
from steward.slurm.environment import split_entries
from steward.slurm.tres import parse_tres

_WORD: Final = re.compile(rf"(?:{re.escape(REDACTED.decode())}|[^ ])+")
_WRAPPED: Final = b"# This script was created by sbatch --wrap.\n\n"
_MAX_SUBMIT_LINE: Final = 1 << 16
"""Longest submit line that is parsed, in characters: each word is looked up in the table."""


class SbatchOption(msgspec.Struct, frozen=True):
    """One option of sbatch; ``value`` is None for a flag."""

    name: str
    value: str | None = None

    @property
    def word(self) -> str:
        """Return the option as one word of a command line."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


class SubmitLine(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed submit line.

    Attributes:
        components: Options of each component of a het job; one tuple for any other job.
        arguments: Arguments of the script.
        doubtful_options: Options whose values may end elsewhere; ``script`` for the script's name.
    """

    components: tuple[tuple[SbatchOption, ...], ...]
    arguments: tuple[str, ...] = ()
    doubtful_options: tuple[str, ...] = ()


def parse_submit_line(line: str, record: JobRecord, script: bytes) -> SubmitLine | None:
    """Parse a submit line into sbatch's options and the script's arguments.

    Args:
        line: Slurm's SubmitLine.
        record: The job record.
        script: The archived script.

    Returns:
        None if the line is not sbatch's, or contains an unknown option.
    """
    if len(line) > _MAX_SUBMIT_LINE:
        return None
    words = list(_WORD.finditer(line))
    if not words or os.path.basename(words[0][0]) != "sbatch":
        return None
    try:
        return _SubmitLineParser(line, words, record, script).read()
    except UsageError:
        return None


def extract_wrapped_command(script: bytes) -> str | None:
    """Return the command of a script made by sbatch --wrap; None for any other script."""
    _, mark, text = script.partition(_WRAPPED)
    return text.decode("utf-8", "replace").rstrip("\n") if mark else None


class _SubmitLineParser:
    """Parser of one submit line: a single pass over its words."""

    def __init__(
        self, line: str, words: list["re.Match[str]"], record: JobRecord, script: bytes
    ) -> None:
        self._line = line
        self._words = words
        wrapped = extract_wrapped_command(script)
        self._known_texts: Mapping[str, str] = {
            "job-name": record.name,
            "comment": record.comment,
            "wrap": wrapped or "",
            "chdir": record.work_dir,
            "extra": record.extra,
        }
        self._script_index = len(words) if wrapped is not None else _find_script_word(words, record)
        self._components: list[list[SbatchOption]] = [[]]
        self._doubtful: list[str] = []

    def read(self) -> SubmitLine:
        """Parse all words."""
        index, end = 1, len(self._words) if self._script_index is None else self._script_index
        while index < end:
            word = self._words[index][0]
            if word == ":":
                self._components.append([])
                index += 1
            elif word.startswith("-") and word not in ("-", "--"):
                index = self._parse_option_word(index, end)
            elif word == "--":
                index += 1
                end = self._script_index = (
                    index if self._script_index is None else self._script_index
                )
            elif self._script_index is None:
                end = self._script_index = index
                self._doubtful.append("script")
            else:
                raise UsageError(f"unknown sbatch option {word!r}", word)
        arguments = self._words[end + 1 :] if self._script_index is not None else []
        return SubmitLine(
            components=tuple(map(tuple, self._components)),
            arguments=tuple(word[0] for word in arguments),
            doubtful_options=tuple(dict.fromkeys(self._doubtful)),
        )

    def _parse_option_word(self, index: int, end: int) -> int:
        """Parse the options in one word; return the index of the next word."""
        from steward.slurm.sbatch_options import VALUE_OPTIONS, expand_option, split_letters

        match = self._words[index]
        word, next_index = match[0], index + 1
        if word.startswith("--"):
            name = expand_option(word[2:].partition("=")[0])
            if "=" in word:
                return self._parse_value(name, match.start() + word.index("=") + 1, next_index, end)
            if name in VALUE_OPTIONS:
                return self._parse_value(
                    name, self._get_word_start(next_index), next_index + 1, end
                )
            self._components[-1].append(SbatchOption(name))
            return next_index
        for name, attached in split_letters(word):
            if attached is None:
                return self._parse_value(
                    name, self._get_word_start(next_index), next_index + 1, end
                )
            if attached:
                return self._parse_value(name, match.end() - len(attached), next_index, end)
            self._components[-1].append(SbatchOption(name))
        return next_index

    def _get_word_start(self, index: int) -> int:
        if index >= len(self._words):
            raise UsageError("the last option lacks its value")
        return self._words[index].start()

    def _parse_value(self, name: str, start: int, next_index: int, end: int) -> int:
        """Parse an option's value from a character of the line; return the next word's index."""
        value_end = self._words[next_index - 1].end()
        text = self._known_texts.get(name, "")
        if len(text) > value_end - start and self._line.startswith(text, start):
            text_end = start + len(text)
            if text_end == len(self._line) or self._line[text_end] == " ":
                while next_index < end and self._words[next_index].start() < text_end:
                    next_index += 1
                value_end = text_end
        while (
            self._script_index is not None
            and next_index < end
            and not self._begins_option(next_index)
        ):
            # A word that is neither an option nor the script belongs to the value.
            value_end = self._words[next_index].end()
            next_index += 1
            self._doubtful.append(f"--{name}")
        self._components[-1].append(SbatchOption(name, self._line[start:value_end]))
        return next_index

    def _begins_option(self, index: int) -> bool:
        """Return whether a word begins an option, or separates het components."""
        from steward.slurm.sbatch_options import expand_option, split_letters

        word = self._words[index][0]
        if word == ":":
            return True
        if not word.startswith("-") or word == "-":
            return False
        try:
            if word.startswith("--"):
                return word == "--" or bool(expand_option(word[2:].partition("=")[0]))
            return bool(list(split_letters(word)))
        except UsageError:
            return False


def _find_script_word(words: list["re.Match[str]"], record: JobRecord) -> int | None:
    """Return the index of the script's name among the words; None if Slurm does not show it."""
    command = [match[0] for match in _WORD.finditer(record.command)]
    index = len(words) - len(command)
    if not command or index < 1:
        return None
    name = words[index][0]
    is_name = name == command[0] or os.path.basename(name) == os.path.basename(command[0])
    return index if is_name and [word[0] for word in words[index + 1 :]] == command[1:] else None


_MARK = "END_OF_SCRIPT"
_REDACTED = REDACTED.decode()
_VARIABLE: Final = re.compile(rb"SBATCH_[A-Z0-9_]{1,64}")
_UNSET_LOOP: Final = """for name in $(env | sed -n 's/^\\(SBATCH_[A-Z0-9_]*\\)=.*/\\1/p'); do"""
_OMITTED_OPTIONS: Final = frozenset({"chdir", "dependency", "wrap"})
"""Options of a submit line that are not repeated: the script changes directory itself, other jobs
are over, and the archived script holds the command of --wrap."""
_EMPTY_VALUES: Final = ("", "(null)")
_CHDIR_OPTION: Final = re.compile(rb"^#SBATCH.*(?:-D|--chd)", re.MULTILINE)
_ARRAY_OPTION: Final = re.compile(rb"^#SBATCH.*(?:-a|--ar)", re.MULTILINE)
_SHARING_OPTIONS: Final = {
    "NO": SbatchOption("exclusive"),
    "USER": SbatchOption("exclusive", "user"),
    "MCS": SbatchOption("exclusive", "mcs"),
    "TOPO": SbatchOption("exclusive", "topo"),
    "YES": SbatchOption("oversubscribe"),
}


def write_resubmission_script(
    job: Job, script: bytes, tasks: Sequence[str] = (), environment: bytes = b""
) -> str:
    """Write a shell script that submits the job again.

    Args:
        job: The job; its record gives the options.
        script: The script that it ran, byte for byte.
        tasks: Tasks of an array, as numbers or as Slurm's expressions.
        environment: The archived environment, in the spool's format.

    Returns:
        Text for sh; nothing in it is run but ``cd``, ``mktemp``, ``cat`` or ``base64``, ``sbatch``,
        and ``env`` and ``sed``, which find the caller's own ``SBATCH_*``.
    """
    record = job.record
    line = parse_submit_line(record.submit_line, record, script) if record.submit_line else None
    words = [option.word for option in derive_options(job, tasks)] if line is None else []
    arguments = _parse_arguments(record)
    if line is not None:
        words, arguments = _list_submit_words(job, line, tasks, script), list(line.arguments)
    lines = [
        "#!/bin/sh",
        (
            f"# Submits job {_escape_comment(job.label)} of cluster "
            f"{_escape_comment(job.cluster)} again."
        ),
        *_write_remarks(record, line),
        *([f"cd {shlex.quote(record.work_dir)} || exit 1"] if record.work_dir else []),
        *_write_variables(environment),
        "script=$(mktemp) || exit 1",
        """trap 'rm -f "$script"' EXIT""",
        *_write_script_lines(script),
        " ".join(["sbatch", *map(shlex.quote, words), '"$script"', *map(shlex.quote, arguments)]),
    ]
    return "\n".join(lines) + "\n"


def derive_options(job: Job, tasks: Sequence[str] = ()) -> list[SbatchOption]:
    """Derive sbatch's options from a job record, for the given array tasks."""
    record = job.record
    values = {
        "job-name": record.name,
        "account": record.account,
        "partition": record.partition,
        "qos": record.qos,
        "reservation": record.reservation,
        "wckey": record.wckey,
        "comment": record.comment,
        "extra": record.extra,
        "container": record.container,
        "array": _format_array_option(tasks),
        "time": _format_time_option(record.time_limit_s),
        "nodes": str(record.nodes) if record.nodes else "",
        "ntasks": str(record.tasks) if record.tasks else "",
        "cpus-per-task": _compute_cpus_per_task(record),
        "constraint": record.constraints,
        "licenses": record.licenses,
        **_derive_memory_option(record),
        **_derive_device_options(record),
        "input": _restore_path_pattern(job, record.stdin) if record.stdin != "/dev/null" else "",
        "output": _restore_path_pattern(job, record.stdout),
        "error": _restore_path_pattern(job, record.stderr)
        if record.stderr != record.stdout
        else "",
    }
    options = [
        SbatchOption(name, value) for name, value in values.items() if value not in _EMPTY_VALUES
    ]
    share = _SHARING_OPTIONS.get(record.oversubscribe)
    return options if share is None else [*options, share]


def _list_submit_words(
    job: Job, line: SubmitLine, tasks: Sequence[str], script: bytes
) -> list[str]:
    """Return the options of a submit line, adjusted to the new script's path and directory."""
    record = job.record
    added = []
    given_names = {option.name for options in line.components for option in options}
    omitted = _OMITTED_OPTIONS
    if record.name and "job-name" not in {option.name for option in line.components[0]}:
        added.append(
            SbatchOption("job-name", record.name)
        )  # otherwise it would be that of the temporary file
    if record.work_dir and ("chdir" in given_names or _CHDIR_OPTION.search(script)):
        added.append(SbatchOption("chdir", record.work_dir))
    array = _format_array_option(tasks)
    is_task = len(tasks) == 1 and tasks[0].isdecimal()
    if array and (is_task or ("array" not in given_names and not _ARRAY_OPTION.search(script))):
        added.append(SbatchOption("array", array))
        omitted |= {"array"}
    words = [option.word for option in added]
    for number, component in enumerate(line.components):
        words += [":"] if number else []
        words += [option.word for option in component if option.name not in omitted]
    return words


def _write_remarks(record: JobRecord, line: SubmitLine | None) -> list[str]:
    """Return comment lines: the original submit line, doubts, dependency and redacted secrets."""
    lines = []
    if record.submit_line:
        lines.append(f"# It was submitted by: {_escape_comment(record.submit_line)}")
    if line is None:
        reason = "cannot be read" if record.submit_line else "is not known"
        lines.append(
            f"# The submit line {reason}: these are the options that Slurm shows of the job;"
        )
        lines.append("# others that are not in the script were lost.")
        if " " in record.command:
            lines.append("# Slurm shows arguments without quotes: check those after the script.")
    elif line.doubtful_options or line.arguments:
        doubtful = [*line.doubtful_options, *(["the script's arguments"] if line.arguments else [])]
        lines.append(f"# Slurm shows words without quotes: check {', '.join(doubtful)}.")
    if record.dependency:
        lines.append(f"# It depended on: {_escape_comment(record.dependency)}")
    if any(_REDACTED in text for text in (record.command, record.comment, record.submit_line)):
        lines.append(f"# Steward stores no secrets: put yours in place of {_REDACTED}.")
    return lines


def _write_variables(environment: bytes) -> list[str]:
    """Return shell lines that set the job's ``SBATCH_*`` variables and unset all others."""
    lines = [_UNSET_LOOP, '    unset "$name"', "done"]
    for name, value in split_entries(environment) if environment else ():
        if value is None or _VARIABLE.fullmatch(name) is None:
            continue
        key = name.decode("ascii")
        try:
            text = value.decode()
        except UnicodeDecodeError:
            lines.append(f"# {key} is not UTF-8: set it to its former value.")
            continue
        if value == REDACTED:
            lines.append(f"# Steward stores no secrets: set {key} to its former value.")
        else:
            lines.append(f"export {key}={shlex.quote(text)}")
    return lines


def _write_script_lines(script: bytes) -> list[str]:
    """Return shell lines that write the script to ``$script``, byte for byte."""
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


def _parse_arguments(record: JobRecord) -> list[str]:
    """Return the words after the script's path, as far as Slurm's Command separates them."""
    words = re.findall(rf"(?:{re.escape(_REDACTED)}|[^ ])+", record.command)
    return words[1:]


def _format_array_option(tasks: Sequence[str]) -> str:
    """Format tasks for sbatch's --array: 1-3,7,10-20:2%4."""
    numbers = sorted({int(task) for task in tasks if task.isdecimal()})
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        sequence = [number for _, number in group]
        parts.append(str(sequence[0]) if len(sequence) == 1 else f"{sequence[0]}-{sequence[-1]}")
    limit = ""
    for task in tasks:
        if task and not task.isdecimal():
            # The part that Slurm cut off ("1,3,...") is lost.
            expression, _, max_running = task.strip("[]").partition("%")
            parts += [part for part in expression.split(",") if part and part != "..."]
            limit = f"%{max_running}" if max_running else limit
    return ",".join(parts) + limit if parts else ""


def _format_time_option(seconds: int | None) -> str:
    if not seconds:
        return ""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    return f"{days}-{hours:02d}:{minutes:02d}:{left:02d}"


def _compute_cpus_per_task(record: JobRecord) -> str:
    """Return the number of CPUs per task; "" if it is not a whole number or set per TRES."""
    cpus = record.requested_cpus or record.cpus
    if not cpus or not record.tasks or cpus % record.tasks or record.cpus_per_tres:
        return ""
    return str(cpus // record.tasks)


def _derive_memory_option(record: JobRecord) -> dict[str, str]:
    """Convert Slurm's total memory to the option that requests the same total."""
    mib, nodes = parse_tres(record.tres_requested).get("mem", 0), record.nodes or 1
    if not mib or record.mem_per_tres:
        return {}
    cpus = parse_tres(record.tres_requested).get("cpu", 0)
    if mib % nodes and cpus and not mib % cpus:
        return {"mem-per-cpu": f"{mib // cpus}M"}
    return {"mem": f"{-(-mib // nodes)}M"}


def _derive_device_options(record: JobRecord) -> dict[str, str]:
    """Return the options for GPUs and other generic resources, per job, node, socket and task."""
    options = {
        "gpus": _format_gpus(record.tres_per_job),
        "gres": _format_gres_option(record.tres_per_node),
        "gpus-per-socket": _format_gpus(record.tres_per_socket),
        "gpus-per-task": _format_gpus(record.tres_per_task),
        "cpus-per-gpu": _format_gpus(record.cpus_per_tres),
        "mem-per-gpu": _format_gpus(record.mem_per_tres),
    }
    if not any(options.values()):
        total = parse_tres(record.tres_requested).get("gres/gpu", 0)
        options["gpus"] = str(total) if total else ""
    return options


def _format_gres_option(text: str) -> str:
    """Convert ``gres/gpu:a100:2,gres:shard:1`` to --gres syntax: ``gpu:a100:2,shard:1``."""
    parts = (re.sub(r"^gres[:/]", "", part) for part in text.split(",") if part)
    return ",".join(part.replace("=", ":") for part in parts)


def _format_gpus(text: str) -> str:
    """Return the GPUs of a TRES text in --gpus syntax: ``a100:2``."""
    parts = _format_gres_option(text).split(",")
    return ",".join(part.removeprefix("gpu:") for part in parts if part.startswith("gpu:"))


def _restore_path_pattern(job: Job, path: str) -> str:
    """Restore the job id pattern in an output path; "" for the default path."""
    record = job.record
    if not path or (path == "/dev/null" and path != record.stdout):
        return ""
    if record.array_job_id:
        # It is unknown which digits were the task's: the script's own options tell.
        return ""
    directory, _, name = path.rpartition("/")
    # Digits within a longer number are not the job id: job 1 wrote "run12.out" itself.
    name = re.sub(rf"(?<!\d){job.job_id}(?!\d)", "%j", name.replace("%", "%%"))
    if name == "slurm-%j.out":
        return ""
    return f"{directory.replace('%', '%%')}/{name}" if directory else name


def _escape_comment(text: str) -> str:
    """Escape text so that it stays within its comment line."""
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in text
    )
