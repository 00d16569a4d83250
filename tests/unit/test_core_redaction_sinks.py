"""No sink gets a secret of an environment, whatever the variable's form."""

import base64
import gzip
import json
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st

from steward.archive.remote.destination import ArchivedDocument
from steward.core.config import RedactSettings
from steward.core.events import IncomingFile, JobScript, encode_event, make_script_event
from steward.core.redaction import Redactor
from steward.extensions.kafka.messages import encode_sarchive
from steward.extensions.kafka.messages import encode_script_message as message_of
from steward.extensions.search_servers.documents import build_source, encode_source
from steward.slurm.environment import read_environment

NOON_NS = 1_795_262_400 * 10**9
REDACTOR = Redactor(RedactSettings())

NAMES = st.sampled_from(
    [
        *(b"API_TOKEN", b"DB_PASSWORD", b"aws_secret_access_key", b"AWS_SESSION_TOKEN"),
        *(b"SLURM_JWT", b"MY_API_KEY", b"Credentials", b"PGPASSWORD", b"ssh_private_key"),
    ]
)
WAYS = st.sampled_from(["utf-8", "utf-16-le", "utf-32-be", "latin-1", "base64", "hex", "url"])
# Long and odd enough never to occur by chance.
CORES = st.text(min_size=0, max_size=12).map(lambda text: f"hUsh§{text}§hUsh")
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([b"HOME", b"PATH", b"X", b"LANG", b"BASH_FUNC_x%%"]),
        st.binary(max_size=20).map(lambda value: value.replace(b"\0", b"\n")),
    ),
    max_size=4,
)


def written(secret: str, way: str) -> bytes:
    """Generate values of a variable that contain the secret; no value has a NUL."""
    plain = secret.encode("utf-8", "surrogatepass")
    if way == "base64":
        return base64.b64encode(plain)
    if way == "hex":
        return plain.hex().encode()
    if way == "url":
        return quote(plain).encode()
    return secret.encode(way, "ignore").replace(b"\0", b"\x01")


def environment_of(before: Any, name: bytes, value: bytes, after: Any) -> bytes:
    entries = [*before, (name, value), *after]
    block = b"".join(name + b"=" + value + b"\0" for name, value in entries)
    return struct.pack("=I", len(entries)) + block


def given_to_sinks(raw: bytes) -> dict[str, bytes]:
    """Return all output that derives from an environment, by its receiver."""
    read = read_environment(raw, REDACTOR)
    kept = IncomingFile(path=f"c1.7.{NOON_NS}.9.env", length=len(read.data), sha256="0" * 64)
    script = b"#!/bin/sh\n"
    body = JobScript(
        job_id=7,
        spool_mtime_ns=NOON_NS,
        script=IncomingFile(path=f"c1.7.{NOON_NS}.10.script", length=len(script), sha256="0" * 64),
        environment=kept,
        store="state",
        claimed_name=read.name,
        claimed_dir=read.directory,
        claimed_host=read.host,
        redacted=read.redacted,
        flags=read.flags,
    )
    document = ArchivedDocument(
        cluster="c1",
        key=f"script:7:{NOON_NS}",
        version=1,
        body=body,
        script=script,
        environment=read.data,
    )
    return {
        "files": read.data,
        "journal": encode_event(make_script_event("c1", "spool", body)),
        "kafka": message_of(document),
        "kafka, as sarchive": encode_sarchive(document) or b"",
        "search": encode_source(build_source(document)),
    }


def seen_in(data: bytes) -> Iterator[bytes]:
    """Yield the bytes, and everything that a reader of their JSON could decode from them."""
    yield data
    try:
        decoded = json.loads(data)
    except ValueError:
        return
    yield from _texts(decoded)


def _texts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name.encode("utf-8", "surrogatepass")
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value.encode("utf-8", "surrogatepass")
        try:
            inside = base64.b64decode(value, validate=True)
        except ValueError:
            return
        yield inside
        if inside.startswith(b"\x1f\x8b"):
            yield gzip.decompress(inside)


@given(ENTRIES, NAMES, CORES, WAYS, ENTRIES)
@example([], b"API_TOKEN", "hUsh§\udcff§hUsh", "utf-8", [])
@example([(b"HOME", b"a=b\nAPI_TOKEN")], b"API_TOKEN", "hUsh§=,\n§hUsh", "latin-1", [])
def test_no_sink_gets_a_secret(before: Any, name: bytes, core: str, way: str, after: Any) -> None:
    value = written(core, way)
    for sink, data in given_to_sinks(environment_of(before, name, value, after)).items():
        forms = (value, base64.b64encode(value), value.hex().encode(), quote(value).encode())
        for seen in seen_in(data):
            for form in forms:
                assert form not in seen, f"{sink} is given {form!r}"


@given(st.sampled_from(["https", "postgresql", "amqp"]), CORES)
def test_no_sink_gets_the_password_of_an_address(scheme: str, core: str) -> None:
    password = quote(core.encode("utf-8", "surrogatepass"))
    address = f"{scheme}://ada:{password}@db.example.org/x".encode()
    for sink, data in given_to_sinks(environment_of([], b"DATABASE", address, [])).items():
        for seen in seen_in(data):
            assert password.encode() not in seen, sink


def test_the_test_would_see_a_secret() -> None:
    raw = environment_of([], b"HARMLESS", b"hUsh-in-plain-view", [])
    found = {
        sink
        for sink, data in given_to_sinks(raw).items()
        if any(b"hUsh-in-plain-view" in seen for seen in seen_in(data))
    }
    assert found == {"files", "kafka", "kafka, as sarchive", "search"}
