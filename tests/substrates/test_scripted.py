"""The fake says only what it was told, when and how often it was told to."""

from __future__ import annotations

import anyio
import pytest

import dutyfree
from dutyfree import abilities, errors
from dutyfree.contract import Cut, Exec, Limits, Observation, Recipe, Span, Stage
from dutyfree.substrates.scripted import Scripted
from tests.awaiting import enter

ABILITIES = (
    abilities.Resettable,
    abilities.Snapshottable,
    abilities.Forkable,
    abilities.Pausable,
    abilities.ShellSessions,
    abilities.BackgroundProcesses,
    abilities.Streaming,
)


async def test_a_mapping_answers():
    script = {
        "make test": Observation(exit_code=2, stderr=b"1 failed"),
        ("git", "log"): Observation(exit_code=0),
    }
    async with Scripted(script=script) as substrate, substrate.sandbox() as sandbox:
        assert (await sandbox.exec("make test")).stderr == b"1 failed"
        assert (await sandbox.exec(["git", "log"])).ok
        assert (await sandbox.exec("git log")).exit_code == 127


async def test_a_function_answers_and_sees_all_that_was_asked():
    asked: list[Exec] = []

    def script(action: Exec) -> Observation | None:
        asked.append(action)
        return Observation(exit_code=7) if action.user == "root" else None

    async with Scripted(script=script) as substrate, substrate.sandbox() as sandbox:
        assert (await sandbox.exec("id", user="root", cwd="/", stdin=b"x", env={"A": "1"})).exit_code == 7
        assert (await sandbox.exec("true")).exit_code == 0
    assert asked[0] == Exec("id", user="root", cwd="/", stdin=b"x", env={"A": "1"})


@pytest.mark.parametrize(
    "command", ["ls", "echo a | cat", "echo $HOME", "cat <x", ["sh", "-c", "true"], "echo 'open"]
)
async def test_no_shell_is_pretended(scripted, command):
    async with scripted.sandbox() as sandbox:
        seen = await sandbox.exec(command)
        assert seen.exit_code in (1, 127)
        assert seen.stdout == b""
        assert seen.stderr


async def test_the_tiny_language(scripted):
    async with scripted.sandbox() as sandbox:
        await sandbox.write("d/f", b"content")

        async def out(command, **asked):
            return (await sandbox.exec(command, **asked)).stdout

        assert await out("echo 'a  b' c") == b"a  b c\n"
        assert await out(["echo", "$x", "*"]) == b"$x *\n"
        assert await out("cat f f", cwd="d") == b"contentcontent"
        assert await out("cat", stdin=b"in") == b"in"
        assert await out("pwd", cwd="d/..//d") == b"/work/d\n"
        assert await out("printenv X", env={"X": "1"}) == b"1\n"
        assert (await sandbox.exec("printenv Y")).exit_code == 1
        assert (await sandbox.exec("exit 300")).exit_code == 44
        assert b"No such file" in (await sandbox.exec("cat missing")).stderr
        assert (await sandbox.exec("true", cwd="missing")).exit_code == 1


async def test_the_configured_answer():
    async with (
        dutyfree.open("scripted", exit_code=3, stdout="always") as substrate,
        substrate.sandbox() as sandbox,
    ):
        seen = await sandbox.exec("anything | at all")
        assert (seen.exit_code, seen.stdout) == (3, b"always")


async def test_latencies_are_spent_and_told():
    config = {
        "create_seconds": 0.02,
        "dispatch_seconds": 0.01,
        "exec_seconds": 0.03,
        "collect_seconds": 0.005,
    }
    async with dutyfree.open("scripted", **config) as substrate:
        begun = anyio.current_time()
        async with substrate.sandbox() as sandbox:
            created = anyio.current_time()
            assert created - begun >= 0.02
            assert sandbox.spans == (Span("create", 0.0, 0.02), Span("ready", 0.02, 0.0))
            seen = await sandbox.exec("true")
            assert anyio.current_time() - created >= 0.045
    assert seen.spans == (Span("dispatch", 0.0, 0.01), Span("run", 0.01, 0.03), Span("collect", 0.04, 0.005))
    assert seen.seconds == pytest.approx(0.045)


