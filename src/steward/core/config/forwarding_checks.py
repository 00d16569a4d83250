"""What is wrong with the settings between ``steward controller`` and ``steward serve``."""

import os
import re
from collections.abc import Iterator

from steward.bank.settings import GateSettings
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.config.problem import Problem
from steward.core.listening import host_and_port
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.extensions.mybrc.settings import MybrcSettings
from steward.web.settings import WebSettings

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


def forwarding_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with [receive], [forward], and the clusters that are elsewhere."""
    yield from _receive(settings)
    yield from _forward(settings)
    for name, cluster in settings.cluster.items():
        key = ("cluster", name)
        if cluster.remote and not settings.receive.listen:
            yield Problem(
                key, f"cluster {name!r} is remote, and nothing listens: set [receive] listen"
            )
        if cluster.remote and not cluster.controllers:
            yield Problem(
                key, f"cluster {name!r} is remote: name the hosts that may report, 'controllers'"
            )
        for host in cluster.controllers:
            if _HOST.fullmatch(host) is None:
                yield Problem(
                    (*key, "controllers"), f"{host!r} is neither a host's name nor an address"
                )


def _receive(settings: Settings) -> Iterator[Problem]:
    receive = settings.receive
    key = ("receive",)
    if receive.listen and host_and_port(receive.listen) is None:
        yield Problem(
            (*key, "listen"),
            f"'receive.listen' must be an address and a port, '0.0.0.0:6825', "
            f"not {receive.listen!r}",
        )
    yield from file_problems("receive", receive)
    if receive.client_ca_file and not receive.certificate_file:
        yield Problem(
            (*key, "client_ca_file"),
            "'receive.client_ca_file' is for TLS: set 'certificate_file' and 'key_file', too",
        )


def _forward(settings: Settings) -> Iterator[Problem]:
    forward = settings.forward
    key = ("forward",)
    if forward.to and host_and_port(forward.to) is None:
        yield Problem(
            (*key, "to"),
            f"'forward.to' must be a host and a port, 'steward.example.org:6825', "
            f"not {forward.to!r}",
        )
    yield from file_problems("forward", forward)
    if not forward.tls:
        for field in ("ca_file", "certificate_file"):
            if getattr(forward, field):
                yield Problem((*key, field), f"'forward.{field}' is for TLS: set 'tls = true', too")
    for name, cluster in settings.cluster.items():
        if forward.to and cluster.remote:
            yield Problem(
                ("cluster", name, "remote"),
                f"cluster {name!r} cannot be remote where [forward] sends away what is captured",
            )
    if forward.to and settings.receive.listen:
        yield Problem(
            (*key, "to"), "[forward] is for 'steward controller', [receive] for 'steward serve'"
        )


def file_problems(
    name: str,
    section: (
        ReceiveSettings
        | ForwardSettings
        | NodesSettings
        | GateSettings
        | MybrcSettings
        | WebSettings
    ),
) -> Iterator[Problem]:
    """What is wrong with the names of a section's certificates and keys."""
    fields = [field for field in section.__struct_fields__ if field.endswith("_file")]
    for field in fields:
        path = getattr(section, field)
        if path and not os.path.isabs(path):
            yield Problem((name, field), f"'{name}.{field}' must be an absolute path, not {path!r}")
    if bool(section.certificate_file) != bool(section.key_file):
        yield Problem(
            (name, "certificate_file" if section.certificate_file else "key_file"),
            f"[{name}] needs both 'certificate_file' and 'key_file', or neither",
        )
