import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm import includes_task
from steward.slurm.arrays import count_tasks, includes_any_task, remove_tasks


@pytest.mark.parametrize(
    ("expression", "tasks"),
    [
        ("1-9%2", range(1, 10)),
        ("0,3,5-7", [0, 3, 5, 6, 7]),
        ("0-10:5", [0, 5, 10]),
        ("1-9:2,12%4", [1, 3, 5, 7, 9, 12]),
        ("4", [4]),
        ("", []),
        ("N/A", []),
    ],
)
def test_tasks_of_an_expression(expression: str, tasks: list[int]) -> None:
    assert [task for task in range(20) if includes_task(expression, task)] == list(tasks)


def test_what_was_cut_off_may_be_anything() -> None:
    assert includes_task("1,3,5,...", 4711)


@given(
    st.one_of(
        st.text(),
        st.lists(
            st.from_regex(r"\A[0-9]{1,2}(-[0-9]{1,2}(:[0-9])?)?\Z"), min_size=1, max_size=4
        ).map(",".join),
        st.just("1,..."),
    ),
    st.frozensets(st.integers(0, 120), max_size=40),
)
def test_one_of_many_tasks_is_held_where_any_is(expression: str, tasks: frozenset[int]) -> None:
    assert includes_any_task(expression, tasks) == any(
        includes_task(expression, task) for task in tasks
    )


@given(st.text(), st.integers(0, 10**7))
def test_text_without_a_number_covers_no_task(expression: str, task: int) -> None:
    has_number = any(character in "0123456789" for character in expression)
    assert not includes_task(expression, task) or has_number or "..." in expression


PARTS = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5)).map(
    lambda part: f"{part[0]}-{part[0] + part[1]}:{part[2]}"
)


@given(part=PARTS, gone=st.sets(st.integers(0, 45)))
def test_an_expression_without_some_of_its_tasks(part: str, gone: set[int]) -> None:
    left = remove_tasks(f"{part}%3", gone)
    tasks = [task for task in range(45) if includes_task(part, task) and task not in gone]
    assert [task for task in range(45) if includes_task(left, task)] == tasks
    assert count_tasks(left) == len(tasks)