async def test_jitter_is_seeded():
    async def draw(seed):
        opened = dutyfree.open("scripted", exec_seconds=0.001, jitter=0.5, seed=seed)
        async with opened as substrate, substrate.sandbox() as sandbox:
            return [(await sandbox.exec("true")).command_seconds for _ in range(5)]

    first = await draw(1)
    assert first == await draw(1) != await draw(2)
    assert len(set(first)) == 5
    assert all(0.0005 <= seconds <= 0.0015 for seconds in first)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("create", errors.CreateError),
        ("ready", errors.ReadyError),
        ("dispatch", errors.DispatchError),
        ("exec", errors.ExecError),
        ("collect", errors.CollectError),
        ("cleanup", errors.CleanupError),
    ],
)
async def test_every_third_time_a_phase_fails(phase, kind):
    async with dutyfree.open("scripted", fail_phase=phase, fail_every=3) as substrate:
        outcomes: list[object] = []
        for _ in range(7):
            try:
                async with substrate.sandbox() as sandbox:
                    await sandbox.exec("true")
            except errors.SubstrateError as error:
                outcomes.append((type(error), error.phase))
            else:
                outcomes.append(None)
    failed = (kind, phase)
    assert outcomes == [None, None, failed, None, None, failed, None]


async def test_a_failing_cleanup_does_not_hide_the_error_before_it():
    async with dutyfree.open("scripted", fail_phase="cleanup") as substrate:
        with pytest.raises(KeyError):
            async with substrate.sandbox():
                raise KeyError


async def test_timeouts(scripted):
    async with scripted.sandbox() as sandbox:
        with anyio.fail_after(60):
            seen = await sandbox.exec("sleep 1000", timeout=0.02)
        assert (seen.timed_out, seen.exit_code, seen.signal) == (True, 137, 9)
        assert seen.command_seconds == 0.02
        assert not (await sandbox.exec("sleep 0.01", timeout=60)).timed_out


async def test_output_is_cut():
    script = {"print": Observation(exit_code=0, stdout=b"0123456789")}
    async with Scripted(script=script) as substrate, substrate.sandbox(limits=Limits(output=4)) as sandbox:
        seen = await sandbox.exec("print")
        assert (seen.stdout, seen.cut) == (b"0189", Cut(stdout=6))


async def test_what_runs_ends_with_the_sandbox(scripted):
    raised = []

    async def run(sandbox):
        with pytest.raises(errors.SandboxClosed) as caught:
            await sandbox.exec("sleep 60")
        raised.append(caught)

    async with anyio.create_task_group() as tasks, scripted.sandbox() as sandbox:
        tasks.start_soon(run, sandbox)
        await anyio.sleep(0.01)
    assert raised


async def test_a_reset_kills_background_processes(scripted):
    async with scripted.sandbox() as sandbox:
        process = await sandbox.start("sleep 1000")
        await sandbox.reset()
        with anyio.fail_after(60):
            seen = await process.wait()
        assert seen.signal == 9


async def test_recipes_and_failing_stages(scripted, tmp_path):
    (tmp_path / "f").write_text("content")
    recipe = Recipe(
        stages=(Stage("files", files={"a/f": tmp_path / "f"}), Stage("setup", commands=("cat a/f",)))
    )
    async with scripted.sandbox(recipe) as sandbox:
        assert await sandbox.read("a/f") == b"content"
    with pytest.raises(
        errors.CreateError, match=r"stage 1 \(dependencies\): 'pip install x' gave exit code 127"
    ):
        await enter(scripted.sandbox(Recipe(stages=(Stage("dependencies", commands=("pip install x",)),))))
    with pytest.raises(errors.CreateError, match="snapshot:99"):
        await enter(scripted.sandbox(Recipe(image="snapshot:99")))


async def test_limits_it_cannot_keep_are_refused(scripted):
    with pytest.raises(errors.CreateError, match="disk"):
        await enter(scripted.sandbox(limits=Limits(disk=1)))


async def test_it_has_every_ability(scripted):
    async with scripted.sandbox() as sandbox:
        assert [ability for ability in ABILITIES if not isinstance(sandbox, ability)] == []


async def test_links_are_followed_and_loops_found(scripted, tmp_path):
    tree = tmp_path / "tree"
    (tree / "real").mkdir(parents=True)
    (tree / "real" / "file").write_text("content")
    (tree / "absolute").symlink_to("/work/tree/real")
    (tree / "relative").symlink_to("./absolute/../real/file")
    (tree / "loop").symlink_to("loop")
    async with scripted.sandbox() as sandbox:
        await sandbox.upload(tree, "tree")
        assert await sandbox.read("tree/relative") == b"content"
        assert [entry.name for entry in await sandbox.list("tree/absolute")] == ["file"]
        with pytest.raises(OSError, match="symbolic links"):
            await sandbox.read("tree/loop")
        await sandbox.write("tree/relative", b"changed")
        await sandbox.remove("tree/absolute")
        assert await sandbox.read("tree/real/file") == b"changed"
