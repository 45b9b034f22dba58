"""What the status of a pod says: how far it is, and why it failed or ended. Functions of values."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from dutyfree.contract.errors import CreateError, ExecError, SandboxClosed, SandboxGone

CONTAINER = "sandbox"

STEPS = {"schedule": "PodScheduled", "initialise": "Initialized", "start": "Ready"}
"""The spans of a creation, and the condition that ends each."""

_PULL = {
    "ErrImagePull": "the image cannot be pulled",
    "ImagePullBackOff": "the image cannot be pulled",
    "ErrImageNeverPull": "the node does not have the image, and may not pull it",
    "InvalidImageName": "the name of the image is not valid",
    "ImageInspectError": "the image cannot be read",
    "RegistryUnavailable": "the image's registry does not answer",
}
_START = {
    "CreateContainerConfigError": "the container cannot be configured",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
    "CrashLoopBackOff": "the container ends at once",
}
_PASSING = re.compile(
    r"QPS exceeded|too ?many ?requests|\b(429|50[0234])\b|time(d )?-?out|deadline exceeded|connection reset"
    r"|unexpected EOF|temporar|reserve container name|^Back-off pulling image \"[^\"]*\"$",
    re.IGNORECASE,
)
"""Causes after which the node tries again with some hope: a busy registry, or a busy node.

A back-off without a cause only says that it will try again.
"""


def condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = (pod.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each["type"] == kind), {})


def holds(pod: Mapping[str, Any], kind: str) -> bool:
    return condition(pod, kind).get("status") == "True"


def _state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of our container."""
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((each.get("state") or {} for each in found if each["name"] == CONTAINER), {})


def age(pod: Mapping[str, Any]) -> float:
    """The seconds since a pod was made, if the clocks of the cluster and of this machine agree."""
    made = datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return (datetime.datetime.now(datetime.UTC) - made).total_seconds()


def has_ended(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed") or "terminated" in _state(pod)


def is_removed(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is being deleted and has no process, though the cluster still knows it."""
    never_ran = (_state(pod).get("waiting") or {}).get("reason") in _PULL
    return bool(pod["metadata"].get("deletionTimestamp")) and (has_ended(pod) or never_ran)


def failure(pod: Mapping[str, Any]) -> CreateError | None:
    """Why a pod that does not run yet will not run; None if it still may."""
    name = pod["metadata"]["name"]
    waiting = _state(pod).get("waiting") or {}
    reason, said = waiting.get("reason", ""), waiting.get("message", "")
    image = pod["spec"]["containers"][0]["image"]
    # The name of the image may have any words and numbers.
    if _PASSING.search(re.sub(rf"\b{re.escape(image)}\b", "IMAGE", said)):
        return None
    if reason in _PULL:
        return CreateError(
            f"the pod {name} cannot start: {_PULL[reason]}: {image}: {said or reason}",
            remedy="check the image's name, pull_secrets=, and that the nodes reach its registry",
        )
    if reason in _START:
        return CreateError(f"the pod {name} cannot start: {_START[reason]}: {said or reason}")
    if has_ended(pod):
        return CreateError(f"the pod {name} ended before it was ready: {_ended(pod)}")
    if pod["metadata"].get("deletionTimestamp"):
        return CreateError(f"the pod {name} was deleted before it was ready")
    return None


def late(pod: Mapping[str, Any], seconds: float) -> CreateError:
    """Why a pod does not run after its time is over."""
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "True":
        said = scheduled.get("message") or "the scheduler has not seen it"
        return CreateError(
            f"no node could take the pod {name} within {seconds:g} s: {said}",
            remedy="ask for less, remove other pods, or check node_selector= and tolerations=",
        )
    waiting = _state(pod).get("waiting") or {}
    said = (
        waiting.get("message")
        or waiting.get("reason")
        or condition(pod, "Ready").get("message")
        or "no reason"
    )
    return CreateError(f"the pod {name} does not run after {seconds:g} s: {said}")


def ending(
    pod: Mapping[str, Any] | None, name: str, said: str = "", *, killed: bool = False
) -> Exception | None:
    """Why a sandbox ended; None if its pod still runs. It is the agent's doing if the cluster is sure.

    ``killed``: the process that brought the stream to init did not end by itself.
    """
    if pod is None:
        return SandboxClosed(f"the pod {name} was deleted")
    status, disrupted = pod.get("status") or {}, condition(pod, "DisruptionTarget")
    if status.get("reason") == "Evicted":
        # Only the pod itself can exceed a limit of the pod.
        kind = SandboxGone if "exceeds the" in status.get("message", "") else ExecError
        return kind(f"the pod {name} was evicted: {status.get('message', '')}")
    if disrupted.get("status") == "True":  # drained, preempted, or its node is lost
        return ExecError(f"the cluster removes the pod {name}: {disrupted.get('message', '')}")
    if pod["metadata"].get("deletionTimestamp"):
        return SandboxClosed(f"the pod {name} was deleted")
    if not has_ended(pod):
        # Its container runs and has no probe: only its node can make it not ready.
        if "running" in _state(pod) and condition(pod, "Ready").get("status") in ("False", "Unknown"):
            return ExecError(f"the node {pod['spec'].get('nodeName')} of the pod {name} is lost")
        return None
    ended = _state(pod).get("terminated") or {}
    if status.get("reason") == "DeadlineExceeded":
        return SandboxClosed(f"the pod {name} has reached lifetime_seconds")
    # A container counts as OOMKilled, too, if the limit killed another process of it before.
    if ended.get("reason") == "OOMKilled" and ended.get("exitCode") != 0:
        return SandboxGone(f"the pod {name} was killed by its memory limit")
    if killed and ended.get("exitCode") == 0:
        # Init lost its stream, and nothing else happened to the pod: a process in it killed the other one.
        return SandboxGone(f"a process in the pod {name} killed the process that holds the stream")
    detail = f"the pod {name} ended: {_ended(pod)}" + (f": {said}" if said else "")
    return ExecError(detail)


def _ended(pod: Mapping[str, Any]) -> str:
    status, ended = pod.get("status") or {}, _state(pod).get("terminated") or {}
    parts = [status.get("reason") or "", status.get("message") or "", ended.get("reason") or ""]
    if "exitCode" in ended:
        parts.append(f"exit code {ended['exitCode']}")
    parts.append(ended.get("message") or "")
    return ", ".join(part.strip() for part in parts if part.strip()) or status.get("phase", "unknown")
