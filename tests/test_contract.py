"""The nouns: keys of recipes, observations, expectations."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dutyfree
from dutyfree.contract import Edit, Entry, Exec, Limits, Observation, Recipe, Span, Stage, Write, limited
from dutyfree.contract.errors import DutyfreeError, LimitError, SandboxClosed, SubstrateError
from dutyfree.contract.stage import tree_digest
from dutyfree.workloads.workload import Expect
from tests.awaiting import enter
from tests.processes import ran

commands = st.one_of(st.text(max_size=5), st.tuples(st.text(max_size=3), st.text(max_size=3)))
stages = st.builds(
    Stage, kind=st.sampled_from(["repository", "setup"]), commands=st.lists(commands, max_size=3).map(tuple)
)
recipes = st.builds(
    Recipe,
    image=st.none() | st.sampled_from(["a", "b", "None"]),
    stages=st.lists(stages, max_size=4).map(tuple),
)


@given(recipes, recipes)
def test_keys_are_equal_exactly_for_equal_recipes(one, other):
    assert (one.key() == other.key()) == (one == other)


@given(recipes, st.integers(0, 4))
def test_the_key_of_a_prefix_is_the_key_of_the_shorter_recipe(recipe, length):
    assert recipe.key(length) == Recipe(recipe.image, recipe.stages[:length]).key()
    assert recipe.key(len(recipe.stages)) == recipe.key()


def test_keys_are_the_same_in_another_process():
    program = (
        "from dutyfree import Recipe, Stage; print(Recipe('i', (Stage('setup', ('a', ('b', 'c'))),)).key())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = ran([sys.executable, "-c", program], env=environment, check=True)
    assert done.stdout.strip() == Recipe("i", (Stage("setup", commands=("a", ("b", "c"))),)).key()


def test_stages_in_another_order_are_another_state():
    one, two = Stage("setup", commands=("a",)), Stage("setup", commands=("b",))
    assert Recipe(stages=(one, two)).key() != Recipe(stages=(two, one)).key()
    assert Recipe(stages=(one, two)).key() != Recipe(stages=(Stage("setup", commands=("a", "b")),)).key()
    # A string runs in a shell, an argument vector does not.
    assert Recipe(stages=(one,)).key() != Recipe(stages=(Stage("setup", commands=(("a",),)),)).key()


def files(**sources: Path) -> str:
    return Recipe(stages=(Stage("files", files=sources),)).key()


def test_keys_follow_the_content_of_files(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    before = files(a=one, b=two)
    assert before == files(b=two, a=one)  # a mapping has no order
    assert before != files(a=two, b=one)
    assert before != files(a=one, c=two)
    os.utime(one, (0, 0))
    assert files(a=one, b=two) == before  # times do not count
    one.chmod(0o755)
    assert files(a=one, b=two) != before
    one.chmod(0o644)
    one.write_text("1!")
    assert files(a=one, b=two) != before


def test_keys_do_not_depend_on_where_files_come_from(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent / "sub").mkdir(parents=True)
        (tmp_path / parent / "sub" / "file").write_text("same")
    assert files(t=tmp_path / "x") == files(t=tmp_path / "y")


def test_digests_of_trees_see_names_links_and_empty_directories(tmp_path):
    seen = {tree_digest(tmp_path)}
    (tmp_path / "file").write_text("a")
    seen.add(tree_digest(tmp_path))
    (tmp_path / "empty").mkdir()
    seen.add(tree_digest(tmp_path))
    (tmp_path / "link").symlink_to("nowhere")
    seen.add(tree_digest(tmp_path))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("elsewhere")
    seen.add(tree_digest(tmp_path))
    (tmp_path / "file").rename(tmp_path / "renamed")
    seen.add(tree_digest(tmp_path))
    (tmp_path / os.fsdecode(b"\xff")).write_text("a name that is not UTF-8")
    seen.add(tree_digest(tmp_path))
    assert len(seen) == 7


def test_recipes_with_a_missing_file_have_no_key(tmp_path):
    with pytest.raises(FileNotFoundError):
        files(a=tmp_path / "missing")


def test_an_observation_tells_success_and_the_commands_own_time():
    assert Observation(exit_code=0).ok
    assert not Observation(exit_code=1).ok
    assert not Observation(exit_code=0, timed_out=True).ok
    assert Observation(exit_code=0).command_seconds is None
    spans = (Span("dispatch", 0.0, 0.1), Span("run", 0.1, 0.5))
    assert Observation(exit_code=0, spans=spans).command_seconds == 0.5


@pytest.mark.parametrize(
    "action",
    [
        Exec(("a", "b"), env={"A": "1"}, stdin=b"\0\xff", timeout=1.5),
        Exec("a | b"),
        Write("p", b"\xff", mode=0o755),
        Edit("p", b"old", b"new"),
    ],
)
def test_actions_cross_the_wire(action):
    data = msgspec.json.encode(action)
    assert msgspec.json.decode(data, type=type(action)) == action


def test_nouns_do_not_change():
    for noun in (Limits(), Observation(exit_code=0), Recipe(), Stage("setup"), Exec("x")):
        with pytest.raises(AttributeError):
            setattr(noun, noun.__struct_fields__[0], None)


def test_unknown_limits_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `memroy`"):
        msgspec.convert({"memroy": 1}, Limits)


def test_errors_carry_phase_and_remedy():
    assert SandboxClosed("gone").phase == "dispatch"
    assert str(DutyfreeError("it broke", remedy="mend it")) == "it broke (mend it)"
    phases = {kind.phase for kind in SubstrateError.__subclasses__()}
    assert phases == {"pool", "create", "ready", "dispatch", "exec", "collect", "cleanup"}


ENTRIES = (Entry("setup.py", "file", 1, 0o644), Entry("src", "directory", 0, 0o755))


@pytest.mark.parametrize(
    ("expect", "result", "complaint"),
    [
        (Expect(), Observation(exit_code=0), None),
        (Expect(), Observation(exit_code=1, stderr=b"why"), "exit code 1, expected 0: why"),
        (Expect(), Observation(exit_code=1, stdout=b"out"), "exit code 1, expected 0: out"),
        (Expect(exit_code=1), Observation(exit_code=1), None),
        (Expect(exit_code=1), Observation(exit_code=0), "exit code 0, expected 1: "),
        (Expect(exit_code=137), Observation(exit_code=137, timed_out=True), "timed out"),
        (Expect(contains=(b"a", b"c")), Observation(exit_code=0, stdout=b"abc"), None),
        (Expect(contains=(b"a", b"x")), Observation(exit_code=0, stdout=b"abc"), "expected b'x' in b'abc'"),
        (Expect(contains=(b"err",)), Observation(exit_code=0, stderr=b"err"), "expected b'err' in b''"),
        (Expect(contains=(b"def",)), b"def f(): ...", None),
        (Expect(contains=(b"def",)), b"class C: ...", "expected b'def' in b'class C: ...'"),
        (Expect(contains=(b"setup.py", b"src")), ENTRIES, None),
        (Expect(contains=(b"docs",)), ENTRIES, "expected b'docs' in b'setup.py\\nsrc'"),
        (Expect(), None, None),
        (Expect(contains=(b"x",)), None, "expected b'x' in b''"),
    ],
)
def test_expectations(expect, result, complaint):
    assert expect.problem(result) == complaint


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cpus", (0, -1, math.nan, math.inf, 1 << 18)),
        ("memory", (0, -1, 1 << 63)),
        ("pids", (0, -1, 1 << 23)),
        ("disk", (0, -1, 1 << 61)),
        ("output", (-1, 1 << 32)),
    ],
)
def test_limits_that_cannot_be(name, values):
    for value in values:
        with pytest.raises(LimitError, match=f"^{name} must be .*, not "):
            Limits(**{name: value})


@pytest.mark.parametrize("network", ["maybe", "Off", "example.org:443", "", 3, ["a", 3], {"a": 1}])
def test_networks_that_cannot_be(network):
    with pytest.raises(LimitError, match=r'^network must be "on", "off" or a list of strings, not '):
        Limits(network=network)
    with pytest.raises(LimitError, match="network"):
        limited({"network": network}, Limits())


def test_a_list_of_hosts_is_taken_for_a_tuple():
    assert Limits(network=["example.org"]) == Limits(network=("example.org",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count"),
    [("512M", 512 << 20), ("1.5G", 3 << 29), ("4096", 4096), ("2 KiB", 2048), ("1t", 1 << 40)],
)
def test_sizes_may_be_texts(text, count):
    for name in ("memory", "disk"):
        assert getattr(Limits(**{name: text}), name) == count
    assert Limits(memory=text) == Limits(memory=count)
    assert hash(Limits(memory=text)) == hash(Limits(memory=count))
    assert limited({"memory": text}, Limits()) == Limits(memory=count)
    assert Limits(output="4K").output == 4096


@pytest.mark.parametrize("name", ["memory", "disk", "output", "pids", "cpus"])
@pytest.mark.parametrize("value", ["much", "-1M", "", [1], "1.5.2G", "٣M", "9" * 400, "1" * 30 + "T"])
def test_what_is_no_size_is_told_in_words(name, value):
    with pytest.raises(LimitError, match=name):
        Limits(**{name: value})
    with pytest.raises(LimitError, match=f"limits: .*{name}"):
        limited({name: value}, Limits())


def test_whole_numbers_are_wanted_of_sizes():
    with pytest.raises(LimitError, match=r"memory must be a whole number, not 1.5 \(write memory=\"512M\""):
        Limits(memory=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["scripted", "bare"])
async def test_a_sandbox_takes_its_limits_as_a_table_or_says_what_it_wants(name):
    async with dutyfree.open(name) as opened:
        substrate: Any = opened
        async with substrate.sandbox(limits={"output": "1K"}) as sandbox:
            assert sandbox._limits == Limits(output=1024)
        for wrong, told in (({"memroy": 1}, "did you mean 'memory'"), ("512M", "write Limits")):
            with pytest.raises(LimitError, match=told):
                await enter(substrate.sandbox(limits=wrong))


@pytest.mark.native
async def test_sandboxes_and_groups_of_native_take_tables_too():
    async with dutyfree.open("native", limits={"memory": "256M"}) as opened:
        substrate: Any = opened
        assert substrate._config.limits.memory == 256 << 20
        async with substrate.sandbox(limits={"output": "1K"}) as sandbox:
            assert len((await sandbox.exec("seq 10000")).stdout) <= 1024
        async with substrate.group(Recipe(), 2, limits={"output": "1K"}) as sandboxes:
            assert len((await sandboxes[1].exec("seq 10000")).stdout) <= 1024
        for use in (substrate.sandbox, partial(substrate.group, Recipe(), 2)):
            with pytest.raises(LimitError, match="write Limits"):
                await enter(use(limits=7))


def test_the_examples_of_the_documentation_run(tmp_path):
    """In a process of their own: they are one program, as a reader would type it."""
    text = Path(__file__).parents[1].joinpath("docs", "contract.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    program = tmp_path / "examples.py"
    program.write_text("\n\n".join(blocks))
    done = subprocess.run([sys.executable, "-W", "error", str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
