"""Kafka messages: exact for any bytes, and no hostile message is decoded."""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import message_schema
from harness.events import NOON
from harness.spool import environment_bytes
from steward.archive.contents import EncodedContent
from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import IncomingFile, JobIdentity, JobScript, make_script_key
from steward.core.records import JobRecord
from steward.extensions.kafka.messages import (
    MAX_SCRIPT_MESSAGE_BYTES,
    SCHEMA,
    MessageError,
    ScriptMessage,
    decode_script_message,
    encode_sarchive,
    encode_script_message,
    make_json_schema,
)

MTIME_NS = 1_772_366_400_123_456_789


def kept(data: bytes | None) -> IncomingFile | None:
    if data is None:
        return None
    return IncomingFile(path="p", length=len(data), sha256=hashlib.sha256(data).hexdigest())


def document(
    script: bytes | None = b"#!/bin/sh\n", environment: bytes | None = None, **more: Any
) -> ArchivedDocument:
    fields: dict[str, Any] = {
        "cluster": "hpc1",
        "key": make_script_key(7, MTIME_NS),
        "version": 3,
        "body": JobScript(
            job_id=7,
            spool_mtime_ns=MTIME_NS,
            script=kept(script),
            environment=kept(environment),
            claimed_name="sim",
            redacted=("TOKEN",),
            flags=("script-no-nul",),
        ),
        "identity": JobIdentity(
            script_key=make_script_key(7, MTIME_NS),
            job_id=7,
            first_submit=NOON,
            record=JobRecord(job_id=7, uid=1000, user="ada", submit=NOON, state="RUNNING"),
        ),
        "script": script,
        "environment": environment,
        **more,
    }
    return ArchivedDocument(**fields)


def changed(**changes: Any) -> bytes:
    """Return a valid message with some fields replaced; a dotted name reaches into an object."""
    tree = json.loads(encode_script_message(document()))
    for name, value in changes.items():
        *way, last = name.split("__")
        part = tree
        for step in way:
            part = part[step]
        part[last] = value
    return json.dumps(tree).encode()


@given(script=st.binary(max_size=3000), environment=st.none() | st.binary(max_size=3000))
def test_any_bytes_come_back_exactly(script: bytes, environment: bytes | None) -> None:
    message = decode_script_message(encode_script_message(document(script, environment)))
    assert message.script is not None
    assert message.script.content is not None
    assert message.script.content.data == script
    assert (message.environment is None) == (environment is None)
    if message.environment is not None and message.environment.content is not None:
        assert message.environment.content.data == environment


@given(data=st.binary(max_size=2000) | st.text().map(str.encode) | st.binary().map(bytes.upper))
def test_content_is_exact_and_never_much_longer_than_base64(data: bytes) -> None:
    for content in (EncodedContent.from_bytes(data), EncodedContent.from_bytes_shortest(data)):
        assert content.data == data
    text = msgspec.json.encode(EncodedContent.from_bytes_shortest(data).text)
    assert len(text) <= 2 * len(data) + 8


def test_control_characters_do_not_multiply() -> None:
    data = b"\x01" * 4_000_000
    assert len(encode_script_message(document(data))) < 5_500_000


def test_everything_that_is_told_arrives() -> None:
    sent = document(b"#!/bin/sh\nsrun x\n", environment_bytes(b"A=1"))
    message = decode_script_message(encode_script_message(sent))
    assert (message.schema, message.id) == (SCHEMA, f"hpc1/7:{MTIME_NS}")
    assert (message.cluster, message.job_id, message.key) == ("hpc1", 7, sent.key)
    assert message.spool_mtime_ns == MTIME_NS
    assert message.spooled == datetime(2026, 3, 1, 12, 0, 0, 123456, UTC)
    assert message.verified
    assert message.identity is not None
    assert sent.identity is not None
    assert message.identity.record == sent.identity.record
    assert message.identity.first_submit == NOON
    assert (message.redacted, message.flags) == (("TOKEN",), ("script-no-nul",))
    assert message.claims.name == "sim"
    assert not message.partial
    assert not message.deleted


