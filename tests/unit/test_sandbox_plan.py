"""Users of the sandbox have unique ids and shadow no user of the host by accident."""

import os
import pwd
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.sandbox import SandboxError, plan
from steward.sandbox.plan import (
    SLURM_UID,
    format_group,
    format_hosts,
    format_passwd,
    get_calling_user,
    get_slurm_user,
)


def test_ids_are_nobody_elses() -> None:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    chosen = plan.make_users(("ada", "bela", "carl"), "/srv/home")
    assert len({user.uid for user in chosen}) == 3
    assert not taken & {user.uid for user in chosen}
    assert chosen[0].home == "/srv/home/ada"


@given(st.text(max_size=40))
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    allowed = set(string.ascii_lowercase + string.digits + "_-")
    try:
        (user,) = plan.make_users((name,), "/srv/home")
    except SandboxError:
        return
    assert set(name) <= allowed
    assert user.home == f"/srv/home/{name}"


def test_passwd_and_group_come_before_the_machines() -> None:
    people = plan.make_users(("ada", "bela"), "/srv/home")
    passwd = format_passwd(people).splitlines()
    assert passwd[0] == f"ada:*:{people[0].uid}:{people[0].gid}:ada:/srv/home/ada:/bin/bash"
    assert any(line.startswith("root:") for line in passwd[2:])
    group = format_group(people, {"lab": ("ada", "bela")}).splitlines()
    assert group[2].startswith("lab:x:")
    assert group[2].endswith(":ada,bela")
    gids = [line.split(":")[2] for line in group[:3]]
    assert len(set(gids)) == 3


def test_a_user_of_the_machine_is_replaced_not_doubled() -> None:
    people = plan.make_users(("root",), "/srv/home")
    names = [line.split(":")[0] for line in format_passwd(people).splitlines()]
    assert names.count("root") == 1


def test_a_group_that_is_no_name_is_refused() -> None:
    with pytest.raises(SandboxError, match="invalid group name"):
        format_group((), {"a:b": ()})


def test_the_caller_goes_by_the_machines_name() -> None:
    assert get_calling_user().uid == os.geteuid()


def test_slurm_user_is_made_where_there_is_none() -> None:
    assert get_slurm_user("no-such-user-here").uid == SLURM_UID
    assert get_slurm_user("root").uid == 0


def test_the_host_is_the_loopback() -> None:
    assert format_hosts("box").startswith("127.0.0.1 localhost box\n")
