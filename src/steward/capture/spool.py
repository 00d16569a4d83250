"""From a watched spool to durable events: read, redact, keep, append.

The main thread takes hold of scripts and writes their bytes to a store. Two
more only wait: for the file system to make a batch durable, and for the journal
to have its events. A script's descriptors stay open until its bytes
are durable, so that they can be written again.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from steward.capture.scheduler import Contents, Spool, Taken
from steward.environment import Environment
from steward.errors import StewardError, Unavailable
from steward.events import Event, JobScript, Kept, script_event
from steward.incoming import Store, StoreUnavailable, Unsynced, kept_filename
from steward.journal.store import Row, rows_of
from steward.redact import Redactor
from steward.waiting import Backoff, Stop

log = logging.getLogger(__name__)

_SLICE = 16
"""Scripts read between two looks at the spool: short-lived jobs must not wait for long ones."""
_BATCH = 256
_BATCH_BYTES = 32 << 20
"""A batch goes when it has so many: what is written should not wait long to be durable."""
_GATHER_S = 0.1
_RETRY_STORE_S = 5.0
_LONGEST_NAP_S = 5.0
_LAST_WORDS_S = 4.0

_NO_ENVIRONMENT = Environment(data=b"")

AppendRows = Callable[[Sequence[Row]], None]


class SpoolUnavailable(Unavailable):
    """There is no spool to be read now."""


class _Batch(msgspec.Struct):
    """What is written and not durable yet."""

    rows: list[Row]
    held: list[Taken]
    unsynced: list[Unsynced]
    size: int = 0


class Committer:
    """The threads that wait: one makes batches durable, one appends their events, in order."""

    def __init__(self, append: AppendRows) -> None:
        self._append = append
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[list[Taken]] = queue.SimpleQueue()
        self.kept: queue.SimpleQueue[list[Taken]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.under_way = 0
        self.is_syncing = False
        self.complaint = ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._durable: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("syncer", self._sync_all), ("committer", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, batch: _Batch) -> None:
        """Hand a batch over."""
        with self._lock:
            self.under_way += len(batch.held)
        self.is_syncing = True
        self._batches.put(batch)

    def finish(self, timeout_s: float) -> bool:
        """Commit all that was handed over and end; whether it was done in time."""
        self._ending.set()
        self._batches.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return False
        os.close(self.fd)
        return True

    def _sync_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            if self._sync(batch):
                self._durable.put(batch)
                # The store has the bytes now, under names that tell what they are: descriptors
                # held until the journal is back would soon be all that there are. The main
                # thread closes them: two threads would wait for the interpreter at each close.
                self.kept.put(batch.held)
                os.eventfd_write(self.fd, 1)
            else:
                self.failed.put(batch.held)
                self._done(batch)
            self.is_syncing = not self._batches.empty()
        self._durable.put(None)

    def _commit_all(self) -> None:
        while (batch := self._durable.get()) is not None:
            if self._commit(batch):
                self._done(batch)

    def _done(self, batch: _Batch) -> None:
        with self._lock:
            self.under_way -= len(batch.held)
        # There is something to be taken back, or the next batch may come.
        os.eventfd_write(self.fd, 1)

    def _sync(self, batch: _Batch) -> bool:
        done = True
        # All of them, whatever becomes of the first: each lets go of its descriptors.
        for unsynced in batch.unsynced:
            try:
                unsynced.sync()
            except Unavailable as error:
                self._complain(batch, error)
                done = False
        return done

    def _commit(self, batch: _Batch) -> bool:
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                self._append(batch.rows)
            except StewardError as error:
                self._complain(batch, error)
                if self._ending.wait(backoff.next_s()):
                    return False
            else:
                return True

    def _complain(self, batch: _Batch, error: StewardError) -> None:
        self.complaint = str(error)
        log.error("%d scripts could not be made durable yet: %s", len(batch.held), error)


class Capture:
    """Captures one share of one cluster's spool.

    Args:
        cluster: The cluster's name.
        spool: What is watched.
        stores: Where bytes may go, the preferred one first.
        redactor: Takes secrets out of environments.
        append: Appends encoded events durably; may block.
        environments: Whether environments are kept.
    """

    def __init__(
        self,
        cluster: str,
        spool: Spool,
        stores: Sequence[Store],
        redactor: Redactor,
        append: AppendRows,
        *,
        environments: bool = True,
    ) -> None:
        self.captured = 0
        self._cluster = cluster
        self._spool = spool
        self._stores = stores
        self._shut: dict[str, float] = {}
        self._redactor = redactor
        self._committer = Committer(append)
        self._environments = environments
        self._batch = _Batch([], [], [])
        self._gathering_since = 0.0
        self._touched: set[str] = set()
        self._backoff = Backoff(0.1, 5.0)
        self._again_at = 0.0
        self._complaints: dict[str, str] = {}
        self._beat: Callable[[], None] = lambda: None

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Capture until the Stop is raised; then finish what is in hand.

        Args:
            stop: Ends it.
            beat: Called for each script and while waiting: a large one takes seconds.
        """
        self._beat = beat
        while not stop.is_set():
            beat()
            self.turn()
            if not self._spool.ready or time.monotonic() < self._again_at:
                stop.wait(self._nap_s(), self._spool.fd, self._committer.fd)
        self.finish()

    def run_once(self) -> None:
        """Capture what lies in the spool now, and return when it is durable.

        Raises:
            SpoolUnavailable: The spool is not there.
            StoreUnavailable: Nothing could be kept.
        """
        self._spool.look()
        if self._spool.away:
            raise SpoolUnavailable(self._spool.away)
        # Where leases do not work a script is taken when it was seen twice, a little later.
        while self._spool.ready or self._spool.due_s() < 1.0:
            if not self._spool.ready:
                time.sleep(self._spool.due_s())
            self.turn()
            if self._again_at:
                self.finish()
                raise StoreUnavailable(self._complaint())
        if not self.finish():
            raise StoreUnavailable(f"not all scripts could be made durable: {self._complaint()}")

    def turn(self) -> None:
        """One look at the spool, and a slice of work."""
        self._spool.look()
        self._take_back()
        if time.monotonic() < self._again_at:
            return
        ready = self._spool.ready
        for _ in range(min(_SLICE, len(ready))):
            taken = ready.popleft()
            self._beat()
            try:
                self._keep(taken)
            except StoreUnavailable:
                # Said by _store; the descriptors keep the bytes until there is room again.
                ready.appendleft(taken)
                self._again_at = time.monotonic() + self._backoff.next_s()
                break
            except OSError as error:
                log.error("job %d cannot be read from the spool: %s", taken.job_id, error)
                taken.close()
            if self._batch.size >= _BATCH_BYTES:
                self._hand_over()
        else:
            self._again_at = 0.0
            self._backoff.reset()
        if self._batch.held and self._is_due():
            self._hand_over()

    def _is_due(self) -> bool:
        """Whether the batch should go: at once, but not while an earlier one is under way.

        What comes meanwhile gathers, so that batches grow with the load by
        themselves. Bytes are made durable soon even if the journal is away.
        """
        if len(self._batch.held) >= _BATCH:
            return True
        if self._spool.ready and not self._again_at:
            return False
        waited_s = time.monotonic() - self._gathering_since
        committer = self._committer
        return not committer.under_way or (waited_s > _GATHER_S and not committer.is_syncing)

    def finish(self) -> bool:
        """Write out and commit what is in hand; whether all of it is durable."""
        until = time.monotonic() + _LAST_WORDS_S
        while self._spool.ready and not self._again_at and time.monotonic() < until:
            self.turn()
        if self._batch.held:
            self._hand_over()
        done = self._committer.finish(max(0.1, until - time.monotonic()))
        self._close_kept()
        left = len(self._spool.ready) + self._committer.under_way
        if left:
            log.warning("%d scripts are not captured yet; the next start finds them", left)
        self._spool.close()
        return done and not left and self._committer.failed.empty()

    def _complaint(self) -> str:
        said = [*self._complaints.values(), self._committer.complaint]
        return "; ".join(filter(None, said)) or "it took too long"

    def _nap_s(self) -> float:
        nap_s = min(self._spool.due_s(), _LONGEST_NAP_S)
        if self._spool.ready:
            return min(nap_s, max(0.01, self._again_at - time.monotonic()))
        if self._batch.held:
            return min(nap_s, _GATHER_S)
        return nap_s

    def _take_back(self) -> None:
        with suppress(BlockingIOError):  # nothing has failed since the last look
            os.eventfd_read(self._committer.fd)
        while not self._committer.failed.empty():
            self._spool.ready.extendleft(reversed(self._committer.failed.get()))
            self._again_at = time.monotonic() + self._backoff.next_s()
        self._close_kept()

    def _close_kept(self) -> None:
        while not self._committer.kept.empty():
            for held in self._committer.kept.get():
                held.close()

    def _keep(self, taken: Taken) -> None:
        contents = taken.read(self._redactor)
        events = contents.events
        size = 0
        if contents.script is not None or contents.flags:
            event = self._write(taken, contents)
            events = (*events, event)
            body = event.body
            size = sum(kept.length for kept in (body.script, body.environment) if kept)
            self.captured += 1
        if not self._batch.held:
            self._gathering_since = time.monotonic()
        self._batch.rows.extend(rows_of(events))
        self._batch.held.append(taken)
        self._batch.size += size

    def _write(self, taken: Taken, contents: Contents) -> Event:
        job_id, mtime_ns = taken.job_id, taken.mtime_ns
        script, environment = contents.script, contents.environment
        kept_script: Kept | None = None
        kept_environment: Kept | None = None
        store = self._store()
        try:
            # The environment first: a complete script then tells that both are here.
            if environment is not None and self._environments:
                name = kept_filename(self._cluster, job_id, mtime_ns, len(environment.data), "env")
                kept_environment = store.write(name, environment.data)
            if script is not None:
                name = kept_filename(self._cluster, job_id, mtime_ns, len(script), "script")
                kept_script = store.write(name, script)
        except StoreUnavailable as error:
            self._shut_out(store, error)
            return self._write(taken, contents)
        self._touched.add(store.name)
        environment = environment or _NO_ENVIRONMENT
        return script_event(
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

    def _store(self) -> Store:
        """The first store that can be used now.

        Raises:
            StoreUnavailable: None of them can.
        """
        now = time.monotonic()
        for store in self._stores:
            if self._shut.get(store.name, 0.0) > now:
                continue
            if store.name in self._touched:
                return store
            try:
                store.check()
            except StewardError as error:
                self._shut_out(store, error)
                continue
            if self._complaints.pop(store.name, ""):
                log.info("captured bytes go to %s again", store.directory)
            return store
        raise StoreUnavailable("; ".join(self._complaints.values()) or "no store is there")

    def _shut_out(self, store: Store, error: StewardError) -> None:
        self._shut[store.name] = time.monotonic() + _RETRY_STORE_S
        if self._complaints.get(store.name) != str(error):
            self._complaints[store.name] = str(error)
            log.error("captured bytes cannot go to %s for now: %s", store.directory, error)

    def _hand_over(self) -> None:
        touched = [store for store in self._stores if store.name in self._touched]
        self._batch.unsynced = [store.take_unsynced() for store in touched]
        self._touched.clear()
        self._committer.put(self._batch)
        self._batch = _Batch([], [], [])
