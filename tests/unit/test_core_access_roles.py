"""Roles file between the process that queries Slurm and those that decide."""

import os
import stat
import time
from pathlib import Path

import pytest

from steward.capture.associations import AssociationsPoller
from steward.core.access import MAX_ROLES_AGE_S, ClusterRoles, ClusterRolesFiles
from steward.core.errors import StewardError, Unavailable

SOME = ClusterRoles(
    private_data=frozenset({"jobs"}),
    admins=frozenset({"ada"}),
    coordinators={"physics": frozenset({"bela", "carl"})},
)


def test_what_is_kept_is_found_again_by_its_cluster_alone(tmp_path: Path) -> None:
    ClusterRolesFiles(str(tmp_path)).put("one", SOME)
    assert ClusterRolesFiles(str(tmp_path)).get("one") == SOME
    assert ClusterRolesFiles(str(tmp_path)).get("two") is None


def test_the_file_is_ours_alone(tmp_path: Path) -> None:
    ClusterRolesFiles(str(tmp_path)).put("one", SOME)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_too_old_grants_nothing(tmp_path: Path) -> None:
    standings = ClusterRolesFiles(str(tmp_path))
    standings.put("one", SOME)
    (path,) = tmp_path.iterdir()
    long_ago = time.time() - MAX_ROLES_AGE_S - 60
    os.utime(path, (long_ago, long_ago))
    assert standings.get("one") is None


def test_a_damaged_file_grants_nothing(tmp_path: Path) -> None:
    standings = ClusterRolesFiles(str(tmp_path))
    standings.put("one", SOME)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b'{"admins":["eve"')
    assert standings.get("one") is None


def test_no_name_leads_out_of_the_directory(tmp_path: Path) -> None:
    with pytest.raises(StewardError):
        ClusterRolesFiles(str(tmp_path / "state")).put("../x", SOME)
    assert ClusterRolesFiles(str(tmp_path)).get("../x") is None


def test_the_source_asks_again_later_where_slurm_is_away(tmp_path: Path) -> None:
    answers: list[ClusterRoles | Exception] = [SOME, Unavailable("away"), Unavailable("away"), SOME]

    def ask() -> ClusterRoles:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    standings = ClusterRolesFiles(str(tmp_path))
    source = AssociationsPoller("one", ask, standings)
    usual_s = source.tick(lambda events: None)
    assert standings.get("one") == SOME
    first_s = source.tick(lambda events: None)
    assert source.tick(lambda events: None) > first_s
    assert standings.get("one") == SOME
    assert source.tick(lambda events: None) == usual_s
