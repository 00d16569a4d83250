"""Commands, options, settings, targets and links in README and docs exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import write_docs as docs
from site_hooks import read_navigation
from steward.cli.app import app
from steward.core.config.reader import load_settings
from steward.core.databases import DATABASES

ROOT = Path(__file__).parent.parent.parent
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [*docs.pages(), *RECORDS]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
BEFORE = re.compile(r"^(sudo )?(\.venv/bin/(?=steward ))?")
"""Prefixes of commands that are not in PATH, or that root runs."""
PLACEHOLDER = re.compile(r"…|(?<!\S)\[")
OTHERS = {
    *("--conf-server", "--delimiter", "--federation", "--gpus", "--gres", "--local", "--mem"),
    *("--overcommit", "--task-epilog", "--yaml", "--origin"),
}
"""Options of Slurm's commands and of munged that the pages mention."""


def texts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield page.name, page.read_text(encoding="utf-8")


def fenced(kind: str) -> Iterator[tuple[str, str]]:
    for name, text in texts():
        for indent, language, body in FENCE.findall(text):
            if language == kind:
                yield name, "".join(line.removeprefix(indent) for line in body.splitlines(True))


def spans() -> Iterator[tuple[str, str]]:
    """Yield the texts in backticks of running text, on one line."""
    for name, text in texts():
        for span in SPAN.findall(FENCE.sub("", text)):
            yield name, " ".join(span.split())


def typed_lines() -> Iterator[tuple[str, str]]:
    """Yield every command line of a page, to type or as typed."""
    for name, body in fenced("sh"):
        yield from ((name, line) for line in body.splitlines() if line)
    for name, body in [*fenced(""), *fenced("console")]:
        for line in body.splitlines():
            if line.startswith("$ "):
                yield name, line.removeprefix("$ ")
            elif line.startswith("steward ") and ":" not in line.split()[0]:
                yield name, line


def steward_commands() -> list[tuple[str, str]]:
    found = []
    for name, line in typed_lines():
        words = BEFORE.sub("", line)
        if words.startswith("steward ") and not words.startswith("steward: "):
            found.append((name, words))
    return found


def mentioned() -> list[tuple[str, str]]:
    """Return commands that running text names, which may lack arguments."""
    return [
        (name, BEFORE.sub("", span))
        for name, span in spans()
        if BEFORE.sub("", span).startswith("steward ") and not PLACEHOLDER.search(span)
    ]


def parse(line: str, *, whole: bool) -> list[str]:
    """Parse a command with the command line itself; return the names that lead to it.

    The test runs nothing. If a page only mentions a command, arguments may be missing.
    """
    words = shlex.split(line, comments=True)[1:]
    if "COMMAND" in words:
        words[words.index("COMMAND") :] = ["list"] if "archive" in words else ["config", "check"]
    command: Any = app
    context, path = None, ["steward"]
    while True:
        try:
            context = command.make_context(path[-1], list(words), parent=context)
        except click.exceptions.Exit:
            return path  # --version and --help are read at once
        except Exception as error:
            if not whole and type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
                return path
            raise
        if not hasattr(command, "resolve_command"):
            return path
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest and command.invoke_without_command:
            return path  # the group is a command itself
        name, command, words = command.resolve_command(context, rest)
        path.append(name)


@pytest.mark.parametrize(("page", "line"), steward_commands())
def test_a_command_that_is_shown_can_be_typed(page: str, line: str) -> None:
    parse(line, whole=True)


@pytest.mark.parametrize(("page", "line"), mentioned())
def test_a_command_that_is_mentioned_exists(page: str, line: str) -> None:
    parse(line, whole=False)


def test_wrong_commands_would_be_found() -> None:
    for line in ("steward archive lst", "steward archive list --nonsense", "steward archive show"):
        with pytest.raises(click.ClickException):
            parse(line, whole=True)


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not hasattr(command, "list_commands"):
        yield path
        return
    for name in command.list_commands(None):
        yield from leaves(command.get_command(None, name), (*path, name))


