"""Printer of ``steward journal status``: number of events, and the consumers."""

from steward.admin.journal import StatusAnswer
from steward.cli import output
from steward.cli.commands import print_reply, prints
from steward.cli.output import format_count


@prints("journal.status")
def print_journal_status(reply: StatusAnswer, style: output.Style) -> None:
    """Print the numbers of recorded and stored events, then the consumers."""
    if not style.is_for_programs:
        kept_verb = "is" if reply.events == 1 else "are"
        kept_text = f"{reply.events} {kept_verb} kept" if reply.events else "none kept"
        recorded_verb = "was" if reply.head == 1 else "were"
        print(f"{format_count(reply.head, 'event')} {recorded_verb} recorded, {kept_text}.")
    print_reply(reply, style, "consumers")
