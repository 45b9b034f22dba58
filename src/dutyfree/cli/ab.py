"""``dutyfree ab``: two configurations in one study, and a verdict."""

from __future__ import annotations

import re
import secrets
import tomllib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dutyfree.cli import amounts
from dutyfree.cli.progress import Watcher
from dutyfree.cli.reports import show_comparison
from dutyfree.cli.running import run
from dutyfree.cli.study import FOLDER, latest, recorded
from dutyfree.contract.errors import UsageError
from dutyfree.study import plan as plans
from dutyfree.study.plan import Plan

NAME = "ab"
TRIALS = {"T0": 40, "T1": 20, "T2": 12}
TRIALS_OF_TRAJECTORIES = 12


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
    """Say whether configuration B is slower or faster than A: measure both in turn, then judge.

    Every round runs each workload once on A and once on B, in random order, so whatever slows the
    machine slows both. The verdict on each workload is "slower", "faster", "no difference shown" or
    "cannot tell", with B ÷ A and its 95 % interval. "cannot tell" means too few rounds, or too much
    noise: run more trials, or let nothing else run. The same configuration twice is an A/A test: it
    shows what this machine's noise looks like. By default it takes a few minutes.

    Records are kept as they happen: Ctrl-C loses at most the trial under way, and --resume goes on
    from there. 'dutyfree compare DIRECTORY' shows the verdicts again, 'dutyfree report DIRECTORY'
    writes the whole report. The exit status is 1 when B is slower in anything, or nothing succeeded.

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
        use = "SUBSTRATE", the substrate's options, and a label if wanted.
    b
        What to compare with it, written the same way.
    workloads
        What to run, separated by commas: T0, T1, T2, trajectory-N; each with its number of trials if
        wanted, as in T0=100,T2=20.
    trials
        Trials of each workload on A, and as many on B, where --workloads does not say. By default 40
        of T0, 20 of T1, 12 of T2 and of trajectories. Fewer than 10 rarely show anything.
    out
        The directory for the records; a new one in ./out by default.
    resume
        Go on with the comparison in --out, or with the latest one in ./out, after it was stopped.
    full_tests
        Run attrs' whole test suite in T2.
    json
        Print the comparison as JSON on standard output.
    """
    from dutyfree.analysis.ab import compare_rounds
    from dutyfree.study import runner

    directory = out or (latest(f"{NAME}-*") if resume else None)
    if resume and directory is not None:
        if a is not None:
            raise UsageError("--resume goes on with the configurations on record", remedy="leave A and B out")
        plan = recorded(directory, remedy="name A and B, without --resume")
        if len(plan.substrates) != 2:
            raise UsageError(
                f"{directory} holds a study that compares no A with a B",
                remedy=f"go on with it by: dutyfree study --resume --out {directory}",
            )
    else:
        plan = _plan(a, b, _workloads(workloads, trials), full_tests)
    directory = directory or FOLDER / f"{NAME}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with Watcher(Console(stderr=True)) as watcher:
        try:
            measured = run(partial(runner.run, plan, directory, resume=resume, progress=watcher))
        except KeyboardInterrupt:
            watcher.note(
                f"stopped; go on with: dutyfree ab --resume --out {directory}\n"
                f"or see what is there: dutyfree compare {directory}"
            )
            raise
    found = compare_rounds(measured)
    status = show_comparison(found, as_json=json)
    watcher.note(f"records: {directory}")
    return status


def _plan(a: str | None, b: str | None, workloads: dict[str, int], full_tests: bool) -> Plan:
    if a is None or b is None:
        raise UsageError("name two configurations", remedy="such as: dutyfree ab bare native")
    (one, options), (other, more) = configuration(a), configuration(b)
    if one == other:
        one, other = f"{one} (A)", f"{other} (B)"
    plan = Plan(
        name=NAME,
        substrates=[one, other],
        options={one: options, other: more},
        workloads=workloads,
        # Another order each time, or the same imbalance would return in every repetition.
        seed=secrets.randbelow(1 << 31),
        full_tests=full_tests,
    )
    return plans.check(plan, "the comparison")


def configuration(text: str) -> tuple[str, dict[str, Any]]:
    """Its label, and the options of a plan: ``use`` and the substrate's own. Raises UsageError."""
    if text.endswith(".toml"):
        return _from_file(Path(text))
    head, _, rest = text.partition(":")
    label, named, use = head.rpartition("=")
    if not use or (named and not label):
        raise UsageError(
            f"{text!r} is no configuration", remedy="write SUBSTRATE or [LABEL=]SUBSTRATE:OPTION=VALUE,..."
        )
    options: dict[str, Any] = {"use": use}
    # A comma within a value is followed by something else than NAME=.
    for name, value in amounts.pairs(re.split(r",(?=[\w.]+=)", rest) if rest else [], text, "="):
        *tables, last = name.split(".")
        place: Any = options
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise UsageError(f"{text!r} has {table} both as a value and as a table")
        place[last] = amounts.value(value)
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
        raise UsageError(f"{path} names no substrate", remedy='add use = "native", or another one')
    return label, options


def _workloads(text: str, trials: int | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, number = part.partition("=")
        if given and not (number.isascii() and number.isdigit()):
            raise UsageError(f"--workloads {part!r} has no number of trials", remedy="write it as T0=40")
        usual = TRIALS.get(name, TRIALS_OF_TRAJECTORIES) if trials is None else trials
        found[name] = int(number) if given else usual
    return found
