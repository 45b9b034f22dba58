"""The options of the substrate ``ssh``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class SshConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``ssh``. What they leave out, ~/.ssh/config and the defaults of ``ssh`` decide."""

    host: str = ""
    """The machine: a name of ~/.ssh/config, or [user@]hostname."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """The port; 0 is the one that ``ssh`` takes."""
    identity: str = ""
    """The file of a private key, for ``ssh -i``."""
    jump: str = ""
    """Machines between this one and the host, for ``ssh -J``."""
    config: str = ""
    """Another configuration file than ~/.ssh/config, for ``ssh -F``."""
    options: tuple[str, ...] = ()
    """More options of ssh_config, such as "StrictHostKeyChecking=accept-new"."""
    actions: Literal["init", "exec"] = "init"
    """How actions reach the machine: our init over one kept stream, or an ssh session for each."""
    directory: str = ""
    """Where the machine keeps sandboxes and our init; by default dutyfree-UID in its TMPDIR or /tmp."""
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of the commands."""
    sessions: Annotated[int, msgspec.Meta(ge=2)] = 10
    """Sessions over one connection, at most: MaxSessions of the sshd. More open another connection."""
    connect_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long a connection, or the start of init, may take."""
    alive_seconds: Annotated[int, msgspec.Meta(ge=0)] = 15
    """A connection that is silent is probed at this interval, and is lost after three probes; 0 for never."""
    end_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """How long the machine may take to remove a sandbox."""

    @property
    def flags(self) -> list[str]:
        """The arguments of ``ssh`` that say how to reach the host."""
        words = []
        for setting in self.options:
            words += ["-o", setting]
        for flag, value in (
            ("-F", self.config),
            ("-i", self.identity),
            ("-J", self.jump),
            ("-p", str(self.port) if self.port else ""),
        ):
            words += [flag, value] if value else []
        return words
