"""Jobcomp source: reads the lines of native/jobcomp.lua and appends job.end events.

Each line is one run of a job that ended, or one part of a resized job. Fields have Slurm's names
and numbers, as Slurm passes them to Lua. slurmctld writes the lines, but users choose job names and
comments, so every field is validated by type.

First comes the parser (``parse_line``, ``parse_line_tail``, ``make_end_event``), then
:class:`ReadPositions`, the read positions in ``lines-CLUSTER.db``, then :class:`JobcompSource`,
which follows the file. A position is stored once the journal has the events: after a crash some of
them are appended again, under the same keys, which the journal ignores.
"""

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.capture.log_follower import LineBatch, LogFollower, ReadPosition
from steward.capture.observations import make_end_key
from steward.core.consumers import Append
from steward.core.databases import JOBCOMP_POSITIONS
from steward.core.errors import StewardError, Unavailable
from steward.core.events import JOB_END, NODE_GAP, Event, JobFacts, utc_now
from steward.core.records import JobRecord
from steward.core.sqlite import Database
from steward.core.storage import Table
from steward.core.usage import NodeGap
from steward.core.waits import Stop
from steward.slurm import decode_ended_state
from steward.slurm.users import NameResolver

JOBCOMP_SOURCE: Final = "jobcomp"
"""Source name of the events."""

_NO_VALUE: Final = 0xFFFF_FFF0
"""Values from here on mean "none" in Slurm's 32-bit numbers (NO_VAL, INFINITE)."""
_MAX_EPOCH: Final = 2**33  # year 2242; a later time is invalid
_MAX_UID: Final = 2**32 - 1


class LineError(StewardError):
    """Error: a line is not valid; ``offender`` holds its beginning."""


# Parser of lines


class _RawLine(msgspec.Struct, frozen=True):
    """Fields of a line that are used."""

    v: int
    k: str
    t: int
    job_id: int
    job_state: int
    lost: int = 0
    cut: tuple[str, ...] = ()
    user_id: int | None = None
    group_id: int | None = None
    restart_cnt: int = 0
    submit_time: int = 0
    start_time: int = 0
    end_time: int = 0
    exit_code: int | None = None
    derived_ec: int | None = None
    array_job_id: int = 0
    array_task_id: int = _MAX_UID
    het_job_id: int = 0
    het_job_offset: int = 0
    total_nodes: int = 0
    total_cpus: int = 0
    min_nodes: int = 0
    min_cpus: int = 0
    time_limit: int = _MAX_UID
    priority: int | None = None
    nodes: str = ""
    tres_fmt_alloc_str: str = ""
    tres_fmt_req_str: str = ""
    sluid: str = ""
    original_sluid: str = ""
    origin_cluster: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    wckey: str = ""
    resv_name: str = ""
    name: str = ""
    batch_host: str = ""
    alloc_node: str = ""
    work_dir: str = ""
    admin_comment: str = ""
    std_in: str = ""
    std_out: str = ""
    std_err: str = ""
    features: str = ""
    licenses: str = ""
    container: str = ""
    curr_dependency: str = ""


_BEGIN: Final = b'{"v":'
"""Start of a line. It cannot occur inside a line, because quotes in texts are escaped."""

_decoder = msgspec.json.Decoder(_RawLine)


class JobcompRecord(msgspec.Struct, frozen=True):
    """Parsed line.

    Attributes:
        record: Record of the run, or of one part of it.
        at: Time at which slurmctld wrote it, UTC, in whole seconds.
        lost: Number of lines before this one that it could not write.
    """

    record: JobRecord
    at: datetime
    lost: int = 0


