"""Builds the engine's C program into the package; without a compiler the package is whole but for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    BuildHookInterface = object

FLAGS = [
    "-std=c17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-static",
    "-fdata-sections",
]
LINKED = ["-Wl,--sort-section=alignment"]
"""Small variables do not lie among large buffers: of a page that is written to each sandbox has its own."""

SANITIZED = [
    "-std=c17",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
]
NO_COMPILER = "no C compiler"


def compiler() -> list[str] | None:
    """Prefer musl: its programs start faster. The kernel's headers come last, after musl's own."""
    headers = Path("/usr/include")
    if shutil.which("musl-gcc"):
        include = [headers, *headers.glob(f"{sysconfig.get_platform().rpartition('-')[2]}-linux-gnu")]
        return ["musl-gcc", *(part for path in include for part in ("-idirafter", str(path)))]
    return next(([name] for name in ("gcc", "clang", "cc") if shutil.which(name)), None)


def build(engine: Path, target: Path, *, sanitized: bool = False, cross: str = "") -> str:
    """Compile the program, for this machine or with the compiler for another; why it could not be, or ""."""
    found = [cross] if cross else ["gcc"] if sanitized else compiler()
    if found is None or not shutil.which(found[0]):
        return NO_COMPILER
    target.parent.mkdir(exist_ok=True, parents=True)
    scratch = target.with_suffix(".new")
    init = engine / "init"
    command = [*found, *(SANITIZED if sanitized else FLAGS), f"-I{init}", "-o"]
    sources = sorted(init.rglob("*.c"))
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{directory}/{number}.o" for number in range(len(sources))]
        compiled = pool.map(lambda made, source: _run([*command, made, "-c", str(source)]), objects, sources)
        reason = "".join(compiled) or _run([*command, str(scratch), *objects, *LINKED])
    if not reason:
        scratch.replace(target)
    return reason


def _run(command: list[str]) -> str:
    """What the compiler says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr or f"{command[0]} ended with {done.returncode}") if done.returncode else ""


class EngineHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before the wheel, also an editable one, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        engine = Path(self.root, "src/dutyfree/engine")
        target = engine / "bin/dutyfree-init"
        if sys.platform != "linux":
            self.app.display_warning(
                f"dutyfree needs Linux, and this is {sys.platform}: only records can be worked with here"
            )
            return
        reason = build(engine, target)
        if reason == NO_COMPILER:
            self.app.display_warning(f"the substrate native will not be available: {reason}")
            return
        if reason:
            raise RuntimeError(reason)
        build_data["artifacts"].append("src/dutyfree/engine/bin/dutyfree-init")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    here = Path(__file__).parent / "src/dutyfree/engine"
    sys.exit(build(here, here / "bin/dutyfree-init") or None)
