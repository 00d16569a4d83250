import pwd

import pytest

from steward.slurm.users import NameResolver


def test_names_come_from_the_system() -> None:
    people = NameResolver()
    assert people.user(0) == pwd.getpwuid(0).pw_name
    assert people.group(0) == "root"


def test_ids_that_do_not_resolve_have_no_name() -> None:
    people = NameResolver()
    assert people.user(3_999_999_999) == ""
    assert people.group(3_999_999_999) == ""
    assert people.user(2**80) == ""


def test_a_name_is_looked_up_once_and_again_after_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return pwd.struct_passwd(("caf\udce9", "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", answer)
    people = NameResolver()
    assert [people.user(7), people.user(7)] == ["caf\\xe9", "caf\\xe9"]
    assert asked == [7]
    people.clear()
    people.user(7)
    assert asked == [7, 7]
