"""The list of all commands, and the general parser of the command line."""

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
from dutyfree.cli.option_values import unknown_option
from dutyfree.contract.errors import UsageError
from dutyfree.validation import suggestion


class _LazyApp(App):
    """Lists its commands without importing them; ``COMMAND --help`` shows the docstring."""

    def help_print(
        self,
        tokens: Annotated[str | Iterable[str] | None, Parameter(show=False)] = None,
        *,
        console: Annotated[Any, Parameter(parse=False)] = None,
    ) -> None:
        _, chain, _ = self.parse_commands(tokens)
        for command in chain[1:]:
            if command.default_command is not None:
                command.help = None  # then cyclopts shows the docstring
        super().help_print(tokens, console=console)


app = _LazyApp(
    name="dutyfree",
    help="""Measure the rollout infrastructure tax of coding-agent reinforcement learning, and stop paying it.

    Start with 'dutyfree study': it takes a few minutes on this machine, and ends with a report.
    """,
    version=f"dutyfree {dutyfree.__version__}",
    # No "default: False" in the help of a switch, and no --no-… option for it.
    default_parameter=Parameter(negative="", show_default=lambda value: str(value) if value else None),
    suppress_keyboard_interrupt=False,  # main handles it
    result_action="return_value",
)
# By import path, so that a command imports only what it needs.
_COMMANDS = {
    "dutyfree.cli.run_help:run": "Run one command in a fresh sandbox.",
    "dutyfree.cli.shell:shell": "Open a shell in a fresh sandbox.",
    "dutyfree.cli.ps_gc:ps": "List the running sandboxes on this machine.",
    "dutyfree.cli.ps_gc:gc": "Remove what killed processes left.",
    "dutyfree.cli.serve:serve": "Give the sandboxes of this machine to clients on other machines.",
    "dutyfree.cli.serve:token": "Create, list and revoke the server's tokens; limit tenants.",
    "dutyfree.cli.study:study": "Measure the tax on this machine, then write the report.",
    "dutyfree.cli.ab:ab": "Say whether configuration B is slower or faster than A.",
    "dutyfree.cli.report:report": "Write figures, tables and report again from records.",
    "dutyfree.cli.report:compare": "Say what became slower or faster between earlier and later runs.",
    "dutyfree.cli.report:export": "Write the trials and the actions as CSV or Parquet.",
    "dutyfree.cli.doctor:substrates": "List the substrates: available here, or why not.",
    "dutyfree.cli.doctor:doctor": "Check this machine, and say what is missing.",
    "dutyfree.cli.image:image": """Pull, import, list and remove images; build the image of the study.

    The native engine pulls an image when a sandbox needs it; 'dutyfree image pull' does it in advance. Images
    share their layers, which are stored under DUTYFREE_CACHE or ~/.cache/dutyfree. See docs/images.md.

    For example:

        dutyfree image pull debian:12
        dutyfree image import ./rootfs.tar mine
        dutyfree run --image mine -- cat /etc/os-release
        dutyfree image gc --spare 20G
    """,
    "dutyfree.cli.layer:layer": """Build recipes; list, export, import and remove layers and snapshots.

    Every stage of a recipe is a layer, built once per machine. A named snapshot is a layer too. Export
    writes a layer with all layers below it, down to the image. Import copies only those that are missing.
    Name a layer by its recipe file, by digits from 'dutyfree layer ls', or as snapshot:NAME. See
    docs/layers.md.

    For example, build on one machine and use the layers on another, with a file or directly:

        dutyfree layer build recipe.toml
        dutyfree layer export recipe.toml --to recipe.tar
        dutyfree layer import recipe.tar

    Or let every machine ask the others before it builds; on each of them runs 'dutyfree serve':

        dutyfree layer import https://node-1:7800 recipe.toml
        dutyfree layer build recipe.toml --option 'peers=["https://node-1:7800"]'
    """,
}
for path, summary in _COMMANDS.items():
    app.command(path, help=summary)


def parse() -> Callable[[], int | None]:
    """The function to call for the arguments of this process. Raises UsageError."""
    try:
        command, given, _ = app.parse_args(exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _usage_error(error) from error
    return partial(command, *given.args, **given.kwargs)


def _usage_error(error: CycloptsError) -> UsageError:
    """The parser's error with our wording, and a remedy."""
    command = " ".join(("dutyfree", *(error.command_chain or ())))
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or ("",))[0]
        known = (name for name in error.app or () if not name.startswith("-"))
        meant = suggestion(word, known)
        return UsageError(f"there is no command {word!r}", remedy=meant or f"see: {command} --help")
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        known = (name for argument in error.argument_collection if argument.parse for name in argument.names)
        return unknown_option(word, known, command)
    if isinstance(error, UnusedCliTokensError):
        message = f"{command} takes no argument {(error.unused_tokens or ('',))[0]!r}"
    else:
        message = str(error).strip().rstrip(".")
    return UsageError(message, remedy=f"see: {command} --help")
