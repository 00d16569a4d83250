"""What is wrong with Steward itself, in lines: for the first page and for its own."""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from steward.admin.status.shapes import StatusShowAnswer
from steward.web.filters import duration, size

_LATE_S: Final = 600.0
_TIGHT: Final = 0.05


class Trouble(msgspec.Struct, frozen=True):
    """Something wrong.

    Attributes:
        rank: ``wrong``: something is not done, or lost; ``warning``: it costs something.
        what: What it is about.
        says: What is the matter.
    """

    rank: Literal["wrong", "warning"]
    what: str
    says: str


def troubles(answer: StatusShowAnswer) -> list[Trouble]:
    """What is wrong, the worst first."""
    return sorted(_troubles(answer), key=lambda one: one.rank != "wrong")


def _troubles(answer: StatusShowAnswer) -> Iterator[Trouble]:
    if not answer.running:
        yield Trouble("wrong", "daemon", "it does not run")
    for part in answer.parts:
        if not part.pid:
            yield Trouble("wrong", f"part {part.name}", part.error or "it does not run")
    yield from _behind(answer)
    if answer.dead_letters:
        events = "1 event was" if answer.dead_letters == 1 else f"{answer.dead_letters} events were"
        yield Trouble("wrong", "dead letters", f"{events} set aside")
    for one in answer.clusters:
        if one.up is False:
            yield Trouble("wrong", f"cluster {one.cluster}", one.message or "it does not answer")
    for disk in answer.disks:
        if disk.total and disk.free < _TIGHT * disk.total:
            yield Trouble("warning", f"disk {disk.path}", f"{size(disk.free)} are free")
    bank = answer.bank
    if bank is not None and bank.gate != "deciding":
        says = bank.gate_why or f"it is {bank.gate}"
        yield Trouble("wrong" if bank.gate == "away" else "warning", "gate", says)
    if bank is not None and bank.notices:
        yield Trouble("warning", "notices", f"{bank.notices} were set aside")
    refused = {f"agent {address}": f"refused: {why}" for address, why in answer.refused.items()}
    for what, why in (refused | answer.unknown).items():
        yield Trouble("warning", what, why)


def _behind(answer: StatusShowAnswer) -> Iterator[Trouble]:
    sinks = {f"archive.{one.name}" for one in answer.sinks}
    for consumer in answer.consumers:
        if consumer.name in sinks:
            continue
        if consumer.state == "detached":
            says = consumer.refill or "the journal waits for it no more"
            yield Trouble("wrong", f"consumer {consumer.name}", says)
        elif consumer.state == "waiting":
            says = consumer.detail or "something that it needs is away"
            yield Trouble("warning", f"consumer {consumer.name}", says)
        elif (consumer.behind_s or 0.0) > _LATE_S:
            says = f"it is {duration(consumer.behind_s)} behind"
            yield Trouble("warning", f"consumer {consumer.name}", says)
    for sink in answer.sinks:
        if sink.state in ("detached", "waiting"):
            rank: Literal["wrong", "warning"] = "wrong" if sink.state == "detached" else "warning"
            yield Trouble(rank, f"sink {sink.name}", sink.refill or sink.detail or sink.state)
