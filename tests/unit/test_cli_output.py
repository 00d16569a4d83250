"""Tables on terminals, in pipes and for programs."""

import io
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.cli import options, output
from steward.cli.errors import run_command
from steward.cli.output import Style, print_facts, print_json, print_table
from steward.core.errors import UsageError
from steward.core.layouts import Column
from steward.core.rpc import RpcUnavailable

COLUMNS = [
    Column("Name", lambda row, _: row[0]),
    Column("Size", lambda row, _: f"{row[1]}K", right=True, exact=lambda row, _: row[1] * 1024),
    Column("More", lambda row, _: row[2], show="requested"),
]
ROWS = [("first", 1, "x"), ("second one", 23, "y|z")]


def printed(
    capsys: pytest.CaptureFixture[str], style: Style, rows: list[tuple[str, int, str]] = ROWS
) -> str:
    print_table(COLUMNS, rows, style)
    return capsys.readouterr().out


def test_a_pipe_gets_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Style()) == "Name        Size\nfirst         1K\nsecond one   23K\n"


def test_without_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Style(has_header=False)) == "first        1K\nsecond one  23K\n"


def test_programs_get_all_columns_and_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Style(parsable=True)) == (
        "Name|Size|More\nfirst|1024|x\nsecond one|23552|y\\x7cz\n"
    )


def test_columns_can_be_chosen_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    style = Style(parsable=True, columns=("more", "NAME"))
    assert printed(capsys, style).splitlines()[1] == "x|first"


def test_an_unknown_column_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="'sise': the columns are Name, Size, More"):
        printed(capsys, Style(columns=("sise",)))


names = st.text(st.characters(), max_size=30) | st.sampled_from(["a\nb|c", "\x1b]0;x\x07", "|"])


@given(st.lists(st.tuples(names, st.integers(0, 99), names), max_size=5))
def test_no_name_forges_a_row_or_a_field(rows: list[tuple[str, int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout", Writer(written))
        print_table(COLUMNS, rows, Style(parsable=True))
    lines = "".join(written).split("\n")
    assert len(lines) == len(rows) + 2
    assert all(line.isprintable() and line.count("|") == 2 for line in lines[:-1])


class Writer:
    """Standard output that is no terminal."""

    encoding = "utf-8"

    def __init__(self, written: list[str]) -> None:
        self._written = written

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "é漢"), ("latin-1", r"é\u6f22"), ("ascii", r"\xe9\u6f22")]
)
def test_letters_that_an_encoding_lacks_are_escapes_and_columns_stay_straight(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    data = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(data, encoding, write_through=True))
    print_table(COLUMNS, [("é漢", 1, ""), ("x", 2, "")], Style(has_header=False))
    print_facts([("Name", "é漢")])
    width = len(shown)
    assert data.getvalue().decode(encoding) == f"{shown}  1K\n{'x':{width}}  2K\nName  {shown}\n"


def test_json_carries_everything_as_it_is(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    print_json({"name": "a\nb\x1b|é"})
    out = capsysbinary.readouterr().out
    assert msgspec.json.decode(out) == {"name": "a\nb\x1b|é"}
    assert out.count(b"\n") == 1


def test_facts_leave_out_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("Job", "7"), ("Account", ""), ("Name", "a\x1b[0m")])
    assert capsys.readouterr().out == " Job  7\nName  a\\x1b[0m\n"


def test_notes_are_for_people_alone(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_note("hello")
    output.print_warning("trouble\x1b")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "steward: trouble\\x1b\n"


def test_lists_are_split_at_commas() -> None:
    assert options.split_lists(["a,b", "c", ""]) == ("a", "b", "c")
    assert options.split_lists(None) == ()


def test_json_and_columns_contradict_each_other() -> None:
    with pytest.raises(UsageError):
        options.make_style(as_json=True, parsable=True)
    with pytest.raises(UsageError):
        options.make_style(as_json=True, columns="name")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_json_of_many_rows_is_one_document(
    is_terminal: bool,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: is_terminal)
    monkeypatch.setattr(output, "BLOCK_ROWS", 2)
    rows = [{"name": "a\nb", "values": [number, {}]} for number in range(count)]
    output.print_json_rows("rows", iter(rows), lambda: {"version": 1, "next": ""})
    printed = capfdbinary.readouterr().out
    document = {"rows": rows, "version": 1, "next": ""}
    assert msgspec.json.decode(printed) == document
    if is_terminal and rows:
        encoded = msgspec.json.encode(document)
        assert printed == msgspec.json.format(encoded, indent=2) + b"\n"
    elif rows:
        assert printed == msgspec.json.encode(document) + b"\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_json_of_rows_that_end_early_is_no_document(
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: is_terminal)
    monkeypatch.setattr(output, "BLOCK_ROWS", 2)

    def read_rows() -> Iterator[int]:
        yield from range(5)
        raise RpcUnavailable("cannot reach a daemon at /run/steward.sock", "/run/steward.sock")

    def print_rows() -> int:
        output.print_json_rows("rows", read_rows(), lambda: {"version": 1})
        return 0

    assert run_command(print_rows, debug=False) == 1
    printed, complaint = capfdbinary.readouterr()
    assert printed.endswith(b"3\n")
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(printed)
    assert complaint == (
        b"steward: the JSON ends early, after 4 rows: cannot reach a daemon at /run/steward.sock\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_long_table_is_printed_in_blocks(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: is_terminal)
    monkeypatch.setattr(output, "BLOCK_ROWS", 2)
    monkeypatch.setenv("PAGER", "cat")
    columns = (Column("Name", "name"), Column("Size", "size", "count"))
    read: list[int] = []

    def rows() -> Iterator[SimpleNamespace]:
        for number in (1, 10, 100, 1000, 10000):
            read.append(number)
            yield SimpleNamespace(name=f"n{number}", size=number)

    print_table(columns, rows(), Style())
    lines = capsys.readouterr().out.splitlines()
    headers = [line for line in lines if line.split() == ["Name", "Size"]]
    assert len(headers) == (3 if is_terminal else 1)
    assert [line.split() for line in lines if line not in headers] == [
        [f"n{number}", str(number)] for number in read
    ]
    if not is_terminal:
        # The first block decides on the widths; a wider cell moves the rest of its line.
        assert lines == [
            *("Name  Size", "n1       1", "n10     10", "n100   100", "n1000  1000"),
            "n10000  10000",
        ]
