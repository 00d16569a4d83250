"""Sampling of running jobs on a compute node: CPU, memory, pressure, I/O and GPUs.

``steward-agent`` does not start it yet. It needs only the standard library of
Python 3.9 or later. :mod:`steward.agent.readings` reads jobs and node. Three threads sample, send
and read the GPUs, so that neither a receiver nor a driver that hangs stalls the samples.

Wire format, version 1: an agent posts a batch to ``/nodes/1/samples`` each minute, as JSON::

    {"v": 1, "node": NODENAME, "boot": ID, "batch": N,
     "samples": [{"at_ms": T, "job": JOB, "step": STEP, "sluid": SLUID,
                  "values": {SERIES: NUMBER}}],
     "dropped": COUNT}

- ``batch`` is unique within a boot and grows. A batch that is sent again is the same text.
- ``at_ms`` is the time of the sample, in ms since 1970.
- ``job`` is Slurm's job id; null for the node's totals, or while only the SLUID is known.
- ``step`` is ``batch``, ``extern``, ``interactive`` or a number; "" for the whole job.
- ``sluid`` is the SLUID of the job (Slurm 26.05 and later), else "".
- ``dropped`` counts the samples that the agent dropped since the batch before.

Series, whose names are in :data:`SERIES` and :data:`GPU_SERIES`. A value that could not be read is
absent, never 0. Counters are cumulative; one that shrinks was started again.

- ``cpu_user_us``, ``cpu_system_us``, ``throttled_us``: counters of CPU time, and of throttled time.
- ``anon_bytes``, ``shmem_bytes``, ``file_bytes``, ``kernel_bytes``: memory now; ``file_bytes`` is
  page cache without shmem. ``memory_limit_bytes`` is absent without a limit, ``memory_peak_bytes``
  is the kernel's own peak. Without cgroups only ``anon_bytes`` is known.
- ``oom_kills``: counter of processes that the kernel killed for memory.
- ``pressure_*_us``: counters of the time in which some process waited (PSI, line "some").
- ``read_bytes``, ``written_bytes``: counters of bytes that processes read and wrote by system
  calls, network file systems included: at least these, as processes may start and end between two
  samples.
- ``processes``: number of processes.
- ``gpu.N.NAME``: GPU with minor number N, in the node's totals only: Slurm's allocation decides
  which job a GPU belongs to.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    # Job id, SLUID and step of a group of processes; step "" is the whole job.
    Key = tuple[int | None, str, str]
    Values = dict[str, int]

    class GpuLibrary(Protocol):
        """Library of a vendor, as the GPU thread uses it."""

        def read(self) -> Values:
            """Read all GPUs; open the devices if needed. Raises OSError."""

        def release(self) -> None:
            """Close the devices."""


VERSION = 1
PATH = "/nodes/1/samples"
SERIES = (
    *("cpu_user_us", "cpu_system_us", "throttled_us"),
    *("anon_bytes", "shmem_bytes", "file_bytes", "kernel_bytes"),
    *("memory_limit_bytes", "memory_peak_bytes", "oom_kills"),
    *("pressure_memory_us", "pressure_cpu_us", "pressure_io_us"),
    *("read_bytes", "written_bytes", "processes"),
)
GPU_SERIES = ("utilization_percent", "memory_bytes", "power_mw", "energy_mj", "processes")

_BATCH_BYTES = 1 << 19
"""Size of the samples of a batch, in bytes: half of what Steward accepts."""
_WAITING_BYTES = 4 << 20
_LONGEST_WAIT_S = 600.0


class BatchRejected(Exception):
    """Steward will never accept this batch."""


class BatchUnavailable(Exception):
    """The batch may not be stored; ``after_s`` is the requested delay, in seconds."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class SampleBuffer:
    """Samples that wait for Steward, in bounded memory; thread-safe.

    Args:
        node: NodeName.
        boot: Boot id.
        most_bytes: Size of waiting samples above which the oldest are dropped and counted.
        first: Number of the first batch. Default the time in ms, so that a restarted agent uses
            no number again.
    """

    def __init__(
        self, node: str, boot: str, most_bytes: int = _WAITING_BYTES, first: int | None = None
    ) -> None:
        self._node, self._boot = node, boot
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._size = 0
        self._dropped = 0
        self._number = int(time.time() * 1000) if first is None else first
        self._pending: tuple[int, bytes, int] | None = None

    def add(self, at_ms: int, readings: list[tuple[Key, Values]]) -> None:
        """Add the readings of one time; drop the oldest samples beyond the limit."""
        import json

        texts = []
        for (job, sluid, step), values in readings:
            sample = {"at_ms": at_ms, "job": job, "step": step, "sluid": sluid, "values": values}
            texts.append(json.dumps(sample, separators=(",", ":")))
        with self._lock:
            self._waiting.extend(texts)
            self._size += sum(map(len, texts))
            while self._size > self._most_bytes:
                self._size -= len(self._waiting.popleft())
                self._dropped += 1

    def next_batch(self) -> tuple[int, bytes] | None:
        """Return number and JSON of the next batch, the same one until it is confirmed; or None."""
        import json

        with self._lock:
            if self._pending is None:
                if not self._waiting:
                    return None
                texts: list[str] = []
                size = 0
                while self._waiting and (not texts or size + len(self._waiting[0]) < _BATCH_BYTES):
                    texts.append(self._waiting.popleft())
                    size += len(texts[-1])
                self._size -= size
                head = {"v": VERSION, "node": self._node, "boot": self._boot}
                head.update(batch=self._number, dropped=self._dropped)
                body = f'{json.dumps(head)[:-1]}, "samples": [{",".join(texts)}]}}'
                self._pending = self._number, body.encode(), len(texts)
                self._number += 1
                self._dropped = 0
            return self._pending[:2]

    def confirm(self) -> None:
        """Forget the batch that Steward stored."""
        with self._lock:
            self._pending = None

    def discard(self) -> None:
        """Drop and count the samples of a batch that Steward rejected."""
        with self._lock:
            if self._pending is not None:
                self._dropped += self._pending[2]
                self._pending = None


