"""Takes in the stream of long work for a command: its items, its answer, and progress meanwhile."""

from collections.abc import Iterator
from typing import Any

from steward.archive.requests import Progress
from steward.cli.options import Place
from steward.cli.progress import Bar
from steward.client.asking import action, stream


def collected(
    place: Place, name: str, request: Any, kind: type[Any] | tuple[()]
) -> tuple[list[Any], Any]:
    """The items of a stream that are of one kind, and its answer; progress shows meanwhile.

    Args:
        place: Where to ask.
        name: The action's name.
        request: A value of its request type.
        kind: The items that are wanted; () for none.
    """
    what = action(name)
    found: list[Any] = []
    answer = None
    with Bar() as bar:
        for item in _following(stream(place, what, request), bar):
            if isinstance(item, what.answer):
                answer = item
            elif isinstance(item, kind):
                found.append(item)
    return found, answer


def _following(items: Iterator[Any], bar: Bar) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Progress):
            bar.show(item.done, item.total, item.what)
        else:
            yield item
