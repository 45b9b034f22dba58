"""The documentation is true: its links lead somewhere, its commands exist, its programs run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dutyfree import recipes
from dutyfree.cli.commands import app
from dutyfree.study import plan as plans
from dutyfree.substrates import toolkit
from tests.processes import ran
from tests.serving import certificates, serving

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def text(name):
    return (ROOT / name).read_text()


def code(name):
    """What stands in code spans and fenced blocks, line by line."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text(name), re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text(name), flags=re.DOTALL | re.MULTILINE))
    return [line.strip() for block in (*fenced, *spans) for line in block.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(name)):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def anchors(page):
    """The anchors that a code host gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_anchors_exist(name):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text(name)):
        page = (ROOT / name).parent / target if target else ROOT / name
        if page.suffix == ".md" and not target.startswith(("http:", "https:")):
            assert anchor in anchors(page), f"{name} links to {target}#{anchor}"


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_exist(name):
    known = set(re.findall(r"^([a-z0-9-]+):", text("Makefile"), re.MULTILINE))
    for line in code(name):
        for target in re.findall(r"^make ([a-z0-9-]+)", line):
            assert target in known, f"{name} speaks of make {target}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_exist(name):
    shown = (re.match(r"(?:\S*/)?dutyfree ([a-z][^#]*)", line) for line in code(name))
    for line in (found[1] for found in shown if found):
        words = line.split()
        if words[-1] == "--help":  # every command and every group of them has it
            continue
        command, words = app[words[0]], words[1:]
        if words and words[0] in command:
            command, words = command[words[0]], words[1:]
        is_group = command.default_command is None  # it has no options of its own
        arguments = () if is_group else command.assemble_argument_collection()
        known = {option for argument in arguments for option in argument.names}
        ours = words[: words.index("--")] if "--" in words else words  # what follows is another program's
        for word in ours:
            if word.startswith("--"):
                assert word in known, f"{name} shows {word} in: dutyfree {line}"


SCRIPTS = [path for path in ROOT.glob("scripts/*") if path.is_file()]
SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.py"), *SCRIPTS, *PAGES])


def test_what_is_on_no_index_is_installed_from_a_clone():
    """``pip install dutyfree`` would fetch nothing, or somebody else's."""
    wrong = re.compile(r"pip install [^`\n]*?(?<![/\w])dutyfree(?![/\w])")
    assert wrong.search("pip install 'dutyfree[inspect]'")
    assert wrong.search("pip install -U dutyfree")
    assert not wrong.search("pip install -e '/path/to/dutyfree[inspect]'")
    assert not [str(path) for path in SOURCES if wrong.search(path.read_text(errors="replace"))]


def test_make_help_lists_every_target_that_is_documented():
    said = ran(["make", "-C", str(ROOT), "help"], check=True).stdout
    for target in re.findall(r"^([a-z0-9-]+):.*## ", text("Makefile"), re.MULTILINE):
        assert f"  make {target} " in said
    assert "bare, native, and the archetypes that run here" in said


