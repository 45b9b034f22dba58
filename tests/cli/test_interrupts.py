"""Ctrl-C at any moment: no traceback.

But for the first 30 ms or so: what Python does before our first statement, and the script that pip writes,
which imports ``re``, cannot be helped.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dutyfree

SCRIPT = Path(sys.executable).with_name("dutyfree")
OURS = str(Path(dutyfree.__file__).parent)
FORMS = {"script": [str(SCRIPT)], "module": [sys.executable, "-m", "dutyfree"]}

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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "module", ["dutyfree.cli", "msgspec", "cyclopts", "rich.markdown", "numpy.linalg", "matplotlib"]
)
def test_while_modules_are_loaded_it_ends_the_command_without_a_word(form, module, tmp_path):
    asked = [sys.executable, "-c", AT_AN_IMPORT, module, form, str(SCRIPT), "report", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", '"$@"; echo $?', "sh", *asked],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=interruptible,
    )
    assert (done.stdout, done.stderr) == ("130\n", "")


@pytest.mark.parametrize("form", FORMS)
def test_at_any_moment_no_traceback_is_of_ours(form):
    for step in range(20):
        process = subprocess.Popen(
            [*FORMS[form], "substrates"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=interruptible,
        )
        time.sleep(step * 0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        if said == "dutyfree: interrupted\n":
            assert process.returncode in (130, -signal.SIGINT)
        else:
            beginning = re.compile(rf'"{OURS}/__(init|main)__.py", line .*, in (<module>|main)')
            assert OURS not in beginning.sub("", said), said  # nothing that the beginning has called


def test_an_ignored_ctrl_c_stays_ignored():
    done = subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, "cyclopts", "module", str(SCRIPT), "--version"],
        capture_output=True,
        text=True,
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
