"""Variable_List does not escape commas: the parser splits it where possible and leaks no secret."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steward.core.config import RedactSettings
from steward.core.redaction import REDACTED, Redactor
from steward.extensions.torque.files import is_too_large, read_variables
from steward.slurm.environment import Environment, split_entries

REDACTOR = Redactor(RedactSettings())


def read(variables: str) -> Environment:
    return read_variables(variables, REDACTOR)


def pairs(variables: str) -> dict[str, str]:
    found = split_entries(read(variables).data)
    return {name.decode(): (value or b"").decode() for name, value in found}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", {}),
        ("A=1", {"A": "1"}),
        ("A=1,B=x y", {"A": "1", "B": "x y"}),
        ("MULTI=one\ntwo\n\nfour,EQ=a=b=c", {"MULTI": "one\ntwo\n\nfour", "EQ": "a=b=c"}),
        ("COMMA=a,b,c,EMPTY=,BS=back\\slash", {"COMMA": "a,b,c", "EMPTY": "", "BS": "back\\slash"}),
        ("A=,,B=1,", {"A": ",", "B": "1,"}),
        ("UTF=Zürich 東京,A=1", {"UTF": "Zürich 東京", "A": "1"}),
        (
            "BASH_FUNC_ml%%=() {  a; \n},A=1",
            {"BASH_FUNC_ml%%": "() {  a; \n}", "A": "1"},
        ),
    ],
)
def test_it_is_cut_at_commas_before_a_name(variables: str, expected: dict[str, str]) -> None:
    assert pairs(variables) == expected


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ("A=1,B=2", ()),
        ("A=x,y,B=2", ("environment-ambiguous",)),
        ("A=1,A=2", ("environment-ambiguous",)),
        ("rubbish,A=1", ("environment-ambiguous", "environment-cut")),
        ("LATIN1=caf\u9b01FTER=2", ("environment-ambiguous",)),
        ("MY_TOKEN=1,HOME=/root", ()),
        ("MY_TOKEN=1,OTHER=/root", ("environment-cut",)),
        ("A=x,B:C=2", ("environment-ambiguous",)),
    ],
)
def test_what_cannot_be_known_is_flagged(variables: str, flags: tuple[str, ...]) -> None:
    assert read(variables).flags == flags


def test_it_has_the_form_of_slurms() -> None:
    assert read("A=1,B=2").data == struct.pack("=I", 2) + b"A=1\0B=2\0"


@pytest.mark.parametrize(
    "variables",
    [
        "MY_TOKEN=hunter2,HOME=/root,A=1",
        "MY_TOKEN=hun,ter2,HOME=/root,A=1",
        "MY_TOKEN=a,TER=hunter2,HOME=/root,A=1",
        "X=1,my.token=hunter2,HOME=/root,A=1",
        "X=1,-opt=2,MY-TOKEN=hunter2,HOME=/root,A=1",
        "X=caf\u9b01PI_TOKEN=hunter2,HOME=/root,A=1",
        "X=caf\u9b10OKEN=hunter2,HOME=/root,A=1",
        "DB=postgres://me:hunt,er2=hunter2@host/,HOME=/root,A=1",
        "OPTS=--password=,B=hunter2,HOME=/root,A=1",
        "NOTE=password: a,B=hunter2,HOME=/root,A=1",
        "MY_TOKEN=,q=hunter2,HOME=/root,A=1",
        "K=-----BEGIN PRIVATE KEY-----\nhunter2,q=hunter2\n",
        "X=a,9API_TOKEN=hunter2,HOME=/root,A=1",
        "X=a,API_TOKEN:prod=hunter2,b=hunter2,HOME=/root,A=1",
        "X=a,API_TOKEN@prod=hunter2,HOME=/root,A=1",
        "X=a,MY_PASSWORD/db=hunter2,HOME=/root,A=1",
        "X=a,API_TOKEN[0]=hunter2,HOME=/root,A=1",
        "X=a,API_TOKEN~=hunter2,HOME=/root,A=1",
        "X=a,API TOKEN=hunter2,HOME=/root,A=1",
        f"X=a,{'A' * 250}_TOKEN=hunter2,HOME=/root,A=1",
    ],
)
def test_a_secret_goes_however_it_was_cut_or_glued(variables: str) -> None:
    data = read(variables).data
    assert b"hunter2" not in data
    assert b"HOME=/root\0A=1\0" in data or "PRIVATE" in variables


def test_the_names_of_what_was_redacted_are_told() -> None:
    environment = read("A=1,MY_TOKEN=a,b=c,HOME=/root,OTHER_KEY=z")
    assert environment.redacted == ("MY_TOKEN", "OTHER_KEY")
    assert environment.data[4:] == (
        b"A=1\0MY_TOKEN=" + REDACTED + b"\0HOME=/root\0OTHER_KEY=" + REDACTED + b"\0"
    )


# Marked letters, so that a piece of any length of a secret can be told from all else.
LETTERS = st.sampled_from(["q", "Q", "7", ",", "=", "\n", ",q=", ",Q_7=", "-", ".", " ", "é", "\t"])
SECRETS = st.lists(LETTERS, min_size=1, max_size=12).map("".join)
SAFE = st.lists(st.sampled_from(["a", "b", ",", "=", "\n", ",c=", " ", "ü", "/"]), max_size=8)
SECRET_NAMES = st.sampled_from(["MY_TOKEN", "A_SECRET", "PGPASSWORD", "AWS_X", "API_KEY", "x_pw"])
NAMES = st.sampled_from(["HOME", "A", "B_B", "c", "PBS_O_HOST", "_", "D.D"])


@example([("A", "x")], "MY_TOKEN", ",q=7", [("HOME", "/")])
@given(
    st.lists(st.tuples(NAMES, SAFE.map("".join)), max_size=4),
    SECRET_NAMES,
    SECRETS,
    st.lists(st.tuples(NAMES, SAFE.map("".join)), max_size=4),
)
def test_no_byte_of_a_secret_survives(
    before: list[tuple[str, str]], name: str, secret: str, after: list[tuple[str, str]]
) -> None:
    variables = ",".join(f"{name}={value}" for name, value in [*before, (name, secret), *after])
    environment = read(variables)
    without = environment.data.replace(REDACTED, b"").replace(name.encode(), b"")
    for letter in "qQ7é":
        assert letter.encode() not in without[4:]
    assert b"\t" not in without[4:]


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    data = read(text).data
    (count,) = struct.unpack_from("=I", data)
    assert data[4:].count(b"\0") == count


def test_what_no_program_can_have_is_too_large() -> None:
    assert not is_too_large(",A=b" * 90_000)
    assert is_too_large(",A=b" * 110_000)
    assert is_too_large("é" * (5 << 20))
