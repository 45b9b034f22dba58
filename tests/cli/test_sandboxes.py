"""``dutyfree run``, ``shell``, ``ps`` and ``gc``, with real sandboxes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from dutyfree import gc
from dutyfree.engine.store.store import Store
from tests.awaiting import PATIENCE
from tests.engine import counts
from tests.processes import eventually, ran, speaking

pytestmark = pytest.mark.native

COMMAND = [sys.executable, "-m", "dutyfree"]
PIDS = 1 << 22
"""No process has a greater number."""


def dutyfree(*arguments, status=0, **options):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, check=False, **options)
    assert done.returncode == status, done.stdout + done.stderr
    assert b"Traceback" not in done.stderr
    return done


@contextmanager
def running(*command):
    """A command in a sandbox that has printed a line."""
    with speaking(*COMMAND, "run", "--", *command) as (process, _):
        yield process


@pytest.fixture
def sleeper():
    """Another owner, with one sandbox in which something runs."""
    with running("sh", "-c", "sleep 1000 & echo up; wait # " + "long" * 100) as process:
        yield process
        process.kill()


def test_streams_and_status_are_the_commands_own():
    done = dutyfree("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3", status=3)
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    dutyfree("run", "--", "sh", "-c", "kill -TERM $$", status=128 + signal.SIGTERM)
    for seconds in PATIENCE:
        done = dutyfree("run", "--timeout", seconds, "--", "sh", "-c", "echo begun; sleep 1000", status=124)
        assert done.stderr == f"dutyfree: the command was killed after {seconds:g} s (--timeout)\n".encode()
        if done.stdout:
            break
    assert done.stdout == b"begun\n"
    assert b"no-such-program" in dutyfree("run", "--", "no-such-program", status=127).stderr


def test_input_is_passed_on(tmp_path):
    assert dutyfree("run", "--", "cat", input=b"in").stdout == b"in"
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    with (tmp_path / "file").open("rb") as file:
        assert dutyfree("run", "--", "wc", "-c", stdin=file).stdout == b"3000000\n"
    assert dutyfree("run", "--", "cat", stdin=subprocess.DEVNULL).stdout == b""


def test_input_and_output_flow_while_it_runs():
    with subprocess.Popen(
        [*COMMAND, "run", "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            assert process.stdout.readline() == word
        process.stdin.close()
    assert process.returncode == 0


def test_input_that_never_ends_holds_nothing():
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        done = dutyfree("run", "--", "head", "-n1", stdin=endless.stdout)
        endless.kill()
    assert done.stdout == b"y\n"


def test_a_reader_that_leaves_ends_it():
    pipeline = f"{sys.executable} -m dutyfree run -- yes | head -n1"
    done = subprocess.run(pipeline, shell=True, capture_output=True, check=False, timeout=60)
    assert done.stdout == b"y\n"
    assert b"Traceback" not in done.stderr


def test_files_limits_and_environment(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "name").write_text("world")
    script = (
        'echo "$GREETING $(cat /data/name)" > result; cat /sys/fs/cgroup/x 2>/dev/null; id -un; ulimit -a'
    )
    done = dutyfree(
        *("run", "--memory", "64M", "--cpus", "0.5", "--pids", "32", "--user", "nobody", "--cwd", "/tmp"),
        *("--env", "GREETING=hello", "--upload", f"{tmp_path / 'given'}:/data"),
        *("--download", f"/tmp/result:{tmp_path / 'result'}", "--", "sh", "-c", script),
    )
    assert b"nobody" in done.stdout
    assert (tmp_path / "result").read_text() == "hello world\n"
    bomb = "import sys; x = bytearray(200 << 20); print('still here')"
    done = dutyfree("run", "--memory", "64M", "--", "python3", "-c", bomb, status=137)
    assert done.stdout == b""


def test_a_recipe_is_made_and_used(tmp_path):
    environment = {**os.environ, "DUTYFREE_CACHE": str(tmp_path / "cache")}
    (tmp_path / "data").write_text("given")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[stages]]\nkind = "files"\nfiles = { there = "data" }\n'
        '[[stages]]\nkind = "setup"\ncommands = ["mv there here"]'
    )
    for _ in range(2):
        done = dutyfree("run", "--recipe", str(recipe), "--", "cat", "here", env=environment)
        assert done.stdout == b"given"
    assert dutyfree("shell", "--recipe", str(recipe), input=b"ls", env=environment).stdout == b"here\n"
    done = dutyfree("run", "--recipe", str(recipe), "--image", "host", "--", "true", status=2)
    assert b"--image and --recipe exclude each other" in done.stderr
    recipe.write_text('[[stages]]\nkind = "setup"\ncommands = ["echo no; exit 3"]')
    done = dutyfree("run", "--recipe", str(recipe), "--", "true", status=1, env=environment)
    assert b"stage 'setup': 'echo no; exit 3' ended with 3: no" in done.stderr


def test_a_failed_commands_status_is_told_also_if_its_result_is_missing():
    done = dutyfree("run", "--download", "/nonexistent:x", "--", "sh", "-c", "exit 7", status=7)
    assert b"--download /nonexistent:x: there is no /nonexistent in the sandbox" in done.stderr


def test_json_tells_where_the_time_went():
    seen = json.loads(dutyfree("run", "--json", "--", "sh", "-c", "echo out; exit 4", status=4).stdout)
    assert (seen["exit_code"], seen["stdout"]) == (4, "out\n")
    assert "run" in {span["name"] for span in seen["spans"]}
    assert seen["sandbox"]["id"].startswith("native-")


@pytest.mark.parametrize("substrate", ["bare", "scripted"])
def test_other_substrates_run_too(substrate):
    options = ("--option", "exit_code=5", "--option", "stdout=told") if substrate == "scripted" else ()
    command = ("sh", "-c", "cat; exit 5")
    done = dutyfree("run", "--substrate", substrate, *options, "--", *command, input=b"told", status=5)
    assert done.stdout == b"told"


def test_a_substrate_whose_streams_take_bytes_only_gets_all_input_at_once():
    use = "tests.cli.bytes_only:BytesOnly"
    assert dutyfree("run", "--substrate", use, "--", "cat", input=b"told").stdout == b"told"
    assert dutyfree("run", "--substrate", use, "--", "cat", stdin=subprocess.DEVNULL).stdout == b""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "no command to run"),
        (["run", "--memory", "much", "--", "true"], "is not a size"),
        (["run", "--network", "maybe", "--", "true"], "is not a network policy"),
        (["run", "--memroy", "1G", "--", "true"], "there is no option --memroy"),
        (["run", "--timeout", "nan", "--", "true"], "--timeout must be a number of seconds > 0, not nan"),
        (["run", "--timeout", "0", "--", "true"], "--timeout must be a number of seconds > 0, not 0"),
        (["run", "--pids", "0", "--", "true"], "pids must be > 0"),
        (["run", "--disk", "0", "--", "true"], "disk must be > 0"),
        (["run", "--cpus", "-1", "--", "true"], "cpus must be > 0"),
        (["run", "--cpus", "0.001", "--", "true"], "the kernel cannot limit to 0.001 cpus"),
        (["run", "--memory", "4K", "--", "true"], "no program runs in 4096 bytes"),
        (["run", "--pids", str(1 << 64), "--", "true"], "≤ 4000000"),
        (["run", "--image", "./nonexistent", "--", "true"], "there is no image at /"),
        (["run", "--env", "=value", "--", "true"], "nothing before '='"),
        (["run", "--env", "novalue", "--", "true"], "--env 'novalue' has no '='"),
        (["run", "--upload", "/nonexistent:/x", "--", "true"], "--upload /nonexistent:/x: No such file"),
        (
            ["run", "--download", "nosuch:x", "--", "true"],
            "there is no nosuch in the sandbox\n  → a relative path starts at /workspace",
        ),
        (["run", "--download", "/etc/os-release:/proc/x/y", "--", "true"], "/proc/x/y: No such file"),
        (["run", "--substrate", "nope", "--", "true"], "unknown substrate 'nope'"),
        (["run", "--option", "nope=1", "--", "true"], "has no option 'nope'"),
        (["shell", "--substrate", "docker", "--option", "host=/nonexistent.sock"], "/nonexistent.sock"),
    ],
)
def test_bad_input_gets_one_clear_sentence(arguments, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(number):
    with running("sh", "-c", "(setsid sleep 1000 &); echo up; sleep 1000") as process:
        family = counts.Family(process.pid)
        process.send_signal(number)
    assert process.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    assert family.inits
    assert not family.remains()


def test_a_shell_remembers_from_line_to_line():
    script = b"NAME=value\ncd /tmp\necho $NAME $PWD\nfalse\n"
    assert dutyfree("shell", input=script, status=1).stdout == b"value /tmp\n"
    dutyfree("shell", input=b"exit 7\necho not reached\n", status=7)
    done = dutyfree("shell", "--env", "A=it's", "--cwd", "/usr", input=b"echo $A $PWD\n")
    assert done.stdout == b"it's /usr\n"


class Person:
    """Somebody at a terminal, before whom ``dutyfree shell`` runs."""

    def __init__(self, *arguments):
        self.screen, self.theirs = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [*COMMAND, "shell", *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
        )
        self.seen = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def types(self, text):
        os.write(self.screen, text)

    def sees(self, text):
        """And forgets what came before."""
        while text not in self.seen:
            self.seen += os.read(self.screen, 4096)
        self.seen = self.seen.partition(text)[2]

    def ends(self):
        status = self.process.wait()
        assert termios.tcgetattr(self.theirs) == self.before
        os.close(self.screen)
        os.close(self.theirs)
        return status


def test_a_shell_on_a_terminal_is_one():
    person = Person("--env", "NAME=value")
    person.types(b"echo $NAME-$((6 * 7)); tty; stty size\n")
    person.sees(b"value-42")
    person.sees(b"/dev/pts/")
    person.sees(b"24 80")
    person.resize(50, 132)
    person.process.send_signal(signal.SIGWINCH)
    person.types(b'until [ "$(stty size)" = "$((2 * 25)) 132" ]; do sleep 0.02; done; stty size\n')
    person.sees(b"50 132")
    person.types(b"sh -c 'echo be\"\"fore; exec sleep 1000'\n")
    person.sees(b"before")
    person.types(b"\x03")  # Ctrl-C is the sandbox's
    person.types(b"echo after-$((1 + 1))\n")
    person.sees(b"after-2")
    person.types(b"exit 3\n")
    assert person.ends() == 3


def test_a_shell_is_bash_with_a_history_and_a_prompt_that_names_the_sandbox():
    person = Person()
    person.sees(b"native-%d-1:" % person.process.pid)
    person.types(b"echo $0-$((6 * 7))-$TERM; cd /usr\n")
    person.sees(b"bash-42-" + os.environ.get("TERM", "xterm").encode())
    person.sees(b"native-%d-1:/usr# " % person.process.pid)
    person.types(b"echo one-$((1 + 1))\n")
    person.sees(b"one-2")
    person.types(b"\x1b[A\n")  # what was typed last, again
    person.sees(b"one-2")
    person.types(b"echo ree\x1b[D\x1b[D\x1b[Dth\n")  # the cursor moves in the line
    person.sees(b"\rthree")
    person.types(b'[ -z "$PROMPT_COMMAND" ] && kill -KILL $$\n')
    assert person.ends() == 128 + signal.SIGKILL


@pytest.mark.skipif(not Path("/usr/bin/busybox").exists(), reason="apt-get install busybox-static")
def test_a_shell_is_sh_where_there_is_no_bash(tmp_path):
    for name in ("bin", "usr", "tmp", "proc", "dev", "sys", "etc", "root"):
        (tmp_path / name).mkdir()
    shutil.copy("/usr/bin/busybox", tmp_path / "bin/busybox")
    (tmp_path / "bin/sh").symlink_to("busybox")
    person = Person("--image", str(tmp_path))
    person.sees(b"native-%d-1" % person.process.pid)
    person.types(b"echo $0-$((6 * 7)); exit 4\n")
    person.sees(b"sh-42")
    assert person.ends() == 4


def test_a_shell_whose_sandbox_dies_gives_the_terminal_back():
    person = Person()
    person.types(b"echo up-$((1 + 1))\n")
    person.sees(b"up-2")
    os.kill(_launcher_of(person.process.pid), signal.SIGKILL)
    person.sees(b"\x1b[?25h")  # a cursor
    person.sees(b"dutyfree: ")
    assert person.ends() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_terminal_is_restored_when_the_shell_is_ended(number):
    person = Person()
    person.types(b"echo up-$((1 + 1))\n")
    person.sees(b"up-2")
    family = counts.Family(person.process.pid)
    person.process.send_signal(number)
    assert person.ends() == 130
    assert not family.remains()


def test_ps_shows_the_sandboxes_of_others(sleeper):
    found = [each for each in json.loads(dutyfree("ps", "--json").stdout) if each["owner"] == sleeper.pid]
    assert len(found) == 1
    (living,) = found
    assert living["id"] == f"native-{sleeper.pid}-1"
    assert (living["image"], living["state"], living["processes"]) == ("host", "running", 2)
    assert "sleep 1000" in living["program"]
    assert living["memory"] > 0
    assert 0 <= time.time() - living["since"] < 300
    table = dutyfree("ps").stdout.decode()
    assert living["id"] in table
    assert "sleep 1000" in table
    sleeper.kill()
    sleeper.wait()
    assert eventually(lambda: living["id"] not in dutyfree("ps").stdout.decode())


LIAR = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"dutyfree-engine")
if os.fork():
    print("up", flush=True)
time.sleep(1000)
"""


