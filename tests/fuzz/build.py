"""Build the fuzz harnesses: each C file here, linked with the engine's sources.

A harness can include a source (``#include "pid1/init.c"``) to reach its static functions; that source is then
not linked again. A harness that defines ``__wrap_kill`` replaces all calls of ``kill`` from other files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "src/dutyfree/engine/init"
SHARED = HERE / "jail.c"
TARGETS = tuple(sorted(path.stem for path in HERE.glob("*.c") if path != SHARED))
FLAGS = [
    "-std=c17",
    "-D_GNU_SOURCE",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",  # a harness does not use everything that it includes
    "-fno-sanitize-recover=all",
    f"-I{ENGINE}",
    f"-I{HERE}",
]
REMEDY = "make fuzz as root on Debian installs it; elsewhere: clang, with its compiler-rt"


def missing() -> str:
    """The reason why nothing can be built here, or ""."""
    if not shutil.which("clang"):
        return "clang is missing"
    probe = ["clang", "-fsanitize=fuzzer,address,undefined", "-x", "c", "-", "-o", "/dev/null"]
    source = "int LLVMFuzzerTestOneInput(const void *data, unsigned long size) { return data && size > 9; }"
    done = subprocess.run(probe, input=source, capture_output=True, text=True, check=False)
    return f"clang has no libFuzzer: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


def build(directory: Path) -> dict[str, Path]:
    """Build the program of each target. Raises RuntimeError with the compiler's output."""
    directory.mkdir(parents=True, exist_ok=True)
    sources = [path for path in sorted(ENGINE.rglob("*.c")) if path.stem != "main"] + [SHARED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda path: _compile(path, directory), sources)
        objects = dict(zip(sources, compiled, strict=True))
        linked = pool.map(lambda name: _link(name, directory, objects), TARGETS)
        return dict(zip(TARGETS, linked, strict=True))


def _compile(source: Path, directory: Path) -> Path:
    target = directory / f"{source.stem}.o"
    sanitizers = "-fsanitize=fuzzer-no-link,address,undefined"
    _run(["clang", *FLAGS, sanitizers, "-c", str(source), "-o", str(target)])
    return target


def _link(name: str, directory: Path, objects: dict[Path, Path]) -> Path:
    source, target = HERE / f"{name}.c", directory / f"fuzz-{name}"
    text = source.read_text()
    included = set(re.findall(r'^#include "([\w/]+\.c)"', text, re.MULTILINE))
    wraps = sorted(set(re.findall(r"__wrap_(\w+)\(", text)))
    others = [str(made) for path, made in objects.items() if "/".join(path.parts[-2:]) not in included]
    replaced = [f"-Wl,--wrap={function}" for function in wraps]
    command = ["clang", *FLAGS, "-fsanitize=fuzzer,address,undefined", *replaced, str(source), *others]
    _run([*command, "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