def options(command: Any) -> Iterator[str]:
    """Yield the options of a command, and of the commands below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from options(command.get_command(None, name))


def test_an_option_that_is_mentioned_alone_exists() -> None:
    known = {*options(app), *OTHERS}
    named = [(name, re.split("[ =]", span)[0]) for name, span in spans() if span.startswith("--")]
    assert len(named) > 100
    assert [(name, option) for name, option in named if option not in known] == []
    assert {option for _, option in named} >= OTHERS, "no page speaks of it any more"


def test_every_command_is_told_of() -> None:
    told = {tuple(parse(line, whole=False)) for _, line in [*steward_commands(), *mentioned()]}
    assert set(leaves(app, ("steward",))) - told == set()


@pytest.mark.parametrize(("page", "body"), list(fenced("toml")))
def test_settings_that_are_shown_are_settings(page: str, body: str, tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text(body if "[cluster." in body else f"{body}\n[cluster.any]\n")
    load_settings(str(path))


def test_the_tables_of_settings_are_what_the_code_says() -> None:
    page = ROOT / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8")
    assert docs.with_settings(text) == text, "run make docs"
    assert "snapshot_interval_s" in text
    common, others = text.split("## The top of the file")
    rows = re.findall(
        r"^\| (?:top of the file|`\[[\w.]+\]`) (\| `\w+` \| .* \|)$", common, re.MULTILINE
    )
    assert 15 <= len(rows) <= 25, "the reference begins with the settings that people change"
    assert [row for row in rows if row not in others] == []


def test_the_list_of_actions_is_what_the_code_says() -> None:
    text = (ROOT / "docs" / "actions.md").read_text(encoding="utf-8")
    assert docs.with_actions(text) == text, "run make docs"
    assert "### slurm.node.drain" in text


def test_the_table_of_databases_is_what_the_code_declares() -> None:
    text = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    assert docs.with_databases(text) == text, "run make docs"
    for file in DATABASES:
        assert f"| `{file.name}` | " in text


def test_the_table_of_endpoints_is_what_the_actions_say() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert docs.with_endpoints(text) == text, "run make docs"
    assert "| `GET /accounts/{account}/balance` | read |" in text


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [line.split() for _, line in [*typed_lines(), *spans()] if line.startswith("make ")]
    assert named
    for words in named:
        assert words[1] in targets, words


def test_make_help_tells_of_the_targets_that_the_readme_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    told = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    lines = [line for name, line in [*typed_lines(), *spans()] if name == "README.md"]
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert {"demo", "test", "setup-python"} <= named <= told


def test_the_units_that_are_named_exist() -> None:
    """Packages contain them, or the page itself creates them."""
    units = {path.name for path in (ROOT / "packaging" / "systemd").iterdir()}
    named = [
        (page, word if "." in word else f"{word}.service")
        for page, line in typed_lines()
        for word in line.split()[1:]
        if "systemctl " in line and word.startswith("steward")
    ]
    assert len(named) > 10
    assert [(page, unit) for page, unit in named if unit not in units] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown viewers name them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor[1:] in anchors(there), (target, anchor)


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert "docs/index.md" in {link for link, _ in LINK.findall((ROOT / "README.md").read_text())}
    index = ROOT / "docs" / "index.md"
    reached = {index.name, *(link for link, _ in LINK.findall(index.read_text(encoding="utf-8")))}
    for page in docs.pages()[1:]:
        assert page.name in reached


def test_the_site_has_every_page_in_its_navigation() -> None:
    def list_pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for child in entry.values() if isinstance(entry, dict) else entry:
            if not isinstance(entry, str):
                yield from list_pages(child)

    listed = sorted(list_pages(read_navigation(ROOT / "docs")))
    assert listed == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES[1:])


def test_develop_lists_every_decision_record_under_its_title() -> None:
    text = (ROOT / "docs" / "develop.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{4}) \| \[(.+)\]\(decisions/(.+)\) \|$", text, re.MULTILINE)
    listed = [(f"# {int(number)}. {title}", f"{number}-", name) for number, title, name in rows]
    first_lines = {page: page.read_text(encoding="utf-8").splitlines()[0] for page in RECORDS}
    assert listed == [(first_lines[page], page.name[:5], page.name) for page in RECORDS]
    assert [int(number) for number, _, _ in rows] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("page", RECORDS, ids=lambda page: page.name)
def test_a_decision_record_has_status_context_decision_and_consequences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert HEADING.findall(text)[1:] == ["Context", "Decision", "Consequences"]
    assert re.search(r"^Status: \w.*\.$", text, re.MULTILINE)


def test_every_block_of_output_says_who_types_it() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```console") == len(list(docs.blocks(text))), page.name


def test_a_block_is_written_anew() -> None:
    text = "a\n<!-- run as ada, exit 1 -->\n```console\n$ one\nold\n$ two 'x y'\n```\nb\n"
    asked = []

    def run(who: str, command: str) -> tuple[int, str]:
        asked.append((who, command))
        return (1, "new  \n\nlast") if "two" in command else (0, "")

    assert docs.refreshed(text, run) == (
        "a\n<!-- run as ada, exit 1 -->\n```console\n$ one\n$ two 'x y'\nnew\n\nlast\n```\nb\n"
    )
    assert asked == [("ada", "one"), ("ada", "two 'x y'")]
    with pytest.raises(docs.DocsError, match="ended with 0, not 1"):
        docs.refreshed(text, lambda who, command: (0, ""))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("steward", "serve"),
        ("steward-controller", "controller"),
        ("steward-web", "web"),
        ("steward-listen", "listen"),
    ],
)
def test_the_unit_file_starts_what_there_is(name: str, command: str) -> None:
    unit = (ROOT / "packaging" / "systemd" / f"{name}.service").read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))
    assert words[0] == "/usr/bin/steward"
    assert parse(shlex.join(["steward", *words[1:]]), whole=True) == ["steward", command]
