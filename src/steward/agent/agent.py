"""Node agent: sends the lines of Steward's SPANK plugin on a compute node to Steward.

The agent is one file for the node's own Python (3.9 or later). It needs only the
standard library, and MUNGE's two commands if no certificate is given. A timer runs
it once a minute, or it keeps running (``--resident``).

The plugin writes lines to ``DIR/<node>.log``. The agent records the offsets that
Steward stored durably in ``DIR/<node>.place`` and overwrites its two halves in turn:
that needs no space, so a full directory can drain. A killed run sends some lines
again, which Steward ignores; no line is lost.

The agent renames a large file to ``<node>.log.<number>``; the plugin creates a new
file the next time it opens one. Writers may still have the renamed file open, so the
agent continues to read it. It removes the file when all lines were sent, when no
process has it open for writing (the kernel grants a read lease, fcntl(2), only then),
and a minute after the rename, so that no writer is between looking up the name and
opening the file.
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

# Most runs have nothing to send, so rarely needed modules are imported where they are used.
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
"""Size of each half of the place file, in bytes: whole pages, enough for ``_MOST_FILES``."""
_MOST_FILES = 128
_TAIL = 4096


class AgentError(Exception):
    """The agent failed; the message says what to do."""


class WrongUse(AgentError):
    """The command line is invalid."""


class Later(AgentError):
    """Temporary failure; ``after_s`` is the delay that the server requested, in seconds."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


def digest_of(head: bytes, body: bytes) -> str:
    """Return the digest of a batch, which credentials and answers name."""
    import hashlib

    digest = hashlib.sha256(head + b"\n")
    digest.update(body)
    return digest.hexdigest()


def claim_of(node: str, cluster: str, sequence: int, digest: str) -> bytes:
    """Return the text that the credential of a batch signs."""
    return f"steward-node {VERSION} lines {node} {cluster or '-'} {sequence} {digest}".encode()


def answer_claim_of(digest: str, body: bytes) -> bytes:
    """Return the text that the credential of an answer signs."""
    import hashlib

    return f"steward-node {VERSION} answer {digest} {hashlib.sha256(body).hexdigest()}".encode()


