"""Calls to a preloaded interpreter: they behave like ``python3``, and are controlled like any command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import Limits, Observation, Recipe, Stage, recipes
from dutyfree.contract.errors import ActionError, CreateError, UsageError
from tests.awaiting import enter, service_ended, together

pytestmark = pytest.mark.native

EXPLAIN = {"DUTYFREE_EXPLAIN": "1"}
JSON = Recipe(services=(recipes.python("json", "random"),))
NEW = b"a new interpreter, for what differs: "


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def native(anyio_backend: str) -> AsyncIterator[Any]:
    async with dutyfree.open("native") as substrate:
        yield substrate


@pytest.fixture
async def sandbox(native: Any) -> AsyncIterator[Any]:
    async with native.sandbox(JSON) as sandbox:
        yield sandbox


async def both(sandbox: Any, *arguments: str, **terms: Any) -> Observation:
    """Check that a fork and a new interpreter give the same observation; return that of the fork."""
    env = {**terms.pop("env", {}), **EXPLAIN}
    forked: Observation = await sandbox.call("python", arguments, env=env, **terms)
    new: Observation = await sandbox.exec(["python3", *arguments], env=env, **terms)
    assert not forked.stderr.startswith(NEW), forked
    for one in ("exit_code", "signal", "stdout", "stderr", "timed_out"):
        assert getattr(forked, one) == getattr(new, one)
    return forked


LOOK = """
import os, signal, sys, threading
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), __name__, sorted(k for k in globals() if k != 'none'))
print(sorted(os.environ.items()), sys.dont_write_bytecode, sys.flags, sys.stdin.read())
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)], os.umask(0o22))
print(os.getpid() == os.getpgrp() == os.getsid(0), sorted(os.listdir('/proc/self/fd'))[:4], os.getppid())
print(sys.stdin, sys.stdout, sys.stderr, __import__('__main__').LOOKED, sys.modules['__main__'])
"""


async def test_a_call_behaves_like_a_new_interpreter(sandbox: Any) -> None:
    await sandbox.write("look.py", b"LOOKED = 1\n" + LOOK.encode())
    await sandbox.write("sub/package/__init__.py", b"")
    await sandbox.write("sub/package/__main__.py", b"LOOKED = 1\n" + LOOK.encode())
    await sandbox.exec("ln -s ../look.py sub/link.py")
    env = {"A": "b=c", "PYTHONPATH": ":../x:/tmp", "PYTHONDONTWRITEBYTECODE": ""}
    await both(sandbox, "-c", "LOOKED = 1\n" + LOOK, "a", "-b", "")
    await both(sandbox, "-c", "LOOKED = 1\n" + LOOK, env=env, cwd="sub", stdin=b"given")
    await both(sandbox, "-m", "package", "x", cwd="sub", stdin=b"x" * 300_000)
    await both(sandbox, "look.py", "y", env=env)
    await both(sandbox, "sub/link.py", cwd="/workspace")


@pytest.mark.parametrize(
    "code",
    [
        "1/0",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "import sys; sys.exit(None)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "syntax error",
        "import os; os._exit(9)",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "def f():\n  raise ValueError('deep') from OSError('cause')\nf()",
        "import sys; sys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1/0",
        "import sys; print('out'); print('err', file=sys.stderr); sys.stdout.write('no newline')",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(.2), print('thread'))).start()",
        "f = open('written', 'w'); f.write('x' * 10); import json; json.kept = f",
        "class A:\n  def __del__(self): print('deleted')\na = A(); b = [A()]; b.append(b)",
        "import json\nclass A:\n  def __del__(self): print('deleted')\na = A()",
        "import subprocess; print(subprocess.run(['sh', '-c', 'echo sub; exit 4'], capture_output=True))",
        "import multiprocessing as m; print(m.get_context('fork').Pool(2).map(abs, [-1, 2]))",
        "import pickle\nclass A: pass\nprint(pickle.dumps(A()), A.__module__)",
        "import sys; print('x' * 100); sys.stdout.close()",
        "import os; os.close(1); print('into nothing')",
    ],
)
async def test_a_call_ends_like_a_new_interpreter(sandbox: Any, code: str) -> None:
    await both(sandbox, "-c", code)
    if "written" in code:
        assert (
            await sandbox.call("python", ["-c", "print(open('written').read())"])
        ).stdout == b"x" * 10 + b"\n"


async def test_what_cannot_be_found_is_said_alike(sandbox: Any) -> None:
    await both(sandbox, "-m", "no_such_module")
    missing = await sandbox.call("python", ["-c", "1"], cwd="/no/such")
    assert (missing.exit_code, missing.stderr) == (127, b"/no/such: No such file or directory\n")
    assert (await sandbox.call("python", [])).exit_code == 127
    with pytest.raises(UsageError, match="no service 'ruby'"):
        await sandbox.call("ruby", ["-e", "1"])


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        (["-O", "-c", "print(__debug__)"], {}, b"arguments"),
        (["-c"], {}, b"arguments"),
        (["no-such.py"], {}, b"arguments"),
        (["-"], {}, b"arguments"),
        (["-c", "print(hash('x'))"], {"PYTHONHASHSEED": "5"}, b"variables: PYTHONHASHSEED"),
        (["-c", "import sys; print(sys.flags.utf8_mode)"], {"PYTHONUTF8": "1"}, b"variables: PYTHONUTF8"),
        (["-c", "import time; print(time.tzname)"], {"TZ": "Asia/Tokyo"}, b"variables: TZ"),
        (
            ["-c", "import json; print(json.mine)"],
            {"PYTHONPATH": "mine"},
            b"/workspace/mine has another json",
        ),
        (["mine/main.py"], {}, b"/workspace/mine has another json"),
    ],
)
async def test_what_only_a_new_interpreter_can_do_gets_one(
    sandbox: Any, arguments: list[str], env: dict[str, str], why: bytes
) -> None:
    await sandbox.write("mine/json/__init__.py", b"mine = 'mine'")
    await sandbox.write("mine/main.py", b"import json; print(json.mine)")
    forked = await sandbox.call("python", arguments, env={**env, **EXPLAIN}, stdin=b"print('from stdin')")
    new = await sandbox.exec(["python3", *arguments], env={**env, **EXPLAIN}, stdin=b"print('from stdin')")
    told, _, rest = forked.stderr.partition(b"\n")
    assert told == NEW + why
    assert (forked.exit_code, forked.stdout, rest) == (new.exit_code, new.stdout, new.stderr)


async def test_a_preloaded_module_that_changes_is_not_used(native: Any) -> None:
    stage = Stage("setup", commands=("mkdir lib; echo 'value = 1' > lib/library.py",))
    service = recipes.python("library", env={"PYTHONPATH": "/workspace/lib"})
    async with native.sandbox(Recipe(stages=(stage,), services=(service,))) as sandbox:
        see = ["-c", "import library; print(library.value)"]
        seen = await sandbox.call("python", see, env=EXPLAIN)
        assert (seen.stdout, seen.stderr) == (b"1\n", b"")
        await sandbox.write("lib/library.py", b"value = 22\n")
        seen = await sandbox.call("python", see, env=EXPLAIN)
        assert (seen.stdout, seen.stderr) == (b"22\n", NEW + b"/workspace/lib/library.py has changed\n")
        seen = await sandbox.call("python", ["-c", "import library"], env={"PYTHONPATH": "", **EXPLAIN})
        assert b"No module named 'library'" in seen.stderr
        await sandbox.restart("python")
        seen = await sandbox.call("python", see, env=EXPLAIN)
        assert (seen.stdout, seen.stderr) == (b"22\n", b"")


async def test_calls_share_no_state_and_no_random_numbers(sandbox: Any) -> None:
    await sandbox.call(
        "python", ["-c", "import json, os; json.left = 1; os.environ['LEFT'] = '1'; os.chdir('/')"]
    )
    look = "import json, os, random\n"
    look += "print('left' in dir(json), 'LEFT' in os.environ, os.getcwd(), random.random())"
    first, second = [(await sandbox.call("python", ["-c", look])).stdout for _ in range(2)]
    assert first.startswith(b"False False /workspace ")
    assert first != second


async def test_a_timeout_kills_the_tree_and_nothing_else(sandbox: Any) -> None:
    code = (
        "import os, subprocess; print('begun', flush=True); subprocess.Popen(['setsid', 'sleep', '4321'])\n"
    )
    code += "os.fork(); os.setsid() if os.getpid() != os.getsid(0) else 0\nimport time; time.sleep(1000)"
    for seconds in (3, 30, 100):  # longer each time, until the machine is fast enough
        seen = await sandbox.call("python", ["-c", code], timeout=seconds)
        assert (seen.timed_out, seen.signal, seen.exit_code) == (True, 9, 137)
        if seen.stdout:
            break
    assert seen.stdout == b"begun\n"
    assert (await sandbox.exec(["pgrep", "-fx", "sleep 4321"])).exit_code == 1
    assert (await sandbox.call("python", ["-c", "print(1)"])).stdout == b"1\n"
    assert (await sandbox.services())[0].starts == 1
    with anyio.move_on_after(0.3):
        await sandbox.call("python", ["-c", "import time; time.sleep(1000)"])
    running = (await sandbox.exec("pgrep -c python3")).stdout
    assert int(running) <= 2  # the service, and the fork for the next call


async def test_streams_limits_and_usage_are_those_of_a_command(native: Any) -> None:
    async with native.sandbox(JSON, limits=Limits(output=1000)) as sandbox:
        seen = await sandbox.call("python", ["-c", "print('a' * 600 + 'b' * 9000 + 'c' * 600, end='')"])
        assert (len(seen.stdout), seen.cut.stdout) == (1000, 9200)
        assert seen.stdout[:1] + seen.stdout[-1:] == b"ac"
        busy = "import time\nwhile time.process_time() < 0.2: pass\nbytearray(60_000_000)"
        seen = await sandbox.call("python", ["-c", busy])
        assert seen.usage.cpu_seconds > 0.05
        assert seen.usage.peak_memory > 60_000_000
        assert [span.name for span in seen.spans] == ["dispatch", "spawn", "run", "collect", "return"]
        begun = await sandbox.call(
            "python", ["-c", "import os; os.fork() or __import__('time').sleep(1000)"], timeout=60
        )
        assert begun.ok  # a child in the background does not delay its end
        large = "x = " + repr("y" * 100_000) + "; print(len(x))"
        assert (await sandbox.call("python", ["-c", large])).stdout == b"100000\n"


async def test_many_at_once(sandbox: Any) -> None:
    found: dict[int, bytes] = {}

    async def one(number: int) -> None:
        seen = await sandbox.call(
            "python", ["-c", f"import time; time.sleep(0.2); print({number})"], timeout=60
        )
        found[number] = seen.stdout

    await together(*(partial(one, number) for number in range(30)))
    assert found == {number: b"%d\n" % number for number in range(30)}
    assert (await sandbox.services())[0].starts == 1


FORKED = """
until p=$(pgrep -n python3) && [ "$(pgrep -c python3) $(cut -d' ' -f4,6 /proc/$p/stat)" = "2 1 $p" ]
do sleep 0.02; done
"""
"""Wait until the service has made the fork for the next call: a child of init that leads a session."""


@pytest.mark.parametrize("victims", ["the service", "its fork", "both"])
async def test_a_killed_interpreter_is_replaced(sandbox: Any, victims: str) -> None:
    await sandbox.call("python", ["-c", "1"])
    kill = {
        "the service": "kill -9 $(pgrep -o python3)",
        "its fork": FORKED + "kill -9 $(pgrep -n python3)",
        "both": FORKED + "pkill -9 python3",
    }[victims]
    assert (await sandbox.exec(kill)).ok
    for _ in range(2):  # the first may use the fork that was ready
        seen = await sandbox.call("python", ["-c", "print('alive')"], env=EXPLAIN, timeout=60)
        assert (seen.stdout, seen.stderr) == (b"alive\n", b"")
    (state,) = await sandbox.services()
    assert state.running
    assert state.starts == (1 if victims == "its fork" else 2)


async def test_the_error_says_why_an_interpreter_cannot_be_restarted(native: Any) -> None:
    stage = Stage("setup", commands=("mkdir lib; echo > lib/library.py",))
    service = recipes.python("library", env={"PYTHONPATH": "/workspace/lib"})
    async with native.sandbox(Recipe(stages=(stage,), services=(service,))) as sandbox:
        await sandbox.write("lib/library.py", b"raise RuntimeError('broken meanwhile')")
        await sandbox.exec("pkill -9 python3")
        await service_ended(sandbox)
        with pytest.raises(ActionError, match=r"(?s)service 'python'.*broken meanwhile"):
            await sandbox.call("python", ["-c", "1"])
        assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_stopped_service_delays_its_calls_only(sandbox: Any) -> None:
    await sandbox.call("python", ["-c", "1"])
    assert (await sandbox.exec(FORKED + "pkill -STOP -o python3; pkill -9 -n python3")).ok
    waits = await sandbox.call("python", ["-c", "print('never')"], timeout=0.5)
    assert (waits.timed_out, waits.exit_code, waits.stdout) == (True, 137, b"")
    with anyio.move_on_after(0.3):
        await sandbox.call("python", ["-c", "print('never')"])
    assert (await sandbox.exec("pkill -CONT -o python3; echo fine")).stdout == b"fine\n"
    assert (await sandbox.call("python", ["-c", "print('again')"], timeout=60)).stdout == b"again\n"


BOMBS = {
    "processes": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(10_000_000))",
    "descriptors": "import os\nwhile True: os.open('/dev/null', 0)",
    "output": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
}


@pytest.mark.parametrize("kind", list(BOMBS))
async def test_bombs_leave_the_service_alive(native: Any, kind: str) -> None:
    limits = Limits(memory=256 << 20, pids=100, output=1000)
    async with native.sandbox(JSON, limits=limits) as sandbox:
        seen = await sandbox.call("python", ["-c", BOMBS[kind]], timeout=3)
        assert not seen.ok
        await sandbox.exec("rm -f big")
        seen = await sandbox.call("python", ["-c", "print('alive')"], timeout=60)
        assert seen.stdout == b"alive\n", seen
        (state,) = await sandbox.services()
        assert (state.running, state.starts) == (True, 1)


async def test_impostors_gain_nothing(sandbox: Any) -> None:
    """A call can do to its service whatever root can; PID 1 still works, and reports correct exit codes."""
    pid = (await sandbox.exec("pgrep -o python3")).stdout.decode().strip()
    steal = f"""
