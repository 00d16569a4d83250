"""Command line of sacct: every form of its options."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steward.accounting.errors import AccountingUsage
from steward.accounting.sacct.fields import (
    BRIEF,
    COMPLETION,
    DEFAULT,
    LONG,
    SLURM_FIELDS,
    parse_format,
)
from steward.accounting.sacct.options import (
    HELP,
    SacctOptions,
    list_completions,
    list_fields,
    list_reasons,
    list_states,
    parse_sacct_options,
)
from steward.core.errors import UsageError


def read(line: str, environment: dict[str, str] | None = None, zone: str = "") -> SacctOptions:
    return parse_sacct_options(line.split(), environment or {}, zone)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("-Xnp", {"allocations": True, "style": "parsable"}),
        ("-aX -P --delimiter=^|^", {"all_users": True, "style": "parsable2", "delimiter": "^|^"}),
        ("-j 1,2_3,4.batch -j 5_[1,3-4]", {"jobs": ("1", "2_3", "4.batch", "5_[1,3-4]")}),
        ("-S now-1day -E 11/20", {"starttime": "now-1day", "endtime": "11/20"}),
        ("--starttime=2026-11-20T10:00", {"starttime": "2026-11-20T10:00"}),
        ("-s CD,f --state TIMEOUT", {"states": ("CD", "f", "TIMEOUT")}),
        ("-u ada,1001 --uid bob", {"users": ("ada", "1001", "bob")}),
        ("-u -1", {"all_users": True}),
        ("-A phys -q high -r gpu -W key -g 100 --name a,b", {"accounts": ("phys",)}),
        ("-M alpha -L", {"clusters": ("alpha",), "all_clusters": True}),
        ("--federation --local", {"all_clusters": False}),
        ("-N n[1-3],m2", {"nodelist": "n[1-3],m2"}),
        ("-i 1-4 -I 2", {"nnodes": "1-4", "ncpus": "2"}),
        ("-k 10 -K 1-0", {"timelimit_min": "10", "timelimit_max": "1-0"}),
        ("--units g --noconvert", {"units": "G", "noconvert": True}),
        ("--whole-hetjob", {"whole_hetjob": "yes"}),
        ("--whole-hetjob=no", {"whole_hetjob": "no"}),
        ("-D -T --use-local-uid", {"duplicates": True, "truncate": True, "use_local_uid": True}),
        ("-t", {"allocations": True}),
        ("--json", {"form": "json"}),
        ("--json=v0.0.40", {"form": "json"}),
        ("--yaml", {"form": "json"}),
        ("--parquet out.parquet", {"form": "lines"}),
        ("-f log.jsonl", {"all_users": True}),
        ("-C gpu,ib -R Licenses -F SchedMain", {"constraints": ("gpu", "ib")}),
    ],
)
def test_options_as_they_are_typed(line: str, fields: dict[str, Any]) -> None:
    request = read(line).request
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        ("", {}, DEFAULT),
        ("-b", {}, BRIEF),
        ("-l", {}, LONG),
        ("-c", {}, COMPLETION),
        ("-o jobid%20,state -o elapsed", {}, "jobid%20,state,elapsed"),
        ("-o jobid -b", {}, f"jobid,{BRIEF}"),
        ("", {"SACCT_FORMAT": "user,state"}, "user,state"),
        ("-b", {"SACCT_FORMAT": "user,state"}, BRIEF),
        ("--fields=user", {}, "user"),
    ],
)
def test_what_is_printed(line: str, environment: dict[str, str], expected: str) -> None:
    assert read(line, environment).request.format == expected


def test_the_environment_is_heeded() -> None:
    environment = {"SACCT_FEDERATION": "1", "SLURM_TIME_FORMAT": "%s"}
    request = read("", environment, "Europe/Paris").request
    assert (request.all_clusters, request.time_format, request.zone) == (True, "%s", "Europe/Paris")
    assert not read("", {**environment, "SACCT_LOCAL": "1"}).request.all_clusters


@pytest.mark.parametrize(
    "line",
    [
        "--nonsense",
        "-j",
        "-j ,",
        "1234",
        "--units Q",
        "--whole-hetjob=maybe",
        "-x 3",
        "-B",
        "--env-vars",
        "--starttime=",
        "--delimiter=" + "x" * 65,
    ],
)
def test_wrong_use_is_said_in_one_line(line: str) -> None:
    with pytest.raises(UsageError) as error:
        read(line)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


@given(st.lists(st.text(max_size=12), max_size=6))
@settings(deadline=None)
def test_nothing_typed_gives_a_traceback(words: list[str]) -> None:
    with contextlib.suppress(UsageError):
        parse_sacct_options(words, {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("jobid,state", ["JobID", "State"]),
        ("JobIDR,maxrss,tresusageinmaxn", ["JobIDRaw", "MaxRSS", "TRESUsageInMaxNode"]),
        ("job", ["JobID"]),
        ("alloc", ["AllocCPUS"]),
        (" user , ,state", ["User", "State"]),
        ("all", [field.name for field in SLURM_FIELDS]),
        ("reserved,peakmem", ["Reserved", "PeakMem"]),
    ],
)
def test_fields_are_found_by_their_beginning(text: str, names: list[str]) -> None:
    assert [field.name for field in parse_format(text)] == names


def test_a_width_counts_wherever_its_field_stands() -> None:
    assert [field.width for field in parse_format("jobid,jobid%-30,state%5")] == [-30, -30, 5]


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("--user=", "-u/--uid/--user"),
        ("--state=", "-s/--state"),
        ("--name=", "--name"),
        ("--starttime=", "-S/--starttime"),
        ("--delimiter=", "--delimiter"),
    ],
)
def test_an_option_without_its_value_is_named_in_each_form(argument: str, options: str) -> None:
    with pytest.raises(AccountingUsage, match=f"^{options} has no value: give one"):
        parse_sacct_options([argument], {})


@pytest.mark.parametrize("text", ["nope", "jobid%x", "jobid%99999999", "", ",", "jobid%--3"])
def test_a_format_that_is_none(text: str) -> None:
    with pytest.raises(AccountingUsage):
        parse_format(text)


def test_every_field_and_every_option_is_told_of() -> None:
    listed = list_fields().split()
    assert listed[:2] == ["Account", "AdminComment"]
    assert {field.name for field in SLURM_FIELDS} < set(listed)
    for letter in "aAbBcCDeEfFgiIjkKlLMnNopPqrRsSTuvVWX":
        assert f"-{letter}," in HELP, letter


def test_states_reasons_and_completions_are_told() -> None:
    assert read("--helpstate").tell == "states"
    assert read("--helpreason").tell == "reasons"
    asked = read("--autocomplete=he")
    assert (asked.tell, list_completions(asked.prefix)) == (
        "completions",
        "--help\n--help-fields\n--helpformat\n--helpreason\n--helpstate\n",
    )
    assert {"EXPEDITING", "PENDING", "REQUEUE_HOLD"} <= set(list_states().split())
    assert {"Priority", "Dependency", "JobHeldUser"} <= set(list_reasons().split())


def test_options_of_newer_versions_are_taken() -> None:
    assert not read("-X").request.expand_patterns
    assert read("--array --expand-patterns -X").request.expand_patterns


def test_what_is_told_instead() -> None:
    told = [read(word).tell for word in ("-e", "--helpformat", "-V", "--version", "-h", "--usage")]
    assert told == ["fields", "fields", "version", "version", "help", "usage"]