def test_ps_is_not_fooled_by_a_name():
    """What runs in a sandbox can call itself a launcher."""
    with running("python3", "-c", LIAR) as process:
        found = json.loads(dutyfree("ps", "--json").stdout)
        (living,) = [each for each in found if each["owner"] == process.pid]
        assert living["processes"] == 2
        assert not [each for each in found if each["owner"] == living["init"]]
        process.kill()


def _groups_of(launcher: int) -> list[Path]:
    prefix = f"dutyfree-{launcher}-"
    return [
        Path(directory, name)
        for directory, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(prefix)
    ]


def _launcher_of(owner: int) -> int:
    (launcher,) = set(counts.children(owner)) & set(counts.processes(("dutyfree-engine",)))
    return launcher


def test_gc_removes_what_the_dead_left_and_nothing_else(sleeper, tmp_path):
    cache = tmp_path / "cache"
    environment = {**os.environ, "DUTYFREE_CACHE": str(cache), "TMPDIR": str(tmp_path)}
    # The control groups of a launcher that was killed.
    with running("sh", "-c", "echo up; sleep 1000 # " + "long" * 100) as dying:
        launcher = _launcher_of(dying.pid)
        os.kill(launcher, signal.SIGKILL)
    groups = _groups_of(launcher)
    # Directories of a sandbox of bare and of builds.
    identity = _identity_of_the_dead()
    for name in ("dutyfree-bare-old/work", "cache/images/build-old", "cache/fixture-making-old"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(bytes(100_000))
    (tmp_path / "dutyfree-bare-old.owner").symlink_to(identity)
    # And two layers of no image, one of which is in use.
    store = Store(cache / "layers")
    store.obtain(f"rootfs:{0:064x}", lambda _: (1234, 0, 0)).close()
    held = store.obtain(f"rootfs:{1:064x}", lambda _: (5678, 0, 0))

    spared = json.loads(dutyfree("gc", "--dry-run", "--json", env=environment).stdout)
    assert not [each for each in spared if each["kind"] == "layers"], "what recipes were made into stays"
    planned = json.loads(dutyfree("gc", "--spare", "0", "--dry-run", "--json", env=environment).stdout)
    whats = {each["what"] for each in planned}
    # Another launcher on this machine may sweep them as well.
    assert {str(group) for group in groups if group.exists()} <= whats
    assert [each["size"] for each in planned if each["kind"] == "layers"] == [1234]
    assert len(store.layers()) == 2
    assert len([what for what in whats if what.startswith(str(tmp_path))]) == 3
    assert all(each["size"] >= 100_000 for each in planned if each["what"].startswith(str(tmp_path)))
    assert not any(f"dutyfree-{_launcher_of(sleeper.pid)}" in what for what in whats)
    assert all(Path(what).exists() for what in whats if what.startswith(str(tmp_path)))

    said = dutyfree("gc", "--spare", "0", env=environment).stdout.decode()
    assert "removed" in said
    assert not any(group.exists() for group in groups)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert [facts.key for facts in store.layers()] == [held.key]
    assert sleeper.poll() is None
    (living,) = [each for each in json.loads(dutyfree("ps", "--json").stdout) if each["owner"] == sleeper.pid]
    assert living["state"] == "running"
    # The launcher that lives can still make sandboxes: its groups are whole.
    assert any(group.name.startswith("dutyfree-") for group in _groups_of(_launcher_of(sleeper.pid)))
    assert not [
        each
        for each in json.loads(dutyfree("gc", "--json", env=environment).stdout)
        if str(tmp_path) in each["what"]
    ]
    held.close()


def test_the_groups_of_a_launcher_that_cannot_be_seen_stay(sleeper):
    """It may run in another pid namespace, where its number means itself: it holds a lock."""
    groups = [
        group.with_name(f"dutyfree-{PIDS + os.getpid()}") for group in _groups_of(_launcher_of(sleeper.pid))
    ]
    assert groups
    with contextlib.ExitStack() as held:
        for group in groups:
            group.mkdir()
            descriptor = os.open(group, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        dutyfree("run", "--", "true")
        dutyfree("gc")
        assert all(group.exists() for group in groups)
    dutyfree("run", "--", "true")
    assert not any(group.exists() for group in groups)


def test_others_may_remove_the_same_groups(tmp_path, monkeypatch):
    """As launchers do that start meanwhile."""
    (tmp_path / "dutyfree-1" / "s1").mkdir(parents=True)
    (tmp_path / "dutyfree-1" / "s2").mkdir()
    rmdir = Path.rmdir

    def beaten(path):
        rmdir(path)
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", beaten)
    gc._remove_group(tmp_path / "dutyfree-1")
    assert not list(tmp_path.iterdir())


def test_gc_waits_for_no_builder(tmp_path):
    """What is being built under a lock is alive."""
    making = tmp_path / "fixture-making-now"
    making.mkdir()
    environment = {**os.environ, "DUTYFREE_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)}
    with (tmp_path / "fixture.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        dutyfree("gc", env=environment)
        assert making.exists()
    dutyfree("gc", env=environment)
    assert not making.exists()


def _identity_of_the_dead() -> str:
    program = "from dutyfree.substrates.local.owner import identity; print(identity())"
    return ran([sys.executable, "-c", program], check=True).stdout.strip()


def test_links_that_lead_outside_are_left_out_of_a_download(tmp_path):
    """And the terminal is told so, in words that it does not obey."""
    made = (
        "mkdir t; echo x > t/file; for n in a b c d e f; do ln -s /etc/passwd \"t/$n$(printf '\\033')\"; done"
    )
    ended = dutyfree("run", "--download", f"t:{tmp_path}/t", "--", "sh", "-c", made)
    said = ended.stderr.decode()
    assert "skipped 6 links that point outside: " in said
    assert "\x1b" not in said
    assert "…" in said
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["file"]