def parse_line(line: bytes, resolver: NameResolver) -> JobcompRecord:
    """Parse a line.

    Args:
        line: The line without its newline.
        resolver: Resolves user and group ids to names.

    Raises:
        LineError: The line is not from jobcomp.lua, or describes an impossible job.
    """
    try:
        raw = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(f"not a line of jobcomp.lua: {error}", line[:200]) from error
    state = decode_ended_state(raw.job_state)
    at, submit = _parse_epoch(raw.t), _parse_epoch(raw.submit_time)
    if raw.v != 1 or raw.k != "job" or not state or at is None:
        raise LineError(
            "line of another version of jobcomp.lua: run 'steward plugins install --jobcomp'",
            line[:200],
        )
    if not 0 < raw.job_id < _NO_VALUE or submit is None or raw.restart_cnt < 0:
        raise LineError("line with an invalid job id, submit time or restart count", line[:200])
    return JobcompRecord(_build_job_record(raw, state, submit, resolver), at, max(0, raw.lost))


def parse_line_tail(line: bytes, resolver: NameResolver) -> JobcompRecord | None:
    """Parse the whole line that follows a torn one in the same line; None if there is none.

    Args:
        line: Line that :func:`parse_line` rejected.
        resolver: Resolves user and group ids to names.
    """
    begin = line.rfind(_BEGIN)
    if begin <= 0:
        return None
    try:
        return parse_line(line[begin:], resolver)
    except LineError:
        return None


def make_end_event(cluster: str, parsed: JobcompRecord, record: JobRecord) -> Event:
    """Build the job.end event of a line.

    Args:
        cluster: Name of the cluster.
        parsed: Parsed line.
        record: Its record after redaction.
    """
    # The key differs from that of a queue poll's event of the same end: each has facts that the
    # other lacks.
    key = f"{make_end_key(record)}:{JOBCOMP_SOURCE}"
    if record.state == "RESIZING":
        # A job may be resized twice within a second.
        allocation = f"{record.nodelist}\0{record.tres_allocated}\0{record.sluid}"
        key += ":" + hashlib.blake2b(allocation.encode(), digest_size=6).hexdigest()
    return Event(
        kind=JOB_END,
        cluster=cluster,
        key=key,
        at=record.end or parsed.at,
        seen_at=parsed.at,
        source=JOBCOMP_SOURCE,
        body=JobFacts(record=record),
    )


def _build_job_record(
    raw: _RawLine, state: str, submit: datetime, resolver: NameResolver
) -> JobRecord:
    """Build the job record of a line."""
    is_array = raw.array_job_id > 0
    uid, gid = _parse_id(raw.user_id), _parse_id(raw.group_id)
    truncated = frozenset(raw.cut)
    code, signal = _split_wait_status(raw.exit_code)
    derived_code, derived_signal = _split_wait_status(raw.derived_ec)
    is_partial = state == "RESIZING"
    requested = "" if "tres_fmt_req_str" in truncated else raw.tres_fmt_req_str
    return JobRecord(
        job_id=raw.job_id,
        name=raw.name,
        uid=uid,
        user="" if uid is None else resolver.user(uid),
        gid=gid,
        group="" if gid is None else resolver.group(gid),
        account=raw.account,
        partition=raw.partition,
        qos=raw.qos,
        state=state,
        array_job_id=raw.array_job_id if is_array else 0,
        array_task=str(raw.array_task_id) if is_array and raw.array_task_id < _NO_VALUE else "",
        het_job_id=max(0, raw.het_job_id),
        het_offset=max(0, raw.het_job_offset) if raw.het_job_id > 0 else 0,
        sluid=raw.sluid,
        original_sluid=raw.original_sluid,
        restarts=raw.restart_cnt,
        submit=submit,
        start=_parse_epoch(raw.start_time),
        # For a part of a resized job Slurm gives the expected end of the whole job.
        end=_parse_epoch(raw.t if is_partial else raw.end_time),
        time_limit_s=raw.time_limit * 60 if 0 <= raw.time_limit < _NO_VALUE else None,
        nodes=raw.total_nodes or None,
        cpus=raw.total_cpus or None,
        tres_requested=requested,
        tres_allocated="" if "tres_fmt_alloc_str" in truncated else raw.tres_fmt_alloc_str,
        # A truncated node list would name other nodes.
        nodelist="" if "nodes" in truncated else raw.nodes,
        dependency=raw.curr_dependency,
        reservation=raw.resv_name,
        submit_host=raw.alloc_node,
        work_dir=raw.work_dir,
        stdin=_parse_output_path(raw.std_in),
        stdout=_parse_output_path(raw.std_out),
        stderr=_parse_output_path(raw.std_err),
        admin_comment=raw.admin_comment,
        # A part of a resized job has no exit code yet.
        exit_code=None if is_partial else code,
        exit_signal=None if is_partial else signal,
        derived_exit_code=None if is_partial else derived_code,
        derived_exit_signal=None if is_partial else derived_signal,
        requested_cpus=raw.min_cpus or None,
        requested_nodes=_parse_tres_count(requested, "node") or raw.min_nodes or None,
        priority=None if is_partial else raw.priority,
        wckey=raw.wckey,
        constraints=raw.features,
        licenses=raw.licenses,
        container=raw.container,
        batch_host=raw.batch_host,
        federation_origin=raw.origin_cluster,
    )


