"""The steps of an E2B template as a recipe of ours. Deterministic, no I/O.

Each RUN, COPY and WORKDIR becomes a stage, so that unchanged steps are layers that exist already. ENV and
USER change how later steps and the sandboxes run. The start command becomes a service.
"""

from __future__ import annotations

import posixpath
import re
import shlex

import msgspec

from dutyfree.contract.errors import RecipeError
from dutyfree.contract.services import Ready, Service
from dutyfree.recipes.stages import LOCKS
from dutyfree.wire.recipes import WireRecipe, WireStage

E2B_IMAGE = "e2bdev/base"
"""The image that the SDK names if the template does not. It stands for the server's usual image."""

START = "start"
"""The name of the service that runs the start command."""

READY_SECONDS = 300.0
"""How long a start command may take until its ready command succeeds."""

READY_LINE = "dutyfree: the start command is ready"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODE = re.compile(r"[0-7]{3,4}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_WAITS = re.compile(r"\s*sleep\s+[0-9.]+s?\s*")
_ARCHIVE = f"{LOCKS}/copy"

_COPY = """\
set -e
from=$PWD/{locks}/tree
mkdir "$from"
tar -x -o -f {archive} -C "$from"
source={source} target={target} several={several}
{enter}
case $target in
    /*) ;;
    *) target=$PWD/$target ;;
esac
cd "$from"
IFS=
set -- $source
[ -e "$1" ] || [ -L "$1" ] || {{ echo "no files match $source" >&2; exit 1; }}
[ $# -eq 1 ] || several=1
for one; do
    {own}
    {allow}
    if [ -d "$one" ] && [ ! -L "$one" ]; then
        mkdir -p "$target"
        cp -a "$one/." "$target/"
    elif [ -n "$several" ] || [ -d "$target" ]; then
        mkdir -p "$target"
        cp -a "$one" "$target/"
    else
        mkdir -p "$(dirname "$target")"
        cp -a "$one" "$target"
    fi
done
rm -rf "$from" "${{from%/tree}}"
"""
"""A script for COPY. It works as Docker's: a directory's contents are copied, a file keeps its name if the
target ends with a slash. The archive is unpacked in the sandbox, so that it cannot harm the host."""

_STARTED = """\
{command} &
{wait}echo {line}
while sleep 86400; do :; done
"""
"""The service goes on when the start command has ended, which is no failure: E2B keeps what it has left."""

_UNTIL_READY = "until {ready}; do sleep 0.1; done >/dev/null 2>&1\n"


class TemplateStep(msgspec.Struct, frozen=True, rename="camel"):
    """An instruction, as the SDK sends it."""

    type: str
    args: tuple[str, ...] = ()
    files_hash: str | None = None
    force: bool = False

    def __str__(self) -> str:
        return " ".join((self.type, *(arg for arg in self.args if arg)))


class TemplateState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What steps lead to: a recipe, and how commands run in its sandboxes."""

    recipe: WireRecipe = WireRecipe()
    workdir: str | None = None
    """None for the image's own."""
    user: str | None = None
    """None for the image's own."""


HOME = "/home/user"
"""Where commands of E2B clients run if nothing else is said; many programs have this path in them."""


def begin(image: str | None) -> TemplateState:
    """The state with which every template begins: its image with the home directory of E2B's usual user."""
    stages = (WireStage("setup", (f"mkdir -p {HOME}",)),)
    return TemplateState(WireRecipe(image, stages, env={"HOME": HOME}), HOME)


def image_of(name: str) -> str | None:
    """The image of a template; None for the server's usual one."""
    return None if re.split("[:@]", name)[0].removeprefix("docker.io/") == E2B_IMAGE else name


def user_of(name: str) -> str | None:
    """E2B's usual user stands for the image's own."""
    return None if name in ("", "user") else name


def apply(step: TemplateStep, state: TemplateState, digest: str | None, nonce: str) -> TemplateState:
    """The state after a step. Raises RecipeError.

    ``digest`` is that of the files of a COPY. A ``nonce`` makes a new layer even if the step has not changed.
    """
    kind, args = step.type.upper(), step.args
    if kind == "ENV":
        return _with_variables(state, args)
    if kind == "USER" and args:
        return msgspec.structs.replace(state, user=user_of(_owner(args[0])))
    if kind == "WORKDIR" and args:
        workdir = posixpath.join(state.workdir or "", args[0])
        owner = f" && chown {shlex.quote(state.user)} {shlex.quote(workdir)}" if state.user else ""
        made = _staged(state, WireStage("setup", (f"mkdir -p {shlex.quote(workdir)}{owner}{_mark(nonce)}",)))
        return msgspec.structs.replace(made, workdir=workdir)
    if kind == "RUN" and args:
        user = user_of(_owner(args[1])) if len(args) > 1 and args[1] else state.user
        return _staged(state, WireStage("setup", (_command(state, args[0], user) + _mark(nonce),)))
    if kind in ("COPY", "ADD") and len(args) >= 2:
        if digest is None:
            raise RecipeError(f"the files of {str(step)!r} were not uploaded", remedy="build it again")
        script = _copied(state, args) + _mark(nonce)
        return _staged(state, WireStage("files", (script,), {_ARCHIVE: digest}))
    raise RecipeError(f"there is no step {str(step)[:80]!r}", remedy="use RUN, COPY, ENV, WORKDIR and USER")


def start(state: TemplateState, command: str | None, ready: str | None) -> TemplateState:
    """The state with a start command, which runs in every sandbox, and a command that checks it.

    A ready command that only sleeps is for E2B's own way, which keeps the memory of a started machine. Here
    the start command starts with each sandbox, which would have to wait for it.
    """
    if command is None and ready is None:
        return state
    wait = ""
    if ready and not _WAITS.fullmatch(ready):
        wait = _UNTIL_READY.format(ready=_command(state, ready, state.user, execute=False))
    script = _STARTED.format(
        command=_command(state, command or ":", state.user, execute=False),
        wait=wait,
        line=shlex.quote(READY_LINE),
    )
    service = Service(START, script, Ready(line=READY_LINE), READY_SECONDS)
    kept = tuple(one for one in state.recipe.services if one.name != START)
    recipe = msgspec.structs.replace(state.recipe, services=(*kept, service))
    return msgspec.structs.replace(state, recipe=recipe)


def _staged(state: TemplateState, stage: WireStage) -> TemplateState:
    recipe = msgspec.structs.replace(state.recipe, stages=(*state.recipe.stages, stage))
    return msgspec.structs.replace(state, recipe=recipe)


def _mark(nonce: str) -> str:
    """A comment that changes the content key of a command."""
    return f"\n# build {nonce}" if nonce else ""


def _with_variables(state: TemplateState, args: tuple[str, ...]) -> TemplateState:
    if not args or len(args) % 2:
        raise RecipeError("ENV needs names and values")
    names = args[::2]
    for name in names:
        if not _NAME.fullmatch(name):
            raise RecipeError(f"{name!r} is not a valid name of a variable")
    env = {**state.recipe.env, **dict(zip(names, args[1::2], strict=True))}
    return msgspec.structs.replace(state, recipe=msgspec.structs.replace(state.recipe, env=env))


def expansion(value: str) -> str:
    """A shell command that prints a value of ENV with its variables expanded, and nothing else."""
    escaped = re.sub(r'[\\"`]|\$(?=\()', lambda found: "\\" + found[0], value)
    return f'printf %s "{escaped}"'


def _command(state: TemplateState, command: str, user: str | None, *, execute: bool = True) -> str:
    """A command as shell code: with the variables, the directory and the user of its step.

    ``execute``: it may replace the shell that runs it.
    """
    parts = [f"export {name}={shlex.quote(value)}" for name, value in state.recipe.env.items()]
    if state.workdir is not None:
        parts.append(f"cd {shlex.quote(state.workdir)}")
    shell = '"$(command -v bash || echo /bin/sh)"'
    if user is None:
        parts.append(f"exec {shell} -c {shlex.quote(command)}")
    else:
        parts.append(f"exec su -s {shell} {shlex.quote(user)} -c {shlex.quote(command)}")
    script = " && ".join(parts)
    return script if execute else f"({script})"


def _copied(state: TemplateState, args: tuple[str, ...]) -> str:
    source, target = args[0], args[1]
    owner = _owner(args[2]) if len(args) > 2 and args[2] else state.user or "0:0"
    mode = args[3] if len(args) > 3 else ""
    if mode and not _MODE.fullmatch(mode):
        raise RecipeError(f"{mode!r} is not a mode of files", remedy="use octal digits, such as 755")
    several = target.endswith("/") or bool(set(source) & set("*?["))
    return _COPY.format(
        locks=LOCKS,
        archive=_ARCHIVE,
        source=shlex.quote(_inside(source)),
        target=shlex.quote(target),
        several="1" if several else "",
        enter=f"cd {shlex.quote(state.workdir)}" if state.workdir is not None else ":",
        own=f'chown -hR {shlex.quote(owner)} "$one"',
        allow=f'[ -L "$one" ] || chmod -R {mode} "$one"' if mode else ":",
    )


def _inside(source: str) -> str:
    """A path below the unpacked archive. Raises RecipeError."""
    path = posixpath.normpath(source)
    if path.startswith(("/", "../")) or path == "..":
        raise RecipeError(f"{source[:80]!r} is outside of the template's files")
    return path if path == "." else f"./{path}"


def _owner(name: str) -> str:
    """Raises RecipeError for what is no user."""
    if not _OWNER.fullmatch(name):
        raise RecipeError(f"{name[:80]!r} is not a user")
    return name
