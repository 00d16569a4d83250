"""Sites that receive from controllers, and controllers that a test scripts."""

import hashlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx

from harness.events import NOON_NS, script_event
from harness.receivers import ReceivingSite, listener_keys
from servers.authority import Authority
from steward.core.events import Event, IncomingFile, encode_event
from steward.core.script_stores import IncomingStore, IncomingStores, make_incoming_filename
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
        limits: Limits of streams and requests.
    """

    def __init__(
        self,
        directory: Path,
        authority: Authority,
        clusters: dict[str, tuple[str, ...]],
        **limits: Any,
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
    """A controller that sends only the requests that a test sends."""

    def __init__(self, port: int, authority: Authority, certificate: tuple[str, str]) -> None:
        self.context = ssl.create_default_context(cafile=authority.file)
        self.context.load_cert_chain(*certificate)
        self.port = port
        url = f"https://127.0.0.1:{port}"
        self._client = httpx.Client(
            verify=self.context, base_url=url, trust_env=False, timeout=30.0
        )
        self.cluster = "c1"
        self.stream = ""

    def close(self) -> None:
        self._client.close()

    def headers(self, path: str, body: bytes, number: int = 0) -> dict[str, str]:
        """Return the headers of a request in the present stream."""
        head = wire.RequestHead(
            path=path,
            origin=f"127.0.0.1:{self.port}",
            cluster=self.cluster,
            stream="" if path == wire.HELLO else self.stream,
            number=number,
            digest=wire.hash_body(body),
        )
        return head.build_headers()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> wire.ReceiverReply:
        """Send a request and return the answer."""
        response = self._client.post(path, content=body, headers=headers)
        reply = wire.decode_reply(response.content)
        assert (response.status_code == 200) == (reply.verdict == "durable")
        return reply

    def greet(self, cluster: str = "c1", version: int = wire.VERSION) -> wire.ReceiverReply:
        """Say hello and return the answer."""
        self.cluster = cluster
        nonce = os.urandom(wire.NONCE_BYTES)
        headers = {**self.headers(wire.HELLO, nonce), "steward-version": str(version)}
        reply = self.post(wire.HELLO, nonce, headers)
        self.stream = reply.stream
        return reply

    def say(
        self, number: int, rows: list[wire.ForwardedEvent], body: bytes | None = None
    ) -> wire.ReceiverReply:
        """Send a batch, or a body in its place, and return the answer."""
        body = wire.encode_message(rows) if body is None else body
        return self.post(wire.EVENTS, body, self.headers(wire.EVENTS, body, number))

    def send_head(
        self, path: str, length: int, number: int = 0, beginning: bytes = b""
    ) -> ssl.SSLSocket:
        """Send a request's head and the beginning of its body; return the connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        connection = self.context.wrap_socket(plain, server_hostname="127.0.0.1")
        headers = {**self.headers(path, beginning, number), "content-length": str(length)}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        connection.sendall("\r\n".join((*lines, "", "")).encode() + beginning)
        return connection


def read_status(connection: socket.socket) -> int:
    """Return the status of the answer that a connection brings before it ends; 0 without one."""
    connection.settimeout(20)
    answer = b""
    try:
        while chunk := connection.recv(1 << 16):
            answer += chunk
    except ConnectionError:
        pass
    return int(answer.split(b" ", 2)[1]) if answer else 0


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
