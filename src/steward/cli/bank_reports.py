"""Printers of ``steward bank statement`` and ``usage``, whose replies are more than a table."""

from steward.bank.actions.reports import StatementReply, UsageReply
from steward.cli.commands import print_reply, prints
from steward.cli.output import Style, format_time, print_line


@prints("bank.statement")
def print_statement(reply: StatementReply, style: Style) -> None:
    """Print a statement; for people with the opening balance."""
    statement = reply.statement
    if statement.account and not style.is_for_programs:
        opening, begin = reply.format_with_unit(statement.opening), statement.begin
        print_line(f"{statement.account}: {opening} at {format_time(begin, reply.zone)}.")
    print_reply(reply, style, "lines")


@prints("bank.usage")
def print_usage(reply: UsageReply, style: Style) -> None:
    """Print sums of charges."""
    print_reply(reply, style, "rows", columns=reply.list_columns())
