import struct

from hypothesis import given
from hypothesis import strategies as st

from harness.spool import environment_bytes
from steward.core.config import RedactSettings
from steward.core.redaction import REDACTED, Redactor
from steward.slurm.environment import MISCOUNTED, TRUNCATED, read_environment, split_entries

REDACTOR = Redactor(RedactSettings())


def test_a_heterogeneous_environment_keeps_every_byte() -> None:
    raw = environment_bytes(
        b"MULTI=a\nb=c\n", b"EQ==x=", b"BYTES=\xff\xfe", b"BASH_FUNC_f%%=() { :\n}"
    )
    environment = read_environment(raw, REDACTOR)
    assert environment.data == raw
    assert environment.flags == ()
    assert split_entries(raw)[0] == (b"MULTI", b"a\nb=c\n")
    assert split_entries(raw)[1] == (b"EQ", b"=x=")


def test_an_empty_environment_is_legal() -> None:
    assert read_environment(struct.pack("=I", 0), REDACTOR).flags == ()


def test_a_file_cut_short_is_kept_and_flagged() -> None:
    raw = environment_bytes(b"A=1", b"B=2")[:-2]
    environment = read_environment(raw, REDACTOR)
    assert environment.data == raw
    assert environment.flags == (TRUNCATED,)


def test_a_wrong_count_is_kept_and_flagged() -> None:
    raw = environment_bytes(b"A=1", count=7)
    assert read_environment(raw, REDACTOR).flags == (MISCOUNTED,)
    assert read_environment(raw, REDACTOR).data == raw


def test_a_secret_cut_short_is_redacted_all_the_same() -> None:
    raw = environment_bytes(b"A=1", b"TOKEN=hunter2")[:-1]
    environment = read_environment(raw, REDACTOR)
    assert b"hunter2" not in environment.data
    assert environment.redacted == ("TOKEN",)


def test_claims_are_told() -> None:
    raw = environment_bytes(
        b"SLURM_JOB_NAME=a b", b"XSLURM_SUBMIT_DIR=/no", b"SLURM_SUBMIT_DIR=/scratch"
    )
    environment = read_environment(raw, REDACTOR)
    assert (environment.name, environment.directory, environment.host) == ("a b", "/scratch", "")


def test_a_redacted_claim_is_no_claim() -> None:
    raw = environment_bytes(b"SLURM_JOB_NAME=https://a:secret@host/")
    environment = read_environment(raw, REDACTOR)
    assert environment.name == ""
    assert REDACTED in environment.data


@given(st.binary(max_size=400))
def test_no_bytes_make_it_fail(raw: bytes) -> None:
    environment = read_environment(raw, REDACTOR)
    assert len(raw) < 4 or environment.redacted or environment.data == raw


def test_names_of_any_number_and_length_make_no_large_event() -> None:
    entries = [b"TOKEN%d%s=1" % (number, b"x" * 5000) for number in range(2000)]
    environment = read_environment(environment_bytes(*entries), REDACTOR)
    assert environment.data.count(REDACTED) == 2000
    assert len(environment.redacted) == 500
    assert sum(map(len, environment.redacted)) <= 500 * 120
