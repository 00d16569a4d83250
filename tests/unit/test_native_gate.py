"""C plugin of slurmctld: its requests, the replies that it accepts, and its time-outs."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.native import (
    SENT_TEXTS,
    VECTORS,
    answer_of,
    compile_gate,
    expected,
    hexed,
    needs_compiler,
    raw,
    run_gate,
    setting,
    spoilt_answers,
)
from servers.gate import AskedGate, FullGate, hangs, says
from steward.bank.gate.plugin_conf import FORMAT

pytestmark = needs_compiler

ADMITTED, REFUSED = "0", "2050"


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return compile_gate(tmp_path_factory.mktemp("asan"), *flags)


@pytest.fixture(scope="session")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_gate(tmp_path_factory.mktemp("tsan"), "-O1", "-fsanitize=thread")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[AskedGate]:
    with AskedGate(tmp_path / "gate.sock") as one:
        yield one


def conf(tmp_path: Path, *lines: str, timeout_ms: int = 200) -> Path:
    path = tmp_path / "gate.conf"
    text = [f"socket {tmp_path}/gate.sock", f"off_file {tmp_path}/off", f"timeout_ms {timeout_ms}"]
    path.write_text("".join(f"{line}\n" for line in [*text, *lines]))
    return path


def begun(tmp_path: Path, *lines: str, timeout_ms: int = 200) -> list[str]:
    path = conf(tmp_path, *lines, timeout_ms=timeout_ms)
    return [f"conf {path}", "init", "new", "set user_id 1000"]


class Asker:
    """Running harness; a call submits a job and returns the result."""

    def __init__(self, program: Path, path: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._say(f"conf {path}", "init", "new", "set user_id 1000")

    def _say(self, *orders: str) -> None:
        assert self.process.stdin
        self.process.stdin.write("".join(f"{order}\n" for order in orders))
        self.process.stdin.flush()

    def __call__(self) -> str:
        assert self.process.stdout
        self._say("ask submit 1")
        return self.process.stdout.readline().split()[0]


@contextlib.contextmanager
def asking(program: Path, tmp_path: Path, *lines: str) -> Iterator[Asker]:
    """Make a harness that asks as often as a test wants, with these lines of its file."""
    asker = Asker(program, conf(tmp_path, *lines))
    with asker.process:
        yield asker
        assert asker.process.stdin
        asker.process.stdin.close()
        assert asker.process.wait(30) == 0


def codes(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def test_it_writes_what_the_vectors_say(checked: Path) -> None:
    orders = []
    for vector in VECTORS["requests"]:
        orders += setting(vector["job"])
        orders += [f"cluster {vector['cluster']}", f"write {vector['op']} {vector['by']}"]
    lines = run_gate(checked, ["conf /nowhere", "init", *orders])
    for vector, line in zip(VECTORS["requests"], lines, strict=True):
        assert json.loads(line) == vector["json"], vector["name"]


def test_it_takes_what_the_vectors_say(checked: Path) -> None:
    vectors = VECTORS["responses"]
    texts = [raw(one.get("text", one)) for one in vectors]
    lines = run_gate(checked, [f"read {hexed(text)}" for text in texts])
    for vector, line in zip(vectors, lines, strict=True):
        assert answer_of(line) == expected(vector["answer"]), vector["name"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60).filter(lambda b: b"\0" not in b), min_size=30))
@example(["\x85\u2028\u2029\x0b\x0c\x1c".encode()])
def test_any_bytes_can_be_a_name(checked: Path, names: list[bytes]) -> None:
    orders = [order for name in names for order in (f"set account {name.hex()}", "write submit 1")]
    lines = run_gate(checked, ["conf /nowhere", "init", "new", *orders])
    for name, line in zip(names, lines, strict=True):
        found = json.loads(line)["job"]["account"]
        assert found == name.decode("utf-8", "backslashreplace")


def test_ten_thousand_spoilt_answers_do_no_harm(checked: Path) -> None:
    seed = random.randrange(1 << 30)
    spoilt = spoilt_answers(seed, 10_000)
    lines = run_gate(checked, [f"read {hexed(data)}" for data in spoilt])
    assert len(lines) == len(spoilt), f"seed {seed}"
    found = [line != "none" and line.split()[0] == "1" for line in lines]
    # Both parsers accept the same JSON.
    for data, is_ok in zip(spoilt, found, strict=True):
        try:
            verdict = json.loads(data.split(b"\n")[0])["ok"]
        except (ValueError, KeyError, TypeError):
            continue  # it is no answer, and what it is taken for is no matter
        assert not is_ok or verdict is True, f"seed {seed}: {data!r}"


def test_an_answer_is_followed(checked: Path, gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(say="note\nwell", admin_comment="t", qos="q", partition="p", account="a")
    orders = ["set admin_comment 6f6c64", "ask submit 1000", f"ask submit 0 {b'before'.hex()}"]
    first, second = run_gate(checked, [*begun(tmp_path), *orders])
    texts = [b"note\nwell", b"t", b"q", b"p", b"a"]
    assert first.split()[0] == ADMITTED
    assert [bytes.fromhex(text) for text in first.split()[2:]] == texts
    assert bytes.fromhex(second.split()[2]) == b"before\nnote\nwell"
    assert [question["by"] for question in gate.asked] == [1000, 0]
    gate.answers = says(ok=False, say="no", account="other")
    (refused,) = run_gate(checked, [*begun(tmp_path), "ask submit 1000"])
    assert refused.split()[0] == REFUSED
    assert refused.split()[2:] == [b"no".hex(), "-", "-", "-", "-"]


def test_an_update_that_costs_no_more_is_not_asked(
    checked: Path, gate: AskedGate, tmp_path: Path
) -> None:
    gate.answers = says(ok=False)
    free = ["set comment 61", "set name 61", "set nice 5", "set priority 0", "set admin_comment 61"]
    dear = ["set time_limit 5", "set priority 9", "set shared 0", "set begin_time 5", "set qos 61"]
    orders = [part for one in (*free, *dear) for part in ("new", one, "ask modify 1000")]
    lines = run_gate(checked, [*begun(tmp_path), *orders])
    assert codes(lines) == [ADMITTED] * len(free) + [REFUSED] * len(dear)
    assert len(gate.asked) == len(dear)


@pytest.mark.parametrize(
    ("record", "named", "jobs", "job_id"),
    [
        ("record 26 1", "30", "26_1", 26),
        ("record 26 0", "30", "26_0", 26),
        ("record 26 1", "26_1", "26_1", 26),
        # All tasks of the array, of which this one has a separate record.
        ("record 26 1", "26", "26", 26),
        # The record of the tasks that are left, and that of no array.
        ("record 26 4294967294", "26", "26", 26),
        ("record 0 0", "30", "30", 30),
    ],
)
def test_the_plugin_sends_array_and_task_for_either_id(
    checked: Path, tmp_path: Path, record: str, named: str, jobs: str, job_id: int
) -> None:
    words = [f"set job_id_str {named.encode().hex()}", "set time_limit 5", record]
    (line,) = run_gate(checked, [*begun(tmp_path), *words, "write modify 1000"])
    question = json.loads(line)
    assert (question["jobs"], question["job"]["job_id"]) == (jobs, job_id)


SPOILT = {
    "rubbish": b"\x00\xffHTTP/1.0\n",
    "another version": b'{"v":9,"ok":true}\n',
    "nothing": b"",
    "half": b'{"v":1,"ok":',
    "much": b"x" * 100_000 + b"\n",
}


@pytest.mark.parametrize("policy", ["allow", "deny"])
@pytest.mark.parametrize("name", SPOILT)
def test_what_is_no_answer_leaves_it_to_the_policy(
    checked: Path, gate: AskedGate, tmp_path: Path, name: str, policy: str
) -> None:
    gate.answers = lambda _question, _sock: SPOILT[name]
    code = REFUSED if policy == "deny" else ADMITTED
    orders = ["ask submit 1000", "log", "ask submit 1000", "log"]
    first, log, second, log_later = run_gate(
        checked, [*begun(tmp_path, f"policy {policy}"), *orders]
    )
    assert codes([first, second]) == [code, code]
    # Said once, for an administrator's log is not to be filled.
    assert log == log_later
    assert log.startswith("1 job_submit/steward: the gate ")


def hanging(gate: AskedGate) -> None:
    gate.answers = hangs


def dripping(gate: AskedGate) -> None:
    def drip(_question: object, sock: object) -> bytes | None:
        for byte in b'{"v":1,"ok":false,"say":"' + b"x" * 400:
            sock.sendall(bytes([byte]))  # type: ignore[attr-defined]
            time.sleep(0.01)
        return b'"}\n'

    gate.answers = drip


@pytest.mark.parametrize("spoil", [hanging, dripping])
def test_who_does_not_answer_in_time_is_not_asked_for_a_while(
    checked: Path, gate: AskedGate, tmp_path: Path, spoil: object
) -> None:
    spoil(gate)  # type: ignore[operator]
    lines = run_gate(
        checked, [*begun(tmp_path, "quiet_s 60", "policy deny"), *["ask submit 1"] * 50]
    )
    assert set(codes(lines)) == {REFUSED}
    took = [float(line.split()[1]) for line in lines]
    assert took[0] >= 200
    assert gate.connections == 1
    assert b"try again" in bytes.fromhex(lines[-1].split()[2])


class Slow:
    """Server whose replies wait for the test, even if the client has given up."""

    def __init__(self) -> None:
        self.words = [threading.Event() for _ in range(9)]
        self.said = [threading.Event() for _ in range(9)]
        self._turns = iter(range(9))

    def __call__(self, _question: object, sock: socket.socket) -> None:
        turn = next(self._turns)
        self.words[turn].wait(60)
        with contextlib.suppress(OSError):  # no process reads it
            sock.sendall(b'{"v":1,"ok":true,"say":"slow"}\n')
        self.said[turn].set()


def test_a_late_answer_ends_the_while_of_not_asking_but_not_twice(
    checked: Path, gate: AskedGate, tmp_path: Path
) -> None:
    slow = gate.answers = Slow()
    with asking(checked, tmp_path, "quiet_s 60", "policy deny") as ask:
        assert ask() == REFUSED
        # Neither asked nor waited for: the second release was not given either.
        assert (ask(), ask(), gate.connections) == (REFUSED, REFUSED, 1)
        slow.words[1].set()
        slow.words[0].set()
        slow.said[0].wait(60)
        assert (ask(), gate.connections) == (ADMITTED, 2)
        # Late again so soon: now for all of the while.
        assert (ask(), gate.connections) == (REFUSED, 3)
        slow.words[2].set()
        slow.said[2].wait(60)
        assert (ask(), gate.connections) == (REFUSED, 3)


def test_one_that_hangs_up_late_is_not_asked_again(
    checked: Path, gate: AskedGate, tmp_path: Path
) -> None:
    word, is_over = threading.Event(), threading.Event()

    def hang_up(_question: object, sock: socket.socket) -> None:
        word.wait(60)
        sock.sendall(b'{"v":1,')
        sock.shutdown(socket.SHUT_RDWR)
        is_over.set()

    gate.answers = hang_up
    with asking(checked, tmp_path, "quiet_s 60", "policy deny") as ask:
        assert ask() == REFUSED
        word.set()
        is_over.wait(60)
        assert (ask(), ask(), gate.connections) == (REFUSED, REFUSED, 1)


def test_what_is_there_when_it_comes_late_itself_is_taken(
    checked: Path, gate: AskedGate, tmp_path: Path
) -> None:
    at_it, stopped = threading.Event(), threading.Event()

    def answer(_question: object, sock: socket.socket) -> None:
        at_it.set()
        stopped.wait(60)
        sock.sendall(b'{"v":1,"ok":true}\n')

    gate.answers = answer
    with asking(checked, tmp_path, "quiet_s 60", "policy deny") as ask:
        asked = threading.Thread(target=lambda: codes_of.append(ask()))
        codes_of: list[str] = []
        asked.start()
        at_it.wait(60)
        # The host has no processor for it until its time is over.
        ask.process.send_signal(signal.SIGSTOP)
        stopped.set()
        time.sleep(0.5)
        ask.process.send_signal(signal.SIGCONT)
        asked.join(60)
    assert codes_of == [ADMITTED]


def test_a_queue_that_is_full_is_waited_for_in_the_same_time(checked: Path, tmp_path: Path) -> None:
    with FullGate(tmp_path / "gate.sock"):
        first, second = run_gate(checked, [*begun(tmp_path, "quiet_s 60"), *["ask submit 1"] * 2])
    assert codes([first, second]) == [ADMITTED, ADMITTED]
    assert float(first.split()[1]) >= 190 > float(second.split()[1])


def test_one_that_comes_back_is_asked_again(checked: Path, gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = hangs
    orders = [*begun(tmp_path, "quiet_s 0"), *["ask submit 1"] * 3, "log"]
    *lines, log = run_gate(checked, orders)
    assert gate.connections == 3
    assert log.startswith("1 ")
    assert len(lines) == 3


def test_without_a_socket_nothing_is_waited_for(checked: Path, tmp_path: Path) -> None:
    orders = [*begun(tmp_path, "policy deny", "quiet_s 60"), "ask submit 1", "ask submit 1", "log"]
    *lines, log = run_gate(checked, orders)
    assert codes(lines) == [REFUSED, REFUSED]
    assert log == (
        f"1 job_submit/steward: the gate at {tmp_path}/gate.sock is unreachable: "
        "No such file or directory; the outage policy applies until it answers"
    )
    gone = AskedGate(tmp_path / "gate.sock", says(say="here"))
    with gone:
        (line,) = run_gate(checked, [*begun(tmp_path, "policy deny"), "ask submit 1"])
    assert line.split()[0] == ADMITTED


def test_the_file_that_switches_it_off(checked: Path, gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(ok=False)
    (tmp_path / "off").touch()
    (line,) = run_gate(checked, [*begun(tmp_path, "policy deny"), "ask submit 1"])
    assert (line.split()[0], gate.connections) == (ADMITTED, 0)


POLICIES = {
    "": ("", ADMITTED),
    "policy deny": ("", REFUSED),
    "policy deny\npartition a allow": ("a", ADMITTED),
    "partition a deny": ("b", ADMITTED),
    "partition a deny #": ("b,a", REFUSED),
    "partition a deny\npartition b allow": ("b", ADMITTED),
    "partition a deny\ndefault_partition a": ("", REFUSED),
    "partition a deny\ndefault_partition b,a": ("", REFUSED),
    "policy observe": ("", ADMITTED),
    "policy deny\npartition a observe": ("a", ADMITTED),
    "policy observe\npartition a deny": ("b,a", REFUSED),
    "policy perhaps\npartition a never\n\x01\npartition": ("a", ADMITTED),
    "# policy deny": ("a", ADMITTED),
}


@pytest.mark.parametrize("lines", POLICIES)
def test_the_policy_of_partitions(checked: Path, tmp_path: Path, lines: str) -> None:
    partition, code = POLICIES[lines]
    orders = [f"set partition {hexed(partition.encode())}", "ask submit 1", "ask modify 0"]
    asked = run_gate(checked, [*begun(tmp_path, lines), *orders])
    # Root's updates are the site's own.
    assert codes(asked) == [code, ADMITTED]


def test_an_update_that_names_no_partition_has_the_weakest_policy(
    checked: Path, tmp_path: Path
) -> None:
    lines = ("policy deny", "partition a observe", "default_partition b")
    orders = ["set time_limit 60", "ask submit 1000", "ask modify 1000"]
    named = [f"set partition {hexed(b'b')}", "ask modify 1000"]
    asked = run_gate(checked, [*begun(tmp_path, *lines), *orders, *named])
    assert codes(asked) == [REFUSED, ADMITTED, REFUSED]
    asked = run_gate(checked, [*begun(tmp_path, "policy deny"), *orders])
    assert codes(asked) == [REFUSED, REFUSED]


def test_a_policy_outlives_the_file(checked: Path, tmp_path: Path) -> None:
    with asking(checked, tmp_path, "policy deny") as ask:
        assert ask() == REFUSED
        (tmp_path / "gate.conf").unlink()
        assert ask() == REFUSED
        conf(tmp_path, "policy allow", "quiet_s 3")
        assert ask() == ADMITTED


def test_policies_are_read_from_a_file_of_a_newer_format(checked: Path, tmp_path: Path) -> None:
    newer = f"format {FORMAT + 1}"
    with asking(checked, tmp_path, f"format {FORMAT}", "policy deny") as ask:
        assert ask() == REFUSED
        # Without a policy that can be read, the last one holds.
        conf(tmp_path, newer, "quiet_s 3")
        assert ask() == REFUSED
        conf(tmp_path, newer, "policy lenient", "quiet_s 3")
        assert ask() == REFUSED
        conf(tmp_path, newer, "policy allow", "quiet_s 3")
        assert ask() == ADMITTED
        conf(tmp_path, "policy deny", newer)
        assert ask() == REFUSED
        conf(tmp_path, newer, "policy allow", "default_partition p", "partition p deny")
        assert ask() == ADMITTED
    # Without an earlier file, as at the start of slurmctld; it is logged beside the outage, once.
    orders = [*begun(tmp_path, newer, "policy deny"), "ask submit 1", "ask submit 1", "log"]
    *lines, log = run_gate(checked, orders)
    assert codes([*lines, log]) == [REFUSED, REFUSED, "2"]
    orders = [*begun(tmp_path, newer, "partition p deny"), "set partition 70", "ask submit 1"]
    assert codes(run_gate(checked, orders)) == [REFUSED]


def test_a_text_that_is_longer_than_any_that_is_priced_is_cut_and_named(checked: Path) -> None:
    cases = [
        (field, longest, length)
        for field, longest in SENT_TEXTS.items()
        for length in (longest, longest + 1, 2_000_000)
    ]
    orders = []
    for field, _, length in cases:
        name = "array_inx" if field == "array" else field
        orders += ["new", f"set {name} {'61' * length}", "write submit 1"]
    lines = run_gate(checked, ["conf /nowhere", "init", *orders])
    for (field, longest, length), line in zip(cases, lines, strict=True):
        question = json.loads(line)
        assert question.get("oversize") == (field if length > longest else None)
        assert len(question["job"][field]) == longest


def test_of_texts_that_are_not_priced_nothing_is_sent_or_counted(checked: Path) -> None:
    texts = {
        "dependency": b"afterok:1234567," * 100_000,
        "exc_nodes": b",".join(b"node%05d" % number for number in range(2000)),
        "comment": b"c" * 2_000_000,
        "name": b"n" * 2_000_000,
        "features": b"f" * 5000,
        "reservation": b"r" * 5000,
    }
    orders = [f"set {name} {text.hex()}" for name, text in texts.items()]
    (line,) = run_gate(checked, ["conf /nowhere", "init", "new", *orders, "write submit 1"])
    assert json.loads(line)["job"].keys() == {"uid"}
    assert "oversize" not in line


@pytest.mark.parametrize("policy", ["allow", "deny"])
@pytest.mark.parametrize("op", ["submit", "modify"])
def test_a_text_that_was_cut_is_refused_where_nobody_answers(
    checked: Path, gate: AskedGate, tmp_path: Path, op: str, policy: str
) -> None:
    gate.answers = hangs
    long = "6e6f64652d" * 250_000
    orders = [f"set req_nodes {long}", *[f"ask {op} 1000"] * 2, f"ask {op} 0"]
    first, second, root = run_gate(checked, [*begun(tmp_path, f"policy {policy}"), *orders])
    assert codes([first, second]) == [REFUSED, REFUSED]
    if op == "submit":
        assert b"longer than Slurm accepts" in bytes.fromhex(first.split()[2])
    (question,) = gate.asked
    assert question["oversize"] == "req_nodes"
    if policy == "allow":
        assert root.split()[0] == ADMITTED


@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_a_text_that_was_cut_is_as_any_other_where_nothing_is_enforced(
    checked: Path, gate: AskedGate, tmp_path: Path, policy: str
) -> None:
    gate.answers = hangs
    orders = [f"set req_nodes {'6e6f64652d' * 250_000}", "ask submit 1000"]
    observed = ("default_partition a", "partition a observe")
    asked = run_gate(checked, [*begun(tmp_path, f"policy {policy}", *observed), *orders])
    assert codes(asked) == [ADMITTED]
    asked = run_gate(checked, [*begun(tmp_path, f"policy {policy}"), *orders])
    assert codes(asked) == [REFUSED]


def test_a_text_that_was_cut_is_let_in_where_the_gate_says_so_or_is_switched_off(
    checked: Path, gate: AskedGate, tmp_path: Path
) -> None:
    gate.answers = says()
    long = "6e6f64652d" * 250_000
    orders = [*begun(tmp_path, "policy deny"), f"set req_nodes {long}", "ask submit 1000"]
    assert codes(run_gate(checked, orders)) == [ADMITTED]
    gate.answers = says(ok=False)
    assert codes(run_gate(checked, orders)) == [REFUSED]
    (tmp_path / "off").touch()
    assert codes(run_gate(checked, orders)) == [ADMITTED]


def test_threads_disturb_nothing(threaded: Path, gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(say="x", account="a")
    (line,) = run_gate(threaded, [*begun(tmp_path, timeout_ms=1000), "crowd 16 50"])
    assert line.split()[:2] == ["800", "0"]
    assert len(gate.asked) == 800


def test_of_many_threads_only_those_wait_that_asked_before(
    threaded: Path, gate: AskedGate, tmp_path: Path
) -> None:
    gate.answers = hangs
    (line,) = run_gate(threaded, [*begun(tmp_path, "quiet_s 60", "policy deny"), "crowd 16 50"])
    assert line.split()[:2] == ["0", "800"]
    assert 1 <= gate.connections <= 16
