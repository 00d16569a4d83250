"""``steward rules``: list, check, test, enable and disable automation rules; show their history.

``check FILE`` and ``test --file`` evaluate rule files in this process; all else asks the daemon.
"""

import json
import sys
from typing import Annotated, Any

import typer

from steward.automation.rules.requests import (
    CheckRulesReply,
    CheckRulesRequest,
    ListRulesReply,
    ListRulesRequest,
    RuleProblem,
    RulesHistoryReply,
    RulesHistoryRequest,
    RuleTrialReply,
    RuleTrialRequest,
    RuleTrialResult,
    SwitchRuleReply,
    SwitchRuleRequest,
)
from steward.cli import output
from steward.cli.groups import CONTEXT
from steward.cli.options import LARGEST_NUMBER, CommandCall, with_call_and_columns, with_json_call
from steward.cli.output import (
    find_requested_zone,
    format_count,
    print_json,
    print_table,
)
from steward.core.errors import UsageError

_MAX_EVENT_BYTES = 1024 * 1024
"""Largest event file, in bytes."""

app = typer.Typer(context_settings=CONTEXT, no_args_is_help=True, add_completion=False)

RuleName = Annotated[str, typer.Argument(metavar="RULE", help="Its name.")]


@app.callback()
def rules() -> None:
    """What is done about events: nodes that fail, jobs that end, money that runs out."""


@app.command()
@with_json_call
def check(
    call: CommandCall,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="These files; if none, the configuration's.",
            show_default=False,
        ),
    ] = None,
    stackstorm: Annotated[
        bool,
        typer.Option("--stackstorm", help="Say too what StackStorm lacks or does otherwise."),
    ] = False,
) -> None:
    """Say what is wrong with rules, each with file, line and key.

    The exit code is 1 where anything is.
    """
    reply: CheckRulesReply = (
        _check_files(files) if files else call.send("rules.check", CheckRulesRequest())
    )
    if call.style.json:
        print_json(reply)
    else:
        _print_problems(reply.troubles)
        if stackstorm:
            for problem in reply.differences:
                print(problem.what)
        wrong_files = format_count(len({problem.path for problem in reply.troubles}), "file")
        print(f"{format_count(reply.rules, 'rule')} right, {wrong_files} wrong.")
    if reply.troubles:
        raise typer.Exit(1)


def _check_files(files: list[str]) -> CheckRulesReply:
    """Check rule files in this process."""
    from steward.automation.rules.actions import report_check
    from steward.automation.rules.rulebook import load_rule_file

    load_results = [load_rule_file(path, trusted=True) for path in files]
    rules = [rule for rule, _ in load_results if rule is not None]
    return report_check(rules, [problem for _, problems in load_results for problem in problems])


@app.command("list")
@with_call_and_columns
def list_(call: CommandCall) -> None:
    """List the rules."""
    reply: ListRulesReply = call.send("rules.list", ListRulesRequest())
    if call.style.json:
        print_json(reply)
        return
    print_table(reply.layout, reply.rules, call.style, reply)
    _print_problems(reply.troubles)
    if not reply.running:
        output.print_warning("no rule is run: set enabled = true in [rules]")


@app.command("test")
@with_json_call
def try_(
    call: CommandCall,
    event: Annotated[
        str,
        typer.Argument(
            metavar="EVENT.json|-",
            help="An event as 'steward events --json' prints it, or a trigger and its payload.",
        ),
    ],
    rule: Annotated[
        str, typer.Option("--rule", metavar="NAME", help="Only this rule, whatever it is about.")
    ] = "",
    file: Annotated[
        str, typer.Option("--file", metavar="FILE", help="Only the rule in this file.")
    ] = "",
) -> None:
    """Say what rules would make of an event; nothing is done.

    The exit code is 1 where no rule is about it.
    """
    if rule and file:
        raise UsageError("give either --rule or --file")
    event_data = _read_event(event)
    reply: RuleTrialReply = (
        _test_file(event_data, file)
        if file
        else call.send("rules.test", RuleTrialRequest(event=event_data, rule=rule))
    )
    if call.style.json:
        print_json(reply)
    else:
        print(f"It is a {reply.trigger}.")
        for line in reply.rules:
            _print_trial(line)
    if not any(line.matches for line in reply.rules):
        raise typer.Exit(1)


def _print_trial(trial: RuleTrialResult) -> None:
    """Print whether a rule matches an event, with the action or the reason."""
    state = "" if trial.enabled else " (off)"
    if not trial.matches:
        reason = trial.error or trial.why_not
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
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_EVENT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_EVENT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", path) from error
    if len(data) > _MAX_EVENT_BYTES:
        raise UsageError(f"{path} is larger than any event", path)
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}", path) from error
    if not isinstance(decoded, dict):
        raise UsageError(f"{path} holds no event: it is no object", path)
    return decoded


@app.command()
@with_json_call
def enable(call: CommandCall, rule: RuleName) -> None:
    """Switch a rule on, whatever its file says."""
    _switch_rule(call, "rules.enable", rule)


@app.command()
@with_json_call
def disable(call: CommandCall, rule: RuleName) -> None:
    """Switch a rule off, whatever its file says; what waits is not done any more."""
    _switch_rule(call, "rules.disable", rule)


def _switch_rule(call: CommandCall, name: str, rule: str) -> None:
    """Enable or disable a rule and print its state."""
    reply: SwitchRuleReply = call.send(name, SwitchRuleRequest(rule=rule))
    if call.style.json:
        print_json(reply)
        return
    state = "on" if reply.enabled else "off"
    print(f"{reply.rule} is {state}{', as it was' if reply.was == reply.enabled else ''}.")


@app.command()
@with_call_and_columns
def history(
    call: CommandCall,
    execution: Annotated[
        int,
        typer.Argument(
            metavar="[ID]",
            min=0,
            max=LARGEST_NUMBER,
            help="Only this execution.",
            show_default=False,
        ),
    ] = 0,
    rule: Annotated[str, typer.Option("--rule", metavar="NAME", help="Only this rule's.")] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", "-M", metavar="NAME", help="Only on this cluster.")
    ] = "",
    status: Annotated[
        str,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="waiting, started, ended; succeeded, failed, timeout, unknown, dry-run, "
            "held-back.",
        ),
    ] = "",
    since: Annotated[
        str,
        typer.Option("--starttime", "--since", "-S", metavar="TIME", help="Decided since."),
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-L", min=1, max=100_000, help="How many at most.")
    ] = 100,
) -> None:
    """Show what rules did, newest first."""
    request = RulesHistoryRequest(
        id=execution, rule=rule, cluster=cluster, status=status, since=since, limit=limit,
        zone=find_requested_zone(),
    )  # fmt: skip
    reply: RulesHistoryReply = call.send("rules.history", request)
    if call.style.json:
        print_json(reply)
    elif reply.executions or call.style.parsable:
        print_table(reply.layout, reply.executions, call.style, reply)
    else:
        output.print_note("No rule has acted.")


def _print_problems(problems: tuple[RuleProblem, ...]) -> None:
    """Print problems of rules as warnings."""
    for problem in problems:
        output.print_warning(problem.what)
