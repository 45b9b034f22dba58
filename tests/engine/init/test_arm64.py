"""The C program for arm64: it compiles without warnings, and qemu runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).parents[3]
COMPILER = "aarch64-linux-gnu-gcc"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(
            f"{COMPILER} is missing; to enable it: "
            "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross linux-libc-dev-arm64-cross"
        )
    target = tmp_path_factory.mktemp("arm64") / "dutyfree-init"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hatch_build; from pathlib import Path;"
        "sys.exit(hatch_build.build(Path(sys.argv[1], 'src/dutyfree/engine'), Path(sys.argv[2]),"
        f" cross='{COMPILER}') or None)"
    )
    done = ran([sys.executable, "-c", code, str(ROOT), str(target)])
    assert done.returncode == 0, done.stderr
    return target


def test_it_is_for_the_other_processor(program: Path) -> None:
    header = program.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [(["version"], 0, "protocol "), (["launcher", "two"], 64, "FD is not the number"), ([], 64, "usage: ")],
)
def test_it_runs(program: Path, arguments: list[str], status: int, said: str) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is missing; to enable it: apt-get install qemu-user")
    done = subprocess.run([emulator, str(program), *arguments], capture_output=True, text=True)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done.stderr


def test_its_filter_has_every_call(program: Path) -> None:
    """System call numbers differ on arm64, so the seccomp program differs too, and must still fit."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is missing; to enable it: apt-get install qemu-user")
    said = subprocess.run([emulator, str(program), "version"], capture_output=True, text=True).stdout
    assert 100 < int(said.split()[-2]) < 512
