import hashlib
import random
import re
import stat
import string
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.core.config import RedactSettings, Settings
from steward.core.errors import UsageError
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED, UNCHANGED, Redactor, VerdictCache, make_redactor

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
    assert REDACTOR.redact_entries(entry).data == (name + b"=" + REDACTED if told else entry)


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
        ("run.sh --token -v 3", "run.sh --token -v 3"),
        ("run.sh --password -hunter2 in.txt", "run.sh --password X in.txt"),
        ("gpg --passphrase correct horse battery -o f", "gpg --passphrase X -o f"),
        ("sbatch --export=PASSWORD=my -secret word -N2 a", "sbatch --export=PASSWORD=X -N2 a"),
        ('{"password": "hunter2 json", "n": 4}', '{"password": "X", "n": 4}'),
        ("{'a': {'api_key': 'hush'}}", "{'a': {'api_key': 'X'}}"),
        ("password: correct horse\nnodes: 4", "password: X\nnodes: 4"),
        ("curl -H 'Authorization: Basic aHVudGVyMjpo' u", "curl -H 'Authorization: X"),
        ("curl -u ada:hunter2pw https://x", "curl -u ada:X https://x"),
        ("curl --user ada:hush https://x", "curl --user ada:X https://x"),
        ("docker run -u 1000:1000 x", "docker run -u 1000:1000 x"),
        ("docker run -u $(id -u):$(id -g) x", "docker run -u $(id -u):$(id -g) x"),
        ("mysql -h db -phunter2 books", "mysql -h db -pX books"),
        ("sbatch -pmain mysql.sh", "sbatch -pmain mysql.sh"),
        (
            "train.py --max_tokens 4096 --tokenizer bert",
            "train.py --max_tokens 4096 --tokenizer bert",
        ),
        ("stripe sk_live_0123456789abcdef", "stripe X"),
    ],
)
def test_what_users_write_into_a_record_loses_its_secrets(text: str, kept: str) -> None:
    record = JobRecord(job_id=1, submit_line=text, command=text, comment=text)
    wanted = kept.replace("X", REDACTED.decode())
    assert REDACTOR.redact_record(record) == JobRecord(
        job_id=1, submit_line=wanted, command=wanted, comment=wanted
    )


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/home/ada/token=hush77.out/slurm-%j.out", "/home/ada/token=X/slurm-%j.out"),
        ("/scratch/password: hush/x", "/scratch/password: X/x"),
        ("/data/ghp_" + "a" * 36 + "/x", "/data/X/x"),
        ("/data/max_tokens=4096/x", "/data/max_tokens=4096/x"),
    ],
)
def test_paths_lose_the_component_s_value(path: str, kept: str) -> None:
    record = JobRecord(job_id=1, work_dir=path, stdin=path, stdout=path, stderr=path)
    wanted = kept.replace("X", REDACTED.decode())
    assert REDACTOR.redact_record(record) == JobRecord(
        job_id=1, work_dir=wanted, stdin=wanted, stdout=wanted, stderr=wanted
    )


@pytest.mark.parametrize("name", ["API_TOKEN=hush", "ghp_" + "a" * 36, "password: hush"])
def test_a_redacted_name_is_a_digest_by_which_runs_group(name: str) -> None:
    redactor = Redactor(RedactSettings(), b"key")
    kept = redactor.redact_record(JobRecord(job_id=1, name=name, wckey=name))
    assert re.fullmatch(r"\[redacted by steward:[0-9a-f]{8}\]", kept.name)
    assert kept.wckey == kept.name
    assert redactor.name(name) == kept.name != redactor.name(name + "x")
    assert Redactor(RedactSettings(), b"other").name(name) != kept.name
    assert redactor.name(kept.name) == kept.name, "a redacted name stays as it is"


