"""native/jobcomp.lua under a real Lua: no value of a record breaks out of its line."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import steward

SCRIPT = Path(steward.__file__).parent / "native" / "jobcomp.lua"
LUAS = [name for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4") if shutil.which(name)]

pytestmark = pytest.mark.skipif(not LUAS, reason="no Lua is installed: make setup")


@pytest.fixture(params=LUAS or ["none"])
def lua(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(lua: str, file: Path, program: str) -> str:
    """Run a program that has ``steward`` and writes to ``file``; return its output."""
    head = f'steward_jobcomp_file = "{file}"\nlocal steward = dofile("{SCRIPT}")\n'
    done = subprocess.run(
        [lua, "-"], input=(head + program).encode(), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode()


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines parsed as JSON, which is UTF-8."""
    return [json.loads(line) for line in file.read_bytes().decode().splitlines() if line]


def test_a_record_and_what_slurm_calls_its_fields(lua: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    run(
        lua,
        file,
        """
        local rc = slurm_jobcomp_log_record({job_id=7, user_id=1000, job_state=3, name="a\\"b\\n",
            priority=4294901759, exit_code=256, reboot=false, argv={"x"},
            comment="hush", extra="hush",
            time_limit=4294967295, spank_job_env={"SECRET=1"}, script="#!/bin/sh"})
        assert(rc == 0)
        """,
    )
    (line,) = lines(file)
    assert line.pop("t") > 1_700_000_000
    assert line == {
        "v": 1,
        "k": "job",
        "job_id": 7,
        "user_id": 1000,
        "job_state": 3,
        "reboot": 0,
        "name": 'a"b\n',
        "priority": 4294901759,
        "exit_code": 256,
        "time_limit": 4294967295,
    }


def test_bytes_are_written_as_squeues_are(lua: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    # A sound é, a lone lead, an overlong slash, a surrogate, beyond Unicode, a cut-off sign.
    raw = b"\xc3\xa9 \xc3 \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xf0\x9f\x98\x80 \x01\x7f \xe2\x82"
    text = "".join(f"\\{byte:03d}" for byte in raw)
    run(lua, file, f'steward.log_record({{job_id=1, name="{text}"}})')
    (line,) = lines(file)
    assert line["name"] == raw.decode("utf-8", "backslashreplace")


def test_long_fields_are_cut_and_named(lua: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    run(
        lua,
        file,
        """
        local long = {job_id=1}
        for _, field in ipairs({"nodes", "name", "comment", "admin_comment", "work_dir", "account",
                                "tres_req_str", "tres_alloc_str", "tres_fmt_req_str", "features",
                                "tres_fmt_alloc_str", "licenses", "extra"}) do
            long[field] = string.rep("\\1\\255x", 400000)
        end
        steward.log_record(long)
        """,
    )
    assert len(file.read_bytes()) <= 65536
    (line,) = lines(file)
    assert {"nodes", "name", "work_dir", "features"} <= set(line["cut"])
    assert line["name"].startswith("\x01\\xffx\x01")


def test_a_full_file_gives_way_to_a_new_one(lua: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    write = """
        steward.most = 2000
        for number = 1, 100 do assert(steward.log_record({job_id=number})) end
        """
    run(lua, file, write)
    former = tmp_path / "lines.1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "lines.1"]
    assert 2000 <= former.stat().st_size < 2100
    # No line is in both, and none is missing between them.
    ids = [line["job_id"] for line in lines(former) + lines(file)]
    assert ids == list(range(ids[0], 101))
    # A file that cannot be renamed does not grow; lost lines are reported once there is space.
    former.unlink()
    former.mkdir()
    (former / "kept").touch()
    held = """
        steward.most = 100
        assert(not steward.log_record({job_id=101}))
        steward.most = 4000
        assert(steward.log_record({job_id=102}))
        """
    run(lua, file, held)
    assert [(line["job_id"], line.get("lost")) for line in lines(file)[-2:]] == [
        (100, None),
        (102, 1),
    ]


HOSTILE = """
local seed, count, file = %d, %d, "%s"
math.randomseed(seed)
local fields = {"job_id", "user_id", "job_state", "name", "comment", "admin_comment", "nodes",
    "work_dir", "account", "submit_time", "end_time", "exit_code", "tres_fmt_alloc_str", "sluid",
    "qos", "features", "array_task_id", "het_job_offset", "std_out", "wckey", "cut", "t", "v", "k"}
local function some_bytes(most)
    local bytes = {}
    for at = 1, math.random(0, most) do bytes[at] = string.char(math.random(0, 255)) end
    return table.concat(bytes)
end
local pool = {}
for number = 1, 300 do
    local most = ({600, 40, 5})[math.random(3)]
    pool[number] = string.rep(some_bytes(most), most == 5 and math.random(0, 2000) or 1)
end
local makers = {
    function() return pool[math.random(#pool)] end,
    function() return pool[math.random(#pool)] .. string.char(math.random(0, 255)) end,
    function() return '"},{"job_id":1,"user_id":0}\\n{"v":1}' end,
    function() return math.random() * 2 ^ math.random(-80, 80) end,
    function() return -math.random(0, 2 ^ 30) end,
    function() return 0 / 0 end, function() return 1 / 0 end, function() return -1 / 0 end,
    function() return true end, function() return nil end,
    function() return {} end, function() return print end,
    function() return setmetatable({}, {__tostring = error, __len = error, __index = error}) end,
    function() return coroutine.create(function() end) end,
}
local lost = 0
for number = 1, count do
    local values = {}
    for _, field in ipairs(fields) do
        if math.random(4) > 1 then values[field] = makers[math.random(#makers)]() end
    end
    values.job_id = math.random(20) > 1 and number or values.job_id
    local record = setmetatable({}, {__index = function(_, field)
        if math.random(30) == 1 then error({"an error that is no text"}) end
        if number > count - 3 and field == "name" then
            local function deep() return 1 + deep() end
            return deep()
        end
        return values[field]
    end})
    local odd = math.random(60)
    if odd == 1 then record = nil elseif odd == 2 then record = number elseif odd == 3 then
        record = "text" end
    if odd == 4 then steward.file = file .. "/no/such/directory" end
    if odd == 5 then steward.file = "/dev/full" end
    if odd == 6 then steward.file = nil end
    local rc = slurm_jobcomp_log_record(record)
    assert(rc == 0)
    if odd >= 4 and odd <= 6 then
        assert(steward.lost > 0)
        lost = lost + 1
        steward.file = file
    end
end
steward.log_record({job_id = 4294967000, name = "last"})
print(lost)
"""


def test_ten_thousand_hostile_records(lua: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    seed = int.from_bytes(os.urandom(3), "big")
    count = 10_000
    lost = int(run(lua, file, HOSTILE % (seed, count, file)))
    raw = file.read_bytes()
    assert raw.endswith(b"\n")
    told = [line for line in raw.split(b"\n") if line]
    assert max(map(len, told)) < 65536, f"seed {seed}"
    found = [json.loads(line.decode()) for line in told]
    assert len(found) == count + 1 - lost, f"seed {seed}"
    assert sum(line.get("lost", 0) for line in found) == lost, f"seed {seed}"
    assert all((line["v"], line["k"]) == (1, "job") for line in found), f"seed {seed}"
    assert all(isinstance(line["t"], int) for line in found), f"seed {seed}"
    assert found[-1]["name"] == "last"


@pytest.mark.parametrize("left", [b'{"v":1,"k":"job","t":17', b'{"v":1}\n', b"\n", b"", None])
def test_a_line_that_an_earlier_slurmctld_tore_tears_no_other(
    lua: str, tmp_path: Path, left: bytes | None
) -> None:
    file = tmp_path / "lines"
    if left is not None:
        file.write_bytes(left)
    run(lua, file, "for id = 1, 2 do assert(steward.log_record({job_id = id})) end")
    whole = file.read_bytes().removeprefix(left or b"")
    # A line is ended once, and none is empty.
    assert whole.startswith(b"\n") == (b"17" in (left or b""))
    assert [json.loads(line)["job_id"] for line in whole.lstrip().split(b"\n") if line] == [1, 2]
    assert whole.count(b"\n") == 2 + whole.startswith(b"\n")


def test_a_sites_own_script_calls_it(lua: str, tmp_path: Path) -> None:
    file, own = tmp_path / "lines", tmp_path / "jobcomp.lua"
    own.write_text(
        f"""
        setmetatable(_G, {{__index = function(_, name) error("no global " .. name) end}})
        local told = {{}}
        function slurm_jobcomp_log_record(job) table.insert(told, job.job_id) return 0 end
        local theirs = slurm_jobcomp_log_record
        local steward = dofile("{SCRIPT}")
        assert(slurm_jobcomp_log_record == theirs)
        steward.file = "{file}"
        string.format, string.gsub, table.concat = nil, nil, nil
        assert(steward.log_record({{job_id = 5, name = "x"}}))
        assert(theirs({{job_id = 6}}) == 0 and told[1] == 6)
        """
    )
    subprocess.run([lua, str(own)], check=True, timeout=30)
    assert [line["job_id"] for line in lines(file)] == [5]
