"""Sites that receive from controllers, and controllers that a test scripts."""

import hashlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from harness.events import NOON_NS, script_event
from harness.receivers import ReceivingSite, listener_keys
from servers.authority import Authority
from steward.core.events import Event, IncomingFile, encode_event
from steward.core.incoming import IncomingStore, IncomingStores, make_incoming_filename
from steward.core.section import TlsSettings
from steward.extensions.controllers import wire
from steward.extensions.controllers.receiver import ControllerReceiver
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.slurm.settings import ClusterSettings


class ForwardedSite(ReceivingSite):
    """A Site that receives from controllers, in threads of the test's process.

    Args:
        directory: Directory of the Site's files.
        authority: Signs the certificates of the Site and of its controllers.
        clusters: Clusters, each with the hosts that may report for it.
        limits: Limits of connections.
    """

    def __init__(
        self,
        directory: Path,
        authority: Authority,
        clusters: dict[str, tuple[str, ...]],
        **limits: int,
    ) -> None:
        remote = {
            name: ClusterSettings(remote=True, controllers=hosts)
            for name, hosts in clusters.items()
        }
        receive = ReceiveSettings(**listener_keys(authority))
        super().__init__(directory, authority, clusters=remote, receive=receive)
        self.start(
            ControllerReceiver(self.settings, self.stores, self.reader.has_key, self.link, **limits)
        )

    def keys(self, cluster: str = "c1") -> list[str]:
        """Return the keys of a cluster's events in the journal."""
        kinds = {"job.script", "job.seen", "job.state", "job.end", "controller.state"}
        events, _ = self.reader.read(0, kinds, 10_000)
        return [event.key for event in events if event.cluster == cluster]

    def kept(self) -> dict[str, bytes]:
        """Return the bytes in the store, by file name."""
        directory = self.state / "incoming"
        return {path.name: path.read_bytes() for path in directory.glob("*")}

    def files(self) -> set[str]:
        """Return the names of all files that the Site wrote, without its journal."""
        paths = self.directory.rglob("*")
        return {p.name for p in paths if p.is_file() and not p.name.startswith("journal.db")}

    def forward_settings(self, *names: str) -> ForwardSettings:
        """Return [forward] of a controller of these names that reports here."""
        certificate, key = self.authority.certificate(*names)
        return ForwardSettings(
            to=f"127.0.0.1:{self.port}",
            tls=TlsSettings(
                ca_file=self.authority.file, certificate_file=certificate, key_file=key
            ),
        )


class Raw:
    """A controller that sends only the messages that a test sends."""

    def __init__(self, port: int, authority: Authority, certificate: tuple[str, str]) -> None:
        context = ssl.create_default_context(cafile=authority.file)
        context.load_cert_chain(*certificate)
        plain = socket.create_connection(("127.0.0.1", port), 10)
        self.socket = context.wrap_socket(
            plain, server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        self.socket.settimeout(10)
        self.stream = wire.FrameStream(self.socket, "the receiver")

    def close(self) -> None:
        self.socket.close()

    def hear(self) -> Any:
        """Return the next message, or None at the end."""
        frame = self.stream.receive(wire.MAX_WIRE_FRAME_BYTES, 10.0)
        return None if frame is None else frame.decode_message()

    def say(self, message: wire.WireMessage) -> None:
        self.stream.send(wire.build_frame(wire.encode_message(message)), 10.0)

    def ends(self) -> bool:
        """Return whether the receiver sends no more messages."""
        try:
            return self.hear() is None
        except wire.WireUnavailable:
            return True

    def greet(self, cluster: str = "c1", version: int = wire.VERSION) -> wire.ReceiverReply:
        """Send Hello and return the answer."""
        self.socket.do_handshake()
        greeting = self.hear()
        assert isinstance(greeting, wire.ReceiverGreeting)
        self.say(wire.ControllerHello(version, cluster, os.urandom(wire.NONCE_BYTES)))
        answer = self.hear()
        assert isinstance(answer, wire.ReceiverReply)
        return answer


def script_row(
    job_id: int = 1,
    script: bytes = b"#!/bin/sh\n",
    environment: bytes | None = b"\1\0\0\0A=1\0",
    cluster: str = "c1",
    **changes: Any,
) -> wire.ForwardedEvent:
    """Return a job.script as a controller sends it; ``changes`` sets fields of its body."""

    def kept(data: bytes, what: str) -> IncomingFile:
        name = make_incoming_filename(cluster, job_id, NOON_NS, len(data), what)
        return IncomingFile(path=name, length=len(data), sha256=hashlib.sha256(data).hexdigest())

    body: dict[str, Any] = {
        "script": kept(script, "script"),
        "environment": None if environment is None else kept(environment, "env"),
        **changes,
    }
    event = script_event(job_id, cluster=cluster, source="spool", **body)
    return wire.ForwardedEvent(
        event.kind, cluster, event.key, encode_event(event), script, environment
    )


def row_of(event: Event) -> wire.ForwardedEvent:
    """Return an event without script bytes as a controller sends it."""
    return wire.ForwardedEvent(event.kind, event.cluster, event.key, encode_event(event))


def store_in(directory: Path) -> IncomingStore:
    """Return a store in a directory."""
    return IncomingStore("state", str(directory / "incoming"))


def stores_in(directory: Path) -> IncomingStores:
    """Return Stores that contain only this store."""
    return IncomingStores([store_in(directory)])
