"""Requests of myBRC clients are parsed, or rejected with a reason."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.extensions.mybrc.services import page_links
from steward.extensions.mybrc.wire import ApiError, ApiJob, merge_job, parse_job, parse_login

JSON = "application/json"
FORM = "application/x-www-form-urlencoded; charset=utf-8"


def sent(**fields: Any) -> bytes:
    whole = {"jobslurmid": "1", "userid": "10001", "accountid": "physics"} | fields
    return msgspec.json.encode(whole)


def read(**fields: Any) -> tuple[ApiJob, int]:
    return merge_job(parse_job(sent(**fields), JSON), None)


def test_a_job_with_everything() -> None:
    job, micros = read(
        submitdate="2026-03-01T10:00:00+00:00",
        startdate="2026-03-01 12:00:00+01:00",
        enddate="2026-03-01T12:00:00",
        amount="12.34",
        nodes=[{"name": "n0"}],
        raw_time=1.25,
    )
    assert micros == 12_340_000
    assert job.startdate == datetime(2026, 3, 1, 11, tzinfo=UTC)
    assert job.enddate == datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert [node.name for node in job.nodes] == ["n0"]


def test_a_number_is_an_amount_and_never_passes_through_a_float() -> None:
    body = sent(amount=0).replace(b'"amount":0', b'"amount":123456789.99')
    assert merge_job(parse_job(body, JSON), None)[1] == 123_456_789_990_000


def test_what_is_left_out_stays_and_null_is_taken_away() -> None:
    before, _ = read(amount="5", partition="long", jobstatus="RUNNING", num_cpus=4)
    job, micros = merge_job(parse_job(sent(jobstatus="COMPLETED", partition=None), JSON), before)
    assert (job.amount, micros, job.jobstatus) == ("5.00", 5_000_000, "COMPLETED")
    assert (job.partition, job.num_cpus) == (None, 4)


def test_what_the_reference_server_takes_beside_its_schema() -> None:
    job, _ = read(
        jobslurmid=802,
        userid=70001,
        num_cpus="4",
        raw_time="0.5",
        submitdate="2026-11-21T23:59Z",
        startdate="2026-11-22",
    )
    assert (job.jobslurmid, job.userid, job.num_cpus, job.raw_time) == ("802", "70001", 4, 0.5)
    assert job.submitdate == datetime(2026, 11, 21, 23, 59, tzinfo=UTC)
    assert job.startdate == datetime(2026, 11, 22, tzinfo=UTC)
    fields = {"jobslurmid": "9", "userid": "7", "accountid": "physics", "amount": "1.5", "qos": ""}
    parts = "".join(
        f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    multipart = "multipart/form-data; boundary=B"
    job, micros = merge_job(parse_job(f"{parts}--B--\r\n".encode(), multipart), None)
    assert (job.jobslurmid, micros, job.qos) == ("9", 1_500_000, None)


@pytest.mark.parametrize("given", [-3, True, 1.5, [], {}, None, 10**21])
def test_what_is_no_name_is_refused(given: object) -> None:
    with pytest.raises(ApiError):
        read(jobslurmid=given)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=B"),
        (b"--B\r\n" * 1000, "multipart/form-data; boundary=B"),
        (
            b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"\xff",
            "multipart/form-data; boundary=B",
        ),
        (b'[{"jobslurmid": 1}]', JSON),
        (b'{"jobslurmid": 1', JSON),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(ApiError):
        parse_job(body, content_type)


def test_form_data_of_the_old_scripts() -> None:
    body = (
        b"jobslurmid=77_3&userid=10001&accountid=physics&amount=3.5&num_cpus=8&raw_time=0.5"
        b"&submitdate=2026-03-01T10:00:00&qos=&nodes=%5B%7B%27name%27%3A+%27n0%27%7D%5D"
    )
    job, micros = merge_job(parse_job(body, FORM), None)
    assert (job.jobslurmid, micros, job.num_cpus, job.raw_time) == ("77_3", 3_500_000, 8, 0.5)
    assert (job.qos, job.nodes) == (None, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"jobslurmid": ""},
        {"jobslurmid": "x" * 151},
        {"jobslurmid": "a\x00b"},
        {"jobslurmid": "802\n"},
        {"userid": "10001\n"},
        {"accountid": "physics\n"},
        {"partition": "short\n"},
        {"nodes": [{"name": "n0\n"}]},
        {"userid": "ada"},
        {"userid": 10001.5},
        {"userid": "1٣"},
        {"amount": "-1"},
        {"amount": None},
        {"amount": "1.234"},
        {"amount": "NaN"},
        {"submitdate": "yesterday"},
        {"submitdate": "1969-12-31T23:59:59Z"},
        {"submitdate": "9999-12-31T23:59:59-14:00"},
        {"submitdate": "2026-03-01T10:00:01Z", "startdate": "2026-03-01T10:00:00Z"},
        {"submitdate": "2026-03-01T10:00:01Z", "enddate": "2026-03-01T10:00:00Z"},
        {"nodes": [{"name": ""}]},
        {"nodes": ["n0"]},
        {"num_cpus": 2**31},
        {"num_cpus": "nan"},
        {"cpu_time": "nan"},
        {"raw_time": "-inf"},
        {"partition": "x" * 51},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(**fields)
    assert refused.value.status == 400


@given(st.binary(max_size=200), st.sampled_from([JSON, FORM, "", "text/plain"]))
def test_hostile_bodies_are_refused(body: bytes, kind: str) -> None:
    for reading in (parse_job, parse_login):
        with pytest.raises(ApiError):
            reading(body, kind)


def test_a_body_that_nests_too_deep_is_refused() -> None:
    with pytest.raises(ApiError):
        parse_job(b'{"nodes":' + b"[" * 200_000, JSON)


_FIELDS = st.one_of(
    st.none(), st.text(max_size=40), st.integers(), st.floats(), st.datetimes().map(str)
)


@given(st.dictionaries(st.sampled_from(ApiJob.__struct_fields__), _FIELDS))
def test_every_job_is_read_to_the_end_or_refused(fields: dict[str, Any]) -> None:
    try:
        job, micros = read(**fields)
    except ApiError:
        return
    assert msgspec.json.decode(msgspec.json.encode(job), type=ApiJob) == job
    assert micros >= 0


def test_links_keep_the_filters() -> None:
    url = "https://h/api/jobs/?user=ada&page=2&account=a%26b"
    assert page_links(url, 2, 301) == (
        "https://h/api/jobs/?user=ada&account=a%26b&page=3",
        "https://h/api/jobs/?user=ada&account=a%26b",
    )
    assert page_links("https://h/api/jobs/", 1, 100) == (None, None)


def test_whole_numbers_with_a_point_are_whole_numbers() -> None:
    text = b'{"jobslurmid": "1", "userid": "1", "accountid": "a", "num_cpus": 4.0}'
    job, _ = merge_job(parse_job(text, "application/json"), None)
    assert (job.num_cpus, type(job.num_cpus)) == (4, int)
    for wrong in (b"4.5", b"1e300", b'"4x"', b"2147483648"):
        with pytest.raises(ApiError):
            parse_job(text.replace(b"4.0", wrong), "application/json")
