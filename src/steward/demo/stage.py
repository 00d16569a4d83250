"""How the demo speaks: headings, prompts and results, in colours on a terminal, plain elsewhere."""

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

_WIDTH = 100


class Stage:
    """Where everything is said, on the standard output."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._width = min(_WIDTH, self._console.width)

    def act(self, title: str, text: str = "") -> None:
        """Begin a new part.

        Args:
            title: Its heading.
            text: What is about to be seen, and why.
        """
        self._console.print()
        if self.is_terminal:
            rule = Rule(Text(title, style="bold"), align="left", style="dim")
            self._console.print(rule, width=self._width)
        else:
            self._console.print(f"== {title}")
        if text:
            self.say(text)
        self.flush()

    def say(self, text: str) -> None:
        """A paragraph, wrapped."""
        for line in textwrap.wrap(text, self._width):
            self._console.print(line)

    def line(self, text: str, *, style: str = "") -> None:
        """One line, as it is."""
        self._console.print(Text(text, style=style))

    def prompt(self, user: str, command: str, mark: str = "$") -> None:
        """What somebody types; its output follows."""
        self._console.print()
        line = Text(f"{user}{mark} ", style="bold cyan")
        self._console.print(line.append(command, style="bold default"))
        self.flush()

    def result(self, good: bool, what: str) -> None:
        """The outcome of one check."""
        mark = Text("   ok  " if good else "FAILED ", style="green" if good else "bold red")
        self._console.print(mark.append(what, style="default not bold"))
        self.flush()

    @contextmanager
    def working(self, what: str, done: str) -> Iterator[None]:
        """Show that something is being done, and then how long it took.

        Args:
            what: What is being done.
            done: What is said of it when it is.
        """
        began = time.monotonic()
        with self._console.status(what) if self.is_terminal else nullcontext():
            yield
        self.line(f"{done} ({time.monotonic() - began:.1f} s)")
        self.flush()

    def flush(self) -> None:
        """Let nothing wait that was said, before another program speaks."""
        self._console.file.flush()
