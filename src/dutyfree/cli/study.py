"""``dutyfree study``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from dutyfree.cli.progress import Watcher
from dutyfree.cli.reports import show
from dutyfree.cli.running import run
from dutyfree.contract.errors import UsageError
from dutyfree.study import plan as plans
from dutyfree.study.plan import Plan

FOLDER = Path("out")


def study(
    *,
    plan: str | None = None,
    substrates: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    full_tests: bool = False,
    json: bool = False,
) -> int:
    """Measure the tax on this machine: run a plan's trials, then write the report.

    Trials are shuffled and interleaved across substrates. Records are kept as they happen: Ctrl-C, a
    crash or a full disk loses at most the trial under way, and --resume goes on from there. The exit
    status is 1 when not a single trial succeeded.

    For example:

        dutyfree study
        dutyfree study --plan paper --substrates bare,native,docker --out out/paper
        dutyfree study --resume --out out/paper

    Parameters
    ----------
    plan
        A shipped plan (smoke: under a minute; quick: a few minutes; paper: 100 trials of everything,
        two hours) or a TOML file. "quick" by default.
    substrates
        Substrates to measure instead of the plan's, separated by commas: "bare,docker". Those
        named here must be available.
    out
        The directory for records and report; a new one in ./out by default.
    resume
        Go on with the study in --out, or with the latest one in ./out, after it was stopped.
    full_tests
        Run attrs' whole test suite in T2, as full_tests = true in the plan does.
    json
        Print the summary as JSON on standard output.
    """
    from dutyfree.report import write
    from dutyfree.study import runner

    directory = out or (latest() if resume else None)
    wanted = _plan(plan, substrates, full_tests, directory if resume else None)
    directory = directory or FOLDER / f"{wanted.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    console = Console(stderr=True)
    with Watcher(console) as watcher:
        try:
            run(partial(runner.run, wanted, directory, resume=resume, progress=watcher))
        except KeyboardInterrupt:
            watcher.note(f"stopped; go on with: dutyfree study --resume --out {directory}")
            raise
        watcher.note("writing the report")
        summary = write(directory)
    show(summary, directory, as_json=json)
    return 1 if summary.failed == summary.trials else 0


def _plan(plan: str | None, substrates: str | None, full_tests: bool, resumed: Path | None) -> Plan:
    """The plan asked for; a resumed study goes on with its own unless told otherwise."""
    if resumed is not None and plan is None and substrates is None:
        return recorded(resumed, remedy="name its plan with --plan")
    wanted = plans.load(plan or "quick")
    if full_tests:
        wanted = replace(wanted, full_tests=True)
    if substrates is None:
        return wanted
    labels = [label.strip() for label in substrates.split(",") if label.strip()]
    options = {label: found for label, found in wanted.options.items() if label in labels}
    return plans.check(replace(wanted, substrates=labels, optional=[], options=options), "--substrates")


def recorded(directory: Path, remedy: str) -> Plan:
    """The plan of the study in a directory. Raises UsageError where there is none."""
    from dutyfree.study import runner

    found = runner.recorded_plan(directory)
    if found is None:
        raise UsageError(f"there is no study to go on with in {directory}", remedy=remedy)
    return found


def latest(pattern: str = "*") -> Path:
    """The directory in ./out that was written to last. Raises UsageError where there is none."""
    found = [path.parent for path in FOLDER.glob(f"{pattern}/records.jsonl")]
    if not found:
        raise UsageError("there is no study to go on with in ./out", remedy="name its directory with --out")
    return max(found, key=lambda path: (path / "records.jsonl").stat().st_mtime)
