"""Synthetic records: plausible studies, made from a seed, for tests of analysis and report."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np

from dutyfree.contract import Span
from dutyfree.study.records import (
    SCHEMA,
    ActionKind,
    ActionRecord,
    Line,
    Records,
    RecordsWriter,
    Session,
    Study,
    SubstrateFacts,
    Trial,
    TrialFailure,
)

BEGIN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)

# label → (use, creation, readiness beyond the command, overhead of an action, cleanup, tells inside)
PROFILES: dict[str, tuple[str, float, float, float, float, bool]] = {
    "bare": ("bare", 0.0004, 0.0008, 0.0011, 0.0006, True),
    "native": ("native", 0.0018, 0.0006, 0.0004, 0.0004, True),
    "docker": ("docker", 0.190, 0.043, 0.042, 0.055, False),
    "oci": ("oci", 0.016, 0.006, 0.007, 0.011, False),
    "kubernetes": ("kubernetes", 1.9, 0.12, 0.085, 0.9, False),
    "vm": ("vm", 2.4, 0.05, 0.012, 0.35, True),
}
TIERS = {"T0": 0, "T1": 6, "T2": 12}
KINDS: tuple[ActionKind, ...] = ("inspect", "command", "modify", "test")


def study(
    *,
    workloads: dict[str, int] | None = None,
    plan: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
) -> Study:
    return Study(
        schema=SCHEMA,
        version="0.1.0",
        started=BEGIN.isoformat(),
        plan={"name": "synthetic", "workloads": workloads or {}, **(plan or {})},
        host={
            "host_key": "abc123",
            "cpu": "A CPU @ 2.80GHz",
            "cores": 2,
            "memory_gib": 8,
            "kernel": "6.1.0",
            "os": "Debian 12",
            **(host or {}),
        },
    )


def facts(label: str, **more: Any) -> SubstrateFacts:
    use = PROFILES[label][0] if label in PROFILES else label
    return SubstrateFacts(
        **{
            "label": label,
            "use": use,
            "facts": {"python": "3.11.7", "git": "2.39.5"},
            "prepare_seconds": 1.5,
            **more,
        }
    )


def action(
    label: str = "true", seconds: float = 0.01, *, inside: float | None = None, kind: ActionKind = "command"
) -> ActionRecord:
    return ActionRecord(label=label, kind=kind, seconds=seconds, inside=inside)


def trial(workload: str = "T0", substrate: str = "bare", index: int = 0, **more: Any) -> Trial:
    """One trial; ``total`` is the sum of what it is made of unless told."""
    parallel = more.get("parallel", 1)
    made: dict[str, Any] = {
        "id": f"{workload}/{substrate}/{parallel}/{index}",
        "workload": workload,
        "substrate": substrate,
        "index": index,
        "started": (BEGIN + dt.timedelta(seconds=index)).isoformat(),
        "load": 0.2,
        **more,
    }
    if "total" not in made:
        made["total"] = sum(
            [
                made.get("creation", 0.0),
                made.get("readiness", 0.0),
                made.get("cleanup", 0.0),
                *(item.seconds for item in (*made.get("setup", ()), *made.get("actions", ()))),
            ]
        )
    return Trial(**made)


def records(*trials: Trial, **more: Any) -> Records:
    labels = dict.fromkeys(item.substrate for item in trials)
    return Records(
        study=more.get("study") or study(),
        sessions=more.get("sessions", (Session(started=BEGIN.isoformat(), load=0.1),)),
        substrates=more.get("substrates", {label: facts(label) for label in labels}),
        trials=trials,
    )


def cold(
    substrate: str, totals: list[float], workload: str = "T0", parallel: int = 1, **more: Any
) -> list[Trial]:
    """Trials of which only the whole time matters."""
    return [
        trial(
            workload,
            substrate,
            index,
            parallel=parallel,
            creation=total * 0.6,
            readiness=total * 0.3,
            cleanup=total * 0.1,
            total=total,
            **more,
        )
        for index, total in enumerate(totals)
    ]


def plausible(
    *,
    labels: tuple[str, ...] = ("bare", "docker"),
    trials: int = 20,
    tiers: tuple[str, ...] = ("T0", "T1", "T2"),
    lengths: tuple[int, ...] = (10, 50, 150),
    parallel: tuple[int, ...] = (1,),
    failing: dict[str, float] | None = None,
    spans: bool = False,
    seed: int = 1,
    slower: float = 1.0,
) -> Records:
    """A whole study. ``failing``: substrate → share of its trials that fail."""
    random = np.random.default_rng(seed)
    workloads = {name: TIERS[name] for name in tiers} | {f"trajectory-{n}": n for n in lengths}
    rows: list[Trial] = []
    clock = BEGIN
    for level in parallel:
        for index in range(-1, trials):
            for workload, count in workloads.items():
                for label in labels:
                    one = _rollout(random, workload, count, label, index, level, clock, slower, spans=spans)
                    if random.random() < (failing or {}).get(label, 0.0):
                        one = _failed(one)
                    rows.append(one)
                    if (index + 1) % level == 0:
                        clock += dt.timedelta(seconds=one.total * 1.2)
    return Records(
        study=study(
            workloads=dict.fromkeys(workloads, trials),
            plan={"parallel": {name: [level for level in parallel if level > 1] for name in workloads}},
        ),
        sessions=(Session(started=BEGIN.isoformat(), load=0.1),),
        substrates={label: facts(label) for label in labels},
        trials=tuple(rows),
    )


def _rollout(
    random: np.random.Generator,
    workload: str,
    count: int,
    label: str,
    index: int,
    level: int,
    clock: dt.datetime,
    slower: float,
    *,
    spans: bool,
) -> Trial:
    profile = PROFILES.get(label, (label, 0.08, 0.02, 0.015, 0.03, False))
    use, create, ready, overhead, clean, tells = profile
    crowd = max(1.0, level / 2)

    def noisy(value: float) -> float:
        return float(value * crowd * slower * random.lognormal(0, 0.12))

    def one(place: int) -> ActionRecord:
        kind = KINDS[place % 4]
        own = noisy((0.004, 0.02, 0.002, 0.28)[place % 4]) / slower
        added = noisy(overhead)
        told = tells and not (use == "bare" and kind == "modify")
        stretch: tuple[Span, ...] = ()
        if spans and kind != "modify":
            middle = ("run", own) if told else ("collect", added / 8)
            stretch = (Span("dispatch", 0.0, added / 2), Span(middle[0], added / 2, middle[1]))
        return ActionRecord(
            label=f"{kind}-{place}",
            kind=kind,
            seconds=own + added,
            inside=own if told else None,
            spans=stretch,
        )

    first = ActionRecord(label="ready", kind="ready", seconds=noisy(0.0009) + noisy(ready))
    setup = (
        (ActionRecord(label="clone", kind="setup", seconds=noisy(0.35) + noisy(overhead)),)
        if workload == "T2" or workload.startswith("trajectory")
        else ()
    )
    return trial(
        workload,
        label,
        max(index, 0),
        parallel=level,
        warmup=index < 0,
        started=clock.isoformat(),
        creation=(creation := noisy(create)),
        creation_spans=(Span("create", 0.0, creation / 4), Span("start", creation / 4, creation / 2))
        if spans
        else (),
        readiness=first.seconds,
        first=first,
        setup=setup,
        actions=tuple(one(place) for place in range(count)),
        cleanup=noisy(clean),
    )


def _failed(whole: Trial) -> Trial:
    return trial(
        whole.workload,
        whole.substrate,
        whole.index,
        parallel=whole.parallel,
        warmup=whole.warmup,
        started=whole.started,
        creation=whole.creation,
        total=whole.creation,
        failure=TrialFailure("infrastructure", "create", "the daemon <b>went</b> away | again"),
    )


def save(directory: Path, content: Records) -> Path:
    writer = RecordsWriter(directory)
    lines: tuple[Line, ...] = (
        content.study,
        *content.sessions,
        *content.substrates.values(),
        *content.trials,
    )
    for line in lines:
        writer.write(line)
    writer.close()
    return directory
