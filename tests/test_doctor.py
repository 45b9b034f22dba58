"""What the doctor says of the native engine."""

from __future__ import annotations

import os

import pytest

from dutyfree.doctor import native
from dutyfree.engine.host.features import HostFeatures
from dutyfree.substrates.native import NativeConfig

LIMITED = ("cpu", "memory", "pids")


@pytest.mark.native
async def test_every_feature_is_named() -> None:
    findings = {finding.what: finding for finding in await native.check()}
    wanted = [
        "kernel",
        "user namespaces",
        "rights",
        "overlayfs",
        "id-mapped mounts of tmpfs",
        "seccomp",
        "a sandbox",
    ]
    wanted += [f"limit of {name}" for name in LIMITED] + ["idle sandboxes", "core files", "swap"]
    wanted.append("open files of the whole host")
    assert {f"native: {name}" for name in wanted} <= findings.keys()
    assert findings["native: a sandbox"].fine
    assert findings["native: rights"].fine == (os.geteuid() == 0)
    assert all(finding.fine or finding.remedy for finding in findings.values())


async def test_without_the_program_the_rest_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CONFIG", NativeConfig(program="/nowhere/dutyfree-init"))
    findings = {finding.what: finding for finding in await native.check()}
    assert not findings["native: a sandbox"].fine
    assert "gcc" in findings["native: a sandbox"].remedy
    assert "native: swap" in findings


def test_what_was_tried_and_failed_is_explained() -> None:
    results = {"tmpfs": 0, "overlay": 19, "xattr": 0, "mapped-tmpfs": 22, "mapped": 1, "seccomp": 0}
    found = {finding.what: finding for finding in native._tried(results, HostFeatures())}
    assert (found["native: overlayfs"].fine, found["native: overlayfs"].remedy) == (False, "modprobe overlay")
    assert found["native: overlayfs"].detail == os.strerror(19)
    assert not found["native: id-mapped mounts of /usr"].fine
    # Nobody without root could map those, so it is no finding.
    rootless = native._tried(results, HostFeatures(mode="rootless"))
    assert "native: id-mapped mounts of /usr" not in {finding.what for finding in rootless}


@pytest.mark.parametrize(
    ("features", "fine"),
    [
        (HostFeatures("root", "v2", LIMITED, 65536), [True, True, True]),
        (HostFeatures("rootless", "none", (), 65536), [False, False, False]),
        (HostFeatures("rootless", "none", (), 1, "kept"), [False, False, True]),
    ],
)
def test_limits(features: HostFeatures, fine: list[bool]) -> None:
    findings = list(native._limits(features))
    assert [finding.fine for finding in findings] == fine
    assert all("Delegate" in finding.remedy for finding in findings if not finding.fine)


@pytest.mark.parametrize(
    ("features", "lost"),
    [
        (HostFeatures("root", "v1", LIMITED, 65536, freezer=True), set()),
        (
            HostFeatures("rootless", "v2", LIMITED, 65536),
            {
                "pauses by signals, which processes can see",
                "ids shared by all sandboxes",
                "files of the host's root cannot be changed",
                "the host's own network, or none",
            },
        ),
    ],
)
def test_losses(features: HostFeatures, lost: set[str]) -> None:
    assert set(features.losses()) == lost
