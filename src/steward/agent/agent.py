"""Sends the lines that Steward's SPANK plugin writes on a compute node to Steward.

One file for the node's own Python (3.9 or later), with nothing but the standard
library, and MUNGE's two commands where no certificate is given. It runs once a
minute by a timer, or stays (``--resident``).

Lines are in ``DIR/<node>.log``. What was sent, and is durable over there, is
noted in ``DIR/<node>.place``, whose two halves are overwritten in turn: that needs
no space, so a full directory empties again. A run that is killed sends some lines
again, which Steward passes over; it never leaves one out.

A large file is renamed to ``<node>.log.<number>``, and the plugin begins a new
one at its next opening. Whoever has it open may go on writing to it, so it is
read on like before, and removed only when the kernel says that nobody has it
open for writing (a read lease, fcntl(2), is granted only then), when all of it
was sent, and when the renaming is a minute old: so long nobody is between
finding a name and opening the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import time
import zlib

# Most runs find nothing to do: what they do not need is imported where it is needed.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

VERSION = 1
PATH = "/nodes/1/lines"
BATCH_BYTES = 1 << 20
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
LARGEST_LINE = 4096
_FILE = re.compile(r"(.+)\.(log|log\.[0-9]+|place)")
_COMMAND_S = 15.0
_MOST_ANSWER = 1 << 16
_LONGEST_WAIT_S = 600.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HALF = 16384
"""Bytes of a half of a place: enough for the most files, and whole pages of it."""
_MOST_FILES = 128
_TAIL = 4096


class AgentError(Exception):
    """What was to be done cannot be done; the text says what to do about it."""


class WrongUse(AgentError):
    """The command line asks for something that cannot be asked for."""


class Later(AgentError):
    """It cannot be done now; ``after_s`` is what the other side asked for, in seconds."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


def digest_of(head: bytes, body: bytes) -> str:
    """The digest of a batch, which credentials and answers name."""
    import hashlib

    digest = hashlib.sha256(head + b"\n")
    digest.update(body)
    return digest.hexdigest()


def claim_of(node: str, cluster: str, sequence: int, digest: str) -> bytes:
    """What the credential of a batch says."""
    return f"steward-node {VERSION} lines {node} {cluster or '-'} {sequence} {digest}".encode()


def answer_claim_of(digest: str, body: bytes) -> bytes:
    """What the credential of an answer says."""
    import hashlib

    return f"steward-node {VERSION} answer {digest} {hashlib.sha256(body).hexdigest()}".encode()


