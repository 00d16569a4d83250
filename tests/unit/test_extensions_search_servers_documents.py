"""Documents for search servers: valid JSON and decodable to the same job, for any job."""

import struct
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.remote.destination import ArchivedDocument
from steward.core.events import JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.extensions.search_servers.documents import (
    MAX_NAME_BYTES,
    MAX_VALUE_BYTES,
    MAX_VARIABLES,
    apply_correction,
    build_source,
    document_month,
    encode_source,
    extract_environment,
    extract_script,
)
from steward.extensions.search_servers.index_template import build_mapping, build_template
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
    SearchSinkSettings,
)

WHEN = datetime(2026, 11, 21, 12, tzinfo=UTC)
KEY = "script:7:1795262400000000001"


def document(**changes: object) -> ArchivedDocument:
    identity = JobIdentity(
        script_key=KEY,
        job_id=7,
        first_submit=WHEN,
        record=JobRecord(job_id=7, uid=1, user="ada", restarts=0),
    )
    body = JobScript(job_id=7, spool_mtime_ns=1795262400000000001, flags=("script-no-nul",))
    made = ArchivedDocument(cluster="hpc", key=KEY, version=3, body=body, identity=identity)
    return msgspec.structs.replace(made, **changes)


def read(of: ArchivedDocument) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(encode_source(build_source(of)))
    return found


TEXT = st.text(st.characters(exclude_categories=()), max_size=60)


@given(script=st.binary(max_size=300), environment=st.binary(max_size=300), name=TEXT)
def test_scripts_and_environments_come_back_exactly(
    script: bytes, environment: bytes, name: str
) -> None:
    identity = JobIdentity(
        script_key=KEY, job_id=7, first_submit=WHEN, record=JobRecord(job_id=7, name=name)
    )
    found = read(document(script=script, environment=environment, identity=identity))
    assert extract_script(found) == script
    assert extract_environment(found) == environment
    assert ("script_base64" in found) == (script.decode("utf-8", "ignore").encode() != script)


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=20))
def test_variables_that_can_be_searched_for_are_bounded(pairs: list[tuple[bytes, bytes]]) -> None:
    data = struct.pack("=I", len(pairs)) + b"".join(b"%b=%b\0" % pair for pair in pairs)
    found = read(document(environment=data))["environment"]
    assert isinstance(found, dict)
    for name in found:
        assert name.isascii()
        assert "." not in name
        assert "\0" not in name


def test_long_names_long_values_and_many_variables_are_cut_but_kept() -> None:
    data = b"\0\0\0\0" + b"".join(b"V%d=1\0" % number for number in range(MAX_VARIABLES + 9))
    found = read(document(environment=data))
    assert len(found["environment"]) == MAX_VARIABLES  # type: ignore[arg-type]
    assert extract_environment(found) == data
    data = (
        b"\0\0\0\0A="
        + "é".encode() * MAX_VALUE_BYTES
        + b"\0"
        + b"n" * (MAX_NAME_BYTES + 1)
        + b"=1\0"
    )
    found = read(document(environment=data))
    assert found["environment"] == {"A": "é" * (MAX_VALUE_BYTES // 2)}
    assert extract_environment(found) == data


def test_what_is_not_known_is_left_out() -> None:
    found = read(document(body=None, identity=None))
    assert found == {
        "id": "hpc/7:1795262400000000001",
        "cluster": "hpc",
        "key": KEY,
        "spooled": "2026-11-21T12:00:00Z",
        "spool_mtime_ns": 1795262400000000001,
        "spool_job_id": 7,
        "version": 3,
        "verified": False,
        "job_id": 7,
    }
    assert "array_job_id" not in read(document())
    assert read(document())["restarts"] == 0


@given(script=st.binary(max_size=100), name=TEXT)
def test_a_correction_leaves_the_bytes_alone(script: bytes, name: str) -> None:
    old = encode_source(build_source(document(script=script, environment=b"\1\0\0\0A=1\0")))
    record = JobRecord(job_id=7, name=name, state="COMPLETED")
    identity = JobIdentity(script_key=KEY, job_id=7, first_submit=WHEN, record=record)
    news = document(version=9, identity=identity, partial=True)
    found = msgspec.json.decode(apply_correction(old, news))
    assert extract_script(found) == script
    assert extract_environment(found) == b"\1\0\0\0A=1\0"
    assert (found["state"], found["version"]) == ("COMPLETED", 9)
    assert "user" not in found


@pytest.mark.parametrize(
    ("key", "month"),
    [
        (KEY, "2026.11"),
        ("script:1:0", "1970.01"),
        ("script:1:1798761599999999999", "2026.12"),
        ("script:1:1798761600000000000", "2027.01"),
        ("script:1:-1", "1969.12"),
    ],
)
def test_the_month_is_that_of_the_spool_in_utc(key: str, month: str) -> None:
    assert document_month(document(key=key)) == month


def test_a_time_that_no_calendar_has_is_an_error() -> None:
    with pytest.raises(OverflowError):
        document_month(document(key=f"script:1:{10**30}"))


@pytest.mark.parametrize("kind", [ElasticsearchSinkSettings, OpenSearchSinkSettings])
def test_every_field_of_a_document_is_mapped(kind: type[SearchSinkSettings]) -> None:
    fields = build_mapping(kind(), is_elasticsearch=True)["properties"]
    record = set(JobRecord.__struct_fields__)
    sent = set(read(document(script=b"\xff", environment=b"\0\0\0\0A=1\0"))) | record
    assert sent <= set(fields)
    assert (
        "environment"
        not in build_mapping(kind(environments=False), is_elasticsearch=True)["properties"]
    )


def test_the_template_of_a_longer_name_goes_first_and_tells_what_it_was_made_from() -> None:
    short = build_template(OpenSearchSinkSettings(index="jobs"), is_elasticsearch=False)
    long = build_template(OpenSearchSinkSettings(index="jobs-gpu"), is_elasticsearch=False)
    assert long["priority"] > short["priority"]
    assert short["_meta"] != long["_meta"]
    again = build_template(OpenSearchSinkSettings(index="jobs"), is_elasticsearch=False)
    assert again == short
