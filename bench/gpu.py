"""What NVML costs a process that samples GPUs, and what it tells of them.

``python bench/gpu.py`` on a machine with an NVIDIA driver. The standard library is all it needs:
NVML is called by ctypes, and so is the CUDA driver, for the programs that keep a GPU busy. Where
the driver is not installed, it says so and ends.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from typing import Final

CALLS: Final = 400
RESOLUTION_S: Final = 3.0
PLAY_S: Final = 600
# Numbers of fields in nvml.h: NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, NVML_FI_DEV_POWER_INSTANT.
ENERGY_FIELD: Final = 83
INSTANT_POWER_FIELD: Final = 186
BUSY_SHARES: Final = {"busy": 1.0, "half": 0.5}
# Fused multiplications whose result is stored, so that no compiler leaves them out.
KERNEL: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry work(.param .u64 sums, .param .u32 rounds) {
  .reg .u64 %address; .reg .u32 %left; .reg .f32 %sum; .reg .pred %more;
  ld.param.u64 %address, [sums];
  ld.param.u32 %left, [rounds];
  mov.f32 %sum, 0f3F800000;
again:
  fma.rn.f32 %sum, %sum, 0f3F7FFFFF, 0f33800000;
  sub.u32 %left, %left, 1;
  setp.ne.u32 %more, %left, 0;
  @%more bra again;
  st.global.f32 [%address], %sum;
  ret;
}
\0"""


class Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample period, of the driver's choice."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t: memory in bytes."""

    _fields_ = (
        ("pid", c_uint),
        ("used_memory", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class Field(ctypes.Structure):
    """nvmlFieldValue_t, its value read as an unsigned number."""

    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp_us", c_longlong),
        ("latency_us", c_longlong),
        ("kind", c_uint),
        ("code", c_int),
        ("value", c_ulonglong),
    )


class ProcessSample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: percent of the GPU."""

    _fields_ = (
        ("pid", c_uint),
        ("timestamp_us", c_ulonglong),
        ("sm", c_uint),
        ("memory", c_uint),
        ("encoder", c_uint),
        ("decoder", c_uint),
    )


class Card:
    """The first GPU, by NVML: each method makes one call, and raises OSError where it fails."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._nvml.nvmlErrorString.restype = c_char_p
        self.handle = c_void_p()
        self._gpm_sample = c_void_p()

    def open(self) -> None:
        """Begin to use the driver."""
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, byref(self.handle))

    def close(self) -> None:
        """Let go of all devices."""
        self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise OSError(f"{name}: {self._nvml.nvmlErrorString(code).decode()}")

    def _count(self, name: str, *arguments: object, kind: type = c_uint) -> int:
        value = kind()
        self._call(name, self.handle, *arguments, byref(value))
        return int(value.value)

    def _text(self, name: str) -> str:
        text = ctypes.create_string_buffer(128)
        self._call(name, self.handle, text, len(text))
        return text.value.decode()

    def name(self) -> str:
        """Return the product's name."""
        return self._text("nvmlDeviceGetName")

    def uuid(self) -> str:
        """Return the name that stays over restarts."""
        return self._text("nvmlDeviceGetUUID")

    def driver(self) -> str:
        """Return the driver's version."""
        text = ctypes.create_string_buffer(128)
        self._call("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode()

    def minor(self) -> int:
        """Return N of /dev/nvidiaN."""
        return self._count("nvmlDeviceGetMinorNumber")

    def persistence(self) -> int:
        """Return 1 where the driver keeps the GPU initialized without a user."""
        return self._count("nvmlDeviceGetPersistenceMode")

    def mig(self) -> str:
        """Return whether the GPU is cut into instances."""
        now, later = c_uint(), c_uint()
        self._call("nvmlDeviceGetMigMode", self.handle, byref(now), byref(later))
        return "on" if now.value else "off"

    def utilization(self) -> Utilization:
        """Return the share of time in which anything ran."""
        value = Utilization()
        self._call("nvmlDeviceGetUtilizationRates", self.handle, byref(value))
        return value

    def memory(self) -> int:
        """Return the bytes in use."""
        value = Memory()
        self._call("nvmlDeviceGetMemoryInfo", self.handle, byref(value))
        return int(value.used)

    def power_mw(self) -> int:
        """Return the mean power of the last second."""
        return self._count("nvmlDeviceGetPowerUsage")

    def energy_mj(self) -> int:
        """Return the energy since the driver was loaded."""
        return self._count("nvmlDeviceGetTotalEnergyConsumption", kind=c_ulonglong)

    def energy_as_field(self) -> int:
        """Return the same by the call for many fields."""
        return self._field(ENERGY_FIELD)

    def instant_power_as_field(self) -> int:
        """Return the present power, by the call for many fields."""
        return self._field(INSTANT_POWER_FIELD)

    def _field(self, number: int) -> int:
        field = Field(field=number)
        self._call("nvmlDeviceGetFieldValues", self.handle, 1, byref(field))
        if field.code:
            raise OSError(f"field {number}: {self._nvml.nvmlErrorString(field.code).decode()}")
        return int(field.value)

    def gpm_sample(self) -> None:
        """Take a sample of the counters that Hopper and later GPUs have."""
        if self._gpm_sample.value is None:
            self._call("nvmlGpmSampleAlloc", byref(self._gpm_sample))
        self._call("nvmlGpmSampleGet", self.handle, self._gpm_sample)

    def temperature(self) -> int:
        """Return degrees Celsius."""
        return self._count("nvmlDeviceGetTemperature", c_int(0))

    def processes(self) -> list[Process]:
        """Return the processes that have a compute context."""
        count = c_uint(64)
        found = (Process * 64)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, byref(count), found)
        return list(found[: count.value])

    def process_samples(self) -> list[ProcessSample]:
        """Return the latest samples of each process; raises OSError where there are none."""
        count = c_uint(256)
        found = (ProcessSample * 256)()
        since = c_ulonglong(0)
        name = "nvmlDeviceGetProcessUtilization"
        self._call(name, self.handle, found, byref(count), since)
        return list(found[: count.value])

    def tick(self) -> None:
        """Make all calls that a sample of one GPU needs."""
        for call in (self.utilization, self.memory, self.power_mw, self.energy_mj, self.processes):
            call()


