"""The report in a real browser: on a phone, in light and dark, on paper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dutyfree.report import files
from tests.analysis.synthetic import plausible, save
from tests.chromium import MARKS, PATIENCE, launched

pytestmark = MARKS


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    long = "a-label-without-any-place-to-break-it-that-goes-on-and-on-and-on-and-on"
    content = plausible(labels=("bare", "docker", "native", long), trials=6, failing={"docker": 0.3})
    files.write(save(directory, content))
    return (directory / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with launched() as running:
        yield running


def opened(browser, address, **options):
    page = browser.new_page(**options)
    page.goto(address, timeout=PATIENCE)
    return page


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_nothing_is_wider_than_the_screen(browser, address, width):
    page = opened(browser, address, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_light_and_dark_differ_and_the_ink_is_readable_in_both(browser, address):
    seen = {}
    for scheme in ("light", "dark"):
        page = opened(browser, address, color_scheme=scheme)
        paper, ink, drawn = page.evaluate(
            """() => {
                const body = getComputedStyle(document.body);
                const glyph = document.querySelector('#figure1 svg [style*="currentColor"]');
                const style = getComputedStyle(glyph);
                const seen = style.fill === 'none' ? style.stroke : style.fill;
                return [body.backgroundColor, body.color, seen];
            }"""
        )
        assert drawn == ink
        assert contrast(paper, ink) > 7
        seen[scheme] = paper
        assert page.screenshot()
        page.close()
    assert seen["light"] != seen["dark"]


def contrast(one: str, other: str) -> float:
    """As WCAG has it, of two rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_no_request_leaves_the_page_and_nothing_is_logged(browser, address):
    page = browser.new_page()
    requests, messages = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(address, timeout=PATIENCE)
    assert requests == [address]
    assert messages == []
    page.close()


def test_figures_have_a_size_and_tables_scroll_within_themselves(browser, address):
    page = opened(browser, address, viewport={"width": 390, "height": 800})
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => [s.clientWidth, s.clientHeight])"
    )
    assert len(boxes) == 10
    assert all(width > 300 and height > 60 for width, height in boxes)
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some(s => s.scrollWidth > s.clientWidth)")
    page.close()


def test_it_prints(browser, address):
    page = opened(browser, address)
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
