"""Man pages, generated from the command line and from the documentation."""

import datetime as dt
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packages.roff import bold, escaped, head, italic, line, of_markdown, quoted
from packages.shapes import Option, Shape, below, whole

ROOT: Final = Path(__file__).parent.parent.parent
PAGES: Final = {
    "steward.toml": ("configuration.md", "the settings of Steward"),
    "steward-rules": ("rules.md", "what Steward does about events by itself"),
}
"""Pages of section 5, each of a page of the documentation."""
_FILES: Final = (
    ("/etc/steward/steward.toml", "The configuration; see steward.toml(5)."),
    ("/etc/steward/client.toml", "Where commands find the daemon, or the pages of another host."),
    ("~/.config/steward/token", "What lets commands in there; see steward-token(1)."),
    ("/etc/steward/rules.d", "A site's own rules; see steward-rules(5)."),
    ("/var/lib/steward", "What Steward has recorded."),
    ("/run/steward/steward.sock", "Where the daemon listens."),
)
_FRONT_MATTER: Final = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_CODES: Final = (
    ("0", "It is done."),
    ("1", "It could not be done, or what was looked at is wrong."),
    ("2", "Wrong use."),
    ("130", "Ctrl-C."),
)


def pages(version: str, epoch: int) -> dict[str, str]:
    """Return every man page by its file name.

    Args:
        version: Steward's version.
        epoch: Date of the pages, in seconds since 1970.
    """
    date = dt.datetime.fromtimestamp(epoch, dt.UTC).strftime("%Y-%m-%d")
    command = whole()
    written = {"steward.1": _first(command, version, date)}
    for one in command.commands:
        written[f"{_name(one)}.1"] = _of_command(one, version, date)
    for name, (page, about) in PAGES.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        named = [head(name, 5, version, date), *_named(name, about)]
        body = [*named, ".SH DESCRIPTION", *of_markdown(_FRONT_MATTER.sub("", text))]
        written[f"{name}.5"] = _joined([*body, *_see_also(["steward.1"])])
    return written


def _name(shape: Shape) -> str:
    return "-".join(shape.path)


def _named(name: str, about: str) -> list[str]:
    return [".SH NAME", rf"{escaped(name)} \- {escaped(about)}"]


def _first(shape: Shape, version: str, date: str) -> str:
    lines = [head("steward", 1, version, date), *_named("steward", _lower(shape.title))]
    lines += [".SH SYNOPSIS", *_synopsis(shape), ".SH DESCRIPTION", *_paragraphs(shape.help)]
    readers = dict.fromkeys(one.reader for one in shape.commands)
    lines.append(".SH COMMANDS")
    for reader in readers:
        lines.append(f".SS {quoted(reader)}")
        for one in (one for one in shape.commands if one.reader == reader):
            lines += [".TP", rf"{bold(_name(one))}(1)", line(escaped(f"{one.title}."))]
    lines += [".SH OPTIONS", *_options(shape), *_codes(), ".SH ENVIRONMENT"]
    lines += [".TP", bold("STEWARD_DEBUG"), "Not empty: as with the option --debug."]
    lines += [".TP", bold("STEWARD_URL"), "Where another host's pages are, which are asked then."]
    lines += [".TP", bold("STEWARD_TOKEN"), "What lets us in there; see steward-token(1)."]
    lines += [".TP", bold("STEWARD_MUNGE_SOCKET"), "munged's, which does so without a token."]
    lines += [".TP", bold("TZ"), "The time zone in which times are typed and printed."]
    lines.append(".SH FILES")
    for path, about in _FILES:
        lines += [".TP", italic(path), escaped(about)]
    others = [f"{_name(one)}.1" for one in shape.commands]
    return _joined([*lines, *_see_also([*others, *(f"{name}.5" for name in PAGES)])])


def _of_command(shape: Shape, version: str, date: str) -> str:
    name = _name(shape)
    lines = [head(name, 1, version, date), *_named(name, _lower(shape.title)), ".SH SYNOPSIS"]
    leaves = [one for one in below(shape) if not one.commands or one.arguments]
    for one in [shape] if not shape.commands else leaves:
        lines += _synopsis(one)
    lines += [".SH DESCRIPTION", *_paragraphs(shape.help), *_more(shape)]
    if shape.arguments or shape.options:
        lines += [".SH OPTIONS", *_arguments(shape), *_options(shape)]
    if shape.commands:
        lines.append(".SH COMMANDS")
    for one in list(below(shape))[1:]:
        lines += [f".SS {quoted(' '.join(one.path))}", *_paragraphs(one.help)]
        if not one.commands:
            lines += [*_arguments(one), *_options(one)]
    return _joined([*lines, *_codes(), *_see_also(["steward.1", "steward.toml.5"])])


def _synopsis(shape: Shape) -> Iterator[str]:
    words = [bold(" ".join(shape.path))]
    if shape.options:
        words.append(f"[{italic('OPTIONS')}]")
    if shape.commands:
        words.append(italic("COMMAND"))
    for one in shape.arguments:
        shown = italic(one.name) + ("..." if one.many else "")
        words.append(shown if one.required else f"[{shown}]")
    yield ".PP"
    yield " ".join(words)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.splitlines():
        yield ".PP"
        yield line(escaped(paragraph))


def _more(shape: Shape) -> Iterator[str]:
    yield from _paragraphs(shape.more)


def _arguments(shape: Shape) -> Iterator[str]:
    for one in shape.arguments:
        about = one.help or ("One of: " + ", ".join(one.choices) + "." if one.choices else "")
        if about:
            yield from (".TP", italic(one.name), line(escaped(about)))


def _options(shape: Shape) -> Iterator[str]:
    for option in shape.options:
        yield from (".TP", _option(option), line(escaped(option.help)))


def _option(option: Option) -> str:
    shown = ", ".join(bold(name) for name in option.names)
    return f"{shown} {italic(option.value)}" if option.value else shown


def _codes() -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code, about in _CODES:
        yield from (".TP", bold(code), escaped(about))


def _see_also(names: list[str]) -> Iterator[str]:
    yield ".SH SEE ALSO"
    shown = [name.rpartition(".") for name in names]
    yield ",\n".join(rf"{bold(name)}({section})" for name, _, section in shown)


def _lower(title: str) -> str:
    """Return a sentence in the form that follows a dash."""
    return title[:1].lower() + title[1:]


def _joined(lines: list[str]) -> str:
    kept: list[str] = []
    for one in lines:
        # A heading begins a paragraph by itself.
        if one and not (one == ".PP" and kept and kept[-1].startswith((".SH", ".SS"))):
            kept.append(one)
    return "\n".join(kept) + "\n"
