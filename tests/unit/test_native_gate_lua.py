"""steward_gate.lua under a real Lua: the same protocol and time-outs as the C plugin."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from harness.native import (
    NATIVE,
    SENT_TEXTS,
    TEXTS,
    VECTORS,
    compile_gate,
    expected,
    hexed,
    needs_compiler,
    raw,
    run_gate,
    spoilt_answers,
)
from servers.gate import AskedGate, hangs, says
from steward.bank.gate.plugin_conf import FORMAT

LUAS = [name for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4") if shutil.which(name)]
SOCKETS = [
    name
    for name in LUAS
    if glob(f"/usr/lib/*/lua/{name[3:]}/socket/unix.so")
    or glob(f"/usr/lib64/lua/{name[3:]}/socket/unix.so")
]

pytestmark = pytest.mark.skipif(not LUAS, reason="no Lua is installed: make setup")
needs_socket = pytest.mark.skipif(not SOCKETS, reason="no LuaSocket is installed: make setup")

FRAME = """
local wire = dofile("{native}/steward_wire.lua")
local function hex(text)
    if not text or text == "" then return "-" end
    return (string.gsub(text, ".", function(one) return string.format("%02x", one:byte()) end))
end
local function bytes(text)
    return (string.gsub(text, "%x%x", function(one) return string.char(tonumber(one, 16)) end))
end
"""

SLURM = """
said, logged = {{}}, {{}}
slurm = {{SUCCESS = 0,
    log_user = function(form, text) table.insert(said, string.format(form, text)) end,
    log_info = function(form, text) table.insert(logged, string.format(form, text)) end,
    log_error = function(form, text) table.insert(logged, string.format(form, text)) end}}
steward_gate_conf = "{conf}"
steward_gate_cluster = "c"
local steward = dofile("{native}/steward_gate.lua")
local job = {{user_id = 1000, partition = "main"}}
local clock = require("socket.core").gettime
local function submit(times)
    local begun = clock()
    local code
    for _ = 1, times or 1 do code = steward.submit(job, {{}}, 1000) end
    return code, clock() - begun
