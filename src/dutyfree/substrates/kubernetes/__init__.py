"""The substrate ``kubernetes``: one pod per sandbox, on any cluster that a kubeconfig names.

Start with ``substrate``. ``api`` sends requests with the official client, ``watch`` follows the pods of an
owner; ``pods`` makes and removes pods, ``status`` reads their conditions, ``pool`` keeps some ready;
``registry`` pushes the study's image; ``ownership`` finds what dead owners left. A pod is a sandbox by
``sandbox`` and ``execution``, with an exec of the cluster for each action, or by ``guest`` and ``stream``,
with our init. This room imports the contract, ``substrates.local``, ``study_image``, and of dutyfree's engine
``sandbox`` and the rooms below it.
"""

from dutyfree.substrates.kubernetes.config import KubernetesConfig
from dutyfree.substrates.kubernetes.substrate import Kubernetes

__all__ = ["Kubernetes", "KubernetesConfig"]
