"""What a command imports: ``run`` little, so that it starts fast."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from dutyfree.cli import run
from dutyfree.cli.commands import app
from dutyfree.cli.sandbox_options import SandboxOptions

MODULES = "cyclopts attr rich numpy scipy matplotlib http email tomllib difflib xml"
HEAVY = {*MODULES.split()}

LOADED = """
import sys
from dutyfree.cli.main import main
sys.argv = ["dutyfree", *sys.argv[1:]]
status = main()
print(*sys.modules, sep="\\n")
sys.exit(status)
"""


def loaded(*arguments: str) -> set[str]:
    command = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.partition(".")[0] for line in done.stdout.splitlines()}


@pytest.mark.native
@pytest.mark.parametrize(
    "options", [[], ["--timeout", "600", "--env=A=1", "--memory", "512M", "--cwd", "/", "--network", "off"]]
)
def test_run_loads_only_what_it_needs(options: list[str]) -> None:
    assert not loaded("run", *options, "--", "true") & HEAVY


@pytest.mark.parametrize("command", [["ps"], ["substrates"], ["layer", "ls"], ["image", "ls"]])
def test_listings_load_no_toolkit(command: list[str]) -> None:
    assert not loaded(*command) & {"rich", "numpy", "scipy", "matplotlib"}


def test_the_import_loads_nothing() -> None:
    script = "import sys; import dutyfree; print(*sys.modules, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not {*said.splitlines()} & {"msgspec", "anyio", "asyncio", "typing", *HEAVY}


PLAIN = [
    "run -- true",
    "run -- sh -c x --json -- --y",
    "run --",
    "run --json --timeout 2.5 -- true",
    "run --timeout=1e2 --cpus 0.5 --pids 7 --memory 1G --disk=2G -- true",
    "run --env A=1 --env B=2 --upload .:/src --download /a:b --option ready=2 --option=peers=[] -- true",
    "run --recipe a/b.toml --image debian:12 --substrate bare --user nobody --cwd /tmp --network on -- x",
]


@pytest.mark.parametrize("line", PLAIN)
def test_what_is_read_quickly_is_what_the_general_parser_reads(line: str) -> None:
    call = run.parse(line.split())
    assert call is not None
    _, given, _ = app.parse_args(line.split(), exit_on_error=False, print_error=False)
    options, timeout, json = (given.arguments.get(name) for name in ("options", "timeout", "json"))
    assert call.args == (given.args, options or SandboxOptions(), timeout, json or False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ps",
        "run",
        "run true",
        "run --help",
        "run --memroy 1 -- true",
        "run --cpus much -- true",
        "run --cpus -- true",
        "run --pids 1.5 -- true",
        "run --cwd -x -- true",
        "run --cwd / --cwd / -- true",
        "run --json=true -- true",
        "run --no-json -- true",
        "run true -- false",
        "run -q -- true",
    ],
)
def test_all_else_is_left_to_the_general_parser(line: str) -> None:
    assert run.parse(line.split()) is None


def test_every_option_is_known_to_both() -> None:
    names = {field.name for field in fields(SandboxOptions)}
    assert {*run.TYPES, *run.LISTS} == names | {"timeout"}
    known = {name for argument in app["run"].assemble_argument_collection() for name in argument.names}
    assert {f"--{name}" for name in (*names, "timeout", "json")} <= known
