"""The commands, and the general parser of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

import dutyfree
from dutyfree.cli import unknown_option
from dutyfree.contract.errors import UsageError
from dutyfree.validation import suggestion


class _Listing(App):
    """Tells of its commands by their summaries, without loading them; of a loaded one, all it has to say."""

    def help_print(
        self,
        tokens: Annotated[str | Iterable[str] | None, Parameter(show=False)] = None,
        *,
        console: Annotated[Any, Parameter(parse=False)] = None,
    ) -> None:
        _, chain, _ = self.parse_commands(tokens)
        for command in chain[1:]:
            if command.default_command is not None:
                command.help = None  # its docstring, then
        super().help_print(tokens, console=console)


app = _Listing(
    name="dutyfree",
    help="""Measure the rollout infrastructure tax of coding-agent reinforcement learning, and stop paying it.

    Start with 'dutyfree study': a few minutes on this machine, ending with a report.
    """,
    version=f"dutyfree {dutyfree.__version__}",
    # A switch is off and a list empty unless given: nothing to say, and no --no-… for it.
    default_parameter=Parameter(negative="", show_default=lambda value: str(value) if value else None),
    suppress_keyboard_interrupt=False,  # ours to tell
    result_action="return_value",
)
# By import path, so that a command loads only what it needs.
_COMMANDS = {
    "dutyfree.cli.sandboxes:run": "Run one command in a fresh sandbox.",
    "dutyfree.cli.shell:shell": "Open a shell in a fresh sandbox.",
    "dutyfree.cli.host:ps": "List the sandboxes that live on this machine.",
    "dutyfree.cli.host:gc": "Remove what killed runs have left behind.",
    "dutyfree.cli.study:study": "Measure the tax on this machine, then write the report.",
    "dutyfree.cli.ab:ab": "Say whether configuration B is slower or faster than A.",
    "dutyfree.cli.reports:report": "Write figures, tables and report anew from records.",
    "dutyfree.cli.reports:compare": "Say what became slower or faster from earlier runs to later ones.",
    "dutyfree.cli.reports:export": "Write the trials and the actions as CSV or Parquet.",
    "dutyfree.cli.machine:substrates": "List the substrates: available here, or why not.",
    "dutyfree.cli.machine:doctor": "Look at what this machine offers, and what is missing.",
    "dutyfree.cli.images:image": """Pull, import, list and remove images; make the study's.

    The native engine pulls an image by itself when a sandbox asks for it; here it is done beforehand. Layers
    are kept once for all images, under DUTYFREE_CACHE or ~/.cache/dutyfree. See docs/images.md.

    For example:

        dutyfree image pull debian:12
        dutyfree image import ./rootfs.tar mine
        dutyfree run --image mine -- cat /etc/os-release
        dutyfree image gc --spare 20G
    """,
    "dutyfree.cli.layers:layer": """Build recipes; list, export, import and remove layers and snapshots.

    Every stage of a recipe is a layer, made once per machine. A snapshot with a name is one too. Each stands
    on others, down to an image: all of them are exported together, and what is missing is imported. They are
    named by a recipe's file, by digits of 'dutyfree layer ls', or as snapshot:NAME. See docs/layers.md.

    For example, build here and use there, by a file or straight from the machine that has it:

        dutyfree layer build recipe.toml
        dutyfree layer export recipe.toml --to recipe.tar
        dutyfree layer import recipe.tar
        dutyfree layer import "exec:ssh node dutyfree layer serve" recipe.toml

    Or have every machine ask the others by itself before it builds:

        dutyfree layer serve --bind 0.0.0.0:7400
        dutyfree layer build recipe.toml --option 'peers=["tcp://node-1:7400"]'
    """,
}
for path, summary in _COMMANDS.items():
    app.command(path, help=summary)


def parsed() -> Callable[[], int | None]:
    """What to call for the arguments of this process. Raises UsageError."""
    try:
        command, given, _ = app.parse_args(exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _asked_wrongly(error) from error
    return partial(command, *given.args, **given.kwargs)


def _asked_wrongly(error: CycloptsError) -> UsageError:
    """What the parser of the command line has to say, in a sentence of ours."""
    of = " ".join(("dutyfree", *(error.command_chain or ())))
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or ("",))[0]
        known = (name for name in error.app or () if not name.startswith("-"))
        meant = suggestion(word, known)
        return UsageError(f"there is no command {word!r}", remedy=meant or f"see: {of} --help")
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        known = (name for argument in error.argument_collection if argument.parse for name in argument.names)
        return unknown_option(word, known, of)
    if isinstance(error, UnusedCliTokensError):
        said = f"{of} takes no argument {(error.unused_tokens or ('',))[0]!r}"
    else:
        said = str(error).strip().rstrip(".")
    return UsageError(said, remedy=f"see: {of} --help")
