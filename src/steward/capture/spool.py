"""Spool capture: reads scripts from a watched spool, redacts, stores, and appends events.

:class:`SpoolCapture`, at the end, is the main loop of a capture worker. It takes entries from a
:class:`steward.capture.spool_entries.WatchedSpool`, writes their bytes to a store and gathers them
in a :class:`CaptureBatch`. :class:`BatchCommitter` has two threads that only wait, one for fsync of
a batch, one for the journal. A script's descriptors stay open until its bytes are durable, so that
they can be written again. Scripts that cannot be read are held and retried, later found by rescans;
lost ones are reported as a gap.
"""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from steward.capture.spool_entries import (
    CapturedEntry,
    EntryContents,
    EnvironmentUnreadable,
    WatchedSpool,
)
from steward.core.errors import StewardError, Unavailable
from steward.core.events import (
    MAX_MISSED_JOB_IDS,
    Event,
    IncomingFile,
    JobScript,
    make_missed_event,
    make_script_event,
)
from steward.core.journal.store import EncodedEvent, encode_rows
from steward.core.redaction import Redactor
from steward.core.script_stores import (
    IncomingStore,
    StoreUnavailable,
    UnsyncedFiles,
    make_incoming_filename,
)
from steward.core.waits import Backoff, Stop
from steward.slurm.environment import Environment

log = logging.getLogger(__name__)

_SCRIPTS_PER_TURN = 16
"""Scripts read between two checks of the spool: short-lived jobs must not wait for long scripts."""
_BATCH_SCRIPTS = 256
"""Number of scripts at which a batch is committed; see also ``CaptureLimits.batch_bytes``."""
_MAX_WAIT_S = 5.0
"""Maximum wait between turns, in seconds."""
_FINISH_TIMEOUT_S = 4.0
"""Time for remaining scripts at a stop, in seconds."""
_MOST_CLOSED = 8
"""Largest number of scripts in a batch whose descriptors the committing thread closes."""
_MAX_JOBS_LOGGED = 50
"""Maximum number of lost jobs named in a log message."""

_NO_ENVIRONMENT = Environment(data=b"")

AppendRows = Callable[[Sequence[EncodedEvent]], None]
"""Appends encoded events durably; may block."""


# Batches


class SpoolUnavailable(Unavailable):
    """Error: the spool cannot be read now."""


class CaptureLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times and sizes of a capture.

    Attributes:
        batch_bytes: Size at which a batch is committed, in bytes: written scripts should soon be
            durable.
        gather_s: Time for which scripts gather while an earlier batch is in progress, in seconds.
        settle_s: Time between the first sign of a new job and the reading of all signs, in seconds.
            slurmctld writes a job's files meanwhile, so that one turn takes the whole job.
        retry_store_s: Time until Steward tries a failed store again, in seconds.
        hold_unread_s: Time for which descriptors of an unreadable script stay open, in seconds.
            After this time a rescan opens the script again. Descriptors of a removed script stay
            open, because it no longer has a name.
        max_unreadable: Most unreadable scripts with open descriptors at a time.
        first_rescan_s: Time until the first rescan for unreadable scripts, in seconds.
        longest_rescan_s: Longest time between two such rescans, in seconds.
        missed_every_s: Time between two reports of vanished jobs, in seconds. It keeps the number
            of events small in a storm of jobs.
    """

    batch_bytes: int = 32 << 20
    gather_s: float = 0.1
    settle_s: float = 0.0005
    retry_store_s: float = 5.0
    hold_unread_s: float = 60.0
    max_unreadable: int = 500
    first_rescan_s: float = 30.0
    longest_rescan_s: float = 600.0
    missed_every_s: float = 1.0


class CaptureBatch(msgspec.Struct):
    """Scripts and events that are written but not durable yet.

    Attributes:
        rows: Encoded events.
        held: Scripts with open descriptors, until their bytes are durable.
        unsynced: Files with the bytes.
        size: Total size of the bytes.
        is_synced: Whether these files are durable.
    """

    rows: list[EncodedEvent]
    held: list[CapturedEntry]
    unsynced: list[UnsyncedFiles]
    size: int = 0
    is_synced: bool = False


class _UnreadableScript(msgspec.Struct):
    """Script that could not be read, with open descriptors."""

    entry: CapturedEntry
    since: float
    backoff: Backoff
    at: float = 0.0
    is_removed: bool = False


# Commit threads


class BatchCommitter:
    """Two threads that make batches durable (fsync) and append their events, in order.

    The committer does both for a batch that comes alone. A batch that comes while it is in progress
    goes through the syncer first: the store must have its bytes soon, whatever the journal does.
    """

    def __init__(self, append: AppendRows) -> None:
        self._append = append
        self.failed: queue.SimpleQueue[list[CapturedEntry]] = queue.SimpleQueue()
        self.stored: queue.SimpleQueue[list[CapturedEntry]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.pending_batches = self.pending_scripts = 0
        self.is_syncing = False
        self.has_signalled = False
        """Whether a thread has woken the main thread."""
        self.is_awaited = False
        """Whether the main thread has more scripts to commit, and is to be woken for them."""
        self.last_error = ""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._batches: queue.SimpleQueue[CaptureBatch | None] = queue.SimpleQueue()
        self._unsynced: queue.SimpleQueue[CaptureBatch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("syncer", self._sync_all), ("committer", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, batch: CaptureBatch) -> None:
        """Queue a batch for commit."""
        with self._lock:
            is_alone = not self.pending_batches
            self.pending_batches += 1
            self.pending_scripts += len(batch.held)
        if is_alone:
            self._batches.put(batch)
        else:
            self.is_syncing = True
            self._unsynced.put(batch)

    def finish(self, timeout_s: float) -> bool:
        """Commit all queued batches and stop; return whether that was done in time."""
        self._stopping.set()
        self._unsynced.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        os.close(self.fd)
        return True

    def _sync_all(self) -> None:
        """Run the thread that syncs the batches that must wait for the journal."""
        while (batch := self._unsynced.get()) is not None:
            if self._sync(batch):
                self._batches.put(batch)
            self.is_syncing = not self._unsynced.empty()
        self._batches.put(None)

    def _commit_all(self) -> None:
        """Run the thread that appends batches' events once they are durable."""
        while (batch := self._batches.get()) is not None:
            if (batch.is_synced or self._sync(batch)) and self._commit(batch):
                self._finish_batch(batch)

    def _finish_batch(self, batch: CaptureBatch, *, has_failed: bool = False) -> None:
        """Count a batch as done; wake the main thread if it has something to do then."""
        with self._lock:
            self.pending_batches -= 1
            self.pending_scripts -= len(batch.held)
        if has_failed or self.is_awaited:
            self._signal()

    def _signal(self) -> None:
        """Wake the main thread."""
        # The flag last: who clears it must find the descriptor readable, or it stays readable.
        os.eventfd_write(self.fd, 1)
        self.has_signalled = True

    def _sync(self, batch: CaptureBatch) -> bool:
        """Sync the files of a batch; return whether all succeeded."""
        batch.is_synced = True
        # Sync all, even after a failure: each closes its descriptors.
        for unsynced in batch.unsynced:
            try:
                unsynced.sync()
            except Unavailable as error:
                self._log_failure(batch, error)
                batch.is_synced = False
        batch.unsynced = []
        if not batch.is_synced:
            self.failed.put(batch.held)
            self._finish_batch(batch, has_failed=True)
        elif len(batch.held) <= _MOST_CLOSED:
            # The store has the bytes now, under names that identify them: descriptors held until
            # the journal is available again could use up all there are.
            for entry in batch.held:
                try:
                    entry.close()
                except OSError as error:
                    # Its bytes are durable: an error must not end the thread.
                    log.warning("cannot close a script: %s", error.strerror)
        else:
            # The main thread closes many: two threads would contend for the interpreter lock at
            # each close.
            self.stored.put(batch.held)
            self._signal()
        return batch.is_synced

    def _commit(self, batch: CaptureBatch) -> bool:
        """Append a batch's events, retrying until a stop."""
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                self._append(batch.rows)
            except StewardError as error:
                self._log_failure(batch, error)
                if self._stopping.wait(backoff.next_s()):
                    return False
            else:
                return True

    def _log_failure(self, batch: CaptureBatch, error: StewardError) -> None:
        """Log that a batch is not durable yet."""
        self.last_error = str(error)
        log.error("cannot make %d scripts durable, retrying: %s", len(batch.held), error)


