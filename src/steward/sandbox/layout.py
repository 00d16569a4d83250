"""Directory of a sandbox: create it with keys, configuration and homes; read, change, remove it.

`prepare_directory` creates everything and writes the plan (`plan.py`) to the marker file;
`read_plan` loads it; `upgrade_slurm` and `change_slurm_conf` change a sandbox that is up.
`lock_directory`, `find_free_directory`, `remove_directory` and `claim_directory` guard against two
sandboxes in one directory; `reserve_ports` finds free TCP ports.
"""

import fcntl
import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from steward.sandbox import namespaces, slurm_install
from steward.sandbox.configuration import (
    INIT_FILE,
    INIT_SQL,
    check_slurm_conf,
    format_slurm_conf,
    format_slurmdbd_conf,
    get_backup_host,
)
from steward.sandbox.plan import (
    SLURM_UID,
    count_ports,
    format_group,
    format_hosts,
    format_passwd,
    get_calling_user,
    get_slurm_user,
    is_at_least_version,
    make_plan,
)
from steward.sandbox.slurm_install import (
    COMMANDS,
    SlurmInstallation,
    find_plugin_directory,
    find_slurm,
)
from steward.sandbox.spec import (
    BACKUP_ADDRESS,
    MARKER,
    SandboxError,
    SandboxPlan,
    SandboxSpec,
    SandboxUser,
    get_default_directory,
)

# sun_path holds 108 bytes, and the longest socket in here is <directory>/run/munge.socket.lock.
_MAX_DIRECTORY_BYTES: Final = 80
_MAX_DIRECTORIES: Final = 100
# Below the range of outgoing connections.
_PORT_RANGE: Final = (20000, 32000)


def prepare_directory(
    spec: SandboxSpec, report: Callable[[str], None]
) -> tuple[SandboxPlan, list[socket.socket]]:
    """Create a sandbox's directory, ready for its keeper.

    Args:
        spec: The cluster's properties.
        report: Called with progress lines of long work.

    Returns:
        The plan, also stored in the directory, and sockets that reserve its ports.

    Raises:
        SandboxError: The directory is another user's or in use, or the spec is invalid.
        SlurmNotInstalled: This Slurm is not available.
    """
    check_slurm_conf(spec)
    slurm = find_slurm(spec.slurm, report)
    contained = spec.contained and _has_namespaces()
    _check_root_needed(slurm, contained=contained)
    directory = claim_directory(spec.directory)
    sockets: list[socket.socket] = []
    try:
        ports, sockets = reserve_ports(count_ports(spec))
        plan = make_plan(spec, slurm, directory, contained=contained, ports=ports)
        # First, so that an interrupted run leaves a directory that is recognized as a sandbox's.
        _write_new(f"{directory}/{MARKER}", msgspec.json.encode(plan), 0o644)
        _fill_directory(plan, slurm)
    except BaseException:
        for port_socket in sockets:
            port_socket.close()
        shutil.rmtree(directory)
        raise
    return plan, sockets


