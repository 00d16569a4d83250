"""``steward archive``: the group of commands about kept scripts."""

import typer

from steward.cli.lazy import ADMINISTRATORS, CONTEXT, EVERYONE, OPERATORS, Entry, LazyGroup

_FIND = "steward.cli.archive_find"
_SHOW = "steward.cli.archive_show"
_KEEP = "steward.cli.archive_keep"
_FEED = "steward.cli.archive_feed"
_SINKS = "steward.cli.archive_sinks"
_CONSUME = "steward.cli.archive_consume"


class ArchiveGroup(LazyGroup):
    """The commands about kept scripts."""

    entries = (
        Entry("list", EVERYONE, "List jobs, newest first.", _FIND, "list_jobs"),
        Entry("search", EVERYONE, "Find scripts by what is in them.", _FIND, "search"),
        Entry("show", EVERYONE, "Show a job and the script it ran.", _SHOW, "show"),
        Entry("env", EVERYONE, "Show the environment a job was submitted with.", _SHOW, "env"),
        Entry("diff", EVERYONE, "Compare the scripts of two jobs.", _SHOW, "diff"),
        Entry("export", EVERYONE, "Write scripts of jobs to a directory or tar.", _KEEP, "export"),
        Entry("verify", OPERATORS, "Recompute every checksum.", _KEEP, "verify"),
        Entry("secrets", OPERATORS, "List scripts that look to hold a secret.", _KEEP, "secrets"),
        Entry("purge", OPERATORS, "Remove scripts for good, everywhere.", _KEEP, "purge"),
        Entry("sinks", OPERATORS, "Show how each sink stands.", _SINKS, "sinks"),
        Entry("resend", OPERATORS, "Have a sink archive scripts again.", _SINKS, "resend"),
        Entry("watch", ADMINISTRATORS, "Keep one cluster's scripts, alone.", _FEED, "watch"),
        Entry("consume", ADMINISTRATORS, "Keep what others send to Kafka.", _CONSUME, "consume"),
        Entry("import", ADMINISTRATORS, "Take over another tool's archive.", _FEED, "import_"),
        Entry("reindex", ADMINISTRATORS, "Rebuild the catalogue from files.", _KEEP, "reindex"),
    )


app = typer.Typer(
    cls=ArchiveGroup, context_settings=CONTEXT, no_args_is_help=True, add_completion=False
)


@app.callback()
def archive() -> None:
    """Find, show and compare the scripts that jobs ran."""