import os, socket, struct, ctypes
pidfd = os.pidfd_open({pid})
stolen = ctypes.CDLL(None).syscall(438, pidfd, 3, 0)
control = socket.socket(fileno=stolen)
control.send(b'nonsense' * 100)
os.kill({pid}, 19)
"""
    await sandbox.call("python", ["-c", steal], timeout=60)
    await sandbox.exec(["kill", "-CONT", pid])
    for _ in range(3):
        assert (await sandbox.call("python", ["-c", "print(1)"], timeout=60)).stdout == b"1\n"


async def test_modules_that_cannot_be_preloaded_are_named(native: Any) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    stage = Stage("setup", commands=(f"mkdir lib; echo '{thread}' > lib/threaded.py",))
    env = {"PYTHONPATH": "/workspace/lib"}
    for name, says in (("threaded", "runs a thread"), ("absent", "No module named 'absent'")):
        with pytest.raises(CreateError, match=f"(?s)service 'python'.*{says}"):
            await enter(native.sandbox(Recipe(stages=(stage,), services=(recipes.python(name, env=env),))))


async def test_sync_and_user(native: Any) -> None:
    def use() -> None:
        with dutyfree.sync.open("native") as substrate, substrate.sandbox(JSON) as sandbox:
            assert sandbox.call("python", ["-c", "print(2)"]).stdout == b"2\n"
            assert sandbox.services()[0].running

    import dutyfree.sync

    await anyio.to_thread.run_sync(use)


async def test_reset_and_fork_have_interpreters_of_their_own(sandbox: Any) -> None:
    await sandbox.write("module.py", b"print('imported')")
    async with sandbox.fork(2) as children:
        for child in children:
            assert (await child.call("python", ["-m", "module"])).stdout == b"imported\n"
    await sandbox.reset()
    assert (await sandbox.call("python", ["-m", "module"])).exit_code == 1
    assert (await sandbox.call("python", ["-c", "print(3)"], env=EXPLAIN)).stdout == b"3\n"
