"""Progress of long work: on a terminal's stderr alone, a pipe or a log gets none."""

import sys
import time
from types import TracebackType
from typing import Self

_EVERY_S = 0.1


class Bar:
    """One line that says how far the work is, and vanishes at the end."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._count = 0
        self._drawn_at = 0.0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()

    def step(self, what: str) -> None:
        """One more is done.

        Args:
            what: Of what, in the plural.
        """
        self._count += 1
        self.show(self._count, None, what)

    def show(self, done: int, total: int | None, what: str) -> None:
        """So many are done.

        Args:
            done: How many.
            total: Of how many; None where that is not known.
            what: Of what, in the plural.
        """
        now = time.monotonic()
        if not self._is_shown or now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        share = f" of {total} ({100 * done // total} %)" if total else ""
        line = f"{done}{share} {what}"
        sys.stderr.write(f"\r{line:{self._width}}")
        sys.stderr.flush()
        self._width = len(line)
