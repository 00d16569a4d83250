"""Readings of a compute node: CPU, memory, pressure and I/O of its jobs, steps and itself.

Jobs and steps are found in the cgroups of Slurm, version 1 and 2, each controller where it is
mounted, or below slurmstepd in ``/proc``. A value that cannot be read is absent, never 0. The
names of the values are those of :mod:`steward.agent.sampling`. Standard library only, Python 3.9
or later, no import of other modules of Steward: the agent is one file on nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    # Job id, SLUID and step of a group of processes; step "" is the whole job.
    Key = tuple[int | None, str, str]
    Values = dict[str, int]

_JOB = re.compile(r"job_([1-9][0-9]{0,9})")
_SLUID = re.compile(r"s[0-9A-Z]{13}")
_STEP = re.compile(r"step_([0-9]{1,10}(?:\+[0-9]{1,10})?|batch|extern|interactive)")
_TITLE = re.compile(
    rb"slurmstepd: \[([1-9][0-9]{0,9})(?:\+[0-9]{1,10})?\."
    rb"([0-9]{1,10}(?:\+[0-9]{1,10})?|batch|extern|interactive)\]"
)
_MAX_JOB = 2**32 - 1
_UNLIMITED_BYTES = 1 << 60
_READ_BYTES = 1 << 16
_MAX_IO_PROCESSES = 1024
"""Processes of a node beyond which the I/O of jobs is left out."""
_MAX_DEPTH = 4
_TICK_HZ = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# Parsers. Files of the kernel are small, but a parser accepts every text.


def parse_job_name(name: str) -> tuple[int | None, str] | None:
    """Return job id and SLUID of a cgroup's name; None if it is not of a job."""
    match = _JOB.fullmatch(name)
    if match and int(match[1]) <= _MAX_JOB:
        return int(match[1]), ""
    return (None, name) if _SLUID.fullmatch(name) else None


def parse_step_name(name: str) -> str | None:
    """Return the step of a cgroup's name; None if it is not of a step."""
    match = _STEP.fullmatch(name)
    return match[1] if match else None


def parse_title(title: bytes) -> tuple[int, str] | None:
    """Return job id and step in the command line of a slurmstepd, or None."""
    match = _TITLE.match(title)
    if match is None or int(match[1]) > _MAX_JOB:
        return None
    return int(match[1]), match[2].decode("ascii")


def parse_number(text: bytes) -> int | None:
    """Return a number without sign; None for "max" and for other texts."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def parse_table(text: bytes, separator: bytes | None = None) -> dict[bytes, int]:
    """Parse lines of a name and a number, such as those of memory.stat."""
    table = {}
    for line in text.split(b"\n"):
        words = line.split(separator, 1)
        if len(words) == 2:
            number = parse_number(words[1].replace(b" kB", b""))
            if number is not None:
                table[words[0].strip()] = number
    return table


def parse_pressure(text: bytes) -> int | None:
    """Return the total of the line "some" of a pressure file, in us."""
    for line in text.split(b"\n"):
        if line.startswith(b"some "):
            return parse_number(line.rpartition(b"total=")[2])
    return None


def parse_stat(text: bytes) -> tuple[int, int, int, int, int] | None:
    """Return parent, and the ticks user, system, children's user and system, of /proc/PID/stat."""
    # A command's name may hold spaces and parentheses; the last one ends it.
    words = text.rpartition(b")")[2].split()
    if len(words) < 15:
        return None
    numbers = [parse_number(words[at]) for at in (1, 11, 12, 13, 14)]
    parent, user, system, child_user, child_system = numbers
    if parent is None or user is None or system is None:
        return None
    if child_user is None or child_system is None:
        return None
    return parent, user, system, child_user, child_system


def _select(values: dict[str, int | None]) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def _ticks_to_us(ticks: int) -> int:
    return ticks * 1_000_000 // _TICK_HZ


# Files


