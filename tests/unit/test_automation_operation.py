"""Parameters of operations: declaration and parsing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.jobs import open_jobs, record
from harness.site import ROOT, Site
from harness.slurm import Stage
from steward.automation.errors import InvalidParameters, OperationForbidden, UnknownOperation
from steward.automation.operation import (
    Operation,
    ParameterDescription,
    Parameters,
    describe_parameters,
    find_operation,
    load_operations,
    parse_operation_parameters,
)
from steward.automation.operation import dump_parameters as plain
from steward.automation.operations import jobs
from steward.automation.runner import OperationRunner
from steward.cli.options import parse_pairs
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.actions import DECLARED, described
from steward.core.config import AccessSettings
from steward.core.errors import StewardError, UsageError
from steward.core.records import JobRecord
from steward.daemon.action_index import ACTION_INDEX
from steward.slurm import SlurmError, UnknownJob
from steward.slurm.settings import ClusterSettings


class Props(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nested parameters."""

    users: Annotated[tuple[str, ...], described("Who.")] = ("root",)


class Every(Parameters, frozen=True, kw_only=True):
    """Parameters of every type."""

    text: Annotated[str, described("A text.")]
    number: Annotated[int, described("A number.")] = 3
    share: Annotated[float, described("A share.")] = 0.5
    is_so: Annotated[bool, described("Whether.")] = False
    ids: Annotated[tuple[int | str, ...], described("Ids.")] = ()
    words: Annotated[tuple[str, ...], described("Words.")] = ()
    infos: Annotated[dict[str, Any], described("Infos.")] = msgspec.field(default_factory=dict)
    props: Annotated[Props, described("Props.")] = Props()
    maybe: Annotated[int | None, described("May be none.")] = None


EVERY = Operation(
    name="automation.test.every", help="x", request=Every, answer=Every, run=lambda *_: None
)


def values(**given: Any) -> dict[str, Any]:
    return plain(parse_operation_parameters(EVERY, {"text": "t", **given}))


def test_each_kind_is_described() -> None:
    told = {one.name: one for one in describe_parameters(EVERY)}
    assert told["text"] == ParameterDescription(
        name="text", type="string", description="A text.", required=True
    )
    types = {name: one.type for name, one in told.items()}
    assert types == {
        "text": "string", "number": "integer", "share": "number", "is_so": "boolean",
        "ids": "array", "words": "array", "infos": "object", "props": "object",
        "maybe": "integer",
    }  # fmt: skip
    assert (told["number"].default, told["is_so"].default) == (3, False)
    assert told["ids"].items == ("integer", "string")
    assert told["props"].default == {"users": ["root"]}
    assert [one.name for one in told["props"].within] == ["users"]
    assert (told["maybe"].required, told["maybe"].default) == (False, None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number", "12", 12),
        ("number", " -5 ", -5),
        ("share", "0.25", 0.25),
        ("is_so", "true", True),
        ("is_so", "No", False),
        ("ids", "12,13_7, 14+1", [12, "13_7", "14+1"]),
        ("ids", "007", ["007"]),
        ("ids", [12, "13"], [12, 13]),
        ("words", "a,b c", ["a", "b c"]),
        ("words", '["a,b", "c"]', ["a,b", "c"]),
        ("words", "12,x", ["12", "x"]),
        ("words", [12], ["12"]),
        ("infos", '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("props", '{"users": ["ada"]}', {"users": ["ada"]}),
        ("maybe", "4", 4),
        ("text", "[not, json", "[not, json"),
        ("text", "a=b=c", "a=b=c"),
        ("text", 123, "123"),
    ],
)
def test_texts_are_read_as_what_they_should_be(name: str, text: Any, value: Any) -> None:
    assert values(**{name: text})[name] == value


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({}, "test.every: missing text=…"),
        ({"text": ""}, "missing text"),
        ({"text": " \t"}, "missing text"),
        ({"text": None}, "missing text"),
        ({"text": "t", "txt": "u"}, "did you mean text?"),
        ({"text": "t", "qqq": "u"}, "the parameters are text, number"),
        ({"text": "t", "number": "many"}, "number"),
        ({"text": "t", "is_so": "perhaps"}, "true or false"),
        ({"text": "t", "infos": "{"}, "infos is not valid JSON"),
        ({"text": "t", "infos": "[1]"}, "infos is not of type object"),
        ({"text": "t", "words": '["a"'}, "words is not valid JSON"),
        ({"text": "t", "props": '{"who": 1}'}, "who"),
        ({"text": 5.5}, "text"),
        ({"text": True}, "text"),
        ({"text": ["a"]}, "text"),
    ],
)
def test_what_cannot_be_read_is_told_by_its_name(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameters) as caught:
        parse_operation_parameters(EVERY, given_)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_operation_is_described_whole() -> None:
    for one in load_operations().values():
        assert one.help.endswith("."), one.ref
        assert one.result_help.endswith("."), one.ref
        for parameter in describe_parameters(one):
            assert parameter.description.endswith((".", "}.", "}")), (one.ref, parameter.name)
            for inner in parameter.within:
                assert inner.description, (one.ref, inner.name)