def read_plan(directory: str) -> SandboxPlan:
    """Read the plan of an existing sandbox.

    Raises:
        SandboxError: There is none, or the directory belongs to another user.
    """
    try:
        if os.lstat(directory).st_uid != os.geteuid():
            raise SandboxError(f"{directory} belongs to another user", directory)
        with open(f"{directory}/{MARKER}", "rb") as file:
            return msgspec.json.decode(file.read(), type=SandboxPlan)
    except FileNotFoundError:
        raise SandboxError(
            f"no sandbox in {directory}: start one with `steward sandbox up`", directory
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise SandboxError(f"cannot read {directory}/{MARKER}: {error}", directory) from error


def upgrade_slurm(plan: SandboxPlan, version: str, report: Callable[[str], None]) -> SandboxPlan:
    """Switch a sandbox to another version of Slurm, with the same state and configuration.

    Running daemons stay as they are; the caller must notify the keeper.

    Args:
        plan: Plan of a sandbox that is up.
        version: Version, such as ``24.11``.
        report: Called with progress lines of long work.

    Returns:
        The new plan, also stored in the directory.

    Raises:
        SandboxError: The sandbox has no namespaces, or is not root's.
        SlurmNotInstalled: This Slurm is not available.
    """
    slurm = find_slurm(version, report)
    _check_root_needed(slurm, contained=plan.contained)
    spec = msgspec.structs.replace(plan.spec, slurm=version)
    new_plan = make_plan(spec, slurm, plan.directory, contained=plan.contained, ports=plan.ports)
    # Keep the users: one of their ids may have been assigned on the machine.
    new_plan = msgspec.structs.replace(
        new_plan, users=plan.users, opened_directories=plan.opened_directories
    )
    root_plugin_dir = _install_commands(new_plan, slurm)
    _write_cgroup_conf(new_plan)
    plugin_dir = _format_plugin_dir(new_plan, root_plugin_dir)
    change_slurm_conf(
        plan, [f"PluginDir={plugin_dir}"] if plugin_dir else [], removed_options=("PluginDir",)
    )
    if spec.accounting:
        _write_slurmdbd_conf(new_plan, root_plugin_dir)
    _replace_file(f"{plan.directory}/{MARKER}", msgspec.json.encode(new_plan), 0o644)
    return new_plan


def _check_root_needed(slurm: SlurmInstallation, *, contained: bool) -> None:
    """Check that a Slurm in its own root can be started: it needs root and namespaces."""
    if slurm.root and not (contained and os.geteuid() == 0):
        raise SandboxError(
            f"Slurm {slurm.version} runs in a separate root directory, which requires root and "
            "namespaces: run this as root, or omit --slurm to use the installed Slurm",
            slurm.version,
        )


def change_slurm_conf(
    plan: SandboxPlan, lines: Iterable[str], *, removed_options: Iterable[str] = ()
) -> None:
    """Replace lines of a sandbox's slurm.conf that set the same options.

    Args:
        plan: The sandbox's plan.
        lines: The new lines.
        removed_options: Options whose lines are removed.

    Raises:
        SandboxError: A line contains a line break.
    """
    new_lines = tuple(lines)
    check_slurm_conf(msgspec.structs.replace(plan.spec, extra=new_lines))
    options = [*(line.partition("=")[0] for line in new_lines), *removed_options]
    option_prefixes = tuple(f"{option.lower()}=" for option in options)
    with open(plan.slurm_conf, encoding="utf-8") as file:
        old_lines = [
            line
            for line in file.read().splitlines()
            if not line.lower().startswith(option_prefixes)
        ]
    _replace_file(
        plan.slurm_conf, "".join(f"{line}\n" for line in (*old_lines, *new_lines)).encode(), 0o644
    )


def lock_directory(directory: str) -> int | None:
    """Take the lock that a keeper holds for life; return None if a keeper is alive.

    Returns:
        A file descriptor; closing it releases the lock.
    """
    fd = os.open(f"{directory}/keeper/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def find_free_directory() -> str:
    """Return the usual directory of a sandbox, or one beside it if a sandbox is up there."""
    default = get_default_directory()
    alternatives = (f"{default}-{number}" for number in range(2, _MAX_DIRECTORIES))
    return next((path for path in (default, *alternatives) if not _is_up(path)), default)


def _is_up(directory: str) -> bool:
    """Return True if a sandbox is up in a directory, or it belongs to another user."""
    if not os.path.exists(f"{directory}/keeper/lock"):
        return False
    if os.stat(directory).st_uid != os.geteuid():
        return True  # another user's, whatever its state
    lock_fd = lock_directory(directory)
    if lock_fd is not None:
        os.close(lock_fd)
    return lock_fd is None


def remove_directory(directory: str) -> None:
    """Remove the directory of a sandbox that is down; leave other directories alone.

    Raises:
        SandboxError: It is up, according to its lock.
    """
    if os.path.islink(directory) or not os.path.exists(f"{directory}/keeper"):
        return
    lock_fd = lock_directory(directory)
    if lock_fd is None:
        raise SandboxError(
            f"the sandbox in {directory} is still up: end it from outside the sandbox", directory
        )
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock_fd)


def _has_namespaces() -> bool:
    """Return True if namespaces are permitted here."""
    result = subprocess.run(
        [sys.executable, "-I", "-S", namespaces.__file__, "try"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    return result.returncode == 0


def claim_directory(path: str) -> str:
    """Create or take over the directory for a sandbox.

    Args:
        path: Its path; if empty, a new one in the system's temporary directory.

    Returns:
        Its real path.

    Raises:
        SandboxError: It is in use, holds other files, or its path is too long for sockets.
    """
    if not path:
        directory = tempfile.mkdtemp(prefix="steward-sandbox-")
        os.chmod(directory, 0o755)  # noqa: S103 - the sandbox's users pass through it
        return directory
    parent, name = os.path.split(os.path.abspath(path))
    directory = os.path.join(os.path.realpath(parent), name)
    if len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES or any(c.isspace() for c in directory):
        raise SandboxError(
            f"invalid directory {directory}: give a path without blanks of at most "
            f"{_MAX_DIRECTORY_BYTES} bytes",
            directory,
        )
    try:
        os.makedirs(parent, exist_ok=True)
        _take_directory(directory)
    except OSError as error:
        raise SandboxError(f"{path}: {error.strerror}", path) from error
    return directory


def _take_directory(directory: str) -> None:
    """Create the directory, or take over an empty one or that of an ended sandbox."""
    try:
        os.mkdir(directory, 0o755)
    except FileExistsError:
        dir_stat = os.lstat(directory)
        if not stat.S_ISDIR(dir_stat.st_mode) or dir_stat.st_uid != os.geteuid():
            raise SandboxError(
                f"{directory} is not a directory, or belongs to another user", directory
            ) from None
        entries = os.listdir(directory)
        if MARKER in entries:
            _reset_directory(directory)
        elif entries:
            raise SandboxError(
                f"{directory} contains other files: give an empty directory", directory
            ) from None
    os.chmod(directory, 0o755)  # noqa: S103 - the sandbox's users pass through it


def _reset_directory(directory: str) -> None:
    """Remove what an ended sandbox left in the directory."""
    lock_fd = lock_directory(directory)
    if lock_fd is None:
        raise SandboxError(
            f"a sandbox is up in {directory} already: use it, or end it with "
            f"`steward sandbox down --dir {directory}`",
            directory,
        )
    os.close(lock_fd)
    shutil.rmtree(directory)
    os.mkdir(directory, 0o755)


def reserve_ports(count: int) -> tuple[tuple[int, ...], list[socket.socket]]:
    """Reserve free TCP ports: nobody else can bind them while the sockets are open.

    Returns:
        The ports, and the sockets that reserve them.

    Raises:
        SandboxError: Too few ports are free.
    """
    # Bound without SO_REUSEADDR, so that a used port is skipped; the option set afterwards lets the
    # daemons, which set it too, listen there while it is reserved.
    sockets: list[socket.socket] = []
    port_range_size = _PORT_RANGE[1] - _PORT_RANGE[0]
    first_offset = secrets.randbelow(port_range_size)
    for offset in range(port_range_size):
        port_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            port = _PORT_RANGE[0] + (first_offset + offset) % port_range_size
            port_socket.bind(("0.0.0.0", port))  # noqa: S104 - held only
        except OSError:
            port_socket.close()
            continue
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.append(port_socket)
        if len(sockets) == count:
            return tuple(port_socket.getsockname()[1] for port_socket in sockets), sockets
    raise SandboxError(
        f"fewer than {count} TCP ports are free from {_PORT_RANGE[0]} on", _PORT_RANGE
    )


def _fill_directory(plan: SandboxPlan, slurm: SlurmInstallation) -> None:
    """Write all files of a new sandbox."""
    directory = plan.directory
    other_names = ("pid.backup", "log", "state", "spool", "bin", "home", "db")
    for name in ("keeper", "etc", "run", "pid", *other_names):
        os.mkdir(f"{directory}/{name}", 0o755)
    # The logs' directory too: jobcomp.lua may write job lines there.
    for name in ("keeper", "state", "db", "log"):
        os.chmod(f"{directory}/{name}", 0o700)
    _write_new(f"{directory}/etc/munge.key", secrets.token_bytes(128), 0o600)
    _write_plugins(plan)
    _write_cgroup_conf(plan)
    daemon_user = get_calling_user()
    if plan.contained and daemon_user.uid == 0:
        daemon_user = get_slurm_user(plan.spec.slurm_user)
        _write_users(plan, daemon_user)
        for name in ("pid", "pid.backup", "log", "state", "db"):
            os.chown(f"{directory}/{name}", daemon_user.uid, daemon_user.gid)
    hosts = format_hosts(plan.host)
    if plan.spec.backup:
        hosts = f"{BACKUP_ADDRESS} {get_backup_host(plan.host)}\n{hosts}"
    _write_new(f"{directory}/etc/hosts", hosts.encode(), 0o644)
    root_plugin_dir = _install_commands(plan, slurm)
    slurm_conf_text = format_slurm_conf(
        plan.spec,
        directory=directory,
        host=plan.host,
        ports=plan.ports,
        slurm_user=plan.slurm_user,
        slurmd_user=get_calling_user().name,
        munge_socket=plan.munge_socket,
        plugin_dir=_format_plugin_dir(plan, root_plugin_dir),
    )
    _write_new(plan.slurm_conf, slurm_conf_text.encode(), 0o644)
    if plan.spec.accounting:
        _write_new(f"{directory}/etc/{INIT_FILE}", INIT_SQL.encode(), 0o644)
        _write_slurmdbd_conf(plan, root_plugin_dir)


def _write_slurmdbd_conf(plan: SandboxPlan, root_plugin_dir: str) -> None:
    conf_text = format_slurmdbd_conf(
        directory=plan.directory,
        host=plan.host,
        port=plan.slurmdbd_port,
        slurm_user=plan.slurm_user,
        munge_socket=plan.munge_socket,
        plugin_dir=root_plugin_dir,
    )
    # slurmdbd reads the file only if no other user can.
    path = f"{plan.directory}/etc/slurmdbd.conf"
    _replace_file(path, conf_text.encode(), 0o600)
    if os.geteuid() == 0:
        user = get_slurm_user(plan.slurm_user)
        os.chown(path, user.uid, user.gid)


def _write_cgroup_conf(plan: SandboxPlan) -> None:
    if is_at_least_version(plan.slurm_version, (23, 11)):
        _replace_file(f"{plan.directory}/etc/cgroup.conf", b"CgroupPlugin=disabled\n", 0o644)


def _write_plugins(plan: SandboxPlan) -> None:
    """Write plugstack.conf (SPANK plugins) and the Lua scripts of slurmctld."""
    etc_dir = f"{plan.directory}/etc"
    plugstack_text = "".join(f"{line}\n" for line in plan.spec.plugstack)
    _write_new(
        f"{etc_dir}/plugstack.conf",
        plugstack_text.replace("{directory}", plan.directory).encode(),
        0o644,
    )
    # Slurm searches only beside the slurm.conf that SLURM_CONF names.
    _write_script(plan.spec.jobcomp_lua, f"{etc_dir}/jobcomp.lua")
    _write_script(plan.spec.job_submit_lua, f"{etc_dir}/job_submit.lua")


def _write_script(script: str, target: str) -> None:
    """Write a script given by its path or its text; "" is none."""
    if script and "\n" not in script:
        try:
            with open(script, encoding="utf-8", errors="surrogateescape") as file:
                script = file.read()
        except OSError as error:
            raise SandboxError(f"{script}: {error.strerror}", script) from error
    if script:
        _write_new(target, script.encode(errors="surrogateescape"), 0o644)


def _format_plugin_dir(plan: SandboxPlan, root_plugin_dir: str) -> str:
    """Return PluginDir with the spec's directories last; "" for the built-in one."""
    extra = [path.replace("{directory}", plan.directory) for path in plan.spec.plugin_dirs]
    return (
        ":".join([root_plugin_dir or find_plugin_directory(), *extra]) if extra else root_plugin_dir
    )


def _write_users(plan: SandboxPlan, slurm_user: SandboxUser) -> None:
    """Write passwd and group files, and create the homes."""
    users: Iterable[SandboxUser] = plan.users
    if slurm_user.home == "/nonexistent" and slurm_user.uid == SLURM_UID:
        users = (*plan.users, slurm_user)
    etc_dir = f"{plan.directory}/etc"
    passwd = format_passwd(users).encode(errors="surrogateescape")
    group = format_group(users, plan.spec.groups).encode(errors="surrogateescape")
    _write_new(f"{etc_dir}/passwd", passwd, 0o644)
    _write_new(f"{etc_dir}/group", group, 0o644)
    for user in plan.users:
        os.mkdir(user.home, 0o700)
        os.chown(user.home, user.uid, user.gid)


def _install_commands(plan: SandboxPlan, slurm: SlurmInstallation) -> str:
    """Put Slurm's commands into ``bin``; return PluginDir, "" for the built-in one."""
    for name in os.listdir(f"{plan.directory}/bin"):
        os.unlink(f"{plan.directory}/bin/{name}")
    if plan.root:
        return _wrap_commands(plan)
    for name in COMMANDS:
        program = f"{slurm.commands_dir}/{name}"
        if os.path.exists(program):
            os.symlink(program, f"{plan.directory}/bin/{name}")
    return ""


def _wrap_commands(plan: SandboxPlan) -> str:
    """Wrap the commands of another root so that any user can start them; return PluginDir.

    Only root may chroot(2). The root's own loader and libraries start its programs for all users,
    with the caller's files and working directory.
    """
    loader_paths = slurm_install.get_loader_paths(plan.root)
    for name in COMMANDS:
        program = f"{plan.root}/usr/bin/{name}"
        if os.path.exists(program):
            command = [
                loader_paths.loader,
                "--library-path",
                ":".join(loader_paths.library_dirs),
                "--argv0",
                name,
                program,
            ]
            script = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
            _write_new(f"{plan.directory}/bin/{name}", script.encode(), 0o755)
    return loader_paths.plugins


def _write_new(path: str, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)


def _replace_file(path: str, data: bytes, mode: int) -> None:
    # Atomically: a daemon may be reading it.
    _write_new(f"{path}.new", data, mode)
    os.rename(f"{path}.new", path)
