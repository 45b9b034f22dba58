"""The command line: output, errors and exit status."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cyclopts import App

from dutyfree.cli.commands import app
from tests.processes import ran

NAMES = "run shell ps gc study report ab compare export substrates doctor image"
COMMANDS = NAMES.split()

PLAN = """
name = "tiny"
substrates = ["quick", "slow"]
[options.quick]
use = "scripted"
exit_code = 0
stdout = "ready\\n"
[options.slow]
use = "scripted"
exit_code = 0
stdout = "ready\\n"
create_seconds = 0.02
[workloads]
T0 = 12
"""

DEAD = """
name = "dead"
substrates = ["docker"]
[options.docker]
host = "/nonexistent.sock"
[workloads]
T0 = 1
"""


def dutyfree(*arguments, cwd=None, status=0):
    done = ran([sys.executable, "-m", "dutyfree", *map(str, arguments)], cwd=cwd)
    assert done.returncode == status or (status is None and done.returncode < 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "plan.toml").write_text(PLAN)
    done = dutyfree("study", "--plan", folder / "plan.toml", "--out", folder / "out", "--json")
    return folder / "out", done


def test_help_names_the_commands_and_loads_none():
    script = (
        "import sys; from dutyfree.cli.commands import app; app(['--help']); print(*sys.modules, sep='\\n')"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for command in COMMANDS:
        assert f"│ {command} " in said
    loaded = {line for line in said.splitlines() if line.startswith(("dutyfree.engine", "dutyfree.cli."))}
    assert loaded == {"dutyfree.cli.option_values", "dutyfree.cli.commands"}


@pytest.mark.parametrize("command", [*COMMANDS, "image pull", "image import", "image build", "image gc"])
def test_help_of_a_command_teaches(command):
    """More than the summary of the list, and examples whose options there are."""
    said = dutyfree(*command.split(), "--help").stdout
    before, examples = said.split("For example:")
    about: App = app
    for name in command.split():
        about = about[name]
    text = (about.default_command.__doc__ if about.default_command else None) or about.help
    assert " ".join(before.split()).endswith(" ".join(text.split("For example:")[0].split()))
    shown = [line.split(" -- ")[0] for line in examples.splitlines() if f"dutyfree {command} " in line]
    assert shown
    if about.default_command:
        known = {option for argument in about.assemble_argument_collection() for option in argument.names}
        assert known.issuperset(word for line in shown for word in line.split() if word.startswith("--"))


def test_a_study_ends_with_a_report(study):
    out, done = study
    summary = json.loads(done.stdout)
    assert summary["trials"] == 24
    for name in ("records.jsonl", "summary.json", "report.md", "report.html"):
        assert (out / name).stat().st_size > 0
    for number in range(1, 7):
        assert (out / "figures" / f"figure{number}.svg").exists()
        assert (out / "figures" / f"figure{number}.png").exists()
    assert list((out / "tables").glob("*.csv"))


def test_the_report_is_rebuilt_from_records_alone(study, tmp_path):
    out, _ = study
    (tmp_path / "records.jsonl").write_bytes((out / "records.jsonl").read_bytes())
    said = dutyfree("report", tmp_path).stdout
    assert "T0" in said
    assert "report.html" in said
    assert (tmp_path / "summary.json").read_bytes() == (out / "summary.json").read_bytes()


def test_whatever_reads_records_reads_compressed_ones(study, tmp_path):
    out, _ = study
    packed = tmp_path / "records.jsonl.gz"
    packed.write_bytes(gzip.compress((out / "records.jsonl").read_bytes()))
    assert "report.html" in dutyfree("report", tmp_path).stdout
    assert (tmp_path / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    (tmp_path / "summary.json").unlink()
    assert str(tmp_path / "report.html") in dutyfree("report", packed).stdout
    assert (tmp_path / "summary.json").exists()
    assert "B ÷ A" in dutyfree("compare", packed, status=None).stdout
    assert dutyfree("export", packed).stdout.split()[0] == str(tmp_path / "export" / "trials.csv")
    packed.write_bytes(packed.read_bytes()[:-40])
    for command in (["report", packed], ["compare", out, tmp_path], ["export", tmp_path]):
        assert "damaged gzip file" in dutyfree(*command, status=2).stderr
    assert "gunzip" in dutyfree("study", "--plan", "smoke", "--out", tmp_path, status=2).stderr


def rewritten(records, folder, *, minute, slower=0.0):
    """Another run: begun at another time, its trials by so many seconds slower, and never quite alike."""
    folder.mkdir()
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line in lines:
        if line["type"] == "study":
            line["started"] = f"2026-01-02T03:{minute:02}:00+00:00"
        elif line["type"] == "trial":
            line["creation"] += slower * (1 + minute / 1000)
            line["total"] += slower * (1 + minute / 1000)
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_one_run_on_each_side_cannot_tell_and_says_what_to_do(study, tmp_path):
    out, _ = study
    later = rewritten(out / "records.jsonl", tmp_path / "later", minute=1, slower=1000)
    said = dutyfree("compare", out, later).stdout
    assert "cannot tell: too few runs" in said
    assert "dutyfree ab" in said
    assert "**slower**" not in said
    assert "a run counts once" in dutyfree("compare", out, out, status=2).stderr


def test_slower_runs_are_said_and_told_by_the_status(study, tmp_path):
    out, _ = study
    records = out / "records.jsonl"
    # By more than any two of them differ, however busy the machine was.
    before = [rewritten(records, tmp_path / f"a{n}", minute=2 * n, slower=1) for n in range(3)]
    after = [rewritten(records, tmp_path / f"b{n}", minute=2 * n + 1, slower=1000) for n in range(3)]
    done = dutyfree("compare", "--before", *before, "--after", *after, status=1)
    assert "| **slower** |" in done.stdout
    found = json.loads(dutyfree("compare", "--before", *after, "--after", *before, "--json").stdout)
    assert {change["verdict"] for change in found["changes"]} == {"faster"}
    assert [run["name"] for run in found["runs_b"]] == ["B1", "B2", "B3"]


SCRIPTED = "scripted:exit_code=0,stdout='ready\\n'".replace("'", '"')


def test_ab_finds_a_slower_configuration_and_shows_it_again(tmp_path):
    slow = f"slow={SCRIPTED},create_seconds=0.2"
    options = ("--workloads", "T0", "--trials", "12", "--out", "out")
    done = dutyfree("ab", SCRIPTED, slow, *options, cwd=tmp_path, status=1)
    assert "T0: B is **slower** than A: B ÷ A is" in done.stdout
    assert re.search(r"\d\N{NO-BREAK SPACE}(µs|ms|s) \|", done.stdout)
    assert "over 12 rounds" in done.stdout
    assert "B: slow." in done.stdout
    assert dutyfree("compare", "out", cwd=tmp_path, status=1).stdout == done.stdout
    done = dutyfree("ab", slow, SCRIPTED, *options[:-1], "back", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert {change["verdict"] for change in found["changes"]} == {"faster"}
    assert {change["units_a"] for change in found["changes"]} == {12}


def test_ab_of_the_same_thing_twice_runs(tmp_path):
    done = dutyfree("ab", "bare", "bare", "--workloads", "T0=3", cwd=tmp_path)
    assert "A: bare (A). B: bare (B)." in done.stdout
    assert "T0: cannot tell, too few rounds" in done.stdout
    assert "records: out/ab-" in done.stderr


def test_ab_takes_files_and_goes_on_where_it_was_stopped(tmp_path):
    table = 'use = "scripted"\nexit_code = 0\nstdout = "ready\\n"\n'
    (tmp_path / "small.toml").write_text(table)
    (tmp_path / "large.toml").write_text(f'label = "big"\n{table}')
    dutyfree("ab", "small.toml", "large.toml", "--workloads", "T0=8", cwd=tmp_path, status=None)
    (path,) = tmp_path.glob("out/ab-*/records.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-5]))
    done = dutyfree("ab", "--resume", cwd=tmp_path, status=None)
    assert "A: small. B: big." in done.stdout
    assert "over 8 rounds" in done.stdout
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sum(line["type"] == "trial" and not line.get("warmup") for line in found) == 16


def test_ab_that_is_interrupted_keeps_what_was_measured(tmp_path):
    command = [sys.executable, "-m", "dutyfree", "ab", SCRIPTED, f"{SCRIPTED},create_seconds=0.05"]
    running = subprocess.Popen(
        [*command, "--workloads", "T0=1000", "--out", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    path = tmp_path / "out" / "records.jsonl"
    while not path.exists() or path.read_bytes().count(b'"type":"trial"') < 20:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 130
    assert "to continue: dutyfree ab --resume --out out" in said
    done = dutyfree("compare", "out", cwd=tmp_path, status=None)
    assert "rounds" in done.stdout


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_export(study, tmp_path, kind):
    out, _ = study
    paths = dutyfree("export", out, "--format", kind, "--out", tmp_path).stdout.split()
    assert len(paths) == 2
    assert all(path.endswith(kind) for path in paths)


def test_a_study_without_a_single_success_fails(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN.replace("exit_code = 0", "exit_code = 1"))
    done = dutyfree("study", "--plan", "plan.toml", cwd=tmp_path, status=1)
    assert "24 of 24" in done.stderr + done.stdout or "12, 12 failed" in done.stdout


def test_substrates_and_doctor_say_what_is_here():
    rows = json.loads(dutyfree("substrates", "--json").stdout)
    assert {"bare", "docker", "scripted"} <= {row["name"] for row in rows}
    assert all(row["available"] or row["remedy"] for row in rows)
    findings = json.loads(dutyfree("doctor", "--json").stdout)
    assert all(finding["fine"] or finding["remedy"] for finding in findings)
    assert "bare" in dutyfree("substrates").stdout


def test_a_study_can_be_resumed_without_naming_it(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    dutyfree("study", "--plan", "plan.toml", cwd=tmp_path)
    (path,) = tmp_path.glob("out/tiny-*/records.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-5]))
    dutyfree("study", "--resume", cwd=tmp_path)
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sum(line["type"] == "trial" and not line.get("warmup") for line in found) == 24


def test_a_budget_that_only_warm_ups_fit_into_is_said(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN.replace("exit_code = 0", "exit_code = 0\nexec_seconds = 3"))
    done = dutyfree("study", "--plan", "plan.toml", "--out", "out", "--budget", "8s", cwd=tmp_path, status=1)
    assert "24 trials to run after 2 warm-ups, 0 already recorded" in done.stderr
    assert "dutyfree: only warm-ups fitted into 8s: nothing was measured" in done.stderr
    assert "→ dutyfree study --resume --out out, with a longer --budget" in done.stderr


def test_a_refused_study_is_not_the_latest_one(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "dead.toml").write_text(DEAD)
    dutyfree("study", "--plan", "plan.toml", cwd=tmp_path)
    (out,) = tmp_path.glob("out/*")
    dutyfree("study", "--plan", "dead.toml", cwd=tmp_path, status=1)
    assert list(tmp_path.glob("out/*")) == [out]
    assert f"report: out/{out.name}/report.html" in dutyfree("study", "--resume", cwd=tmp_path).stdout


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    """The size of files is limited, which the kernel tells as it tells a full disk."""
    (tmp_path / "plan.toml").write_text(PLAN.replace("T0 = 12", "T0 = 60"))
    command = [sys.executable, "-m", "dutyfree", "study", "--plan", "plan.toml", "--out", "out"]
    done = ran(
        ["prlimit", "--fsize=20000", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # it would be cut off as well
    )
    assert done.returncode == 2
    assert "cannot append to out/records.jsonl" in done.stderr
    assert "--resume" in done.stderr
    kept = (tmp_path / "out" / "records.jsonl").read_bytes()
    assert kept.endswith(b"\n")
    assert kept.count(b"\n") > 10
    dutyfree("study", "--resume", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "records.jsonl").read_bytes().startswith(kept)


@pytest.mark.slow
def test_the_smoke_plan_runs_to_its_report(tmp_path):
    """Every tier and a trajectory, from the plan to the report, on bare and on Docker if an engine runs."""
    said = dutyfree("study", "--plan", "smoke", "--out", tmp_path, "--json").stdout
    summary = json.loads(said)
    assert summary["failed"] == 0, summary["failures"]
    assert {cell["workload"] for cell in summary["cells"]} == {"T0", "T1", "T2", "trajectory-10"}
    assert all(cell["succeeded"] for cell in summary["cells"])
    if "docker" in {cell["substrate"] for cell in summary["cells"]}:
        assert {tax["workload"] for tax in summary["taxes"]} == {"T0", "T1", "T2", "trajectory-10"}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["study", "--plan", "nope"], 2, "there is no plan 'nope'"),
        (["study", "--substrates", "bear"], 2, "unknown substrate 'bear'"),
        (["study", "--substrates", ","], 2, "names no substrate"),
        (
            ["study", "--plan", "smoke", "--substrates", "bare", "--out", "/proc/nowhere"],
            2,
            "cannot write to",
        ),
        (["study", "--substrates", "bare", "--out", "/proc/nowhere"], 2, "cannot write to"),
        (["study", "--resume"], 2, "no study to resume"),
        (
            ["study", "--resume", "--out", "nowhere"],
            2,
            "no study to resume in nowhere\n  → check --out; to start a new study there, leave --resume out",
        ),
        (
            ["study", "--plan", "smoke", "--substrates", "bare,ssh"],
            1,
            'in a plan: host = "…" in the table [options.ssh]',
        ),
        (["report", "nowhere"], 2, "there is no nowhere"),
        (["compare", "nowhere", "nowhere"], 2, "there is no nowhere"),
        (["compare", "a", "b", "c"], 2, "--before out/a1"),
        (["compare", "a", "--before", "b"], 2, "not both"),
        (["compare", "--before", "b"], 2, "not clear which runs"),
        (["ab", "bare"], 2, "name two configurations"),
        (["ab", "bare", "bear"], 2, "unknown substrate 'bear'"),
        (["ab", "bare", "bare:speed=3", "--out", "x"], 2, "no option 'speed'"),
        (["ab", "bare", "bare:speed"], 2, "has no '='"),
        (["ab", "bare", "=bare"], 2, "is not a configuration"),
        (["ab", "bare", "nowhere.toml"], 2, "cannot read nowhere.toml"),
        (["ab", "bare", "bare", "--workloads", "T9"], 2, "no workload 'T9'"),
        (["ab", "bare", "bare", "--workloads", "T0=x"], 2, "no number of trials"),
        (["ab", "bare", "bare", "--trials", "0"], 2, "at least one trial"),
        (["ab", "--resume"], 2, "no study to resume"),
        (["ab", "bare", "bare", "--resume", "--out", "x"], 2, "leave A and B out"),
        (["export", "nowhere", "--format", "xml"], 2, "xml"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_gets_one_clear_sentence(tmp_path, arguments, status, message):
    done = dutyfree(*arguments, cwd=tmp_path, status=status)
    assert message in done.stderr + done.stdout


def test_a_dead_engine_is_said_with_a_remedy(tmp_path):
    (tmp_path / "plan.toml").write_text(DEAD)
    done = dutyfree("study", "--plan", "plan.toml", cwd=tmp_path, status=1)
    assert "/nonexistent.sock" in done.stderr
    assert "→" in done.stderr