class Place:
    """Place file: offsets of the lines that were sent, kept across runs.

    Args:
        path: Path of the place file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.id = os.urandom(16).hex()
        """Random id of this place; a new id tells Steward that earlier state and lines are lost."""
        self.number = 1
        """Number that the current file gets when it is renamed."""
        self.offsets: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        """Checksums of the bytes before each offset, which detect a replaced file."""
        self.sequence = 0
        self.dropped = 0
        """Number of lines dropped since the last batch."""
        self.dropped_ever = 0
        self.boot = ""
        self.heard = 0.0
        """Time of the last accepted batch, in seconds since 1970."""
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
            # A power failure may truncate one half; the other holds the state before.
            if digest == b"%d" % zlib.crc32(text):
                state = max(
                    state, json.loads(text), key=lambda candidate: candidate.get("written", 0)
                )
        for name, value in state.items():
            in_files = isinstance(value, dict)
            setattr(self, name, {int(n): of for n, of in value.items()} if in_files else value)
        if not state:
            # Missing or unreadable: send all lines again. Save the new id before Steward
            # receives it.
            self.save()

    def save(self) -> None:
        """Save the state durably; if the disk is full, remember it for :meth:`check`."""
        import json

        self.written += 1
        state = {name: value for name, value in vars(self).items() if name[0] != "_"}
        text = json.dumps(state).encode()
        half = b"%d %s\n" % (zlib.crc32(text), text)
        if len(half) > _HALF:
            raise AgentError(
                f"cannot record the sent offsets in {self._path}: too many files in the spool: "
                "remove old ones"
            )
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
            # Reserve the full size while there is space.
            file.write(b" " * (2 * _HALF - file.seek(0, os.SEEK_END)))
            file.seek(at)
            file.write(half)
            file.flush()
            os.fsync(file.fileno())

    def check(self) -> None:
        """Save state that is still unsaved; raise Later if the disk is still full."""
        if self._flaw is not None:
            self.save()
        if self._flaw is not None:
            raise Later(f"cannot record the sent offsets: {self._flaw}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Spool:
    """Line files of one node, oldest first.

    Args:
        directory: Directory of the files.
        node: NodeName.
        rotate_bytes: Size at which a file is renamed, so that it can be removed later.
        most_bytes: Size of unsent lines above which the oldest are dropped and counted.
            Both are reduced on small file systems.
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
        # An earlier run may have been killed between a rename and its record. Record the
        # number at once, or it would be used again after that file is removed.
        number = max([self.place.number, *(n + 1 for n in self._list_rotated())])
        if number != self.place.number:
            self.place.number = number
            self.place.save()
        # A power failure may truncate a file, which has grown again since.
        for number, offset in list(self.place.offsets.items()):
            if self._checksum_tail(number, offset) != self.place.tails.get(number):
                del self.place.offsets[number]

    def _checksum_tail(self, number: int, offset: int) -> int:
        """Return the checksum of the bytes before an offset; -1 if the file is missing."""
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
        """List the number, read offset and size of each file."""
        files = []
        for number in [*self._list_rotated(), self.place.number]:
            try:
                size = os.lstat(self._path(number)).st_size
            except FileNotFoundError:
                continue
            offset = self.place.offsets.get(number, 0)
            # Shorter than its offset: it was replaced or truncated.
            files.append((number, offset if offset <= size else 0, size))
        return files

    def rotate_and_clean(self) -> None:
        """Rename a large file, and remove files that were sent."""
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
        """Drop the oldest lines beyond the limit, and count them."""
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
        """Return True if a renamed file was sent completely and has no writer."""
        with open(self._path(number), "rb", opener=_private) as file:
            state = os.fstat(file.fileno())
            if time.time() - state.st_ctime < self._grace_s or _has_writer(file.fileno(), state):
                return False
            return os.fstat(file.fileno()).st_size == self.place.offsets.get(number, 0)

    def read_batch(self) -> tuple[int, int, bytes] | None:
        """Return the next batch: number of its file, end offset, complete lines; or None."""
        for number, begin, size in self._list_waiting():
            if begin >= size:
                continue
            with open(self._path(number), "rb", opener=_private) as file:
                # Check before reading: a final file does not grow afterwards.
                final = number != self.place.number and not _has_writer(
                    file.fileno(), os.fstat(file.fileno())
                )
                file.seek(begin)
                data = file.read(BATCH_BYTES)
                # Make lines durable before they are recorded as sent.
                os.fdatasync(file.fileno())
            end = data.rfind(b"\n") + 1
            if not end and (final or len(data) > LARGEST_LINE):
                # Not a valid line: truncated by a full disk, or written by another program.
                return number, begin + len(data), data[:LARGEST_LINE] + b"\n"
            if end:
                return number, begin + end, data[:end]
        return None

    def record_sent(self, number: int, offset: int, now: float, boot: str) -> None:
        """Record that Steward stored lines durably."""
        place = self.place
        if number:
            self._advance(number, offset)
        place.sequence += 1
        place.dropped = 0
        place.heard, place.boot = now, boot
        place.save()


