import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.config import RedactSettings
from steward.errors import UsageError
from steward.records import JobRecord
from steward.redact import REDACTED, Redactor

REDACTOR = Redactor(RedactSettings())


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (b"SLURM_EXPORT_ENV=ALL,API_TOKEN=hush", True),
        (b"JAVA_OPTS=-Xmx4g -Ddb.password=hush", True),
        (b"DSN=host=db user=ada password='hush'", True),
        (b"SLURM_EXPORT_ENV=ALL,THREADS=4", False),
        (b"SLURM_EXPORT_ENV=API_TOKEN=", False),
        (b"BASH_FUNC_login%%=() {  token=$(ask)\n}", False),
    ],
)
def test_a_value_that_gives_one_to_a_secret_name_goes(entry: bytes, told: bool) -> None:
    name = entry.partition(b"=")[0]
    assert REDACTOR.entries(entry).data == (name + b"=" + REDACTED if told else entry)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("sbatch --export=ALL,API_TOKEN=hush,B=1 a.sh", "sbatch --export=ALL,API_TOKEN=X,B=1 a.sh"),
        ("sbatch --export=API_TOKEN=hush hush -p x a.sh", "sbatch --export=API_TOKEN=X -p x a.sh"),
        ("run.sh --api-key hush in.txt", "run.sh --api-key X in.txt"),
        ("run.sh --password=hush", "run.sh --password=X"),
        ("qsub -v A=1,API_TOKEN:p=hush,B=1 j", "qsub -v A=1,API_TOKEN:p=X,B=1 j"),
        ("qsub -v 9API_TOKEN@p=hush,B=1 j", "qsub -v 9API_TOKEN@p=X,B=1 j"),
        ("qsub -v A=1,x/AWS_ID=hush,B=1 j", "qsub -v A=1,x/AWS_ID=X,B=1 j"),
        ("qsub -v 'A=1,MY_PASSWORD/db[0]~=hush' j", "qsub -v 'A=1,MY_PASSWORD/db[0]~=X"),
        ("wget https://x/token?a=1 y", "wget https://x/token?a=1 y"),
        ("wget https://ada:hush@example.org/x", "wget httpsXexample.org/x"),
        ("wget https://ada:p@hush@example.org/x", "wget httpsXexample.org/x"),
        ("git clone https://0123456789abcdefhush@example.org/x", "git clone httpsXexample.org/x"),
        ("curl https://hooks.slack.com/services/T0/B0/hush -d x", "curl https://X -d x"),
        (
            "azcopy https://x/c?sv=1&sig=hushhushhushhush%3D&se=2 y",
            "azcopy https://x/c?sv=1&X&se=2 y",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\nhush\n-----END", "X"),
        ("sbatch --array=1-3 -A physics a.sh", "sbatch --array=1-3 -A physics a.sh"),
        ("run.sh --token --verbose yes", "run.sh --token --verbose yes"),
    ],
)
def test_what_users_write_into_a_record_loses_its_secrets(text: str, kept: str) -> None:
    record = JobRecord(job_id=1, submit_line=text, command=text, comment=text, name=text)
    wanted = kept.replace("X", REDACTED.decode())
    assert REDACTOR.record(record) == JobRecord(
        job_id=1, submit_line=wanted, command=wanted, comment=wanted, name=text
    )


@given(st.text())
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    quiet = Redactor(RedactSettings(names=(), values=()))
    assert quiet.text(text) == text
    assert "hush" not in REDACTOR.text(text.replace("hush", "") + " MY_TOKEN=hush")


@pytest.mark.parametrize(
    "name",
    [
        "API_TOKEN", "github_token", "MY_SECRET", "PGPASSWORD", "MYSQL_PASS", "DB_PASSWD",
        "GOOGLE_CREDENTIALS", "OPENAI_API_KEY", "APIKEY", "SSH_KEY", "SLURM_JWT",
        "AWS_SESSION", "AWS_ACCESS_KEY_ID", "MYSQL_PWD", "LDAP_PW", "api-key",
        "PASSED_TOKEN", "DBPASS_ED", "DB_PASSEDWORD", "PASSESPHRASE", "PASSIVEDB", "PASSENVX",
    ],
)  # fmt: skip
def test_names_that_hold_secrets_lose_their_value(name: str) -> None:
    entry = name.encode() + b"=hunter2=\nsecond line"
    result = REDACTOR.entries(b"A=1\0" + entry + b"\0B=2\0")
    assert result.data == b"A=1\0" + name.encode() + b"=" + REDACTED + b"\0B=2\0"
    assert result.names == (name,)


