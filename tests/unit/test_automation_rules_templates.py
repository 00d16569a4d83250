"""Templates are rendered once, in a sandbox, and never render payloads."""

import contextlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steward.automation.rules.criteria import TimeLimitExceeded, limit_run_time
from steward.automation.rules.templates import (
    RenderError,
    find_template_error,
    is_template,
    render_value,
)

PAYLOAD = {
    "node": "n1",
    "partitions": ["debug", "gpu"],
    "failures_1d": 3,
    "failed": True,
    "reason_uid": None,
    "items": "mine",
    "reason": "{{ 7 * 7 }}",
}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("plain", "plain"),
        ("{{ trigger.node }}", "n1"),
        ("{{- trigger['node'] -}}", "n1"),
        ("{{ trigger.partitions }}", ["debug", "gpu"]),
        ("{{ trigger.partitions | join(',') }}", "debug,gpu"),
        ("{{ trigger.partitions | map('upper') }}", ["DEBUG", "GPU"]),
        ("{{ trigger.failures_1d }}", 3),
        ("{{ trigger.failed }}", True),
        ("{{ trigger.reason_uid }}", None),
        ("{{ trigger.reason_uid | use_none }}", None),
        ("{{ trigger.node }}:{{ trigger.failures_1d }}", "n1:3"),
        ("{% if trigger.failures_1d > 2 %}often{% endif %}", "often"),
        ("{{ trigger.items }}", "mine"),
        ("{{ trigger.nothing | default('x') }}", "x"),
        ("{{ trigger.node | regex_replace('[0-9]', '#') }}", "n#"),
        ("{{ trigger.partitions | to_json_string }}", '["debug","gpu"]'),
        ("{{ trigger.reason }}", "{{ 7 * 7 }}"),
        ("why: {{ trigger.reason }}", "why: {{ 7 * 7 }}"),
        ("{{ '{{ trigger.node }}' }}", "{{ trigger.node }}"),
    ],
)
def test_values_are_native(template: str, value: Any) -> None:
    assert find_template_error(template) is None
    assert render_value(template, PAYLOAD) == value


@given(PLAIN)
@example("{{ trigger.b }}")
@example({"__class__": "{% for x in range(3) %}a{% endfor %}"})
def test_what_a_payload_holds_comes_out_as_it_is(value: Any) -> None:
    assert render_value(
        {"a": "{{ trigger.x }}", "b": ["{{ trigger.x }}"]}, {"x": value, "b": 1}
    ) == {
        "a": value,
        "b": [value],
    }


@given(st.text())
def test_text_in_text_comes_out_as_it_is(text: str) -> None:
    assert render_value("<{{ trigger.x }}>", {"x": text}) == f"<{text}>"


@given(st.text())
def test_any_text_is_a_template_or_a_problem(text: str) -> None:
    if is_template(text) and find_template_error(text) is None:
        with contextlib.suppress(RenderError):
            render_value(text, PAYLOAD)


@pytest.mark.parametrize(
    "template",
    [
        "{{ trigger.nothing }}",
        "{{ trigger.keys }}",
        "{{ trigger.__class__ }}",
        "{{ trigger.node.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ trigger.partitions.append('x') }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ range(100000000) }}",
        "{{ 1 / 0 }}",
        "{% for x in range(99999) %}aaaaaaaaaa{% endfor %}",
        "{{ range }}",
    ],
)
def test_what_cannot_or_must_not_be_rendered(template: str) -> None:
    with pytest.raises(RenderError):
        render_value(template, PAYLOAD)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ st2kv.system.x }}", "unknown name 'st2kv'"),
        ("{{ trigger.node", "cannot parse the template"),
        ("{% include '/etc/passwd' %}", "cannot include others"),
        ("{{ trigger.node | no_such_filter }}", "cannot parse the template"),
    ],
)
def test_what_is_wrong_is_told_before_anything_happens(template: str, message: str) -> None:
    assert message in (find_template_error(template) or "")


def test_a_template_that_never_ends_is_ended() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TimeLimitExceeded), limit_run_time(0.05, "it"):
        render_value(loops, PAYLOAD)
