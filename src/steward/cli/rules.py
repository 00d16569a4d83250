"""``steward rules check`` and ``steward rules test``, which read files of the caller.

Files of rules are evaluated in this process; the daemon evaluates the configured ones.
"""

import json
from typing import Annotated, Any

import click

from steward.automation.rules.requests import (
    CheckRulesReply,
    CheckRulesRequest,
    RuleTrialReply,
    RuleTrialRequest,
    RuleTrialResult,
)
from steward.cli import output
from steward.cli.options import CommandCall, read_input_file, with_json_call
from steward.cli.output import format_count, print_json
from steward.cli.parameters import Argument, Option
from steward.core.errors import UsageError

_MAX_EVENT_BYTES = 1024 * 1024
"""Largest event file, in bytes."""


@with_json_call
def check(
    call: CommandCall,
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="FILE",
            help="Rule files. Default: all files of the configured directories.",
            show_default=False,
        ),
    ] = None,
    stackstorm: Annotated[
        bool,
        Option(
            "--stackstorm",
            help="Also list fields and operators that StackStorm would treat differently.",
        ),
    ] = False,
) -> None:
    """Run the action ``rules.check`` and print its reply.

    Each error comes with file, line and key. The exit code is 1 if a file has errors.
    """
    reply: CheckRulesReply = (
        _check_files(files) if files else call.send("rules.check", CheckRulesRequest())
    )
    if call.style.json:
        print_json(reply)
    else:
        for problem in reply.problems:
            output.print_warning(problem.problem)
        if stackstorm:
            for problem in reply.differences:
                print(problem.problem)
        wrong_files = format_count(len({problem.path for problem in reply.problems}), "file")
        print(f"{format_count(reply.rules, 'rule')} valid, {wrong_files} invalid.")
    if reply.problems:
        raise click.exceptions.Exit(1)


def _check_files(files: list[str]) -> CheckRulesReply:
    """Check rule files in this process."""
    from steward.automation.rules.actions import report_check
    from steward.automation.rules.rulebook import load_rule_file

    load_results = [load_rule_file(path, trusted=True) for path in files]
    rules = [rule for rule, _ in load_results if rule is not None]
    return report_check(rules, [problem for _, problems in load_results for problem in problems])


@with_json_call
def try_(
    call: CommandCall,
    event: Annotated[
        str,
        Argument(
            metavar="EVENT.json|-",
            help=(
                "File with one event, as 'steward events tail --json' prints it, or "
                '{"trigger": TYPE, "payload": {…}}.'
            ),
        ),
    ],
    rule: Annotated[
        str,
        Option(
            "--rule",
            metavar="NAME",
            help="Test only this rule, even if its trigger differs.",
        ),
    ] = "",
    file: Annotated[
        str, Option("--file", metavar="FILE", help="Test only the rule in this file.")
    ] = "",
) -> None:
    """Run the action ``rules.test`` and print its reply.

    The exit code is 1 if no rule matches.
    """
    if rule and file:
        raise UsageError("--rule and --file exclude each other: give one of them")
    event_data = _read_event(event)
    reply: RuleTrialReply = (
        _test_file(event_data, file)
        if file
        else call.send("rules.test", RuleTrialRequest(event=event_data, rule=rule))
    )
    if call.style.json:
        print_json(reply)
    else:
        print(f"Trigger: {reply.trigger}.")
        for line in reply.rules:
            _print_trial(line)
    if not any(line.matches for line in reply.rules):
        raise click.exceptions.Exit(1)


def _print_trial(trial: RuleTrialResult) -> None:
    """Print whether a rule matches an event, with the action or the reason."""
    state = "" if trial.enabled else " (off)"
    if not trial.matches:
        reason = trial.error or trial.reason
        print(f"{trial.rule}{state}: no, {output.escape_unprintable(reason)}")
        return
    print(f"{trial.rule}{state}: yes, {trial.action}")
    if trial.error:
        print(f"    {output.escape_unprintable(trial.error)}")
    for name, value in trial.parameters.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print(f"    {name}: {output.escape_unprintable(text)}")


def _test_file(event: dict[str, Any], path: str) -> RuleTrialReply:
    """Test a rule file against an event in this process."""
    from steward.automation.rules.actions import try_rules
    from steward.automation.rules.rulebook import load_rule_file

    rule, problems = load_rule_file(path, trusted=True)
    if rule is None:
        raise UsageError(problems[0].what, path)
    enabled_names = {rule.name} if rule.enabled else set()
    return try_rules(event, [rule], enabled_names, include_all=True)


def _read_event(path: str) -> dict[str, Any]:
    """Read an event as JSON from a file or standard input."""
    try:
        decoded = json.loads(read_input_file(path, _MAX_EVENT_BYTES).text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}", path) from error
    if not isinstance(decoded, dict):
        raise UsageError(f"{path} contains no event: write one JSON object", path)
    return decoded
