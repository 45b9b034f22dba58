"""``dutyfree study``: measure this machine, then write the report."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from dutyfree.cli.progress import StudyProgress
from dutyfree.cli.report import show_summary
from dutyfree.cli.signals import run_async
from dutyfree.contract.errors import DutyfreeError, UsageError
from dutyfree.study import plan as plans
from dutyfree.study.plan import Plan

OUT = Path("out")


def study(
    *,
    plan: str | None = None,
    substrates: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    budget: str | None = None,
    full_tests: bool = False,
    json: bool = False,
) -> int:
    """Measure the tax on this machine: run the trials of a plan, then write the report.

    The trials of all substrates run interleaved, in random order. Each trial is recorded when it ends: after
    Ctrl-C, a crash or a full disk, at most the current trial is lost, and --resume continues from there. The
    exit status is 1 if no trial succeeded.

    For example:

        dutyfree study
        dutyfree study --plan paper --substrates bare,native,docker --out out/paper
        dutyfree study --resume --out out/paper
        dutyfree study --plan archetypes --budget 40m

    Parameters
    ----------
    plan
        The name of a plan that comes with dutyfree (smoke: under a minute; quick: a few minutes; paper: two
        hours; archetypes: everything that runs here), or a TOML file. Default: quick.
    substrates
        Measure these substrates instead of the plan's, separated by commas: "bare,docker". All of them must
        be available.
    out
        The directory for records and report. Default: a new one in ./out.
    resume
        Continue the study in --out, or the latest one in ./out.
    budget
        Stop after this time, such as 40m or 2h30m, and report what was measured. --resume runs the rest.
    full_tests
        Run the whole test suite of attrs in T2. The same as full_tests = true in the plan.
    json
        Print the summary as JSON on standard output.
    """
    from dutyfree.study import runner

    most = None if budget is None else seconds(budget)
    directory = out or (latest_directory() if resume else None)
    chosen = _plan(plan, substrates, full_tests, directory if resume else None)
    directory = directory or new_directory(chosen.name)
    with StudyProgress() as progress:
        try:
            measured = run_async(
                partial(runner.run, chosen, directory, resume=resume, progress=progress, budget=most)
            )
        except KeyboardInterrupt:
            progress.note(stopped(directory, f"to continue: dutyfree study --resume --out {directory}"))
            raise
        progress.note("writing the report")
        from dutyfree.report import files  # imports matplotlib and scipy, which is slow

        summary = files.write(directory, measured)
    show_summary(summary, directory, as_json=json)
    if not summary.trials and budget is not None:
        fitted = "only warm-ups" if summary.warmups else "no trials"
        raise DutyfreeError(
            f"{fitted} fitted into {budget}: nothing was measured",
            remedy=f"dutyfree study --resume --out {directory}, with a longer --budget",
        )
    return 1 if summary.failed == summary.trials else 0


_TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds(text: str) -> float:
    """A time such as 90s, 40m or 2h30m. Raises UsageError."""
    found = _TIME.fullmatch(text.replace(" ", ""))
    parts = [int(part or 0) for part in found.groups()] if found else []
    if not any(parts):
        raise UsageError(f"--budget {text!r} is not a time", remedy="write it as 90s, 40m or 2h30m")
    hours, minutes, rest = parts
    return float(hours * 3600 + minutes * 60 + rest)


def _plan(plan: str | None, substrates: str | None, full_tests: bool, resumed: Path | None) -> Plan:
    """The plan to run. A resumed study keeps its own plan, unless --plan or --substrates is given."""
    if resumed is not None and plan is None and substrates is None:
        return recorded_plan(resumed, remedy="check --out; to start a new study there, leave --resume out")
    loaded = plans.load(plan or "quick")
    if full_tests:
        loaded = replace(loaded, full_tests=True)
    if substrates is None:
        return loaded
    labels = [label.strip() for label in substrates.split(",") if label.strip()]
    options = {label: found for label, found in loaded.options.items() if label in labels}
    most = {label: trials for label, trials in loaded.most.items() if label in labels}
    chosen = replace(loaded, substrates=labels, optional=[], options=options, most=most)
    return plans.check(chosen, "--substrates")


def recorded_plan(directory: Path, remedy: str) -> Plan:
    """The plan of the study in a directory. Raises UsageError if there is none."""
    from dutyfree.study import runner

    found = runner.recorded_plan(directory)
    if found is None:
        raise UsageError(f"there is no study to resume in {directory}", remedy=remedy)
    return found


def stopped(directory: Path, advice: str) -> str:
    """What to say after Ctrl-C."""
    from dutyfree.study import records

    return f"stopped; {advice}" if records.exists(directory) else "stopped before the first trial"


def new_directory(name: str) -> Path:
    return OUT / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def latest_directory(pattern: str = "*") -> Path:
    """The directory of the most recent records in ./out. Raises UsageError if there are none."""
    found = [path.parent for path in OUT.glob(f"{pattern}/records.jsonl")]
    if not found:
        raise UsageError("there is no study to resume in ./out", remedy="name its directory with --out")
    return max(found, key=lambda path: (path / "records.jsonl").stat().st_mtime)
