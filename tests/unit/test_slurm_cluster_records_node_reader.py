"""Known lines are not read again, and the result is the same."""

import random

import msgspec
import pytest

from harness.slurm import LINE
from steward.slurm import cluster_records
from steward.slurm.cluster_records import NodeReader, ParsedNode
from steward.slurm.users import NameResolver

ROOTS = NameResolver()
TEXTS = [
    "",
    " Reason=bad DIMM [root@2026-03-01T12:00:00]",
    " Reason=x Comment=y [root@2026-03-01T12:00:00] Comment=z",
    " Comment=State=DOWN\nNodeName=n9 State=IDLE",
    " Extra=e",
    " Reason=by whom? [nobody at all@2026-03-01T12:00:00]",
    " Reason=gone [nosuchuser@2026-03-01T12:00:00]",
    "\n   more [root@2026-03-01T12:00:00]",
]


def lean(shown: list[ParsedNode]) -> list[ParsedNode]:
    return [
        msgspec.structs.replace(one, node=msgspec.structs.replace(one.node, details={}))
        for one in shown
    ]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_known_reads_as_what_is_new(seed: int) -> None:
    chance = random.Random(seed)
    reader = NodeReader(ROOTS)
    texts = {f"n{number}": "" for number in range(1, 9)}
    for _ in range(30):
        for name in chance.sample(sorted(texts), 2):
            texts[name] = chance.choice(TEXTS)
        if chance.random() < 0.2:
            texts.pop(chance.choice(sorted(texts)))
            texts[f"m{chance.randrange(100)}"] = ""
        out = "\n".join(LINE.format(name=name) + text for name, text in texts.items()).encode()
        assert reader.parse_nodes(out) == lean(cluster_records.parse_nodes(out, ROOTS))


def test_a_name_that_nobody_knew_is_looked_up_again() -> None:
    class Later(NameResolver):
        known: int | None = None

        def uid(self, user: str) -> int | None:
            return self.known

    people = Later()
    reader = NodeReader(people)
    out = (LINE.format(name="n1") + " Reason=x [ada@2026-03-01T12:00:00]\n").encode()
    assert [one.node.reason_uid for one in reader.parse_nodes(out)] == [None]
    people.known = 1000
    assert [one.node.reason_uid for one in reader.parse_nodes(out)] == [1000]