class FileReader:
    """Reader of small files of the kernel that keeps descriptors between ticks.

    Args:
        most_open: Maximum number of descriptors that it keeps.
    """

    def __init__(self, most_open: int = 512) -> None:
        self._most_open = most_open
        self._descriptors: dict[str, int] = {}
        self._used: set[str] = set()

    def read(self, path: str) -> bytes | None:
        """Return the begin of a file, 64 KiB at most; None if it cannot be read."""
        descriptor = self._descriptors.get(path)
        if descriptor is not None:
            try:
                data = os.pread(descriptor, _READ_BYTES, 0)
            except OSError:
                # The cgroup was removed; another one may have its name by now.
                os.close(self._descriptors.pop(path))
            else:
                self._used.add(path)
                return data
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        is_kept = len(self._descriptors) < self._most_open
        try:
            data = os.pread(descriptor, _READ_BYTES, 0)
            if is_kept:
                self._descriptors[path] = descriptor
                self._used.add(path)
        except OSError:
            is_kept = False
            return None
        finally:
            if not is_kept:
                os.close(descriptor)
        return data

    def read_number(self, path: str) -> int | None:
        """Return the number in a file, or None."""
        data = self.read(path)
        return None if data is None else parse_number(data)

    def read_table(self, path: str) -> dict[bytes, int]:
        """Return the lines of a name and a number in a file; empty if it cannot be read."""
        return parse_table(self.read(path) or b"")

    def read_pressure(self, path: str) -> int | None:
        """Return the total of a pressure file, in us, or None."""
        return parse_pressure(self.read(path) or b"")

    def close_unused(self) -> None:
        """Close descriptors that no read used since the last call."""
        for path in set(self._descriptors) - self._used:
            os.close(self._descriptors.pop(path))
        self._used.clear()

    def close(self) -> None:
        """Close all descriptors."""
        self._used.clear()
        self.close_unused()


def read_once(path: str, most_bytes: int = 4096) -> bytes:
    """Return the begin of a file; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, most_bytes)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _list_directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


# cgroups


class Group:
    """Group of processes, a job or a step, with its cgroup in each hierarchy.

    Attributes:
        unified: Path in version 2; "" if there is none.
        by_controller: Paths in version 1 by controller.
    """

    def __init__(self) -> None:
        self.unified = ""
        self.by_controller: dict[str, str] = {}

    def add(self, controller: str, path: str) -> None:
        """Add the path of a controller; "" is version 2."""
        if controller:
            self.by_controller[controller] = path
        else:
            self.unified = path


class CgroupTree:
    """cgroups of a node's jobs, of both versions.

    Args:
        root: Mount point, such as ``/sys/fs/cgroup``.
        node: NodeName; Slurm names cgroups by it if it is built with several slurmd per host.
    """

    def __init__(self, root: str, node: str) -> None:
        self._root = root
        scopes = ("slurmstepd.scope", f"{node}_slurmstepd.scope", "slurm", f"slurm_{node}")
        self._unified = [
            os.path.join(root, mount, parent, scope)
            for mount in ("", "unified")
            for parent in ("system.slice", "")
            for scope in scopes
        ]
        self._version_1 = scopes[2:]

    def list_bases(self) -> list[tuple[str, str]]:
        """List Slurm's cgroups: controller, "" for version 2, and path."""
        bases = [("", path) for path in self._unified if os.path.isdir(path)]
        # Controllers that are mounted together have links of their names.
        for controllers in _list_directories(self._root):
            for controller in controllers.split(","):
                if controller in ("cpu", "cpuacct", "memory", "freezer"):
                    paths = (os.path.join(self._root, controllers, it) for it in self._version_1)
                    bases += [(controller, path) for path in paths if os.path.isdir(path)]
        return bases

    def find_groups(self, bases: Iterable[tuple[str, str]]) -> dict[Key, Group]:
        """Find jobs and steps."""
        groups: dict[Key, Group] = {}
        for controller, base in bases:
            parents = [base]
            if controller:
                users = _list_directories(base)
                parents = [os.path.join(base, user) for user in users if user[:4] == "uid_"]
            for parent in parents:
                for name in _list_directories(parent):
                    job = parse_job_name(name)
                    if job is None:
                        continue
                    path = os.path.join(parent, name)
                    groups.setdefault((*job, ""), Group()).add(controller, path)
                    for step_name in _list_directories(path):
                        step = parse_step_name(step_name)
                        if step is not None:
                            group = groups.setdefault((*job, step), Group())
                            group.add(controller, os.path.join(path, step_name))
        return groups


