"""``dutyfree serve`` and ``dutyfree token``: give the sandboxes of this machine to clients on others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import msgspec
from cyclopts import App, Parameter

from dutyfree.cli import console, option_values
from dutyfree.cli.signals import run_async
from dutyfree.contract.errors import UsageError
from dutyfree.server import listen, logs
from dutyfree.server.admission import TenantLimits
from dutyfree.server.service import Service, default_state
from dutyfree.server.state_lock import locked
from dutyfree.server.tokens import Tokens
from dutyfree.server.tracing import Tracing

token = App(name="token")

DRAIN_SECONDS = 10.0
"""How long a server that was told to stop waits for the calls that run."""


def serve(
    *,
    listen_: Annotated[str, Parameter(name="--listen")] = listen.DEFAULT,
    option: tuple[str, ...] = (),
    state: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    log_format: logs.Format = "logfmt",
    log_level: logs.Level = "info",
    log_commands: bool = False,
    replace: bool = False,
    until_eof: bool = False,
) -> int:
    """Serve the sandboxes of this machine until Ctrl-C.

    Ctrl-C ends the server and all sandboxes. After SIGTERM, or if the server is killed, the sandboxes go on
    until their leases end, and the next server with the same state takes them over.

    Clients use them with the substrate 'hosted', or over HTTP with any program (docs/service.md). Without a
    token, only programs on this machine may use the server. As soon as a token exists, every client needs
    one. In a browser, the server's address shows its dashboard.

    For example:

        dutyfree serve
        dutyfree serve --listen unix:/run/dutyfree.sock --option image=debian:12
        dutyfree token create trainer
        dutyfree serve --listen 0.0.0.0:7800 --certificate server.pem --key server.key
        dutyfree serve --replace

    Parameters
    ----------
    listen_
        HOST:PORT, or unix:PATH. Port 0 chooses a free port.
    option
        NAME=VALUE: an option of the substrate native. May be repeated.
    state
        The directory of tokens and received files. Default for root: /var/lib/dutyfree/server.
    certificate
        A file with the certificate for TLS, and those of its issuers.
    key
        The file with the private key of the certificate.
    log_format
        How lines of the log on standard error are written.
    log_level
        'info' has sandboxes that come and go, and failures; 'debug' also every call.
    log_commands
        Let the log have the text of commands, which may contain secrets of clients.
    replace
        Take over from the server that runs with this state: it finishes its calls, and this one goes on.
    until_eof
        End when standard input ends, for programs that start a server for themselves. The server and its
        sandboxes then end with them.
    """
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both --certificate and --key")
    address = listen.Address(listen_)
    options = {name: option_values.value(text) for name, text in option_values.pairs(option, "--option", "=")}
    state = state or default_state()
    logs.configure(log_format, log_level)
    tracing = Tracing.from_environment()
    observing = partial(_observe, tracing=tracing, commands=log_commands)
    try:
        with locked(state, replace=replace):
            run_async(partial(_serve, address, options, state, certificate, key, until_eof, observing))
    finally:
        if tracing is not None:
            tracing.close()
    return 0


def _observe(service: Service, *, tracing: Tracing | None, commands: bool) -> None:
    service.calls.tracing, service.calls.commands = tracing, commands


async def _serve(
    address: listen.Address,
    options: dict[str, object],
    state: Path,
    certificate: Path | None,
    key: Path | None,
    until_eof: bool,
    observe: Callable[[Service], None],
) -> None:
    stopped = asyncio.Event()
    if not until_eof:  # already now: a server that is told to stop while it starts has taken over sandboxes
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Service.open(state, options, keep=not until_eof) as service:
        observe(service)
        async with listen.serving(service, address, certificate=certificate, key=key) as url:
            taken_over = f"; it took over {adopted} sandboxes" if (adopted := len(service.sandboxes)) else ""
            usage = f'to use them: dutyfree.open("hosted", url={url!r})'
            console.show(f"serving sandboxes at {url}; {usage}{taken_over}")
            if until_eof:
                while await console.read_chunk():
                    pass
                return
            await stopped.wait()
            await service.drain(DRAIN_SECONDS)
        await service.sandboxes.leave()
        if service.calls.tracing is not None:
            await anyio.to_thread.run_sync(service.calls.tracing.close)
        # The sandboxes stay, as if this process had been killed: so there is nothing to clean up.
        sys.stdout.flush()
        os._exit(0)


def _tokens(state: Path | None) -> Tokens:
    return Tokens((state or default_state()) / "server.sqlite")


@token.command
def create(
    tenant: str,
    /,
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    state: Path | None = None,
) -> int:
    """Create a token for a tenant, and print it. It cannot be shown again.

    The tokens of one tenant share its sandboxes. Tenants do not see each other's. The tenant 'operator' sees
    the layers and the metrics of all.

    Parameters
    ----------
    tenant
        A name: lower-case letters, digits and hyphens.
    from_
        A file with a token that another server has created, so that one token is valid on several machines.
    state
        The directory of the server, as for 'dutyfree serve'.
    """
    with _tokens(state) as tokens:
        if from_ is None:
            console.show(tokens.create(tenant))
        else:
            tokens.create(tenant, _read(from_))
    return 0


def _read(path: Path) -> str:
    try:
        secret = path.read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not secret:
        raise UsageError(f"{path} is empty")
    return secret


@token.command
def limit(
    tenant: str,
    /,
    *,
    sandboxes: int | None = None,
    memory: str | None = None,
    cpus: float | None = None,
    creates_per_second: float | None = None,
    state: Path | None = None,
) -> int:
    """Limit what a tenant may have at once. A limit that is not given is lifted.

    A running server applies it within seconds. Requests above a limit wait, and are refused after a minute.

    Parameters
    ----------
    tenant
        Its name.
    sandboxes
        How many sandboxes.
    memory
        The sum of their memory limits, such as 64G. A sandbox without one counts a quarter of the machine.
    cpus
        The sum of their limits of processors. A sandbox without a limit counts all of them.
    creates_per_second
        How many it may create per second.
    state
        The directory of the server, as for 'dutyfree serve'.
    """
    limits = TenantLimits(sandboxes, option_values.size(memory, "--memory"), cpus, creates_per_second)
    with _tokens(state) as tokens:
        tokens.set_limits(tenant, limits)
    return 0


@token.command(name="ls")
def list_(*, state: Path | None = None) -> int:
    """List the tokens, without their secrets.

    Parameters
    ----------
    state
        The directory of the server, as for 'dutyfree serve'.
    """
    with _tokens(state) as tokens:
        limits = tokens.all_limits()
        rows = [
            (
                one.id,
                one.tenant,
                f"{console.age(time.time() - one.created)} ago",
                ", ".join(f"{name} {value:g}" for name, value in _given(limits.get(one.tenant))),
            )
            for one in tokens.all()
        ]
    if rows:
        console.table(("id", "tenant", "created", "limits"), rows)
    else:
        console.say("there are no tokens: only programs on this machine may use the server")
    return 0


def _given(limits: TenantLimits | None) -> list[tuple[str, float]]:
    """The limits that are set, by name."""
    table = {} if limits is None else msgspec.structs.asdict(limits)
    return [(name, value) for name, value in table.items() if value is not None]


@token.command
def revoke(name: str, /, *, state: Path | None = None) -> int:
    """Revoke a token: new requests with it are refused at once.

    Parameters
    ----------
    name
        Its id, from 'dutyfree token ls'.
    state
        The directory of the server, as for 'dutyfree serve'.
    """
    with _tokens(state) as tokens:
        tokens.revoke(name)
    return 0
