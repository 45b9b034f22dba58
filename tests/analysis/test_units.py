"""Formatted numbers and escaped text."""

from __future__ import annotations

import pytest

from dutyfree.analysis.units import duration, enumeration, hours, markdown, percent, significant, times


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-7, "0.420 µs"),
        (0.000812, "812 µs"),
        (0.0009996, "1.00 ms"),
        (0.0425, "42.5 ms"),
        (0.9996, "1.00 s"),
        (3.214, "3.21 s"),
        (9.996, "10.0 s"),
        (250, "4 min 10 s"),
        (7560, "2.10 h"),
        (-0.0055, "−5.50 ms"),  # noqa: RUF001 (a minus sign is meant)
    ],
)
def test_durations(seconds, text):
    assert duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


def test_other_numbers():
    assert hours(11805.6).split() == ["11,806", "h"]
    assert hours(2.7777).split() == ["2.8", "h"]
    assert percent(0.0812).split() == ["8.1", "%"]
    assert percent(1.5).split() == ["150", "%"]
    assert times(109.6) == "110×"  # noqa: RUF001 (a multiplication sign is meant)
    assert significant(1234567) == "1,234,567"
    assert significant(float("inf")) == "∞"
    assert enumeration(["a", "b", "c"]) == "a, b and c"


def test_markdown_does_nothing():
    assert markdown("a|b\n<i>*x*") == r"a\|b &lt;i&gt;\*x\*"