def test_what_is_sent_is_never_too_much_to_be_read() -> None:
    body = JobScript(
        job_id=2**32 - 1,
        spool_mtime_ns=2**63 - 1,
        claimed_name="n" * 10_000,
        claimed_dir="\U0001f600" * 10_000,
        redacted=("x" * 120,) * 500,
    )
    key = make_script_key(body.job_id, body.spool_mtime_ns)
    sent = document(key=key, body=body, identity=None, script=None, version=2**53 - 1)
    message = decode_script_message(encode_script_message(sent))
    assert message.claims.name == "n" * 4096
    assert (message.key, message.redacted) == (key, body.redacted)


@pytest.mark.parametrize("line", ["x" * 2**20, "x" + "\U0001f600" * 2**16, "\U0001f600" * 2**15])
def test_a_longer_submit_line_than_a_message_may_have_is_cut(line: str) -> None:
    whose = JobIdentity(
        script_key=make_script_key(7, MTIME_NS),
        job_id=7,
        first_submit=NOON,
        record=JobRecord(job_id=7, submit=NOON, submit_line=line, name="n" * 2**15),
        why="bound",
    )
    message = decode_script_message(encode_script_message(document(identity=whose)))
    assert message.identity is not None
    told = message.identity.record
    assert line.startswith(told.submit_line)
    assert 2**17 - 4 < len(told.submit_line.encode()) <= 2**17
    assert told.name == "n" * 2**15


def test_what_is_not_sent_is_still_told_of() -> None:
    sent = msgspec.structs.replace(document(b"x", b"\0\0\0\0"), environment=None)
    message = decode_script_message(encode_script_message(sent))
    assert message.environment is not None
    assert message.environment.length == 4
    assert message.environment.content is None


def test_a_correction_without_bytes() -> None:
    message = decode_script_message(
        encode_script_message(document(body=None, script=None, partial=True))
    )
    assert message.partial
    assert message.script is None
    assert message.verified


def test_a_purged_script_leaves_nothing_in_its_message() -> None:
    data = encode_script_message(document(b"secret", deleted=True))
    message = decode_script_message(data)
    assert message.deleted
    assert not message.verified
    assert b"secret" not in data
    assert b"ada" not in data
    assert b"sim" not in data


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "steward.job/2"},
        {"cluster": "../../etc"},
        {"cluster": "a" * 65},
        {"cluster": "hpc2"},
        {"cluster": "hpc1\n", "id": f"hpc1\n/7:{MTIME_NS}"},
        {"id": "hpc1/8:1"},
        {"key": "script:7:-1"},
        {"key": "script:7:007"},
        {"key": f"script:7:{2**63}"},
        {"key": "script:7:\u0661"},
        {"key": f"script:8:{MTIME_NS}"},
        {"job_id": 0},
        {"job_id": 2**32},
        {"version": -1},
        {"version": 2**53},
        {"version": 10**300},
        {"spooled": "1969-12-31T23:59:59Z"},
        {"spooled": "2026-03-01T12:00:00"},
        {"verified": False},
        {"identity": None},
        {"identity__first_submit": "0001-01-01T00:00:00+14:00"},
        {"identity__first_submit": "9999-12-31T00:00:00-14:00"},
        {"identity__first_submit": "1970-01-01T00:00:00+14:00"},
        {"identity__record__submit": "2026-03-01T12:00:00"},
        {"identity__record__job_id": 8},
        {"identity__record__uid": -1},
        {"identity__record__uid": 2**32},
        {"identity__record__nodes": 10**30},
        {"identity__record__user": "\ud800"},
        {"identity__record__name": "x" * (2**17 + 1)},
        {"identity__record__submit_line": "\U0001f600" * 2**15 + "x"},
        {"script__length": 9},
        {"script__length": MAX_SCRIPT_MESSAGE_BYTES + 1},
        {"script__sha256": "0" * 64},
        {"script__sha256": "../" + "0" * 61},
        {"script__content__text": "#!/bin/sh "},
        {"script__content__text": "\ud800"},
        {"script__content": {"encoding": "base64", "text": "IyEvYmluL3NoCg==!"}},
        {"script__content": {"encoding": "base64", "text": "\u00e9"}},
        {"script__content": {"encoding": "rot13", "text": ""}},
        {"redacted": ["x"] * 2000},
        {"redacted": ["x" * 2000]},
        {"claims": {"name": "x" * 5000}},
        {"deleted": "yes"},
    ],
    ids=str,
)
def test_what_does_not_hold_together_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        decode_script_message(changed(**changes))