def _has_writer(descriptor: int, state: os.stat_result) -> bool:
    """Return True if a process has a file open for writing."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        # No leases on this file system: assume no writer after a day without writes.
        return time.time() - state.st_mtime < 86400.0
    return False


class MungeCommands:
    """Signer and verifier of credentials, with the commands munge and unmunge.

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
                raise WrongUse(f"invalid --user: unknown user {user!r} on this node") from None

    def sign(self, claim: bytes) -> str:
        """Return a credential that signs these bytes."""
        return self._run(["munge", *self._socket_options], claim).decode("ascii").strip()

    def check(self, credential: str, claim: bytes) -> None:
        """Check that a credential signs these bytes and is from Steward."""
        command = ["unmunge", *self._socket_options, "--numeric", "--keys=UID"]
        head, _, signed = self._run(command, credential.encode("ascii", "replace")).partition(
            b"\n\n"
        )
        uid = re.search(rb"UID: +(\d+)", head)
        if signed != claim or uid is None:
            raise Later("the MUNGE credential of the reply is for another batch")
        if int(uid[1]) not in self._uids:
            raise Later(f"the reply is from uid {int(uid[1])}: name Steward's user with --user")

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
            raise Later(f"cannot run {command[0]}: {error}") from error
        if result.returncode != 0:
            message = result.stderr.decode("utf-8", "backslashreplace")[:300]
            raise Later(f"{command[0]} failed: {' '.join(message.split())}")
        return result.stdout


