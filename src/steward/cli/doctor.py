"""``steward doctor``: run the health checks and print findings with fixes.

The daemon runs the checks (``doctor.run``), or this process as root or Steward's user. The command
itself checks the configuration file, because only the caller knows its path.
"""

import os
import socket
from collections import Counter
from typing import Annotated

import click
import msgspec

from steward import __version__
from steward.admin.doctor.checks import CHECKS, HealthCheck
from steward.admin.doctor.findings import (
    CheckFinding,
    DoctorAnswer,
    DoctorRequest,
    find_worst_status,
    make_wrong,
)
from steward.admin.doctor.host_checks import check_config_file
from steward.cli import options
from steward.cli.errors import FAILED
from steward.cli.options import CommandCall, reject_empty, with_call
from steward.cli.output import format_count, print_json, print_table
from steward.cli.parameters import Option
from steward.core.config.reader import DEFAULT_PATH, ConfigError
from steward.core.events import utc_now
from steward.core.printable import escape_line


@with_call
def app(
    call: CommandCall,
    only: Annotated[
        list[str] | None,
        Option(
            "--only",
            metavar="CHECK,…",
            help="Names of the checks to run; see --list. Default: all.",
            callback=reject_empty,
        ),
    ] = None,
    list_: Annotated[bool, Option("--list", help="List the checks.")] = False,
) -> None:
    """Check the installation and suggest fixes.

    The exit code is 1 if a check finds an error; warnings do not count. Run it as root or as
    Steward's user: then neither the daemon nor slurmctld needs to run.
    """
    if list_:
        _print_checks(call)
        return
    reply = _run_checks(call, options.split_lists(only))
    if call.style.json:
        print_json(reply)
    else:
        print_table(reply.layout, reply.findings, call.style)
        if not call.style.is_for_programs:
            _print_fixes(reply)
    if reply.status == "wrong":
        raise click.exceptions.Exit(FAILED)


def _run_checks(call: CommandCall, only: tuple[str, ...]) -> DoctorAnswer:
    """Return the findings; for an unusable configuration, only that finding."""
    path = call.place.config or DEFAULT_PATH
    try:
        reply: DoctorAnswer = call.send("doctor.run", DoctorRequest(only=only))
    except ConfigError as error:
        return make_doctor_answer(
            (
                mark_as_file_check(
                    make_wrong(path, str(error), f"steward config check --config {path}")
                ),
            )
        )
    if only or not os.path.exists(path):
        return reply
    # Only the caller knows the file's path: the daemon's settings do not name it.
    findings = (mark_as_file_check(check_config_file(path)), *reply.findings)
    return msgspec.structs.replace(
        reply,
        findings=findings,
        status=find_worst_status(tuple(finding.status for finding in findings)),
    )


def mark_as_file_check(finding: CheckFinding) -> CheckFinding:
    """Mark a finding as one of the command's own check of the configuration file."""
    return msgspec.structs.replace(finding, check="file")


def make_doctor_answer(findings: tuple[CheckFinding, ...]) -> DoctorAnswer:
    """Return a reply with only these findings, when nothing else could be checked."""
    return DoctorAnswer(
        findings=findings,
        status=find_worst_status(tuple(finding.status for finding in findings)),
        host=socket.gethostname(),
        steward=__version__,
        taken_at=utc_now(),
        took_s=0.0,
    )


def _print_fixes(reply: DoctorAnswer) -> None:
    """Print the fix of each warning and failure, and the summary."""
    for finding in reply.findings:
        if finding.status not in ("warning", "wrong") or not finding.fix:
            continue
        subject = f"{finding.check} {finding.object}".strip()
        print(f"\n{escape_line(subject)}: {escape_line(finding.finding)}")
        for line in finding.fix:
            print(f"    {escape_line(line)}")
    print(f"\n{_summarize_findings(reply)}")


def _summarize_findings(reply: DoctorAnswer) -> str:
    """Count the findings by status."""
    counts = Counter(finding.status for finding in reply.findings)
    parts = [
        f"{counts['wrong']} wrong",
        format_count(counts["warning"], "warning"),
        f"{counts['ok']} ok",
    ]
    if counts["skipped"]:
        parts.append(f"{counts['skipped']} skipped")
    return ", ".join(parts) + "."


def _print_checks(call: CommandCall) -> None:
    """List the checks."""
    if call.style.json:
        checks = [{"name": check.name, "help": check.help} for check in CHECKS]
        print_json({"version": 1, "checks": checks})
        return
    print_table(HealthCheck.layout, CHECKS, call.style)