def send_waiting(
    buffer: SampleBuffer, deliver: Callable[[int, bytes], None], report: Callable[[str], object]
) -> float:
    """Send all waiting batches; return the delay before a retry, in seconds, or 0.

    Args:
        buffer: The samples.
        deliver: Sends number and JSON of a batch; raises BatchRejected or BatchUnavailable.
        report: Gets the message of a failure.
    """
    while (batch := buffer.next_batch()) is not None:
        try:
            deliver(*batch)
        except BatchRejected as error:
            report(str(error))
            buffer.discard()
        except BatchUnavailable as error:
            report(str(error))
            return min(error.after_s or 60.0, _LONGEST_WAIT_S)
        else:
            buffer.confirm()
    return 0.0


class SamplingService:
    """Threads that sample a node and send the samples, until ``stop``.

    Args:
        read: Reads the node, jobs and steps.
        buffer: Where samples wait.
        deliver: Sends number and JSON of a batch; raises BatchRejected or BatchUnavailable.
        report: Gets the messages of failures.
        node: NodeName, which spreads the nodes' batches over the interval.
        read_gpus: Returns the GPUs' values for the node's totals.
        interval_s: Interval of samples, in seconds.
        batch_s: Interval of batches, in seconds.
    """

    def __init__(
        self,
        read: Callable[[], list[tuple[Key, Values]]],
        buffer: SampleBuffer,
        deliver: Callable[[int, bytes], None],
        report: Callable[[str], object],
        *,
        node: str,
        read_gpus: Callable[[], Values] | None = None,
        interval_s: float = 15.0,
        batch_s: float = 60.0,
    ) -> None:
        self._read, self._read_gpus = read, read_gpus
        self._buffer, self._deliver, self._report = buffer, deliver, report
        self._interval_s, self._batch_s = interval_s, batch_s
        self._offset_s = zlib.crc32(node.encode()) % 1000 / 1000.0 * batch_s
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._sample_until_stopped, self._send_until_stopped)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the threads; waiting samples are lost."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout_s)

    def sample(self) -> None:
        """Sample once."""
        at_ms = int(time.time() * 1000)
        readings = self._read()
        if self._read_gpus is not None:
            readings[0][1].update(self._read_gpus())
        self._buffer.add(at_ms, [(key, values) for key, values in readings if values])

    def _sample_until_stopped(self) -> None:
        # The kernel's priority of this thread alone: jobs go first.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        last_message = ""
        # Multiples of the interval on all nodes at once, so that ticks disturb all ranks together.
        while not self._stopped.wait(self._interval_s - time.time() % self._interval_s):
            try:
                self.sample()
            except Exception as error:  # one broken file must not end the samples
                message = f"cannot sample the node: {type(error).__name__}: {error}"
                if message != last_message:
                    self._report(message)
                last_message = message

    def _send_until_stopped(self) -> None:
        wait_s = 0.0
        while True:
            wait_s = wait_s or self._batch_s - (time.time() - self._offset_s) % self._batch_s
            if self._stopped.wait(wait_s):
                return
            try:
                wait_s = send_waiting(self._buffer, self._deliver, self._report)
            except Exception as error:
                self._report(f"cannot send samples: {type(error).__name__}: {error}")
                wait_s = self._batch_s
            # Nodes that failed together must not retry together.
            wait_s *= 1.0 + int.from_bytes(os.urandom(2), "big") / 2**16


