"""A report about many archetypes: the action path, and the numbers beside those of the paper."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dutyfree.analysis.model import Summary
from dutyfree.analysis.summary import summarise
from dutyfree.report import files, paper
from dutyfree.report.document import document
from dutyfree.report.files import without_controls
from dutyfree.report.palette import substrate_looks
from dutyfree.report.tables.catalog import tables
from tests.analysis.synthetic import save
from tests.modules import load
from tests.report.archetypes import ARCHETYPES, archetypes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def summary() -> Summary:
    return without_controls(summarise(archetypes()))


def test_no_two_substrates_look_alike(summary):
    looks = substrate_looks(summary)
    assert len({(one.colour, one.marker) for one in looks.values()}) == len(ARCHETYPES)
    assert looks["docker"].colour == looks["docker-init"].colour


def test_the_table_of_the_action_path(summary):
    rows = tables(summary)["action_path"].rows
    assert [row.shown[0] for row in rows] == [
        f"{name} → {name}-init" for name in ("docker", "crun", "gvisor", "kubernetes")
    ]
    assert all("→" in cell for row in rows for cell in row.shown[1:4])
    ratios = next(
        block.table
        for section in document(summary, "").sections
        for block in section.blocks
        if hasattr(block, "table") and block.table.name == "ratios"
    )
    assert len(ratios.rows) == 4 * len(summary.workloads)


def test_beside_the_paper(summary):
    assert paper.comparable(summary) == ["docker", "crun", "gvisor", "kubernetes"]
    assert {paper.why_not(summary, label) for label in paper.isolating(summary)} == {
        None,
        "our own engine",
        "actions through our init",
        "made ahead",
        "its processor is emulated, because KVM does not work on this machine",
    }
    rows = {row.what: row for row in paper.comparisons(summary)}
    cold = rows["cold start, T0: time to first command"]
    assert cold.paper == "110×"  # noqa: RUF001
    assert cold.as_used is not None
    assert cold.isolated is not None
    assert (cold.as_used.slowest, cold.as_used.fastest) == ("kubernetes", "crun")
    assert cold.isolated.slowest == "vm-boot"
    cells = {cell.substrate: cell.first_result.p50.value for cell in summary.lone("T0")}
    assert cold.as_used.ratio.value == pytest.approx(cells["kubernetes"] / cells["crun"])
    hours = rows["worker-hours of 1,000,000 trajectories of 150 actions"]
    assert hours.paper == "1.8×: 11,811 h (42.5 s each) and 6,495 h (23.4 s)"  # noqa: RUF001
    assert hours.as_used is not None
    means = {cell.substrate: cell.total.mean.value for cell in summary.lone("trajectory-150")}
    assert hours.as_used.ratio.value == pytest.approx(means[hours.as_used.slowest] / means["crun"])
    what, narrowing, why = paper.sentences(summary)
    assert "Comparable with the paper, because measured as people use them: docker, crun, gvisor" in what
    assert "In the paper it narrows" in narrowing
    assert "not ours" in why


def test_one_archetype_is_not_compared_with_the_paper(summary):
    alone = msgspec.structs.replace(
        summary, cells=[cell for cell in summary.cells if cell.substrate in ("bare", "docker", "native")]
    )
    assert not paper.comparisons(alone)
    assert "beside_the_paper" not in tables(alone)


def test_the_section_for_the_documentation_names_true_sources(tmp_path):
    home = save(tmp_path / "docs/results/2026-01-02-archetypes", archetypes())
    files.write(home)
    page = tmp_path / "docs/results/README.md"
    page.write_text("\n".join(load(ROOT / "scripts/results_section.py").section(home)))
    problems, unstored = load(ROOT / "scripts/check_claims.py").check(page, tmp_path)
    assert not [f"{one.place}: {one.text}" for one in problems]
    assert not unstored
    text = page.read_text()
    assert "### The action path" in text
    assert "| docker → docker-init |" in text
    assert "Comparable with the paper" in text
