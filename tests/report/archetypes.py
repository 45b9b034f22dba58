"""A synthetic study of many archetypes, each with its own exec and with our init."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dutyfree.study.records import Records
from tests.analysis import synthetic

# label → use, options, creation, overhead of an action
ARCHETYPES: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "bare": ("bare", {}, 0.0004, 0.0003),
    "bare-again": ("bare", {}, 0.0004, 0.0003),
    "native": ("native", {}, 0.001, 0.0003),
    "hosted": ("hosted", {}, 0.002, 0.001),
    "docker": ("docker", {"actions": "exec"}, 0.15, 0.03),
    "docker-init": ("docker", {"actions": "init"}, 0.15, 0.001),
    "crun": ("oci", {"runtime": "crun", "actions": "exec"}, 0.02, 0.006),
    "crun-init": ("oci", {"runtime": "crun", "actions": "init"}, 0.02, 0.0005),
    "gvisor": ("oci", {"runtime": "runsc", "actions": "exec"}, 0.2, 0.06),
    "gvisor-init": ("oci", {"runtime": "runsc", "actions": "init"}, 0.2, 0.008),
    "kubernetes": ("kubernetes", {"actions": "exec"}, 0.9, 0.05),
    "kubernetes-init": ("kubernetes", {"actions": "init"}, 0.9, 0.002),
    "kubernetes-ready": ("kubernetes", {"actions": "exec", "ready": 2}, 0.02, 0.05),
    "vm-boot": ("vm", {"actions": "exec"}, 1.6, 0.02),
}


def archetypes() -> Records:
    """Fourteen labels: archetypes with their own exec and with our init."""
    with pytest.MonkeyPatch.context() as patch:
        for label, (use, _, creation, overhead) in ARCHETYPES.items():
            told = use in ("bare", "native")
            patch.setitem(synthetic.PROFILES, label, (use, creation, 0.002, overhead, 0.01, told))
        made = synthetic.plausible(labels=tuple(ARCHETYPES), trials=8, spans=True)
    options = {label: {"use": use, **given} for label, (use, given, *_) in ARCHETYPES.items()}
    vm = made.substrates["vm-boot"]
    emulated = msgspec.structs.replace(vm, facts={**vm.facts, "accelerator": "tcg"})
    plan = {**made.study.plan, "substrates": list(ARCHETYPES), "options": options}
    study = msgspec.structs.replace(made.study, plan=plan)
    substrates = {**made.substrates, "vm-boot": emulated}
    return msgspec.structs.replace(made, study=study, substrates=substrates)
