"""What sacct is asked and answers: the shapes that go over the daemon's socket.

Lines are formatted where they lie and travel as text, in pieces of some
hundred kilobytes: 400,000 of them as objects would take ten times as long.
What the asker's environment says of times is therefore part of the question.
"""

from typing import Annotated, Literal

import msgspec

_Word = Annotated[str, msgspec.Meta(max_length=1024)]
_Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=100_000)]


class SacctRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """accounting.sacct: lines of jobs and steps, as text.

    All that selects is as it was typed, see sacct(1).

    Attributes:
        clusters: Of these clusters; if empty, of the first that is configured.
        all_clusters: Of every cluster.
        users: Of these users, names or uids; if empty, of the asker's uid.
        all_users: Of every user that the asker may see.
        groups: Of these groups, names or gids.
        accounts: Charged to these.
        partitions: In these.
        qos: Of these.
        wckeys: Of these.
        names: Jobs that are called exactly so.
        states: In these states at some time of the window.
        reasons: That waited last for one of these.
        constraints: That asked for all of these features.
        flags: With one of these flags.
        jobs: These jobs or steps: ``123``, ``123_4``, ``123_[1-3]``, ``123+1``, ``123.batch``.
        nodelist: That ran on one of these nodes.
        nnodes: On so many nodes: ``min[-max]``.
        ncpus: On so many CPUs: ``min[-max]``.
        timelimit_min: With this time limit, or at least this where there is a maximum.
        timelimit_max: With at most this time limit.
        starttime: Beginning of the window, as typed.
        endtime: Its end.
        zone: IANA zone in which times are typed and printed; "" for the cluster's.
        whole_hetjob: ``yes``: all components of each job named; ``no``: only those named.
        duplicates: Former runs, too.
        allocations: No steps.
        truncate: Times are cut to the window.
        use_local_uid: UID is what the user's name resolves to now.
        form: Formatted lines; JSON documents a job; or all columns of each line as JSON.
        format: Field names with their widths, commas between.
        style: A table, or fields with ``delimiter`` between: with one at the end, or without.
        delimiter: Stands between fields.
        units: K, M, G, T or P for sizes in that unit; "" for what fits.
        noconvert: Sizes in the unit that they came in.
        time_format: As SLURM_TIME_FORMAT.
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
    """A piece of the answer.

    Attributes:
        text: Whole lines, or whole JSON documents a line each, each with its newline.
    """

    text: str


class SacctAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an answer.

    Attributes:
        version: Of this shape, and of the JSON documents.
        lines: How many lines or documents there were.
        since: Beginning of the window that was looked at, µs since the epoch.
        until: Its end.
    """

    version: int = 1
    lines: int = 0
    since: int = 0
    until: int = 0