def play(part: str) -> None:
    """Hold 256 MiB of the GPU and keep it busy by the part's share of the time, or idle."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name}: CUDA error {code}")

    context, module, kernel, sums = c_void_p(), c_void_p(), c_void_p(), c_ulonglong()
    call("cuInit", 0)
    call("cuCtxCreate_v2", byref(context), 0, 0)
    call("cuMemAlloc_v2", byref(sums), ctypes.c_size_t(256 << 20))
    call("cuModuleLoadData", byref(module), KERNEL)
    call("cuModuleGetFunction", byref(kernel), module, b"work")
    rounds = c_uint(2_000_000)
    addresses = (c_void_p * 2)(
        ctypes.cast(byref(sums), c_void_p), ctypes.cast(byref(rounds), c_void_p)
    )
    share = BUSY_SHARES.get(part, 0)
    print("ready", flush=True)
    end = time.monotonic() + PLAY_S
    while time.monotonic() < end:
        begin = time.monotonic()
        if share:
            call("cuLaunchKernel", kernel, 132, 1, 1, 1024, 1, 1, 0, None, addresses, None)
            call("cuCtxSynchronize")
            took_s = time.monotonic() - begin
            print(took_s, flush=True)
            time.sleep(took_s / share - took_s)
        else:
            time.sleep(1)


@contextmanager
def player(part: str) -> Iterator[subprocess.Popen[str]]:
    """Run this program beside itself, to hold the GPU or keep it busy."""
    command = [sys.executable, __file__, "--play", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise OSError(f"no program could use the GPU (part {part})")
            yield process
        finally:
            process.kill()


def rates_of(process: subprocess.Popen[str], seconds: float) -> list[float]:
    """Read what each launch of a busy player took, in ms, for so many seconds."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    times = []
    while time.monotonic() < end:
        times.append(float(process.stdout.readline()) * 1e3)
    return times


def time_calls(
    what: str, call: Callable[[], object], count: int = CALLS, pause_s: float = 0.002
) -> None:
    """Print wall and CPU time of a call, of which none or all fail."""
    walls, cpus = [], []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            call()
        except OSError as error:
            print(f"  {what}: {error}")
            return
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.thread_time() - cpu) * 1e3)
        time.sleep(pause_s)
    walls.sort()
    cpus.sort()
    print(
        f"  {what}: wall p50 {statistics.median(walls):.3f}, p99 {walls[-count // 100 - 1]:.3f}, "
        f"most {walls[-1]:.3f} ms; CPU p50 {statistics.median(cpus):.3f}, most {cpus[-1]:.3f} ms"
    )


def time_all(card: Card) -> None:
    """Time each call."""
    for call in (
        card.tick,
        card.utilization,
        card.memory,
        card.power_mw,
        card.energy_mj,
        card.energy_as_field,
        card.instant_power_as_field,
        card.gpm_sample,
        card.temperature,
        card.processes,
        card.process_samples,
        card.mig,
        card.minor,
        card.uuid,
    ):
        time_calls(call.__name__, call)


def show_resolution(card: Card) -> None:
    """Print how often a figure changes, and whether energy is what power sums up to."""
    for call in (
        card.energy_mj,
        card.power_mw,
        card.instant_power_as_field,
        lambda: card.utilization().gpu,
    ):
        gaps, last, changed = [], call(), time.monotonic()
        end = changed + RESOLUTION_S
        while (now := time.monotonic()) < end:
            if (value := call()) != last:
                gaps.append(now - changed)
                last, changed = value, now
        name = getattr(call, "__name__", "?").replace("<lambda>", "utilization")
        if gaps:
            middle = statistics.median(gaps) * 1e3
            print(f"  {name} changes every {middle:.1f} ms, at most {max(gaps) * 1e3:.1f}")
        else:
            print(f"  {name} did not change in {RESOLUTION_S:.0f} s")
    begin, energy, powers = time.monotonic(), card.energy_mj(), []
    while time.monotonic() < begin + RESOLUTION_S:
        powers.append(card.power_mw())
        time.sleep(0.02)
    by_power = statistics.fmean(powers) / 1e3 * (time.monotonic() - begin)
    print(
        f"  energy counter {(card.energy_mj() - energy) / 1e3:.1f} J, power x time {by_power:.1f} J"
    )


