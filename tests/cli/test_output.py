"""Output of commands: complete lines that can be copied, no terminal control characters, no traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dutyfree.analysis.model import Caution, CautionKind, Summary
from dutyfree.cli import console, doctor, report
from tests.processes import ran
from tests.terminals import is_quiet, on_terminal

COMMAND = [sys.executable, "-m", "dutyfree"]
EVIL = "\x1b]0;owned\x07\x9b31m\u202e\n[red]x[/red]"
REMEDY = "sysctl user.max_user_namespaces=16384 kernel.unprivileged_userns_clone=1 # " + "and so on " * 30


# --- Lines that can be copied ------------------------------------------------------------------------------

SHOW = """
import sys
from dutyfree.cli import doctor as command
from dutyfree.cli.main import main
from dutyfree.doctor.finding import Finding
from dutyfree import errors, substrates
from dutyfree.doctor import check
from dutyfree.contract import Availability

remedy = sys.argv[1]

async def check_all():
    return [Finding("what", False, "found " * 30, remedy)]

async def probe(name, **options):
    return Availability(False, "missing " * 30, remedy)

check.check_all, substrates.probe = check_all, probe
if sys.argv[2] == "error":
    def broken(json=False):
        raise errors.CreateError("it failed " * 30, remedy=remedy)
    command.doctor = broken
sys.argv[1:] = ["substrates" if sys.argv[2] == "substrates" else "doctor"]
sys.exit(main())
"""


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("where", ["doctor", "substrates", "error"])
def test_remedies_are_whole_lines(where: str, columns: int) -> None:
    command = [sys.executable, "-c", SHOW, REMEDY.strip(), where]
    wanted = f"  → {REMEDY.strip()}"
    assert wanted in on_terminal(*command, columns=columns).splitlines()
    piped = ran(command, env={**os.environ, "COLUMNS": str(columns)})
    assert wanted in (piped.stdout + piped.stderr).splitlines()


def test_cautions_of_a_study_are_whole_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    caution = Caution(CautionKind.TOO_FEW, f"run it again: {REMEDY.strip()}")
    every = msgspec.structs.fields(Summary)
    empty: dict[str, object] = {field.name: [] for field in every if str(field.type).startswith("list")}
    numbers = dict.fromkeys(("schema", "trials", "warmups", "failed"), 0)
    others: dict[str, object] = {"version": "", "started": "", "plan": {}, "host": {}, "baseline": None}
    summary = msgspec.convert({**empty, **numbers, **others}, Summary)
    report.show_summary(
        msgspec.structs.replace(summary, cautions=[caution]), tmp_path / ("long" * 40), as_json=False
    )
    lines = capsys.readouterr().out.splitlines()
    assert any(REMEDY.strip() in line for line in lines)
    assert f"report: {tmp_path / ('long' * 40) / 'report.html'}" in lines


def test_a_table_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("name", "size"), [("a" * 200, "1"), ("b\nc", "1000")], right={1})
    head, first, second = capsys.readouterr().out.splitlines()
    assert (len(head), len(first), len(second)) == (206, 206, 206)
    assert first.startswith("a" * 200)
    assert second.split() == ["b\\nc", "1000"]


def test_only_the_last_column_yields_to_a_narrow_terminal() -> None:
    rows = [("x" * 50, "y" * 500)]
    script = f"from dutyfree.cli import console; console.table(('a', 'b'), {rows}, cut=True)"
    command = [sys.executable, "-c", script]
    narrow = on_terminal(*command, columns=40).splitlines()[1]
    assert narrow == "x" * 50 + "  " + "y" * (console.SHORTEST - 1) + "…"
    wide = on_terminal(*command, columns=200).splitlines()[1]
    assert len(wide) == 200
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "y" * 500 in piped


# --- Text from elsewhere -----------------------------------------------------------------------------------


def test_text_from_elsewhere_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    console.show(EVIL)
    console.table(("a",), [(EVIL,)])
    console.print_json({"text": EVIL, "letters": "äß漢😀", "hidden": "\U000e0001"})
    doctor._show_findings([("!", "yellow", EVIL, EVIL, EVIL)])
    console.say(EVIL)
    out, err = capsys.readouterr()
    assert is_quiet(out)
    assert is_quiet(err)
    assert out.count("[red]x[/red]") == 6
    assert "äß漢😀" in out
    document = out[out.index("{") : out.index("}") + 1]
    assert json.loads(document) == {"text": EVIL, "letters": "äß漢😀", "hidden": "\U000e0001"}


def test_what_a_study_shows_of_its_progress_is_not_obeyed() -> None:
    script = f"""
from dutyfree.cli.progress import StudyProgress
with StudyProgress() as progress:
    progress.detail({EVIL!r} + "[bold]told[/bold]")
    progress.note({EVIL!r})
"""
    seen = on_terminal(sys.executable, "-c", script, columns=200)
    assert "[bold]told[/bold]" in seen
    assert "\x1b]0;" not in seen
    assert "\x9b" not in seen
    assert "\u202e" not in seen


# --- A reader that leaves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["substrates"],
        ["substrates", "--json"],
        ["doctor"],
        ["ps"],
        ["--version"],
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_listing_without_a_word(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    # A listing of nothing has nothing to write.
    assert (done.returncode, done.stderr) in ((141, ""), (0, "no sandbox is running on this machine\n"))


@pytest.mark.parametrize("arguments", [["substrates"], ["run", "--substrate", "bare", "--", "echo", "here"]])
def test_output_that_does_not_fit_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"dutyfree: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["ps", "run --substrate bare -- sh -c 'cat; exit 5'"])
def test_closed_standard_streams_are_empty(closed: str, arguments: str) -> None:
    line = f"{shlex.join(COMMAND)} {arguments} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, input=b"", check=False)
    assert done.returncode == (5 if "exit 5" in arguments else 0)
    assert b"Traceback" not in done.stderr


# --- What was meant ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (["rnu"], "there is no command 'rnu'", "did you mean 'run'?"),
        (["layer", "biuld"], "there is no command 'biuld'", "did you mean 'build'?"),
        (["frobnicate"], "there is no command 'frobnicate'", "see: dutyfree --help"),
        (["run", "--memroy", "1G", "--", "true"], "there is no option --memroy", "did you mean '--memory'?"),
        (["run", "--memroy=1G", "--", "true"], "there is no option --memroy", "did you mean '--memory'?"),
        (["ps", "--jsn"], "there is no option --jsn", "did you mean '--json'?"),
        (["ps", "--frobnicate"], "there is no option --frobnicate", "see: dutyfree ps --help"),
        (["image", "pull", "--quite", "x"], "there is no option --quite", "did you mean '--quiet'?"),
        (["ps", "extra"], "dutyfree ps takes no argument 'extra'", "see: dutyfree ps --help"),
        (["run", "--substrate", "natvie", "--", "x"], "unknown substrate 'natvie'", "did you mean 'native'?"),
        (["run", "--option", "raedy=1", "--", "x"], "no option 'raedy'", "did you mean 'ready'?"),
    ],
)
def test_what_was_probably_meant_is_told(arguments: list[str], message: str, remedy: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    first, second = done.stderr.splitlines()
    assert done.returncode == 2
    assert first.startswith("dutyfree: ")
    assert message in first
    assert second.startswith(f"  → {remedy}")
