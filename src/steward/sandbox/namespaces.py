"""Linux namespaces of a sandbox: system calls by ctypes, and a program that enters a sandbox.

The functions wrap unshare(2), setns(2), mount(2) and prctl(2), which Python 3.11 lacks. Run as
``python -I -S namespaces.py INIT USER DIRECTORY COMMAND…`` the module is the process between the
caller and a program inside (`run_inside`): entering a PID namespace takes a fork, and signals must
be forwarded. ``namespaces.py try`` tests whether namespaces are permitted. It imports nothing of
Steward and little of the standard library, because it starts once for every command run inside.
"""

import ctypes
import os
import select
import sys

# Importing typing and enum would take longer than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence
    from typing import NoReturn
else:
    import _signal as signal

# From <linux/sched.h>, <linux/prctl.h> and <linux/mount.h>.
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

CANNOT_START = 127
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


_libc = ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, operation: str) -> None:
    if result != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), operation)


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` (unshare(2)).

    Raises:
        OSError: It is not permitted here.
    """
    _check_result(_libc.unshare(flags), "unshare")


def setns(pid_fd: int, flags: int) -> None:
    """Enter the namespaces of the process behind a pidfd (setns(2), Linux 5.8).

    Raises:
        OSError: It is not permitted, or the process is gone.
    """
    _check_result(_libc.setns(pid_fd, flags), "setns")


def mount(source: str, target: str, fs_type: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system or a bind mount (mount(2)).

    Raises:
        OSError: It is not permitted, or a path does not exist.
    """
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), os.fsencode(fs_type), flags, os.fsencode(data)
    )
    _check_result(result, target)


def set_host_name(name: str) -> None:
    """Set the host name of this UTS namespace (sethostname(2)).

    Raises:
        OSError: It is not permitted.
    """
    encoded = os.fsencode(name)
    _check_result(_libc.sethostname(encoded, len(encoded)), name)


def die_with_parent(signal_number: int) -> None:
    """Send this process a signal when the thread that forked it ends (prctl(2))."""
    _check_result(_libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant (prctl(2))."""
    _check_result(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def leave_namespaces(*, uid: int, gid: int) -> None:
    """Let the next child start a new PID namespace; without root in a new user namespace.

    Args:
        uid: Effective user id before the call.
        gid: Effective group id before the call.

    Raises:
        OSError: Namespaces are not permitted here.
    """
    if uid == 0:
        unshare(CLONE_NEWPID)
        return
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def set_up_namespace(host: str) -> None:
    """As the first process of a PID namespace, set up own mounts, /proc and host name.

    Raises:
        OSError: It is not permitted here.
    """
    unshare(CLONE_NEWNS | CLONE_NEWUTS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    set_host_name(host)


def enter_namespaces(init_pid: int) -> None:
    """Enter the namespaces of ``init_pid``; the PID namespace applies to children only.

    Raises:
        OSError: It is not permitted, or the process is gone.
    """
    pid_fd = os.pidfd_open(init_pid)
    # If this process is chrooted, so is the init; setns enters a mount namespace at its very root.
    root_fd = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY)
    try:
        flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID
        setns(pid_fd, flags if os.geteuid() == 0 else flags | CLONE_NEWUSER)
        os.fchdir(root_fd)
        os.chroot(".")
    finally:
        os.close(root_fd)
        os.close(pid_fd)


def _switch_user(user: str, env: dict[str, str]) -> None:
    """Switch to a user, with its groups and environment."""
    import pwd

    entry = pwd.getpwnam(user)
    if os.geteuid() != entry.pw_uid:
        os.initgroups(user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    env |= {"USER": user, "LOGNAME": user, "HOME": entry.pw_dir, "SHELL": entry.pw_shell}


def _change_directory(directory: str, env: "Mapping[str, str]") -> None:
    """Change to the first of these directories that can be entered."""
    for candidate in (directory, env.get("HOME", "/"), "/"):
        try:
            os.chdir(candidate)
        except OSError:
            continue  # a missing or forbidden directory must not keep the program from running
        return


def _exec_program(user: str, directory: str, argv: "Sequence[str]", alive_fd: int) -> "NoReturn":
    """In the child: become the user and exec the program."""
    env = dict(os.environ)
    try:
        if user:
            _switch_user(user, env)
        die_with_parent(signal.SIGKILL)
        if select.select([alive_fd], [], [], 0)[0]:  # the parent ended before the call
            os._exit(CANNOT_START)
        _change_directory(directory, env)
        for signal_number in IGNORED_BY_PYTHON:
            signal.signal(signal_number, signal.SIG_DFL)
        os.execvpe(argv[0], list(argv), env)  # noqa: S606 - that is the point
    except KeyError:
        print(f"unknown user {user} in the sandbox", file=sys.stderr)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
    os._exit(CANNOT_START)


def run_inside(init_pid: int, user: str, directory: str, argv: "Sequence[str]") -> "NoReturn":
    """Run a program inside, and exit with its status.

    Signals sent to this process are forwarded to the program; a terminal's signals reach it
    directly, as it is in the same process group.

    Args:
        init_pid: The sandbox's init; 0 for a sandbox without namespaces.
        user: User who runs it; "" for the caller.
        directory: Working directory, if it can be entered.
        argv: The program and its arguments.
    """
    if init_pid:
        try:
            enter_namespaces(init_pid)
        except OSError as error:
            print(f"cannot enter the sandbox: {error.strerror}", file=sys.stderr)
            os._exit(CANNOT_START)
    # Its other end closes with this process; getppid() does not work across PID namespaces.
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child_pid = os.fork()
    if child_pid == 0:
        os.close(alive_write)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        _exec_program(user, directory, argv, alive_read)
    for signal_number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(signal_number, signal.SIG_IGN)
    for signal_number in FORWARDED:
        signal.signal(
            signal_number, lambda received_signal, _frame: os.kill(child_pid, received_signal)
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(child_pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code >= 0:
        os._exit(exit_code)
    kill_self(-exit_code)


def kill_self(signal_number: int) -> "NoReturn":
    """Kill this process with the signal that ended its child, without a core file."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if signal_number != signal.SIGKILL:
        signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)
    os._exit(128 + signal_number)


def try_namespaces() -> int:
    """Create namespaces and leave them; return 0 if that is permitted."""
    try:
        leave_namespaces(uid=os.geteuid(), gid=os.getegid())
        child_pid = os.fork()
        if child_pid == 0:
            set_up_namespace("sandbox")
            os._exit(0)
    except OSError:
        return 1
    return os.waitpid(child_pid, 0)[1]


if __name__ == "__main__":
    if sys.argv[1] == "try":
        os._exit(1 if try_namespaces() else 0)
    run_inside(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