def real_shaped_names() -> list[str]:
    """Return ten thousand names as workflow tools, chemists and users choose them."""
    chance = random.Random()

    def word(letters: str, count: int) -> str:
        return "".join(chance.choice(letters) for _ in range(count))

    hexadecimal, alnum = "0123456789abcdef", string.ascii_letters + string.digits
    shapes: list[Callable[[], str]] = [
        lambda: str(uuid.UUID(int=chance.getrandbits(128))),
        lambda: f"snakejob.align.{chance.randrange(10**4)}.sh",
        lambda: f"{word(hexadecimal, 8)}-{word(hexadecimal, 4)}",
        lambda: word(hexadecimal, 40),
        lambda: word(hexadecimal, 64),
        lambda: f"v1.{chance.randrange(30)}-{chance.randrange(99)}-g{word(hexadecimal, 9)}",
        lambda: "".join(
            chance.choice(["C", "N", "O", "c1ccccc1", "(=O)", "[C@@H]", "[Na+]", "=", "#", "Cl"])
            for _ in range(chance.randrange(3, 30))
        ),
        lambda: f"nf-NFCORE_RNASEQ_FASTQC_({word(alnum, 6)}_rep{chance.randrange(9)})",
        lambda: f"dask-worker-{word(alnum, 8)}",
        lambda: f"lr={chance.random():.2e},bs={2 ** chance.randrange(10)},max_tokens=4096",
        lambda: f"sk-learn-grid-search-{chance.randrange(999)}",
        lambda: f"parsl.slurm.block-{chance.randrange(99)}.{chance.randrange(10**10)}",
        lambda: f"toil_job_{chance.randrange(999)}_CactusPreprocessor {word(alnum, 5)}",
        lambda: f"cromwell_{word(hexadecimal, 8)}_HaplotypeCaller",
        lambda: f"hf_finetune_llama-{chance.randrange(70)}b",
        lambda: f"T={chance.randrange(300)}K P=1bar key={chance.randrange(9)}",
        lambda: f"tokenizer:bert-{word(alnum, 4)}",
        lambda: f"passive_scalar_{chance.randrange(999)}:{word(alnum, 12)}",
    ]
    return [shapes[number % len(shapes)]() for number in range(10_000)]


def test_names_as_workflow_tools_give_them_stay() -> None:
    touched = [name for name in real_shaped_names() if REDACTOR.name(name) != name]
    assert len(touched) <= 10, touched[:20]


def test_a_site_s_key_is_made_once(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path / "state"))
    digests = {make_redactor(settings).name("API_TOKEN=hush") for _ in range(3)}
    assert len(digests) == 1
    [key] = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@given(st.text())
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    quiet = Redactor(RedactSettings(), names=(), values=())
    assert quiet.redact_text(text) == text
    assert "hush" not in REDACTOR.redact_text(text.replace("hush", "") + " MY_TOKEN=hush")


@pytest.mark.parametrize(
    "name",
    [
        "API_TOKEN", "github_token", "MY_SECRET", "PGPASSWORD", "MYSQL_PASS", "DB_PASSWD",
        "GOOGLE_CREDENTIALS", "OPENAI_API_KEY", "APIKEY", "SSH_KEY", "SLURM_JWT",
        "KEY", "PW", "AUTHORIZATION",
        "AWS_SESSION", "AWS_ACCESS_KEY_ID", "MYSQL_PWD", "LDAP_PW", "api-key",
        "PASSED_TOKEN", "DBPASS_ED", "DB_PASSEDWORD", "PASSESPHRASE", "PASSIVEDB", "PASSENVX",
    ],
)  # fmt: skip
def test_names_that_hold_secrets_lose_their_value(name: str) -> None:
    entry = name.encode() + b"=hunter2=\nsecond line"
    result = REDACTOR.redact_entries(b"A=1\0" + entry + b"\0B=2\0")
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
        b"sk_live_0123456789abcdef",
        b"ya29.abcdefghijklmnopqrstuvwx",
        b"Jk3sP9vLq2XzB7mWc5RtY8nHd4FgK1aE6uTo",
        b"x-" + b"y" * 100 + b"://ada:hunter2@example.org/",
        b"://".join([b"x"] * 50) + b"y://ada:hunter2@example.org/",
    ],
)
def test_values_that_are_secrets_go_whatever_their_name(value: bytes) -> None:
    result = REDACTOR.redact_entries(b"SOMETHING=" + value + b"\0")
    assert result.data == b"SOMETHING=" + REDACTED + b"\0"


