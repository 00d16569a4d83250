"""Printers of ``steward bank statement`` and ``usage``, whose replies are more than a table."""

from steward.bank.actions.reports import StatementReply, UsageReply
from steward.cli.commands import print_reply, prints
from steward.cli.output import Style, format_time, print_line, print_note, print_table


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
    """Print sums of charges; for people with the total, or a line that there are none."""
    if not (reply.rows or style.is_for_programs):
        begin, end = (format_time(moment, reply.zone) for moment in (reply.since, reply.until))
        visibility = "" if reply.is_all else " to you or to accounts that you own or coordinate"
        print_line(f"No run that started from {begin} to {end} was charged{visibility}.")
        return
    print_table(reply.list_columns(), reply.rows, style, reply)
    if not style.is_for_programs:
        print_note(f"{reply.format_with_unit(reply.total)} in all.")
