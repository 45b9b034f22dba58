"""Fuzz each parser of the C program: python -m tests.fuzz [SECONDS] [TARGET...]."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from dutyfree import paths
from tests.fuzz import build, seeds

LARGEST = 16384
"""Largest input in bytes: the size of a request, and more than most frames."""

NO_JAIL = 78
"""Exit code of a harness that cannot set up its jail (jail.h)."""

HARMLESS = "run as root, or as a user who may create user namespaces"


def command(program: Path, home: Path, start: Path, *options: str) -> list[str]:
    """The command line of one run. Creates the target's directories."""
    for name in ("corpus", "crashes", "jail"):
        (home / name).mkdir(parents=True, exist_ok=True)
    kept = f"-artifact_prefix={home}/crashes/"
    given = [str(home / "corpus"), str(start)]
    return [str(program), kept, f"-max_len={LARGEST}", "-timeout=20", *options, *given]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "DUTYFREE_FUZZ": str(home)}


def summary(log: str) -> str:
    """Covered edges at the start and at the end, and the number of inputs kept."""
    covered = re.findall(r"#(\d+)\s+(?:INITED|NEW|REDUCE|pulse|DONE)\s+cov: (\d+).*?corp: (\d+)", log)
    if not covered:
        return "no runs"
    first, (runs, edges, inputs) = covered[0][1], covered[-1]
    return f"{runs} runs, {first} → {edges} edges, {inputs} inputs kept"


def _fuzz(name: str, program: Path, home: Path, seconds: int) -> bool:
    """Fuzz one target. Returns whether it found nothing."""
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
    print(f"  {name}: exit code {done.returncode}; the full log is {log}", file=sys.stderr)
    for line in text.splitlines():
        if re.search(r"^fuzz: |ERROR: |runtime error: |SUMMARY: ", line):
            print(f"    {line}", file=sys.stderr)
    for crash in sorted(set((home / "crashes").glob("*")) - before):
        print(f"    to repeat it: DUTYFREE_FUZZ={home} {program} {crash}", file=sys.stderr)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=60, help="for each target (60)")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(build.TARGETS)} (all)")
    wanted = parser.parse_args()
    unknown = sorted(set(wanted.targets) - set(build.TARGETS))
    if unknown or wanted.seconds < 1:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "at least one second is needed")
    reason = build.missing()
    if reason:
        print(f"fuzz: skipped: {reason}; to enable it: {build.REMEDY}", file=sys.stderr)
        return 0
    cache = paths.cache() / "fuzz"
    print(f"fuzz: building in {cache}", flush=True)
    try:
        programs = build.build(cache / "programs")
    except RuntimeError as failed:
        print(f"fuzz: cannot be built:\n{failed}", file=sys.stderr)
        return 2
    seeds.write(cache / "seeds")
    targets = wanted.targets or build.TARGETS
    sound = [_fuzz(name, programs[name], cache / name, wanted.seconds) for name in targets]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