def read_cpu(files: FileReader, group: Group) -> Values:
    """Read the CPU time of a group, from the hierarchy that has it."""
    if group.unified:
        table = files.read_table(f"{group.unified}/cpu.stat")
        if b"user_usec" in table:
            return _select(
                {
                    "cpu_user_us": table.get(b"user_usec"),
                    "cpu_system_us": table.get(b"system_usec"),
                    "throttled_us": table.get(b"throttled_usec"),
                }
            )
    values: Values = {}
    path = group.by_controller.get("cpuacct")
    if path is not None:
        table = files.read_table(f"{path}/cpuacct.stat")
        usage_ns = files.read_number(f"{path}/cpuacct.usage")
        user, system = table.get(b"user"), table.get(b"system")
        if user is not None and system is not None:
            if usage_ns is not None and user + system:
                # The ticks are samples; the sum is exact.
                values["cpu_user_us"] = usage_ns * user // (user + system) // 1000
                values["cpu_system_us"] = usage_ns // 1000 - values["cpu_user_us"]
            else:
                values["cpu_user_us"] = _ticks_to_us(user)
                values["cpu_system_us"] = _ticks_to_us(system)
    path = group.by_controller.get("cpu")
    if path is not None:
        throttled_ns = files.read_table(f"{path}/cpu.stat").get(b"throttled_time")
        if throttled_ns is not None:
            values["throttled_us"] = throttled_ns // 1000
    return values


def read_memory(files: FileReader, group: Group, *, is_job: bool = True) -> Values:
    """Read the memory of a group, from the hierarchy that has it.

    Args:
        files: Reader.
        group: The group.
        is_job: Read its limit and kills, too: Slurm limits jobs.
    """
    path = group.unified
    table = files.read_table(f"{path}/memory.stat") if path else {}
    if b"anon" in table:
        kernel = table.get(b"kernel")
        if kernel is None:  # Linux before 5.18
            parts = (b"slab", b"kernel_stack", b"pagetables", b"percpu", b"sock")
            found = [table[part] for part in parts if part in table]
            kernel = sum(found) if found else None
        shmem = table.get(b"shmem")
        values: dict[str, int | None] = {
            "anon_bytes": table[b"anon"],
            "shmem_bytes": shmem,
            "file_bytes": _subtract(table.get(b"file"), shmem),
            "kernel_bytes": kernel,
            "memory_peak_bytes": files.read_number(f"{path}/memory.peak"),
        }
        if is_job:
            values["memory_limit_bytes"] = files.read_number(f"{path}/memory.max")
            values["oom_kills"] = files.read_table(f"{path}/memory.events").get(b"oom_kill")
        return _select(values)
    path = group.by_controller.get("memory", "")
    table = files.read_table(f"{path}/memory.stat") if path else {}
    if not table:
        return {}
    shmem = table.get(b"total_shmem")
    values = {
        "anon_bytes": table.get(b"total_rss"),
        "shmem_bytes": shmem,
        "file_bytes": _subtract(table.get(b"total_cache"), shmem),
        "kernel_bytes": files.read_number(f"{path}/memory.kmem.usage_in_bytes"),
        "memory_peak_bytes": files.read_number(f"{path}/memory.max_usage_in_bytes"),
    }
    if is_job:
        limit = files.read_number(f"{path}/memory.limit_in_bytes")
        values["memory_limit_bytes"] = limit if limit and limit < _UNLIMITED_BYTES else None
        values["oom_kills"] = files.read_table(f"{path}/memory.oom_control").get(b"oom_kill")
    return _select(values)