# GPUs


class GpuThread:
    """Thread that reads GPUs, so that a driver that hangs stalls nothing else.

    Args:
        library: Library of the vendor.
        flag_path: While this file exists, the devices are closed.
        report: Gets the messages of failures.
        interval_s: Interval of readings, in seconds.
    """

    def __init__(
        self,
        library: GpuLibrary,
        flag_path: str,
        report: Callable[[str], object],
        interval_s: float = 15.0,
    ) -> None:
        self._library, self._flag_path, self._report = library, flag_path, report
        self._interval_s = interval_s
        self._latest: tuple[float, Values] = (0.0, {})
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close the devices, unless the driver hangs."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def take_latest(self) -> Values:
        """Return the newest values; empty if they are older than two intervals."""
        at_s, values = self._latest
        return dict(values) if time.monotonic() - at_s < 2.0 * self._interval_s else {}

    def step(self, *, is_due: bool) -> None:
        """Close the devices if the flag file exists, else read them if a reading is due."""
        if os.path.lexists(self._flag_path):
            self._latest = (0.0, {})
            self._library.release()
        elif is_due:
            self._latest = (time.monotonic(), self._library.read())

    def _run(self) -> None:
        next_s, last_message = 0.0, ""
        while not self._stopped.wait(0.5):
            begin_s = time.monotonic()
            is_due = begin_s >= next_s
            try:
                self.step(is_due=is_due)
            except Exception as error:
                message = f"cannot read the GPUs: {error}"
                if message != last_message:
                    self._report(message)
                last_message = message
                self._library.release()
            if is_due:
                # A slow driver is asked less often.
                is_slow = time.monotonic() - begin_s > 0.05 * self._interval_s
                next_s = begin_s + self._interval_s * (2.0 if is_slow else 0.9)
        self._library.release()


_NVML_INSUFFICIENT_SIZE = 7


class Nvml:
    """GPUs of NVIDIA, by libnvidia-ml through ctypes.

    Args:
        library_name: Name or path of the library.
    """

    def __init__(self, library_name: str = "libnvidia-ml.so.1") -> None:
        self._library_name = library_name
        self._library: Any = None
        self._is_open = False

    def read(self) -> Values:
        """Read all GPUs; open the devices if needed.

        Raises:
            OSError: The library or the driver failed.
        """
        import ctypes

        if self._library is None:
            self._library = ctypes.CDLL(self._library_name)
        library = self._library
        if not self._is_open:
            self._check("nvmlInit_v2", library.nvmlInit_v2())
            self._is_open = True
        count = ctypes.c_uint()
        self._check("nvmlDeviceGetCount_v2", library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        values: Values = {}
        for index in range(count.value):
            device = ctypes.c_void_p()
            # One GPU that is lost does not hide the others.
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                values.update(self._read_device(device))
        return values

    def _read_device(self, device: Any) -> Values:
        """Read a GPU; a value that the card does not support is absent."""
        import ctypes

        minor = ctypes.c_uint()
        if not self._call("nvmlDeviceGetMinorNumber", device, minor):
            return {}
        values: Values = {}
        utilization = (ctypes.c_uint * 2)()  # GPU, memory controller
        if self._call("nvmlDeviceGetUtilizationRates", device, utilization):
            values["utilization_percent"] = utilization[0]
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        if self._call("nvmlDeviceGetMemoryInfo", device, memory):
            values["memory_bytes"] = memory[2]
        power = ctypes.c_uint()
        if self._call("nvmlDeviceGetPowerUsage", device, power):
            values["power_mw"] = power.value
        energy = ctypes.c_ulonglong()
        if self._call("nvmlDeviceGetTotalEnergyConsumption", device, energy):
            values["energy_mj"] = energy.value
        processes = ctypes.c_uint(0)
        function = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if function is not None:
            code = function(device, ctypes.byref(processes), None)
            if code in (0, _NVML_INSUFFICIENT_SIZE):
                values["processes"] = processes.value
        return {f"gpu.{minor.value}.{name}": value for name, value in values.items()}

    def _call(self, name: str, device: Any, result: Any) -> bool:
        import ctypes

        function = getattr(self._library, name, None)
        return function is not None and function(device, ctypes.byref(result)) == 0

    def release(self) -> None:
        """Close the devices."""
        if self._is_open:
            self._is_open = False
            self._library.nvmlShutdown()

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code != 0:
            raise OSError(f"{name} failed with code {code}")
