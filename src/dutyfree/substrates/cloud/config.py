"""The options of the substrate ``cloud``. None of them is a credential: those come from variables alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``cloud``."""

    provider: Literal["ec2"] = "ec2"
    """Whose instances. The credentials come from the usual variables of the provider."""
    region: str = ""
    """The region; by default that of AWS_REGION or AWS_DEFAULT_REGION, else us-east-1."""
    endpoint: str = ""
    """The URL of another server that speaks the provider's interface."""
    image: str = ""
    """The image of the instances, such as "ami-0123456789abcdef0". It must have cloud-init and an sshd."""
    size: str = "t3.small"
    """The instance type."""
    subnet: str = ""
    """The subnet; by default that of the account."""
    security_groups: tuple[str, ...] = ()
    """Security groups that let ssh in: ids together with subnet, or names without it."""
    arguments: dict[str, Any] = {}
    """More arguments of libcloud's create_node, such as {"ex_spot": true}."""
    user: str = "root"
    """The user of commands. Any user but root can use sudo."""
    address: Literal["public", "private", "id"] = "public"
    """What ssh connects to: an address of the instance, or its id, for a ProxyCommand of ssh_config."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """The port of sshd; 0 is the one that ``ssh`` takes."""
    jump: str = ""
    """Machines between this one and the instances, for ``ssh -J``."""
    ssh_config: str = ""
    """Another configuration file than ~/.ssh/config, for ``ssh -F``."""
    ssh_options: tuple[str, ...] = ()
    """More options of ssh_config."""
    host_key: Literal["user-data", "accept-new"] = "user-data"
    """How ssh knows the instance: we give it its host key, or the first key that it shows is accepted."""
    identity: str = ""
    """The file of a private key that the image accepts; by default each opening makes a key pair."""
    actions: Literal["init", "exec"] = "init"
    """How actions reach the instance: our init over one kept stream, or an ssh session for each."""
    lifetime: Annotated[int, msgspec.Meta(ge=60, le=604800)] = 7200
    """Seconds after which an instance ends itself, whatever happens to its owner."""
    price: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """What an instance costs per hour; by default what libcloud knows of the size."""
    create_seconds: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long the request for an instance is repeated if the provider is busy or does not answer."""
    boot_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """How long an instance may take until it runs, and then until ssh answers."""
    end_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """How long the end of an instance may take; after that a process in the background goes on."""
    settle_seconds: Annotated[float, msgspec.Meta(ge=0)] = 120.0
    """How long an instance that exists may be missing in the provider's list."""
    poll_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """The interval at which the provider is asked for the state of all instances."""
