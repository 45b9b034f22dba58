"""The shell code of the substrate ``daytona``, in real shells. It needs no SDK."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dutyfree.substrates.daytona.wrapper import (
    FRAME_MAX,
    NO_INPUT,
    Frame,
    Refusal,
    found_frame,
    inline_input,
    shell_code,
)

MARK = "dutyfree-0123456789abcdef"
EVERY_BYTE = bytes(range(256))

SHELLS = [
    pytest.param(
        shell,
        marks=pytest.mark.skipif(
            shutil.which(shell) is None, reason=f"there is no {shell}: apt-get install {shell}"
        ),
    )
    for shell in ("sh", "bash", "zsh")
]


def run(
    command: str | tuple[str, ...],
    shell: str = "sh",
    *,
    cwd: str = "/",
    env: dict[str, str] | None = None,
    keep: int = 1 << 20,
    stdin: str = NO_INPUT,
    second: int = 2,
) -> tuple[str, str]:
    text = shell_code(MARK, command, cwd=cwd, env=env or {}, keep=keep, stdin=stdin, second=second)
    done = subprocess.run([shell, "-c", text], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    return done.stdout.decode("ascii"), done.stderr.decode("ascii")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("second", [1, 2])
def test_both_streams_keep_every_byte(shell: str, second: int) -> None:
    code = r"""
    i=0; while [ $i -lt 256 ]; do printf "\\$(printf %03o $i)"; i=$((i+1)); done; printf no >&2; exit 3
    """
    out, err = run(code, shell, second=second)
    if second == 1:
        assert err == ""
        err = out
    assert found_frame(out, MARK, "out") == Frame(3, 256, EVERY_BYTE)
    assert found_frame(err, MARK, "err") == Frame(3, 2, b"no")


def test_directory_variables_and_input(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "A": "a b'\"$x\n", "HOME": "/nowhere"}
    command = ("/bin/sh", "-c", 'pwd; printf %s "$A$HOME"; cat; echo "$1"', "sh", "last word")
    out, _ = run(command, cwd=str(tmp_path), env=given, stdin=inline_input(b"\0\xffin"))
    frame = found_frame(out, MARK, "out")
    assert isinstance(frame, Frame)
    assert frame.data == os.fsencode(tmp_path) + b"\na b'\"$x\n/nowhere\0\xffinlast word\n"


def test_variables_may_have_any_name() -> None:
    frame = found_frame(run(("env",), env={"odd-name.1": "="})[0], MARK, "out")
    assert isinstance(frame, Frame)
    assert b"odd-name.1==\n" in frame.data


def test_input_from_a_file_is_removed_after_the_command(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(EVERY_BYTE)
    frame = found_frame(run(("cat",), stdin=str(path))[0], MARK, "out")
    assert frame == Frame(0, 256, EVERY_BYTE)
    assert not path.exists()


def test_a_command_that_cannot_start() -> None:
    refused = found_frame(run("echo never", cwd="/no/such/place")[0], MARK, "out")
    assert isinstance(refused, Refusal)
    assert "o such file" in refused.reason
    frame = found_frame(run(("/no/such/program",))[0], MARK, "out")
    assert isinstance(frame, Frame)
    assert frame.code == 127


@pytest.mark.parametrize("name", ["a=b", "-c"])
def test_a_program_with_a_name_that_env_would_take_for_its_own(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    out, _ = run((f"./{name}",), cwd=str(tmp_path))
    assert found_frame(out, MARK, "out") == Frame(0, 4, b"ran\n")
    out, _ = run((name,), cwd=str(tmp_path), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    frame = found_frame(out, MARK, "out")
    assert isinstance(frame, Frame)
    assert frame.data == b"ran\n" or frame.code != 0  # never another program's success


def test_long_output_is_cut_in_the_middle() -> None:
    frame = found_frame(run("printf 0123456789", keep=4)[0], MARK, "out")
    assert frame == Frame(0, 10, b"0189")


def test_output_too_long_for_a_frame_stays_in_its_file() -> None:
    out, err = run(f"head -c {FRAME_MAX + 1} /dev/zero; echo short >&2")
    frame = found_frame(out, MARK, "out")
    assert isinstance(frame, Frame)
    kept = Path(frame.path)
    try:
        assert (frame.size, frame.data) == (FRAME_MAX + 1, b"")
        assert kept.read_bytes() == bytes(FRAME_MAX + 1)
        assert found_frame(err, MARK, "err") == Frame(0, 6, b"short\n")
    finally:
        shutil.rmtree(kept.parent)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run("echo out; echo err >&2", stdin=inline_input(b"in"))
    run("echo never", cwd="/no/such/place")
    assert list(tmp_path.iterdir()) == []


def test_a_child_in_the_background_does_not_delay_the_answer(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    try:
        out, _ = run(f"cat {fifo} & echo done")  # cat waits until the fifo has a writer
        assert found_frame(out, MARK, "out") == Frame(0, 5, b"done\n")
    finally:
        os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))  # cat ends


def test_a_frame_that_is_not_whole_is_not_a_frame() -> None:
    out, _ = run("echo whole")
    for end in range(len(out) - 1):
        assert found_frame(out[:end], MARK, "out") is None
    assert found_frame("something else\n", MARK, "out") is None
    with pytest.raises(ValueError, match="not base64"):
        found_frame(f"{MARK} out 0 4\n!!!!\n{MARK} end\n", MARK, "out")
