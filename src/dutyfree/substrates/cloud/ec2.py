"""EC2, and servers that speak its interface, through libcloud. All that is special to a provider is here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.types import InvalidCredsError, LibcloudError, MalformedResponseError
from libcloud.compute.drivers.ec2 import NAMESPACE, VALID_EC2_REGIONS, EC2NodeDriver, IdempotentParamError
from libcloud.utils.xml import findall, findtext

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.cloud.api import ApiError, Instance, Kind, Order, Place, State

KEY, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
REQUEST_SECONDS = 30

_STATES: dict[str, State] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "ended",
    "terminated": "ended",
}

# The beginnings of error codes. https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_CODES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("busy", ("RequestLimitExceeded", "Throttling", "InsufficientAddressCapacity", "Unavailable")),
    ("unclear", ("InternalError", "InternalFailure", "ServiceUnavailable")),
    ("permission", ("UnauthorizedOperation", "AccessDenied")),
    ("credentials", ("AuthFailure", "ExpiredToken", "RequestExpired", "PendingVerification", "Blocked")),
    ("quota", ("InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded")),
    ("quota", ("VolumeLimitExceeded", "MaxIOPSLimitExceeded", "AddressLimitExceeded")),
    ("capacity", ("InsufficientInstanceCapacity", "InsufficientHostCapacity", "SpotMaxPriceTooLow")),
    ("capacity", ("InsufficientCapacity", "InsufficientFreeAddressesInSubnet", "Unsupported")),
    ("image", ("InvalidAMI", "InvalidImage")),
    ("size", ("InvalidInstanceType",)),
    ("network", ("InvalidSubnet", "InvalidGroup", "InvalidSecurityGroup", "VPCIdNotSpecified")),
    ("network", ("MissingInput", "DefaultVpc")),
)


class _Driver(EC2NodeDriver):  # type: ignore[misc]  # it has no types
    def pages(self, filters: Mapping[str, str]) -> Iterator[Any]:
        """All nodes. ``list_nodes`` gives the first page alone, and asks for their addresses once more."""
        params = {"Action": "DescribeInstances", **self._build_filters(filters)}
        while True:
            answer = self.connection.request(self.path, params=params).object
            for reservation in findall(answer, "reservationSet/item", NAMESPACE):
                yield from self._to_nodes(reservation, "instancesSet/item")
            if not (token := findtext(answer, "nextToken", NAMESPACE)):
                return
            params["NextToken"] = token


class Ec2:
    """See ``Api``. Each request has a connection of its own, so that threads may share it."""

    def __init__(self, place: Place) -> None:
        """Raises Unavailable."""
        if missing := [name for name in (KEY, SECRET) if not os.environ.get(name)]:
            raise Unavailable(
                f"there are no credentials: {' and '.join(missing)} not set",
                remedy=f"set {KEY} and {SECRET}; `aws configure export-credentials --format env` prints them",
            )
        region = place.region or _environment_region()
        if region not in VALID_EC2_REGIONS:
            raise Unavailable(
                f"libcloud knows no region {region!r}", remedy="check the option region= and AWS_REGION"
            )
        self.place = msgspec.structs.replace(place, region=region)
        self._url = urlsplit(place.endpoint)

    def _driver(self) -> Any:
        where: dict[str, Any] = {}
        if self._url.hostname:
            secure = self._url.scheme != "http"
            port = self._url.port or (443 if secure else 80)
            where = {"host": self._url.hostname, "port": port, "secure": secure}
        return _Driver(
            os.environ.get(KEY, ""),
            os.environ.get(SECRET, ""),
            token=os.environ.get(TOKEN) or None,
            region=self.place.region,
            signature_version="4",
            timeout=REQUEST_SECONDS,
            **where,
        )

    def create(self, order: Order) -> Instance:
        """Request it. The client token makes repeated requests one."""
        arguments = {
            "ex_userdata": order.user_data,
            "ex_metadata": dict(order.tags),
            "ex_clienttoken": order.name,
            "ex_terminate_on_shutdown": True,
        }
        if order.subnet:
            arguments["ex_subnet"] = SimpleNamespace(id=order.subnet)
            arguments["ex_assign_public_ip"] = order.public
        if order.security_groups:
            kind = "ex_security_group_ids" if order.subnet else "ex_security_groups"
            arguments[kind] = list(order.security_groups)
        image, size = SimpleNamespace(id=order.image), SimpleNamespace(id=order.size)
        with _mapped():
            return _instance(
                self._driver().create_node(order.name, size, image, **arguments, **order.arguments)
            )

    def find(self, tags: Mapping[str, str]) -> Sequence[Instance]:
        with _mapped():
            filters = {f"tag:{name}": value for name, value in tags.items()}
            return [_instance(node) for node in self._driver().pages(filters)]

    def end(self, instance: str) -> bool:
        try:
            with _mapped():
                self._driver().destroy_node(SimpleNamespace(id=instance))
        except ApiError as error:
            if "InvalidInstanceID" in str(error):
                return False
            raise
        return True

    def price(self, size: str) -> float | None:
        with _mapped():
            found = next((one.price for one in self._driver().list_sizes() if one.id == size), None)
            return float(found) if found else None


def _environment_region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _instance(node: Any) -> Instance:
    return Instance(
        id=node.id,
        state=_STATES.get(node.extra.get("status", ""), "stopped"),
        tags=dict(node.extra.get("tags") or {}),
        public=next(iter(node.public_ips), None) or "",
        private=next(iter(node.private_ips), None) or "",
        reason=node.extra.get("reason") or "",
    )


@contextmanager
def _mapped() -> Iterator[None]:
    """Raise what libcloud raises as an ApiError."""
    try:
        yield
    except InvalidCredsError as error:
        raise ApiError("credentials", _text(error)) from error
    except MalformedResponseError as error:  # a proxy or a balancer answered instead of the provider
        raise ApiError("unclear", "the answer is not one of the provider") from error
    except IdempotentParamError as error:
        raise ApiError("request", _text(error)) from error
    except BaseHTTPError as error:
        raise ApiError(_kind(error.code, _text(error)), _text(error)) from error
    except OSError as error:  # those of requests among them
        # Its text and its traceback have the whole request: the host key in the user data, a session token.
        raise ApiError("unclear", f"no answer: {_without_query(_text(error))}") from None
    except (LibcloudError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise ApiError("broken", f"libcloud failed: {_text(error)}") from error


def _kind(status: int, text: str) -> Kind:
    code = text.partition(":")[0]
    for kind, beginnings in _CODES:
        if code.startswith(beginnings):
            return kind
    if code == "InvalidParameterValue" and "instance type" in text.lower():
        return "size"
    if status == 429:
        return "busy"
    return "unclear" if status >= 500 else "request"


def _without_query(text: str) -> str:
    return re.sub(r"\?\S*", "", text)


def _text(error: Exception) -> str:
    said = getattr(error, "value", "") or getattr(error, "message", "") or str(error)
    return str(said or f"status {getattr(error, 'code', type(error).__name__)}")
