"""The report, written from synthetic records and read back."""

from __future__ import annotations

import csv
import itertools
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.summary import decode, summarise
from dutyfree.analysis.units import UNKNOWN
from dutyfree.contract.errors import RecordsError
from dutyfree.report import files
from dutyfree.report.headline import answers
from dutyfree.report.phrases import compared, groups
from dutyfree.report.tables.catalog import tables
from dutyfree.study.records import FILE, TrialFailure
from tests.analysis.synthetic import PROFILES, action, cold, facts, plausible, records, save, study, trial
from tests.report.controlled import controlled

VOID = {"meta", "link", "br", "img", "input", "hr"}
FIGURES = ["tax", *(f"figure{number}" for number in range(1, 7))]
FITTED = ["law", "rankings", "tails"]
"""Figures of a study with bare, another substrate and several lengths."""


class Page(HTMLParser):
    """Checks nesting, and gathers what the tests ask about."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags = []
        self.ids = []
        self.links = []
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])
        self.links += [to for name, to in attrs if name in ("href", "src", "xlink:href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page(directory):
    return Page((directory / "report.html").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    content = plausible(
        labels=("bare", "docker", "native"), trials=12, parallel=(1, 4), failing={"docker": 0.2}
    )
    summary = files.write(save(directory, content))
    return directory, summary


def test_everything_is_there(written):
    directory, summary = written
    made = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    tables = (
        "law cold_start decomposition inside_action inside_creation trajectories distribution tax table1 "
        "table2 worker_hours rankings ratios failures throughput"
    )
    assert made == {
        FILE,
        "summary.json",
        "report.md",
        "report.html",
        *(f"tables/{name}.csv" for name in tables.split()),
        *(f"figures/{name}.{kind}" for name in (*FIGURES, *FITTED) for kind in ("svg", "png")),
    }
    assert decode((directory / "summary.json").read_bytes()) == summary


def test_writing_again_gives_the_same_bytes(written):
    directory, _ = written
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    files.write(directory)
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == []


def test_tables_hold_the_numbers_of_the_summary(written):
    directory, summary = written
    with (directory / "tables/table1.csv").open(newline="") as file:
        assert [round(float(row["hours"])) for row in csv.DictReader(file)] == [278, 417, 4167]
    with (directory / "tables/tax.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tax_seconds"]) for row in rows] == [tax.seconds.value for tax in summary.taxes]
    with (directory / "tables/decomposition.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            parts = sum(float(value) for name, value in row.items() if name.endswith("_mean"))
            assert parts == pytest.approx(float(row["typical_total"]))


def test_the_headline_answers_with_the_numbers_of_the_summary(written):
    directory, summary = written
    words = page(directory).words
    spread = next(row for row in summary.spreads if row.workload == "trajectory-150")
    for question in ("cold start?", "time go?", "length of a trajectory?", "million trajectories cost?"):
        assert question in words
    assert f"{spread.slowest} takes {spread.hours(spread.mean_difference).value:,.0f} h more than" in words
    assert "(95 % interval" in words


def test_the_page_is_sound_and_asks_nothing_of_the_network(written):
    directory, _ = written
    made = page(directory)
    assert len(made.ids) == len(set(made.ids))
    assert all(link.startswith("#") for link in made.links)
    assert {link[1:] for link in made.links} <= set(made.ids)
    tags = {tag for tag, _ in made.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "video", "audio"}
    text = (directory / "report.html").read_text()
    for call in ("@import", "url(http", "url(//", "url('", 'url("'):
        assert call not in text


def test_the_page_is_accessible(written):
    made = page(written[0])
    drawings = [attributes for tag, attributes in made.tags if tag == "svg"]
    assert len(drawings) == len(FIGURES) + len(FITTED)
    assert all(one["role"] == "img" and len(one["aria-label"]) > 20 for one in drawings)
    grids = [attributes for tag, attributes in made.tags if tag == "table"]
    labelled = [one["aria-labelledby"] for one in grids if "aria-labelledby" in one]
    assert set(labelled) <= set(made.ids)
    assert len(grids) == len(labelled) + sum(tag == "caption" for tag, _ in made.tags)
    assert all("scope" in attributes for tag, attributes in made.tags if tag == "th")
    assert ("html", {"lang": "en"}) in made.tags


def test_inline_drawings_follow_the_theme(written):
    text = (written[0] / "report.html").read_text()
    drawings = text.split("<svg")[1:]
    for drawing in drawings:
        body = drawing.split("</svg>")[0]
        assert "currentColor" in body
        assert "#1a1d21" not in body
        assert "#ffffff" not in body


def test_files_of_figures_are_whole_and_undated(written):
    for name in FIGURES:
        text = (written[0] / f"figures/{name}.svg").read_bytes()
        assert ET.fromstring(text).tag.endswith("svg")
        assert b"dc:date" not in text
        assert (written[0] / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_cautions_stand_beside_their_numbers(written):
    directory, _ = written
    words, text = page(directory).words, (directory / "report.md").read_text()
    for phrase in (
        "the time of the same action on bare is used instead",
        "trials failed; the numbers are from",
    ):
        assert phrase in words
        assert phrase in text
    assert "<sup>" in text


def test_inner_spans_and_the_rest_are_shown(tmp_path):
    content = plausible(trials=4, tiers=("T0", "T1"), lengths=(10,), spans=True)
    summary = files.write(save(tmp_path, content))
    made = tables(summary)
    assert made["inside_action"].header[3:-3] == ["dispatch", "run", "collect", "unattributed"]
    assert made["inside_creation"].header[3:-1] == ["create", "start", "unattributed"]
    names = [row.shown[0] for row in made["inside_action"].rows]
    assert names == ["T0, first command"] * 2 + ["T1"] * 2 + ["trajectory-10"] * 2
    assert "The engine does not report the time in between (start and run)" in page(tmp_path).words
    with (tmp_path / "tables/inside_action.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (docker,) = (row for row in rows if (row["workload"], row["substrate"]) == ("T1", "docker"))
    assert docker["span_run_p50"] == ""
    assert 0 < float(docker["span_dispatch_p50"]) < float(docker["unattributed_p50"])
    assert float(docker["unattributed_p50"]) < float(docker["seconds_p50"])


def test_ratios_bear_the_cautions_of_both_sides(written):
    _, summary = written
    shown = tables(summary)["ratios"].rows
    for row, ratio in zip(shown, summary.ratios, strict=True):
        failing = "docker" in (ratio.substrate, ratio.base) and any(
            caution.kind == CautionKind.FAILURES
            for caution in summary.cautions_on(ratio.workload, "docker", ratio.parallel)
        )
        assert failing == any(caution.kind == CautionKind.FAILURES for caution in row.cautions)
    assert any(row.cautions for row in shown)


def test_facts_of_any_name_and_kind_are_shown(tmp_path):
    host = {"event_loop": "uvloop", "cgroup_cpu_limit": None, "root": True, "new_fact": [1, 2]}
    files.write(save(tmp_path, records(study=study(host=host))))
    words = page(tmp_path).words
    for told in (
        "event loop uvloop",
        "cgroup cpu limit none",
        "root yes",
        "new fact [1, 2]",
        "memory (GiB) 8",
    ):
        assert told in words


def test_answers_name_what_qualifies_them(written):
    directory, _ = written
    made, text = page(directory), (directory / "report.md").read_text()
    cards = made.words.split("1. How much")[1].split("cache state")[0]
    assert cards.count("cautions: failures") == 4
    answers = [line for line in text.splitlines() if line[:5] in {f"{number}. **" for number in range(1, 5)}]
    assert len(answers) == 4
    assert all("*Cautions: failures" in line for line in answers)


def test_a_caution_is_told_once_and_referred_to_elsewhere(tmp_path):
    many = plausible(labels=("bare", "docker", "oci"), trials=5, failing={"oci": 0.5}, seed=3)
    summary = files.write(save(tmp_path, many))
    made, text = page(tmp_path), (tmp_path / "report.md").read_text()
    texts = Counter(caution.text for caution in summary.cautions)
    assert max(texts.values()) > 9
    for told in texts:
        assert made.words.count(told) == 1, told
        assert text.count(told) == 1, told
    kinds = list(dict.fromkeys(caution.kind for caution in summary.cautions))
    assert [one for one in made.ids if one.startswith("caution-")] == [
        f"caution-{number}" for number in range(1, len(kinds) + 1)
    ]
    assert made.links.count(f"#caution-{kinds.index(CautionKind.TOO_FEW) + 1}") > 20
    often = sum(caution.kind == CautionKind.STAND_IN for caution in summary.cautions)
    assert (
        f"{often} times: T1, T2, trajectory-10, trajectory-50 and trajectory-150 on docker and oci"
        in made.words
    )
    assert f"*stand-in* ({often} times: T1, T2, " in text


def test_a_caution_that_concerns_all_says_so(tmp_path):
    files.write(save(tmp_path, plausible(trials=3)))
    assert "too few trials 12 times: all cells : fewer than 10" in page(tmp_path).words


def test_a_terminal_gets_one_line_of_each_kind():
    summary = summarise(plausible(labels=("bare", "docker", "oci"), trials=5, failing={"oci": 0.5}, seed=3))
    lines = {group.kind: group.line for group in groups(summary.cautions, len(summary.cells))}
    assert list(lines) == list(dict.fromkeys(caution.kind for caution in summary.cautions))
    assert lines[CautionKind.FAILURES].startswith(
        "failures (6 times: T0, T1, T2, trajectory-10, trajectory-50 and "
    )
    assert lines[CautionKind.FAILURES].endswith(" more of this kind in the report")


def test_markdown_links_to_its_figures(written):
    directory, _ = written
    text = (directory / "report.md").read_text()
    for name in FIGURES:
        assert f"](figures/{name}.svg)" in text
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert above.replace("\\|", "").count("|") == line.replace("\\|", "").count("|")
    assert "dutyfree report" in text


def told(content):
    """The four answers: findings and texts."""
    found = answers(summarise(content))
    return [one.figure.replace("\N{NO-BREAK SPACE}", " ") for one in found], [one.text for one in found]


def test_headlines_name_the_direction_the_tier_and_the_interval():
    findings, texts = told(plausible(labels=("bare", "docker"), trials=12))
    number = r"[\d,.]+"
    assert re.fullmatch(
        rf"At T0 docker takes {number} times as long as bare \(95 % interval {number} to {number}\)",
        findings[0],
    )
    assert re.fullmatch(r"\d+ % of a T2 rollout on docker is infrastructure", findings[1])
    assert re.fullmatch(
        rf"docker adds {number} ms to every action \(95 % interval {number} ms to {number} ms\); "
        rf"on bare itself it is {number} µs",
        findings[2],
    )
    assert re.fullmatch(
        rf"docker takes {number} h more than bare \(95 % interval {number} h to {number} h\)", findings[3]
    )
    assert re.search(rf"docker takes {number} times as long as bare", texts[3])


def test_the_baseline_is_what_others_are_measured_by_even_where_it_is_slower():
    def slow(workload):
        noise = [1.0, 1.02, 0.98, 1.01, 0.99] * 3
        return [
            *cold("bare", [4 * one for one in noise], workload),
            *cold("native", [2 * one for one in noise], workload),
        ]

    findings, texts = told(records(*slow("T0"), *slow("trajectory-10")))
    assert findings[0].startswith("At T0 native takes 0.500 times as long as bare (95 % interval 0.5")
    assert findings[3].startswith("native takes 556 h less than bare (95 % interval ")
    assert not any("bare takes" in text or "bare adds" in text for text in [*findings, *texts])
    findings, _ = told(plausible(labels=("bare",), trials=12))
    assert not any("infrastructure" in one or "adds" in one for one in findings)


def test_what_may_be_chance_is_no_finding():
    for content in (
        records(*cold("bare", [1.0, 2.0, 3.0] * 4), *cold("native", [1.1, 2.1, 2.9] * 4)),
        records(*cold("bare", [1.0]), *cold("docker", [100.0])),
        plausible(labels=("bare", "docker"), trials=1),
    ):
        findings, texts = told(content)
        assert findings[0] == "No difference shown"
        assert "no difference shown between" in texts[0]
        assert not re.search(r"[\d.]+ times as long", texts[0])
    cost = [
        *cold("bare", [1.0, 2.0, 3.0] * 4, "trajectory-5"),
        *cold("vm", [1.1, 2.1, 2.9] * 4, "trajectory-5"),
    ]
    findings, texts = told(records(*cost))
    assert findings[3] == "No difference shown"
    assert "(95 % interval of the ratio " in texts[3].replace("\N{NO-BREAK SPACE}", " ")


def test_a_headline_follows_the_verdict_and_its_words_follow_the_interval():
    """Of many studies of two substrates that hardly differ."""
    findings = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        trials = 2 if seed < 5 else 20
        content = records(
            *cold("bare", list(random.normal(1.0, 0.1, trials))),
            *cold("native", list(random.normal(1.08, 0.1, trials))),
        )
        summary = summarise(content)
        (spread,) = summary.spreads
        findings += spread.shown
        answer = answers(summary)[0]
        assert (answer.figure != "No difference shown") == spread.shown
        plain = answer.text.replace("\N{NO-BREAK SPACE}", " ")
        for low, high in re.findall(r"no difference shown[^(]*\([^)]*ratio ([\d.]+) to ([\d.]+)\)", plain):
            assert float(low) <= 1 <= float(high), plain
    assert 0 < findings < 25


def test_an_interval_without_a_verdict_is_not_called_no_difference():
    ratio = Estimate(1.94, 1.84, 2.03)
    said = compared("docker", "native", ratio, shown=False, why="below the noise floor")
    assert said.replace("\N{NO-BREAK SPACE}", " ") == (
        "docker and native may differ, but this is not certain: below the noise floor "
        "(95 % interval of the ratio 1.84 to 2.03)"
    )
    assert "no difference shown" in compared("docker", "native", Estimate(1.1, 0.9, 1.3), shown=False)
    assert "too few trials" in compared("docker", "native", Estimate(1.1), shown=False)


def test_a_law_that_the_trials_do_not_support_is_a_dash_and_a_caution(tmp_path):
    whole = plausible(trials=12)
    asked = {one.workload: 12 for one in whole.trials}
    enough = {("T0", "bare"), ("T1", "bare"), ("T2", "bare"), ("T0", "docker")}
    kept = [one for one in whole.trials if one.index < (12 if (one.workload, one.substrate) in enough else 1)]
    content = records(*kept, study=study(workloads=asked), substrates=whole.substrates)
    files.write(save(tmp_path, content))
    text = (tmp_path / "report.md").read_text()
    shown = r"^\| docker \| (\S+) <sup>\d+</sup> \| (\S+) \| (\S+) \| (\S+) \| bare \|$"
    (row,) = re.findall(shown, text, re.MULTILINE)
    assert set(row) == {UNKNOWN}
    assert re.search(r"^\| bare \| \d", text, re.MULTILINE)
    assert "the study stopped too early for a law" in text
    assert "the law is fitted without trajectory-10, trajectory-50 and trajectory-150" in text


def test_the_noise_floor_and_the_law_come_first(tmp_path):
    summary = files.write(save(tmp_path, controlled(trials=6)))
    text = (tmp_path / "report.md").read_text()
    order = ("Noise floor: bare-again is bare under", "| substrate | a, per", "figures/law.svg", "1. **How")
    places = [text.index(one) for one in order]
    assert places == sorted(places)
    assert summary.controls == ["bare-again"]
    assert "bare-again" not in text.split("**Cautions**")[0].split("| substrate | a, per")[1]
    for name in ("predictions", "storage", "walls", "noise_floor"):
        assert (tmp_path / f"tables/{name}.csv").read_text().count("\n") > 1
    with (tmp_path / "tables/walls.csv").open(newline="") as file:
        walls = {row["wall"]: row for row in csv.DictReader(file)}
    assert list(walls) == ["all walls", "overlay", "seccomp"]
    assert {row["whole"] for row in walls.values()} == {"native"}
    with (tmp_path / "tables/storage.csv").open(newline="") as file:
        pairs = {(row["use"], row["disk_label"], row["memory_label"]) for row in csv.DictReader(file)}
    assert pairs == {("bare", "bare", "bare-memory"), ("native", "native-disk", "native")}


def test_two_substrates_are_worth_a_report(tmp_path):
    files.write(save(tmp_path, plausible(labels=("bare", "native"), trials=12)))
    made, text = page(tmp_path), (tmp_path / "report.md").read_text()
    assert made.ids.index("law") < made.ids.index("caution-1") < made.ids.index("tax")
    assert "Noise floor: unknown, because the plan has no A/A control." in made.words
    assert text.index("](figures/law.svg)") < text.index("1. **How much")
    alts = [attributes["aria-label"] for tag, attributes in made.tags if tag == "svg"]
    assert re.search(r"native a [\d.]+\sms \[", alts[0])
    assert any(re.search(r"trajectory-150 on native [+−\d.]+\s% \[", alt) for alt in alts)  # noqa: RUF001
    for number in range(1, 5):
        assert f"{number}. " in made.words


def test_without_a_baseline_there_is_no_chart(tmp_path):
    files.write(save(tmp_path, plausible(labels=("docker", "oci"), trials=3)))
    made = page(tmp_path)
    assert "tax" not in made.ids
    assert sum(tag == "svg" for tag, _ in made.tags) == len(FIGURES)  # without the tax, with the tails


HOSTILE = '<script>alert("x")</script>&amp;|`*$^$_[x](y)'


def test_hostile_names_and_causes_stay_text(tmp_path):
    content = records(
        *cold("bare", [1.0] * 5),
        *cold(HOSTILE, [2.0] * 5),
        *cold("_under", [2.0] * 5),
        *cold("日本\u202e\n", [2.0] * 5, workload="T2"),
        trial(
            "T0", "bare", 9, failure=TrialFailure("infrastructure", "create", f"{HOSTILE}\n```\n{HOSTILE}")
        ),
        trial(f"trajectory-{HOSTILE}", "bare", 0, actions=(action(HOSTILE, 1.0),)),
        substrates={
            "bare": facts("bare", facts={HOSTILE: HOSTILE}),
            "gone": facts("gone", unavailable=HOSTILE),
        },
        study=study(plan={"name": HOSTILE}, host={"cpu": HOSTILE}),
    )
    files.write(save(tmp_path, content))
    made = page(tmp_path)
    assert not any(tag == "script" for tag, _ in made.tags)
    assert HOSTILE in made.words
    text = (tmp_path / "report.md").read_text()
    outside_of_code = "".join(text.split("```")[::2])
    assert "<script>" not in outside_of_code
    for name in FIGURES:
        ET.fromstring((tmp_path / f"figures/{name}.svg").read_bytes())


@pytest.mark.parametrize("length", [10, 400, 100_000])
def test_what_to_do_about_a_failure_is_never_cut_off(length, tmp_path):
    remedy = "(start the engine with: scripts/docker-engine start, then run the study again with --resume)"
    cause = f"the engine does not answer: {'x' * length} {remedy}"
    failed = [
        trial("T0", "docker", n, failure=TrialFailure("infrastructure", "create", cause)) for n in range(3)
    ]
    gone = facts("gone", unavailable=cause)
    substrates = {"bare": facts("bare"), "docker": facts("docker"), "gone": gone}
    content = records(*cold("bare", [1.0] * 3), *failed, substrates=substrates)
    summary = files.write(save(tmp_path, content))
    (group,) = summary.failures
    assert group.cause.endswith(remedy)
    assert len(group.cause) < 1100
    assert page(tmp_path).words.count(remedy) >= 2
    assert (tmp_path / "report.md").read_text().count(remedy) >= 2


def test_a_spreadsheet_takes_no_label_for_a_formula(tmp_path):
    files.write(save(tmp_path, records(*cold("bare", [1.0] * 3), *cold("=1+1", [2.0] * 3))))
    for path in (tmp_path / "tables").iterdir():
        with path.open(newline="") as file:
            assert not any(cell.startswith("=") for row in csv.reader(file) for cell in row)


def partial():
    failed = [trial("T2", "docker", n, failure=TrialFailure("timeout", "exec", "slow")) for n in range(3)]
    many = (*PROFILES, "hosted", "cloud", "seven", "eight", "nine", "ten")
    return {
        "no trials": records(),
        "warm-ups only": records(*cold("bare", [1.0], warmup=True)),
        "one trial": records(*cold("bare", [1.0])),
        "failures only": records(*failed),
        "failures beside successes": records(*cold("bare", [1.0] * 3, workload="T2"), *failed),
        "one tier": plausible(labels=("docker",), tiers=("T0",), lengths=(), trials=3),
        "one length": plausible(tiers=(), lengths=(50,), trials=3),
        "no baseline": plausible(labels=("docker", "oci"), trials=3),
        "twelve substrates": plausible(labels=many, trials=2, failing={"oci": 1.0}),
        "zero times": records(*cold("bare", [0.0] * 4), *cold("docker", [0.0] * 4)),
        "other workloads": records(*cold("bare", [1.0] * 3, workload="mine")),
        "parallel only": plausible(trials=4, tiers=("T0",), lengths=(10,), parallel=(4,)),
        "huge and tiny": records(*cold("bare", [1e-9] * 3), *cold("vm", [1e6] * 3, workload="T0")),
    }


@pytest.mark.parametrize("name", list(partial()))
def test_partial_records_give_a_whole_report(name, tmp_path):
    content = partial()[name]
    summary = files.write(save(tmp_path, content))
    made = page(tmp_path)
    assert len(made.ids) == len(set(made.ids))
    assert summary.trials == len(content.measured)
    if not summary.trials:
        assert "no measured trial" in made.words
    for figure in FIGURES:
        assert (tmp_path / f"figures/{figure}.svg").stat().st_size > 1000


def test_records_of_a_killed_study_are_read(tmp_path):
    save(tmp_path, plausible(trials=3, lengths=(10,)))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-40])
    summary = files.write(tmp_path)
    assert summary.trials == 23


def test_no_records_and_no_room_are_told(tmp_path):
    with pytest.raises(RecordsError, match="no records"):
        files.write(tmp_path)
    save(tmp_path, records())
    (tmp_path / "tables").write_text("in the way")
    with pytest.raises(RecordsError, match="cannot write the report"):
        files.write(tmp_path)
    assert not list(tmp_path.glob(".*.new"))
