"""Build and run floor.c, which measures what the kernel alone needs for a sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ENGINE = HERE.parent / "src/dutyfree/engine/init"
REPLACED = ("sandboxes.c", "freeze.c", "init.c", "launcher.c", "audit.c", "main.c", "client.c", "keep.c")
"""The engine's sources that floor.c takes the place of; it links all others."""

sys.path.insert(0, str(HERE.parent))
from hatch_build import FLAGS, compiler  # noqa: E402


def build(directory: Path) -> tuple[Path, Path]:
    """Build the probe, and a static program that does nothing. Raises RuntimeError without a compiler."""
    found = compiler()
    if found is None:
        raise RuntimeError("no C compiler: install musl-tools")
    nothing = directory / "nothing.c"
    nothing.write_text("int main(void) { return 0; }\n")
    sources = [HERE / "floor.c", *(path for path in sorted(ENGINE.rglob("*.c")) if path.name not in REPLACED)]
    for target, parts in {"floor": sources, "static-true": [nothing]}.items():
        subprocess.run([*found, *FLAGS, f"-I{ENGINE}", "-o", directory / target, *parts], check=True)
    return directory / "floor", directory / "static-true"


class Floor:
    """One running probe. It answers letters (floor.c lists them) with times."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, letter: str) -> tuple[float, float]:
        """Seconds until the result, and until everything is removed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(letter)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the probe of the floor died")
        result, gone = line.split()
        return int(result) / 1e9, int(gone) / 1e9


@contextmanager
def opened(count: int = 1) -> Iterator[tuple[list[Floor], Path]]:
    """Start this many probes. Returns them and the path of the static program."""
    with TemporaryDirectory(prefix="dutyfree-floor-") as scratch:
        directory = Path(scratch)
        program, static = build(directory)
        skeleton = directory / "skeleton"
        for name in ("dev", "etc", "proc", "sys", "tmp", "usr", "workspace"):
            (skeleton / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                (skeleton / name).symlink_to(os.readlink(Path("/", name)))
        (skeleton / "etc/ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
        (skeleton / "static-true").write_bytes(static.read_bytes())
        (skeleton / "static-true").chmod(0o755)
        with ExitStack() as stack:
            command = [str(path) for path in (program, skeleton, static)]
            yield [stack.enter_context(_running(command)) for _ in range(count)], static


@contextmanager
def _running(command: list[str]) -> Iterator[Floor]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Floor(process)