def _parse_epoch(seconds: int) -> datetime | None:
    """Convert seconds since the epoch; None if invalid."""
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _MAX_EPOCH else None


def _parse_id(number: int | None) -> int | None:
    """Return a uid or gid; None if invalid."""
    return number if number is not None and 0 <= number <= _MAX_UID else None


def _split_wait_status(raw: int | None) -> tuple[int | None, int | None]:
    """Split a wait(2) status into exit code and signal."""
    if raw is None or not 0 <= raw < _NO_VALUE:
        return None, None
    return raw >> 8 & 0xFF, raw & 0x7F


def _parse_tres_count(tres: str, name: str) -> int | None:
    """Return the count of one TRES in a text such as ``cpu=4,node=2``."""
    for part in tres.split(","):
        key, _, value = part.partition("=")
        if key == name and value.isascii() and value.isdigit() and len(value) < 10:
            return int(value)
    return None


def _parse_output_path(path: str) -> str:
    """Return an output path, unless it contains an unexpanded pattern."""
    # Slurm passes the pattern to Lua; scontrol shows the expanded path.
    return "" if "%" in path else path


# Source

log = logging.getLogger(__name__)

CONTROLLER_NODE: Final = "slurmctld"
"""Name used instead of a node's for lines that slurmctld itself lost."""

_MAX_EVENTS_PER_APPEND: Final = 500
"""Maximum number of events per append."""


class _StoredPosition(ReadPosition, frozen=True, kw_only=True):
    """Read position with the path of its file."""

    path: str


_POSITIONS: Final = Table(_StoredPosition, "place", key="path")


