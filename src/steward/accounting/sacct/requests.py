"""sacct request and reply: the structs that travel over the daemon's socket.

The daemon formats lines and sends them as text, in pieces of some hundred kilobytes: 400,000 lines
as objects would take ten times as long. So the request includes the time format from the user's
environment.
"""

from typing import Annotated, Literal

import msgspec

from steward.core.actions import described

_Word = Annotated[str, msgspec.Meta(max_length=1024)]
_Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=100_000)]


class SacctRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request of accounting.sacct: lines of jobs and steps, as text.

    Filters hold what the user typed, see sacct(1).
    """

    clusters: Annotated[_Words, described("Cluster names; the first configured one if empty.")] = ()
    all_clusters: Annotated[bool, described("All clusters.")] = False
    users: Annotated[_Words, described("User names or uids; the requester's uid if empty.")] = ()
    all_users: Annotated[bool, described("All users that the requester may see.")] = False
    groups: Annotated[_Words, described("Group names or gids.")] = ()
    accounts: Annotated[_Words, described("Accounts charged.")] = ()
    partitions: Annotated[_Words, described("Partitions.")] = ()
    qos: Annotated[_Words, described("QOS names.")] = ()
    wckeys: Annotated[_Words, described("Wckeys.")] = ()
    names: Annotated[_Words, described("Exact job names.")] = ()
    states: Annotated[
        _Words, described("Only jobs in one of these states at some time of the window.")
    ] = ()
    reasons: Annotated[
        _Words, described("Only jobs whose last pending reason is one of these.")
    ] = ()
    constraints: Annotated[
        _Words, described("Only jobs that requested all of these features.")
    ] = ()
    flags: Annotated[_Words, described("Only jobs with one of these flags.")] = ()
    jobs: Annotated[
        _Words,
        described("Jobs or steps: ``123``, ``123_4``, ``123_[1-3]``, ``123+1``, ``123.batch``."),
    ] = ()
    nodelist: Annotated[_Word, described("Only jobs that ran on one of these nodes.")] = ""
    nnodes: Annotated[_Word, described("Number of nodes: ``min[-max]``.")] = ""
    ncpus: Annotated[_Word, described("Number of CPUs: ``min[-max]``.")] = ""
    timelimit_min: Annotated[
        _Word, described("Time limit; the lowest one if ``timelimit_max`` is given.")
    ] = ""
    timelimit_max: Annotated[_Word, described("Maximum time limit.")] = ""
    starttime: Annotated[_Word, described("Start of the window, as typed.")] = ""
    endtime: Annotated[_Word, described("End of the window, as typed.")] = ""
    zone: Annotated[
        _Word, described("IANA time zone of typed and printed times; the cluster's if empty.")
    ] = ""
    whole_hetjob: Annotated[
        Literal["", "yes", "no"],
        described("``yes``: all components of each named job; ``no``: only the named ones."),
    ] = ""
    duplicates: Annotated[bool, described("Include earlier runs of requeued jobs.")] = False
    allocations: Annotated[bool, described("Omit steps.")] = False
    truncate: Annotated[bool, described("Cut times to the window.")] = False
    use_local_uid: Annotated[
        bool, described("Print the uid that the user's name resolves to now.")
    ] = False
    expand_patterns: Annotated[
        bool, described("Replace patterns such as %j in StdIn, StdOut and StdErr.")
    ] = False
    form: Annotated[
        Literal["text", "json", "lines"],
        described(
            "Formatted lines; one JSON document per job; or all columns of each line as JSON."
        ),
    ] = "text"
    format: Annotated[
        str, msgspec.Meta(max_length=16384), described("Field names with widths, comma-separated.")
    ] = ""
    style: Annotated[
        Literal["table", "parsable", "parsable2"],
        described(
            "Aligned columns; or fields separated by ``delimiter``, which also ends the lines of "
            "``parsable``."
        ),
    ] = "table"
    delimiter: Annotated[str, msgspec.Meta(max_length=64), described("Field separator.")] = "|"
    units: Annotated[
        Literal["", "K", "M", "G", "T", "P"],
        described("Unit of sizes; the largest exact one if empty."),
    ] = ""
    noconvert: Annotated[bool, described("Print sizes in their original unit.")] = False
    time_format: Annotated[
        str, msgspec.Meta(max_length=128), described("Value of SLURM_TIME_FORMAT.")
    ] = ""


class SacctText(msgspec.Struct, frozen=True, tag="text"):
    """Piece of the reply.

    Attributes:
        text: Whole lines or JSON documents, each with its newline.
    """

    text: str


class SacctAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End of the reply.

    Attributes:
        version: Version of this struct and of the JSON documents.
        lines: Number of lines or documents.
        since: Begin of the time window, µs since the epoch.
        until: End of the time window, µs since the epoch.
    """

    version: int = 1
    lines: int = 0
    since: int = 0
    until: int = 0