@pytest.mark.parametrize(
    "entry",
    [
        b"PATH=/usr/bin:/bin", b"PASSENGERS=4", b"KEYBOARD=de",
        b"DB_PASSED=3", b"PASSES=4", b"PASSIVE_MODE=1", b"PASSENGER_COUNT=2", b"PASSAGES=1",
        b"REPO=ssh://git@example.org/a-long-path-without-any-secret@v2",
        b"ASK=https://example.org?mail=someone@example.org", b"X=sig=short",
        b"DOCS=https://docs.example.org/hooks.slack.com/services",
        b"ID=6f1e2a34-9c1b-4f7e-8a2d-0b1c2d3e4f5a", b"GIT=0123456789abcdef0123456789abcdef01234567",
        b"_ModuleTable001_=X01vZHVsZVRhYmxlXz17WyJNVHZlcnNpb24iXT0zLFsiY19yZWJ1aWxk",
        b"URL=https://example.org/a:b", b"EMPTY_TOKEN=", b"MONKEY=1", b"OLDPWD=/home/ada",
        b"PROXY=http://example.org:8080/x@2", b"SSH_KEYS=a:b", b"MOUNTS=/etc/token:/token:ro",
    ],
)  # fmt: skip
def test_harmless_entries_stay(entry: bytes) -> None:
    assert REDACTOR.redact_entries(entry + b"\0").data == entry + b"\0"


def test_a_cached_entry_is_redacted_again() -> None:
    block = b"TOKEN=abc\0"
    assert REDACTOR.redact_entries(block) == REDACTOR.redact_entries(block)
    assert b"abc" not in REDACTOR.redact_entries(block).data


class _CountingRedactor(Redactor):
    """Redactor that counts the names that it judges."""

    judged = 0

    def is_secret(self, name: bytes) -> bool:
        self.judged += 1
        return super().is_secret(name)


def test_an_entry_of_any_size_is_scanned_once() -> None:
    redactor = _CountingRedactor(RedactSettings())
    shared = b"".join(b"LIST%d=%s\0" % (size, b"/opt" * size) for size in (1, 200, 2000, 30_000))
    for job in range(100):
        redactor.redact_entries(b"%sSLURM_JOB_NAME=job%d\0" % (shared, job))
    assert redactor.judged == 4 + 100


def test_a_large_secret_is_redacted_again_from_the_cache() -> None:
    block = b"TOKEN=%s\0LIST=%s\0" % (b"x" * 5000, b"/opt" * 5000)
    for _ in range(2):
        assert REDACTOR.redact_entries(block).data == b"TOKEN=%s\0LIST=%s\0" % (
            REDACTED,
            b"/opt" * 5000,
        )


def test_entries_of_many_jobs_outlive_those_of_one() -> None:
    judged: list[bytes] = []

    def judge(entry: bytes) -> bytes:
        judged.append(entry)
        return UNCHANGED

    cache = VerdictCache(judge, max_bytes=100_000)
    for job in range(10_000):
        assert not list(cache.find_changes([b"PATH=/bin", b"JOB=%d" % job]))
    assert judged.count(b"PATH=/bin") == 1
    # What did not return was dropped.
    list(cache.find_changes([b"JOB=0"]))
    assert judged.count(b"JOB=0") == 2


def test_no_text_passes_for_the_digest_of_a_large_entry() -> None:
    large = b"LIST=" + b"/opt" * 5000
    keys = [large, hashlib.blake2b(large, digest_size=32).digest()]
    cache = VerdictCache(lambda entry: entry[:1])
    assert list(cache.find_changes(keys)) == [(key, key[:1]) for key in keys]


def test_the_site_may_add_replace_and_except() -> None:
    redactor = Redactor(
        RedactSettings(names=("^LICENCE$",), values=("tiger[0-9]",), keep=("MY_TOKEN",)),
        names=(),
    )
    block = b"LICENCE=a\0X=tiger7\0TOKEN=b\0MY_TOKEN=tiger7\0"
    assert redactor.redact_entries(block).names == ("LICENCE", "X")


def test_no_patterns_redact_nothing() -> None:
    block = b"TOKEN=abc\0"
    assert Redactor(RedactSettings(), names=(), values=()).redact_entries(block).data == block


def test_a_bad_pattern_names_itself() -> None:
    with pytest.raises(UsageError, match=r"\[redact\] names: invalid regular expression '\('"):
        Redactor(RedactSettings(names=("(",)))


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
    result = REDACTOR.redact_entries(b"".join(entry + b"\0" for entry in entries))
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
