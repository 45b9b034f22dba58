"""Span breakdown: time inside spans, and the unattributed rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.analysis.spans import breakdowns, by_name, unexplained
from dutyfree.analysis.statistics import Estimate, Quantity
from dutyfree.contract import Span
from dutyfree.study.records import ActionRecord
from tests.analysis.synthetic import trial


def spent(seconds, *spans):
    return ActionRecord(label="x", kind="command", seconds=seconds, spans=spans)


def middle(quantity: Quantity | None) -> Estimate:
    assert quantity is not None
    return quantity.p50


def test_spans_of_one_name_are_added_up_and_the_rest_is_unattributed():
    action = spent(10.0, Span("dispatch", 0.0, 1.0), Span("collect", 6.0, 1.0), Span("collect", 8.0, 1.5))
    found = breakdowns([trial("T1", "docker", actions=(action, spent(3.0)))])["action"]
    assert (found.told, found.silent) == (1, 1)
    assert {name: part.p50.value for name, part in found.spans.items()} == {"dispatch": 1.0, "collect": 2.5}
    assert middle(found.unattributed).value == 6.5
    assert middle(found.seconds).value == 10.0
    assert middle(found.silent_seconds).value == 3.0


def test_an_action_without_a_span_that_others_have_spent_nothing_on_it():
    actions = (spent(2.0, Span("run", 0.0, 1.0)), spent(2.0, Span("spawn", 0.0, 1.0)))
    found = breakdowns([trial("T1", "bare", actions=actions)])["action"]
    assert {name: part.p50.value for name, part in found.spans.items()} == {"run": 0.5, "spawn": 0.5}


def test_intervals_only_where_values_are_independent():
    spans = (Span("create", 0.0, 0.5), Span("start", 0.5, 0.25))
    trials = [
        trial("T1", "docker", n, creation=1.0, creation_spans=spans, actions=(spent(1.0, spans[0]),))
        for n in range(5)
    ]
    found = breakdowns(trials)
    assert found["creation"].spans["start"].p50.known
    assert middle(found["creation"].unattributed).value == 0.25
    assert not middle(found["action"].seconds).known
    assert "first" not in found
    assert breakdowns([]) == {}


times = st.floats(0, 10)


@given(st.floats(0, 20), st.lists(st.builds(Span, st.just("a"), times, times), max_size=6))
def test_the_rest_is_never_negative_nor_more_than_the_whole(seconds, spans):
    rest = unexplained(seconds, spans)
    assert -1e-9 <= rest <= seconds
    assert rest >= seconds - sum(by_name(spans).values()) - 1e-9


def test_overlapping_spans_count_once():
    assert unexplained(
        10.0, [Span("a", 1.0, 4.0), Span("b", 2.0, 1.0), Span("c", 4.0, 2.0)]
    ) == pytest.approx(5)
