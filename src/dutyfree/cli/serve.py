"""``dutyfree serve`` and ``dutyfree token``: give the sandboxes of this machine to clients on others."""

from __future__ import annotations

import asyncio
import os
import shutil
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
from dutyfree.server import listen, logs, state_lock
from dutyfree.server.admission import TenantLimits
from dutyfree.server.garbage import rare_collections
from dutyfree.server.service import DATABASE, Service, default_state
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
    remove_state: Annotated[bool, Parameter(show=False)] = False,
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
        The directory for tokens, received files and what a restart needs. The default for root is
        /var/lib/dutyfree/server.
    certificate
        A file with the certificate for TLS, and those of its issuers.
    key
        The file with the private key of the certificate.
    log_format
        The format of the log on standard error.
    log_level
        'info' logs sandboxes that are created and end, and failures; 'debug' also logs every call.
    log_commands
        Write the text of commands to the log. It may contain secrets of clients.
    replace
        Take over from the running server with the same --state. That server finishes its calls and stops.
    until_eof
        Stop when standard input ends, and end all sandboxes. For programs that start their own server.
    remove_state
        Remove the directory --state at the end, however the program ends that started this server.
    """
    address = listen.Address(listen_)
    options = {name: option_values.value(text) for name, text in option_values.pairs(option, "--option", "=")}
    state = state or default_state()
    _check(address, options, state, certificate, key, replace=replace, keep=not until_eof)
    logs.configure(log_format, log_level)
    tracing = Tracing.from_environment()
    observing = partial(_observe, tracing=tracing, commands=log_commands)
    if not until_eof:  # a shell script starts programs in the background with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with state_lock.locked(state, replace=replace):
            run_async(partial(_serve, address, options, state, certificate, key, until_eof, observing))
    finally:
        if tracing is not None:
            tracing.close()
        if remove_state:
            shutil.rmtree(state, ignore_errors=True)
    return 0


def _check(
    address: listen.Address,
    options: dict[str, object],
    state: Path,
    certificate: Path | None,
    key: Path | None,
    *,
    replace: bool,
    keep: bool,
) -> None:
    """Find mistakes while a server that is to be replaced still runs. Raises DutyfreeError."""
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both --certificate and --key", remedy="give both, or neither")
    if certificate is not None and key is not None:
        listen.check_certificate(certificate, key)
    Service.engine(state, options, keep=keep)
    with Tokens(state / DATABASE) as tokens:
        listen.check_tokens(address, tokens)
    if replace:
        address.check_free(state_lock.holder(state))


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
    async with rare_collections(), Service.open(state, options, keep=not until_eof) as service:
        observe(service)
        async with listen.serving(service, address, certificate=certificate, key=key) as url:
            _announce(url, address, taken_over=len(service.sandboxes))
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


def _announce(url: str, address: listen.Address, *, taken_over: int) -> None:
    if address.host in ("", "0.0.0.0", "::") and address.path is None:  # noqa: S104 (compares)
        client = f"{url.partition('://')[0]}://HOST:{url.rpartition(':')[2]}"
    else:
        client = url
    text = f'serving sandboxes at {url}; to use them: dutyfree.open("hosted", url="{client}")'
    if taken_over:
        text += f"; took over {taken_over} {'sandbox' if taken_over == 1 else 'sandboxes'}"
    console.show(text)
    if not address.is_local and url.startswith("http:"):
        console.say("the connection is not encrypted: give --certificate and --key, or trust the network")


def _tokens(state: Path | None) -> Tokens:
    return Tokens((state or default_state()) / DATABASE)


@token.command
def create(
    tenant: str,
    /,
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    state: Path | None = None,
) -> int:
    """Create a token for a tenant, and print it. It cannot be shown again.

    All tokens of a tenant see the same sandboxes. Tenants do not see each other's sandboxes. The tenant
    'operator' sees the layers, the events and the metrics of all tenants.

    Parameters
    ----------
    tenant
        The name of the tenant: lower-case letters, digits and hyphens. The first token creates the tenant.
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
    """Limit what a tenant may have at once. The command replaces all limits of the tenant.

    A limit that you leave out no longer applies. A running server applies the limits within seconds. A
    request for more waits for up to a minute and is then refused. Only creations above --creates-per-second
    are refused at once.

    Parameters
    ----------
    tenant
        The name of the tenant.
    sandboxes
        How many sandboxes it may have.
    memory
        The sum of their memory limits, such as 64G. A sandbox without a limit counts as a quarter of the
        machine's memory.
    cpus
        The sum of their CPU limits. A sandbox without a limit counts as all CPUs of the machine.
    creates_per_second
        How many sandboxes it may create per second.
    state
        The directory of the server, as for 'dutyfree serve'.
    """
    limits = TenantLimits(sandboxes, option_values.size(memory, "--memory"), cpus, creates_per_second)
    with _tokens(state) as tokens:
        tokens.set_limits(tenant, limits)
        has_token = any(one.tenant == tenant for one in tokens.all())
    console.say(f"limits of {tenant}: {_describe(limits) or 'none'}")
    if not has_token:
        console.say(f"{tenant} has no token yet: dutyfree token create {tenant}")
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
                _describe(limits.get(one.tenant)),
            )
            for one in tokens.all()
        ]
    if rows:
        console.table(("id", "tenant", "created", "limits"), rows)
    else:
        console.say("there are no tokens: a server that starts now serves only programs on this machine")
    return 0


def _describe(limits: TenantLimits | None) -> str:
    """The limits that are set. Those that are not set are left out."""
    table = {} if limits is None else msgspec.structs.asdict(limits)
    return ", ".join(
        f"{name.replace('_', ' ')} {console.size(value) if name == 'memory' else f'{value:.15g}'}"
        for name, value in table.items()
        if value is not None
    )


@token.command
def revoke(name: str, /, *, state: Path | None = None) -> int:
    """Revoke a token. A running server refuses it after five seconds at most.

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