@pytest.mark.parametrize(
    "value",
    [
        b"https://ada:hunter2@example.org/simple",
        b"postgres://ada:hun/ter2@example.org/db",
        b'{"user": "ada", "password": "hunter2"}',
        b"{'auths': {'x': {'auth': 'aHVudGVyMg'}}}",
        b"user: ada\npassword: hunter2\n",
        b"Authorization: Bearer hunter2hunter2",
        b"AccountName=x;AccountKey=hunter2",
        b"() {  export API_TOKEN=hunter2\n}",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
        b"ghp_" + b"a" * 36,
        b"glpat-" + b"b" * 20,
        b"https://0123456789abcdef0123456789abcdef01234567@example.org/ada/x.git",
        b"https://0123456789abcdef0123456789abcdef01234567:@example.org/ada/x.git",
        b"https://hooks.slack.com/services/T0A1B2C3D/B0A1B2C3D/hunter2hunter2",
        b"https://x.example.org/c?sv=2024-08-04&sig=hunter2hunter2%2Fhunter2hunter2%3D",
        b'{"url": "https://x.example.org/c?sv=1\\u0026sig=hunter2hunter2hunter2"}',
        b"sig=hunter2/hunter2+hunter2=&se=2026",
        b"AKIA" + b"Q" * 16,
        b"xoxb-1234567890-abc",
        b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig",
        b"x-" + b"y" * 100 + b"://ada:hunter2@example.org/",
        b"://".join([b"x"] * 50) + b"y://ada:hunter2@example.org/",
    ],
)
def test_values_that_are_secrets_go_whatever_their_name(value: bytes) -> None:
    result = REDACTOR.entries(b"SOMETHING=" + value + b"\0")
    assert result.data == b"SOMETHING=" + REDACTED + b"\0"


@pytest.mark.parametrize(
    "entry",
    [
        b"PATH=/usr/bin:/bin", b"PASSENGERS=4", b"KEYBOARD=de",
        b"DB_PASSED=3", b"PASSES=4", b"PASSIVE_MODE=1", b"PASSENGER_COUNT=2", b"PASSAGES=1",
        b"REPO=ssh://git@example.org/a-long-path-without-any-secret@v2",
        b"ASK=https://example.org?mail=someone@example.org", b"X=sig=short",
        b"DOCS=https://docs.example.org/hooks.slack.com/services",
        b"URL=https://example.org/a:b", b"EMPTY_TOKEN=", b"MONKEY=1", b"OLDPWD=/home/ada",
        b"PROXY=http://example.org:8080/x@2", b"SSH_KEYS=a:b", b"MOUNTS=/etc/token:/token:ro",
    ],
)  # fmt: skip
def test_harmless_entries_stay(entry: bytes) -> None:
    assert REDACTOR.entries(entry + b"\0").data == entry + b"\0"


def test_a_cached_entry_is_redacted_again() -> None:
    block = b"TOKEN=abc\0"
    assert REDACTOR.entries(block) == REDACTOR.entries(block)
    assert b"abc" not in REDACTOR.entries(block).data


def test_the_site_may_add_replace_and_except() -> None:
    redactor = Redactor(
        RedactSettings(names=("^LICENCE$",), more_values=("tiger[0-9]",), keep=("MY_TOKEN",))
    )
    block = b"LICENCE=a\0X=tiger7\0TOKEN=b\0MY_TOKEN=tiger7\0"
    assert redactor.entries(block).names == ("LICENCE", "X")


def test_no_patterns_redact_nothing() -> None:
    block = b"TOKEN=abc\0"
    assert Redactor(RedactSettings(names=(), values=())).entries(block).data == block


def test_a_bad_pattern_names_itself() -> None:
    with pytest.raises(UsageError, match=r"\[redact\] names: '\(' is no regular expression"):
        Redactor(RedactSettings(more_names=("(",)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"A_TOKEN", b"SECRET", b"x_password", b"PLAIN", b"\xff"]),
            st.binary(min_size=6).map(lambda value: value.replace(b"\0", b"")),
        )
    )
)
def test_no_byte_string_of_a_secret_survives(pairs: list[tuple[bytes, bytes]]) -> None:
    entries = [name + b"=" + value for name, value in pairs]
    result = REDACTOR.entries(b"".join(entry + b"\0" for entry in entries))
    kept = result.data.split(b"\0")
    assert len(kept) == len(entries) + 1
    for (name, value), entry in zip(pairs, kept, strict=False):
        if value and name not in (b"PLAIN", b"\xff"):
            assert entry == name + b"=" + REDACTED


def test_secrets_in_scripts_are_found_without_telling_them() -> None:
    script = (
        b"#!/bin/sh\nexport DB_PASSWORD=hunter2\nTOKEN=$(cat ~/token)\n"
        b"curl -H 'Authorization: x' https://ada:pw1234@example.org/\nSECRET_FILE=/etc/x\n"
    )
    findings = list(REDACTOR.find_secrets(script))
    assert [(finding.line, finding.what) for finding in findings] == [
        (2, "DB_PASSWORD"),
        (4, "a token, private key or URL with a password"),
    ]