def show_processes(card: Card, *players: subprocess.Popen[str]) -> None:
    """Print the processes that NVML lists, beside those that were started here."""
    seen = [(process.pid, process.used_memory >> 20) for process in card.processes()]
    print(f"  processes (pid, MiB): {seen}; started here: {[player.pid for player in players]}")
    try:
        latest = {sample.pid: (sample.sm, sample.memory) for sample in card.process_samples()}
        print(f"  share by process (pid: SM %, memory %): {latest}")
    except OSError as error:
        print(f"  {error}")
    rates = card.utilization()
    print(f"  utilization {rates.gpu} %, memory {rates.memory} %, used {card.memory() >> 20} MiB")


def devices_held() -> list[str]:
    """Return the devices of the driver that this process has open."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sorted(target for target in targets if target.startswith("/dev/nvidia"))


def resident_kib() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def show_opening(card: Card, before: int) -> None:
    """Print what init and shutdown cost and leave open."""
    print(f"  resident: {before} KiB, {resident_kib()} with the library loaded")
    for turn in range(3):
        begin, cpu = time.perf_counter(), time.process_time()
        card.open()
        took_ms, used_ms = (time.perf_counter() - begin) * 1e3, (time.process_time() - cpu) * 1e3
        print(
            f"  init {turn + 1}: {took_ms:.1f} ms, CPU {used_ms:.1f} ms, {len(devices_held())} open"
        )
        card.tick()
        begin = time.perf_counter()
        card.close()
        took_ms = (time.perf_counter() - begin) * 1e3
        print(f"  shutdown {turn + 1}: {took_ms:.1f} ms; held after it: {devices_held()}")
    card.open()
    card.tick()
    threads = len(os.listdir("/proc/self/task"))
    print(f"  resident: {resident_kib()} KiB while open; {threads} threads")
    print(f"  held while open: {devices_held()}")


def show_a_delayed_main_thread(card: Card) -> None:
    """Print how late the main thread wakes while another thread makes a call after the other."""
    for polling in (False, True):
        stop = threading.Event()

        def poll(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                card.tick()

        thread = threading.Thread(target=poll)
        if polling:
            thread.start()
        late = []
        for _ in range(500):
            begin = time.perf_counter()
            time.sleep(0.002)
            late.append((time.perf_counter() - begin - 0.002) * 1e3)
        stop.set()
        if polling:
            thread.join()
        late.sort()
        beside = "beside a thread that polls" if polling else "alone"
        print(f"  main thread late, {beside}: p50 {late[250]:.3f}, p99 {late[495]:.3f} ms")


def show_a_slowed_kernel(card: Card) -> None:
    """Print how long a kernel takes beside frequent samples."""
    with player("busy") as process:
        rates_of(process, 1)
        for _ in range(3):
            alone = statistics.median(rates_of(process, 2))
            stop = threading.Event()

            def poll(stop: threading.Event = stop) -> None:
                while not stop.wait(0.01):
                    card.tick()

            thread = threading.Thread(target=poll)
            thread.start()
            beside = statistics.median(rates_of(process, 2))
            stop.set()
            thread.join()
            print(f"  a launch: {alone:.3f} ms, {beside:.3f} ms beside 100 ticks a second")


def main() -> None:
    """Print all measurements."""
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2])
        return
    before = resident_kib()
    try:
        card = Card()
    except OSError as error:
        print(f"gpu: nothing measured: {error}")
        return
    print("opening, without another user of the driver")
    show_opening(card, before)
    print(f"{card.name()}, driver {card.driver()}, {card.uuid()}, minor {card.minor()}")
    print(
        f"persistence mode {card.persistence()}, MIG {card.mig()}, Python {sys.version.split()[0]}"
    )
    print("no process")
    time_all(card)
    time_calls("tick, one a second", card.tick, 20, 1)
    show_resolution(card)
    show_processes(card)
    with player("held") as held:
        time.sleep(2)
        print("held by a process that computes nothing")
        show_processes(card, held)
        time_calls("tick", card.tick)
    with player("busy") as busy:
        time.sleep(3)
        print("one busy process")
        show_processes(card, busy)
        time_all(card)
        show_resolution(card)
    with player("busy") as busy, player("half") as half:
        time.sleep(3)
        print("two processes, one busy and one busy for half of its time")
        show_processes(card, busy, half)
        time_calls("tick", card.tick)
    print("beside processes that begin and end")
    stop = threading.Event()

    def begin_and_end() -> None:
        while not stop.is_set():
            with player("held"):
                pass

    thread = threading.Thread(target=begin_and_end)
    thread.start()
    time_calls("tick", card.tick, 3 * CALLS)
    stop.set()
    thread.join()
    print("what others notice")
    show_a_delayed_main_thread(card)
    show_a_slowed_kernel(card)


if __name__ == "__main__":
    main()
