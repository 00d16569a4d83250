import os
import re

from hypothesis import given
from hypothesis import strategies as st

from steward.archive.files.layout import (
    MAX_ENCODED_NAME_BYTES,
    decode_name,
    encode_name,
    encode_user,
    shorten_component,
)

surrogates = st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)
names = st.text(st.one_of(st.characters(), surrogates, st.sampled_from("/.-%~\0\n\x1b ")))


@given(names)
def test_no_shell_reads_anything_into_an_encoded_name(name: str) -> None:
    for encoded in (encode_name(name), encode_user(name)):
        assert re.fullmatch(r"(?:(?![.-])[A-Za-z0-9._+%~-]+)?", encoded, re.ASCII), encoded
        assert len(encoded) <= MAX_ENCODED_NAME_BYTES + 2


@given(names)
def test_an_encoded_name_is_one_safe_component(name: str) -> None:
    encoded = encode_name(name, is_plain=True)
    assert "/" not in encoded
    assert "~" not in encoded or len(encoded.encode()) > MAX_ENCODED_NAME_BYTES - 60
    assert encoded == "" or encoded.isprintable()
    assert not encoded.startswith((".", "-", " "))
    assert encoded != "unverified"
    assert len(os.fsencode(encoded)) <= MAX_ENCODED_NAME_BYTES


@given(names, names)
def test_two_names_never_become_one(one: str, other: str) -> None:
    if one != other:
        for is_plain in (False, True):
            assert encode_name(one, is_plain=is_plain) != encode_name(other, is_plain=is_plain)
            assert encode_user(one, is_plain=is_plain) != encode_user(other, is_plain=is_plain)


@given(st.text(st.characters(), max_size=60))
def test_a_short_name_comes_back(name: str) -> None:
    encoded = encode_name(name)
    plain = encode_name(name, is_plain=True)
    if "~" not in plain and not any("\ud800" <= c <= "\udfff" for c in name):
        assert decode_name(plain) == name
    if "~" not in encoded and not any("\ud800" <= c <= "\udfff" for c in name):
        assert decode_name(encoded) == name


def test_bytes_that_are_not_utf8_come_back() -> None:
    name = os.fsdecode(b"caf\xe9/\xff")
    assert encode_name(name) == "caf%E9%2F%FF"
    assert decode_name("caf%E9%2F%FF") == name


def test_plain_names_stay() -> None:
    for name in ("gromacs", "run_1.2", "a+b-c"):
        assert encode_name(name) == name
    for name in ("gromacs", "run_1.2", "a+b=c", "job:7", "été", "a b", "$x", "'`;"):
        assert encode_name(name, is_plain=True) == name
    assert encode_name("a b'`;$x%\"~é") == "a%20b%27%60%3B%24x%25%22%7E%C3%A9"


def test_a_user_of_digits_is_no_uid() -> None:
    assert encode_user("1000") != "1000"
    assert encode_user("ada") == "ada"


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"])))
def test_a_component_always_fits(text: str) -> None:
    assert len(shorten_component(text).encode()) <= 240