class Place:
    """What of a node's lines was sent, kept across runs.

    Args:
        path: Its file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.id = os.urandom(16).hex()
        """A new one says that what was known before is gone, and the lines with it."""
        self.number = 1
        """What the file that is written to now will be numbered."""
        self.offsets: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        """Sums of what is right before the offsets: by them another file is known as such."""
        self.sequence = 0
        self.dropped = 0
        """Lines that were given up since the last batch."""
        self.dropped_ever = 0
        self.boot = ""
        self.heard = 0.0
        """When a batch was taken last, seconds since the epoch."""
        self.written = 0
        self._flaw: OSError | None = None
        self._load()

    def _load(self) -> None:
        import json

        try:
            with open(self._path, "rb", opener=_private) as file:
                data = file.read(2 * _HALF)
        except FileNotFoundError:
            data = b""
        state: dict[str, Any] = {}
        for half in (data[:_HALF], data[_HALF:]):
            digest, _, text = half.partition(b"\n")[0].partition(b" ")
            # One that a power failure cut short is none: the other is what was before.
            if digest == b"%d" % zlib.crc32(text):
                state = max(
                    state, json.loads(text), key=lambda candidate: candidate.get("written", 0)
                )
        for name, value in state.items():
            in_files = isinstance(value, dict)
            setattr(self, name, {int(n): of for n, of in value.items()} if in_files else value)
        if not state:
            # None, or one that nobody can read: all that is there is sent once more. The new
            # id is written down before anybody is told of it.
            self.save()

    def save(self) -> None:
        """Write it down, for good, or note that there is no space for it: ``check``."""
        import json

        self.written += 1
        state = {name: value for name, value in vars(self).items() if name[0] != "_"}
        text = json.dumps(state).encode()
        half = b"%d %s\n" % (zlib.crc32(text), text)
        if len(half) > _HALF:
            raise AgentError(f"{self._path}: there are too many files")
        try:
            self._write(half, self.written % 2 * _HALF)
            self._flaw = None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._flaw = error

    def _write(self, half: bytes, at: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with open(_private(self._path, flags), "r+b") as file:
            # All the space that it will ever take, while there is some.
            file.write(b" " * (2 * _HALF - file.seek(0, os.SEEK_END)))
            file.seek(at)
            file.write(half)
            file.flush()
            os.fsync(file.fileno())

    def check(self) -> None:
        """See that all is written down, or say that there is still no space."""
        if self._flaw is not None:
            self.save()
        if self._flaw is not None:
            raise Later(f"what was sent cannot be written down: {self._flaw}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Spool:
    """One node's line files, oldest first.

    Args:
        directory: Where they are.
        node: NodeName.
        rotate_bytes: Size at which a file is renamed, so that it can be removed some time.
        most_bytes: Where more than this waits the oldest lines are given up, and counted.
            Both are less on a small file system, which would fill before.
        grace_s: Shortest time before the agent removes a renamed file, in seconds.
    """

    def __init__(
        self,
        directory: str,
        node: str,
        rotate_bytes: int,
        most_bytes: int,
        *,
        grace_s: float = 60.0,
    ) -> None:
        self._log = os.path.join(directory, f"{node}.log")
        system = os.statvfs(directory)
        size = system.f_blocks * system.f_frsize or sys.maxsize
        self._rotate_bytes = min(rotate_bytes, size // 8)
        self._most_bytes = min(most_bytes, size // 2)
        self._grace_s = grace_s
        self.place = Place(os.path.join(directory, f"{node}.place"))
        # A run that was killed between renaming a file and writing that down is continued. It
        # is written down at once: else the number would be given again when that file is gone.
        number = max([self.place.number, *(n + 1 for n in self._list_rotated())])
        if number != self.place.number:
            self.place.number = number
            self.place.save()
        # A file may come back shorter from a power failure, and have grown since.
        for number, offset in list(self.place.offsets.items()):
            if self._checksum_tail(number, offset) != self.place.tails.get(number):
                del self.place.offsets[number]

    def _checksum_tail(self, number: int, offset: int) -> int:
        """The sum of what is right before an offset; -1 where there is no such file."""
        try:
            with open(self._path(number), "rb", opener=_private) as file:
                file.seek(max(0, offset - _TAIL))
                data = file.read(min(offset, _TAIL))
        except FileNotFoundError:
            return -1
        return zlib.crc32(data)

    def _advance(self, number: int, offset: int) -> None:
        self.place.offsets[number] = offset
        self.place.tails[number] = self._checksum_tail(number, offset)

    def _list_rotated(self) -> list[int]:
        directory, name = os.path.split(self._log)
        numbers = re.compile(re.escape(name) + r"\.([1-9][0-9]{0,17})")
        matches = map(numbers.fullmatch, os.listdir(directory))
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, number: int) -> str:
        return self._log if number == self.place.number else f"{self._log}.{number}"

    def _list_waiting(self) -> list[tuple[int, int, int]]:
        """Of each file its number, where reading begins, and its size."""
        files = []
        for number in [*self._list_rotated(), self.place.number]:
            try:
                size = os.lstat(self._path(number)).st_size
            except FileNotFoundError:
                continue
            offset = self.place.offsets.get(number, 0)
            # Shorter than what was read of it: it is another file, or somebody emptied it.
            files.append((number, offset if offset <= size else 0, size))
        return files

    def rotate_and_clean(self) -> None:
        """Rename a large file, and remove what is done with."""
        place = self.place
        waiting = self._list_waiting()
        is_large = waiting and waiting[-1][0] == place.number
        if is_large and waiting[-1][2] >= self._rotate_bytes and len(waiting) < _MOST_FILES:
            os.rename(self._log, f"{self._log}.{place.number}")
            place.number += 1
            place.save()
        for number in self._list_rotated():
            if self._is_removable(number):
                os.unlink(self._path(number))
        existing = {number for number, _, _ in self._list_waiting()}
        for by_number in (place.offsets, place.tails):
            for number in set(by_number) - existing:
                del by_number[number]

    def drop_excess(self) -> None:
        """Pass over the oldest lines where too many wait, and count them."""
        place, waiting = self.place, self._list_waiting()
        excess = sum(size - offset for _, offset, size in waiting) - self._most_bytes
        for number, offset, size in waiting:
            if excess > 0 and size > offset and number != place.number:
                lines = self._count_lines(number, offset, size)
                place.dropped += lines
                place.dropped_ever += lines
                self._advance(number, size)
                place.save()
                excess -= size - offset

    def _count_lines(self, number: int, offset: int, upto: int) -> int:
        lines = 0
        with open(self._path(number), "rb", opener=_private) as file:
            file.seek(offset)
            while offset < upto and (data := file.read(min(BATCH_BYTES, upto - offset))):
                lines += data.count(b"\n")
                offset += len(data)
        return lines

    def _is_removable(self, number: int) -> bool:
        """Whether a renamed file was sent whole, and nobody can write to it any more."""
        with open(self._path(number), "rb", opener=_private) as file:
            state = os.fstat(file.fileno())
            if time.time() - state.st_ctime < self._grace_s or _has_writer(file.fileno(), state):
                return False
            return os.fstat(file.fileno()).st_size == self.place.offsets.get(number, 0)

    def read_batch(self) -> tuple[int, int, bytes] | None:
        """The next batch: its file's number, where it ends there, whole lines; None for none."""
        for number, begin, size in self._list_waiting():
            if begin >= size:
                continue
            with open(self._path(number), "rb", opener=_private) as file:
                # Before reading: what is read then is all that there will ever be.
                final = number != self.place.number and not _has_writer(
                    file.fileno(), os.fstat(file.fileno())
                )
                file.seek(begin)
                data = file.read(BATCH_BYTES)
                # Nothing is noted as sent that a power failure could take back.
                os.fdatasync(file.fileno())
            end = data.rfind(b"\n") + 1
            if not end and (final or len(data) > LARGEST_LINE):
                # No line of ours: what a full disk left of one, or what somebody put there.
                return number, begin + len(data), data[:LARGEST_LINE] + b"\n"
            if end:
                return number, begin + end, data[:end]
        return None

    def record_sent(self, number: int, offset: int, now: float, boot: str) -> None:
        """Write down that lines are durable over there."""
        place = self.place
        if number:
            self._advance(number, offset)
        place.sequence += 1
        place.dropped = 0
        place.heard, place.boot = now, boot
        place.save()