# Main loop


class SpoolCapture:
    """Capture of one share of a cluster's spool.

    Args:
        cluster: Name of the cluster.
        spool: Watched part of the spool.
        stores: Where bytes may go, preferred first.
        redactor: Removes secrets from environments.
        append: Appends encoded events durably; may block.
        keep_environments: Whether environments are kept.
        limits: Times and sizes. Defaults if None.
    """

    def __init__(
        self,
        cluster: str,
        spool: WatchedSpool,
        stores: Sequence[IncomingStore],
        redactor: Redactor,
        append: AppendRows,
        *,
        keep_environments: bool = True,
        limits: CaptureLimits | None = None,
    ) -> None:
        self.captured = 0
        self._cluster = cluster
        self._spool = spool
        self._stores = stores
        self._excluded_until: dict[str, float] = {}
        self._redactor = redactor
        self._committer = BatchCommitter(append)
        self._keeps_environments = keep_environments
        self._limits = limits or CaptureLimits()
        self._batch = CaptureBatch([], [], [])
        self._gathering_since = 0.0
        self._written_stores: set[str] = set()
        self._backoff = Backoff(0.1, 5.0)
        self._retry_at = 0.0
        self._problems: dict[str, str] = {}
        self._beat: Callable[[], None] = lambda: None
        self._unreadable: dict[tuple[int, int], _UnreadableScript] = {}
        self._released: set[tuple[int, int]] = set()
        """Unreadable scripts whose descriptors were closed, so that only a rescan finds them."""
        self._rescans = Backoff(self._limits.first_rescan_s, self._limits.longest_rescan_s)
        self._rescan_at = 0.0
        self._next_report_at = 0.0

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Capture until ``stop`` is set; then commit what has been read.

        Args:
            stop: Ends the loop.
            beat: Called for each script and while waiting, since a large script takes seconds.
        """
        self._beat = beat
        while not stop.is_set():
            beat()
            self.run_turn()
            if (not self._spool.ready or time.monotonic() < self._retry_at) and stop.wait(
                self._next_wait_s(), self._spool.fd, self._committer.fd
            ):
                time.sleep(self._limits.settle_s)
        self.finish()

    def run_once(self) -> None:
        """Capture what is in the spool now, and return when it is durable.

        Raises:
            SpoolUnavailable: The spool does not exist.
            StoreUnavailable: Nothing could be stored.
        """
        self._spool.process_events()
        if self._spool.unavailable_reason:
            raise SpoolUnavailable(self._spool.unavailable_reason)
        # Where leases do not work, a script is taken after two checks, a little later.
        while self._spool.ready or self._has_recent_unreadable() or self._spool.due_s() < 1.0:
            if not self._spool.ready:
                time.sleep(min(self._spool.due_s(), self._unreadable_due_s()))
            self.run_turn()
            if self._retry_at:
                self.finish()
                raise StoreUnavailable(self._summarize_problems())
        if not self.finish():
            raise StoreUnavailable(f"cannot make all scripts durable: {self._summarize_problems()}")

    def _has_recent_unreadable(self) -> bool:
        """Return whether any unreadable script is still within its holding time."""
        return any(map(self._is_recent, self._unreadable.values()))

    def _is_recent(self, unreadable: _UnreadableScript) -> bool:
        """Return True if a script's descriptors must stay open, removed or not."""
        return time.monotonic() - unreadable.since < self._limits.hold_unread_s

    def run_turn(self) -> None:
        """Check the spool and process a slice of its scripts."""
        self._spool.process_events()
        self._report_missed()
        self._requeue_failed()
        self._retry_unreadable()
        if time.monotonic() < self._retry_at:
            return
        ready = self._spool.ready
        for _ in range(min(_SCRIPTS_PER_TURN, len(ready))):
            entry = ready.popleft()
            self._beat()
            try:
                self._add_to_batch(entry)
            except StoreUnavailable:
                # Logged by _store; the descriptors keep the bytes until a store has room.
                ready.appendleft(entry)
                self._retry_at = time.monotonic() + self._backoff.next_s()
                break
            except OSError as error:
                self._defer_entry(entry, error)
            else:
                self._unreadable.pop((entry.job_id, entry.mtime_ns), None)
                self._released.discard((entry.job_id, entry.mtime_ns))
            if self._batch.size >= self._limits.batch_bytes:
                self._commit_batch()
        else:
            self._retry_at = 0.0
            self._backoff.reset()
        if self._batch.held and self._is_due():
            self._commit_batch()

    def _is_due(self) -> bool:
        """Return whether to commit the batch: at once, unless an earlier one is in progress.

        Scripts gather meanwhile, so batches grow with the load. Bytes are made durable soon even if
        the journal is unavailable.
        """
        if len(self._batch.held) >= _BATCH_SCRIPTS:
            return True
        if self._spool.ready and not self._retry_at:
            return False
        committer = self._committer
        # First ask to be woken, then look: the committer does it the other way round.
        committer.is_awaited = True
        if not committer.pending_batches:
            committer.is_awaited = False
            return True
        waited_s = time.monotonic() - self._gathering_since
        return waited_s > self._limits.gather_s and not committer.is_syncing

    def finish(self) -> bool:
        """Write and commit what has been read; return whether all of it is durable."""
        deadline = time.monotonic() + _FINISH_TIMEOUT_S
        while self._spool.ready and not self._retry_at and time.monotonic() < deadline:
            self.run_turn()
        if self._batch.held:
            self._commit_batch()
        # Entries being retried are in ``ready`` and closed there.
        held_entries = [unread.entry for unread in self._unreadable.values() if unread.at]
        unread = [*held_entries, *self._spool.ready]
        self._spool.vanished.extend(entry.job_id for entry in unread if entry.is_removed)
        self._report_missed(at_once=True)
        is_committed = self._committer.finish(max(0.1, deadline - time.monotonic()))
        self._close_stored()
        failed = list(self._take_failed())
        for entry in (*held_entries, *failed):
            entry.close()
        remaining = len(unread) + len(self._released) + self._committer.pending_scripts
        if remaining:
            log.warning(
                "%d scripts are not captured yet; the next start rescans the spool", remaining
            )
        self._spool.close()
        return is_committed and not remaining and not failed

    def _summarize_problems(self) -> str:
        """Summarize the present problems."""
        messages = [*self._problems.values(), self._committer.last_error]
        return "; ".join(filter(None, messages)) or "it timed out"

    def _next_wait_s(self) -> float:
        """Return how long to wait until the next turn, in seconds."""
        nap_s = min(self._spool.due_s(), self._unreadable_due_s(), _MAX_WAIT_S)
        if self._spool.ready:
            return min(nap_s, max(0.01, self._retry_at - time.monotonic()))
        if self._batch.held:
            return min(nap_s, self._limits.gather_s)
        if self._spool.vanished:
            return min(nap_s, max(0.01, self._next_report_at - time.monotonic()))
        return nap_s

    def _requeue_failed(self) -> None:
        """Queue failed scripts again, and close stored ones."""
        if not self._committer.has_signalled:
            return
        self._committer.has_signalled = False
        with suppress(BlockingIOError):  # read already, between descriptor and flag
            os.eventfd_read(self._committer.fd)
        failed = list(self._take_failed())
        if failed:
            for entry in failed:
                log.debug("job %d: script was rewritten", entry.job_id)
            self._spool.ready.extendleft(reversed(failed))
            self._retry_at = time.monotonic() + self._backoff.next_s()
        self._close_stored()

    def _take_failed(self) -> Iterator[CapturedEntry]:
        """Yield the scripts of failed batches."""
        while not self._committer.failed.empty():
            yield from self._committer.failed.get()

    def _close_stored(self) -> None:
        """Close scripts whose bytes are durable."""
        while not self._committer.stored.empty():
            for entry in self._committer.stored.get():
                entry.close()

    def _defer_entry(self, entry: CapturedEntry, error: OSError) -> None:
        """Keep an unreadable script for a retry; after a long time, leave it to a rescan."""
        now, key = time.monotonic(), (entry.job_id, entry.mtime_ns)
        unreadable = self._unreadable.get(key)
        if unreadable is None:
            log.error("cannot read job %d from the spool yet: %s", entry.job_id, error)
            unreadable = self._unreadable[key] = _UnreadableScript(entry, now, Backoff(0.1, 10.0))
            self._released.discard(key)
        unreadable.is_removed = entry.is_removed
        is_alone = isinstance(error, EnvironmentUnreadable)
        stays_open = self._is_recent(unreadable) or (unreadable.is_removed and not is_alone)
        if stays_open and len(self._unreadable) <= self._limits.max_unreadable:
            unreadable.at = now + unreadable.backoff.next_s()
            return
        del self._unreadable[key]
        if isinstance(error, EnvironmentUnreadable):
            log.error("job %d is archived without its environment: %s", entry.job_id, error)
            try:
                self._add_to_batch(entry, error.contents)
            except StoreUnavailable:
                self._unreadable[key] = unreadable
                unreadable.at = now + unreadable.backoff.next_s()
            return
        entry.close()
        if unreadable.is_removed:
            self._spool.vanished.append(entry.job_id)
            return
        self._released.add(key)
        self._rescan_at = self._rescan_at or now + self._rescans.next_s()

    def _retry_unreadable(self) -> None:
        """Queue unreadable scripts whose retry is due, and start a rescan if due."""
        if not self._unreadable and not self._rescan_at:
            return
        now = time.monotonic()
        for unreadable in self._unreadable.values():
            if 0 < unreadable.at <= now:
                unreadable.at = 0.0
                log.debug("job %d: reading the script again", unreadable.entry.job_id)
                self._spool.ready.append(unreadable.entry)
        if self._rescan_at and now >= self._rescan_at and self._can_rescan():
            self._rescan()

    def _can_rescan(self) -> bool:
        """Return whether a rescan takes nothing twice: all held scripts are gone from the spool."""
        return not self._spool.ready and all(
            unreadable.is_removed for unreadable in self._unreadable.values()
        )

    def _rescan(self) -> None:
        """Make the spool find unreadable scripts again, and report those it no longer has."""
        gone = {key for key in self._released if not self._spool.has_script(*key)}
        self._spool.vanished.extend(job_id for job_id, _ in gone)
        self._released -= gone
        self._rescan_at = 0.0
        if self._released:
            self._spool.rescan()
            self._rescan_at = time.monotonic() + self._rescans.next_s()
        else:
            self._rescans.reset()

    def _unreadable_due_s(self) -> float:
        """Return seconds until the next retry or rescan."""
        if not self._unreadable and not self._rescan_at:
            return math.inf
        dues = [unreadable.at for unreadable in self._unreadable.values() if unreadable.at]
        if self._rescan_at and self._can_rescan():
            dues.append(self._rescan_at)
        return max(0.0, min(dues, default=math.inf) - time.monotonic())

    def _report_missed(self, *, at_once: bool = False) -> None:
        """Log vanished jobs and report their scripts to the journal as a gap."""
        missed = self._spool.vanished
        if not missed:
            return
        now = time.monotonic()
        if now < self._next_report_at and not at_once:
            return
        self._next_report_at = now + self._limits.missed_every_s
        job_ids, missed[:] = list(dict.fromkeys(missed)), []
        suffix = (
            f" and {len(job_ids) - _MAX_JOBS_LOGGED} more"
            if len(job_ids) > _MAX_JOBS_LOGGED
            else ""
        )
        log.error(
            "%d scripts of %s are lost: slurmctld removed them before capture read them: jobs %s%s",
            len(job_ids),
            self._cluster,
            ", ".join(map(str, job_ids[:_MAX_JOBS_LOGGED])),
            suffix,
        )
        for start in range(0, len(job_ids), MAX_MISSED_JOB_IDS):
            event = make_missed_event(
                self._cluster, "spool", job_ids[start : start + MAX_MISSED_JOB_IDS]
            )
            self._committer.put(CaptureBatch(encode_rows([event]), [], []))

    def _add_to_batch(self, entry: CapturedEntry, contents: EntryContents | None = None) -> None:
        """Read a script and add it to the batch."""
        contents = contents or entry.read(self._redactor)
        events = contents.events
        size = 0
        if contents.script is not None or contents.flags:
            event = self._store_script(entry, contents)
            events = (*events, event)
            body = event.body
            size = sum(file.length for file in (body.script, body.environment) if file)
            self.captured += 1
            log.debug("job %d: captured script of %d bytes", entry.job_id, size)
        if not self._batch.held:
            self._gathering_since = time.monotonic()
        self._batch.rows.extend(encode_rows(events))
        self._batch.held.append(entry)
        self._batch.size += size

    def _store_script(self, entry: CapturedEntry, contents: EntryContents) -> Event:
        """Write a script to a store and build its event; try the next store on failure."""
        job_id, mtime_ns = entry.job_id, entry.mtime_ns
        script, environment = contents.script, contents.environment
        kept_script: IncomingFile | None = None
        kept_environment: IncomingFile | None = None
        store = self._find_store()
        try:
            # The environment first, so that a complete script implies that both are stored.
            if environment is not None and self._keeps_environments:
                name = make_incoming_filename(
                    self._cluster, job_id, mtime_ns, len(environment.data), "env"
                )
                kept_environment = store.write(name, environment.data)
            if script is not None:
                name = make_incoming_filename(
                    self._cluster, job_id, mtime_ns, len(script), "script"
                )
                kept_script = store.write(name, script)
        except StoreUnavailable as error:
            self._exclude_store(store, error)
            return self._store_script(entry, contents)
        self._written_stores.add(store.name)
        environment = environment or _NO_ENVIRONMENT
        return make_script_event(
            self._cluster,
            "spool",
            JobScript(
                job_id=job_id,
                spool_mtime_ns=mtime_ns,
                script=kept_script,
                environment=kept_environment,
                store=store.name,
                claimed_name=environment.name,
                claimed_dir=environment.directory or contents.directory,
                claimed_host=environment.host or contents.host,
                redacted=environment.redacted,
                flags=contents.flags,
            ),
        )

    def _find_store(self) -> IncomingStore:
        """Return the first usable store.

        Raises:
            StoreUnavailable: None is usable.
        """
        now = time.monotonic()
        for store in self._stores:
            if self._excluded_until.get(store.name, 0.0) > now:
                continue
            if store.name in self._written_stores:
                return store
            try:
                store.check()
            except StewardError as error:
                self._exclude_store(store, error)
                continue
            if self._problems.pop(store.name, ""):
                log.info("writing captured scripts to %s again", store.directory)
            return store
        raise StoreUnavailable("; ".join(self._problems.values()) or "no archive is available")

    def _exclude_store(self, store: IncomingStore, error: StewardError) -> None:
        """Exclude a store for some seconds, and log why."""
        self._excluded_until[store.name] = time.monotonic() + self._limits.retry_store_s
        if self._problems.get(store.name) != str(error):
            self._problems[store.name] = str(error)
            log.error("cannot write captured scripts to %s, retrying: %s", store.directory, error)

    def _commit_batch(self) -> None:
        """Hand the batch to the commit threads and begin a new one."""
        stores = [store for store in self._stores if store.name in self._written_stores]
        self._batch.unsynced = [store.take_unsynced() for store in stores]
        self._written_stores.clear()
        self._committer.put(self._batch)
        self._batch = CaptureBatch([], [], [])