def test_setup_ends_with_what_to_do_next():
    command = ["make", "-C", str(ROOT), "--no-print-directory", "-o", ".venv/.installed", "setup"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *lines = said.splitlines()
    assert 2 <= len(lines) <= 3
    for line in lines:
        program, name, *_ = line.split()
        assert name in (app if program == ".venv/bin/dutyfree" else text("Makefile"))


@pytest.mark.parametrize(("editable", "again"), [(True, False), (False, True)])
def test_make_replaces_a_copy_of_the_package_by_the_clone(tmp_path, editable, again):
    installed = tmp_path / "lib/python3.11/site-packages/dutyfree-0.1.0.dist-info/direct_url.json"
    installed.parent.mkdir(parents=True)
    installed.write_text(json.dumps({"dir_info": {"editable": True} if editable else {}, "url": "file:///x"}))
    (tmp_path / ".installed").touch()
    said = ran(["make", "-n", "-C", str(ROOT), "study", f"VENV={tmp_path}"], check=True).stdout
    assert ("scripts/setup" in said) == again


def printed(name: str, cache: Path) -> str:
    """What the program of a page prints."""
    (program,) = re.findall(r"```python\n(.*?)```", text(name), re.DOTALL)
    environment = {**os.environ, "DUTYFREE_CACHE": str(cache)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.native
def test_the_readmes_first_commands_run_in_a_clone(tmp_path):
    section = text("README.md").split("## Your first sandbox")[1]
    (commands, *_) = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    environment = {
        **os.environ,
        "DUTYFREE_CACHE": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    script = f"set -o pipefail\n{commands.replace('/tmp/', f'{tmp_path}/')}"
    done = ran(["bash", "-ec", script], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("42\n")
    assert "make setup" in (tmp_path / "targets.txt").read_text()


@pytest.mark.native
def test_the_readmes_program_runs(tmp_path):
    told = printed("README.md", tmp_path)
    assert told.startswith("0 b'42\\n'")
    assert told.splitlines()[-1] == str([b"48\n"] * 4)


@pytest.mark.native
def test_the_training_loop_runs(tmp_path):
    told = printed("docs/training.md", tmp_path)
    rewards = [[0.0] * 8, [1.0] * 8, [0.0] * 8, [0.0] * 8]
    assert told.splitlines()[:4] == [str(group) for group in rewards]
    assert " s saved" in told


def test_the_recipe_for_training_is_a_good_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", text("docs/training.md"), re.DOTALL)
    path = tmp_path / "recipe.toml"
    path.write_text(shown)
    assert ".venv/bin/python -m pip" in str(recipes.load(path).stages[1].commands)


@pytest.mark.native
def test_the_program_with_a_pool_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", text("docs/pools.md"), re.DOTALL)
    cache = {**os.environ, "DUTYFREE_CACHE": str(tmp_path)}
    done = ran([sys.executable, "-c", program], env=cache, check=True)
    assert done.stdout.startswith("Served(kind=")


@pytest.mark.native
@pytest.mark.root("layers lie on the disk with root only")
@pytest.mark.parametrize(("number", "said"), [(0, ""), (1, "cold\n")])
def test_the_programs_with_layers_run(tmp_path, number, said):
    programs = re.findall(r"```python\n(.*?)```", text("docs/layers.md"), re.DOTALL)
    cache = {**os.environ, "DUTYFREE_CACHE": str(tmp_path)}
    done = ran([sys.executable, "-c", programs[number]], env=cache, check=True)
    assert done.stdout.startswith(said)


@pytest.mark.native
@pytest.mark.root("layers lie on the disk with root only")
def test_the_commands_with_servers_of_layers_run(tmp_path, monkeypatch):
    """What the page shows: a token, a server with TLS, and another node that fetches from it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text("docs/layers.md"), re.DOTALL | re.MULTILINE)
    page = [block for kind, block in blocks if not kind]
    (create, serve), fetch = page[0].splitlines(), page[1]
    root, chain, key = certificates(tmp_path)
    (tmp_path / "recipe.toml").write_text(
        '[[stages]]\nkind = "setup"\ncommands = ["sleep 0.3; date > stamp"]\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    ran(["dutyfree", "layer", "build", "recipe.toml"], check=True)
    ran(["sh", "-ec", create.replace(">", "--state state >").replace("/etc/dutyfree/", "")], check=True)
    assert serve == "dutyfree serve --listen 0.0.0.0:7800 --certificate server.pem --key server.key"
    with serving(tmp_path / "state", "--certificate", str(chain), "--key", str(key)) as url:
        monkeypatch.setenv("SSL_CERT_FILE", str(root))
        for node, command in enumerate(("layer import", "layer build")):
            monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / f"node-{node}"))
            (line,) = [line for line in fetch.splitlines() if command in line]
            program = f"{fetch.splitlines()[0]}\n{line}".replace("https://node-1:7800", url)
            done = ran(["sh", "-ec", program.replace("/etc/dutyfree/", "")], check=True)
            assert "1 layer" in done.stdout + done.stderr


@pytest.mark.native
def test_the_program_with_services_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", text("docs/warm-processes.md"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[('cache', True), ('python', True)]\n"


def test_the_recipe_with_services_is_a_good_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", text("docs/warm-processes.md"), re.DOTALL)
    path = tmp_path / "recipe.toml"
    path.write_text(shown)
    assert [service.name for service in recipes.load(path).services] == ["server", "python"]


def test_the_plan_that_is_shown_is_a_good_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", text("docs/study.md"), re.DOTALL)
    path = tmp_path / "plan.toml"
    path.write_text(shown)
    assert plans.load(str(path)).name == "mine"


def test_the_substrate_that_is_shown_is_the_example():
    shown, _ = re.findall(r"```python\n(.*?)```", text("docs/substrates.md"), re.DOTALL)
    assert shown == text("examples/bubblewrap.py")


def test_every_helper_for_authors_is_told():
    told = re.findall(r"^\| `(\w+)`", text("docs/substrates.md").partition("## Helpers")[2], re.MULTILINE)
    assert sorted(told) == sorted(toolkit.__all__)
