from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.errors import LayoutError
from steward.archive.files.layout import PathSubject, compile_layout

# 2026-01-01 03:30 UTC: still last year in New York.
NEW_YEAR = int(datetime(2026, 1, 1, 3, 30, tzinfo=UTC).timestamp()) * 10**9


def subject(**fields: object) -> PathSubject:
    values: dict[str, object] = {
        "cluster": "alpha",
        "job_id": 1234567,
        "spool_mtime_ns": NEW_YEAR,
        "name": "run",
        "user_directory": "ada",
    }
    return PathSubject(**{**values, **fields})  # type: ignore[arg-type] # mixed values


@pytest.mark.parametrize(
    ("layout", "directory", "stem"),
    [
        ("default", "alpha/ada/2026/01/01", "1234567-run"),
        ("job_archive", "ada/2026/01", "1234567-run"),
        ("sarchive", "2026", "job.1234567_"),
        ("sarchive-monthly", "202601", "job.1234567_"),
        ("sarchive-daily", "20260101", "job.1234567_"),
        ("sarchive-flat", "", "job.1234567_"),
        ("sliced", "alpha/67/45", "1234567"),
        ("{user}/{job_id}", "ada", "1234567"),
        ("all/{account}/{partition}/{job_id}-{name}", "all/none/none", "1234567-run"),
    ],
)
def test_where_a_script_lies(layout: str, directory: str, stem: str) -> None:
    place = compile_layout(layout).make_place(subject(), "UTC")
    assert (place.directory, place.stem) == (directory, stem)


def test_dates_are_the_clusters() -> None:
    layout = compile_layout("default")
    assert layout.make_place(subject(), "America/New_York").directory == "alpha/ada/2025/12/31"
    assert layout.make_place(subject(), "Asia/Kathmandu").directory == "alpha/ada/2026/01/01"


def test_a_job_without_a_name_has_no_dash() -> None:
    assert compile_layout("default").make_place(subject(name=""), "UTC").stem == "1234567"


def test_unknown_jobs_lie_apart() -> None:
    place = compile_layout("default").make_unverified_place(subject(name="a/b"), "UTC")
    assert place.directory == "unverified/alpha/2026/01/01"
    assert place.stem == "1234567-a%2Fb"


@pytest.mark.parametrize("layout", ["default", "{cluster}/{job_id}-{name}"])
def test_names_are_encoded_in_our_layouts(layout: str) -> None:
    place = compile_layout(layout).make_place(subject(name="$(x) 'y'%z", cluster="a b"), "UTC")
    assert place.stem == "1234567-%24%28x%29%20%27y%27%25z"
    assert place.directory.startswith("a%20b")


def test_names_stay_in_the_layouts_of_others() -> None:
    name = "a b $x 'y' `z` ; é"
    layout = compile_layout("job_archive")
    assert layout.make_place(subject(name=name), "UTC").stem == f"1234567-{name}"
    assert layout.make_unverified_place(subject(name=name), "UTC").stem == f"1234567-{name}"


@given(st.text(max_size=300))
def test_a_files_name_has_255_bytes_at_most(name: str) -> None:
    for layout in map(compile_layout, ("default", "job_archive", "sarchive", "{job_id}-{name}")):
        stem = layout.make_place(subject(name=name), "UTC").stem
        for suffix in layout.suffixes:
            assert len(f"{stem}~99{suffix}.zst".encode()) <= 255


@given(st.text(max_size=300), st.text(max_size=300))
def test_no_name_leaves_its_place(name: str, cluster: str) -> None:
    layout = compile_layout("{cluster}/{name}x{name}/{job_id}-{name}")
    place = layout.make_place(subject(name=name, cluster=cluster), "UTC")
    parts = place.directory.split("/")
    assert len(parts) == 2
    assert all(part not in {"", ".", ".."} and len(part.encode()) <= 255 for part in parts)
    assert "/" not in place.stem
    assert len(place.stem.encode()) <= 245


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("defualt", "sarchive"),
        ("{user}/{jobid}", "{jobid}"),
        ("{job_id}/{name}", "file name"),
        ("../{job_id}", "'..'"),
        ("a//{job_id}", "''"),
        ("/{job_id}", "''"),
        ("{user/{job_id}", "brace"),
        ("unverified/{job_id}", "unverified"),
        ("a~2/{job_id}", "unsafe"),
        ("a\n/{job_id}", "unsafe"),
    ],
)
def test_a_bad_layout_is_told(text: str, names: str) -> None:
    with pytest.raises(LayoutError, match=r".") as caught:
        compile_layout(text)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_period_and_a_bad_zone_are_told() -> None:
    with pytest.raises(LayoutError, match="hourly"):
        compile_layout("sarchive-hourly")
    with pytest.raises(LayoutError, match="Mars"):
        compile_layout("default").make_place(subject(), "Mars/Olympus")


def test_what_a_layout_needs() -> None:
    assert compile_layout("default").needs_identity
    assert compile_layout("default").user_depth == 2
    assert compile_layout("job_archive").user_depth == 1
    assert not compile_layout("sarchive").needs_identity
    assert not compile_layout("sliced").has_manifests
    assert compile_layout("{year}/{user}/{job_id}").user_depth == 2
    assert compile_layout("default").get_owner_scope("alpha") == "alpha"
    assert compile_layout("job_archive").get_owner_scope("alpha") == ""


@pytest.mark.parametrize("length", [85, 200, 960])
def test_a_long_name_is_shortened_and_stays_unlike_others(length: int) -> None:
    layout = compile_layout("{job_id}-{name}{name}{name}")
    stems = {
        layout.make_place(subject(name="n" * length + end), "UTC").stem for end in ("", "a", "b")
    }
    assert len(stems) == 3
    assert all(stem.startswith("1234567-nnn") and len(stem) <= 245 for stem in stems)