class ReadPositions:
    """Read positions of followed files, stored in ``lines-CLUSTER.db``.

    Args:
        state_dir: Directory of the database.
        cluster: Cluster of the files.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: The database cannot be opened now.
    """

    def __init__(self, state_dir: str, cluster: str) -> None:
        path = JOBCOMP_POSITIONS.locate(state_dir, cluster)
        # Positions lost in a power failure only cause lines to be read again.
        self._database = Database(path, (_POSITIONS.schema,), synchronous="NORMAL")

    def get(self, path: str) -> ReadPosition | None:
        """Return the position in a file; None if it was never read."""
        return next(iter(_POSITIONS.select(self._database, "WHERE path = ?", path)), None)

    def store(self, path: str, position: ReadPosition) -> None:
        """Store the position in a file.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        row = _StoredPosition(path=path, **msgspec.structs.asdict(position))
        with self._database.transaction() as connection:
            _POSITIONS.insert(connection, row, "replace")

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class JobcompSource:
    """Source that follows the jobcomp file of one cluster's slurmctld.

    Args:
        cluster: Name of the cluster.
        path: The file.
        positions: Store of read positions.
        append: Appends events durably; may block.
        redact: Removes secrets from texts that users wrote into a record.
    """

    def __init__(
        self,
        cluster: str,
        path: str,
        positions: ReadPositions,
        append: Append,
        redact: Callable[[JobRecord], JobRecord] = lambda record: record,
    ) -> None:
        self.line_count = 0
        """Number of lines that became events."""
        self._cluster = cluster
        self._path = path
        self._positions = positions
        self._append = append
        self._redact = redact
        self._resolver = NameResolver()
        self._follower = LogFollower(path, positions.get(path))
        self._has_garbled = self._is_checked = False

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Follow the file until ``stop`` is set.

        Args:
            stop: Ends the loop.
            beat: Called for every batch of lines and while waiting.

        Raises:
            Unavailable: The position cannot be stored.
        """
        while not stop.is_set():
            beat()
            try:
                self.append_new_events(stop, beat)
            except Unavailable:
                if stop.is_set():
                    break  # the next start reads these lines again
                raise
            # At most 30 s, so that heartbeats continue.
            stop.wait(min(30.0, self._follower.due_s()), self._follower.fd)

    def append_new_events(self, stop: Stop, beat: Callable[[], None] = lambda: None) -> None:
        """Append events for all new lines.

        Raises:
            Unavailable: The position cannot be stored, or ``stop`` was set while the journal was
                unavailable.
        """
        self._follower.process_events()
        self._check_mode()
        for batch in self._follower.read_batches():
            beat()
            events = self._build_events(batch)
            for begin in range(0, len(events), _MAX_EVENTS_PER_APPEND):
                self._append(events[begin : begin + _MAX_EVENTS_PER_APPEND])
            self._positions.store(self._path, batch.position)
            if stop.is_set():
                return

    def close(self) -> None:
        """Close the file."""
        self._follower.close()

    def _build_events(self, batch: LineBatch) -> list[Event]:
        """Convert a batch of lines to events, with gaps for lost and garbled lines."""
        events = []
        garbled = batch.garbled
        for line in batch.lines:
            parsed, is_whole = self._parse_line(line)
            garbled += not is_whole
            if parsed is None:
                continue
            events.append(make_end_event(self._cluster, parsed, self._redact(parsed.record)))
            if parsed.lost:
                log.warning(
                    "slurmctld could not write %d job ends to %s: check free space and permissions "
                    "there",
                    parsed.lost,
                    self._path,
                )
                name = f"lost:{int(parsed.at.timestamp())}:{parsed.record.job_id}"
                events.append(self._build_gap(name, "lost", parsed.lost, parsed.at))
        self.line_count += len(batch.lines)
        if garbled:
            inode, offset = batch.begin
            at = datetime.fromtimestamp(batch.position.written_ns / 1e9, UTC)
            events.append(self._build_gap(f"garbled:{inode}:{offset}", "garbled", garbled, at))
        return events

    def _parse_line(self, line: bytes) -> tuple[JobcompRecord | None, bool]:
        """Parse a line; also return whether it was valid as a whole."""
        try:
            return parse_line(line, self._resolver), True
        except LineError as error:
            self._log_garbled(error)
            return parse_line_tail(line, self._resolver), False

    def _build_gap(self, name: str, reason: str, lines: int, at: datetime) -> Event:
        """Build a node.gap event about lost or garbled lines of slurmctld."""
        return Event(
            kind=NODE_GAP,
            cluster=self._cluster,
            key=f"{NODE_GAP}:{CONTROLLER_NODE}:{name}",
            at=at,
            seen_at=utc_now(),
            source=JOBCOMP_SOURCE,
            body=NodeGap(node=CONTROLLER_NODE, why=reason, lines=lines),
        )

    def _log_garbled(self, error: LineError) -> None:
        """Log the first garbled line; others are only counted."""
        if not self._has_garbled:
            log.error(
                "%s: %s: %r; further ones are counted, not logged",
                self._path,
                error,
                error.offender,
            )
        self._has_garbled = True

    def _check_mode(self) -> None:
        """Log once if everybody can read the file, because users' texts are in it."""
        if self._is_checked:
            return
        try:
            file_mode = os.stat(self._path).st_mode
            directory_mode = os.stat(os.path.dirname(self._path)).st_mode
        except OSError:
            return
        self._is_checked = True
        if file_mode & stat.S_IROTH and directory_mode & stat.S_IXOTH:
            log.warning(
                "all users can read %s with the names and comments of jobs: remove the "
                "permissions of others from its directory (chmod o= %s)",
                self._path,
                os.path.dirname(self._path),
            )
