"""``dutyfree ab``: measure two configurations in one study, and say which one is slower."""

from __future__ import annotations

import re
import secrets
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from dutyfree.cli import option_values
from dutyfree.cli.progress import StudyProgress
from dutyfree.cli.report import show_comparison
from dutyfree.cli.signals import run_async
from dutyfree.cli.study import latest_directory, new_directory, recorded_plan, stopped
from dutyfree.contract.errors import UsageError
from dutyfree.study import plan as plans
from dutyfree.study.plan import Plan

NAME = "ab"
TRIALS = {"T0": 40, "T1": 20, "T2": 12}
TRAJECTORY_TRIALS = 12
BLOCKS = 12
"""How often the processes of both sides are started anew, at least: the fewest that can show a difference in
nine metrics."""
SETTLE = 0.1
"""Seconds of pause before every trial, as in the plans that come with dutyfree."""


def ab(
    a: str | None = None,
    b: str | None = None,
    /,
    *,
    workloads: str = "T0,T1,T2",
    trials: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    full_tests: bool = False,
    json: bool = False,
) -> int:
    """Say whether configuration B is slower or faster than A: measure both in turn, then compare.

    Every round runs each workload once on A and once on B, in random order, so a slow minute of the machine
    affects both. Every few rounds both start anew in fresh processes, since two processes of the same program
    differ a little. The verdict on each workload is "slower", "faster", "no difference shown" or "cannot
    tell", with B ÷ A and its 95 % interval. "cannot tell" means too few rounds or too much noise: run more
    trials, or stop other programs. The same configuration twice is an A/A test: it shows the noise of this
    machine. By default it takes a few minutes.

    Each trial is recorded when it ends: after Ctrl-C at most the current trial is lost, and --resume
    continues from there. 'dutyfree compare DIRECTORY' shows the verdicts again, 'dutyfree report DIRECTORY'
    writes the report. The exit status is 1 if B is slower in any workload, or if no trial succeeded.

    For example:

        dutyfree ab bare native
        dutyfree ab native native:ready=0 --workloads T0 --trials 100
        dutyfree ab old=native new=native:program=./dutyfree-init,limits.memory=512M
        dutyfree ab bare bare
        dutyfree ab --resume --out out/ab-20261116-120000

    Parameters
    ----------
    a
        [LABEL=]SUBSTRATE[:OPTION=VALUE,...], such as native or native:ready=0; or a TOML file with
        use = "SUBSTRATE", the options of the substrate, and optionally a label.
    b
        The configuration to compare with A, written the same way.
    workloads
        The workloads, separated by commas: T0, T1, T2, trajectory-N and others (docs/workloads.md);
        optionally with their number of trials, as in T0=100,T2=20.
    trials
        Number of trials of each workload on A, and on B, if --workloads does not give one. Default: 40 of T0,
        20 of T1, 12 of T2 and of trajectories. Fewer than 10 rarely show anything.
    out
        The directory for the records. Default: a new one in ./out.
    resume
        Continue the comparison in --out, or the latest one in ./out.
    full_tests
        Run the whole test suite of attrs in T2.
    json
        Print the comparison as JSON on standard output.
    """
    from dutyfree.analysis.ab import compare_rounds
    from dutyfree.study import runner

    directory = out or (latest_directory(f"{NAME}-*") if resume else None)
    if resume and directory is not None:
        if a is not None:
            raise UsageError("--resume takes A and B from the records", remedy="leave A and B out")
        plan = recorded_plan(directory, remedy="name A and B, without --resume")
        if len(plan.substrates) != 2:
            raise UsageError(
                f"the study in {directory} has {len(plan.substrates)} substrates, not two",
                remedy=f"continue it with: dutyfree study --resume --out {directory}",
            )
    else:
        plan = _plan(a, b, _workloads(workloads, trials), full_tests)
    directory = directory or new_directory(NAME)
    with StudyProgress() as progress:
        try:
            measured = run_async(partial(runner.run, plan, directory, resume=resume, progress=progress))
        except KeyboardInterrupt:
            advice = (
                f"to continue: dutyfree ab --resume --out {directory}\n"
                f"to see the verdicts so far: dutyfree compare {directory}"
            )
            progress.note(stopped(directory, advice))
            raise
    status = show_comparison(compare_rounds(measured), as_json=json)
    progress.note(f"records: {directory}")
    return status


def _plan(a: str | None, b: str | None, workloads: dict[str, int], full_tests: bool) -> Plan:
    if a is None or b is None:
        raise UsageError("name two configurations", remedy="such as: dutyfree ab bare native")
    (label_a, options_a), (label_b, options_b) = configuration(a), configuration(b)
    if label_a == label_b:
        label_a, label_b = f"{label_a} (A)", f"{label_b} (B)"
    plan = Plan(
        name=NAME,
        substrates=[label_a, label_b],
        options={label_a: options_a, label_b: options_b},
        workloads=workloads,
        # A new order each time: a fixed order would repeat the same imbalance in every comparison.
        seed=secrets.randbelow(1 << 31),
        settle=SETTLE,
        renew=max(1, min(workloads.values(), default=1) // BLOCKS),
        full_tests=full_tests,
    )
    return plans.check(plan, "the comparison")


def configuration(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a configuration: its label, and its options as in a plan. Raises UsageError."""
    if text.endswith(".toml"):
        return _from_file(Path(text))
    head, _, rest = text.partition(":")
    label, named, use = head.rpartition("=")
    if not use or (named and not label):
        raise UsageError(
            f"{text!r} is not a configuration", remedy="write SUBSTRATE or [LABEL=]SUBSTRATE:OPTION=VALUE,..."
        )
    options: dict[str, Any] = {"use": use}
    # A comma that is not followed by NAME= belongs to the value.
    for name, value in option_values.pairs(re.split(r",(?=[\w.]+=)", rest) if rest else [], text, "="):
        *tables, last = name.split(".")
        target: Any = options
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise UsageError(f"{text!r} sets {table} both to a value and to a table")
        target[last] = option_values.value(value)
    return label or text, options


def _from_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        options = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    label = options.pop("label", path.stem)
    if not isinstance(label, str) or not isinstance(options.get("use"), str):
        raise UsageError(f"{path} names no substrate", remedy='add a line such as use = "native"')
    return label, options


def _workloads(text: str, trials: int | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, number = part.partition("=")
        if given and not (number.isascii() and number.isdigit()):
            raise UsageError(
                f"--workloads {part!r} has no number of trials after =", remedy="write it as T0=40"
            )
        default = TRIALS.get(name, TRAJECTORY_TRIALS) if trials is None else trials
        found[name] = int(number) if given else default
    return found
