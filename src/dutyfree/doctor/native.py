"""Check the native engine by creating a sandbox: which kernel features work, and what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import anyio.to_thread

from dutyfree.contract import Limits
from dutyfree.contract.errors import DutyfreeError
from dutyfree.doctor.finding import Finding
from dutyfree.engine.host import capacity, census
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.host.proc import sysctl
from dutyfree.engine.launcher.requirements import KERNEL
from dutyfree.substrates.native import Native, NativeConfig

CONFIG = NativeConfig(ready=0)
ON_DISK = NativeConfig(ready=0, storage="disk", limits=Limits(disk=16 << 20))

KERNEL_ROOTLESS = (6, 6)
"""The first kernel whose tmpfs supports the overlay's extended attributes without root."""

IDLE_BYTES = 1 << 20
"""Memory of each idle sandbox, if there are thousands (docs/endurance.md)."""

FILE_BYTES = 256
"""The least memory of an open file, which counts for the sandbox."""

DELEGATE = "run it with: systemd-run --user --scope -p Delegate=yes … (needs cgroup v2), or run it as root"

TRIED = {
    "slot": ("user namespace, network namespace, control group", "see the findings on namespaces and limits"),
    "tmpfs": ("tmpfs", "boot a kernel with CONFIG_TMPFS"),
    "overlay": ("overlayfs", "modprobe overlay"),
    "xattr": (
        "overlay attributes",
        "boot Linux 6.6 or newer; before it, some directories cannot be replaced",
    ),
    "mapped-tmpfs": ("id-mapped mounts of tmpfs", "boot Linux 6.3 or newer"),
    "mapped": (
        "id-mapped mounts of /usr",
        "put /usr on ext4, xfs, btrfs, or another file system that supports them",
    ),
    "seccomp": ("seccomp", "boot a kernel with CONFIG_SECCOMP_FILTER"),
}


async def check() -> list[Finding]:
    """Check each feature. Raises nothing."""
    findings = await _in_thread(_kernel, _namespaces, _reduced)
    try:
        async with Native(CONFIG) as substrate:
            findings += await _in_thread(partial(_rights, substrate.features))
            findings += _tried(await substrate.probe_kernel(), substrate.features)
            findings += _limits(substrate.features)
            async with substrate.sandbox() as sandbox:
                seen = await sandbox.exec(["/bin/true"])
            findings.append(
                Finding("native: a sandbox", seen.ok, "created and removed" if seen.ok else str(seen))
            )
    except DutyfreeError as error:
        remedy = error.remedy or "see the findings above"
        findings.append(Finding("native: a sandbox", False, error.message, remedy))
    findings.append(await _disk())
    return findings + await _in_thread(_capacity, _host)


async def _disk() -> Finding:
    """Whether written files can go to disk. Most users do not need it, so nothing else depends on it."""
    what = 'native: storage="disk"'
    try:
        async with Native(ON_DISK) as substrate, substrate.sandbox() as sandbox:
            seen = await sandbox.exec(["/bin/true"])
            storage = (await substrate.facts())["storage"]
    except DutyfreeError as error:
        return Finding(what, False, error.message, error.remedy or "see the findings above")
    return Finding(what, seen.ok, storage if seen.ok else str(seen))