end
"""


def run(lua: str, program: str, env: dict[str, str] | None = None) -> list[str]:
    """Run a program; return its lines of output."""
    done = subprocess.run(
        [lua, "-"],
        input=program.encode(),
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | (env or {}),
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    # Of bytes: a text would be cut at U+0085 and U+2028, too, which stand in lines as they are.
    return [line.decode() for line in done.stdout.splitlines()]


@pytest.fixture(params=LUAS or ["none"])
def lua(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[AskedGate]:
    with AskedGate(tmp_path / "gate.sock") as one:
        yield one


def site(tmp_path: Path, *lines: str) -> str:
    """Return a program's beginning: slurmctld's table, and the module, which asks this socket."""
    path = tmp_path / "gate.conf"
    text = [f"socket {tmp_path}/gate.sock", f"off_file {tmp_path}/off", "timeout_ms 200", *lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return SLURM.format(conf=path, native=NATIVE)


def as_lua(job: dict[str, Any]) -> str:
    """Return a vector's job as slurmctld's Lua shows it."""
    parts = []
    for field, value in job.items():
        if isinstance(value, int):
            parts.append(f"{field} = {value}")
        elif field != "job_id_str":
            parts.append(f'{field} = bytes("{raw(value).hex()}")')
    return "{" + ", ".join(parts) + "}"


def test_it_writes_what_the_vectors_say(lua: str) -> None:
    vectors = [one for one in VECTORS["requests"] if one.get("only") != "c"]
    program = FRAME.format(native=NATIVE)
    for one in vectors:
        job_id = one["job"].get("job_id", "nil")
        jobs = f'"{one["jobs"]}"' if "jobs" in one else "nil"
        program += (
            f'io.write((wire.request("{one["op"]}", "{one["cluster"]}", {as_lua(one["job"])}, '
            f"{one['by']}, {job_id}, {jobs})))\n"
        )
    for one, line in zip(vectors, run(lua, program), strict=True):
        assert json.loads(line) == one["json"], one["name"]


def test_a_text_that_is_longer_than_any_that_is_priced_is_cut_and_named(lua: str) -> None:
    program = FRAME.format(native=NATIVE)
    cases = [
        (field, longest, length)
        for field, longest in SENT_TEXTS.items()
        for length in (longest, longest + 1, 2_000_000)
    ]
    for field, _, length in cases:
        name = "array_inx" if field == "array" else field
        program += (
            f'io.write((wire.request("submit", "c", {{{name} = string.rep("a", {length})}}, 1)))\n'
        )
    for (field, longest, length), line in zip(cases, run(lua, program), strict=True):
        question = json.loads(line)
        assert question.get("oversize") == (field if length > longest else None)
        assert len(question["job"][field]) == longest


def test_of_texts_that_are_not_priced_nothing_is_sent_or_counted(lua: str) -> None:
    program = FRAME.format(native=NATIVE)
    names = ("dependency", "exc_nodes", "comment", "name", "features", "reservation")
    texts = ", ".join(f'{name} = string.rep("a,", 1000000)' for name in names)
    program += f'io.write((wire.request("submit", "c", {{{texts}}}, 1)))\n'
    (line,) = run(lua, program)
    assert json.loads(line)["job"] == {"uid": -1}
    assert "oversize" not in line


@needs_socket
@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_a_text_that_was_cut_is_refused_where_nobody_answers(
    gate: AskedGate, tmp_path: Path, policy: str
) -> None:
    gate.answers = hangs
    program = """
    job.req_nodes = string.rep("node1,", 200000)
    print(steward.submit(job, {}, 1000), said[1])
    print(steward.modify(job, {job_id = 7}, {}, 1000))
    job.partition = "open"
    print(steward.submit(job, {}, 0))
    """
    lines = run(SOCKETS[0], site(tmp_path, f"policy {policy}", "partition open allow") + program)
    assert lines[0].startswith("2050\tThis job cannot be priced")
    assert lines[1:] == ["2050", "0"]
    assert [question["oversize"] for question in gate.asked] == ["req_nodes"]
    observed = ("partition main observe", "partition open observe")
    lines = run(SOCKETS[0], site(tmp_path, f"policy {policy}", *observed) + program)
    assert lines == ["0\tnil", "0", "0"]
    (tmp_path / "off").touch()
    lines = run(SOCKETS[0], site(tmp_path, f"policy {policy}") + program)
    assert lines == ["0\tnil", "0", "0"]


@needs_socket
def test_the_policy_is_that_of_the_jobs_partition_or_of_the_default_one(tmp_path: Path) -> None:
    program = """
    print(steward.submit({user_id = 1000}, {}, 1000))
    print(steward.submit({user_id = 1000, partition = "open"}, {}, 1000))
    print(steward.submit({user_id = 1000, partition = "open,main"}, {}, 1000))
    local change = {time_limit = 60}
    print(steward.modify(change, {job_id = 7, partition = "open"}, {}, 1000))
    print(steward.modify(change, {job_id = 7, partition = "main"}, {}, 1000))
    """
    for policy in ("observe", "allow"):
        lines = ("policy deny", f"partition open {policy}", "default_partition open")
        assert run(SOCKETS[0], site(tmp_path, *lines) + program) == ["0", "0", "2050", "0", "2050"]
    lines = ("policy observe", "partition main deny", "default_partition main")
    assert run(SOCKETS[0], site(tmp_path, *lines) + program) == ["2050", "0", "2050", "0", "2050"]


def reading(texts: list[bytes]) -> str:
    program = FRAME.format(native=NATIVE)
    program += "for _, text in ipairs({" + ",".join(f'"{text.hex()}"' for text in texts) + "}) do\n"
    shown = ' .. " " .. '.join(f"hex(answer.{name})" for name in TEXTS)
    program += "local answer = wire.answer(bytes(text))\n"
    program += f'print(answer and ((answer.ok and "1 " or "0 ") .. {shown}) or "none")\nend\n'
    return program


def answer_of(line: str) -> dict[str, Any] | None:
    if line == "none":
        return None
    ok, *texts = line.split()
    told = {name: bytes.fromhex(t) for name, t in zip(TEXTS, texts, strict=True) if t != "-"}
    return {"ok": ok == "1", **told}


def test_it_takes_what_the_vectors_say(lua: str) -> None:
    vectors = VECTORS["responses"]
    lines = run(lua, reading([raw(one.get("text", one)) for one in vectors]))
    for one, line in zip(vectors, lines, strict=True):
        assert answer_of(line) == expected(one["answer"]), one["name"]


@needs_compiler
def test_it_takes_the_same_for_an_answer_as_the_plugin_in_c(
    lua: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seed = random.randrange(1 << 30)
    texts = spoilt_answers(seed, 5_000)
    program = compile_gate(tmp_path_factory.mktemp("plain"), "-O1")
    theirs = run_gate(program, [f"read {hexed(text)}" for text in texts])
    for text, ours, there in zip(texts, run(lua, reading(texts)), theirs, strict=True):
        assert ours == there, f"seed {seed}: {text!r}"


@needs_socket
def test_an_answer_is_followed(gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(say="a\nb %s", admin_comment="t", qos="q", partition="p", account="x")
    program = """
    print((submit()))
    print(said[1], job.admin_comment, job.qos, job.partition, job.account)
    local record = {job_id = 9, array_job_id = 7, array_task_id = 2}
    print(steward.modify({time_limit = 5}, record, {}, 5))
    print(steward.modify({comment = "x", priority = 0}, {job_id = 9}, {}, 5))
    """
    code, *_ = lines = run(SOCKETS[0], site(tmp_path) + program)
    assert code.split()[0] == "0"
    assert lines[1:] == ["a", "b %s\tt\tq\tp\tx", "0", "0"]
    submit, modify = gate.asked
    assert (submit["cluster"], submit["by"], submit["job"]["uid"]) == ("c", 1000, 1000)
    assert (modify["jobs"], modify["job"]["job_id"], modify["by"]) == ("7_2", 7, 5)
    gate.answers = says(ok=False, say="no", qos="q")
    lines = run(SOCKETS[0], site(tmp_path) + "print((submit()), said[1], job.qos)")
    assert lines == ["2050\tno\tnil"]


@needs_socket
@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_who_does_not_answer_in_time_is_not_asked_for_a_while(
    gate: AskedGate, tmp_path: Path, policy: str
) -> None:
    gate.answers = hangs
    program = """
    local code, took = submit()
    print(code, took >= 0.19, #logged, logged[1])
    code, took = submit(100)
    print(code, took < 0.2, #logged)
    print(steward.modify({time_limit = 5}, {job_id = 9}, {}, 0))
    """
    first, later, of_root = run(SOCKETS[0], site(tmp_path, f"policy {policy}") + program)
    code = {"allow": "0", "deny": "2050"}[policy]
    said = f"steward_gate: the gate at {tmp_path}/gate.sock does not answer"
    assert first.startswith(f"{code}\ttrue\t1\t{said}")
    assert later == f"{code}\ttrue\t1"
    assert of_root == "0"
    assert gate.connections == 1


@needs_socket
def test_a_late_answer_ends_the_while_of_not_asking_but_not_twice(
    gate: AskedGate, tmp_path: Path
) -> None:
    def slow(_question: object, sock: socket.socket) -> None:
        turn = gate.connections
        until = time.monotonic() + 60
        while turn != 2 and not (tmp_path / f"go{turn}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # no process reads it
            sock.sendall(b'{"v":1,"ok":true}\n')
        (tmp_path / f"said{turn}").touch()

    gate.answers = slow
    program = f"""
    local sleep = require("socket.core").sleep
    local function exists(name) return io.open("{tmp_path}/" .. name) ~= nil end
    local function late(turn)
        io.open("{tmp_path}/go" .. turn, "w"):close()
        repeat sleep(0.01) until exists("said" .. turn)
    end
    print((submit()), (submit()), (submit()))
    late(1)
    print((submit()), (submit()))
    late(3)
    print((submit()))
    """
    lines = run(SOCKETS[0], site(tmp_path, "policy deny", "quiet_s 60") + program)
    assert lines == ["2050\t2050\t2050", "0\t2050", "2050"]
    assert gate.connections == 3


@needs_socket
@pytest.mark.parametrize(
    "data", [b"rubbish\n", b"", b'{"v":1', b"x" * 200_000 + b"\n", b'{"v":1,"ok":1}\n']
)
def test_what_is_no_answer_leaves_it_to_the_policy(
    gate: AskedGate, tmp_path: Path, data: bytes
) -> None:
    gate.answers = lambda _question, _sock: data
    program = "submit() print((submit()), #logged)"
    assert run(SOCKETS[0], site(tmp_path, "policy deny") + program) == ["2050\t1"]


@needs_socket
def test_of_one_that_cannot_be_reached_path_and_reason_are_said(tmp_path: Path) -> None:
    (line,) = run(SOCKETS[0], site(tmp_path) + "submit() print(logged[1])")
    assert f"the gate at {tmp_path}/gate.sock is unreachable: " in line
    assert "no such file" in line.lower()


@needs_socket
def test_a_long_answer_in_pieces_is_read(gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(say="y" * 60_000)
    assert run(SOCKETS[0], site(tmp_path) + "submit() print(#said[1])") == ["60000"]


@needs_socket
def test_off_gone_and_by_partition(gate: AskedGate, tmp_path: Path) -> None:
    gate.answers = says(ok=False)
    (tmp_path / "off").touch()
    assert run(SOCKETS[0], site(tmp_path) + "print((submit()))") == ["0"]
    (tmp_path / "off").unlink()
    gate.stop()
    program = """
    print((submit()))
    job.partition = "main,long"
    print((submit()))
    job.partition = nil
    print(steward.submit(job, {main = {flag_default = 0}, long = {flag_default = 1}}, 1))
    os.remove(steward.conf_path)
    print(steward.submit(job, {long = {flag_default = 1}}, 1))
    """
    lines = run(SOCKETS[0], site(tmp_path, "partition long deny") + program)
    assert lines == ["0", "2050", "2050", "2050"]
    gate.start()


def test_without_luasocket_the_policy_holds_and_it_is_said_once(lua: str, tmp_path: Path) -> None:
    head = site(tmp_path, "policy deny").replace('require("socket.core").gettime', "os.clock")
    program = head + "submit(5) print((submit()), #logged, logged[1])"
    (line,) = run(lua, program, {"LUA_PATH": "/nowhere/?", "LUA_CPATH": "/nowhere/?"})
    assert line.startswith(
        "2050\t1\tsteward_gate: the gate cannot be queried: LuaSocket is missing"
    )


def test_policies_are_read_from_a_file_of_a_newer_format_which_is_logged_once(
    tmp_path: Path,
) -> None:
    head = site(tmp_path, f"format {FORMAT}", "policy deny")
    newer = FORMAT + 1
    program = f"""
    local function rewrite(text)
        local file = assert(io.open(steward_gate_conf, "w"))
        file:write(text)
        file:close()
    end
    print((submit()))
    for _, text in ipairs({{"format {newer}\\n", "format {newer}\\npolicy lenient\\n",
            "format {newer}\\npolicy allow\\n", "format {FORMAT}\\npolicy allow\\n",
            "policy deny\\nformat {newer}\\n"}}) do
        rewrite(text)
        print((submit(3)))
    end
    print(#logged, logged[2])
    """
    *codes, logged = run(SOCKETS[0], head + program)
    assert codes == ["2050", "2050", "2050", "0", "0", "2050"]
    # slurmctld starts with the newer file.
    head = site(tmp_path, f"format {newer}", "policy deny")
    assert run(SOCKETS[0], head + "print((submit()))") == ["2050"]
    assert logged.startswith("3\tsteward_gate: a newer Steward wrote gate.conf: only its policies")


def test_nothing_that_a_job_is_raises_anything(lua: str, tmp_path: Path) -> None:
    head = site(tmp_path).replace('require("socket.core").gettime', "os.clock")
    program = """
    local odd = setmetatable({}, {__index = function() error({"no text"}) end})
    for _, one in ipairs({odd, 5, "text", print, {account = {}, time_limit = "x"}}) do
        assert(steward.submit(one, odd, 1) == 0)
        assert(steward.modify(one, odd, one, 1) == 0)
    end
    assert(steward.submit(nil, nil, nil) == 0)
    assert(steward.modify(nil, nil, nil, nil) == 0)
    print("fine")
    """
    assert run(lua, head + program) == ["fine"]
