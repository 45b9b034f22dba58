"""Ctrl-C while a command is loaded: no traceback.

But for the first 30 ms or so: what Python does before our first statement, and the script that pip writes,
which imports ``re``, cannot be helped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ran

SCRIPT = Path(sys.executable).with_name("dutyfree")

AT_AN_IMPORT = """
import os, runpy, signal, sys

wanted, form, *sys.argv = sys.argv[1:]

def hook(event, arguments):
    if event == "import" and arguments[0] == wanted:
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
if form == "module":
    runpy.run_module("dutyfree", run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it


@pytest.mark.parametrize("form", ["script", "module"])
@pytest.mark.parametrize(
    "module", ["dutyfree.cli", "msgspec", "cyclopts", "asyncio", "numpy.linalg", "matplotlib"]
)
def test_while_modules_are_loaded_it_ends_the_command_without_a_word(form, module, tmp_path):
    asked = [sys.executable, "-c", AT_AN_IMPORT, module, form, str(SCRIPT), "report", str(tmp_path)]
    done = ran(["sh", "-c", '"$@"; echo $?', "sh", *asked], check=True, preexec_fn=interruptible)
    assert (done.stdout, done.stderr) == ("130\n", "")


def test_an_ignored_ctrl_c_stays_ignored():
    done = ran(
        [sys.executable, "-c", AT_AN_IMPORT, "cyclopts", "module", str(SCRIPT), "--version"],
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stdout.startswith("dutyfree ")


def test_the_package_loads_nothing_until_it_is_used():
    script = """
import sys
before = set(sys.modules)
import dutyfree
assert set(sys.modules) - before == {"dutyfree"}, set(sys.modules) - before
assert {*dutyfree.__all__} <= {*dir(dutyfree)}
for name in dutyfree.__all__:
    getattr(dutyfree, name)
assert dutyfree.open is dutyfree.substrates.open
assert not hasattr(dutyfree, "opened")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