class Sender:
    """Sender of batches over one persistent connection.

    Args:
        arguments: Parsed command line.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        host, _, port = arguments.to.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise WrongUse(
                f"invalid --to {arguments.to!r}: give host and port, such as steward:6826"
            )
        self._host, self._port = host.strip("[]"), int(port)
        if not arguments.tls and (arguments.ca or arguments.certificate):
            raise WrongUse("--ca and --certificate need --tls: give it, too")
        self._munge = None
        if not arguments.certificate:
            self._munge = MungeCommands(arguments.munge_socket, arguments.user)
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
        """Send a batch and wait until Steward stored it durably.

        Raises:
            Later: The batch may not be stored; send it again.
            AgentError: Steward rejected the batch.
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
                raise Later(message, _parse_retry_after(response.getheader("Retry-After")))
            raise AgentError(message)
        if self._munge:
            credential = response.getheader("Steward-Credential") or ""
            self._munge.check(credential, answer_claim_of(digest, text_received))
        if text_received.split() != [b"durable", digest.encode()]:
            raise Later(
                f"{self._arguments.to} did not confirm the batch: unexpected reply. Is --to the "
                "address of Steward's [nodes] listener?"
            )

    def _explain_error(self, error: Exception) -> str:
        """Describe an error; add a hint if probably only one side uses TLS."""
        import http.client

        message = str(error) or type(error).__name__
        if getattr(error, "reason", "") in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return f"{message}: Steward listens without TLS, remove --tls"
        lost_errors = (ConnectionResetError, BrokenPipeError, http.client.BadStatusLine)
        if isinstance(error, lost_errors) and not self._arguments.tls:
            return f"{message}: if Steward listens with TLS, give --tls"
        return message

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _draw_random() -> float:
    """Return a random number between 0 and 1."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


def _parse_retry_after(text: str | None) -> float:
    """Parse Retry-After, in seconds; 0 if invalid or absent."""
    return min(float(text), _LONGEST_WAIT_S) if text and re.fullmatch(r"[0-9]{1,9}", text) else 0.0


def _read_boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _send_node(node: str, sender: Sender, arguments: Any, until: float) -> None:
    """Send the lines of a node, and rotate and clean its files."""
    spool = Spool(arguments.spool, node, arguments.rotate_bytes, arguments.most_bytes)
    spool.rotate_and_clean()
    try:
        _send_all(spool, node, sender, arguments, until)
    finally:
        spool.drop_excess()
        spool.rotate_and_clean()
    spool.place.check()


def _send_all(spool: Spool, node: str, sender: Sender, arguments: Any, until: float) -> None:
    """Send the lines of a node in batches; send a heartbeat if one is due."""
    place, boot = spool.place, _read_boot_id()
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
            # A random delay keeps nodes from retrying at the same time.
            wait_s = (error.after_s or 5.0) * (1.0 + _draw_random())
            if time.monotonic() + wait_s > until:
                raise
            time.sleep(wait_s)
            continue
        spool.record_sent(number, offset, now, boot)


@contextlib.contextmanager
def _lock(path: str) -> Iterator[bool]:
    """Lock the files of a node; yield False if another run holds the lock."""
    with open(path, "wb", opener=_private) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            is_locked = False
        yield is_locked


def _list_nodes(arguments: Any) -> list[str]:
    if arguments.node:
        return list(arguments.node)
    # Include nodes whose only file was just renamed.
    matches = [match for match in map(_FILE.fullmatch, os.listdir(arguments.spool)) if match]
    names = {match[1] for match in matches}
    host_name = os.uname().nodename.partition(".")[0]
    is_placed = all(match[2] == "place" for match in matches if match[1] == host_name)
    # Use the host name until a file shows the NodeName: the two may differ.
    if host_name in names and len(names) > 1 and is_placed:
        place = Place(os.path.join(arguments.spool, f"{host_name}.place"))
        names -= set() if place.heard else {host_name}
    return sorted(names) or [host_name]


def run_once(arguments: Any) -> None:
    """Send the lines of all nodes.

    Raises:
        AgentError: Some lines could not be sent.
    """
    import signal

    # End the process if it hangs (name server, disk): the next run sends the lines again.
    signal.alarm(int(arguments.limit + 120))
    until = time.monotonic() + arguments.limit
    errors: list[str] = []
    try:
        sender = Sender(arguments)
        for node in _list_nodes(arguments):
            if not NODE_NAME.fullmatch(node):
                raise WrongUse(f"invalid node name {node!r}")
            try:
                with _lock(os.path.join(arguments.spool, f"{node}.lock")) as is_locked:
                    # If another run holds the lock, it sends the lines.
                    if is_locked:
                        _send_node(node, sender, arguments, until)
            except (AgentError, OSError) as error:
                errors.append(f"node {node}: {error}")
        sender.close()
    finally:
        signal.alarm(0)
    if errors:
        raise AgentError("; ".join(errors[:3]))


def _build_parser(program: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--spool", required=True, help="spool of the SPANK plugin")
    add("--to", required=True, metavar="HOST:PORT", help="'listen' of [nodes]")
    add("--node", action="append", help="NodeName (default: all in the spool)")
    add("--cluster", default="", help="name of the cluster in Steward's configuration")
    add("--tls", action="store_true", help="encrypt connections")
    add("--ca", default="", help="CA certificates that verify Steward's certificate")
    add("--certificate", default="", help="certificate of the node; replaces MUNGE")
    add("--key", default="", help="private key of the node's certificate")
    add("--munge-socket", default="", help="socket of munged")
    add(
        "--user",
        action="append",
        default=[],
        help="user that Steward runs as; the agent accepts replies of this user and of root",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="send all waiting reports, then exit (default)"
    )
    how.add_argument(
        "--resident", action="store_true", help="keep running, send every --every seconds"
    )
    for name, default, what in (
        ("every", 60.0, "interval between two runs of --resident, in seconds"),
        ("jitter", 0.0, "maximum random delay before the first request, in seconds"),
        ("limit", 45.0, "time after which the agent stops retrying, in seconds"),
        ("timeout", 30.0, "timeout of a reply from Steward, in seconds"),
        ("heartbeat", 900.0, "interval of heartbeats from a node without reports, in seconds"),
        ("rotate-bytes", 1 << 20, "size at which the agent starts a new file, in bytes"),
        (
            "most-bytes",
            64 << 20,
            "maximum size of waiting reports, in bytes; the agent drops the oldest",
        ),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=what)
    return parser


def main(words: Sequence[str], program: str = "steward-agent") -> int:
    """Run a command line and return the exit code."""
    arguments = _build_parser(program).parse_args(words)
    while True:
        time.sleep(_draw_random() * arguments.jitter)
        code = 0
        try:
            run_once(arguments)
        except (AgentError, OSError) as error:
            print(f"{program}: {error}", file=sys.stderr, flush=True)
            code = 2 if isinstance(error, WrongUse) else 1
        if code == 2 or not arguments.resident:
            return code
        time.sleep(arguments.every * (0.8 + 0.4 * _draw_random()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