def _has_writer(descriptor: int, state: os.stat_result) -> bool:
    """Whether somebody has a file open for writing."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        # A file system without leases: who has not written for a day has ended.
        return time.time() - state.st_mtime < 86400.0
    return False


class Munge:
    """MUNGE's two commands.

    Args:
        socket: munged's socket; MUNGE's default if empty.
        users: Users that Steward may run as, beside root.
    """

    def __init__(self, socket: str, users: Sequence[str]) -> None:
        self._socket_options = [f"--socket={socket}"] if socket else []
        self._uids = {0, os.geteuid()}
        for user in users:
            import pwd

            try:
                self._uids.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
            except KeyError:
                raise WrongUse(f"--user: there is no user {user!r} here") from None

    def sign(self, claim: bytes) -> str:
        """A credential over these bytes."""
        return self._run(["munge", *self._socket_options], claim).decode("ascii").strip()

    def check(self, credential: str, claim: bytes) -> None:
        """See that Steward said this."""
        command = ["unmunge", *self._socket_options, "--numeric", "--keys=UID"]
        head, _, signed = self._run(command, credential.encode("ascii", "replace")).partition(
            b"\n\n"
        )
        uid = re.search(rb"UID: +(\d+)", head)
        if signed != claim or uid is None:
            raise Later("the answer's MUNGE credential is for another batch")
        if int(uid[1]) not in self._uids:
            raise Later(
                f"the answer is uid {int(uid[1])}'s: name the user that Steward runs as, --user"
            )

    def _run(self, command: Sequence[str], data: bytes) -> bytes:
        import subprocess

        environment = {"PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")}
        try:
            result = subprocess.run(
                command,
                input=data,
                capture_output=True,
                env=environment,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Later(f"{command[0]} cannot be run: {error}") from error
        if result.returncode != 0:
            message = result.stderr.decode("utf-8", "backslashreplace")[:300]
            raise Later(f"{command[0]} failed: {' '.join(message.split())}")
        return result.stdout


class Sender:
    """The way to Steward: one connection, as long as it is kept.

    Args:
        arguments: What the command line says.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        host, _, port = arguments.to.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise WrongUse(f"--to is a host and a port, steward:6826, not {arguments.to!r}")
        self._host, self._port = host.strip("[]"), int(port)
        if not arguments.tls and (arguments.ca or arguments.certificate):
            raise WrongUse("--ca and --certificate are for --tls: give it, too")
        self._munge = None
        if not arguments.certificate:
            self._munge = Munge(arguments.munge_socket, arguments.user)
        self._connection: Any = None

    def _open_connection(self) -> Any:
        import http.client

        arguments, timeout_s = self._arguments, self._arguments.timeout
        if not arguments.tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        import ssl

        context = ssl.create_default_context(cafile=arguments.ca or None)
        if arguments.certificate:
            context.load_cert_chain(arguments.certificate, arguments.key or None, password="")
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=timeout_s, context=context
        )

    def send(self, head: dict[str, Any], body: bytes) -> None:
        """Have a batch taken; returns when it is durable over there.

        Raises:
            Later: It is not, as far as is known.
            AgentError: It will not be, as it is.
        """
        import http.client
        import json

        text = json.dumps({**head, "nonce": os.urandom(16).hex()})
        digest = digest_of(text.encode(), body)
        headers = {"Steward-Batch": text, "Content-Type": "application/x-ndjson"}
        if self._munge:
            claim = claim_of(head["node"], head["cluster"], head["sequence"], digest)
            headers["Steward-Credential"] = self._munge.sign(claim)
        try:
            if self._connection is None:
                self._connection = self._open_connection()
            self._connection.request("POST", PATH, body, headers)
            response = self._connection.getresponse()
            text_received = response.read(_MOST_ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Later(f"{self._arguments.to}: {self._explain_error(error)}") from error
        if response.will_close:
            self.close()
        if response.status != 200:
            self.close()
            message = " ".join(text_received.decode("utf-8", "backslashreplace").split())[:300]
            message = f"{self._arguments.to} answers {response.status}: {message}"
            if response.status in (429, 503):
                raise Later(message, _seconds(response.getheader("Retry-After")))
            raise AgentError(message)
        if self._munge:
            credential = response.getheader("Steward-Credential") or ""
            self._munge.check(credential, answer_claim_of(digest, text_received))
        if text_received.split() != [b"durable", digest.encode()]:
            raise Later(f"{self._arguments.to} answers for another batch")

    def _explain_error(self, error: Exception) -> str:
        """What went wrong, with what to do where only one side has TLS: neither says so itself."""
        import http.client

        message = str(error) or type(error).__name__
        if getattr(error, "reason", "") in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return f"{message}: Steward listens without TLS there, leave out --tls"
        lost_errors = (ConnectionResetError, BrokenPipeError, http.client.BadStatusLine)
        if isinstance(error, lost_errors) and not self._arguments.tls:
            return f"{message}: if Steward listens with TLS there, give --tls"
        return message

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _chance() -> float:
    """Between 0 and 1, another one on each node."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


def _seconds(text: str | None) -> float:
    """What Retry-After says, in seconds; 0 for what is none."""
    return min(float(text), _LONGEST_WAIT_S) if text and re.fullmatch(r"[0-9]{1,9}", text) else 0.0


def _boot() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _attend(node: str, sender: Sender, arguments: Any, until: float) -> None:
    """Send what a node's files hold, and keep them small."""
    spool = Spool(arguments.spool, node, arguments.rotate_bytes, arguments.most_bytes)
    spool.rotate_and_clean()
    try:
        _send_all(spool, node, sender, arguments, until)
    finally:
        spool.drop_excess()
        spool.rotate_and_clean()
    spool.place.check()


def _send_all(spool: Spool, node: str, sender: Sender, arguments: Any, until: float) -> None:
    """Send what a node's files hold; nothing where there is nothing to say."""
    place, boot = spool.place, _boot()
    while True:
        batch = spool.read_batch()
        now = time.time()
        quiet_s = now - place.heard
        due = place.dropped or boot != place.boot or not 0 <= quiet_s < arguments.heartbeat
        if batch is None and not due:
            break
        number, offset, body = batch or (0, 0, b"")
        head = {
            "v": VERSION,
            "node": node,
            "cluster": arguments.cluster,
            "boot": boot,
            "place": place.id,
            "sequence": place.sequence + 1,
            "dropped": place.dropped,
            "dropped_ever": place.dropped_ever,
        }
        try:
            sender.send(head, body)
        except Later as error:
            # Each node waits for another time, so that they do not all come again at once.
            wait_s = (error.after_s or 5.0) * (1.0 + _chance())
            if time.monotonic() + wait_s > until:
                raise
            time.sleep(wait_s)
            continue
        spool.record_sent(number, offset, now, boot)


@contextlib.contextmanager
def _lock(path: str) -> Iterator[bool]:
    """Whether we are the one run that is at work on a node's lines."""
    with open(path, "wb", opener=_private) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            is_locked = False
        yield is_locked


def _nodes(arguments: Any) -> list[str]:
    if arguments.node:
        return list(arguments.node)
    # Also one whose file was just renamed, and that has not written since.
    matches = [match for match in map(_FILE.fullmatch, os.listdir(arguments.spool)) if match]
    names = {match[1] for match in matches}
    host_name = os.uname().nodename.partition(".")[0]
    is_placed = all(match[2] == "place" for match in matches if match[1] == host_name)
    # The host's own name is tried until a file tells the NodeName: it may be no node's.
    if host_name in names and len(names) > 1 and is_placed:
        place = Place(os.path.join(arguments.spool, f"{host_name}.place"))
        names -= set() if place.heard else {host_name}
    return sorted(names) or [host_name]


def run_once(arguments: Any) -> None:
    """Send what there is.

    Raises:
        AgentError: Not all of it could be sent.
    """
    import signal

    # Whatever hangs (a name server, a disk): being killed costs nothing but time.
    signal.alarm(int(arguments.limit + 120))
    until = time.monotonic() + arguments.limit
    sender = Sender(arguments)
    errors: list[str] = []
    for node in _nodes(arguments):
        if not NODE_NAME.fullmatch(node):
            raise WrongUse(f"{node!r} is no node's name")
        try:
            with _lock(os.path.join(arguments.spool, f"{node}.lock")) as is_locked:
                # Where it is another's, that one sends what there is.
                if is_locked:
                    _attend(node, sender, arguments, until)
        except (AgentError, OSError) as error:
            errors.append(f"node {node}: {error}")
    sender.close()
    signal.alarm(0)
    if errors:
        raise AgentError("; ".join(errors[:3]))


def _parser(program: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--spool", required=True, help="directory that the SPANK plugin writes to")
    add("--to", required=True, metavar="HOST:PORT", help="where Steward listens, [nodes] listen")
    add("--node", action="append", help="NodeName; each that has a file there if not given")
    add("--cluster", default="", help="the cluster's name in Steward's configuration")
    add("--tls", action="store_true", help="encrypt")
    add("--ca", default="", help="certificates that Steward's is checked against")
    add("--certificate", default="", help="the node's certificate, in place of MUNGE")
    add("--key", default="", help="the key of that certificate")
    add("--munge-socket", default="", help="munged's socket")
    add("--user", action="append", default=[], help="user that Steward runs as, beside root")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="send what there is, and end (default)")
    how.add_argument("--resident", action="store_true", help="stay, and look every --every seconds")
    for name, default, what in (
        ("every", 60.0, "seconds between two looks of --resident"),
        ("jitter", 0.0, "wait up to so many seconds before beginning"),
        ("limit", 45.0, "seconds after which nothing is tried again"),
        ("timeout", 30.0, "seconds that Steward may take to answer"),
        ("heartbeat", 900.0, "seconds after which a node that has nothing to say says so"),
        ("rotate-bytes", 1 << 20, "begin a new file at this size"),
        ("most-bytes", 64 << 20, "give up the oldest beyond this, or half of the file system"),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=what)
    return parser


def main(words: Sequence[str], program: str = "steward-agent") -> int:
    """Do what a command line says; the exit code."""
    arguments = _parser(program).parse_args(words)
    while True:
        time.sleep(_chance() * arguments.jitter)
        code = 0
        try:
            run_once(arguments)
        except (AgentError, OSError) as error:
            print(f"{program}: {error}", file=sys.stderr, flush=True)
            code = 2 if isinstance(error, WrongUse) else 1
        if code == 2 or not arguments.resident:
            return code
        time.sleep(arguments.every * (0.8 + 0.4 * _chance()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
