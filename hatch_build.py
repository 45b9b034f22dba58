"""Build the engine's C program into the package. Without a compiler, the package lacks only that program."""

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
    "-D_GNU_SOURCE",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-static",
    "-fdata-sections",
]
LINK_FLAGS = ["-Wl,--sort-section=alignment"]
"""Keep small variables apart from large buffers: each sandbox copies every page that it writes to."""

SANITIZED_FLAGS = [
    "-std=c17",
    "-D_GNU_SOURCE",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
]
NO_COMPILER = "no C compiler"


def compiler() -> list[str] | None:
    """The compiler command. musl comes first: its programs start faster. It needs the kernel headers last."""
    headers = Path("/usr/include")
    if shutil.which("musl-gcc"):
        include = [headers, *headers.glob(f"{sysconfig.get_platform().rpartition('-')[2]}-linux-gnu")]
        return ["musl-gcc", *(part for path in include for part in ("-idirafter", str(path)))]
    return next(([name] for name in ("gcc", "clang", "cc") if shutil.which(name)), None)


def build(engine: Path, target: Path, *, sanitized: bool = False, cross: str = "") -> str:
    """Compile the program, for this machine or with a cross compiler. Returns the error, or ""."""
    found = [cross] if cross else ["gcc"] if sanitized else compiler()
    if found is None or not shutil.which(found[0]):
        return NO_COMPILER
    target.parent.mkdir(exist_ok=True, parents=True)
    scratch = target.with_suffix(".new")
    init = engine / "init"
    command = [*found, *(SANITIZED_FLAGS if sanitized else FLAGS), f"-I{init}", "-o"]
    sources = sorted(init.rglob("*.c"))
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{directory}/{number}.o" for number in range(len(sources))]
        compiled = pool.map(lambda out, source: _run([*command, out, "-c", str(source)]), objects, sources)
        reason = "".join(compiled) or _run([*command, str(scratch), *objects, *LINK_FLAGS])
    if not reason:
        scratch.replace(target)
    return reason


def _run(command: list[str]) -> str:
    """Run the compiler. Returns its output if it fails, else ""."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr or f"{command[0]} ended with {done.returncode}") if done.returncode else ""


class EngineHook(BuildHookInterface):  # type: ignore[type-arg]
    """Build the program before a wheel, also an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        engine = Path(self.root, "src/dutyfree/engine")
        target = engine / "bin/dutyfree-init"
        if sys.platform != "linux":
            self.app.display_warning(
                f"dutyfree needs Linux to run sandboxes; on {sys.platform} you can only analyze records"
            )
            return
        reason = build(engine, target)
        if reason == NO_COMPILER:
            self.app.display_warning(
                f"the substrate native will not be available: {reason}; install musl-tools and retry"
            )
            return
        if reason:
            raise RuntimeError(reason)
        build_data["artifacts"].append("src/dutyfree/engine/bin/dutyfree-init")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    here = Path(__file__).parent / "src/dutyfree/engine"
    sys.exit(build(here, here / "bin/dutyfree-init") or None)
