"""Fuzzes each parser of the C program for a while: python -m tests.fuzz [SECONDS] [TARGET...]."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from dutyfree import paths
from tests.fuzz import building, seeds

LARGEST = 16384
"""Bytes of an input: a request's, and more than most frames'."""

NO_JAIL = 78
"""The exit code of a harness that cannot make itself harmless here (jail.h)."""

HARMLESS = "run as root, or as a user who may make namespaces"


def command(program: Path, home: Path, start: Path, *options: str) -> list[str]:
    """One run of a target, whose directories are made."""
    for name in ("corpus", "crashes", "jail"):
        (home / name).mkdir(parents=True, exist_ok=True)
    kept = f"-artifact_prefix={home}/crashes/"
    given = [str(home / "corpus"), str(start)]
    return [str(program), kept, f"-max_len={LARGEST}", "-timeout=20", *options, *given]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "DUTYFREE_FUZZ": str(home)}


def summary(log: str) -> str:
    """How much was seen at the beginning and at the end, of edges and inputs."""
    covered = re.findall(r"#(\d+)\s+(?:INITED|NEW|REDUCE|pulse|DONE)\s+cov: (\d+).*?corp: (\d+)", log)
    if not covered:
        return "nothing was run"
    first, (runs, edges, inputs) = covered[0][1], covered[-1]
    return f"{runs} runs, {first} → {edges} edges, {inputs} inputs kept"


def _fuzz(name: str, program: Path, home: Path, seconds: int) -> bool:
    """Whether nothing was found."""
    start = home.parent / "seeds" / name
    log = home / "log"
    home.mkdir(parents=True, exist_ok=True)
    before = set((home / "crashes").glob("*"))
    words = command(program, home, start, f"-max_total_time={seconds}", "-print_final_stats=1")
    with log.open("wb") as file:
        done = subprocess.run(words, env=environment(home), stdout=file, stderr=file, check=False)
    text = log.read_text(errors="replace")
    if done.returncode == NO_JAIL:
        print(f"  {name:9} skipped: {text.splitlines()[-1]}; to enable it: {HARMLESS}", file=sys.stderr)
        return True
    print(f"  {name:9} {summary(text)}", flush=True)
    if done.returncode == 0:
        return True
    print(f"  {name}: exit code {done.returncode}, all of it in {log}", file=sys.stderr)
    for line in text.splitlines():
        if re.search(r"^fuzz: |ERROR: |runtime error: |SUMMARY: ", line):
            print(f"    {line}", file=sys.stderr)
    for crash in sorted(set((home / "crashes").glob("*")) - before):
        print(f"    again: DUTYFREE_FUZZ={home} {program} {crash}", file=sys.stderr)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=60, help="for each target (60)")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(building.TARGETS)} (all)")
    wanted = parser.parse_args()
    unknown = sorted(set(wanted.targets) - set(building.TARGETS))
    if unknown or wanted.seconds < 1:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "at least one second is needed")
    reason = building.missing()
    if reason:
        print(f"fuzz: skipped: {reason}; to enable it: {building.REMEDY}", file=sys.stderr)
        return 0
    cache = paths.cache() / "fuzz"
    print(f"fuzz: building in {cache}", flush=True)
    try:
        programs = building.build(cache / "programs")
    except RuntimeError as failed:
        print(f"fuzz: cannot be built:\n{failed}", file=sys.stderr)
        return 2
    seeds.write(cache / "seeds")
    targets = wanted.targets or building.TARGETS
    sound = [_fuzz(name, programs[name], cache / name, wanted.seconds) for name in targets]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell had it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