def _subtract(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else max(0, whole - part)


def read_pressures(files: FileReader, group: Group) -> Values:
    """Read the pressure of a group; empty for version 1."""
    if not group.unified:
        return {}
    return _select(
        {
            f"pressure_{name}_us": files.read_pressure(f"{group.unified}/{name}.pressure")
            for name in ("memory", "cpu", "io")
        }
    )


def list_processes(files: FileReader, group: Group) -> list[int] | None:
    """List the processes of a step, without its slurmstepd; None if they cannot be read."""
    path = group.unified or next(iter(group.by_controller.values()), "")
    names = _list_directories(path)
    tasks = [name for name in names if name == "user" or name.startswith("task_")]
    if not tasks:
        # In version 1 the step's own cgroup holds slurmstepd, and without task/cgroup the tasks.
        return None
    pids: set[int] = set()
    for name in tasks:
        for directory in _walk(os.path.join(path, name), _MAX_DEPTH):
            data = files.read(f"{directory}/cgroup.procs")
            if data is None:
                continue
            pids.update(int(word) for word in data.split() if parse_number(word))
    return sorted(pids)


def _walk(path: str, depth: int) -> Iterator[str]:
    yield path
    if depth:
        for name in _list_directories(path):
            yield from _walk(os.path.join(path, name), depth - 1)


# Processes


class ProcessTable:
    """Processes of a node, for steps without cgroups and for what cgroups do not count.

    Args:
        root: Mount point of proc.
        trusted_uids: Owners of a slurmstepd: anybody may give a process its title.
    """

    def __init__(self, root: str = "/proc", trusted_uids: Iterable[int] = ()) -> None:
        self._root = root
        self._trusted_uids = {0, *trusted_uids}
        self._bytes: dict[Key, dict[int, tuple[int, int]]] = {}
        self._sums: dict[Key, tuple[int, int]] = {}

    def find_step(self, pid: int) -> tuple[int, str] | None:
        """Return job id and step of a slurmstepd; None if the process is another."""
        path = f"{self._root}/{pid}"
        try:
            state = os.stat(path)
        except OSError:
            return None
        if state.st_uid not in self._trusted_uids:
            return None
        return parse_title(read_once(f"{path}/cmdline", 256))

    def find_descendants(self) -> dict[Key, tuple[Values, list[int]]]:
        """Find the steps below slurmstepds: CPU, memory, and their processes."""
        stats: dict[int, tuple[int, int, int, int, int]] = {}
        children: dict[int, list[int]] = {}
        roots: list[int] = []
        for name in _list_directories(self._root):
            if not name.isdecimal():
                continue
            pid, text = int(name), read_once(f"{self._root}/{name}/stat", 1024)
            stat = parse_stat(text)
            if stat is not None:
                stats[pid] = stat
                children.setdefault(stat[0], []).append(pid)
                if b"(slurmstepd)" in text:
                    roots.append(pid)
        steps: dict[Key, tuple[Values, list[int]]] = {}
        below: set[int] = set()
        for root in roots:
            below.update(self._list_below(root, children))
        for root in roots:
            # A process below another slurmstepd is a job's, whatever its name.
            step = None if root in below else self.find_step(root)
            if step is None:
                continue
            pids = self._list_below(root, children)
            user = stats[root][3] + sum(stats[pid][1] + stats[pid][3] for pid in pids)
            system = stats[root][4] + sum(stats[pid][2] + stats[pid][4] for pid in pids)
            values = {"cpu_user_us": _ticks_to_us(user), "cpu_system_us": _ticks_to_us(system)}
            memory = [self._read_anon(pid) for pid in pids]
            known = [size for size in memory if size is not None]
            if known or not pids:
                values["anon_bytes"] = sum(known)
            steps[step[0], "", step[1]] = values, pids
        return steps

    @staticmethod
    def _list_below(root: int, children: dict[int, list[int]]) -> list[int]:
        found: list[int] = []
        seen, waiting = {root}, [root]
        while waiting:
            for pid in children.get(waiting.pop(), ()):
                if pid not in seen:
                    seen.add(pid)
                    found.append(pid)
                    waiting.append(pid)
        return sorted(found)

    def _read_anon(self, pid: int) -> int | None:
        words = read_once(f"{self._root}/{pid}/statm", 256).split()
        if len(words) < 3:
            return None
        resident, shared = parse_number(words[1]), parse_number(words[2])
        if resident is None or shared is None:
            return None
        return max(0, resident - shared) * _PAGE_BYTES

    def read_io(self, key: Key, pids: Iterable[int]) -> Values:
        """Read the I/O of a step, as a sum that includes processes that have ended."""
        previous = self._bytes.get(key, {})
        present: dict[int, tuple[int, int]] = {}
        read, written = self._sums.get(key, (0, 0))
        for pid in pids:
            table = parse_table(read_once(f"{self._root}/{pid}/io", 512), b":")
            if b"rchar" not in table or b"wchar" not in table:
                continue
            now = table[b"rchar"], table[b"wchar"]
            before = previous.get(pid, (0, 0))
            if now[0] < before[0] or now[1] < before[1]:
                before = (0, 0)  # another process with the same id
            read += now[0] - before[0]
            written += now[1] - before[1]
            present[pid] = now
        if not present and key not in self._sums:
            return {}
        self._bytes[key], self._sums[key] = present, (read, written)
        return {"read_bytes": read, "written_bytes": written}

    def forget_others(self, keys: Iterable[Key]) -> None:
        """Forget the sums of steps that have ended."""
        existing = set(keys)
        for by_key in (self._bytes, self._sums):
            for key in [key for key in by_key if key not in existing]:
                del by_key[key]

    def read_node(self, files: FileReader) -> Values:
        """Read the totals of the node."""
        root = self._root
        values: dict[str, int | None] = {}
        words = (files.read(f"{root}/stat") or b"").partition(b"\n")[0].split()
        ticks = [parse_number(word) for word in words[1:8]]
        if words[:1] == [b"cpu"] and len(ticks) == 7:
            user, nice, system, _, _, irq, soft_irq = (number or 0 for number in ticks)
            values["cpu_user_us"] = _ticks_to_us(user + nice)
            values["cpu_system_us"] = _ticks_to_us(system + irq + soft_irq)
        table = parse_table(files.read(f"{root}/meminfo") or b"", b":")
        memory = {name: number * 1024 for name, number in table.items()}
        values["anon_bytes"] = memory.get(b"AnonPages")
        values["shmem_bytes"] = memory.get(b"Shmem")
        values["memory_limit_bytes"] = memory.get(b"MemTotal")
        if b"Cached" in memory:
            cached = memory[b"Cached"] + memory.get(b"Buffers", 0)
            values["file_bytes"] = _subtract(cached, memory.get(b"Shmem"))
        parts = (b"Slab", b"KernelStack", b"PageTables", b"Percpu")
        if b"Slab" in memory:
            values["kernel_bytes"] = sum(memory.get(part, 0) for part in parts)
        values["oom_kills"] = files.read_table(f"{root}/vmstat").get(b"oom_kill")
        for name in ("memory", "cpu", "io"):
            values[f"pressure_{name}_us"] = files.read_pressure(f"{root}/pressure/{name}")
        with contextlib.suppress(OSError):
            values["processes"] = sum(name.isdecimal() for name in os.listdir(root)) or None
        return _select(values)


# Node


class NodeReader:
    """Reader of all jobs and steps of a node, and of the node.

    Args:
        node: NodeName.
        cgroup_root: Mount point of the cgroups.
        proc_root: Mount point of proc.
        trusted_uids: Owners of a slurmstepd, beside root.
    """

    def __init__(
        self,
        node: str,
        cgroup_root: str = "/sys/fs/cgroup",
        proc_root: str = "/proc",
        trusted_uids: Iterable[int] = (),
    ) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = FileReader(max(0, min(4096, soft - 128)))
        self._tree = CgroupTree(cgroup_root, node)
        self._processes = ProcessTable(proc_root, trusted_uids)
        self._jobs_by_sluid: dict[str, int] = {}

    def read(self) -> list[tuple[Key, Values]]:
        """Read the node, then its jobs and steps."""
        readings: dict[Key, Values] = {}
        bases = self._tree.list_bases()
        groups = self._tree.find_groups(bases)
        pids_by_key: dict[Key, list[int]] = {}
        is_complete = bool(bases)
        for key, group in groups.items():
            is_job = not key[2]
            values = read_cpu(self._files, group)
            memory = read_memory(self._files, group, is_job=is_job)
            is_complete = is_complete and bool(values) and bool(memory)
            values.update(memory)
            if is_job:
                values.update(read_pressures(self._files, group))
            else:
                pids = list_processes(self._files, group)
                if pids is None:
                    is_complete = False
                else:
                    pids_by_key[key] = pids
            readings[key] = values
        if not is_complete:
            self._add_descendants(readings, pids_by_key)
        self._add_processes(readings, pids_by_key)
        node = self._processes.read_node(self._files)
        self._files.close_unused()
        named = self._name_jobs(readings, groups)
        return [((None, "", ""), node), *((key, values) for key, values in named if values)]

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _add_descendants(
        self, readings: dict[Key, Values], pids_by_key: dict[Key, list[int]]
    ) -> None:
        """Add steps, and values of steps, that cgroups lack."""
        found = self._processes.find_descendants()
        sums: dict[Key, Values] = {}
        for key, (values, pids) in found.items():
            if not any(known[0] is None for known in readings):
                readings[key] = {**values, **readings.get(key, {})}
                pids_by_key.setdefault(key, pids)
                total = sums.setdefault((key[0], key[1], ""), dict.fromkeys(values, 0))
                # A sum without one of its steps would be too small: leave it out.
                for name in list(total):
                    if name in values:
                        total[name] += values[name]
                    else:
                        del total[name]
        for key, total in sums.items():
            readings[key] = {**total, **readings.get(key, {})}

    def _add_processes(
        self, readings: dict[Key, Values], pids_by_key: dict[Key, list[int]]
    ) -> None:
        """Add the number of processes and their I/O to steps and jobs."""
        is_few = sum(map(len, pids_by_key.values())) <= _MAX_IO_PROCESSES
        complete = {key[:2] for key in readings if key[2]} - {
            key[:2] for key in readings if key[2] and key not in pids_by_key
        }
        for key, pids in pids_by_key.items():
            values: Values = {"processes": len(pids)}
            if is_few:
                values.update(self._processes.read_io(key, pids))
            readings[key].update(values)
            job = readings.get((*key[:2], ""))
            if job is not None and key[:2] in complete:
                for name, value in values.items():
                    job[name] = job.get(name, 0) + value
        self._processes.forget_others(pids_by_key)

    def _name_jobs(
        self, readings: dict[Key, Values], groups: dict[Key, Group]
    ) -> list[tuple[Key, Values]]:
        """Replace SLUIDs by job ids where a slurmstepd shows them."""
        sluids = {key[1] for key in readings if key[1]}
        for sluid in set(self._jobs_by_sluid) - sluids:
            del self._jobs_by_sluid[sluid]
        for key, group in groups.items():
            if key[1] and key[2] and key[1] not in self._jobs_by_sluid:
                for directory in (f"{group.unified}/slurm", *group.by_controller.values()):
                    for word in read_once(f"{directory}/cgroup.procs").split()[:8]:
                        pid = parse_number(word)
                        step = self._processes.find_step(pid) if pid else None
                        if step is not None:
                            self._jobs_by_sluid[key[1]] = step[0]
        return [
            ((self._jobs_by_sluid.get(key[1], key[0]), key[1], key[2]), values)
            for key, values in readings.items()
        ]
