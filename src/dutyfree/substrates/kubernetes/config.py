"""The options of the substrate ``kubernetes``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dutyfree import study_image as study

_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class KubernetesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``kubernetes``."""

    kubeconfig: str = ""
    """The kubeconfig file; by default KUBECONFIG, ~/.kube/config, the service account of the own pod, or the
    cluster of ``make k8s-up``."""
    context: str = ""
    """A context of the kubeconfig; by default its current one."""
    namespace: str = ""
    """Where pods are made; by default the context's namespace, else "default"."""
    actions: Literal["init", "exec"] = "init"
    """How actions reach the pod: our init over one kept exec, or an exec of the cluster for each action."""
    program: Literal["auto", "stream", "host", "image"] = "auto"
    """How our init comes into the pod.

    "stream": over the exec; the image needs a shell. "host": mounted from the node, which has this
    installation at the same path. "image": the image has it as /.dutyfree/init. "auto": "image" for the
    study's image that we push, "stream" for all others.
    """
    image: str = study.REFERENCE
    """The image of a recipe without one; by default the study's image, if the cluster has a registry."""
    registry: str = ""
    """Where the study's image, and recipes on it, are pushed to, as HOST[:PORT]; by default what the
    ConfigMap kube-public/local-registry-hosting names."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets for the image's registry."""
    ready: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """The number of pods to keep ready for each kind of sandbox. Owners with the same ``pool`` share them."""
    pool: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$")] = "shared"
    """The name of the pool of ready pods."""
    runtime_class: str = ""
    """A RuntimeClass of the cluster, such as gvisor."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that may run the pods."""
    tolerations: tuple[dict[str, str | int], ...] = ()
    """Tolerations of the pods, as in a manifest."""
    request_cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """CPUs that a pod reserves; by default the limit of the sandbox."""
    request_memory: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Bytes of memory that a pod reserves; by default the limit of the sandbox."""
    isolated_network: bool = False
    """Whether the cluster enforces a NetworkPolicy. Else a sandbox whose network must be off is refused."""
    lifetime_seconds: Annotated[int, msgspec.Meta(gt=0)] = 86400
    """The cluster ends a pod at this age, whatever happens to its owner."""
    lease_seconds: Annotated[int, msgspec.Meta(ge=3)] = 60
    """An owner that did not renew its lease for twice this time, and ten minutes at least, counts as dead."""
    create_seconds: _Seconds = 300.0
    """How long a pod may take until it runs."""
    answer_seconds: _Seconds = 30.0
    """How long the cluster may take to answer a request."""
    remove_seconds: _Seconds = 60.0
    """How long the cluster may take to remove a pod."""
