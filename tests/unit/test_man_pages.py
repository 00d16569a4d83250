"""Man pages: complete, and readable by man."""

import shutil
import subprocess
from pathlib import Path

import pytest

from packages import man, roff
from packages.shapes import below, whole


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return man.pages("1.2.3", 1_700_000_000)


def test_every_command_and_option_has_its_place(pages: dict[str, str]) -> None:
    for shape in below(whole()):
        text = pages[f"{'-'.join(shape.path[:2])}.1"]
        assert roff.escaped(" ".join(shape.path)) in text
        for option in shape.options:
            assert all(roff.bold(name) in text for name in option.names), option.names


def test_settings_and_rules_have_pages_of_section_5(pages: dict[str, str]) -> None:
    assert r"\fBstate_dir\fR" in pages["steward.toml.5"]
    assert "tags:" not in pages["steward.toml.5"]
    assert '.SH "[cluster.NAME]"' in pages["steward.toml.5"]
    assert "most_nodes_percent" in pages["steward-rules.5"]


def test_pages_say_their_version_and_date(pages: dict[str, str]) -> None:
    for text in pages.values():
        assert text.startswith(".TH ")
        assert '"2023-11-14" "Steward 1.2.3"' in text.partition("\n")[0]


def test_what_is_shown_is_no_request() -> None:
    assert roff.line(roff.escaped(".PP is a word")) == r"\&.PP is a word"
    assert roff.of_markdown("```\n.TH\n\n'x\n```\n")[3:6] == [r"\&.TH", r"\&", r"\&'x"]
    assert roff.escaped(r"a\b-c") == r"a\eb\-c"
    assert roff.escaped("é") == r"\[u00E9]"


def test_a_table_becomes_items() -> None:
    text = "| key | default | meaning |\n|---|---|---|\n| `a` | `1` | What it is. |\n"
    assert roff.of_markdown(text) == [".TP", r"\fBa\fR", r"What it is. Default: \fB1\fR."]


def test_man_finds_nothing_wrong(pages: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not here")
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["mandoc", "-Tlint", "-W", "warning", *sorted(pages)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0