async def _in_thread(*checks: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return await anyio.to_thread.run_sync(lambda: [finding for check in checks for finding in check()])


def _kernel() -> Iterator[Finding]:
    release = os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    wanted = KERNEL if os.geteuid() == 0 else KERNEL_ROOTLESS
    yield Finding(
        "native: kernel", version >= wanted, release, f"boot Linux {wanted[0]}.{wanted[1]} or newer"
    )


def _namespaces() -> Iterator[Finding]:
    most = sysctl("user/max_user_namespaces") or "none"
    clone = sysctl("kernel/unprivileged_userns_clone")
    confined = sysctl("kernel/apparmor_restrict_unprivileged_userns")
    words = [f"up to {most}"]
    words += [f"unprivileged_userns_clone={clone}"] if clone else []
    words += [f"apparmor_restrict_unprivileged_userns={confined}"] if confined else []
    open_to_all = most not in ("none", "0") and clone != "0" and confined != "1"
    yield Finding(
        "native: user namespaces",
        open_to_all or (os.geteuid() == 0 and most not in ("none", "0")),
        ", ".join(words),
        "sysctl user.max_user_namespaces=16384 kernel.unprivileged_userns_clone=1 "
        "kernel.apparmor_restrict_unprivileged_userns=0 (those that exist here)",
    )


def _reduced() -> Iterator[Finding]:
    found = [one for one in census.sandboxes() if one.isolation != "full"]
    owners = ", ".join(sorted({f"{one.owner} {one.program}" for one in found}))
    yield Finding(
        "native: isolation of running sandboxes",
        not found,
        f"{len(found)} not isolated, of {owners}" if found else "full",
        'they may run trusted code only: their owner opened native with isolation="none" or without=…',
    )


def _rights(features: HostFeatures) -> Iterator[Finding]:
    rootless = features.mode == "rootless"
    lost = "; ".join(features.losses())
    yield Finding("native: rights", not rootless, f"rootless: {lost}" if rootless else "root", "run as root")
    helper = shutil.which("newuidmap")
    if rootless:
        yield Finding(
            "native: range of ids",
            features.ids > 1,
            f"{features.ids} ids in a sandbox; newuidmap: {helper or 'not found'}; {_subordinate()}",
            "apt-get install uidmap; usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER",
        )


def _subordinate() -> str:
    import pwd

    try:
        names = {str(os.getuid()), pwd.getpwuid(os.getuid()).pw_name}
        lines = Path("/etc/subuid").read_text().splitlines()
    except (KeyError, OSError):
        return "no /etc/subuid"
    found = [line for line in lines if line.split(":")[0] in names]
    return f"/etc/subuid: {', '.join(found) or 'no range of this user'}"


def _tried(results: dict[str, int], features: HostFeatures) -> Iterator[Finding]:
    for name, (what, remedy) in TRIED.items():
        # Without root, the owners of the host's files cannot be mapped on any file system.
        if name not in results or (name == "mapped" and features.mode == "rootless"):
            continue
        error = results[name]
        yield Finding(f"native: {what}", not error, os.strerror(error) if error else "works", remedy)


def _limits(features: HostFeatures) -> Iterator[Finding]:
    remedy = DELEGATE if features.mode == "rootless" else "boot with the controller, or mount /sys/fs/cgroup"
    for name in ("cpu", "memory", "pids"):
        fine = name in features.controllers
        detail = f"control groups {features.cgroup}" if fine else "no usable control group"
        if name == "pids" and not fine and features.counts_processes:
            fine, detail = True, "RLIMIT_NPROC, for a sandbox has one user"
        yield Finding(f"native: limit of {name}", fine, detail, remedy)


def _capacity() -> Iterator[Finding]:
    bounds = {"memory": capacity.host_memory() * 9 // 10 // IDLE_BYTES} | capacity.bounds()
    least = min(bounds, key=lambda name: bounds[name])
    every = ", ".join(f"{name} {count}" for name, count in bounds.items())
    yield Finding(
        "native: idle sandboxes",
        bounds[least] >= 1000,
        f"about {bounds[least]}, bounded by {least} ({every})",
        f"raise {least}: ulimit -n, sysctl kernel.pid_max, user.max_user_namespaces",
    )


def _host() -> Iterator[Finding]:
    pattern = sysctl("kernel/core_pattern")
    yield Finding(
        "native: core files",
        not pattern.startswith(("|", "@")),
        pattern or "none",
        "sysctl kernel.core_pattern=core: the program in it runs as root for crashes outside of sandboxes",
    )
    files = int(sysctl("fs/file-max") or 0)
    memory = capacity.host_memory()
    yield Finding(
        "native: open files of the whole host",
        files >= memory // FILE_BYTES,
        f"up to {files}",
        "sysctl fs.file-max=9223372036854775807, as systemd sets it: one sandbox can use up all open files",
    )
    swaps = Path("/proc/swaps")
    used = swaps.read_text().splitlines()[1:] if swaps.exists() else []
    yield Finding(
        "native: swap",
        not used,
        f"{len(used)} in use" if used else "none",
        "swapoff -a: the files of sandboxes are in memory, and swap writes them to disk",
    )
