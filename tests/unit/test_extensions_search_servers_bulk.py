"""Bulk replies of search servers, from recordings."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument
from steward.extensions.search_servers.bulk import (
    BulkOperation,
    BulkSender,
    RequestPacer,
    delete_operation,
    index_operation,
)
from steward.extensions.search_servers.client import (
    BulkOutcome,
    BulkReply,
    SearchClient,
    ServerReply,
    clean_text,
    tls_error,
    unavailable_error,
)
from steward.extensions.search_servers.settings import ElasticsearchSinkSettings

TOO_LONG = (
    b'{"status":400,"error":{"type":"document_parsing_exception","reason":"[1:26] failed to parse '
    b"field [time_limit_s] of type [long] in document with id 'alpha/2:1'. Preview of field's "
    b'value: \'1180591620717411303424\'","caused_by":{"type":"input_coercion_exception",'
    b'"reason":"Numeric value (1180591620717411303424) out of range of long"}}}'
)
CONFLICT = (
    b'{"status":409,"error":{"type":"version_conflict_engine_exception","reason":"[alpha/1:1]: '
    b'version conflict, current version [9] is higher or equal to the one provided [5]"}}'
)
PRESSURE = (
    b'{"status":429,"error":{"type":"es_rejected_execution_exception","reason":"rejected execution '
    b'of primary operation [coordinating_and_primary_bytes=286461, max_coordinating=409600]"}}'
)
SHARDS = (
    b'{"status":400,"error":{"type":"validation_exception","reason":"Validation Failed: 1: this '
    b'action would add [1] shards, but this cluster currently has [1000]/[1000] open;"}}'
)
BLOCKED = (
    b'{"status":403,"error":{"type":"cluster_block_exception","reason":"index [x] blocked by: '
    b'[FORBIDDEN/8/index write (api)];"}}'
)
FLOODED = BLOCKED.replace(
    b"FORBIDDEN/8/index write (api)",
    b"FORBIDDEN/12/disk usage exceeded flood-stage watermark, index has read-only-allow-delete",
)
READ_ONLY = BLOCKED.replace(b"8/index write", b"5/index read-only")
CLUSTER = BLOCKED.replace(b"8/index write", b"6/cluster read-only")
CLOSED = b'{"status":400,"error":{"type":"index_closed_exception","reason":"closed"}}'
NO_INDEX = (
    b'{"status":404,"error":{"type":"index_not_found_exception","reason":"no such index [x]"}}'
)
OWN_FAULT = b'{"status":500,"error":{"type":"null_pointer_exception","reason":null}}'
AWAY = b'{"status":503,"error":{"type":"unavailable_shards_exception","reason":"primary shard"}}'


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b'{"status":201}', "done"),
        (CONFLICT, "done"),
        (b'{"status":404}', "done"),
        (TOO_LONG, "refused"),
        (OWN_FAULT, "refused"),
        (PRESSURE, "again"),
        (SHARDS, "again"),
        (BLOCKED, "again"),
        (FLOODED, "again"),
        (CLOSED, "again"),
        (NO_INDEX, "again"),
        (AWAY, "again"),
    ],
)
def test_what_an_outcome_means(answer: bytes, what: str) -> None:
    outcome = msgspec.json.decode(answer, type=BulkOutcome)
    is_refused = outcome.is_refused and not outcome.is_done
    assert (outcome.is_done, is_refused) == (what == "done", what == "refused")


def test_a_refusal_gives_the_servers_reason_and_its_cause() -> None:
    why = msgspec.json.decode(TOO_LONG, type=BulkOutcome).why
    assert "time_limit_s" in why
    assert "out of range of long" in why


@given(st.text(max_size=5000))
def test_what_a_server_says_is_one_printable_line(text: str) -> None:
    line = clean_text(text)
    assert line.isprintable()
    assert len(line) <= 300


class Canned(SearchClient):
    """Server that replies as recorded."""

    def __init__(self, *replies: ServerReply) -> None:
        super().__init__(ElasticsearchSinkSettings(urls=("https://search1:9200",)))
        self.replies = list(replies)
        self.bodies: list[bytes] = []

    def request(
        self, method: str, target_path: str, body: bytes | None = None, media_type: str = ""
    ) -> ServerReply:
        self.bodies.append(body or b"")
        return self.replies.pop(0)


def bulk_of(*answers: bytes) -> ServerReply:
    return ServerReply(
        200, b'{"items":[' + b",".join(b'{"index":%b}' % of for of in answers) + b"]}"
    )


def operations(count: int, at_ns: int = 1) -> list[BulkOperation]:
    return [
        index_operation(
            ArchivedDocument(cluster="c", key=f"script:{n}:{at_ns}", version=1), "x-1970.01", b"{}"
        )
        for n in range(count)
    ]


def test_the_bad_one_of_a_request_is_told_and_the_others_are_not() -> None:
    client = Canned(bulk_of(b'{"status":201}', TOO_LONG, CONFLICT))
    refused = list(BulkSender(client, RequestPacer(10**6)).send(operations(3)))
    assert [of.document.job_id for of in refused] == [1]
    assert refused[0].why.startswith(
        "Elasticsearch rejects the document: document_parsing_exception"
    )


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (bulk_of(b'{"status":201}', PRESSURE, TOO_LONG), "is overloaded"),
        (bulk_of(b'{"status":201}', SHARDS, TOO_LONG), "cluster.max_shards_per_node"),
        (bulk_of(FLOODED, FLOODED, FLOODED), "disks are full"),
        (bulk_of(CLUSTER, BLOCKED, TOO_LONG), "disks are full"),
        (bulk_of(NO_INDEX, NO_INDEX, NO_INDEX), "action.auto_create_index"),
        (bulk_of(b'{"status":201}'), "replied for 1 of 3 documents"),
        (ServerReply(429, PRESSURE), "is overloaded"),
        (ServerReply(200, b"<html>"), "does not answer as Elasticsearch does"),
        (ServerReply(502, b"<html>Bad\x1b[31m Gateway</html>"), "502, <html>Bad"),
        (ServerReply(401, b""), "set 'password_file' and 'user'"),
        (ServerReply(403, b'{"error":"no"}'), "grant the user 'manage' on steward-jobs-*"),
    ],
)
def test_what_has_to_be_sent_again_says_why(reply: ServerReply, what: str) -> None:
    client = Canned(reply)
    with pytest.raises(ArchiveUnavailable) as caught:
        list(BulkSender(client, RequestPacer(10**6)).send(operations(3)))
    assert what in str(caught.value)
    assert str(caught.value).isprintable()


def test_too_large_a_request_is_halved_until_one_document_is_too_large_alone() -> None:
    fine, large = bulk_of(b'{"status":201}'), ServerReply(413, b"")
    client = Canned(large, fine, large, large, fine)
    pace = RequestPacer(10**6)
    refused = list(BulkSender(client, pace).send(operations(3)))
    assert [of.document.job_id for of in refused] == [1]
    assert "http.max_content_length" in refused[0].why
    assert pace.limit_bytes < 10**6


@pytest.mark.parametrize("answer", [BLOCKED, READ_ONLY, CLOSED])
def test_a_past_month_that_is_shut_is_set_aside_and_the_present_one_is_waited_for(
    answer: bytes,
) -> None:
    done = b'{"status":201}'
    refused = list(
        BulkSender(Canned(bulk_of(done, answer, done)), RequestPacer(10**6)).send(operations(3))
    )
    assert [of.document.job_id for of in refused] == [1]
    assert "open it, then run 'steward journal retry archive.NAME'" in refused[0].why
    present = BulkSender(Canned(bulk_of(done, answer, done)), RequestPacer(10**6))
    with pytest.raises(ArchiveUnavailable, match="open it, and archiving continues"):
        list(present.send(operations(3, time.time_ns())))


def test_a_purge_wins_over_a_later_version() -> None:
    there = ServerReply(200, b'{"docs":[{"_id":"c/0:1","_version":9,"found":true}]}')
    client = Canned(bulk_of(CONFLICT), there, bulk_of(b'{"status":200}'))
    document = ArchivedDocument(cluster="c", key="script:0:1", version=5, deleted=True)
    assert (
        list(
            BulkSender(client, RequestPacer(10**6)).send([delete_operation(document, "x-1970.01")])
        )
        == []
    )
    versions = [msgspec.json.decode(body)["delete"]["version"] for body in client.bodies[::2]]
    assert versions == [5, 9]


def test_a_purge_that_stays_without_effect_does_not_count_as_done() -> None:
    there = ServerReply(200, b'{"docs":[{"_id":"c/0:1","_version":5,"found":true}]}')
    document = ArchivedDocument(cluster="c", key="script:0:1", version=5, deleted=True)
    with pytest.raises(ArchiveUnavailable, match="does not delete"):
        list(
            BulkSender(Canned(bulk_of(CONFLICT), there), RequestPacer(1)).send(
                [delete_operation(document, "x-1970.01")]
            )
        )


def test_a_document_for_which_there_is_never_room_is_set_aside_in_the_end() -> None:
    for reply in (ServerReply(429, PRESSURE), bulk_of(PRESSURE)):
        bulk = BulkSender(Canned(*[reply] * 12), RequestPacer(10**6))
        for _ in range(5):
            with pytest.raises(ArchiveUnavailable, match="is overloaded"):
                list(bulk.send(operations(1)))
        (refused,) = bulk.send(operations(1))
        assert "indexing_pressure.memory.limit" in refused.why


def test_a_server_that_is_busy_in_between_is_waited_for() -> None:
    done = bulk_of(b'{"status":201}')
    bulk = BulkSender(Canned(*[*[ServerReply(429, PRESSURE)] * 4, done] * 5), RequestPacer(10**6))
    for _ in range(5):
        for _ in range(2):
            with pytest.raises(ArchiveUnavailable):
                list(bulk.send(operations(1)))
        assert list(bulk.send(operations(1))) == []


def test_the_pace_is_halved_and_grows_again() -> None:
    pace = RequestPacer(8 << 20)
    for _ in range(50):
        pace.halve_limit()
    assert pace.limit_bytes == 64 * 1024
    for _ in range(50):
        pace.raise_limit()
    assert pace.limit_bytes == 8 << 20
    pace.lower_bound(10_000)
    pace.halve_limit()
    pace.raise_limit()
    assert pace.limit_bytes == 10_000


@given(st.binary(max_size=200), st.integers(100, 599))
def test_no_answer_is_more_than_an_error(body: bytes, status: int) -> None:
    assert str(unavailable_error(Canned(), ServerReply(status, body))).isprintable()
    try:
        msgspec.json.decode(body, type=BulkReply)
    except (msgspec.MsgspecError, UnicodeError):
        with pytest.raises(ArchiveUnavailable):
            list(BulkSender(Canned(ServerReply(200, body)), RequestPacer(1)).send(operations(1)))


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "ca_file"),
        ("[SSL: WRONG_VERSION_NUMBER]", "http://"),
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]", "certificate_file"),
        ("odd", "check ca_file"),
    ],
)
def test_a_failed_handshake_says_what_to_look_at(what: str, advice: str) -> None:
    assert advice in str(tls_error("https://s:9200", what))
