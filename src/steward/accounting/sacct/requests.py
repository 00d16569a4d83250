"""sacct request and reply: the structs that travel over the daemon's socket.

The daemon formats lines and sends them as text, in pieces of some hundred kilobytes: 400,000 lines
as objects would take ten times as long. So the request includes the time format from the user's
environment.
"""

from typing import Annotated, Literal

import msgspec

_Word = Annotated[str, msgspec.Meta(max_length=1024)]
_Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=100_000)]


class SacctRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request of accounting.sacct: lines of jobs and steps, as text.

    Filters hold what the user typed, see sacct(1).

    Attributes:
        clusters: Cluster names; the first configured one if empty.
        all_clusters: Every cluster.
        users: User names or uids; the requester's uid if empty.
        all_users: Every user that the requester may see.
        groups: Group names or gids.
        accounts: Accounts charged.
        partitions: Partitions.
        qos: QOS names.
        wckeys: Wckeys.
        names: Exact job names.
        states: States at some time of the window.
        reasons: Last pending reason is one of these.
        constraints: Features that were all requested.
        flags: Flags, of which the job has one.
        jobs: Jobs or steps: ``123``, ``123_4``, ``123_[1-3]``, ``123+1``, ``123.batch``.
        nodelist: Ran on one of these nodes.
        nnodes: Number of nodes: ``min[-max]``.
        ncpus: Number of CPUs: ``min[-max]``.
        timelimit_min: Exact time limit, or the minimum if there is a maximum.
        timelimit_max: Maximum time limit.
        starttime: Begin of the window, as typed.
        endtime: End of the window, as typed.
        zone: IANA zone of typed and printed times; "" for the cluster's.
        whole_hetjob: ``yes``: all components of each named job; ``no``: only the named ones.
        duplicates: Include former runs.
        allocations: Omit steps.
        truncate: Cut times to the window.
        use_local_uid: Print the uid that the user's name resolves to now.
        expand_patterns: Replace patterns such as %j in StdIn, StdOut and StdErr.
        form: Formatted lines; one JSON document per job; or all columns of each line as JSON.
        format: Field names with widths, comma-separated.
        style: Table, or fields separated by ``delimiter``, with or without one at the end.
        delimiter: Field separator.
        units: K, M, G, T or P to print sizes in that unit; "" for the largest exact one.
        noconvert: Print sizes in their original unit.
        time_format: Value of SLURM_TIME_FORMAT.
    """

    clusters: _Words = ()
    all_clusters: bool = False
    users: _Words = ()
    all_users: bool = False
    groups: _Words = ()
    accounts: _Words = ()
    partitions: _Words = ()
    qos: _Words = ()
    wckeys: _Words = ()
    names: _Words = ()
    states: _Words = ()
    reasons: _Words = ()
    constraints: _Words = ()
    flags: _Words = ()
    jobs: _Words = ()
    nodelist: _Word = ""
    nnodes: _Word = ""
    ncpus: _Word = ""
    timelimit_min: _Word = ""
    timelimit_max: _Word = ""
    starttime: _Word = ""
    endtime: _Word = ""
    zone: _Word = ""
    whole_hetjob: Literal["", "yes", "no"] = ""
    duplicates: bool = False
    allocations: bool = False
    truncate: bool = False
    use_local_uid: bool = False
    expand_patterns: bool = False
    form: Literal["text", "json", "lines"] = "text"
    format: Annotated[str, msgspec.Meta(max_length=16384)] = ""
    style: Literal["table", "parsable", "parsable2"] = "table"
    delimiter: Annotated[str, msgspec.Meta(max_length=64)] = "|"
    units: Literal["", "K", "M", "G", "T", "P"] = ""
    noconvert: bool = False
    time_format: Annotated[str, msgspec.Meta(max_length=128)] = ""


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
