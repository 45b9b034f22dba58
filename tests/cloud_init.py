"""A virtual machine of QEMU with Debian and its cloud-init, which boots as an instance does."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dutyfree import paths

NEEDED = ("qemu-system-x86_64", "debootstrap", "mke2fs", "busybox", "apt-get", "xz")
PACKAGES = (
    "python3,openssh-server,cloud-init,python3-cffi-backend,systemd-sysv,dbus,udev,kmod,iproute2,procps"
)

_MAKE = r"""
set -e
debootstrap --variant=minbase --include=$PACKAGES bookworm root
package=$(apt-cache depends linux-image-6.12-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
apt-get -qq -o APT::Sandbox::User=root download "$package"
dpkg-deb -x linux-image-*.deb kernel
cp -a kernel/lib/modules root/lib/
version=$(ls kernel/lib/modules)
chroot root depmod "$version"
chroot root systemctl enable systemd-networkd ssh
printf '[Match]\nName=en*\n[Network]\nDHCP=ipv4\n' >root/etc/systemd/network/10.network
printf 'datasource_list: [NoCloud]\nnetwork: {config: disabled}\n' >root/etc/cloud/cloud.cfg.d/99.cfg
rm -rf root/etc/ssh/ssh_host_* root/var/cache/apt root/usr/share/doc root/usr/share/locale
mke2fs -q -t ext4 -d root root.ext4 1500M
mkdir -p initramfs/bin
cp "$(command -v busybox)" initramfs/bin/
xz -dc "kernel/lib/modules/$version/kernel/drivers/block/virtio_blk.ko.xz" >initramfs/virtio_blk.ko
mv kernel/boot/vmlinuz-* vmlinuz
rm -rf root kernel linux-image-*.deb
"""

_INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /dev /root
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox insmod /virtio_blk.ko
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mkdir -p /root/var/lib/cloud/seed/nocloud
/bin/busybox cp /seed/user-data /seed/meta-data /root/var/lib/cloud/seed/nocloud/
exec /bin/busybox switch_root /root /sbin/init
"""


def image() -> Path:
    """The directory of the image, which is made once. Skips where it cannot be made. Blocks for minutes."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in NEEDED if not shutil.which(name, path=path)]:
        packages = "qemu-system-x86 debootstrap e2fsprogs busybox-static xz-utils"
        pytest.skip(f"no {missing[0]}; to enable it on Debian: apt-get install {packages}")
    made = paths.cache() / "vm" / "cloud-init"
    if not made.is_dir():
        making = made.with_name(f"cloud-init-making-{os.getpid()}")
        making.mkdir(parents=True)
        environment = {**os.environ, "PATH": path, "PACKAGES": PACKAGES}
        done = subprocess.run(
            ["sh", "-c", _MAKE], cwd=making, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            shutil.rmtree(making)
            pytest.skip(f"the image cannot be made: {(done.stderr or done.stdout)[-300:]}")
        making.rename(made)
    return made


@contextmanager
def booted(root: Path, user_data: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A machine with this user data, and the port of its sshd. It is emulated, since KVM may not work."""
    made = image()
    initramfs = root / "initramfs"
    shutil.copytree(made / "initramfs", initramfs)
    (initramfs / "seed").mkdir()
    (initramfs / "seed" / "user-data").write_text(user_data)
    (initramfs / "seed" / "meta-data").write_text(f"instance-id: i-{time.time():.0f}\n")
    (initramfs / "init").write_text(_INIT)
    (initramfs / "init").chmod(0o755)
    pack = f"find . | busybox cpio -o -H newc >{root}/initramfs.cpio"
    subprocess.run(["sh", "-c", pack], cwd=initramfs, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [
        *("qemu-system-x86_64", "-M", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
        *("-m", "1024", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(made / "vmlinuz"), "-initrd", f"{root}/initramfs.cpio"),
        *("-append", "console=ttyS0 mitigations=off nokaslr panic=-1", "-serial", f"file:{root}/console"),
        *("-drive", f"file={made}/root.ext4,format=raw,if=virtio,snapshot=on"),
        *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"),
        *("-device", "virtio-net-pci,netdev=net"),
    ]
    with subprocess.Popen(command) as process:
        try:
            yield process, port
        finally:
            process.kill()