def test_names_parameters_and_defaults_are_those_of_the_pack() -> None:
    pack = {
        "slurm.config.get": {"item": ""},
        "slurm.job.find": {"criterias": ...},
        "slurm.job.get": {"jobids": ...},
        "slurm.job.step.get": {"jobids": ...},
        "slurm.node.get": {"nodes": ...},
        "slurm.node.down": {"nodes": ..., "reason": ...},
        "slurm.node.drain": {"nodes": ..., "reason": ...},
        "slurm.node.resume": {"nodes": ...},
        "slurm.node.update": {"nodes": ..., "infos": ...},
        "slurm.node.reserve": {
            "nodes": ...,
            "reservation_name": "steward",
            "props": {
                "start_time": None,
                "duration": "infinite",
                "users": ["root"],
                "flags": ["MAINT", "IGNORE_JOBS", "OVERLAP"],
            },
        },
        "slurm.node.unreserve": {"nodes": ..., "reservation_name": "steward"},
        "slurm.trigger.set": {
            "program": ..., "jobid": None, "offset": 0, "fini": False, "nodes": "", "event": "",
        },
        "slurm.trigger.unset": {"trigger_ids": ..., "user": "slurm"},
    }  # fmt: skip
    told = {
        one.ref: {p.name: ... if p.required else p.default for p in describe_parameters(one)}
        for one in load_operations().values()
        if one.pack
    }
    assert told == pack


def test_what_may_not_be_had_from_elsewhere() -> None:
    local = {one.ref for one in load_operations().values() if not one.remote}
    assert local == {"local.command", "slurm.trigger.set"}


def test_only_automation_run_reaches_them() -> None:
    """Operations have unique names in the registry of all actions, and no client can call them."""
    for one in load_operations().values():
        assert DECLARED[one.name] is one
        assert (one.name, one.scope) == (f"automation.{one.ref}", "actions")
        assert one.name not in ACTION_INDEX


def test_a_name_that_is_none_is_told_a_near_one() -> None:
    with pytest.raises(UnknownOperation, match=r"did you mean slurm\.node\.drain\?"):
        find_operation("slurm.node.drian")
    with pytest.raises(UnknownOperation, match="action list"):
        find_operation("x")


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)


@given(st.dictionaries(names, st.text(), max_size=6))
def test_words_are_read_as_they_were_typed(parameters: dict[str, str]) -> None:
    assert parse_pairs(f"{name}={value}" for name, value in parameters.items()) == parameters


@given(st.lists(st.text(), max_size=4))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        found = parse_pairs(words)
    except UsageError:
        return
    assert [f"{name}={value}" for name, value in found.items()] == words


@given(st.dictionaries(names, st.text() | st.lists(st.text()), max_size=4))
def test_hostile_parameters_are_read_or_refused(parameters: dict[str, Any]) -> None:
    for one in load_operations().values():
        try:
            found = plain(parse_operation_parameters(one, parameters))
        except InvalidParameters:
            continue
        assert set(parameters) <= set(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_an_object_comes_as_it_was_written(infos: dict[str, Any]) -> None:
    assert values(infos=json.dumps(infos))["infos"] == infos


@given(st.lists(st.text().map(str.strip).filter(lambda t: t and "," not in t), min_size=1))
def test_a_list_comes_as_it_was_written(words: list[str]) -> None:
    if words[0].startswith("["):
        return  # read as JSON
    assert values(words=",".join(words))["words"] == words


@pytest.mark.parametrize(("words", "error"), [((), OperationForbidden), (("jobs",), UnknownJob)])
def test_a_change_does_not_show_that_a_job_exists_which_its_user_may_not_see(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: type[StewardError]
) -> None:
    roles = ClusterRoles(private_data=frozenset(words))

    def require_role(_role: str, owner_uid: int) -> None:
        raise OperationForbidden(f"it is uid {owner_uid}'s")

    context: Any = SimpleNamespace(
        access=Access(AccessSettings(), 0, lambda _: roles),
        caller=Caller(uid=2, user="bela"),
        cluster="c1",
        require_role=require_role,
    )
    others = [JobRecord(job_id=7, state="PENDING", uid=1, account="physics")]
    monkeypatch.setattr(jobs, "query_records", lambda *_: others)
    with pytest.raises(error):
        jobs.look_up_jobs(context, ["7"])


def test_slurm_is_not_asked_about_jobs_that_polls_showed_to_be_others(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    stage = Stage(tmp_path / "bin")
    site = Site(tmp_path, clusters={"c1": ClusterSettings(slurm_bin=str(stage.root))})
    site.standing = ClusterRoles(private_data=frozenset({"jobs"}))
    site.open(open_jobs)
    site.feed(record(7, 0, uid=1, account="physics"), record(8, 0, uid=2, account="physics"))
    runner = OperationRunner(site.settings, site.access, site.registry)
    bela = Caller(uid=2, user="bela")

    def ask(ref: str, *ids: int, asker: Caller = bela) -> Any:
        return runner.run(ref, {"jobids": ids}, asker).result

    assert ask("slurm.job.get", 7) == {"7": []}
    assert ask("slurm.job.step.get", 7) == {"7": {}}
    assert stage.asked() == []
    for ids in ((8,), (9,)):  # 9 may have been submitted since the last poll
        before = len(stage.asked())
        with pytest.raises(SlurmError):  # the stage has no answer
            ask("slurm.job.get", *ids)
        assert len(stage.asked()) > before
    with pytest.raises(SlurmError):
        runner.run("slurm.job.find", {"criterias": {"name": "x"}}, bela)
    assert "--user=2" in stage.asked()[-1].split()
    for ref in ("slurm.job.get", "slurm.job.step.get"):
        with pytest.raises(InvalidParameters, match="100"):
            ask(ref, *range(1, 102))
    with pytest.raises(SlurmError):
        ask("slurm.job.get", *range(1, 102), asker=ROOT)