def test_fields_of_a_later_time_are_passed_over() -> None:
    assert (
        decode_script_message(
            changed(mood="good", claims={"name": "x", "colour": "red"})
        ).claims.name
        == "x"
    )


@settings(max_examples=300)
@given(data=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_raise_only_our_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_script_message(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [*ScriptMessage.__struct_fields__, "identity__record__submit", "script__content"]
)


@given(field=FIELDS, value=JSON)
def test_a_message_with_anything_in_it_is_one_or_raises_our_error(field: str, value: Any) -> None:
    try:
        message = decode_script_message(changed(**{field: value}))
    except MessageError:
        return
    assert message.key == make_script_key(message.job_id, message.spool_mtime_ns)


@given(cut=st.integers(0, 900), other=st.integers(0, 255))
def test_a_damaged_message_is_not_taken_for_another(cut: int, other: int) -> None:
    good = encode_script_message(document())
    data = bytearray(good)
    data[cut % len(data)] = other
    try:
        message = decode_script_message(bytes(data))
    except MessageError:
        return
    if message.script is not None and message.script.content is not None:
        assert hashlib.sha256(message.script.content.data).hexdigest() == message.script.sha256


def test_deep_nesting_and_size_are_refused() -> None:
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for data in (deep, b" " * (MAX_SCRIPT_MESSAGE_BYTES + 1)):
        with pytest.raises(MessageError):
            decode_script_message(data)


def test_the_schema_in_the_docs_is_the_codes() -> None:
    assert message_schema.PATH.read_text() == message_schema.text(), (
        "run python scripts/message_schema.py"
    )


def test_messages_are_valid_by_the_schema() -> None:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(make_json_schema())
    for sent in (
        document(b"#!/bin/sh\n", environment_bytes(b"A=1", b"B=\xff")),
        document(identity=None),
        document(deleted=True),
        document(body=None, script=None, partial=True),
    ):
        validator.validate(json.loads(encode_script_message(sent)))
    for wrong in ({"schema": "other"}, {"cluster": "../x"}, {"version": -1}, {"job_id": "7"}):
        assert not validator.is_valid(json.loads(changed(**wrong)))


def test_the_schema_describes_what_is_sent() -> None:
    schema = make_json_schema()
    fields = schema["$defs"]["ScriptMessage"]["properties"]
    for sent in (
        document(),
        document(deleted=True),
        document(body=None, script=None, partial=True),
    ):
        for name in json.loads(encode_script_message(sent)):
            assert name in fields
    assert set(schema["$defs"]["ScriptMessage"]["required"]) <= set(
        json.loads(encode_script_message(document()))
    )
    assert fields["schema"] == {"enum": [SCHEMA]}


def test_sarchives_message_has_its_fields_and_types() -> None:
    environment = environment_bytes(b"A=1", b"B=x=y", b"C=\xff", b"odd")
    data = encode_sarchive(document(b"#!/bin/sh\n\xff", environment))
    assert data is not None
    assert json.loads(data) == {
        "id": "7",
        "timestamp": "2026-03-01T12:00:00.123456Z",
        "cluster": "hpc1",
        "script": "#!/bin/sh\n\ufffd",
        "environment": {"A": "1", "B": "x=y", "C": "\ufffd", "odd": ""},
    }
    bare = encode_sarchive(document())
    assert bare is not None
    assert json.loads(bare)["environment"] is None


def test_sarchives_message_cannot_say_more() -> None:
    assert encode_sarchive(document(deleted=True)) is None
    assert encode_sarchive(document(partial=True)) is None
